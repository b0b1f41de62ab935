"""Which states of a walk are kept, and in which order strips run backwards.

A walk over ``n`` strips passes the states ``0..n`` (state ``s`` is what strip ``s`` starts from; state 0 is empty). With a state kept
every ``k`` strips, the backward pass takes the groups of ``k`` strips from the last to the first: it recomputes the states inside a
group from the group's own, then differentiates the group's strips in reverse. The last group's states are kept by the forward pass,
since they are needed first. Strips recomputed in addition: ``(num_groups - 1) * (k - 1)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "backward_actions", "kept_states", "num_recomputed_strips"]


@dataclass(frozen=True, slots=True)
class Action:
    """One event of the backward walk: run strip ``strip`` forward (to get the next state) or backward."""

    kind: Literal["forward", "joint"]
    strip: int


def kept_states(num_strips: int, every: int) -> frozenset[int]:
    """The states that the forward pass keeps.

    >>> sorted(kept_states(7, 3)), sorted(kept_states(6, 3))
    ([0, 3, 6], [0, 3, 4, 5])
    """
    last = (num_strips - 1) // every * every
    return frozenset([*range(0, last, every), *range(last, num_strips)])


def backward_actions(num_strips: int, every: int) -> Iterator[Action]:
    """The backward walk.

    >>> "".join(f"{a.kind[0]}{a.strip} " for a in backward_actions(7, 3)).strip()
    'j6 f3 f4 j5 j4 j3 f0 f1 j2 j1 j0'
    """
    last = (num_strips - 1) // every * every
    for start in range(last, -1, -every):
        stop = min(start + every, num_strips)
        if start != last:
            for strip in range(start, stop - 1):
                yield Action("forward", strip)
        for strip in range(stop - 1, start - 1, -1):
            yield Action("joint", strip)


def num_recomputed_strips(num_strips: int, every: int) -> int:
    """Strips that run forward once more just to restore states.

    >>> num_recomputed_strips(7, 3), num_recomputed_strips(6, 3), num_recomputed_strips(9, 1)
    (4, 2, 0)
    """
    return (num_strips - 1) // every * (every - 1)
