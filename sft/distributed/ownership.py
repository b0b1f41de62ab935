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

from collections.abc import Callable, Mapping, Sequence
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


def assign_ownership(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], partition: BandPartition, *, outputs_in_bands: bool = False
) -> OwnershipMap:
    """Derive the ownership of all values from the planner's decisions."""
    graph, phases, bands = problem.sized.graph, problem.sized.phases, range(partition.num_bands)
    extents, ends = problem.sized.extents(ROWS), segment_borders(graph, choices)
    segment_bands = tuple(
        tuple(row_band_of(graph, choice.nodes, phases.rows, phases.streamed, extents, partition, band) for band in bands)
        if choice.mode == "tiled"
        else None
        for choice in choices
    )
    has_gradients = [
        any(name in problem.sized.requires_grad for name in makes) and any(name in problem.sized.requires_grad for name in choice.nodes)
        for choice, (_, makes) in zip(choices, ends, strict=True)
    ]
    maker = {name: index for index, (_, makes) in enumerate(ends) for name in makes}
    readers: dict[str, list[int]] = {}
    for index, (reads, _) in enumerate(ends):
        for name in reads:
            readers.setdefault(name, []).append(index)

    def rows_read(name: str, is_selected: Callable[[int], bool]) -> list[Interval]:
        """The rows of a value that each band reads in the selected segments."""
        reads_by_band = []
        for band in bands:
            rows = Interval(0, 0)
            for index in readers.get(name, ()):
                row_bands = segment_bands[index]
                if row_bands is not None and is_selected(index):
                    rows = rows.hull(row_bands[band].computed[name])
            reads_by_band.append(rows)
        return reads_by_band

    def is_summed(name: str) -> bool:
        """True if each band contributes to a value's gradient."""
        return name in problem.sized.requires_grad and any(
            segment_bands[index] is not None and has_gradients[index] for index in readers.get(name, ())
        )

    crossing = [name for name in dict.fromkeys((*graph.inputs, *readers, *maker)) if name in phases.streamed]
    outputs = {name for name in graph.outputs if name in maker and segment_bands[maker[name]] is not None}
    banded_outputs = frozenset(name for name in outputs if outputs_in_bands and name in phases.streamed)
    values: dict[str, RowOwnership] = {}
    for name in crossing:
        full = Interval(0, extents[name])
        owned = tuple(partition.rows(band, extents[name]) for band in bands)
        is_replicated = name not in maker or segment_bands[maker[name]] is None
        is_gathered = name in outputs - banded_outputs or any(segment_bands[index] is None for index in readers.get(name, ()))
        wanted_rows = [full] * len(owned) if is_gathered else rows_read(name, lambda index: True)
        if name in problem.resources.from_source:
            rows = (Interval(0, 0),) * len(owned)
        elif is_replicated:
            rows = (full,) * len(owned)
        else:
            rows = tuple(_normalize_empty(rows_owned.hull(rows_wanted)) for rows_owned, rows_wanted in zip(owned, wanted_rows, strict=True))
        values[name] = RowOwnership(
            owned_rows=owned,
            buffer_rows=rows,
            halo_transfers=() if is_replicated else _transfers(owned, wanted_rows),
            grad_transfers=_return_transfers(owned, rows_read(name, lambda index: has_gradients[index])) if is_summed(name) else (),
            is_summed=is_summed(name),
            is_replicated=is_replicated,
            is_gathered=is_gathered,
        )
    leaves = {node.name for node in graph.nodes if node.kind != "operator" and node.name in problem.sized.requires_grad}
    sides = (name for reads, _ in ends for name in reads if name not in phases.streamed)
    summed = frozenset(name for name in sides if name in leaves or is_summed(name))
    return OwnershipMap(partition=partition, bands=segment_bands, values=values, summed=summed, kept_in_bands=banded_outputs)


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
