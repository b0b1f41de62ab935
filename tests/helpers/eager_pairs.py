"""Pairs of a plain and a compiled model with equal parameters, and comparisons of both."""

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
    """A plain and a compiled model, each with its own parameters."""
    model = seeded(make)
    return model, sft.compile(copy.deepcopy(model), shape, options=sft.Options(tile=(6, shape[3])))


def assert_same_grads(ours: nn.Module, eager: nn.Module) -> None:
    """Compare gradients up to rounding."""
    assert max(gradient_errors(param_grads(ours), param_grads(eager)).values()) <= 1e-11


def assert_same_state(ours: nn.Module, eager: nn.Module, tolerance: float = 1e-9) -> None:
    """Compare parameters and buffers by name."""
    theirs = eager.state_dict()
    assert list(ours.state_dict()) == list(theirs)
    for name, value in ours.state_dict().items():
        assert relative_error(value, theirs[name]) <= tolerance, name
