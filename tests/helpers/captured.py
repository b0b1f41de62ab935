"""Captures that are made once: tests that plan one model in many ways would spend their time on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from sft.analysis.capture import Capture, capture

__all__ = ["remembered_captures"]

_KNOWN: dict[str, Capture] = {}


def _remembered(model: nn.Module, *arguments: Any, **keywords: Any) -> Capture:
    # A captured graph names parameters and does not hold them; what else tells two models apart is in what they print.
    key = repr((type(model), model, model.training, arguments, keywords))
    if key not in _KNOWN:
        _KNOWN[key] = capture(model, *arguments, **keywords)
    return _KNOWN[key]


@contextmanager
def remembered_captures() -> Iterator[None]:
    """Capture models of one description once, until the block ends and in later blocks."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.engine.capture", _remembered)
        yield
