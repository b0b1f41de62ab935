"""Versions of distributions, as the doctors print them."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from sft.common.distributions import installed_version


def test_the_version_of_torch_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert installed_version("torch") == "2.11.0+cu130"


def test_other_distributions_have_that_of_their_metadata() -> None:
    assert installed_version("numpy") == importlib.metadata.version("numpy")
    assert installed_version("no-such-distribution") is None
