"""What a rank does between the strips of a segment: post messages, wait for messages, go on with sums.

Before a segment runs, things to do are put on its agenda, each with the number of strips that are to run before it. The segment asks for
what is due before each strip, and whatever is left is done behind its last one, in the same order. So a segment that is only added up (by
the planner) does all of it at its end, and counts the same: the clock, by which messages are said to have been under way beside
arithmetic, shows for each entry the strips it was put down for. What the agenda needs (buffers to send from, buffers that arrive) is
allocated before the segment runs and held until it is through, so what is held while it runs does not depend on when messages arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CommQueue"]


@dataclass(slots=True)
class CommQueue:
    """What is to be done while a segment runs, and how much a rank has computed in its step.

    Attributes:
        clock: strips, and segments on whole tensors, that have run so far.
        entries: what is on the agenda of the running segment: strips of it before each entry, and what to do; those done are held, too.
    """

    clock: int = 0
    entries: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    _begin: int = 0
    _num_done: int = 0

    def put(self, num_strips: int, entry: Callable[[], Any]) -> None:
        """Do something when so many strips of the next segment have run, behind what has been put down for that time."""
        assert not self._num_done, "the agenda is made before the segment runs"
        self.entries.append((num_strips, entry))
        self.entries.sort(key=lambda other: other[0])

    def reach(self, num_strips: int) -> None:
        """Do what is due when so many strips of the segment have run."""
        while self._num_done < len(self.entries) and self.entries[self._num_done][0] <= num_strips:
            due, entry = self.entries[self._num_done]
            self._num_done += 1
            self.clock = self._begin + due
            entry()
        self.clock = self._begin + num_strips

    def finish(self, num_strips: int) -> None:
        """Do what is left when the segment, of so many strips, is through."""
        self.reach(num_strips)
        assert self._num_done == len(self.entries), "an entry is due behind the segment's last strip"
        self._begin = self.clock
        self.entries, self._num_done = [], 0
