"""Plan builder: assembles a `sft.Plan` from decisions, projection and footprint formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sft.analysis.tiling.footprint import Footprint, footprint_formulas, run_footprint, run_formulas
from sft.backends.kernel_call import kernel_operators
from sft.planner.cost.step_time import project_timeline
from sft.planner.materialize import ProjectedPlan
from sft.planner.plan import Plan, SegmentChoice, SegmentPlan
from sft.planner.plan_notes import plan_notes
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.repeat_budgets import extra_flops, free_budgets
from sft.runtime.analytic_profile import SweepProfiles
from sft.runtime.moves import default_schedule, num_forwards_of
from sft.runtime.region import Region
from sft.runtime.sample_segment import SampleSegment
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.whole_segment import WholeSegment

__all__ = ["build_plan", "plain_flops"]


def build_plan(problem: PlanningProblem, projected: ProjectedPlan, *, budget_bytes: int) -> Plan:
    """Build the plan; its seconds are estimated at the rates of the device."""
    graph = problem.sized.graph
    rates = replace(problem.resources.rates, replays=projected.projection.records_passes)
    return Plan(
        input_shapes=tuple(problem.sized.shapes[name] for name in graph.inputs),
        input_placements=problem.resources.input_placements,
        output_placements=problem.resources.output_placements,
        dtype=graph[graph.inputs[0]].dtype,
        training=problem.sized.training,
        budget_bytes=budget_bytes,
        resident_bytes=problem.resources.resident_bytes,
        projected_peak_bytes=projected.projection.peak_bytes + projected.projection.overhead_bytes,
        flops=projected.projection.flops,
        plain_flops=plain_flops(problem),
        timeline=project_timeline(problem, projected.choices, projected.projection, rates),
        segments=tuple(_segment_plan(problem, projected, index, budget_bytes) for index in range(len(projected.choices))),
        order=_schedule_text(projected.region),
        host_bytes=projected.projection.host_bytes + projected.projection.staging_bytes,
        skips_repeats=any(isinstance(segment, TiledSegment) and segment.strip_policy.skips for segment in projected.region.segments),
        notes=plan_notes(problem, projected),
        repeat_budgets=free_budgets(problem),
        streamed_weights=0 if problem.resources.weights is None else len(problem.resources.weights.num_bytes),
        weights_peak_bytes=projected.projection.weights_peak_bytes,
        overhead_bytes=projected.projection.overhead_bytes,
        search_limits=problem.limits,
        device_type=rates.device_type,
        gpu_name=rates.gpu.name if rates.device_type == "cuda" else "",
        frozen_bytes=_frozen_bytes(problem) if problem.sized.training else 0,
    )


def _frozen_bytes(problem: PlanningProblem) -> int:
    """Bytes of parameters without a gradient."""
    sized = problem.sized
    return sum(
        sized.value_bytes(node.name) for node in sized.graph.nodes if node.kind == "parameter" and node.name not in sized.requires_grad
    )


def _schedule_text(region: Region) -> tuple[str, ...]:
    """The schedule as text; empty for the default one. Segments without residuals have no use for ``keep``, so it is ignored for them."""
    moves, default = region.schedule, default_schedule(len(region.segments))
    normalized = [
        replace(move, keep=True) if move.kind == "forward" and not region.segments[move.segment].saves else move for move in moves
    ]
    return () if tuple(normalized) == default else tuple(map(str, moves))


def _segment_plan(problem: PlanningProblem, projected: ProjectedPlan, index: int, budget_bytes: int) -> SegmentPlan:
    """The description of a segment in the user's plan."""
    choice, segment, makes = projected.choices[index], projected.region.segments[index], projected.region.writes[index]
    assert isinstance(segment, (TiledSegment, WholeSegment, SampleSegment))
    num_forwards = num_forwards_of(projected.region.schedule, index)
    formulas: tuple[tuple[str, str], ...] = ()
    num_steps, panel_cols, num_panels, state_bytes = 1, 0, 1, 0
    differentiated = any(name in problem.sized.requires_grad for name in choice.nodes)
    if isinstance(segment, TiledSegment):
        footprint = run_footprint(
            problem.sized.phases.run(choice.nodes), problem.sized.shapes, problem.sized.requires_grad, choice.batch_tile
        )
        projection = projected.projection
        spare_bytes = budget_bytes - problem.resources.resident_bytes - projection.peak_bytes - projection.overhead_bytes
        formulas = _formulas(problem, choice, footprint, spare_bytes)
        num_steps = segment.schedule.num_steps
        num_panels = len(segment.panels)
        panel_cols = choice.panel_cols if num_panels > 1 else problem.sized.run_width(choice.nodes)
        state_bytes = _state_bytes(problem, segment) if differentiated else footprint.state_bytes
    elif isinstance(segment, SampleSegment):
        outer, inner = segment.levels[: segment.num_read_levels], segment.levels[segment.num_read_levels :]
        num_steps, num_panels = (math.prod(len(level.chunks) for level in levels) for levels in (outer, inner))
        panel_cols = inner[0].chunk_samples if inner else 0
    working_bytes, flops = _working_and_flops(problem, segment, num_forwards if problem.sized.training else 1)
    return SegmentPlan(
        nodes=choice.nodes,
        layers=(problem.sized.graph[choice.nodes[0]].label, problem.sized.graph[choice.nodes[-1]].label),
        mode=choice.mode,
        placement=_placement(segment, makes),
        strip_rows=segment.schedule.strip_rows if isinstance(segment, TiledSegment) else choice.strip_rows,
        panel_cols=panel_cols,
        num_panels=num_panels,
        halo=choice.halo,
        restart=choice.restart,
        state_every=choice.state_every,
        state_slots=choice.state_slots,
        batch_tile=problem.sized.num_batch if isinstance(segment, WholeSegment) else choice.batch_tile,
        num_steps=num_steps,
        num_forwards=num_forwards,
        state_bytes=state_bytes,
        working_bytes=working_bytes,
        output_bytes=sum(problem.sized.value_bytes(name) for name in makes),
        flops=flops,
        kernels=kernel_operators(segment.lowered_programs) if problem.resources.backend is not None else (),
        formulas=formulas,
        streamed=choice.streamed,
        chunk_unit=_chunk_unit(problem, choice),
    )


