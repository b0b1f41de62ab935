"""Planner for a mesh: decisions that fit on every band, and their cost on each.

All bands share the decisions. Each band has strips, states and halos of its own, so each is projected separately and exactly, by running
its region on a simulated machine. The band with the highest peak must fit the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition, even_band_bounds
from sft.analysis.tiling.footprint import Footprint, run_footprint
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError
from sft.distributed.balancing import balance_bands, run_divisions
from sft.distributed.band_region import BandRegion, BandRegionBuilder
from sft.distributed.communicator import Communicator
from sft.distributed.machines import BandTracingMachine, CountingTransport
from sft.distributed.mesh import MeshShape
from sft.distributed.transport import RankTraffic
from sft.planner.materialize import ProjectedPlan
from sft.planner.mesh_plan import MeshPlan, RankPlan
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["ProjectedMeshPlan", "band_choices", "plan_bands", "project_bands"]

_ALL_KEPT = Checkpoints()
#: Numbers of states to keep if all of them do not fit.
_SLOTS = (8, 4, 2)
#: Least rows of a band's strips, unless options request fewer.
_MIN_ROWS = 4
#: Narrower panels consist of halo only. More panels must need less than this fraction of the bytes of fewer panels.
_MIN_PANEL_COLS = 64
_WORTH_ANOTHER_PANEL = 0.95


@dataclass(frozen=True, slots=True)
class ProjectedMeshPlan:
    """Decisions for a mesh, with their cost on each band.

    Attributes:
        bands: the decisions, and the regions that run them.
        planned: the plan of the band with the highest peak, as for one device.
        mesh: memory, FLOPs and traffic of all ranks.
    """

    bands: BandRegionBuilder
    planned: ProjectedPlan
    mesh: MeshPlan


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
class _BandProjection:
    """Cost of a step on one band: bytes, FLOPs, and traffic."""

    region: BandRegion
    projection: Projection
    traffic: RankTraffic


@dataclass(frozen=True, slots=True)
class _BandsCandidate:
    """Decisions for all bands, with the cost of a step on some or all of them."""

    bands: BandRegionBuilder
    costs: Mapping[int, _BandProjection]

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
        return sum(_tiled_flops(self.bands, cost.projection) for cost in self.costs.values()) / self.partition.height


def project_bands(bands: BandRegionBuilder, shape: MeshShape, indices: Sequence[int] | None = None) -> dict[int, _BandProjection]:
    """Cost of a step on the given bands (all by default). Bands with the same structure share one projection."""
    costs: dict[int, _BandProjection] = {}
    by_key: dict[object, _BandProjection] = {}
    for band in range(shape.num_bands) if indices is None else indices:
        region = bands.region(band)
        key = bands.cost_key(region)
        if key not in by_key:
            transport = CountingTransport()
            machine = BandTracingMachine(
                on_host=bands.problem.resources.on_host, comm=Communicator(transport=transport, shape=shape, replica=0, band=band)
            )
            by_key[key] = _BandProjection(region, project_step(bands.problem, region, machine=machine), transport.traffic)
        costs[band] = replace(by_key[key], region=region)
    return costs


def plan_bands(
    problem: PlanningProblem,
    shape: MeshShape,
    budget_bytes: int,
    options: Options,
    *,
    outputs_in_bands: bool = False,
    synchronized: frozenset[str] = frozenset(),
) -> ProjectedMeshPlan:
    """Choose decisions for all bands of an image.

    Raises:
        BudgetError: no decisions fit every band.
        InputError: an option does not apply to meshes, or the image has fewer rows than bands.
    """
    height = _image_height(problem)
    _check(problem, shape, options, height)
    room_bytes = budget_bytes - problem.resources.resident_bytes
    multiple = _bounds_multiple(problem, height, shape.num_bands)
    partition = BandPartition(even_band_bounds(height, shape.num_bands, multiple))
    middle, smallest = shape.num_bands // 2, sys.maxsize
    sampled_bands = sorted({0, middle, shape.num_bands - 1})
    best: _BandsCandidate | None = None
    lowest: BandRegionBuilder | None = None

    def build(choices: tuple[SegmentChoice, ...], partition: BandPartition = partition) -> BandRegionBuilder:
        return BandRegionBuilder(
            problem, choices, partition, outputs_in_bands=outputs_in_bands, num_replicas=shape.num_replicas, synchronized=synchronized
        )

    for cuts in run_divisions(problem, partition) if options.tile is None else ({},):
        if cuts and _stored_cut_bytes(build(band_choices(problem, lambda names: 1, cuts=cuts)), middle) > room_bytes:
            continue
        for num_panels in _panel_counts(problem, options):
            least_bytes = smallest
            for candidates in _shrinking_choices(problem, options, partition, cuts, room_bytes, num_panels):
                previous_bytes = sys.maxsize
                for choices in candidates:
                    bands = build(choices)
                    candidate = _BandsCandidate(bands, project_bands(bands, shape, sampled_bands))
                    if candidate.peak_bytes <= room_bytes:
                        candidate = _BandsCandidate(
                            bands, project_bands(bands, shape)
                        )  # unsampled bands may need more: halos at uneven bounds
                    peak_bytes = candidate.peak_bytes
                    if peak_bytes < smallest:
                        smallest, lowest = peak_bytes, bands
                    if peak_bytes <= room_bytes:
                        if best is None or candidate.flops < best.flops:
                            best = candidate
                        break
                    if peak_bytes >= previous_bytes:
                        break  # the savings of lower strips go into states
                    previous_bytes = peak_bytes
                if best is not None:
                    break  # the remaining choices restore states
            if best is not None or smallest > _WORTH_ANOTHER_PANEL * least_bytes:
                break
    if best is not None:
        choices = best.bands.choices

        def rebuilt(partition: BandPartition) -> _BandsCandidate:
            bands = build(choices, partition)
            return _BandsCandidate(bands, project_bands(bands, shape))

        best = balance_bands(best, rebuilt, multiple, room_bytes)
        return _projected_mesh_plan(best.bands, shape, [best.costs[band] for band in range(shape.num_bands)])
    if lowest is not None:
        smallest = _BandsCandidate(lowest, project_bands(lowest, shape)).peak_bytes
    needed = problem.resources.resident_bytes + smallest
    raise BudgetError(
        f"the budget is {format_bytes(budget_bytes)} a rank, but a step on {shape.num_bands} bands needs {format_bytes(needed)} at least "
        f"({format_bytes(problem.resources.resident_bytes)} resident, {format_bytes(smallest)} for inputs, cuts and strips). "
        "Raise the budget, use more bands, or leave out options that force tile, state_every or state_slots.",
        needed_bytes=needed,
    )


def _image_height(problem: PlanningProblem) -> int:
    """Rows of the tallest input."""
    return max(
        (problem.sized.extent(name, ROWS) for name in problem.sized.graph.inputs if name in problem.sized.phases.streamed), default=1
    )


def _bounds_multiple(problem: PlanningProblem, height: int, num_bands: int) -> int:
    """Rows of the image after which the pattern of every value repeats; bounds at multiples have the smallest halos. 1 if that is too
    many.
    """
    strides = [
        problem.sized.stride(phase.streamed) * max(1, height // problem.sized.run_height(phase.streamed))
        for phase in problem.sized.phases.phases
        if phase.streamed
    ]
    multiple = max(strides, default=1)
    return multiple if 4 * multiple * num_bands <= height else 1


def _check(problem: PlanningProblem, shape: MeshShape, options: Options, height: int) -> None:
    """Refuse options and shapes that do not apply to meshes."""
    problems = []
    if options.halo == "recompute" or options.strategy == "sft":
        problems.append("halo 'recompute' and strategy 'sft' are for one device; leave them out with mesh")
    if options.strategy not in ("auto", "sft"):
        problems.append(f"strategy {options.strategy!r} is for one device; leave it out with mesh")
    if shape.num_bands > 1 and not problem.sized.graph.axes.count:
        problems.append(f"{shape.num_bands} bands share the rows of an image, and no input is one; make the mesh one of replicas alone")
    elif height < shape.num_bands:
        problems.append(f"an image of {height} rows for {shape.num_bands} bands; use at most {height} bands")
    if options.profile != "auto":
        problems.append(f"profile {options.profile!r} is for one device; leave it out with mesh")
    for name in ("host_budget", "host_folder", "link_bandwidth"):
        if getattr(options, name) is not None:
            problems.append(f"{name} is for one device, as a step on a mesh keeps nothing on the host; leave it out with mesh")
    if options.cuda_graphs is True:
        problems.append("cuda_graphs is for one device; leave it out with mesh")
    if problem.resources.host_outputs:
        problems.append("output='host' and output files are for one device; use output='device' or output='band' with mesh")
    if problems:
        raise InputError("; ".join(problems))


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
    graph, phases = problem.sized.graph, problem.sized.phases
    return problem.memo.memoize(
        ("footprint", names, batch),
        lambda: run_footprint(graph, names, phases.rows, phases.streamed, problem.sized.shapes, problem.sized.requires_grad, batch),
    )


def _projected_mesh_plan(bands: BandRegionBuilder, shape: MeshShape, costs: Sequence[_BandProjection]) -> ProjectedMeshPlan:
    """The plan, with the cost of every band."""
    undivided = _tiled_flops(bands, project_bands(_undivided(bands), MeshShape(num_replicas=shape.num_replicas), [0])[0].projection)
    tiled = [_tiled_flops(bands, cost.projection) for cost in costs]
    worst = max(range(len(costs)), key=lambda band: costs[band].projection.peak_bytes)
    ranks = []
    for band, cost in enumerate(costs):
        projection, traffic = cost.projection, cost.traffic
        rows = bands.ownership.partition.rows(band, bands.ownership.partition.height)
        sent = traffic.sent_bytes
        ranks.append(
            RankPlan(
                rows=(rows.start, rows.stop),
                projected_peak_bytes=projection.peak_bytes,
                flops=projection.flops,
                repeated_flops=projection.flops - tiled[band] if band else 0,
                sent_row_bytes=sent["rows"],
                sent_global_bytes=sent["globals"],
                sent_parameter_bytes=sent["parameters"],
                received_bytes=sum(traffic.received_bytes.values()),
                sent_beside_bytes=sum(traffic.sent_beside_bytes.values()),
                received_beside_bytes=sum(traffic.received_beside_bytes.values()),
            )
        )
    return ProjectedMeshPlan(
        bands=bands,
        planned=ProjectedPlan(bands.choices, costs[worst].region, costs[worst].projection),
        mesh=MeshPlan(
            num_replicas=shape.num_replicas,
            ranks=tuple(ranks),
            halo_flops=max(0, sum(tiled) - undivided),
            outputs_in_bands=bool(bands.ownership.kept_in_bands),
        ),
    )


def _undivided(bands: BandRegionBuilder) -> BandRegionBuilder:
    """The same decisions for one band that is the full image."""
    return BandRegionBuilder(
        bands.problem, bands.choices, BandPartition((0, bands.ownership.partition.height)), num_replicas=bands.num_replicas
    )


def _tiled_flops(bands: BandRegionBuilder, projection: Projection) -> int:
    """FLOPs of tiled segments."""
    return sum(
        record.flops
        for record in projection.op_records
        if record.move.kind != "loss" and bands.choices[record.move.segment].mode == "tiled"
    )
