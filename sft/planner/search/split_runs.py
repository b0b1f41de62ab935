"""Split runs: plans whose runs of tiled operators are cut where the resolution changes, with cuts that pass through the host.

The halo of a run grows with each level of resolution: a strip of a U-Net with five levels reads 199 rows and columns around it. In a small
budget its tiles are hardly larger than that, compute all levels several times, and leave most of the device idle. The operators of one
level read a few rows around a strip. So each level of the encoder and of the decoder is a segment of its own. The tensors between them,
among them the skips, pass through the host strip by strip (:mod:`sft.planner.streamed_cuts`); those for which the room suffices stay.

A cut is at the side of the lower resolution: after pooling, and before upsampling. Halos are recomputed, as states of all strips would take
more bytes than the rows that they save. The values of a strip take about the same bytes in all segments: low resolutions have fewer,
higher strips, so that the host issues fewer calls. These bytes are the largest ones that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.streamed_cuts import minimize_streamed_cuts, streamable_values, with_streamed

__all__ = ["level_groups", "split_run_plans"]

#: Most bytes of the values of a strip: 32-bit indices of GPUs address the elements of each.
_MAX_STRIP_BYTES: Final = 0.9 * 2**31
#: Ratio of the bytes of strips that are tried one after the other, and their number.
_RATIO: Final = 0.85
_NUM_SIZES: Final = 48
#: Share of the room that the values of the first strips take.
_FIRST_SHARE: Final = 0.25
#: Numbers of steps to lower strips, which leave room for cuts on the device.
_LOWER_STEPS: Final = (0, 4)


def split_run_plans(problem: PlanningProblem, room_bytes: int) -> Iterator[ProjectedPlan]:
    """Plans that fit, with each level of resolution in a segment of its own; none if no run has several levels."""
    groups = level_groups(problem)
    largest = max((_value_bytes(problem, names) for names, is_tiled in groups if is_tiled), default=0)
    num_runs = sum(bool(phase.streamed) for phase in problem.sized.phases.phases)
    if sum(is_tiled for _, is_tiled in groups) <= num_runs:
        return

    def split(size: int) -> tuple[SegmentChoice, ...]:
        return _split(problem, groups, max(1, int(min(largest, _MAX_STRIP_BYTES) * _RATIO**size)))

    def fitting_plan(choices: Sequence[SegmentChoice]) -> ProjectedPlan | None:
        plan = materialize(problem, choices)
        return plan if plan.projection.fits(problem.resources, room_bytes) else None

    size = _tallest(problem, room_bytes, largest, split)
    for lower in () if size is None else (size + steps for steps in _LOWER_STEPS):
        plan = minimize_streamed_cuts(problem, split(lower), fitting_plan)
        if plan is not None:
            yield plan


def _tallest(problem: PlanningProblem, room_bytes: int, largest: int, split: Callable[[int], tuple[SegmentChoice, ...]]) -> int | None:
    """The size of the tallest strips that fit with all cuts streamed; ``None`` if none do.

    Besides the bytes between segments, a step takes those of the values of a strip, times a factor. Each projection corrects it.
    """
    most_bytes = min(largest, _MAX_STRIP_BYTES)
    size, low, high = max(0, _size_of(_FIRST_SHARE * max(1, room_bytes) / most_bytes)), 0, _NUM_SIZES + 1  # sizes from `high` on fit
    while low < high and size <= _NUM_SIZES:
        projection = materialize(problem, split(size)).projection
        low, high = (low, size) if projection.fits(problem.resources, room_bytes) else (size + 1, high)
        waiting_bytes = max(record.begin_bytes for record in projection.op_records)  # the same for all strips
        if waiting_bytes >= room_bytes:
            return None
        ratio = (room_bytes - waiting_bytes) / max(1, projection.peak_bytes - waiting_bytes)
        size = min(max(low, size + _size_of(ratio)), high - 1)
    return high if high <= _NUM_SIZES else None


def _size_of(share: float) -> int:
    """Steps of the ratio to this share of the tallest strips."""
    return round(math.log(share) / math.log(_RATIO))


def level_groups(problem: PlanningProblem) -> list[tuple[tuple[str, ...], bool]]:
    """Operators in execution order, in groups that are tiled or not; a tiled group has the operators of one resolution."""
    groups: list[tuple[tuple[str, ...], bool]] = []
    for phase in problem.sized.phases.phases:
        groups += [(names, True) for names in _levels(problem, phase.streamed)]
        if phase.tail:
            groups.append((phase.tail, False))
    return groups


def _levels(problem: PlanningProblem, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A run in groups of one resolution, which end after an operator that lowers it, or before one that raises it."""
    extents = problem.sized.extents(0)
    heights = [extents.get(name, 0) for name in names]  # sums over the image have none
    changes = ((position, before, after) for position, (before, after) in enumerate(pairwise(heights), 1) if before and after)
    ends = {position + (after < before) for position, before, after in changes if before != after}
    for begin, end in pairwise(sorted({0, *ends, len(names)})):
        yield tuple(names[begin:end])


def _split(problem: PlanningProblem, groups: Sequence[tuple[tuple[str, ...], bool]], strip_bytes: int) -> tuple[SegmentChoice, ...]:
    """The groups as segments with all cuts streamed, in strips of so many bytes."""
    choices = []
    for names, is_tiled in groups:
        if not is_tiled:
            choices.append(SegmentChoice(nodes=names, mode="whole"))
            continue
        height, stride = problem.sized.run_height(names), problem.sized.stride(names)
        rows = -(-height // max(1, -(-_value_bytes(problem, names) // strip_bytes)))
        batch_tile = problem.sized.batch_tile(None)
        choices.append(
            SegmentChoice(
                nodes=names, mode="tiled", strip_rows=min(height, -(-rows // stride) * stride), batch_tile=batch_tile, halo="recompute"
            )
        )
    return with_streamed(choices, streamable_values(problem, choices))


def _value_bytes(problem: PlanningProblem, names: Sequence[str]) -> int:
    return sum(map(problem.sized.value_bytes, names))
