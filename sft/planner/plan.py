"""Execution plans: frozen dataclasses with a text report and a JSON form."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sft.analysis.ir.axes import Axes
from sft.common.dataclass_json import dataclass_from_dict, parse_json_object
from sft.common.errors import InputError
from sft.common.legacy_names import restore_fields
from sft.planner.mesh_plan import MeshPlan
from sft.planner.search_limits import SearchLimits
from sft.planner.timeline import Timeline

__all__ = ["HaloMode", "Plan", "SegmentChoice", "SegmentPlan"]

_FORMAT = 10
#: Samples of a chunk of an untiled segment that are not elements of the batch.
_DEFAULT_UNIT = "window rows"
#: Fields that are left out of the JSON text where they are empty: plans of older releases have none of them.
_ADDED_FIELDS = (
    *("search_limits", "device_type", "budget_note", "host_note", "projected_reserved_bytes", "replays_passes", "frozen_bytes"),
    *("transferred_from", "gpu_name"),
)
#: Element types of inputs.
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)

#: Source of a strip's halo rows: kept from the strip before, or computed again.
HaloMode = Literal["carry", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """Planner decisions for one segment.

    Attributes:
        nodes: operators in execution order.
        mode: ``"tiled"`` (runs strip by strip, recomputed in the backward pass) or ``"whole"`` (untiled, all residuals kept; with some
            samples or windows at a time, recomputed).
        strip_rows: rows of the segment's tallest source per strip; in an untiled segment rows of windows, or tokens, at a time; 0 without.
        state_every: a state of the sweep is kept every so many strips.
        state_slots: if not 0, at most so many states are kept, and the remaining ones are restored from them (Revolve); in an untiled
            segment checkpoints within a chunk of samples.
        batch_tile: batch elements per sweep; in an untiled segment samples at a time, 0 or the batch for all of them.
        panel_cols: columns of the widest source per panel; in an untiled segment windows of a row at a time; 0 is the full width.
        halo: source of the halo rows of a strip: carried from its neighbour, or recomputed.
        restart: of several sweeps (panels, batch elements) only the last keeps its states in the forward pass; every earlier one runs
            forward once more before its backward pass.
        streamed: output values that pass to later segments through host memory, strip by strip.
    """

    nodes: tuple[str, ...]
    mode: Literal["tiled", "whole"]
    strip_rows: int = 0
    state_every: int = 1
    state_slots: int = 0
    batch_tile: int = 0
    panel_cols: int = 0
    halo: HaloMode = "carry"
    restart: bool = False
    streamed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """One segment of a plan: decisions with projected numbers.

    Attributes:
        nodes: operators in execution order.
        layers: readable names of the first and the last operator.
        mode: ``"tiled"`` or ``"whole"``.
        placement: memory of its outputs: ``"device"``; ``"host"`` if all of them leave strip by strip, ``"device and host"`` if some do.
        strip_rows: rows of the tallest source per strip; in an untiled segment rows of windows, or tokens, at a time; 0 without.
        panel_cols: columns of the widest source per panel; in an untiled segment windows of a row at a time.
        num_panels: panels side by side.
        halo: source of the halo rows of a strip.
        restart: true if sweeps run forward once more before their backward pass, instead of keeping their states.
        state_every: a state of the sweep is kept every so many strips.
        state_slots: if not 0, at most so many states are kept instead (Revolve); in an untiled segment checkpoints within a chunk.
        batch_tile: batch elements per sweep; in an untiled segment samples at a time.
        num_steps: strips per sweep; of an untiled segment that takes some samples, rows of windows, or tokens at a time, their chunks.
        num_forwards: forward runs of the segment in the plan; more than one if its outputs are recomputed.
        state_bytes: bytes of all states kept at once, for all sweeps.
        working_bytes: peak bytes that one strip's program adds.
        output_bytes: bytes of its output values.
        flops: FLOPs of forward, recomputation and backward.
        kernels: operators that run as Triton kernels, with the operators fused into them; the remaining ones run on ATen.
        formulas: results of the symbolic analysis: halo, receptive field, carried rows, footprint.
        streamed: output values that pass through host memory, strip by strip: no full tensor of them exists on the device.
        chunk_unit: what ``strip_rows`` of an untiled segment counts: ``"window rows"``, ``"windows"`` or ``"tokens"``; not compared.
    """

    nodes: tuple[str, ...]
    layers: tuple[str, str]
    mode: Literal["tiled", "whole"]
    placement: str = field(metadata={"choices": ("device", "host", "device and host")})
    strip_rows: int
    panel_cols: int
    num_panels: int
    halo: HaloMode
    restart: bool
    state_every: int
    state_slots: int
    batch_tile: int
    num_steps: int
    num_forwards: int
    state_bytes: int
    working_bytes: int
    output_bytes: int
    flops: int
    kernels: tuple[str, ...]
    formulas: tuple[tuple[str, str], ...]
    streamed: tuple[str, ...] = ()
    chunk_unit: str = field(default=_DEFAULT_UNIT, compare=False)

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        tiled = self.mode == "tiled"
        minimum = {"strip_rows": tiled, "state_every": 1, "state_slots": 0, "batch_tile": tiled, "panel_cols": 0}
        values = {name: getattr(self, name) for name in minimum}
        violations = [f"{name} is {values[name]}, expected at minimum {bound:d}" for name, bound in minimum.items() if values[name] < bound]
        if violations or not self.nodes:
            raise InputError(f"a segment of a plan: {'; '.join(violations) or 'it has no operators'}")

    @property
    def backend(self) -> Literal["aten", "mixed"]:
        """Backend of its operators: ``"aten"`` alone, or ``"mixed"`` with Triton kernels."""
        return "mixed" if self.kernels else "aten"

    @property
    def takes_samples(self) -> bool:
        """True for an untiled segment that runs some samples at a time."""
        return self.mode == "whole" and self.num_steps > 1 and not self.strip_rows

    @property
    def takes_windows(self) -> bool:
        """True for an untiled segment that runs some rows of windows, or some tokens, at a time."""
        return self.mode == "whole" and self.strip_rows > 0

    @property
    def choice(self) -> SegmentChoice:
        """The decisions without projected numbers."""
        return SegmentChoice(
            nodes=self.nodes,
            mode=self.mode,
            strip_rows=self.strip_rows,
            state_every=self.state_every,
            state_slots=self.state_slots,
            batch_tile=self.batch_tile,
            panel_cols=self.panel_cols if self.num_panels > 1 else 0,
            halo=self.halo,
            restart=self.restart,
            streamed=self.streamed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Execution of a model on inputs of one shape inside a byte budget.

    Attributes:
        input_shapes: shapes of the model's inputs.
        input_placements: location of each input: ``"device"`` (full tensor) or ``"source"`` (read strip by strip).
        output_placements: location of each output: ``"device"`` or ``"host"``.
        dtype: element type of the inputs.
        training: true if a backward pass is planned.
        budget_bytes: the budget.
        resident_bytes: parameters, their gradients, buffers, optimizer state; streamed weights excluded.
        projected_peak_bytes: peak bytes above the resident ones: inputs (for streamed ones their buffers), outputs and their gradients
            (those on the device), segment boundary tensors, states, strips, new parameter gradients, streamed weights while loaded, and
            ``overhead_bytes``.
        flops: FLOPs of a step (convolutions and matrix products, counted as ``torch.utils.flop_counter`` does).
        plain_flops: FLOPs of plain PyTorch for the same step.
        projected_seconds: seconds of a step, from timing its programs on the device; ``None`` unless ``Options(profile="measure")``. Every
            plan has `estimated_seconds`, which is never measured.
        timeline: bytes, FLOPs and seconds of each schedule op.
        segments: the segments in execution order.
        order: the schedule, if it is not the default one (each segment once forward, then each back): ``"F3"`` runs segment 3 forward,
            ``"F3+"`` keeps its residuals, too, ``"L"`` yields to the caller for the loss, ``"B3"`` runs segment 3 back. ``">add"`` begins
            to copy the value ``add`` to the host, ``"~add"`` frees its bytes on the device, ``"<add"`` begins to copy it back; ``">3+"``
            and so on do the same with the residuals of segment 3.
        host_bytes: peak bytes of host memory for values that leave the device during a step, and of page-locked buffers that strips of
            inputs pass through on their way to a device with memory of its own.
        skips_repeats: true if a step may skip strips that equal a neighbour's, and then take less than ``flops``.
        notes: reasons why operators that read an image run untiled, one line each.
        repeat_budgets: byte budgets of the repeats that have none of their own, in order; empty if they keep all residuals.
        streamed_weights: number of streamed parameters; 0 if all are resident.
        weights_peak_bytes: peak bytes of streamed weights on the device, which are part of the projected peak.
        overhead_bytes: on a GPU, bytes of library workspaces and of the allocator's segments beyond the tensors in them; part of the
            projected peak.
        mesh: for a plan over several ranks, the bytes, FLOPs and messages of each rank. The numbers above are then those of the rank with
            the largest peak, except ``flops``, which sums all bands of an image.
        search_limits: thresholds of the search that made the plan, not compared; ``None`` in plans of older releases.
        device_type: kind of device that the plan is made for, not compared: ``"cpu"``, ``"cuda"``; ``"meta"`` for a model on the meta
            device without a named device, which is rated as on a GPU; empty in plans of older releases.
        budget_note: origin of an automatic budget, not compared; empty for a budget in bytes.
        host_note: origin of the limit of the host's memory, not compared; empty if the plan takes none of it.
        projected_reserved_bytes: on a GPU, bytes that the allocator reserves for the step and everything resident, by simulation; the
            total. 0 on a CPU, and in plans of older releases.
        replays_passes: on a GPU, true if the forward and the backward pass are recorded and replayed as CUDA graphs.
        frozen_bytes: in training, bytes of parameters without a gradient, which have no gradient buffer and no optimizer state.
        gpu_name: name of the GPU by whose rates seconds are estimated, not compared; empty for other kinds of device, and in plans of older
            releases.
        transferred_from: shapes of the inputs for which the decisions were made, not compared; empty if they were made for these inputs.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    input_placements: tuple[str, ...] = field(metadata={"choices": ("device", "source")})
    output_placements: tuple[str, ...] = field(metadata={"choices": ("device", "host")})
    dtype: str = field(metadata={"choices": _DTYPES})
    training: bool
    budget_bytes: int
    resident_bytes: int
    projected_peak_bytes: int
    flops: int
    plain_flops: int
    projected_seconds: float | None = None
    timeline: Timeline
    segments: tuple[SegmentPlan, ...]
    order: tuple[str, ...] = ()
    host_bytes: int = 0
    skips_repeats: bool = False
    notes: tuple[str, ...] = ()
    repeat_budgets: tuple[int, ...] = ()
    streamed_weights: int = 0
    weights_peak_bytes: int = 0
    overhead_bytes: int = 0
    mesh: MeshPlan | None = None
    search_limits: SearchLimits | None = field(default=None, compare=False)
    device_type: str = field(default="", compare=False)
    budget_note: str = field(default="", compare=False)
    host_note: str = field(default="", compare=False)
    projected_reserved_bytes: int = field(default=0, compare=False)
    replays_passes: bool = field(default=False, compare=False)
    frozen_bytes: int = field(default=0, compare=False)
    transferred_from: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    gpu_name: str = field(default="", compare=False)

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    @property
    def num_samples(self) -> int:
        """Samples of a step: the first extent of the first image, else of the first input."""
        return Axes.num_samples_of(self.input_shapes) or 1

    @property
    def total_bytes(self) -> int:
        """Resident bytes and the projected peak: the memory that the device must have."""
        return self.resident_bytes + self.projected_peak_bytes

    @property
    def redundancy(self) -> float:
        """FLOPs over those of plain PyTorch; recomputing one forward pass gives about 4/3."""
        return self.flops / self.plain_flops if self.plain_flops else 1.0

    @property
    def estimated_seconds(self) -> float:
        """Seconds of a step at rates known to the nearest power of ten for the kind of device: for comparing plans with each other.

        A model on the meta device is rated as on a GPU.
        """
        return self.timeline.estimated_seconds

    def explain(self, *, costs: bool = False, full: bool = True) -> str:
        """Text report in at most 80 columns: the split of the budget, then one block per segment. docs/planning.md defines its words.

        Args:
            costs: add the seconds of each segment. Default: `False`
            full: write a block per segment; otherwise a table with a line per segment, which names the largest ones where there are many,
                in 40 lines at most (with ``costs`` a line with the seconds of each segment). Default: `True`
        """
        from sft.planner.reports.plan_text import plan_report

        return plan_report(self, costs=costs, full=full)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over time and the segments that run. Needs the extra ``plot``.

        Args:
            path: a file with a suffix that matplotlib supports: ``.png``, ``.svg``, ``.pdf``, ...

        Raises:
            InputError: matplotlib is missing or does not support the suffix, or the plan has no operators.
            SourceError: the file cannot be written; an existing file stays untouched.
        """
        from sft.planner.reports.plan_figure import plan_figure
        from sft.solvers.plot import save_figure

        save_figure(plan_figure(self), path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one HTML file: the picture of a notebook, a table of all segments, and the text of `explain`.

        The file needs no other file, no network and no JavaScript.

        Args:
            path: a file with the suffix ``.html`` or ``.htm``.

        Raises:
            InputError: the file has another suffix.
            SourceError: the file cannot be written; an existing file stays untouched.
        """
        from sft.planner.reports.plan_page import save_page

        save_page(self, path)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        """One line; `explain` and ``str`` say everything."""
        from sft.planner.reports.plan_text import plan_line

        return f"<Plan: {plan_line(self)}>"

    def _repr_html_(self) -> str:
        """Picture of the plan for notebooks: split of the budget, memory over time, and segments in the order of the schedule."""
        from sft.planner.reports.plan_page import plan_fragment

        return plan_fragment(self)

    def to_json(self) -> str:
        """Serialize the plan as JSON text; :meth:`from_json` reads it back."""
        values = asdict(self)
        for name in (name for name in _ADDED_FIELDS if not values[name]):
            del values[name]  # a plan of an older release keeps its text
        for segment in values["segments"]:
            if segment["chunk_unit"] == _DEFAULT_UNIT:
                del segment["chunk_unit"]
        return json.dumps({"format": _FORMAT, **values}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse a plan.

        Raises:
            InputError: the text is not a plan.
        """
        try:
            data = parse_json_object(text)
            if data.pop("format", None) != _FORMAT:
                raise InputError(f"this is not a plan of format {_FORMAT}")
            return dataclass_from_dict(cls, data)
        except InputError as error:
            raise InputError(f"cannot read the plan: {error}; make a new one with sft.plan(...)") from error
