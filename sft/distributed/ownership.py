"""Ownership of the rows of values that cross segment borders: owned rows, halo rows from other bands, and gradients summed over bands.

Of such a value a band has one buffer, with the rows that it owns and the halo rows of its neighbours that any segment reads. After a
segment has computed its rows, the owners send halo rows to the other bands. Before that segment runs backward, the gradients of halo rows
return to the owners and are added, in order of the distance between the bands. So a value is exchanged once in each direction, however many
segments read it, and no exchange happens inside a segment.

Operators on untiled tensors (a tail) run on every rank, on gathered images: the halo is the full image. Their gradients are the same on all
ranks, so they are counted once. Of a value with a gradient summed over bands each band counts its own rows; of an untiled value (a
parameter, a global value) the first band counts the full gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition, row_band_of
from sft.analysis.tiling.strips import RowBand
from sft.common.interval import Interval
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import segment_borders

__all__ = ["OwnershipMap", "RowOwnership", "RowTransfer", "assign_ownership"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTransfer:
    """Rows that one band sends to another.

    Attributes:
        source: the sending band.
        target: the receiving band.
        rows: the rows, in coordinates of the full image.
    """

    source: int
    target: int
    rows: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOwnership:
    """Row ownership of one streamed value that crosses a segment border. Tuples have an entry for each band.

    Attributes:
        owned_rows: the rows that each band owns.
        buffer_rows: the rows of each band's buffer; none for an input that is read strip by strip.
        halo_transfers: rows that owners send once they are computed.
        grad_transfers: rows with gradients that return to the owner (``target``).
        is_summed: True if its gradient is a sum over bands.
        is_replicated: True if every band needs the complete gradient: an input, or a result of an untiled segment.
        is_gathered: True if every band receives all rows.
    """

    owned_rows: tuple[Interval, ...]
    buffer_rows: tuple[Interval, ...]
    halo_transfers: tuple[RowTransfer, ...] = ()
    grad_transfers: tuple[RowTransfer, ...] = ()
    is_summed: bool = False
    is_replicated: bool = False
    is_gathered: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnershipMap:
    """Row ownership of all values that cross segment borders.

    Attributes:
        partition: the rows of each band.
        bands: for each segment the rows that each band computes; ``None`` for untiled segments.
        values: ownership of each streamed value that crosses a segment border.
        summed: untiled values with a gradient summed over bands: parameters, and side inputs of segments in bands.
        kept_in_bands: outputs of which each rank returns its own rows.
    """

    partition: BandPartition
    bands: tuple[tuple[RowBand, ...] | None, ...]
    values: Mapping[str, RowOwnership]
    summed: frozenset[str]
    kept_in_bands: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ValueReaders:
    """Segments that read each value that crosses a segment border.

    Attributes:
        segments: numbers of the reading segments, by value.
        bands: for each segment the rows that each band computes; ``None`` for untiled segments.
        has_gradients: for each segment, true if its backward pass computes gradients of its inputs.
        requires_grad: values with a gradient.
        num_bands: number of bands.
    """

    segments: Mapping[str, Sequence[int]]
    bands: tuple[tuple[RowBand, ...] | None, ...]
    has_gradients: Sequence[bool]
    requires_grad: Collection[str]
    num_bands: int

    def rows(self, name: str, *, with_gradients: bool = False) -> list[Interval]:
        """The rows of a value that each band reads, in all segments or in those with gradients."""
        read_by = [self.bands[index] for index in self.segments.get(name, ()) if self.has_gradients[index] or not with_gradients]
        rows_of_bands = []
        for band in range(self.num_bands):
            rows = Interval(0, 0)
            for row_bands in read_by:
                if row_bands is not None:
                    rows = rows.hull(row_bands[band].computed[name])
            rows_of_bands.append(rows)
        return rows_of_bands

    def is_summed(self, name: str) -> bool:
        """True if each band contributes to a value's gradient."""
        reads_in_bands = (self.bands[index] is not None and self.has_gradients[index] for index in self.segments.get(name, ()))
        return name in self.requires_grad and any(reads_in_bands)

    def is_read_untiled(self, name: str) -> bool:
        """True if an untiled segment reads a value."""
        return any(self.bands[index] is None for index in self.segments.get(name, ()))


