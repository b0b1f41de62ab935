"""Plans: frozen, printable, JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

from sft.common.dataclass_json import dataclass_from_dict, parse_json_object
from sft.common.errors import InputError
from sft.planner.mesh_plan import MeshPlan
from sft.planner.timeline import Timeline

__all__ = ["HaloMode", "Plan", "SegmentChoice", "SegmentPlan"]

_FORMAT = 10

#: How a strip gets the rows around it.
HaloMode = Literal["carry", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """What the planner decides about one segment.

    Attributes:
        nodes: its operators in order.
        mode: ``"tiled"`` (strips, recomputed in the backward pass) or ``"whole"`` (everything kept).
        strip_rows: rows of the segment's tallest source to a strip.
        state_every: a state of the walk is kept every so many strips.
        state_slots: if not 0, so many states at most are held instead, and the others restored from them (Revolve).
        batch_tile: batch elements that walk together.
        panel_cols: columns of the widest source to a panel; 0 is the full width.
        halo: how a strip gets the rows around it: carried from its neighbour, or computed again.
        restart: of several walks (panels, batch elements) only the last keeps its states in the forward pass; each other one runs
            forward once more before its backward pass.
        streamed: values that it hands on over the host, strip by strip.
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
    """A segment as planned.

    Attributes:
        nodes: its operators in order.
        layers: first and last operator for people.
        mode: ``"tiled"`` or ``"whole"``.
        placement: where its outputs live: ``"device"``; ``"host"`` where all of them leave strip by strip, ``"device and host"`` where
            some do.
        strip_rows: rows of the tallest source to a strip (0 when whole).
        panel_cols: columns of the widest source to a panel.
        num_panels: panels side by side.
        halo: how a strip gets the rows around it.
        restart: whether walks run forward once more before their backward pass, instead of keeping their states.
        state_every: a state of the walk is kept every so many strips.
        state_slots: if not 0, so many states at most are held instead (Revolve).
        batch_tile: batch elements that walk together.
        num_steps: strips to a walk.
        num_forwards: how often the plan runs it forward; more than once where what it made is recomputed.
        state_bytes: bytes of all states kept at once, for all walks.
        working_bytes: most bytes that one strip's program adds.
        output_bytes: bytes of the values it hands on.
        flops: forward, recomputations and backward.
        kernels: operators that run as Triton kernels, with what is fused into them; all others run by ATen.
        formulas: what the symbolic analysis says: halo, receptive field, carried rows, footprint.
        streamed: values that it hands on over the host, strip by strip: they are never whole on the device.
    """

    nodes: tuple[str, ...]
    layers: tuple[str, str]
    mode: Literal["tiled", "whole"]
    placement: str
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

    def __post_init__(self) -> None:
        tiled = self.mode == "tiled"
        least = {"strip_rows": tiled, "state_every": 1, "state_slots": 0, "batch_tile": tiled, "panel_cols": 0}
        given = {name: getattr(self, name) for name in least}
        wrong = [f"{name} is {given[name]}, expected at least {low:d}" for name, low in least.items() if given[name] < low]
        if wrong or not self.nodes:
            raise InputError(f"a segment of a plan: {'; '.join(wrong) or 'it has no operators'}")

    @property
    def backend(self) -> Literal["aten", "mixed"]:
        """What runs its operators: ``"aten"`` alone, or kernels as well."""
        return "mixed" if self.kernels else "aten"

    @property
    def choice(self) -> SegmentChoice:
        """The decisions alone."""
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
    """How a model runs on inputs of one shape inside a byte budget.

    Attributes:
        input_shapes: shapes of the model's inputs.
        input_placements: where each of them is: ``"device"``, whole, or ``"source"``, read strip by strip.
        output_placements: where each output is: ``"device"`` or ``"host"``.
        dtype: the inputs' element type.
        training: whether a backward pass is planned.
        budget_bytes: the budget.
        resident_bytes: parameters, their gradients, buffers, optimizer state; without those of streamed weights.
        projected_peak_bytes: most bytes above the resident ones: inputs (of those that are read, the buffers), outputs and their
            gradients (where they are on the device), cuts, states, strips, new parameter gradients, streamed weights while they are there,
            and ``overhead_bytes``.
        flops: what a step computes (convolutions and matrix products, as ``torch.utils.flop_counter`` counts them).
        plain_flops: what plain PyTorch computes for the same step.
        projected_seconds: of a step, from timing its programs on the device; ``None`` where that was not asked for. Every plan has
            `estimated_seconds`, which nobody measured.
        timeline: what is held and done, move by move.
        segments: in order.
        order: the moves of a step, where they are not the plain ones (each segment once forward, then each back): ``"F3"`` runs segment 3
            forward, ``"F3+"`` keeps what its backward pass needs, ``"L"`` is the caller's turn, ``"B3"`` runs it back. ``">add"`` begins to
            copy the value ``add`` to the host, ``"~add"`` gives its bytes on the device back, ``"<add"`` begins to copy it back; ``">3+"``
            and so on do that with what segment 3 kept.
        host_bytes: what leaves the device during a step takes so much of the host's memory.
        skips_repeats: whether a step may leave out strips that would make what a neighbour made, and take less than ``flops``.
        notes: why operators that read an image run on whole tensors, one line each.
        repeat_budgets: most bytes that repeated blocks may hold which have no budget of their own, in order; empty where they keep all.
        streamed_weights: how many parameters are streamed; 0 where all are resident.
        weights_peak_bytes: most bytes of streamed weights on the device at once, which are part of the projected peak.
        overhead_bytes: on a GPU, what its allocator rounds up and libraries take as workspaces, measured there; part of the projected peak.
        mesh: of a plan for several ranks what each holds, computes and sends. The numbers above are then those of the rank that needs most,
            but for ``flops``, which are those of all bands of an image together.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    input_placements: tuple[str, ...]
    output_placements: tuple[str, ...]
    dtype: str
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

    @property
    def total_bytes(self) -> int:
        """Resident bytes and the projected peak: what the card must hold."""
        return self.resident_bytes + self.projected_peak_bytes

    @property
    def redundancy(self) -> float:
        """FLOPs over those of plain PyTorch; recomputing one forward pass makes about 4/3."""
        return self.flops / self.plain_flops if self.plain_flops else 1.0

    @property
    def estimated_seconds(self) -> float:
        """Of a step, at rates that are known of a kind of device to the nearest power of ten: for comparing plans with each other.

        A model on the meta device is taken for one on a GPU.
        """
        return self.timeline.estimated_seconds

    def explain(self, *, costs: bool = False) -> str:
        """The plan for people: one block a segment, and where the bytes go.

        Args:
            costs: whether to say what each segment takes of the step's time. Default: `False`
        """
        from sft.planner.report import plan_report

        return plan_report(self, costs=costs)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw what the step holds over time, and what it does meanwhile. Needs the extra ``plot``.

        Args:
            path: a file with an ending that matplotlib knows: ``.png``, ``.svg``, ``.pdf``, ...

        Raises:
            InputError: matplotlib is missing or knows no such ending, or the plan has no operators.
            SourceError: the file cannot be written; what was there before is untouched.
        """
        from sft.planner.report import plan_figure
        from sft.solvers.plot import save_figure

        save_figure(plan_figure(self), path)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

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
