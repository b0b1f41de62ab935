"""Idle values on the host: values between segments, and states of sweeps, that wait there from one use to the next.

A plan that takes some windows or tokens at a time recomputes every segment from the values that it reads. These wait from the forward to
the backward pass: of every block of a transformer the residual stream, and queries, keys and values. With as many as needed of them on the
host, the device holds those of the segment that runs, for any number of blocks.

A copy is either *ahead* (the device's bytes are freed one segment after the last use, and allocated one segment before the next one, so
that copies overlap with computation), or as tight as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.problem import PlanningProblem
from sft.runtime.moves import ScheduleOp, SegmentSchedule
from sft.runtime.region import Region

__all__ = ["IdleGap", "fewest_offloaded", "idle_gaps", "smallest_offloaded", "with_copies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """Two uses of a target of copies with other segments between them.

    Attributes:
        target: a value, or (``"3+"``) the states of a segment.
        before: position of the op that uses it, in the schedule without copies.
        after: position of the op that uses it next.
        is_first: True if the target has not been copied before.
    """

    target: str
    before: int
    after: int
    is_first: bool


def idle_gaps(region: Region) -> dict[str, tuple[IdleGap, ...]]:
    """Gaps between the uses of the targets of a region, in its schedule without copies; the longest waits come first."""
    ops = tuple(op for op in region.schedule if not op.is_copy)
    gaps = {target: tuple(_gaps(target, writes)) for target, writes in region.liveness.offload_targets.uses(ops).items()}
    idle = {target: each for target, each in gaps.items() if each}
    return dict(sorted(idle.items(), key=lambda item: -max(gap.after - gap.before for gap in item[1])))


def _gaps(target: str, writes: Sequence[Sequence[int]]) -> Iterator[IdleGap]:
    for uses in writes:
        is_first = True
        for before, after in pairwise(uses):
            if after - before > 1:
                yield IdleGap(target=target, before=before, after=after, is_first=is_first)
                is_first = False


def with_copies(ops: SegmentSchedule, gaps: Sequence[IdleGap], *, ahead: bool) -> SegmentSchedule:
    """A schedule with copies to the host and back in these gaps; with ``ahead`` those that are long enough overlap with computation."""
    begins, frees, returns = (defaultdict[int, list[ScheduleOp]](list) for _ in range(3))
    for gap in gaps:
        shift = int(ahead and gap.after - gap.before > 3)
        if gap.is_first:
            begins[gap.before].append(_copy("offload", gap.target))
        frees[gap.before + shift].append(_copy("release", gap.target))
        returns[gap.after - shift].append(_copy("prefetch", gap.target))
    return tuple(op for position, run in enumerate(ops) for op in (*returns[position], run, *begins[position], *frees[position]))


def _copy(kind: str, target: str) -> ScheduleOp:
    if target.endswith("+"):
        return ScheduleOp(kind, int(target[:-1]))  # type: ignore[arg-type]  # a kind of copies
    return ScheduleOp(kind, value=target)  # type: ignore[arg-type]


def smallest_offloaded(problem: PlanningProblem, plan: ProjectedPlan) -> ProjectedPlan | None:
    """The plan with every idle target on the host; ``None`` if there are none, or the host has too little memory for them."""
    gaps = idle_gaps(plan.region)
    return _offloaded(problem, plan, gaps, len(gaps), ahead=False) if gaps else None


def fewest_offloaded(problem: PlanningProblem, plan: ProjectedPlan, room_bytes: int) -> ProjectedPlan | None:
    """The plan that fits with the fewest targets on the host, those that wait longest first; ``None`` if none fits.

    Copies that overlap with computation are preferred.
    """
    gaps = idle_gaps(plan.region)
    for ahead in (True, False):
        best = _offloaded(problem, plan, gaps, len(gaps), ahead=ahead) if gaps else None
        if best is None or best.projection.peak_bytes > room_bytes:
            continue
        low, high = 1, len(gaps)  # `high` targets fit
        while low < high:
            middle = (low + high) // 2
            fewer = _offloaded(problem, plan, gaps, middle, ahead=ahead)
            if fewer is not None and fewer.projection.peak_bytes <= room_bytes:
                best, high = fewer, middle
            else:
                low = middle + 1
        return best
    return None


def _offloaded(
    problem: PlanningProblem, plan: ProjectedPlan, gaps: dict[str, tuple[IdleGap, ...]], num_targets: int, *, ahead: bool
) -> ProjectedPlan | None:
    """The plan with the first targets on the host; ``None`` if the host has too little memory for them."""
    chosen = [gap for target in list(gaps)[:num_targets] for gap in gaps[target]]
    ops = tuple(op for op in plan.region.schedule if not op.is_copy)
    offloaded = materialize(problem, plan.choices, with_copies(ops, chosen, ahead=ahead))
    return offloaded if problem.resources.fits_host(offloaded.projection.host_bytes) else None
