"""What the operators behind a place need, read off one program of all of them.

Every instruction of a program belongs to an operator, so the program of a run also tells what the operators behind any place would need
alone. (Those before a place: ``sft.plan.outline``.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sft.lower.program import Instruction

__all__ = ["suffix_peaks"]

Floats = npt.NDArray[np.float64]


def suffix_peaks(instructions: Sequence[Instruction], place: Mapping[str, int], cuts: Iterable[int]) -> Floats:
    """Most bytes alive at once in the storages of the operators from each cut on, while those operators run.

    Args:
        instructions: of one program, or of its halves in a row.
        place: where each operator stands.
        cuts: places.
    """
    owners = np.array([place[i.owner] for i in instructions], dtype=np.int64)
    num_bytes: dict[int, int] = {}
    owner_of: dict[int, int] = {}
    cuts = list(cuts)
    events = _Events(cuts, len(instructions))
    for time, instruction in enumerate(instructions):
        owner = place[instruction.owner]
        for out in instruction.outputs:
            if out is not None and out.root == out.number:
                num_bytes[out.number], owner_of[out.number] = out.num_bytes, owner
                events.made(owner, time, out.num_bytes)
        for number in instruction.frees:
            if number in num_bytes:
                events.freed(owner_of[number], time, num_bytes[number])
    everything = events.before(len(place) + 1)
    return np.array([_most(everything - events.before(cut), owners >= cut) for cut in cuts])


class _Events:
    """Bytes made and freed at times, by the first place at which they count; of places only those between two cuts are told apart."""

    def __init__(self, cuts: Iterable[int], num_times: int) -> None:
        self._cuts = sorted(set(cuts))
        self._bytes = np.zeros((len(self._cuts) + 1, 2 * num_times))
        self._sums: Floats | None = None

    def made(self, start: int, time: int, num_bytes: int) -> None:
        self._bytes[bisect_right(self._cuts, start), 2 * time] += num_bytes

    def freed(self, start: int, time: int, num_bytes: int) -> None:
        self._bytes[bisect_right(self._cuts, start), 2 * time + 1] -= num_bytes

    def before(self, cut: int) -> Floats:
        """What is made less what is freed at each time, of what counts before a cut (or, behind the last one, of all)."""
        if self._sums is None:
            self._sums = np.cumsum(self._bytes, axis=0)
        found: Floats = self._sums[bisect_left(self._cuts, cut)]
        return found


def _most(changes: Floats, runs: npt.NDArray[np.bool_]) -> float:
    """Most bytes alive at an instruction that runs."""
    return float(np.cumsum(changes)[::2][runs].max(initial=0.0))