def _formulas(problem: PlanningProblem, choice: SegmentChoice, footprint: Footprint, spare_bytes: int) -> tuple[tuple[str, str], ...]:
    """Printed formulas of a tiled segment, and its tallest strip if ``spare_bytes`` more are used."""
    sized = problem.sized
    by_size = problem.memoize_across_sizes(("formulas", choice.nodes), lambda: run_formulas(sized.phases.run(choice.nodes)))
    max_rows = footprint.largest_strip(footprint.working_bytes(choice.strip_rows) + spare_bytes, sized.stride(choice.nodes))
    rows_text = "-" if max_rows is None else f"{min(max_rows, sized.run_height(choice.nodes))} rows"
    formulas = (*by_size, *footprint_formulas(footprint)) if by_size else ()
    return (*formulas, ("tallest strip for this budget, by the footprint", rows_text))


def _chunk_unit(problem: PlanningProblem, choice: SegmentChoice) -> str:
    """Samples that an untiled segment takes at a time, if they are not those of the batch."""
    stage = problem.sized.window_stage(choice.nodes) if choice.mode == "whole" and choice.strip_rows else None
    return "window rows" if stage is None else stage.unit


def _placement(segment: TiledSegment | WholeSegment | SampleSegment, makes: tuple[str, ...]) -> str:
    """Memory of a segment's outputs after it has run."""
    if not segment.to_host:
        return "device"
    return "host" if segment.to_host.issuperset(makes) else "device and host"


def _state_bytes(problem: PlanningProblem, segment: TiledSegment) -> int:
    """Bytes of the rows in all kept states, each row counted once."""
    schedule = segment.schedule
    if not schedule.num_steps:
        return 0
    kept_strips = np.array(sorted(segment.kept_states))
    total = 0
    for name in schedule.names:
        if name in schedule.sources or name not in problem.sized.phases.streamed:
            continue
        stop, start = schedule.frontier[name][kept_strips], schedule.kept[name][kept_strips]
        before = np.concatenate([[0], stop[:-1]])
        rows = int(np.maximum(0, stop - np.maximum(start, before)).sum())
        row_bytes = [segment.row_bytes(name, sweep) for sweep in segment.sweeps]
        # With restart only the states of one sweep exist at a time.
        total += rows * (max(row_bytes) if segment.restart else sum(row_bytes))
    return total


def _working_and_flops(
    problem: PlanningProblem, segment: TiledSegment | WholeSegment | SampleSegment, num_forwards: int
) -> tuple[int, int]:
    if isinstance(segment, WholeSegment):
        programs = [p for p in segment.programs(problem.sized.training) if p is not None]
        return max(p.peak_bytes for p in programs), sum(p.flops for p in (*programs, *programs[:1] * (num_forwards - 1)))
    differentiate = problem.sized.training and any(name in problem.sized.requires_grad for name in segment.scope.names)
    if isinstance(segment, SampleSegment):
        programs = [*segment.programs("forward") * num_forwards, *(segment.programs("backward") if differentiate else ())]
        return max(program.peak_bytes for program in programs), sum(program.flops for program in programs)
    profiles = SweepProfiles(segment, keep=problem.sized.training, differentiate=differentiate, on_host=problem.resources.on_host)
    forward = sum(profiles[sweep].forward_flops for sweep in segment.sweeps)
    return segment.working_bytes, num_forwards * forward + sum(profiles[sweep].backward_flops for sweep in segment.sweeps)


def plain_flops(problem: PlanningProblem) -> int:
    """FLOPs of the untiled model as plain PyTorch runs it: without blocks that run again, and without clones."""
    clones = problem.sized.phases.clones
    instructions = (instruction for program in plain_programs(problem) for instruction in program.instructions)
    return sum(instruction.flops for instruction in instructions if instruction.owner not in clones) - extra_flops(problem)
