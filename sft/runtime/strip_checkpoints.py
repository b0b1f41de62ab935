"""Checkpoint policies of a sweep: the states that are kept, and the order in which strips run backward.

A sweep over ``n`` strips passes the states ``0..n``; state ``s`` is the carried rows that strip ``s`` starts from, and state 0 is empty.

*Every k-th state.* The backward sweep takes groups of ``k`` strips from the last to the first: it restores the states inside a group from
the group's first, then differentiates the group's strips in reverse. The forward sweep keeps the states of the last group, since they are
needed first. About ``n / k + k`` states are retained at once; ``(num_groups - 1) * (k - 1)`` strips are restored, less than one more
forward sweep.

*A number of slots.* With ``c`` slots and ``r`` repetitions, ``binomial(c + r, c)`` strips can be reversed, none runs forward more than
``r`` times, and no schedule with ``c`` slots runs fewer strips in total. From a retained state the sweep advances to the next one,
reverses the strips after that with one slot less, frees the slot, and reverses the strips before it. A few states thus serve any number of
strips, for one more forward sweep each time ``n`` outgrows the binomial. Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS
26(1), 2000.
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
    """Action of the backward sweep: run a strip forward to compute the next state, or backward.

    Attributes:
        kind: ``"forward"``, or ``"joint"`` (forward and backward in one program, which releases the strip's state).
        strip: index of the strip.
        drops: True if a forward run releases the strip's state.
    """

    kind: Literal["forward", "joint"]
    strip: int
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoint policy.

    Attributes:
        every: number of strips from one kept state to the next.
        slots: if not 0, maximum number of retained states instead, not counting the state that is being restored.
    """

    every: int = 1
    slots: int = 0

    def kept(self, num_strips: int) -> frozenset[int]:
        """Indices of the states that the forward sweep keeps.

        >>> sorted(Checkpoints(3).kept(7)), sorted(Checkpoints(3).kept(6)), sorted(Checkpoints(slots=3).kept(10))
        ([0, 3, 6], [0, 3, 4, 5], [0, 4, 7])
        """
        if not self.slots:
            last = (num_strips - 1) // self.every * self.every
            return frozenset([*range(0, last, self.every), *range(last, num_strips)])
        states, free = [0], self.slots - 1
        while free and num_strips - states[-1] > 1:
            states.append(states[-1] + _advance(num_strips - states[-1], free))
            free -= 1
        return frozenset(states)

    def actions(self, num_strips: int) -> tuple[CheckpointAction, ...]:
        """Actions of the backward sweep, in order.

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
        # Ranges still to be reversed, the next one last: first and end strip, free slots, True if its inner states are retained already.
        ranges = [(0, num_strips, self.slots - 1, True)]
        while ranges:
            start, stop, free, is_restored = ranges.pop()
            if stop - start == 1:
                yield CheckpointAction("joint", start)
            elif not free:
                for last in range(stop - 1, start - 1, -1):
                    yield from _forward_actions(start, last)
                    yield CheckpointAction("joint", last)
            else:
                middle = start + _advance(stop - start, free)
                if not is_restored:
                    yield from _forward_actions(start, middle)
                ranges += [(start, middle, free, False), (middle, stop, free - 1, is_restored)]

    def num_restored(self, num_strips: int) -> int:
        """Number of forward runs in the backward sweep that only restore states.

        >>> Checkpoints(3).num_restored(7), Checkpoints(1).num_restored(9), Checkpoints(slots=2).num_restored(6)
        (4, 0, 5)
        """
        if not self.slots:
            return (num_strips - 1) // self.every * (self.every - 1)
        return _num_restored(self, num_strips)


# A survey evaluates each phase of a network for the same policies and numbers of strips.
@lru_cache(maxsize=1024)
def _num_restored(checkpoints: Checkpoints, num_strips: int) -> int:
    """Number of restored strips for a policy with slots; the advance to the states that the forward sweep keeps is not counted."""
    repetitions = _max_repetitions(num_strips, checkpoints.slots)
    num_forwards = repetitions * num_strips - comb(checkpoints.slots + repetitions, repetitions - 1) if repetitions else 0
    return num_forwards - max(checkpoints.kept(num_strips))


# A plan is projected several times, and then run.
@lru_cache(maxsize=16)
def _actions(checkpoints: Checkpoints, num_strips: int) -> tuple[CheckpointAction, ...]:
    return tuple(checkpoints._in_order(num_strips))


def _forward_actions(start: int, stop: int) -> Iterator[CheckpointAction]:
    """Forward runs from the retained state ``start`` to ``stop``; the states between are not retained."""
    for strip in range(start, stop):
        yield CheckpointAction("forward", strip, drops=strip > start)


def _advance(num_strips: int, free: int) -> int:
    """Number of strips to the next state to retain, with ``free`` slots left (Griewank and Walther, section 2)."""
    repetitions = max(1, _max_repetitions(num_strips, free + 1))
    # The strips before that state need one repetition less, the strips after it one slot less.
    return max(1, min(comb(free + repetitions, repetitions - 1), num_strips - comb(free + repetitions - 1, repetitions - 1)))


def _max_repetitions(num_strips: int, slots: int) -> int:
    """Maximum number of forward runs of a strip: the least ``r`` with ``binomial(c + r, r) >= n``.

    Altogether ``r n - binomial(c + r, r - 1)`` strips run forward.
    """
    bound = 1
    while comb(slots + bound, bound) < num_strips:
        bound *= 2
    return bisect_left(range(bound + 1), num_strips, key=lambda repetitions: comb(slots + repetitions, repetitions))
