"""What a strip holds while it runs, and the part of it that fewer operators would hold, at any width.

Every instruction of a program belongs to an operator, so the program of a run also tells what the operators before any place in it would
need alone. Of these less runs than their instructions in the long program: what only operators behind the place read is not made, and dies
earlier if others read it too. One pass from the end finds for every instruction the first place at which it runs, which is the rule by
which programs drop dead instructions (``sft.lower.program``) for all places at once.

None of this depends on how wide the image is, as long as the strip's rows are the same: then the program has the same instructions, on
tensors of another width. So a strip that was lowered for one size of an image tells what it holds at others. Each storage follows the
columns of the operator that makes it, or of a value that this reads: as many, or a few more or less (a border, the halo of a panel). A
strip that is all of an image follows its rows likewise.

This tells where to look for a plan. No plan is returned before it was lowered, and projected, as it is.

What the operators behind a place need, read off one program of all of them.

Every instruction of a program belongs to an operator, so the program of a run also tells what the operators behind any place would need
alone. (Those before a place: ``sft.planner.cost.strip_memory``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo
from sft.lower.program import Instruction, Port, Slot
from sft.planner.cost.roofline import DeviceRates, num_calls

__all__ = ["ExtentsByAxis", "StripMemoryModel", "suffix_peaks"]

#: For each axis along which strips of the same program may differ (columns; rows, where a strip is all of an image): how many a strip has
#: of each streamed value, sources first, then operators, in their order. Of names nothing depends, so that equal runs share an outline.
ExtentsByAxis = Mapping[int, Sequence[int]]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: A storage's columns are those of a value if they differ by less than so many, and by no more than there are.
_MAX_BORDER = 128


class StripMemoryModel:
    """The storages of one strip.

    Args:
        emitter: holds the program of all operators, which need not be finished; dead instructions are dropped.
        scope: what it was lowered for.
        extents: of this strip.
        place: where each operator stands.
        cuts: places.
    """

    def __init__(
        self, emitter: ProgramBuilder, scope: SegmentInfo, extents: ExtentsByAxis, place: Mapping[str, int], cuts: Iterable[int]
    ) -> None:
        self._cuts = np.array(list(cuts), dtype=np.int64)
        self._sizes = _StorageSizes(scope, extents, emitter)
        used = emitter.pruned_slots()
        first = _first_places(emitter, used, place)
        self._owners = np.array([place[i.owner] for i in emitter.instructions], dtype=np.int64)
        self._num_calls = np.array([num_calls(i) for i in emitter.instructions], dtype=np.float64)
        #: of each storage the instruction that makes it
        self._makers = np.zeros(0, dtype=np.int64)
        self._list_changes(emitter, used, first)
        self._ports = [(port, self._sizes.add(slot, port.name)) for port, slot in emitter.ports.items()]
        self._sizes.finish()

    def _list_changes(self, emitter: ProgramBuilder, used: Sequence[Sequence[Slot]], first: Sequence[int]) -> None:
        """Which storage comes or goes at which instruction, from which place on."""
        makers: list[int] = []
        uses: dict[int, list[tuple[int, int]]] = {}
        number_of: dict[int, int] = {}
        for time, instruction in enumerate(emitter.instructions):
            use = (first[time], time)
            for out in instruction.outputs:
                if out is not None:
                    root = out.root
                    if root == out.number:
                        number_of[root] = self._sizes.add(out, instruction.owner)
                        makers.append(time)
                        uses[root] = [use]
                    elif root in uses:
                        uses[root].append(use)
            for slot in used[time]:
                if slot.root in uses:
                    uses[slot.root].append(use)
        kept = {slot.root for slot in emitter.results.values()}
        # What is alive changes when something comes; what goes has gone when something comes the next time.
        comes = np.cumsum(np.bincount(makers, minlength=len(first)).astype(bool)) - 1
        at, after = comes.tolist(), (comes + 1).tolist()
        self._num_times = after[-1] + 1 if makers else 1
        #: where it begins to count, when, which storage, come or gone
        changes: list[tuple[int, int, int, int]] = []
        for root, number in number_of.items():
            maker = makers[number]
            changes.append((first[maker], at[maker], number, 1))
            if root in kept:
                continue
            last = -1
            for start, time in sorted(uses[root]):
                if time > last:
                    if last >= 0:
                        changes.append((start, after[last], number, 1))
                    changes.append((start, after[time], number, -1))
                    last = time
        self._makers = np.array(makers, dtype=np.int64)
        starts, times, storages, signs = np.array(changes, dtype=np.int64).reshape(-1, 4).T
        # Of places only those between two cuts are told apart.
        self._ends = np.unique(self._cuts) + 1
        self._cells = np.searchsorted(self._ends, starts, side="right") * self._num_times + times
        self._storages, self._signs = storages, signs.astype(np.float64)

    def peaks(self, extents: ExtentsByAxis) -> Floats:
        """Most bytes alive at once of the operators before each cut, if they were a program of their own.

        The value of the last operator before a cut crosses it: it is nobody's carried row there.

        Args:
            extents: of the strip.
        """
        if not len(self._makers):
            return np.zeros(len(self._cuts))
        sizes = self._sizes.at(extents)
        weights = self._signs * sizes[self._storages]
        num_ends, num_times = len(self._ends), self._num_times
        alive = np.bincount(self._cells, weights=weights, minlength=(num_ends + 1) * num_times).reshape(num_ends + 1, num_times)[:num_ends]
        np.cumsum(alive, axis=0, out=alive)
        np.cumsum(alive, axis=1, out=alive)
        found: Floats = alive.max(axis=1)[np.searchsorted(self._ends, self._cuts + 1)]
        return found

    def overheads(self, extents: ExtentsByAxis, rates: DeviceRates) -> Floats:
        """What the instructions of the operators before each cut cost besides FLOPs; arguments as of :meth:`peaks`."""
        sizes = self._sizes.at(extents)[: len(self._makers)]
        num_bytes: Floats = np.bincount(self._makers, weights=sizes, minlength=len(self._owners)).astype(np.float64)
        costs = rates.overheads(self._num_calls, num_bytes)
        total = np.concatenate([[0.0], np.cumsum(np.bincount(self._owners, weights=costs, minlength=1))])
        found: Floats = total[np.minimum(self._cuts, len(total) - 1)]
        return found

    def ports(self, extents: ExtentsByAxis) -> list[tuple[Port, float]]:
        """The tensors that are not the strip's own, with their bytes; arguments as of :meth:`peaks`."""
        sizes = self._sizes.at(extents)
        return [(port, float(sizes[number])) for port, number in self._ports]


