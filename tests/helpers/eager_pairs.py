"""A plain model and a compiled one that start alike, and the question whether they still are."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

import sft
from tests.helpers.exactness import gradient_errors, param_grads, relative_error
from tests.helpers.models import ConvNet, seeded

__all__ = ["OPTIONS", "SHAPE", "assert_same_grads", "assert_same_state", "pair"]

SHAPE = (2, 3, 20, 12)
OPTIONS = sft.Options(tile=(6, 12))


def pair(make: Callable[[], nn.Module] = ConvNet, shape: tuple[int, ...] = SHAPE) -> tuple[nn.Module, nn.Module]:
    """Plain and compiled, with parameters of their own."""
    model = seeded(make)
    return model, sft.compile(copy.deepcopy(model), shape, options=sft.Options(tile=(6, shape[3])))


def assert_same_grads(ours: nn.Module, eager: nn.Module) -> None:
    """To rounding."""
    assert max(gradient_errors(param_grads(ours), param_grads(eager)).values()) <= 1e-11


def assert_same_state(ours: nn.Module, eager: nn.Module, tolerance: float = 1e-9) -> None:
    """Parameters and buffers, under the same names."""
    theirs = eager.state_dict()
    assert list(ours.state_dict()) == list(theirs)
    for name, value in ours.state_dict().items():
        assert relative_error(value, theirs[name]) <= tolerance, name
