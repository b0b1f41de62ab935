"""Memo: results derived from one planning problem, computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Memo"]

ValueT = TypeVar("ValueT")


class Memo:
    """A dictionary of computed results: segments with their lowered programs, samples, schedules, runs.

    >>> memo = Memo()
    >>> memo.memoize("answer", lambda: 6 * 7), memo.memoize("answer", lambda: 0), len(memo)
    (42, 42, 1)
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._results)

    def memoize(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """Result of ``make``, computed at the first call with this key."""
        if key not in self._results:
            self._results[key] = make()
        value: ValueT = self._results[key]
        return value

    def clear(self) -> None:
        """Drop all results. Most refer to the problem itself, so only the garbage collector would free them otherwise."""
        self._results.clear()
