"""Text reports of plans: ``plan.explain()``, at most 80 columns wide, and the one-line form."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from sft.common.byte_units import format_bytes, format_seconds
from sft.planner.cost.gpu_time import H100
from sft.planner.cost.roofline import DeviceRates

if TYPE_CHECKING:
    from sft.planner.plan import Plan, SegmentPlan

__all__ = ["plan_line", "plan_report"]

_HALO = {"carry": "carried", "recompute": "recomputed"}


def _states_text(segment: SegmentPlan) -> str:
    return (
        f"{segment.state_slots} at most, the remaining ones restored"
        if segment.state_slots
        else f"kept every {segment.state_every} strip(s)"
    )


#: Lines of a short report, and of its parts that may be long.
_MAX_LINES, _MAX_ORDER_LINES, _MAX_NOTES, _MIN_SEGMENTS = 40, 2, 5, 8


def plan_report(plan: Plan, *, costs: bool = False, full: bool = True) -> str:
    """Text of a plan: the split of the budget, then its segments.

    Args:
        plan: the plan.
        costs: add the seconds of each segment.
        full: a block per segment; otherwise one line per segment, and 40 lines at most unless ``costs`` is true.
    """
    lines = [*_header_lines(plan), *_order_lines(plan, full=full), *_limits_lines(plan)]
    if plan.mesh is not None:
        lines += ["", *plan.mesh.lines()]
    if full:
        if costs:
            lines += ["", *_costs_lines(plan)]
        for number, segment in enumerate(plan.segments):
            lines += ["", *_segment_lines(number, segment)]
    notes = list(plan.notes)
    if not full and len(notes) > _MAX_NOTES:
        notes = [*notes[: _MAX_NOTES - 1], _left_out(len(notes) - _MAX_NOTES + 1)]
    if not full:
        num_notes = len(notes) + 2 if notes else 0
        lines += ["", *_segment_table(plan, costs=costs, max_lines=max(_MIN_SEGMENTS, _MAX_LINES - len(lines) - num_notes - 1))]
    if notes:
        lines += ["", "On whole tensors, where they fit:", *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _left_out(count: int) -> str:
    return f"... and {count} more (--full, or explain())"


def _header_lines(plan: Plan) -> list[str]:
    """Inputs, bytes, FLOPs and seconds."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.input_shapes)
    kind = "a training step" if plan.training else "inference"
    num_read = sum(placement == "source" for placement in plan.input_placements)
    read = f", {num_read} of {len(plan.input_placements)} input(s) read in strips" if num_read else ""
    num_on_host = plan.output_placements.count("host")
    host = f", {num_on_host} output(s) on the host" if num_on_host else ""
    lines = [
        f"Plan for {kind} on {shapes} ({plan.dtype}){read}{host}",
        f"  budget            {format_bytes(plan.budget_bytes):>12}{_in_brackets(plan.budget_note)}",
        f"  total             {format_bytes(plan.total_bytes):>12}  = resident + projected peak",
        f"    resident        {format_bytes(plan.resident_bytes):>12}  parameters, their gradients, buffers, optimizer state",
        f"    projected peak  {format_bytes(plan.projected_peak_bytes):>12}  inputs, outputs, cuts, states, strips, new gradients",
        *_weights_lines(plan),
        *_overhead_lines(plan),
        *_host_lines(plan),
        f"  FLOPs             {plan.flops:>12.4g}  = {plan.redundancy:.4f} x plain ({plan.plain_flops:.4g})",
    ]
    if plan.skips_repeats:
        lines.append(f"{'':20}and less where strips repeat their neighbours: last_skipping of the compiled module says how much")
    if plan.projected_seconds is not None:
        place = _DEVICES.get(plan.device_type, "the device")
        lines.append(
            f"  projected time    {format_seconds(plan.projected_seconds):>12}  each program timed on {place}, as often as it runs"
        )
    else:
        lines.append(f"  estimated time    {format_seconds(plan.estimated_seconds):>12}  {_rate_text(plan)}: to compare plans by")
    return lines


#: Devices by kind, in sentences.
_DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}


def _rate_text(plan: Plan) -> str:
    """Origin of the estimated seconds: kind of device and rate."""
    if not plan.device_type:
        return "from FLOPs, at a rate of the kind of device"
    if plan.device_type == "cuda":
        return f"by the rates of an {H100.name}, not measured"
    rate = DeviceRates(plan.device_type).flops_per_second
    assumed = ", assumed for a model on the meta device" if plan.device_type == "meta" else ""
    return f"for {_DEVICES.get(plan.device_type, 'a GPU')} of {rate:.0e} FLOPs a second{assumed}".replace("e+", "e")


