"""When rows of a value that crosses a segment's border are made and read, in strips of one band's walks.

Forward, strips run from the top to the bottom, walk after walk (parts of the batch, and panels). So the rows that go to the band above are
there when the last walk has made its first strips, and those that come from below are read by the last strips of the first walk. Back, the
strips run from the bottom to the top, and it is the other way round: gradients of rows that belong to the band below are complete
first, and those that come from above are needed last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sft.analysis.schedule import StripSchedule

__all__ = ["StripTimeline"]


@dataclass(frozen=True, kw_only=True)
class StripTimeline:
    """The strips of a segment on one band; all answers are numbers of strips that run before.

    Attributes:
        schedule: the strips of a walk.
        num_walks: walks in each direction.
    """

    schedule: StripSchedule
    num_walks: int

    @property
    def num_strips(self) -> int:
        """Strips of all walks."""
        return self.schedule.num_steps * self.num_walks

    def made(self, name: str, stop: int) -> int:
        """Forward, until the rows of a result before ``stop`` are made, in all walks."""
        if not self.schedule.num_steps:
            return 0
        return (self.num_walks - 1) * self.schedule.num_steps + int(np.searchsorted(self.schedule.frontier[name], stop))

    def read(self, name: str, start: int) -> int:
        """Forward, before the first of a walk that reads a row of a source from ``start`` on; all of them where none does."""
        _, stops = self.schedule.rows_read(name, self.schedule.names)
        reads = stops > start
        return int(reads.argmax()) if reads.any() else self.schedule.num_steps

    def settled(self, name: str, start: int) -> int:
        """Back, until nothing is added any more to the gradients of a source's rows from ``start`` on."""
        if not self.schedule.num_steps:
            return 0
        return self.num_walks * self.schedule.num_steps - self.read(name, start)

    def wanted(self, name: str, stop: int) -> int:
        """Back, before the first that takes the gradient of a row of a result before ``stop``."""
        if not self.schedule.num_steps:
            return 0
        return self.schedule.num_steps - int(np.searchsorted(self.schedule.frontier[name], stop))
