"""Parametric memory profiles: peak bytes of a strip program for every prefix of its operators, at any width; and of every suffix.

Every instruction of a program belongs to an operator. So the program of a run also gives the peak of each prefix of the run: the operators
before a position. A prefix runs fewer of these instructions: values that only operators after the position read are not computed, and
values that both read are freed earlier. One pass from the end finds the first position at which each instruction runs, which applies the
rule for dead instructions (``sft.lower.program``) to all positions at once. For suffixes of an untiled program (:func:`suffix_peaks`) the
storages of the operators from a position on are counted.

The profile does not depend on the width of the image if the rows of the strip are the same: the program then has the same instructions, on
tensors of another width. So a strip lowered for one image size gives the bytes at other sizes. The columns of a storage equal those of the
operator that makes it, or of an operand, plus a constant (a border, the halo of a panel). The rows of a strip that is the full image are
treated in the same way.

These are estimates for the search; a plan is always lowered and projected at its own size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sft.common.array_types import FloatArray, IntArray
from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo
from sft.lower.program import Instruction, Port, Slot
from sft.planner.cost.device_rates import DeviceRates, num_calls

__all__ = ["ExtentsByAxis", "StripMemoryModel", "suffix_peaks"]

#: Extents of all streamed values (sources first, then operators, in order) along each axis in which strips of one program may differ:
#: columns, and rows if a strip is the full image. Values are listed without names, so that equal runs share a profile.
ExtentsByAxis = Mapping[int, Sequence[int]]


#: Columns of a storage follow those of a value if they differ by less than this, and by at most the storage's own number.
_MAX_BORDER = 128


class StripMemoryModel:
    """Storages of one strip program, as functions of its extents.

    Args:
        builder: program of all operators, possibly unfinished; dead instructions are dropped.
        scope: the segment that it was lowered for.
        extents: extents of this strip.
        index_of: index of each operator in the run.
        cuts: prefix lengths for which peaks are computed.
    """

    def __init__(
        self, builder: ProgramBuilder, scope: SegmentInfo, extents: ExtentsByAxis, index_of: Mapping[str, int], cuts: Iterable[int]
    ) -> None:
        self._cuts = np.array(list(cuts), dtype=np.int64)
        self._sizes = _StorageSizes(scope, extents, builder)
        used = builder.pruned_slots()
        first = _first_positions(builder, used, index_of)
        self._owners = np.array([index_of[i.owner] for i in builder.instructions], dtype=np.int64)
        self._num_calls = np.array([num_calls(i) for i in builder.instructions], dtype=np.float64)
        #: index of the instruction that makes each storage
        self._makers = np.zeros(0, dtype=np.int64)
        self._list_changes(builder, used, first)
        self._ports = [(port, self._sizes.add(slot, port.name)) for port, slot in builder.ports.items()]
        self._sizes.finish()

    def _list_changes(self, builder: ProgramBuilder, used: Sequence[Sequence[Slot]], first: Sequence[int]) -> None:
        """List allocations and frees: storage, instruction, and the prefix length from which on each happens."""
        makers: list[int] = []
        uses: dict[int, list[tuple[int, int]]] = {}
        number_of: dict[int, int] = {}
        for time, instruction in enumerate(builder.instructions):
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
        results = {slot.root for slot in builder.results.values()}
        # Only times of allocations matter for the peak; a free takes effect at the next allocation.
        allocations = np.cumsum(np.bincount(makers, minlength=len(first)).astype(bool)) - 1
        at, after = allocations.tolist(), (allocations + 1).tolist()
        self._num_times = after[-1] + 1 if makers else 1
        #: (first prefix length, time, storage, +1 for allocated or -1 for freed)
        changes: list[tuple[int, int, int, int]] = []
        for root, number in number_of.items():
            maker = makers[number]
            changes.append((first[maker], at[maker], number, 1))
            if root in results:
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
        # Prefix lengths between two cuts are equivalent.
        self._ends = np.unique(self._cuts) + 1
        self._cells = np.searchsorted(self._ends, starts, side="right") * self._num_times + times
        self._storages, self._signs = storages, signs.astype(np.float64)

    def peaks(self, extents: ExtentsByAxis) -> FloatArray:
        """Peak bytes of each prefix, as if it were a program of its own.

        The value of the last operator before a cut crosses it: it is not counted among the carried rows.

        Args:
            extents: extents of the strip.
        """
        if not len(self._makers):
            return np.zeros(len(self._cuts))
        sizes = self._sizes.at(extents)
        weights = self._signs * sizes[self._storages]
        num_ends, num_times = len(self._ends), self._num_times
        alive = np.bincount(self._cells, weights=weights, minlength=(num_ends + 1) * num_times).reshape(num_ends + 1, num_times)[:num_ends]
        np.cumsum(alive, axis=0, out=alive)
        np.cumsum(alive, axis=1, out=alive)
        peaks: FloatArray = alive.max(axis=1)[np.searchsorted(self._ends, self._cuts + 1)]
        return peaks

    def overheads(self, extents: ExtentsByAxis, rates: DeviceRates) -> FloatArray:
        """Cost of the instructions of each prefix in addition to FLOPs; ``extents`` as in :meth:`peaks`."""
        sizes = self._sizes.at(extents)[: len(self._makers)]
        num_bytes: FloatArray = np.bincount(self._makers, weights=sizes, minlength=len(self._owners)).astype(np.float64)
        costs = rates.overheads(self._num_calls, num_bytes)
        total = np.concatenate([[0.0], np.cumsum(np.bincount(self._owners, weights=costs, minlength=1))])
        overheads: FloatArray = total[np.minimum(self._cuts, len(total) - 1)]
        return overheads

    def ports(self, extents: ExtentsByAxis) -> list[tuple[Port, float]]:
        """Tensors that enter the strip from outside, with their bytes; ``extents`` as in :meth:`peaks`."""
        sizes = self._sizes.at(extents)
        return [(port, float(sizes[number])) for port, number in self._ports]


class _StorageSizes:
    """Bytes of storages as functions of the columns (and rows) of streamed values."""

    def __init__(self, scope: SegmentInfo, extents: ExtentsByAxis, builder: ProgramBuilder) -> None:
        self._graph, self._axes = scope.graph, scope.axes
        self._names = tuple(name for name in (*scope.sources, *scope.names) if name in scope.streamed)
        self._index = {name: number for number, name in enumerate(self._names)}
        self._extents = self._as_arrays(extents)
        self._side_shapes = {slot.shape for port, slot in builder.ports.items() if port.role in ("side", "grad_side")}
        self._rows: list[tuple[float, list[tuple[int, int]]]] = []
        self._base: FloatArray = np.zeros(0)
        #: per axis: index of the value that each storage follows, and the constant offset
        self._followed: list[tuple[IntArray, IntArray]] = []

    def _as_arrays(self, extents: ExtentsByAxis) -> list[tuple[int, IntArray]]:
        """Extents of all values per axis, with a final 1 for storages that follow no value."""
        return [(axis, np.array([*known, 1], dtype=np.int64)) for axis, known in extents.items()]

    def add(self, slot: Slot, owner: str) -> int:
        """Add a storage; returns its number."""
        base = slot.dtype.itemsize
        dims = list(slot.shape)
        followed = []
        for axis, extents in self._extents:
            value_and_offset = (len(self._names), 0)
            dim = self._axes.dim(len(dims), axis)
            if dim is not None and len(dims) >= self._axes.rank and slot.shape not in self._side_shapes:
                candidates = [self._index[name] for name in (owner, *self._graph[owner].operands) if name in self._index]
                nearest = min(candidates, key=lambda number: abs(dims[dim] - int(extents[number])), default=None)
                offset = 0 if nearest is None else dims[dim] - int(extents[nearest])
                if nearest is not None and abs(offset) < min(_MAX_BORDER, dims[dim] + 1):
                    value_and_offset = (nearest, offset)
                    dims[dim] = 1
            followed.append(value_and_offset)
        for extent in dims:
            base *= extent
        self._rows.append((float(base), followed))
        return len(self._rows) - 1

    def finish(self) -> None:
        """Convert to arrays after the last storage."""
        self._base = np.array([base for base, _ in self._rows])
        for position in range(len(self._extents)):
            pairs = np.array([followed[position] for _, followed in self._rows], dtype=np.int64).reshape(-1, 2)
            self._followed.append((pairs[:, 0], pairs[:, 1]))
        self._rows.clear()

    def at(self, extents: ExtentsByAxis) -> FloatArray:
        """Bytes of all storages for these extents."""
        num_bytes = self._base
        for (_, known), (index, offset) in zip(self._as_arrays(extents), self._followed, strict=True):
            num_bytes = num_bytes * np.maximum(0, known[index] + offset)
        return num_bytes


def _first_positions(builder: ProgramBuilder, used: Sequence[Sequence[Slot]], index_of: Mapping[str, int]) -> list[int]:
    """Shortest prefix that runs each instruction: at least one that contains its operator."""
    # A result's rows are needed in prefixes that end after its reader, a gradient of a parameter in all.
    needed = {slot.root: 0 for slot in builder.ports.values()}
    for port, slot in builder.results.items():
        carried = port.role in ("append", "grad_carry")
        position = index_of[port.name] + 2 if carried and port.name in index_of else 0
        needed[slot.root] = min(needed.get(slot.root, len(index_of) + 2), position)
    first = [0] * len(builder.instructions)
    never = len(index_of) + 1
    for time in range(len(first) - 1, -1, -1):
        instruction, runs_at = builder.instructions[time], never
        for out in instruction.outputs:
            if out is not None:
                at = needed.get(out.root, never)
                if at < runs_at:
                    runs_at = at
        for slot in instruction.writes:
            at = needed.get(slot.root, never)
            if at < runs_at:
                runs_at = at
        owner_at = index_of[instruction.owner] + 1
        if owner_at > runs_at:
            runs_at = owner_at
        first[time] = runs_at
        for slot in used[time]:
            if needed.get(slot.root, never) > runs_at:
                needed[slot.root] = runs_at
    return first


def suffix_peaks(instructions: Sequence[Instruction], index_of: Mapping[str, int], cuts: Iterable[int]) -> FloatArray:
    """Peak bytes in the storages of the operators from each cut on, while those operators run.

    Args:
        instructions: instructions of one program, or of its halves in sequence.
        index_of: index of each operator in execution order.
        cuts: number of operators before each suffix.
    """
    cuts = np.array(list(cuts), dtype=np.int64)
    #: index of the operator, and bytes, of each storage
    owners: list[int] = []
    sizes: list[int] = []
    number_of: dict[int, int] = {}
    #: (time, storage, +1 for allocated or -1 for freed)
    changes: list[tuple[int, int, int]] = []
    # Operator of each allocation. Only times of allocations matter; a free takes effect at the next one.
    times: list[int] = []
    for instruction in instructions:
        storages = [out for out in instruction.outputs if out is not None and out.root == out.number]
        if storages:
            times.append(index_of[instruction.owner])
        for out in storages:
            number_of[out.number] = len(owners)
            changes.append((len(times) - 1, len(owners), 1))
            owners.append(index_of[instruction.owner])
            sizes.append(out.num_bytes)
        changes += [(len(times), number_of[number], -1) for number in instruction.frees if number in number_of]
    if not times:
        return np.zeros(len(cuts))
    at, numbers, signs = np.array(changes, dtype=np.int64).T
    starts = np.array(owners, dtype=np.int64)[numbers]
    # Positions between two cuts are equivalent; a storage made after a cut counts from the cut on.
    ends = np.unique(cuts)
    cells = np.searchsorted(ends, starts, side="right") * (len(times) + 1) + at
    weights = signs * np.array(sizes, dtype=np.float64)[numbers]
    alive = np.bincount(cells, weights=weights, minlength=(len(ends) + 1) * (len(times) + 1)).reshape(len(ends) + 1, -1)[1:, :-1]
    alive = np.cumsum(np.cumsum(alive[::-1], axis=0)[::-1], axis=1)
    alive[np.array(times)[None, :] < ends[:, None]] = 0.0  # allocations by operators before the cut
    peaks: FloatArray = alive.max(axis=1)[np.searchsorted(ends, cuts)]
    return peaks
