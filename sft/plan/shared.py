"""What images of several sizes have in common, kept from one planning to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Shared"]

MadeT = TypeVar("MadeT")

#: Things that are kept; those that nobody has asked for longest are forgotten.
_MOST = 512


class Shared:
    """Remembers what was made under a key, up to a number of things."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._known)

    def remembered(self, key: Hashable, make: Callable[[], MadeT]) -> MadeT:
        """What ``make`` returned when it was asked for under this key."""
        found: MadeT = self._known.pop(key) if key in self._known else make()
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = found
        return found