class _StorageSizes:
    """Bytes of storages as functions of the columns (and rows) of values."""

    def __init__(self, scope: SegmentInfo, extents: ExtentsByAxis, emitter: ProgramBuilder) -> None:
        self._graph, self._axes = scope.graph, scope.axes
        self._names = tuple(name for name in (*scope.sources, *scope.names) if name in scope.streamed)
        self._index = {name: number for number, name in enumerate(self._names)}
        self._extents = self._listed(extents)
        self._whole = {slot.shape for port, slot in emitter.ports.items() if port.role in ("side", "grad_side")}
        self._rows: list[tuple[float, list[tuple[int, int]]]] = []
        self._base: Floats = np.zeros(0)
        self._laws: list[tuple[Ints, Ints]] = []

    def _listed(self, extents: ExtentsByAxis) -> list[tuple[int, Ints]]:
        """For each axis the extents of all values; behind them 1, for what does not depend on them."""
        return [(axis, np.array([*known, 1], dtype=np.int64)) for axis, known in extents.items()]

    def add(self, slot: Slot, owner: str) -> int:
        """Take down a storage; returns its number."""
        base = slot.dtype.itemsize
        dims = list(slot.shape)
        laws = []
        for axis, extents in self._extents:
            law = (len(self._names), 0)
            dim = self._axes.dim(len(dims), axis)
            if dim is not None and len(dims) >= self._axes.rank and slot.shape not in self._whole:
                candidates = [self._index[name] for name in self._near(owner) if name in self._index]
                nearest = min(candidates, key=lambda number: abs(dims[dim] - int(extents[number])), default=None)
                border = 0 if nearest is None else dims[dim] - int(extents[nearest])
                if nearest is not None and abs(border) < min(_MAX_BORDER, dims[dim] + 1):
                    law = (nearest, border)
                    dims[dim] = 1
            laws.append(law)
        for extent in dims:
            base *= extent
        self._rows.append((float(base), laws))
        return len(self._rows) - 1

    def _near(self, owner: str) -> tuple[str, ...]:
        """The values that a storage of an operator, or of a value from outside, may follow."""
        return (owner, *self._graph[owner].operands)

    def finish(self) -> None:
        """Nothing is added any more."""
        self._base = np.array([base for base, _ in self._rows])
        for position in range(len(self._extents)):
            laws = np.array([laws[position] for _, laws in self._rows], dtype=np.int64).reshape(-1, 2)
            self._laws.append((laws[:, 0], laws[:, 1]))
        self._rows.clear()

    def at(self, extents: ExtentsByAxis) -> Floats:
        """Bytes of all storages."""
        found = self._base
        for (_, known), (index, offset) in zip(self._listed(extents), self._laws, strict=True):
            found = found * np.maximum(0, known[index] + offset)
        return found


