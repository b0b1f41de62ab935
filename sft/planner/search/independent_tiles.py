"""The independent tiles of strategy ``sft`` beside strips: those that may cost less than what was found already.

Tiles keep no states and restore none, which is worth the halos that they compute twice where states have no room. What a grid of tiles
computes is counted before anything is lowered: in closed form for one axis, and a tile's pixels are a product. So a grid is projected only
where it may win.

Strategy ``sft``: the plan of Xu et al., "Training of deep learning pipelines on memory-constrained GPUs via segmented fused-tiled
execution", CC 2022, on our executor.

A value as large as a *limit* must be tiled; the others may be kept, and are the segments' borders (Listing 3, ``analysis.partition``). A
tiled segment runs as a grid of 2^n x 2^n independent tiles of its results, each with its own halo (Listing 4, ``analysis.tile``); what
lies between is kept whole, as plain PyTorch keeps it.

The paper takes the device memory as limit and leaves it to the user to find the grid that is fastest. Here both are searched: for
limits from the largest value downwards by halves, the coarsest grid that fits; of these plans the one with the fewest FLOPs. The paper's
condition is per value and per segment; that everything fits *together* is what the exact projection of each plan decides.
Complexity: O(log(limit) * log(tiles)) projections, each linear in operators and tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from sft.analysis.tiling.independent_tiles import tile_lengths_at
from sft.analysis.tiling.sft_partition import PartitionGraphCache, PartitionShapeCache, partition
from sft.common.interval import Interval
from sft.planner.cost.roofline import DeviceRates
from sft.planner.cost.step_time import project_timeline
from sft.planner.materialize import CERTAIN_SHARE, ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.search.tiled import CandidateGrid
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment

__all__ = ["cheaper_tile_plans", "independent_tile_flops", "min_plan_bytes", "partition_choices", "smallest_tile_plans", "tile_grids"]

#: Tiles along each side of the finest grid.
_MAX_TILES = 32
_NUM_LIMITS = 16

#: Tiles end at whole strides where these are at most this share of them: then most tiles are alike, and share their programs.
_SMALL_STRIDE = 1 / 16

#: The rows and columns of a tile, given the extent of the tallest and of the widest image of a segment, and its stride.
Grid = Callable[[int, int, int], tuple[int, int]]
#: Operators in order, in groups that are tiled or not.
Partition = tuple[tuple[tuple[str, ...], bool], ...]


def tile_grids(options: Options) -> tuple[Grid, ...]:
    """The grids to try, from coarse to fine: 2^n x 2^n tiles, or tiles of a forced size."""
    if options.tile is not None:
        rows, cols = options.tile
        return (lambda height, width, stride: (min(rows, height), min(cols or width, width)),)
    counts = [2**n for n in range(_MAX_TILES.bit_length())]
    return tuple(partial(_grid_tile_px, n) for n in counts)


def _grid_tile_px(n: int, height: int, width: int, stride: int) -> tuple[int, int]:
    return _tile_extent(height, n, stride), _tile_extent(width, n, stride)


def _tile_extent(extent: int, n: int, stride: int) -> int:
    part = -(-extent // n)
    return min(extent, -(-part // stride) * stride) if stride <= _SMALL_STRIDE * part else part


def partition_choices(problem: PlanningProblem, options: Options) -> Iterator[Callable[[Grid], tuple[SegmentChoice, ...]]]:
    """The paper's partitions for smaller and smaller limits, each waiting for a grid; those that cannot run are left out.

    Args:
        problem: the model at one size.
        options: ``batch_tile``; and whether a tile is forced, then even a model that fits is cut where its largest values are.
    """
    largest = max((problem.value_bytes(name) for phase in problem.phases.phases for name in phase.streamed), default=1)
    # Below the first limit every value stays; from the second on the largest must be tiled.
    limits = [max(1, 2 * largest >> n) for n in range(int(options.tile is not None), _NUM_LIMITS)]
    seen: set[Partition] = set()
    for limit_bytes in limits:
        parts = _partition(problem, limit_bytes)
        if parts is None or parts in seen:
            continue
        seen.add(parts)
        yield partial(_choices, problem, parts, options)


def _partition(problem: PlanningProblem, limit_bytes: int) -> Partition | None:
    """Operators in order and whether they are tiled; ``None`` where the paper reports out of memory."""
    phases = problem.phases
    known: PartitionShapeCache = problem.remembered(
        "tiled segments of partitions", lambda: PartitionShapeCache(problem.memoize_across_sizes("runs of partitions", PartitionGraphCache))
    )
    parts: list[tuple[tuple[str, ...], bool]] = []
    for phase in phases.phases:
        found = partition(problem.graph, phase.streamed, phases.rows, phases.streamed, problem.shapes, limit_bytes, known)
        if found.problems or any(segment.tiled and "height" not in segment.dimensions for segment in found.segments):
            return None
        parts += [(segment.names, segment.tiled) for segment in found.segments]
        if phase.tail:
            parts.append((phase.tail, False))
    return tuple(parts)


def _choices(problem: PlanningProblem, parts: Partition, options: Options, grid: Grid) -> tuple[SegmentChoice, ...]:
    choices: list[SegmentChoice] = []
    waiting: tuple[str, ...] = ()
    for names, tiled in parts:
        if not tiled:
            waiting += names
            continue
        if waiting:
            choices.append(SegmentChoice(nodes=waiting, mode="whole"))
            waiting = ()
        rows, cols = grid(problem.run_height(names), problem.run_width(names), problem.stride(names))
        choices.append(
            SegmentChoice(
                nodes=names,
                mode="tiled",
                strip_rows=rows,
                batch_tile=problem.batch_tile(options.batch_tile),
                panel_cols=cols,
                halo="recompute",
            )
        )
    if waiting:
        choices.append(SegmentChoice(nodes=waiting, mode="whole"))
    return tuple(choices)


def min_plan_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> int:
    """Bytes that any plan with these segments needs: the values between them, which the backward pass reads again."""
    live_out = {name for choice in choices if choice.mode == "tiled" for name in problem.graph.live_out(choice.nodes)}
    live_out -= problem.host_outputs
    return sum(problem.value_bytes(name) for name in live_out) if problem.training else 0


#: A tile should need at least this share of what its part of the whole needs.
_MIN_SHARE = 0.5
#: A step that computes so many times what plain PyTorch does is no plan that anybody wants.
_MAX_TIMES = 4.0


def cheaper_tile_plans(
    problem: PlanningProblem, survey: CandidateGrid, room_bytes: int, rates: DeviceRates, known: float
) -> Iterator[tuple[float, ProjectedPlan]]:
    """Plans in tiles that fit and cost less than what is known, with what they cost: for each partition the coarsest grid that fits.

    Args:
        problem: the model at one size.
        survey: of candidates with and without strips.
        room_bytes: what a step may hold.
        rates: what an instruction costs besides its FLOPs.
        known: the cost of the cheapest plan that fits, infinity where there is none.
    """
    most_flops = _MAX_TIMES * survey.plain_flops
    for partitioned in partition_choices(problem, survey.options):
        for number, grid in enumerate(tile_grids(survey.options)):
            choices = partitioned(grid)
            if independent_tile_flops(problem, choices, survey.forward_flops, survey.flops) >= min(known, most_flops):
                if not number:
                    return  # partitions for smaller limits have more in tiles
                break  # finer grids compute more
            if _exceeds_room(problem, choices, survey, room_bytes):
                break
            if _is_too_coarse(problem, choices, survey, room_bytes) or _tile_exceeds_room(problem, choices, room_bytes):
                continue
            planned = materialize(problem, choices)
            if planned.projection.peak_bytes <= room_bytes:
                cost = project_timeline(problem, planned.choices, planned.projection, rates).estimated_seconds * rates.flops_per_second
                if cost < known:
                    known = cost
                    yield cost, planned
                break


def smallest_tile_plans(problem: PlanningProblem, survey: CandidateGrid, known_bytes: int) -> Iterator[ProjectedPlan]:
    """Plans in tiles that need less and less, below what the smallest plan does that is known; the answer does not depend on a budget."""
    most_flops = _MAX_TIMES * survey.plain_flops
    for partitioned in partition_choices(problem, survey.options):
        for grid in tile_grids(survey.options):
            choices = partitioned(grid)
            if independent_tile_flops(problem, choices, survey.forward_flops, survey.flops) >= most_flops:
                break
            if _exceeds_room(problem, choices, survey, known_bytes):
                break
            if _is_too_coarse(problem, choices, survey, known_bytes) or _tile_exceeds_room(problem, choices, known_bytes):
                continue
            planned = materialize(problem, choices)
            if planned.projection.peak_bytes < known_bytes:
                known_bytes = planned.projection.peak_bytes
                yield planned


def _exceeds_room(problem: PlanningProblem, choices: Sequence[SegmentChoice], survey: CandidateGrid, room_bytes: int) -> bool:
    """Whether what is between segments, or kept whole behind them, is too much whatever the grid."""
    if min_plan_bytes(problem, choices) > room_bytes:
        return True
    return choices[-1].mode == "whole" and CERTAIN_SHARE * survey.untiled_tail_bytes(len(choices[-1].nodes)) > room_bytes


def _is_too_coarse(problem: PlanningProblem, choices: Sequence[SegmentChoice], survey: CandidateGrid, room_bytes: int) -> bool:
    """Whether a tile should need more."""
    return _MIN_SHARE * float(survey.peak_bytes[0].min()) > room_bytes * _num_tiles(problem, choices)


def _tile_exceeds_room(problem: PlanningProblem, choices: Sequence[SegmentChoice], room_bytes: int) -> bool:
    """Whether a tile does that is lowered before all others: at a side of the image, where it is padded, half way down."""
    region = build_region(problem, choices)
    for segment, makes in zip(region.segments, region.writes, strict=True):
        if isinstance(segment, TiledSegment):
            is_differentiated = problem.training and any(name in problem.requires_grad for name in segment.scope.names)
            walk = Sweep(segment.chunks[0], 0)
            program = segment.program("joint" if is_differentiated else "forward", segment.schedule.num_steps // 2, walk)
            made = sum(problem.value_bytes(name) for name in makes if name not in segment.to_host)
            if problem.resident_input_bytes + made + program.peak_bytes > room_bytes:
                return True
    return False


def independent_tile_flops(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], forward: Mapping[str, int], both: Mapping[str, int]
) -> float:
    """What a step computes in tiles: every tile its halo, forward, and once more before its backward pass.

    Args:
        problem: the model at one size.
        choices: a plan of strategy ``sft``.
        forward: FLOPs of each operator's forward pass on whole values.
        both: the same and those of its backward pass.
    """
    total = float(sum(both.values()))
    for choice in choices:
        if choice.mode != "tiled":
            continue
        shares = [
            _recompute_shares(problem, choice.nodes, choice.strip_rows, 0),
            _recompute_shares(problem, choice.nodes, choice.panel_cols or 0, 1),
        ]
        runs_again = problem.training and any(name in problem.requires_grad for name in choice.nodes)
        for name in choice.nodes:
            share = shares[0].get(name, 1.0) * shares[1].get(name, 1.0)
            total += (both[name] + runs_again * forward[name]) * share - both[name]
    return total


def _recompute_shares(problem: PlanningProblem, names: tuple[str, ...], tile_px: int, axis: int) -> dict[str, float]:
    """How often each operator's rows (columns) are computed, on average; tiles between the first and the last are equal."""

    def found() -> dict[str, float]:
        phases, extents = problem.phases, problem.extents(axis)
        extent = max((extents[name] for name in problem.graph.sources(names, phases.streamed) if name in extents), default=0)
        if not tile_px or tile_px >= extent:
            return {}
        num_tiles = -(-extent // tile_px)
        counts = {0: 1, num_tiles - 1: 1}
        if num_tiles > 2:
            counts[num_tiles // 2] = num_tiles - 2
        rows = dict.fromkeys(names, 0)
        for index, count in counts.items():
            span = Interval(index * tile_px, min((index + 1) * tile_px, extent))
            lengths = tile_lengths_at(problem.graph, names, phases.rows, phases.streamed, extents, span, axis=axis)
            for name in rows:
                rows[name] += count * lengths.get(name, 0)
        return {name: rows[name] / extents[name] for name in names if name in extents}

    return problem.remembered(("shares of tiles", names, tile_px, axis), found)


def _num_tiles(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> int:
    """Of the segment that has most."""
    counts = [1]
    for choice in choices:
        if choice.mode == "tiled":
            tiles = -(-problem.run_height(choice.nodes) // choice.strip_rows) * problem.num_panels(choice.nodes, choice.panel_cols)
            counts.append(tiles * -(-problem.num_batch // choice.batch_tile))
    return max(counts)
