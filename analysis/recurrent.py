"""The states that an LSTM leaves, as large as they are.

The exporter keeps an LSTM whole, and finds the shapes of its results by running the formula behind it. Up to torch 2.12 that leaves the
states of each layer with a dimension in front that is one, which eager PyTorch's have not; what follows would be captured so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._decomp import decompositions

__all__ = ["states_in_shape"]

_FORMULA = "_rnn_helper"


@contextmanager
def states_in_shape() -> Iterator[None]:
    """A context in which the formula leaves states ``[N, H]``; all as ever where this torch has another formula."""
    formula = getattr(decompositions, _FORMULA, None)
    if formula is None:
        yield
        return

    def result(*args: Any, **kwargs: Any) -> Any:
        out, states = formula(*args, **kwargs)
        return out, [tuple(map(_in_shape, state)) if isinstance(state, tuple) else state for state in states]

    with mock.patch.object(decompositions, _FORMULA, result):
        yield


def _in_shape(state: Any) -> Any:
    return state.squeeze(0) if state.dim() == 3 else state
