"""Text reports of plans: ``plan.explain()``, at most 80 columns wide, and the one-line form."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sft.analysis.ir.graph import label_range
from sft.common.byte_units import format_bytes, format_seconds
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.gpu_models import H100

if TYPE_CHECKING:
    from sft.planner.plan import Plan, SegmentPlan

__all__ = ["plan_line", "plan_report"]

_HALO = {"carry": "carried", "recompute": "recomputed"}
#: Devices by kind, in sentences.
_DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}
#: Columns of a report, and the columns in which the value and the remark of a row begin.
_WIDTH, _VALUE_WIDTH, _NAME_WIDTH = 80, 12, 20
_REMARK = _NAME_WIDTH + _VALUE_WIDTH + 2
#: Lines of a short report, and of its parts that may be long.
_MAX_LINES, _MAX_ORDER_LINES, _MAX_NOTE_LINES, _MIN_SEGMENTS = 40, 2, 8, 5


def plan_report(plan: Plan, *, costs: bool = False, full: bool = True) -> str:
    """Text of a plan: the split of the budget, then its segments; docs/planning.md defines its words.

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
    notes = _note_lines(plan, full=full)
    if not full:
        max_lines = max(_MIN_SEGMENTS, _MAX_LINES - len(lines) - len(notes) - 1)
        lines += ["", *(_times_table(plan) if costs else _segment_table(plan, max_lines=max_lines))]
    return "\n".join([*lines, *notes])


def _row(name: str, value: object, remark: str = "") -> list[str]:
    """A row of name, value and remark; a long remark continues in its column."""
    head = f"{'  ' + name:<{_NAME_WIDTH}}{value:>{_VALUE_WIDTH}}"
    remarks = textwrap.wrap(remark, width=_WIDTH - _REMARK, break_on_hyphens=False) or [""]
    return [f"{head}  {remarks[0]}".rstrip(), *(" " * _REMARK + line for line in remarks[1:])]


