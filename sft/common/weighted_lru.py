"""What images of several sizes have in common, kept from one planning to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["WeightedLRU"]

MadeT = TypeVar("MadeT")

#: What is kept weighs so much at most; those things that nobody has asked for longest are forgotten.
_MOST = 1 << 16


class WeightedLRU:
    """Remembers what was made under a key, up to a weight of all things together."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, Any]] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._known)

    def remembered(self, key: Hashable, make: Callable[[], MadeT], weight: int = 1) -> MadeT:
        """What ``make`` returned when it was asked for under this key.

        Args:
            key: what it is remembered by.
            make: makes it.
            weight: the larger, the fewer others are kept beside it.
        """
        known = self._known.pop(key, None)
        if known is None:
            known = (weight, make())
            self._weight += weight
        while self._known and self._weight > _MOST:
            self._weight -= self._known.pop(next(iter(self._known)))[0]
        self._known[key] = known
        found: MadeT = known[1]
        return found
