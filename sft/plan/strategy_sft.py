"""Strategy ``sft``: the plan of Xu et al., "Training of deep learning pipelines on memory-constrained GPUs via segmented fused-tiled
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

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sft.analysis.partition import PartitionGraphCache, PartitionShapeCache, partition
from sft.options import Options
from sft.plan.problem import PlanningProblem
from sft.plan.types import SegmentChoice

__all__ = ["tile_grids", "min_plan_bytes", "partition_choices"]

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
        "tiled segments of partitions", lambda: PartitionShapeCache(problem.shared_by_sizes("runs of partitions", PartitionGraphCache))
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
    handed_on = {name for choice in choices if choice.mode == "tiled" for name in problem.graph.handed_on(choice.nodes)}
    handed_on -= problem.host_outputs
    return sum(problem.value_bytes(name) for name in handed_on) if problem.training else 0
