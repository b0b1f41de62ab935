"""Formulas that the exporter would run on fake tensors for the sake of a shape that is known without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._decomp import decompositions

__all__ = ["Decomposition", "override_decomposition"]

Decomposition = Callable[..., Any]


@contextmanager
def override_decomposition(name: str, arguments: tuple[str, ...], made: Callable[[Decomposition], Decomposition]) -> Iterator[None]:
    """A context in which another function stands for a formula of torch; all as ever where this torch has none of that name and arguments.

    Args:
        name: of the formula, in ``torch._decomp.decompositions``.
        arguments: their names, in order.
        made: makes the other function of the formula, which it calls where it knows no better.
    """
    formula: Decomposition | None = getattr(decompositions, name, None)
    if formula is None or tuple(inspect.signature(formula).parameters) != arguments:
        yield
        return
    with mock.patch.object(decompositions, name, made(formula)):
        yield