def _named(name: str, text: str) -> list[str]:
    """A name and a text in the column of the values, continued there."""
    head, indent = f"{'  ' + name:<{_NAME_WIDTH}}", " " * _NAME_WIDTH
    return textwrap.wrap(text, width=_WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a text with an indent, and a deeper one for all lines but the first."""
    return textwrap.wrap(text, width=_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def _left_out(count: int) -> str:
    return f"... and {count} more (--full, or explain())"


def _note_lines(plan: Plan, *, full: bool) -> list[str]:
    """Reasons why operators run on full tensors; of many the first ones, in a short report."""
    notes = [_wrapped(note, "  ") for note in plan.notes]
    num_shown, num_lines = len(notes), sum(map(len, notes))
    while not full and num_shown > 1 and num_lines > _MAX_NOTE_LINES:
        num_shown -= 1
        num_lines -= len(notes[num_shown])
    lines = [line for note in notes[:num_shown] for line in note]
    if num_shown < len(notes):
        lines.append(f"  {_left_out(len(notes) - num_shown)}")
    return ["", "On full tensors, if they fit:", *lines] if lines else []


def _header_lines(plan: Plan) -> list[str]:
    """Inputs, bytes, FLOPs and seconds."""
    shapes = _shapes_text(plan.input_shapes)
    kind = "a training step" if plan.training else "inference"
    num_read = sum(placement == "source" for placement in plan.input_placements)
    read = f", {num_read} of {len(plan.input_placements)} input(s) read in strips" if num_read else ""
    num_on_host = plan.output_placements.count("host")
    host = f", {num_on_host} output(s) on the host" if num_on_host else ""
    lines = [
        *_wrapped(f"Plan for {kind} on {shapes} ({plan.dtype}){read}{host}"),
        *_transfer_lines(plan),
        *_row("budget", format_bytes(plan.budget_bytes), _in_brackets(plan.budget_note)),
        *_row("total", format_bytes(plan.total_bytes), "= resident + projected peak"),
        *_row("  resident", format_bytes(plan.resident_bytes), "weights, gradients, buffers, optimizer state"),
        *_frozen_lines(plan),
        *_row("  projected peak", format_bytes(plan.projected_peak_bytes), "inputs, outputs, kept values, strips"),
        *_weights_lines(plan),
        *_overhead_lines(plan),
        *_host_lines(plan),
        *_row("FLOPs", f"{plan.flops:.4g}", f"= {plan.redundancy:.4f} x plain PyTorch ({plan.plain_flops:.4g})"),
    ]
    if plan.skips_repeats:
        lines += _row("", "", "and less where strips repeat their neighbours: last_skipping of the compiled module says how much")
    if plan.projected_seconds is not None:
        place = _DEVICES.get(plan.device_type, "the device")
        lines += _row("projected time", format_seconds(plan.projected_seconds), f"each program timed on {place}, as often as it runs")
    else:
        lines += _row("estimated time", format_seconds(plan.estimated_seconds), f"{_rate_text(plan)}: to compare plans by")
    return lines


def _shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def _transfer_lines(plan: Plan) -> list[str]:
    """Origin of decisions that were made for another number of samples."""
    if not plan.transferred_from:
        return []
    return _named("transferred", f"decisions of the plan for {_shapes_text(plan.transferred_from)}, which differs in the number of samples")


def _rate_text(plan: Plan) -> str:
    """Origin of the estimated seconds: kind of device and rate."""
    if not plan.device_type:
        return "from FLOPs, at a rate of the kind of device"
    if plan.device_type == "cuda":
        return f"by the rates of {plan.gpu_name or H100.name}, not measured"
    rate = DeviceRates(plan.device_type).flops_per_second
    assumed = ", assumed for a model on the meta device" if plan.device_type == "meta" else ""
    return f"for {_DEVICES.get(plan.device_type, 'a GPU')} of {rate:.0e} FLOPs a second{assumed}".replace("e+", "e")


def _order_lines(plan: Plan, *, full: bool) -> list[str]:
    """The schedule, if it is not the default one."""
    if not plan.order:
        return []
    lines = _named("order", " ".join(plan.order))
    if full or len(lines) <= _MAX_ORDER_LINES:
        return lines
    shown = lines[:_MAX_ORDER_LINES]
    num_shown = sum(len(line.removeprefix("  order").split()) for line in shown)
    return [*shown, " " * _NAME_WIDTH + _left_out(len(plan.order) - num_shown)]


def _limits_lines(plan: Plan) -> list[str]:
    """Thresholds of the search that differ from the defaults."""
    if plan.search_limits is None or not plan.search_limits.changes():
        return []
    return _named("search limits", ", ".join(plan.search_limits.changes()))


def _runs_text(segment: SegmentPlan) -> str:
    """Strips, panels and forward runs of a segment, in a few characters."""
    strips = _pieces(segment)
    panels = f", {segment.num_panels} panels" if segment.num_panels > 1 else ""
    return strips + panels + (f", {segment.num_forwards}x" if segment.num_forwards > 1 else "")


def _with_operator(line: str, segment: SegmentPlan) -> str:
    """A line of a table with the name of the segment's first operator; a long name loses its begin."""
    name, width = segment.layers[0], max(_WIDTH - len(line) - 2, 8)
    return f"{line}  {name if len(name) <= width else '..' + name[2 - width :]}"


def _segment_table(plan: Plan, *, max_lines: int) -> list[str]:
    """A line per segment; of many segments the largest ones, in their order, and the sums of the others."""
    lines = [f"  segment  {'strips':<21} {'outputs':>11} {'working set':>11}  begins at"]
    numbers = list(range(len(plan.segments)))
    max_rows = max_lines - 2
    if len(numbers) > max_rows + 1:
        largest = sorted(numbers, key=lambda number: plan.segments[number].working_bytes, reverse=True)[:max_rows]
        numbers = sorted(largest)
    for number in numbers:
        segment = plan.segments[number]
        outputs, working = format_bytes(segment.output_bytes), format_bytes(segment.working_bytes)
        lines.append(_with_operator(f"  {number:>7}  {_runs_text(segment):<21} {outputs:>11} {working:>11}", segment))
    unlisted = [segment for number, segment in enumerate(plan.segments) if number not in set(numbers)]
    if unlisted:
        num_tiled = sum(segment.mode == "tiled" for segment in unlisted)
        lines.append(f"  ... {len(unlisted)} more with smaller working sets ({num_tiled} in strips): --full, or explain()")
    return lines


def _times_table(plan: Plan) -> list[str]:
    """A line with seconds per segment."""
    lines = [
        f"Seconds of a step, {'measured' if plan.timeline.is_measured else 'estimated'}:",
        f"  segment  {'strips':<14} {'forward':>9} {'again':>9} {'backward':>9} {'share':>7}  begins at",
    ]
    for cost in plan.timeline.costs():
        segment = plan.segments[cost.segment]
        part_seconds = (cost.forward_seconds, cost.recompute_seconds, cost.backward_seconds)
        times = " ".join(f"{format_seconds(seconds):>9}" for seconds in part_seconds)
        strips = _pieces(segment)
        lines.append(_with_operator(f"  {cost.segment:>7}  {strips:<14} {times} {100 * cost.share:>5.1f} %", segment))
    return [*lines, *_waiting_lines(plan)]


def _in_brackets(note: str) -> str:
    return f"({note})" if note else ""


def _frozen_lines(plan: Plan) -> list[str]:
    """Line of the weights without a gradient."""
    if not plan.frozen_bytes:
        return []
    return _row("    frozen", format_bytes(plan.frozen_bytes), "of the weights: no gradient, no optimizer state")


def _host_lines(plan: Plan) -> list[str]:
    """Line of the host's memory."""
    if not plan.host_bytes:
        return []
    note = f" {_in_brackets(plan.host_note)}" if plan.host_note else ""
    return _row("host", format_bytes(plan.host_bytes), f"for values that leave the device{note}")


def plan_line(plan: Plan) -> str:
    """One line of a plan: input, bytes, segments, FLOPs."""
    shapes = _shapes_text(plan.input_shapes)
    num_tiled = sum(segment.mode == "tiled" for segment in plan.segments)
    kind = "training step" if plan.training else "inference"
    total = f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.budget_bytes)}"
    segments = f"{len(plan.segments)} segment(s), {num_tiled} of them in strips"
    return f"{kind} on {shapes} ({plan.dtype}), {total}, {segments}, {plan.redundancy:.2f} x plain FLOPs"