def _first_places(emitter: ProgramBuilder, used: Sequence[Sequence[Slot]], place: Mapping[str, int]) -> list[int]:
    """For each instruction the first place at which it runs: one behind that of its operator at least."""
    # A result's rows are there from the place behind its reader on, a gradient of a parameter at once.
    needed = {slot.root: 0 for slot in emitter.ports.values()}
    for port, slot in emitter.results.items():
        carried = port.role in ("append", "grad_carry")
        needed[slot.root] = min(needed.get(slot.root, len(place) + 2), place[port.name] + 2 if carried and port.name in place else 0)
    first = [0] * len(emitter.instructions)
    never = len(place) + 1
    for time in range(len(first) - 1, -1, -1):
        instruction, runs_at = emitter.instructions[time], never
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
    return first


def suffix_peaks(instructions: Sequence[Instruction], place: Mapping[str, int], cuts: Iterable[int]) -> Floats:
    """Most bytes alive at once in the storages of the operators from each cut on, while those operators run.

    Args:
        instructions: of one program, or of its halves in a row.
        place: where each operator stands.
        cuts: places.
    """
    cuts = np.array(list(cuts), dtype=np.int64)
    #: of each storage its operator's place and its bytes; and when it comes or goes, the storage, come or gone
    owners: list[int] = []
    sizes: list[int] = []
    number_of: dict[int, int] = {}
    changes: list[tuple[int, int, int]] = []
    # What is alive grows when something comes; what goes has gone when something comes the next time.
    times: list[int] = []
    for instruction in instructions:
        made = [out for out in instruction.outputs if out is not None and out.root == out.number]
        if made:
            times.append(place[instruction.owner])
        for out in made:
            number_of[out.number] = len(owners)
            changes.append((len(times) - 1, len(owners), 1))
            owners.append(place[instruction.owner])
            sizes.append(out.num_bytes)
        changes += [(len(times), number_of[number], -1) for number in instruction.frees if number in number_of]
    if not times:
        return np.zeros(len(cuts))
    at, storages, signs = np.array(changes, dtype=np.int64).T
    starts = np.array(owners, dtype=np.int64)[storages]
    # Of places only those between two cuts are told apart; what is made behind a cut counts from the cut on.
    ends = np.unique(cuts)
    cells = np.searchsorted(ends, starts, side="right") * (len(times) + 1) + at
    weights = signs * np.array(sizes, dtype=np.float64)[storages]
    alive = np.bincount(cells, weights=weights, minlength=(len(ends) + 1) * (len(times) + 1)).reshape(len(ends) + 1, -1)[1:, :-1]
    alive = np.cumsum(np.cumsum(alive[::-1], axis=0)[::-1], axis=1)
    alive[np.array(times)[None, :] < ends[:, None]] = 0.0  # it is made by an operator that does not run
    found: Floats = alive.max(axis=1)[np.searchsorted(ends, cuts)]
    return found
