"""The independent tiles of strategy ``sft`` beside strips: those that may cost less than what was found already.

Tiles keep no states and restore none, which is worth the halos that they compute twice where states have no room. What a grid of tiles
computes is counted before anything is lowered: in closed form for one axis, and a tile's pixels are a product. So a grid is projected only
where it may win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sft.analysis.interval import Interval
from sft.analysis.tile import tile_lengths_at
from sft.plan.build import build_region
from sft.plan.carried import CERTAIN_SHARE, ProjectedPlan, materialize
from sft.plan.clock import project_timeline
from sft.plan.problem import PlanningProblem
from sft.plan.rates import DeviceRates
from sft.plan.strategy_sft import tile_grids, min_plan_bytes, partition_choices
from sft.plan.survey import CandidateGrid
from sft.plan.types import SegmentChoice
from sft.walk.layout import Sweep
from sft.walk.segments import TiledSegment

__all__ = ["cheaper_tile_plans", "independent_tile_flops", "smallest_tile_plans"]

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
    return choices[-1].mode == "whole" and CERTAIN_SHARE * survey.bytes_of_last(len(choices[-1].nodes)) > room_bytes


def _is_too_coarse(problem: PlanningProblem, choices: Sequence[SegmentChoice], survey: CandidateGrid, room_bytes: int) -> bool:
    """Whether a tile should need more."""
    return _MIN_SHARE * float(survey.peak_bytes[0].min()) > room_bytes * _num_tiles(problem, choices)


def _tile_exceeds_room(problem: PlanningProblem, choices: Sequence[SegmentChoice], room_bytes: int) -> bool:
    """Whether a tile does that is lowered before all others: at a side of the image, where it is padded, half way down."""
    region = build_region(problem, choices)
    for segment, makes in zip(region.segments, region.makes, strict=True):
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
