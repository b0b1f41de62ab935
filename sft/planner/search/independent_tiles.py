"""Independent tiles: the plan of the SFT paper, as strategy ``sft`` and as candidates of strategy ``auto``.

Xu et al., "Training of deep learning pipelines on memory-constrained GPUs via segmented fused-tiled execution", CC 2022, on our executor.
Values larger than a *limit* must be tiled; the remaining ones may be kept, and are the borders of segments (Listing 3,
``sft.analysis.tiling.sft_partition``). A tiled segment runs as a grid of 2^n x 2^n independent tiles of its results, each with its own halo
(Listing 4, ``sft.analysis.tiling.independent_tiles``); operators between tiled segments run untiled, as in plain PyTorch.

The paper takes the device memory as limit and leaves the search for the fastest grid to the user. Here both are searched: for limits from
the largest value downwards by halves, the coarsest grid that fits; of these plans the one with the fewest FLOPs. The paper's condition
holds per value and per segment; the exact projection of each plan decides if all values fit *together*. This takes
O(log(limit) * log(tiles)) projections, each linear in operators and tiles.

Strategy ``auto`` compares tiles with strips. Tiles keep no states and restore none, which may outweigh their recomputed halos where states
do not fit. The FLOPs of a grid are known before lowering: in closed form per axis, as the pixels of a tile are a product. So a grid is
projected only if it may win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sft.analysis.tiling.independent_tiles import tile_lengths_at
from sft.analysis.tiling.sft_partition import PartitionGraphCache, PartitionShapeCache, partition
from sft.common.interval import Interval
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.step_time import project_timeline
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.search.estimates import UntiledCosts
from sft.planner.search.tiled import CandidateGrid
from sft.planner.search_limits import SearchLimits
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment

__all__ = ["cheaper_tile_plans", "independent_tile_flops", "min_plan_bytes", "partition_choices", "smallest_tile_plans", "tile_grids"]


#: Rows and columns of a tile for the height and width of a segment's largest images, and its stride.
Grid = Callable[[int, int, int], tuple[int, int]]
#: Operators in order, in groups that are tiled or not.
Partition = tuple[tuple[tuple[str, ...], bool], ...]


def tile_grids(options: Options, limits: SearchLimits) -> tuple[Grid, ...]:
    """Grids to try, from coarse to fine: 2^n x 2^n tiles, or tiles of the size that the options force."""
    if options.tile is not None:
        rows, cols = options.tile
        return (lambda height, width, stride: (min(rows, height), min(cols or width, width)),)
    counts = [2**n for n in range(limits.max_tiles.bit_length())]
    return tuple(partial(_grid_tile_px, n, limits.small_stride_share) for n in counts)


def _grid_tile_px(n: int, small_stride_share: float, height: int, width: int, stride: int) -> tuple[int, int]:
    rows, cols = (_tile_extent(extent, n, stride, small_stride_share) for extent in (height, width))
    return rows, cols


def _tile_extent(extent: int, n: int, stride: int, small_stride_share: float) -> int:
    tile_px = -(-extent // n)
    return min(extent, -(-tile_px // stride) * stride) if stride <= small_stride_share * tile_px else tile_px


def partition_choices(problem: PlanningProblem, options: Options) -> Iterator[Callable[[Grid], tuple[SegmentChoice, ...]]]:
    """The paper's partitions for smaller and smaller limits, as functions of a grid; partitions that cannot run are left out.

    Args:
        problem: the planning problem.
        options: ``batch_tile``; a forced ``tile`` cuts even a model that fits, at its largest values.
    """
    largest = max((problem.sized.value_bytes(name) for phase in problem.sized.phases.phases for name in phase.streamed), default=1)
    # The first limit keeps every value; from the second on the largest must be tiled.
    limits = [max(1, 2 * largest >> n) for n in range(int(options.tile is not None), problem.limits.num_value_limits)]
    seen: set[Partition] = set()
    for limit_bytes in limits:
        groups = _partition(problem, limit_bytes)
        if groups is None or groups in seen:
            continue
        seen.add(groups)
        yield partial(_choices, problem, groups, options)


def _partition(problem: PlanningProblem, limit_bytes: int) -> Partition | None:
    """Operators in order, in tiled and untiled groups; ``None`` if the paper reports out of memory."""
    phases = problem.sized.phases
    cache: PartitionShapeCache = problem.memo.memoize(
        "tiled segments of partitions", lambda: PartitionShapeCache(problem.memoize_across_sizes("runs of partitions", PartitionGraphCache))
    )
    groups: list[tuple[tuple[str, ...], bool]] = []
    for phase in phases.phases:
        result = partition(phases.run(phase.streamed), problem.sized.shapes, limit_bytes, cache)
        if result.problems or any(segment.tiled and "height" not in segment.dimensions for segment in result.segments):
            return None
        groups += [(segment.names, segment.tiled) for segment in result.segments]
        if phase.tail:
            groups.append((phase.tail, False))
    return tuple(groups)


def _choices(problem: PlanningProblem, groups: Partition, options: Options, grid: Grid) -> tuple[SegmentChoice, ...]:
    choices: list[SegmentChoice] = []
    untiled: tuple[str, ...] = ()
    for names, tiled in groups:
        if not tiled:
            untiled += names
            continue
        if untiled:
            choices.append(SegmentChoice(nodes=untiled, mode="whole"))
            untiled = ()
        rows, cols = grid(problem.sized.run_height(names), problem.sized.run_width(names), problem.sized.stride(names))
        choices.append(
            SegmentChoice(
                nodes=names,
                mode="tiled",
                strip_rows=rows,
                batch_tile=problem.sized.batch_tile(options.batch_tile),
                panel_cols=cols,
                halo="recompute",
            )
        )
    if untiled:
        choices.append(SegmentChoice(nodes=untiled, mode="whole"))
    return tuple(choices)


def min_plan_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> int:
    """Lower bound of the bytes of any plan with these segments: the values between them, which the backward pass reads again."""
    live_out = {name for choice in choices if choice.mode == "tiled" for name in problem.sized.graph.live_out(choice.nodes)}
    live_out -= problem.resources.host_outputs
    return sum(problem.sized.value_bytes(name) for name in live_out) if problem.sized.training else 0


def cheaper_tile_plans(
    problem: PlanningProblem, candidates: CandidateGrid, room_bytes: int, rates: DeviceRates, known: float
) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans in tiles that cost less than a known plan, with their costs: the coarsest grid that fits for each partition.

    Args:
        problem: the planning problem.
        candidates: estimates of the plans with and without strips.
        room_bytes: most bytes of a step.
        rates: cost of instructions in addition to their FLOPs.
        known: cost of the cheapest known plan that fits, or infinity.
    """
    untiled = candidates.estimates.untiled
    most_flops = problem.limits.max_tile_flops * untiled.plain_flops
    for partitioned in partition_choices(problem, candidates.options):
        for number, grid in enumerate(tile_grids(candidates.options, problem.limits)):
            choices = partitioned(grid)
            if independent_tile_flops(problem, choices, untiled) >= min(known, most_flops):
                if not number:
                    return  # partitions for smaller limits have more in tiles
                break  # finer grids compute more
            if _exceeds_room(problem, choices, candidates, room_bytes):
                break
            if _is_too_coarse(problem, choices, candidates, room_bytes) or _tile_exceeds_room(problem, choices, room_bytes):
                continue
            plan = materialize(problem, choices)
            if plan.projection.peak_bytes <= room_bytes:
                cost = project_timeline(problem, plan.choices, plan.projection, rates).estimated_seconds * rates.flops_per_second
                if cost < known:
                    known = cost
                    yield cost, plan
                break


