"""Planner for a mesh: decisions that fit on every band, and their cost on each.

All bands share the decisions. Each band has strips, states and halos of its own, so each is projected separately and exactly, by running
its region on a simulated machine. The band with the highest peak must fit the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition, even_band_bounds
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError
from sft.distributed.balancing import balance_bands
from sft.distributed.band_region import BandRegionBuilder
from sft.distributed.band_search import BandProjection, BandSearch, project_bands, tiled_flops
from sft.distributed.mesh import MeshShape
from sft.planner.materialize import ProjectedPlan
from sft.planner.mesh_plan import MeshPlan, RankPlan
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem

__all__ = ["ProjectedMeshPlan", "plan_bands"]


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

    def build(choices: tuple[SegmentChoice, ...], partition: BandPartition) -> BandRegionBuilder:
        return BandRegionBuilder(
            problem, choices, partition, outputs_in_bands=outputs_in_bands, num_replicas=shape.num_replicas, synchronized=synchronized
        )

    search = BandSearch(
        problem=problem,
        shape=shape,
        options=options,
        partition=BandPartition(even_band_bounds(height, shape.num_bands, multiple)),
        room_bytes=room_bytes,
        build=build,
    )
    best = search.run()
    if best is not None:
        choices = best.bands.choices
        best = balance_bands(best, lambda partition: search.project(build(choices, partition)), multiple, room_bytes)
        return _projected_mesh_plan(best.bands, shape, [best.costs[band] for band in range(shape.num_bands)])
    smallest = search.lowest_bytes if search.lowest is None else search.project(search.lowest).peak_bytes
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


def _projected_mesh_plan(bands: BandRegionBuilder, shape: MeshShape, costs: Sequence[BandProjection]) -> ProjectedMeshPlan:
    """The plan, with the cost of every band."""
    undivided = tiled_flops(bands, project_bands(_undivided(bands), MeshShape(num_replicas=shape.num_replicas), [0])[0].projection)
    tiled = [tiled_flops(bands, cost.projection) for cost in costs]
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
                overlapped_sent_bytes=sum(traffic.overlapped_sent_bytes.values()),
                overlapped_received_bytes=sum(traffic.overlapped_received_bytes.values()),
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
