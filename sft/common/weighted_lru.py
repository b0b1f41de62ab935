"""A least-recently-used cache with weights, for results shared by the plans of several image sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["WeightedLRU"]

ValueT = TypeVar("ValueT")

#: Maximal total weight; the least recently used values are evicted first.
_MAX_WEIGHT = 1 << 16


class WeightedLRU:
    """Cache of values by key, bounded by their total weight."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[int, Any]] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_make(self, key: Hashable, make: Callable[[], ValueT], weight: int = 1) -> ValueT:
        """Return the cached value of a key, creating it on a miss.

        Args:
            key: the key.
            make: creates the value.
            weight: the value's share of the capacity.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = (weight, make())
            self._weight += weight
        while self._entries and self._weight > _MAX_WEIGHT:
            self._weight -= self._entries.pop(next(iter(self._entries)))[0]
        self._entries[key] = entry
        value: ValueT = entry[1]
        return value