def smallest_tile_plans(problem: PlanningProblem, candidates: CandidateGrid, known_bytes: float) -> Iterator[ProjectedPlan]:
    """Plans in tiles with smaller and smaller peaks below that of a known plan; independent of the budget."""
    untiled = candidates.estimates.untiled
    most_flops = problem.limits.max_tile_flops * untiled.plain_flops
    for partitioned in partition_choices(problem, candidates.options):
        for grid in tile_grids(candidates.options, problem.limits):
            choices = partitioned(grid)
            if independent_tile_flops(problem, choices, untiled) >= most_flops:
                break
            if _exceeds_room(problem, choices, candidates, known_bytes):
                break
            if _is_too_coarse(problem, choices, candidates, known_bytes) or _tile_exceeds_room(problem, choices, known_bytes):
                continue
            plan = materialize(problem, choices)
            if plan.projection.peak_bytes < known_bytes:
                known_bytes = plan.projection.peak_bytes
                yield plan


def _exceeds_room(problem: PlanningProblem, choices: Sequence[SegmentChoice], candidates: CandidateGrid, room_bytes: float) -> bool:
    """True if values between segments, or the untiled operators after them, need too many bytes with every grid."""
    if min_plan_bytes(problem, choices) > room_bytes:
        return True
    return (
        choices[-1].mode == "whole"
        and problem.limits.certain_bytes_share * candidates.untiled_tail_bytes(len(choices[-1].nodes)) > room_bytes
    )


