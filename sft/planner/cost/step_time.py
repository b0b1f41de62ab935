"""Projected step time: compute time of each schedule op at device rates, transfer time at the link's bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sft.lower.program import Program
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, ScheduleOpRecord
from sft.planner.streamed_cuts import HostTraffic, host_traffic
from sft.planner.timeline import Timeline, TimelineEntry
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["input_pass_bytes", "project_timeline", "source_bytes"]


def project_timeline(problem: PlanningProblem, choices: Sequence[SegmentChoice], projection: Projection, rates: DeviceRates) -> Timeline:
    """Timeline of a projection at these rates; strips of equal programs take the same time."""
    program_seconds: dict[int, float] = {}
    traffic, reads = host_traffic(problem, choices), input_pass_bytes(problem, choices)

    def seconds(program: Program) -> float:
        if id(program) not in program_seconds:
            program_seconds[id(program)] = rates.seconds(program)
        return program_seconds[id(program)]

    def op_seconds(record: ScheduleOpRecord) -> float:
        computing = sum((count * seconds(program) for program, count in record.runs), _copy_seconds(problem, record))
        with_reads = rates.with_reading(computing, _read_bytes(reads, record))
        streaming, awaited = _stream_seconds(problem, traffic, record)
        return _with_weights(problem, record, max(with_reads + awaited, streaming))

    return Timeline(
        entries=tuple(
            TimelineEntry(
                move=str(record.move if problem.sized.training else replace(record.move, keep=False)),
                begin_bytes=record.begin_bytes,
                peak_bytes=record.peak_bytes,
                end_bytes=record.end_bytes,
                flops=record.flops,
                estimated_seconds=op_seconds(record) + (0.0 if position else rates.step_seconds),
                copied_bytes=record.copied_bytes,
                waits_for=record.waits_for,
                weight_bytes=record.up_bytes + record.down_bytes,
            )
            for position, record in enumerate(projection.op_records)
        )
    )


def _copy_seconds(problem: PlanningProblem, record: ScheduleOpRecord) -> float:
    """Seconds of the copy that a schedule op begins."""
    seconds = problem.resources.link.up_seconds if record.move.kind == "prefetch" else problem.resources.link.down_seconds
    return seconds(record.copied_bytes)


def _read_bytes(reads: Sequence[tuple[float, float]], record: ScheduleOpRecord) -> float:
    """Bytes of streamed inputs that a schedule op reads."""
    if record.move.kind not in ("forward", "backward"):
        return 0.0
    return reads[record.move.segment][record.move.kind == "backward"]


def _stream_seconds(problem: PlanningProblem, traffic: Sequence[HostTraffic], record: ScheduleOpRecord) -> tuple[float, float]:
    """Link seconds of the streamed cuts of a schedule op, and those during which the device computes nothing.

    A segment completes after its last strip has passed.
    """
    if record.move.kind not in ("forward", "backward"):
        return 0.0, 0.0
    passing, link, back = traffic[record.move.segment], problem.resources.link, record.move.kind == "backward"
    return passing.seconds(link, back=back), passing.awaited_seconds(link, back=back)


def _with_weights(problem: PlanningProblem, record: ScheduleOpRecord, seconds: float) -> float:
    """Seconds of a schedule op with its streamed weights: overlapped if weights are prefetched, otherwise added."""
    link_seconds = problem.resources.link.streamed_seconds(record.down_bytes, record.up_bytes)
    is_overlapped = problem.resources.weights is not None and problem.resources.weights.reads_ahead
    return max(seconds, link_seconds) if is_overlapped else seconds + link_seconds


def source_bytes(problem: PlanningProblem, nodes: Iterable[str]) -> int:
    """Bytes of the streamed inputs, as the network gets them, that these operators read."""
    if not problem.resources.from_source:
        return 0
    operands = {operand for name in nodes for operand in problem.sized.graph[name].operands}
    return sum(map(problem.sized.value_bytes, problem.resources.from_source & operands))


def input_pass_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[tuple[float, float], ...]:
    """Bytes of streamed inputs that each segment reads in its forward pass, and in its backward pass."""
    return tuple(_pass_bytes(problem, choice) for choice in choices)


def _pass_bytes(problem: PlanningProblem, choice: SegmentChoice) -> tuple[float, float]:
    num_bytes = source_bytes(problem, choice.nodes)
    if not num_bytes or choice.mode != "tiled":
        return float(num_bytes), float(num_bytes)
    num_panels = problem.sized.num_panels(choice.nodes, choice.panel_cols)
    num_sweeps = num_panels * -(-problem.sized.num_batch // choice.batch_tile)
    num_strips = -(-problem.sized.run_height(choice.nodes) // choice.strip_rows)
    restarted = 1 - 1 / num_sweeps if choice.restart else 0.0  # the last sweep has kept its states
    restored = 0.0
    if choice.halo == "carry":
        restored = Checkpoints(choice.state_every, choice.state_slots).num_restored(num_strips) / num_strips
    return float(num_panels * num_bytes), num_panels * num_bytes * (1 + restarted + restored)