def _order_lines(plan: Plan, *, full: bool) -> list[str]:
    """The schedule, if it is not the default one."""
    if not plan.order:
        return []
    lines = textwrap.wrap(" ".join(plan.order), width=120, initial_indent="  order             ", subsequent_indent=" " * 20)
    if full or len(lines) <= _MAX_ORDER_LINES:
        return lines
    shown = lines[:_MAX_ORDER_LINES]
    return [*shown, f"{'':20}{_left_out(len(plan.order) - sum(len(line.removeprefix('  order').split()) for line in shown))}"]


def _limits_lines(plan: Plan) -> list[str]:
    """Thresholds of the search that differ from the defaults."""
    if plan.search_limits is None or not plan.search_limits.changes():
        return []
    text = ", ".join(plan.search_limits.changes())
    return textwrap.wrap(text, width=120, initial_indent="  search limits     ", subsequent_indent=" " * 20)


def _segment_table(plan: Plan, *, costs: bool, max_lines: int) -> list[str]:
    """A line per segment; of many segments the largest ones, in their order, and the sums of the others."""
    seconds = {cost.segment: cost for cost in plan.timeline.costs()} if costs else {}
    timed = f"{'forward':>11} {'again':>9} {'backward':>9} {'share':>7}" if costs else ""
    lines = [f"  segment  {'runs':<30} {'panels':>6} {'outputs':>11} {'working set':>12} {'FLOPs':>10}{timed}  operators"]
    numbers = list(range(len(plan.segments)))
    max_rows = len(numbers) if costs else max_lines - 2
    if len(numbers) > max_rows + 1:
        largest = sorted(numbers, key=lambda number: plan.segments[number].working_bytes, reverse=True)[:max_rows]
        numbers = sorted(largest)
    for number in numbers:
        segment = plan.segments[number]
        tiled = f"{segment.num_steps} strips of {segment.strip_rows} rows"
        again = f", {segment.num_forwards}x" if segment.num_forwards > 1 else ""
        cost = seconds.get(number)
        times = "" if not costs else f"{'':>38}"
        if cost is not None:
            parts = (cost.forward_seconds, cost.recompute_seconds, cost.backward_seconds)
            times = f"{format_seconds(parts[0]):>11} {format_seconds(parts[1]):>9} {format_seconds(parts[2]):>9} {100 * cost.share:>5.1f} %"
        lines.append(
            f"  {number:>7}  {(tiled if segment.mode == 'tiled' else 'whole') + again:<30} {segment.num_panels:>6} "
            f"{format_bytes(segment.output_bytes):>11} {format_bytes(segment.working_bytes):>12} {segment.flops:>10.3g}{times}  "
            f"{segment.layers[0]} .. {segment.layers[1]}"
        )
    if costs:
        title = f"Seconds of a step, {'measured' if plan.timeline.is_measured else 'estimated'}, in the last columns:"
        lines = [title, *lines, *_waiting_lines(plan)]
    others = [segment for number, segment in enumerate(plan.segments) if number not in set(numbers)]
    if others:
        num_tiled = sum(segment.mode == "tiled" for segment in others)
        lines.append(
            f"  ... {len(others)} more with smaller working sets ({num_tiled} in strips, {len(others) - num_tiled} whole), "
            f"{sum(segment.flops for segment in others):.3g} FLOPs: --full, or explain()"
        )
    return lines


def _in_brackets(note: str) -> str:
    return f"  ({note})" if note else ""


def _host_lines(plan: Plan) -> list[str]:
    """Line of the host's memory."""
    if not plan.host_bytes:
        return []
    return [f"  host              {format_bytes(plan.host_bytes):>12}  for values that leave the device{_in_brackets(plan.host_note)}"]


