"""Search for decisions that fit on every band of an image.

All bands share the decisions. Each is projected on its own, by a run of its region on a simulated machine. Divisions of the phases into
segments, numbers of panels and strip heights are tried in this order, with decreasing need for memory, until the band with the highest
peak fits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition
from sft.analysis.tiling.footprint import Footprint, run_footprint
from sft.distributed.balancing import run_divisions
from sft.distributed.band_region import BandRegion, BandRegionBuilder
from sft.distributed.communicator import Communicator
from sft.distributed.machines import BandTracingMachine, CountingTransport
from sft.distributed.mesh import MeshShape
from sft.distributed.transport import RankTraffic
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["BandProjection", "BandSearch", "BandsCandidate", "band_choices", "project_bands", "tiled_flops"]

_ALL_KEPT = Checkpoints()
#: Numbers of states to keep if all of them do not fit.
_SLOTS = (8, 4, 2)
#: Least rows of a band's strips, unless options request fewer.
_MIN_ROWS = 4
#: Narrower panels consist of halo only. More panels must need less than this fraction of the bytes of fewer panels.
_MIN_PANEL_COLS = 64
_WORTH_ANOTHER_PANEL = 0.95


def band_choices(
    problem: PlanningProblem,
    strip_rows: Callable[[Sequence[str]], int],
    *,
    policy: Checkpoints = _ALL_KEPT,
    batch_tile: int | None = None,
    num_panels: int = 1,
    restart: bool = False,
    cuts: Mapping[int, Sequence[int]] | None = None,
) -> tuple[SegmentChoice, ...]:
    """Every streamed run in strips, all other operators untiled.

    Args:
        problem: the planning problem.
        strip_rows: strip height of a run, in rows of its tallest source.
        policy: the states to keep.
        batch_tile: batch elements of a sweep. Default: `None`, all of them
        num_panels: number of panels across the width.
        restart: True if sweeps run forward once more instead of keeping their states.
        cuts: division of each phase's run into segments, as numbers of operators before the cut. Default: `None`, no division
    """
    choices: list[SegmentChoice] = []
    untiled: tuple[str, ...] = ()
    for number, phase in enumerate(problem.sized.phases.phases):
        for start, stop in pairwise((0, *(cuts or {}).get(number, ()), len(phase.streamed))):
            names = phase.streamed[start:stop]
            if not names:
                continue
            if untiled:
                choices.append(SegmentChoice(nodes=untiled, mode="whole"))
                untiled = ()
            choices.append(
                SegmentChoice(
                    nodes=names,
                    mode="tiled",
                    strip_rows=strip_rows(names),
                    state_every=policy.every,
                    state_slots=policy.slots,
                    batch_tile=batch_tile or problem.sized.num_batch,
                    panel_cols=-(-problem.sized.run_width(names) // num_panels) if num_panels > 1 else 0,
                    restart=restart,
                )
            )
        untiled += phase.tail
    if untiled:
        choices.append(SegmentChoice(nodes=untiled, mode="whole"))
    return tuple(choices)


@dataclass(frozen=True, slots=True)
class BandProjection:
    """Cost of a step on one band: bytes, FLOPs, and traffic."""

    region: BandRegion
    projection: Projection
    traffic: RankTraffic


@dataclass(frozen=True, slots=True)
class BandsCandidate:
    """Decisions for all bands, with the cost of a step on some or all of them."""

    bands: BandRegionBuilder
    costs: Mapping[int, BandProjection]

    @property
    def peak_bytes(self) -> int:
        """Highest peak of the bands."""
        return max(cost.projection.peak_bytes for cost in self.costs.values())

    @property
    def flops(self) -> float:
        """Most FLOPs of a band."""
        return max(cost.projection.flops for cost in self.costs.values())

    @property
    def partition(self) -> BandPartition:
        """Rows of each band."""
        return self.bands.ownership.partition

    @property
    def flops_by_band(self) -> list[int]:
        """FLOPs of each band."""
        return [self.costs[band].projection.flops for band in range(self.partition.num_bands)]

    @property
    def row_flops(self) -> float:
        """Approximate FLOPs of a row of the tallest input; FLOPs of halos count as those of the band's rows."""
        return sum(tiled_flops(self.bands, cost.projection) for cost in self.costs.values()) / self.partition.height


