"""Half-open intervals of rows or columns, the arithmetic of all schedules."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The indices ``start <= i < stop`` along one axis; empty when ``stop <= start``.

    >>> Interval(2, 5).intersect(Interval(4, 9)), len(Interval(7, 3))
    (Interval(start=4, stop=5), 0)
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def intersect(self, other: Interval) -> Interval:
        """The indices in both."""
        return Interval(max(self.start, other.start), min(self.stop, other.stop))

    def overlaps(self, other: Interval) -> bool:
        """True if some index is in both.

        >>> Interval(2, 5).overlaps(Interval(4, 9)), Interval(2, 5).overlaps(Interval(5, 9)), Interval(4, 4).overlaps(Interval(2, 9))
        (True, False, False)
        """
        return self.start < other.stop and other.start < self.stop and self.start < self.stop and other.start < other.stop

    def hull(self, other: Interval) -> Interval:
        """The smallest interval that contains both; an empty one adds no index.

        >>> Interval(0, 2).hull(Interval(5, 6)), Interval(0, 2).hull(Interval(9, 9))
        (Interval(start=0, stop=6), Interval(start=0, stop=2))
        """
        if not other:
            return self
        if not self:
            return other
        if self.start <= other.start and other.stop <= self.stop:
            return self
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def shift(self, offset: int) -> Interval:
        """The interval translated by ``offset``."""
        return Interval(self.start + offset, self.stop + offset)

    def clip(self, extent: int) -> Interval:
        """The intersection with ``[0, extent)``, empty at the nearer end if they are disjoint.

        >>> Interval(-3, 2).clip(9), Interval(-3, -1).clip(9), Interval(11, 12).clip(9)
        (Interval(start=0, stop=2), Interval(start=0, stop=0), Interval(start=9, stop=9))
        """
        if 0 <= self.start <= self.stop <= extent:
            return self
        start = min(max(self.start, 0), extent)
        return Interval(start, max(start, min(self.stop, extent)))

    def contains(self, other: Interval) -> bool:
        """True if every index of ``other`` is in this interval."""
        return not other or (self.start <= other.start and other.stop <= self.stop)