def _overhead_lines(plan: Plan) -> list[str]:
    """Line of the device's overhead in addition to tensors."""
    if not plan.overhead_bytes:
        return []
    lines = _row("  overhead", format_bytes(plan.overhead_bytes), "of the peak: allocator and library workspaces")
    if plan.projected_reserved_bytes:
        tensors_bytes = plan.total_bytes - plan.overhead_bytes
        ratio = f"{plan.projected_reserved_bytes / tensors_bytes:.2f} x the tensors, " if tensors_bytes else ""
        lines += _row("  reserved", format_bytes(plan.projected_reserved_bytes), f"{ratio}by simulation")
    if plan.replays_passes:
        lines += _row("CUDA graphs", "2" if plan.training else "1", "one for each pass, from the second call on")
    return lines


def _weights_lines(plan: Plan) -> list[str]:
    """Line of the streamed weights: device memory and link traffic."""
    if not plan.streamed_weights:
        return []
    passed = format_bytes(sum(entry.weight_bytes for entry in plan.timeline.entries))
    remark = f"of the peak at most: {plan.streamed_weights} parameter(s) are streamed, {passed} over the link"
    return _row("  weights", format_bytes(plan.weights_peak_bytes), remark)


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


def _states_text(segment: SegmentPlan) -> str:
    sweeps = ", of one sweep at a time: each runs forward once more" if segment.restart else ""
    if segment.state_slots:
        return f"{segment.state_slots} at most, the remaining ones restored{sweeps}"
    return f"kept after {'each strip' if segment.state_every == 1 else f'every {segment.state_every} strips'}{sweeps}"


def _pieces(segment: SegmentPlan) -> str:
    """Number and size of the pieces in which a segment runs."""
    if segment.takes_samples:
        return f"{segment.num_steps} x {segment.batch_tile} samples"
    if segment.takes_windows and segment.num_panels > 1:
        return f"{segment.num_steps} x {segment.panel_cols} windows"
    if segment.takes_windows:
        return f"{segment.num_steps} x {segment.strip_rows} {segment.chunk_unit}"
    return f"{segment.num_steps} x {segment.strip_rows} rows" if segment.mode == "tiled" else "whole"


def _segment_lines(number: int, segment: SegmentPlan) -> list[str]:
    number_text = "1 operator" if len(segment.nodes) == 1 else f"{len(segment.nodes)} operators"
    runs = f", forward {segment.num_forwards} times" if segment.num_forwards > 1 else ""
    lines = [
        *_wrapped(f"Segment {number}: {segment.mode}, {number_text}, {label_range(*segment.layers)}{runs}"),
        *_row("outputs", format_bytes(segment.output_bytes), f"on the {segment.placement}"),
    ]
    if segment.takes_samples:
        lines += _row("samples", segment.batch_tile, "at a time, recomputed in the backward pass")
    if segment.takes_windows:
        is_row, times = segment.num_panels == 1, "at a time, recomputed in the backward pass"
        kind = "" if segment.chunk_unit != "window rows" else "rows of them " if is_row else "of a row "
        name = "tokens" if segment.chunk_unit == "tokens" else "windows"
        lines += _row(name, segment.strip_rows if is_row else segment.panel_cols, kind + times)
    if segment.mode == "tiled":
        halo = f"halo of strips {_HALO[segment.halo]}"
        size = f"of {segment.strip_rows} rows, {segment.panel_cols} columns, batch {segment.batch_tile}"
        lines += [
            *_row("strips", segment.num_steps, size),
            *_row("panels", segment.num_panels, f"{'of all columns' if segment.num_panels == 1 else 'halo recomputed'}; {halo}"),
            *_row("states", format_bytes(segment.state_bytes), _states_text(segment)),
        ]
    lines += [*_row("working set", format_bytes(segment.working_bytes)), *_row("FLOPs", f"{segment.flops:.4g}")]
    if segment.kernels:
        lines += _row("kernels", len(segment.kernels), "operators run as Triton kernels, with what is fused into them")
    return [*lines, *(line for name, value in segment.formulas for line in _wrapped(f"{name}: {value}", "  "))]