def _is_too_coarse(problem: PlanningProblem, choices: Sequence[SegmentChoice], candidates: CandidateGrid, room_bytes: float) -> bool:
    """True if one tile should need more than the room."""
    return problem.limits.min_tile_share * float(candidates.estimates.peak_bytes[0].min()) > room_bytes * _num_tiles(problem, choices)


def _tile_exceeds_room(problem: PlanningProblem, choices: Sequence[SegmentChoice], room_bytes: float) -> bool:
    """True if one tile, lowered first, needs more than the room: at a padded side of the image, halfway down."""
    region = build_region(problem, choices)
    for segment, makes in zip(region.segments, region.writes, strict=True):
        if isinstance(segment, TiledSegment):
            is_differentiated = problem.sized.training and any(name in problem.sized.requires_grad for name in segment.scope.names)
            sweep = Sweep(segment.chunks[0], 0)
            program = segment.program("joint" if is_differentiated else "forward", segment.schedule.num_steps // 2, sweep)
            output_bytes = sum(problem.sized.value_bytes(name) for name in makes if name not in segment.to_host)
            if problem.resources.resident_input_bytes + output_bytes + program.peak_bytes > room_bytes:
                return True
    return False


def independent_tile_flops(problem: PlanningProblem, choices: Sequence[SegmentChoice], untiled: UntiledCosts) -> float:
    """FLOPs of a step in tiles: each tile computes its halo, forward, and once more before its backward pass.

    Args:
        problem: the planning problem.
        choices: a plan of strategy ``sft``.
        untiled: FLOPs of the untiled operators.
    """
    total = float(untiled.plain_flops)
    for choice in choices:
        if choice.mode != "tiled":
            continue
        shares = [
            _recompute_shares(problem, choice.nodes, choice.strip_rows, 0),
            _recompute_shares(problem, choice.nodes, choice.panel_cols or 0, 1),
        ]
        runs_again = problem.sized.training and any(name in problem.sized.requires_grad for name in choice.nodes)
        for name in choice.nodes:
            share = shares[0].get(name, 1.0) * shares[1].get(name, 1.0)
            flops = untiled.flops[name]
            total += (flops + runs_again * untiled.forward_flops[name]) * share - flops
    return total


def _recompute_shares(problem: PlanningProblem, names: tuple[str, ...], tile_px: int, axis: int) -> dict[str, float]:
    """Computed rows (columns) of each operator over its extent; tiles between the first and the last are equal."""

    def compute() -> dict[str, float]:
        run, extents = problem.sized.phases.run(names), problem.sized.extents(axis)
        extent = max((extents[name] for name in run.sources if name in extents), default=0)
        if not tile_px or tile_px >= extent:
            return {}
        num_tiles = -(-extent // tile_px)
        counts = {0: 1, num_tiles - 1: 1}
        if num_tiles > 2:
            counts[num_tiles // 2] = num_tiles - 2
        rows = dict.fromkeys(names, 0)
        for index, count in counts.items():
            span = Interval(index * tile_px, min((index + 1) * tile_px, extent))
            lengths = tile_lengths_at(run, extents, span, axis=axis)
            for name in rows:
                rows[name] += count * lengths.get(name, 0)
        return {name: rows[name] / extents[name] for name in names if name in extents}

    return problem.memo.memoize(("shares of tiles", names, tile_px, axis), compute)


def _num_tiles(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> int:
    """Largest number of tiles of a segment."""
    counts = [1]
    for choice in choices:
        if choice.mode == "tiled":
            tiles = -(-problem.sized.run_height(choice.nodes) // choice.strip_rows) * problem.sized.num_panels(
                choice.nodes, choice.panel_cols
            )
            counts.append(tiles * -(-problem.sized.num_batch // choice.batch_tile))
    return max(counts)
