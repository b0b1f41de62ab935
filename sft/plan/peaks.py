"""What part of a model needs, read off one program of all of it.

Every instruction of a program belongs to an operator, so the program of a run also tells what the operators before any place (or behind
it) would need alone. Of the operators before a place less runs than their instructions in the long program: what only operators behind it
read is not made, and dies earlier if others read it too. ``prefix_peaks`` finds for every instruction the first place at which it runs, in
one pass from the end, which is the rule by which programs drop dead instructions (``sft.lower.emitter``) for all places at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sft.lower.emitter import Emitter
from sft.lower.program import Instruction

__all__ = ["prefix_peaks", "suffix_peaks"]

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


def prefix_peaks(emitter: Emitter, place: Mapping[str, int], cuts: Iterable[int]) -> Floats:
    """The same of the operators before each cut, if they were a program of their own.

    The value of the last operator before a cut crosses it: it is nobody's carried row there.

    Args:
        emitter: holds the program of all operators, which need not be finished; dead instructions are dropped.
        place: where each operator stands.
        cuts: places.
    """
    used = emitter.pruned_slots()
    instructions = emitter.instructions
    # A result's rows are there from the place behind its reader on, a gradient of a parameter at once.
    needed = {slot.root: 0 for slot in emitter.ports.values()}
    for port, slot in emitter.results.items():
        carried = port.role in ("append", "grad_carry")
        needed[slot.root] = min(needed.get(slot.root, len(place) + 2), place[port.name] + 2 if carried and port.name in place else 0)
    kept = {slot.root for slot in emitter.results.values()}
    first = [0] * len(instructions)
    never = len(place) + 1
    for time in range(len(instructions) - 1, -1, -1):
        instruction, runs_at = instructions[time], never
        for out in instruction.outputs:
            if out is not None:
                at = needed.get(out.root, never)
                if at < runs_at:
                    runs_at = at
        for slot in instruction.writes:
            at = needed.get(slot.root, never)
            if at < runs_at:
                runs_at = at
        own = place[instruction.owner] + 1
        if own > runs_at:
            runs_at = own
        first[time] = runs_at
        for slot in used[time]:
            if needed.get(slot.root, never) > runs_at:
                needed[slot.root] = runs_at
    uses: dict[int, list[tuple[int, int]]] = {}
    sized: dict[int, int] = {}
    cuts = list(cuts)
    events = _Events([cut + 1 for cut in cuts], len(instructions))
    for time, instruction in enumerate(instructions):
        use = (first[time], time)
        for out in instruction.outputs:
            if out is not None:
                root = out.root
                if root == out.number:
                    sized[root] = out.num_bytes
                    events.made(first[time], time, out.num_bytes)
                    uses[root] = [use]
                elif root in uses:
                    uses[root].append(use)
        for slot in used[time]:
            if slot.root in uses:
                uses[slot.root].append(use)
    for root, num_bytes in sized.items():
        last = -1
        if root in kept:
            continue
        for start, time in sorted(uses[root]):
            if time > last:
                if last >= 0:
                    events.freed(start, last, -num_bytes)
                events.freed(start, time, num_bytes)
                last = time
    starts = np.array(first, dtype=np.int64)
    return np.array([_most(events.before(cut + 1), starts <= cut) for cut in cuts])


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