def assign_ownership(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], partition: BandPartition, *, outputs_in_bands: bool = False
) -> OwnershipMap:
    """Derive the ownership of all values from the planner's decisions."""
    graph, phases, requires_grad = problem.sized.graph, problem.sized.phases, problem.sized.requires_grad
    borders = segment_borders(graph, choices)
    maker = {name: index for index, (_, makes) in enumerate(borders) for name in makes}
    readers = _value_readers(problem, choices, borders, partition)
    crossing = [name for name in dict.fromkeys((*graph.inputs, *readers.segments, *maker)) if name in phases.streamed]
    outputs = {name for name in graph.outputs if name in maker and readers.bands[maker[name]] is not None}
    banded_outputs = frozenset(name for name in outputs if outputs_in_bands and name in phases.streamed)
    values = {
        name: _row_ownership(
            problem,
            readers,
            partition,
            name,
            is_replicated=name not in maker or readers.bands[maker[name]] is None,
            is_gathered=name in outputs - banded_outputs or readers.is_read_untiled(name),
        )
        for name in crossing
    }
    leaves = {node.name for node in graph.nodes if node.kind != "operator" and node.name in requires_grad}
    sides = (name for reads, _ in borders for name in reads if name not in phases.streamed)
    summed = frozenset(name for name in sides if name in leaves or readers.is_summed(name))
    return OwnershipMap(partition=partition, bands=readers.bands, values=values, summed=summed, kept_in_bands=banded_outputs)


def _value_readers(
    problem: PlanningProblem,
    choices: Sequence[SegmentChoice],
    borders: Sequence[tuple[Collection[str], Collection[str]]],
    partition: BandPartition,
) -> _ValueReaders:
    """The readers of all values; ``borders`` are the values that each segment reads and makes."""
    phases, requires_grad = problem.sized.phases, problem.sized.requires_grad
    extents, bands = problem.sized.extents(ROWS), range(partition.num_bands)
    segments: dict[str, list[int]] = {}
    for index, (reads, _) in enumerate(borders):
        for name in reads:
            segments.setdefault(name, []).append(index)
    return _ValueReaders(
        segments=segments,
        bands=tuple(
            tuple(row_band_of(phases.run(choice.nodes), extents, partition, band) for band in bands) if choice.mode == "tiled" else None
            for choice in choices
        ),
        has_gradients=[
            not requires_grad.isdisjoint(makes) and not requires_grad.isdisjoint(choice.nodes)
            for choice, (_, makes) in zip(choices, borders, strict=True)
        ],
        requires_grad=requires_grad,
        num_bands=partition.num_bands,
    )


def _row_ownership(
    problem: PlanningProblem, readers: _ValueReaders, partition: BandPartition, name: str, *, is_replicated: bool, is_gathered: bool
) -> RowOwnership:
    """The ownership of one streamed value."""
    extent = problem.sized.extents(ROWS)[name]
    full, bands = Interval(0, extent), range(partition.num_bands)
    owned = tuple(partition.rows(band, extent) for band in bands)
    needed = [full for _ in bands] if is_gathered else readers.rows(name)
    if name in problem.resources.from_source:
        buffers = tuple(Interval(0, 0) for _ in bands)
    elif is_replicated:
        buffers = tuple(full for _ in bands)
    else:
        buffers = tuple(_normalize_empty(rows.hull(read)) for rows, read in zip(owned, needed, strict=True))
    is_summed = readers.is_summed(name)
    return RowOwnership(
        owned_rows=owned,
        buffer_rows=buffers,
        halo_transfers=() if is_replicated else _transfers(owned, needed),
        grad_transfers=_return_transfers(owned, readers.rows(name, with_gradients=True)) if is_summed else (),
        is_summed=is_summed,
        is_replicated=is_replicated,
        is_gathered=is_gathered,
    )


def _normalize_empty(rows: Interval) -> Interval:
    """The rows; an empty interval starts at 0."""
    return rows or Interval(0, 0)


def _transfers(owned: Sequence[Interval], wanted_rows: Sequence[Interval]) -> tuple[RowTransfer, ...]:
    """Transfers from every owner to every other band that needs its rows."""
    pairs = ((source, target) for source in range(len(owned)) for target in range(len(owned)) if source != target)
    transfers = (RowTransfer(source=source, target=target, rows=owned[source].intersect(wanted_rows[target])) for source, target in pairs)
    return tuple(transfer for transfer in transfers if transfer.rows)


def _return_transfers(owned: Sequence[Interval], wanted_rows: Sequence[Interval]) -> tuple[RowTransfer, ...]:
    """The same rows, back to their owners."""
    return tuple(RowTransfer(source=t.target, target=t.source, rows=t.rows) for t in _transfers(owned, wanted_rows))
