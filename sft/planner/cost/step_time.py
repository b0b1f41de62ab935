"""How long a projected step takes, move by move: its programs at the rates of the kind of device, its copies and strips at the link's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sft.lower.program import Program
from sft.planner.cost.roofline import DeviceRates, input_pass_bytes
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, ScheduleOpRecord
from sft.planner.streamed_cuts import HostTraffic, host_traffic
from sft.planner.timeline import Timeline, TimelineEntry

__all__ = ["project_timeline"]


def project_timeline(problem: PlanningProblem, choices: Sequence[SegmentChoice], projection: Projection, rates: DeviceRates) -> Timeline:
    """The laps of a projection, with the seconds that they take at these rates; strips of one signature take the same time."""
    known: dict[int, float] = {}
    passing, reading = host_traffic(problem, choices), input_pass_bytes(problem, choices)

    def seconds(program: Program) -> float:
        if id(program) not in known:
            known[id(program)] = rates.seconds(program)
        return known[id(program)]

    return Timeline(
        entries=tuple(
            TimelineEntry(
                move=str(lap.move if problem.training else replace(lap.move, keep=False)),
                begin_bytes=lap.begin_bytes,
                peak_bytes=lap.peak_bytes,
                end_bytes=lap.end_bytes,
                flops=lap.flops,
                estimated_seconds=_weight_seconds(
                    problem,
                    lap,
                    max(
                        rates.with_reading(
                            sum((count * seconds(program) for program, count in lap.runs), _copy_seconds(problem, lap)),
                            _read_bytes(reading, lap),
                        ),
                        _stream_seconds(problem, passing, lap),
                    ),
                ),
                copied_bytes=lap.copied_bytes,
                waits_for=lap.waits_for,
                weight_bytes=lap.up_bytes + lap.down_bytes,
            )
            for lap in projection.laps
        )
    )


def _copy_seconds(problem: PlanningProblem, lap: ScheduleOpRecord) -> float:
    """What a copy takes that a move begins."""
    seconds = problem.link.up_seconds if lap.move.kind == "prefetch" else problem.link.down_seconds
    return seconds(lap.copied_bytes)


def _read_bytes(reading: Sequence[tuple[float, float]], lap: ScheduleOpRecord) -> float:
    """What a move reads of inputs that are not resident."""
    if lap.move.kind not in ("forward", "backward"):
        return 0.0
    return reading[lap.move.segment][lap.move.kind == "backward"]


def _stream_seconds(problem: PlanningProblem, passing: Sequence[HostTraffic], lap: ScheduleOpRecord) -> float:
    """What the link takes for the strips of a move: a segment is not through before they are."""
    if lap.move.kind not in ("forward", "backward"):
        return 0.0
    return passing[lap.move.segment].seconds(problem.link, back=lap.move.kind == "backward")


def _weight_seconds(problem: PlanningProblem, lap: ScheduleOpRecord, seconds: float) -> float:
    """What a move takes with its streamed weights: beside them where the next move's are read ahead, else behind them."""
    link_seconds = problem.link.streamed_seconds(lap.down_bytes, lap.up_bytes)
    is_beside = problem.weights is not None and problem.weights.reads_ahead
    return max(seconds, link_seconds) if is_beside else seconds + link_seconds
