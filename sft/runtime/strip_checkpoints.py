"""Which states of a walk are kept, and in which order strips run backwards.

A walk over ``n`` strips passes the states ``0..n`` (state ``s`` is what strip ``s`` starts from; state 0 is empty). Two policies say which
of them are held.

*Every k-th.* The backward pass takes the groups of ``k`` strips from the last to the first: it restores the states inside a group from the
group's own, then differentiates the group's strips in reverse. The last group's states are kept by the forward pass, since they are
needed first. About ``n / k + k`` states at once; strips restored: ``(num_groups - 1) * (k - 1)``, less than one more forward pass.

*A number of slots.* States are themselves checkpointed: with ``c`` slots and ``r`` repetitions ``binomial(c + r, c)`` strips can be
reversed, none run more than ``r`` times, and no schedule of ``c`` slots runs fewer strips in all. From a held state the walk runs on to
the next one, reverses what lies behind that with one slot less, gives the slot back, and reverses what lies before it. So a few states
serve any number of strips, for one more forward pass each time ``n`` outgrows the binomial. Source: Griewank and Walther, "Algorithm
799: Revolve", ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal

__all__ = ["CheckpointAction", "Checkpoints"]


@dataclass(frozen=True, slots=True)
class CheckpointAction:
    """One event of the backward walk: run strip ``strip`` forward, to get the next state, or backward.

    Attributes:
        kind: ``"forward"``, or ``"joint"`` (which ends the use of the strip's own state).
        strip: the strip.
        drops: whether a forward run ends the use of the strip's own state.
    """

    kind: Literal["forward", "joint"]
    strip: int
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A policy.

    Attributes:
        every: a state is kept every so many strips.
        slots: if not 0, so many states at most are held instead, and the one that is being restored.
    """

    every: int = 1
    slots: int = 0

    def kept(self, num_strips: int) -> frozenset[int]:
        """The states that the forward pass keeps.

        >>> sorted(Checkpoints(3).kept(7)), sorted(Checkpoints(3).kept(6)), sorted(Checkpoints(slots=3).kept(10))
        ([0, 3, 6], [0, 3, 4, 5], [0, 4, 7])
        """
        if not self.slots:
            last = (num_strips - 1) // self.every * self.every
            return frozenset([*range(0, last, self.every), *range(last, num_strips)])
        found, free = [0], self.slots - 1
        while free and num_strips - found[-1] > 1:
            found.append(found[-1] + _advance(num_strips - found[-1], free))
            free -= 1
        return frozenset(found)

    def actions(self, num_strips: int) -> tuple[CheckpointAction, ...]:
        """The backward walk.

        >>> "".join(f"{a.kind[0]}{a.strip} " for a in Checkpoints(3).actions(7)).strip()
        'j6 f3 f4 j5 j4 j3 f0 f1 j2 j1 j0'
        >>> "".join(f"{a.kind[0]}{a.strip} " for a in Checkpoints(slots=2).actions(6)).strip()
        'f3 f4 j5 f3 j4 j3 f0 f1 j2 j1 j0'
        """
        return _actions(self, num_strips)

    def _in_order(self, num_strips: int) -> Iterator[CheckpointAction]:
        return self._revolve(num_strips) if self.slots else self._groups(num_strips)

    def _groups(self, num_strips: int) -> Iterator[CheckpointAction]:
        last = (num_strips - 1) // self.every * self.every
        for start in range(last, -1, -self.every):
            stop = min(start + self.every, num_strips)
            if start != last:
                for strip in range(start, stop - 1):
                    yield CheckpointAction("forward", strip)
            for strip in range(stop - 1, start - 1, -1):
                yield CheckpointAction("joint", strip)

    def _revolve(self, num_strips: int) -> Iterator[CheckpointAction]:
        # Parts still to be reversed, the next one last: first and last+1 strip, free slots, whether its inner states are held already.
        parts = [(0, num_strips, self.slots - 1, True)]
        while parts:
            start, stop, free, is_placed = parts.pop()
            if stop - start == 1:
                yield CheckpointAction("joint", start)
            elif not free:
                for last in range(stop - 1, start - 1, -1):
                    yield from _forward_actions(start, last)
                    yield CheckpointAction("joint", last)
            else:
                middle = start + _advance(stop - start, free)
                if not is_placed:
                    yield from _forward_actions(start, middle)
                parts += [(start, middle, free, False), (middle, stop, free - 1, is_placed)]

    def num_restored(self, num_strips: int) -> int:
        """Strips that run forward once more just to restore states.

        >>> Checkpoints(3).num_restored(7), Checkpoints(1).num_restored(9), Checkpoints(slots=2).num_restored(6)
        (4, 0, 5)
        """
        if not self.slots:
            return (num_strips - 1) // self.every * (self.every - 1)
        return _num_restored(self, num_strips)


# Each phase of a network is surveyed for the same policies and numbers of strips.
@lru_cache(maxsize=1024)
def _num_restored(checkpoints: Checkpoints, num_strips: int) -> int:
    """Where states are held in slots: the walk there is counted for the states that the forward pass has kept."""
    repetitions = _max_repetitions(num_strips, checkpoints.slots)
    in_all = repetitions * num_strips - comb(checkpoints.slots + repetitions, repetitions - 1) if repetitions else 0
    return in_all - max(checkpoints.kept(num_strips))


# A plan is projected several times, and then run.
@lru_cache(maxsize=16)
def _actions(checkpoints: Checkpoints, num_strips: int) -> tuple[CheckpointAction, ...]:
    return tuple(checkpoints._in_order(num_strips))


def _forward_actions(start: int, stop: int) -> Iterator[CheckpointAction]:
    """Forward from the held state ``start`` to ``stop``; the states between are not held."""
    for strip in range(start, stop):
        yield CheckpointAction("forward", strip, drops=strip > start)


def _advance(num_strips: int, free: int) -> int:
    """How far to run on to the next state to hold, with ``free`` slots to give (Griewank and Walther, section 2)."""
    repetitions = max(1, _max_repetitions(num_strips, free + 1))
    # What lies before needs one repetition less, what lies behind one slot less.
    return max(1, min(comb(free + repetitions, repetitions - 1), num_strips - comb(free + repetitions - 1, repetitions - 1)))


def _max_repetitions(num_strips: int, slots: int) -> int:
    """How often a strip runs at most: the least number for which the binomial is enough; ``r n - binomial(c + r, r - 1)`` run in all."""
    enough = 1
    while comb(slots + enough, enough) < num_strips:
        enough *= 2
    return bisect_left(range(enough + 1), num_strips, key=lambda repetitions: comb(slots + repetitions, repetitions))
