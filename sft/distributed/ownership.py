"""What each band holds of each value that crosses a segment's border, what it borrows, and whose gradients are sums over bands.

A band holds one buffer of such a value: the rows that it owns, and the rows of its neighbours that any segment reads there. When a
segment has made its own rows, owners send the others theirs (*borrowing*); before the segment that made them runs back, the gradients of
borrowed rows return to the owners and are added (*returning*), in the order of the bands' distance. So a value is exchanged once each way,
however many segments read it, and nothing is exchanged inside a segment.

What runs on whole tensors (a tail) runs on every rank, on gathered images: borrowing with everything needed. The gradients that it makes
are the same on all ranks, so they are counted once: of a value whose gradient is a sum over bands each band counts its own rows, and of a
whole value (a parameter, a global value) the first band alone counts them.
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
    """Rows that go from one band to another.

    Attributes:
        source: the band that has them.
        target: the band that wants them.
        rows: which, in the whole image.
    """

    source: int
    target: int
    rows: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOwnership:
    """One streamed value that crosses a segment's border; tuples have an entry for each band.

    Attributes:
        own: the rows that each band owns.
        rows: the rows that each band has a buffer for; none of an input that is read while walks run.
        borrowed: what goes to others once it is made.
        lent: of which rows gradients come back, ``target`` being the owner.
        is_summed: whether its gradient is a sum over bands.
        is_whole: whether every band needs its gradient complete: it is an input, or made on whole tensors.
        is_gathered: whether every band borrows all of it.
    """

    own: tuple[Interval, ...]
    rows: tuple[Interval, ...]
    borrowed: tuple[RowTransfer, ...] = ()
    lent: tuple[RowTransfer, ...] = ()
    is_summed: bool = False
    is_whole: bool = False
    is_gathered: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnershipMap:
    """Who holds what.

    Attributes:
        shares: who owns which rows.
        bands: for each segment what each band computes; ``None`` for segments on whole tensors.
        held: streamed values that cross a segment's border.
        summed: whole values whose gradient is a sum over bands: parameters, and what segments in bands read beside images.
        kept_in_bands: outputs of which each rank returns its own rows.
    """

    shares: BandPartition
    bands: tuple[tuple[RowBand, ...] | None, ...]
    held: Mapping[str, RowOwnership]
    summed: frozenset[str]
    kept_in_bands: frozenset[str]


def assign_ownership(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], shares: BandPartition, *, outputs_in_bands: bool = False
) -> OwnershipMap:
    """The layout for these decisions."""
    graph, phases, bands = problem.graph, problem.phases, range(shares.num_bands)
    extents, ends = problem.extents(ROWS), segment_borders(graph, choices)
    parts = tuple(
        tuple(row_band_of(graph, choice.nodes, phases.rows, phases.streamed, extents, shares, band) for band in bands)
        if choice.mode == "tiled"
        else None
        for choice in choices
    )
    has_gradients = [
        any(name in problem.requires_grad for name in makes) and any(name in problem.requires_grad for name in choice.nodes)
        for choice, (_, makes) in zip(choices, ends, strict=True)
    ]
    maker = {name: index for index, (_, makes) in enumerate(ends) for name in makes}
    readers: dict[str, list[int]] = {}
    for index, (reads, _) in enumerate(ends):
        for name in reads:
            readers.setdefault(name, []).append(index)

    def needed(name: str, wanted: Callable[[int], bool]) -> list[Interval]:
        """What bands read of a value for some of the segments in bands."""
        found = []
        for band in bands:
            rows = Interval(0, 0)
            for index in readers.get(name, ()):
                part = parts[index]
                if part is not None and wanted(index):
                    rows = rows.hull(part[band].computed[name])
            found.append(rows)
        return found

    def differentiated(name: str) -> bool:
        """Whether bands add to a value's gradient, each its share."""
        return name in problem.requires_grad and any(parts[index] is not None and has_gradients[index] for index in readers.get(name, ()))

    crossing = [name for name in dict.fromkeys((*graph.inputs, *readers, *maker)) if name in phases.streamed]
    outputs = {name for name in graph.outputs if name in maker and parts[maker[name]] is not None}
    kept = frozenset(name for name in outputs if outputs_in_bands and name in phases.streamed)
    held: dict[str, RowOwnership] = {}
    for name in crossing:
        everything = Interval(0, extents[name])
        own = tuple(shares.rows(band, extents[name]) for band in bands)
        is_whole = name not in maker or parts[maker[name]] is None
        is_gathered = name in outputs - kept or any(parts[index] is None for index in readers.get(name, ()))
        wants = [everything] * len(own) if is_gathered else needed(name, lambda index: True)
        if name in problem.from_source:
            rows = (Interval(0, 0),) * len(own)
        elif is_whole:
            rows = (everything,) * len(own)
        else:
            rows = tuple(_normalize_empty(mine.hull(wanted)) for mine, wanted in zip(own, wants, strict=True))
        held[name] = RowOwnership(
            own=own,
            rows=rows,
            borrowed=() if is_whole else _transfers(own, wants),
            lent=_return_transfers(own, needed(name, lambda index: has_gradients[index])) if differentiated(name) else (),
            is_summed=differentiated(name),
            is_whole=is_whole,
            is_gathered=is_gathered,
        )
    leaves = {node.name for node in graph.nodes if node.kind != "operator" and node.name in problem.requires_grad}
    sides = (name for reads, _ in ends for name in reads if name not in phases.streamed)
    summed = frozenset(name for name in sides if name in leaves or differentiated(name))
    return OwnershipMap(shares=shares, bands=parts, held=held, summed=summed, kept_in_bands=kept)


def _normalize_empty(rows: Interval) -> Interval:
    return rows or Interval(0, 0)


def _transfers(own: Sequence[Interval], wants: Sequence[Interval]) -> tuple[RowTransfer, ...]:
    """From every owner to every other band that wants rows of its."""
    pairs = ((source, target) for source in range(len(own)) for target in range(len(own)) if source != target)
    found = (RowTransfer(source=source, target=target, rows=own[source].intersect(wants[target])) for source, target in pairs)
    return tuple(transfer for transfer in found if transfer.rows)


def _return_transfers(own: Sequence[Interval], wants: Sequence[Interval]) -> tuple[RowTransfer, ...]:
    """The same rows, to their owners."""
    return tuple(RowTransfer(source=t.target, target=t.source, rows=t.rows) for t in _transfers(own, wants))
