"""Captures without a row of the table of replacements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft.analysis.frontend.torch_patches import PATCHES


def skip_patch(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Remove rows of the table until the end of a test."""
    for name in names:
        monkeypatch.setitem(PATCHES, name, replace(PATCHES[name], until="2.0"))