def project_bands(bands: BandRegionBuilder, shape: MeshShape, indices: Sequence[int] | None = None) -> dict[int, BandProjection]:
    """Cost of a step on the given bands (all by default). Bands with the same structure share one projection."""
    costs: dict[int, BandProjection] = {}
    by_key: dict[object, BandProjection] = {}
    for band in range(shape.num_bands) if indices is None else indices:
        region = bands.region(band)
        key = bands.cost_key(region)
        if key not in by_key:
            transport = CountingTransport()
            machine = BandTracingMachine(
                on_host=bands.problem.resources.on_host, comm=Communicator(transport=transport, shape=shape, replica=0, band=band)
            )
            by_key[key] = BandProjection(region, project_step(bands.problem, region, machine=machine), transport.traffic)
        costs[band] = replace(by_key[key], region=region)
    return costs


@dataclass(slots=True, kw_only=True)
class BandSearch:
    """Search for the cheapest decisions that fit every band.

    Attributes:
        problem: the planning problem.
        shape: shape of the mesh.
        options: planner options.
        partition: rows of each band.
        room_bytes: bytes of a step on each band.
        build: makes the regions of all bands from decisions.
        best: the cheapest decisions that fit so far.
        lowest: the decisions with the smallest peak so far.
        lowest_bytes: this peak.
    """

    problem: PlanningProblem
    shape: MeshShape
    options: Options
    partition: BandPartition
    room_bytes: int
    build: Callable[[tuple[SegmentChoice, ...], BandPartition], BandRegionBuilder]
    best: BandsCandidate | None = None
    lowest: BandRegionBuilder | None = None
    lowest_bytes: int = sys.maxsize

    def run(self) -> BandsCandidate | None:
        """The cheapest decisions that fit; ``None`` if none does."""
        for cuts in run_divisions(self.problem, self.partition) if self.options.tile is None else ({},):
            if cuts and self._exceeds_room(cuts):
                continue
            for num_panels in _panel_counts(self.problem, self.options):
                before_bytes = self.lowest_bytes
                self._try_panels(cuts, num_panels)
                if self.best is not None or self.lowest_bytes > _WORTH_ANOTHER_PANEL * before_bytes:
                    break
        return self.best

    def project(self, bands: BandRegionBuilder) -> BandsCandidate:
        """Decisions with the cost of every band."""
        return BandsCandidate(bands, project_bands(bands, self.shape))

    def _exceeds_room(self, cuts: Mapping[int, Sequence[int]]) -> bool:
        """True if the stored cuts of a division alone exceed the room of the middle band."""
        bands = self.build(band_choices(self.problem, lambda names: 1, cuts=cuts), self.partition)
        return _stored_cut_bytes(bands, self.shape.num_bands // 2) > self.room_bytes

    def _try_panels(self, cuts: Mapping[int, Sequence[int]], num_panels: int) -> None:
        """Try decisions with a number of panels, first those that keep all states."""
        for candidates in _shrinking_choices(self.problem, self.options, self.partition, cuts, self.room_bytes, num_panels):
            self._try_heights(candidates)
            if self.best is not None:
                return  # the remaining choices restore states

    def _try_heights(self, candidates: Iterable[tuple[SegmentChoice, ...]]) -> None:
        """Try decisions with decreasing strip heights, until some fit or lower strips save no bytes."""
        previous_bytes = sys.maxsize
        for choices in candidates:
            candidate = self._project_sampled(self.build(choices, self.partition))
            peak_bytes = candidate.peak_bytes
            if peak_bytes < self.lowest_bytes:
                self.lowest_bytes, self.lowest = peak_bytes, candidate.bands
            if peak_bytes <= self.room_bytes:
                if self.best is None or candidate.flops < self.best.flops:
                    self.best = candidate
                return
            if peak_bytes >= previous_bytes:
                return  # the savings of lower strips go into states
            previous_bytes = peak_bytes

    def _project_sampled(self, bands: BandRegionBuilder) -> BandsCandidate:
        """Decisions with the cost of three bands; of all bands if these fit, since halos at uneven bounds may need more."""
        sampled_bands = sorted({0, self.shape.num_bands // 2, self.shape.num_bands - 1})
        sampled = BandsCandidate(bands, project_bands(bands, self.shape, sampled_bands))
        return self.project(bands) if sampled.peak_bytes <= self.room_bytes else sampled


def _shrinking_choices(
    problem: PlanningProblem,
    options: Options,
    partition: BandPartition,
    cuts: Mapping[int, Sequence[int]],
    room_bytes: int,
    num_panels: int,
) -> Iterator[Iterator[tuple[SegmentChoice, ...]]]:
    """Decisions with decreasing strip heights: first with all states kept, then with few."""
    height = partition.height
    tallest = max(len(partition.rows(band, height)) for band in range(partition.num_bands))
    batch_tile = problem.sized.batch_tile(options.batch_tile or problem.sized.num_batch)

    def choose(rows: int, policy: Checkpoints) -> tuple[SegmentChoice, ...]:
        return band_choices(
            problem,
            lambda names: max(1, round(rows * problem.sized.run_height(names) / height)),
            policy=policy,
            batch_tile=batch_tile,
            num_panels=num_panels,
            restart=num_panels > 1 and options.tile is None,
            cuts=cuts,
        )

    def descent(policy: Checkpoints) -> Iterator[tuple[SegmentChoice, ...]]:
        rows = tallest
        while True:
            choices = choose(rows, policy)
            if rows <= _MIN_ROWS or _strip_bytes(problem, choices, num_panels) <= room_bytes:
                yield choices
            if rows <= _MIN_ROWS:
                return
            rows = max(_MIN_ROWS, rows // 2)

    policies = [_ALL_KEPT]
    if options.state_every is not None:
        policies = [Checkpoints(options.state_every)]
    elif options.state_slots is not None:
        policies = [Checkpoints(slots=options.state_slots)]
    elif problem.sized.training:
        policies += [Checkpoints(slots=slots) for slots in _SLOTS]
    if options.tile is not None:
        yield iter((choose(min(options.tile[0], tallest), policies[0]),))
        return
    for policy in policies:
        yield descent(policy)


def _panel_counts(problem: PlanningProblem, options: Options) -> Iterator[int]:
    """1, 2, 4, ..., or the number of panels that the options request."""
    width = max((problem.sized.run_width(phase.streamed) for phase in problem.sized.phases.phases if phase.streamed), default=1)
    if options.tile is not None:
        cols = options.tile[1]
        yield 1 if cols is None else max(1, -(-width // cols))
        return
    num_panels = 1
    while num_panels == 1 or width // num_panels >= _MIN_PANEL_COLS:
        yield num_panels
        num_panels *= 2


def _stored_cut_bytes(bands: BandRegionBuilder, band: int) -> int:
    """Bytes of a band's rows of all cuts, which a training step stores between its passes. 0 for inference, where they are freed in
    between.
    """
    problem, values = bands.problem, bands.ownership.values
    if not problem.sized.training:
        return 0
    total = 0
    for name, value in values.items():
        if name not in problem.sized.graph.inputs:
            total += problem.sized.value_bytes(name) * len(value.buffer_rows[band]) // problem.sized.extent(name, ROWS)
    return total


def _strip_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice], num_panels: int) -> float:
    """Bytes of the largest strip, by the footprint formula."""
    largest_bytes = 0.0
    for choice in choices:
        if choice.mode == "tiled":
            footprint = _footprint(problem, choice.nodes, choice.batch_tile)
            largest_bytes = max(largest_bytes, footprint.working_bytes(choice.strip_rows) / num_panels)
    return largest_bytes


def _footprint(problem: PlanningProblem, names: tuple[str, ...], batch: int) -> Footprint:
    """Footprint of a run, memoized."""
    sized = problem.sized
    return problem.memo.memoize(
        ("footprint", names, batch), lambda: run_footprint(sized.phases.run(names), sized.shapes, sized.requires_grad, batch)
    )


def tiled_flops(bands: BandRegionBuilder, projection: Projection) -> int:
    """FLOPs of tiled segments."""
    return sum(
        record.flops
        for record in projection.op_records
        if record.move.kind != "loss" and bands.choices[record.move.segment].mode == "tiled"
    )
