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

__all__ = ["use_rnn_state_shapes"]

_RNN_DECOMPOSITION = "_rnn_helper"


@contextmanager
def use_rnn_state_shapes() -> Iterator[None]:
    """A context in which the formula leaves states ``[N, H]``; all as ever where this torch has another formula."""
    formula = getattr(decompositions, _RNN_DECOMPOSITION, None)
    if formula is None:
        yield
        return

    def result(*args: Any, **kwargs: Any) -> Any:
        out, states = formula(*args, **kwargs)
        return out, [tuple(map(_rnn_with_state_shapes, state)) if isinstance(state, tuple) else state for state in states]

    with mock.patch.object(decompositions, _RNN_DECOMPOSITION, result):
        yield


def _rnn_with_state_shapes(state: Any) -> Any:
    return state.squeeze(0) if state.dim() == 3 else state