def plan_line(plan: Plan) -> str:
    """One line of a plan: input, bytes, segments, FLOPs."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.input_shapes)
    num_tiled = sum(segment.mode == "tiled" for segment in plan.segments)
    kind = "training step" if plan.training else "inference"
    total = f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.budget_bytes)}"
    segments = f"{len(plan.segments)} segment(s), {num_tiled} of them in strips"
    return f"{kind} on {shapes} ({plan.dtype}), {total}, {segments}, {plan.redundancy:.2f} x plain FLOPs"


def plan_summary(plan: Plan) -> str:
    """The first block of the report, and the number of segments."""
    head = plan_report(plan).partition("\n\n")[0]
    num_tiled = sum(segment.mode == "tiled" for segment in plan.segments)
    return f"{head}\n  segments          {len(plan.segments):>12}  {num_tiled} in strips; print(plan) shows them"


def _overhead_lines(plan: Plan) -> list[str]:
    """Line of the device's overhead in addition to tensors."""
    if not plan.overhead_bytes:
        return []
    lines = [f"    overhead        {format_bytes(plan.overhead_bytes):>12}  of the peak: the allocator's segments, libraries' workspaces"]
    if plan.projected_reserved_bytes:
        tensors_bytes = plan.total_bytes - plan.overhead_bytes
        ratio = f"{plan.projected_reserved_bytes / tensors_bytes:.2f} x the tensors, " if tensors_bytes else ""
        lines.append(f"    reserved        {format_bytes(plan.projected_reserved_bytes):>12}  {ratio}by the GPU's allocator (simulated)")
    return lines


def _weights_lines(plan: Plan) -> list[str]:
    """Line of the streamed weights: device memory and link traffic."""
    if not plan.streamed_weights:
        return []
    passed = format_bytes(sum(entry.weight_bytes for entry in plan.timeline.entries))
    return [
        f"    weights         {format_bytes(plan.weights_peak_bytes):>12}  of the peak at most: {plan.streamed_weights} parameter(s) are "
        f"streamed, {passed} over the link"
    ]


def _costs_lines(plan: Plan) -> list[str]:
    """Table of the seconds per segment; the FLOP rate is listed only if it was measured."""
    timeline = plan.timeline
    rate = "  GFLOP/s" if timeline.is_measured else ""
    lines = [
        f"Seconds of a step, {'measured' if timeline.is_measured else 'estimated'}:",
        f"  segment    forward  recomputed   backward      share{rate}",
    ]
    for cost in timeline.costs():
        times = f"{cost.forward_seconds:>10.4g}  {cost.recompute_seconds:>10.4g} {cost.backward_seconds:>10.4g}"
        rate = f"{cost.flops_per_second / 1e9:>9.4g}" if timeline.is_measured else ""
        lines.append(f"  {cost.segment:>7} {times}    {100 * cost.share:>5.1f} %{rate}")
    return [*lines, *_waiting_lines(plan)]


def _waiting_lines(plan: Plan) -> list[str]:
    """Seconds without computation, and a remark about tiled segments."""
    timeline, lines = plan.timeline, []
    if any(entry.copied_bytes for entry in timeline.entries):
        lines.append(f"  waiting {timeline.idle_seconds:>10.4g}  for copies to the host and back, with nothing to compute")
    if any(segment.mode == "tiled" for segment in plan.segments) and plan.training:
        lines.append("  (strips of a tiled segment are recomputed within its backward pass)")
    return lines


def _segment_lines(number: int, segment: SegmentPlan) -> list[str]:
    first, last = segment.layers
    runs = f", forward {segment.num_forwards} times" if segment.num_forwards > 1 else ""
    lines = [
        f"Segment {number}: {segment.mode}, {len(segment.nodes)} operators, {first} .. {last}{runs}",
        f"  outputs           {format_bytes(segment.output_bytes):>12}  on the {segment.placement}",
    ]
    if segment.mode == "tiled":
        lines += [
            f"  strips            {segment.num_steps:>12}  of {segment.strip_rows} rows and {segment.panel_cols} columns, "
            f"{segment.batch_tile} batch element(s) at a time",
            f"  panels            {segment.num_panels:>12}  halo of panels recomputed, halo of strips {_HALO[segment.halo]}",
            f"  states            {format_bytes(segment.state_bytes):>12}  {_states_text(segment)}"
            + (", of one sweep at a time: each runs forward once more" if segment.restart else ""),
        ]
    lines += [
        f"  working set       {format_bytes(segment.working_bytes):>12}",
        f"  FLOPs             {segment.flops:>12.4g}",
    ]
    if segment.kernels:
        lines.append(f"  kernels           {len(segment.kernels):>12}  operators run as Triton kernels, with what is fused into them")
    lines += [f"  {name}: {value}" for name, value in segment.formulas]
    return lines
