"""Plans and runs one model: captures it, plans each kind of call once, and executes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sft.analysis.annotate import annotated
from sft.analysis.capture import Capture, capture
from sft.analysis.masks import with_positional_masks
from sft.analysis.norms import with_norms_apart
from sft.analysis.operators import is_differentiable
from sft.analysis.phases import Phases, find_phases
from sft.errors import InputError, UnsupportedError
from sft.execute.function import Leaves, run_region
from sft.execute.reading import Reading
from sft.inputs import Given, resolve_inputs
from sft.kernels.philox import draw_seed
from sft.options import Options
from sft.plan.describe import describe
from sft.plan.planner import Planned, carry_out, plan_segments
from sft.plan.problem import Problem, concrete_shapes
from sft.plan.types import Plan
from sft.walk.region import Region

__all__ = ["Engine"]

_LOG = logging.getLogger("sft")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _CallKind:
    """What a plan is made for."""

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    device: torch.device
    channels_last: tuple[bool, ...]
    training_flags: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    with_grad: bool
    from_source: tuple[bool, ...] = ()
    splits_batch: bool = True


@dataclass(frozen=True)
class _Captured:
    capture: Capture
    phases: Phases
    training_flags: tuple[bool, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Ready:
    plan: Plan
    region: Region
    captured: _Captured


class Engine:
    """Everything behind a compiled module; holds the model, never the other way round."""

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan | None,
    ) -> None:
        self.model, self.budget_bytes, self.options = model, budget_bytes, options
        self.optimizer, self.given_plan = optimizer, plan
        self.last_plan: Plan | None = None
        self.last_reading: Reading | None = None
        self._captured: list[_Captured] = []
        self._ready: dict[_CallKind, _Ready] = {}

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan_for_shapes(self, shapes: Sequence[Shape], input_grads: Sequence[bool] | None = None) -> Plan:
        """The plan for inputs of these shapes, of the model's dtype and on its device, with gradients if grad mode is on."""
        dtype, device = self._dtype_and_device()
        kind = self._kind(tuple(shapes), dtype, device, (False,) * len(shapes), tuple(input_grads or (False,) * len(shapes)))
        return self._prepare(kind).plan

    def plan_for_inputs(self, inputs: Sequence[Any], input_grad: Any = None) -> Plan:
        """The plan that a call with these inputs would use."""
        return self._prepare(self._kind_of(self._resolve(inputs, input_grad))).plan

    def phases(self) -> Phases:
        """The sorted graph of the last capture."""
        return self._captured[-1].phases

    def run(self, inputs: Sequence[Any], input_grad: Any = None) -> Any:
        """The model's output."""
        given = self._resolve(inputs, input_grad)
        ready = self._prepare(self._kind_of(given))
        self.last_plan = ready.plan
        generator_state = torch.get_rng_state()
        leaves = self._bind(ready, given)
        self.last_reading = leaves.reading if leaves.sources else None
        try:
            outputs = run_region(ready.region, leaves)
        except BaseException:
            torch.set_rng_state(generator_state)
            raise
        graph = ready.captured.capture.graph
        with torch.no_grad():  # nothing can fail any more
            for name, path in graph.updates:
                self.model.get_buffer(path).copy_(outputs[name])
        return pytree.tree_unflatten([outputs[name] for name in graph.outputs], ready.captured.capture.out_spec)

    def _bind(self, ready: _Ready, inputs: Sequence[Given]) -> Leaves:
        graph = ready.captured.phases.graph
        by_name = dict(zip(graph.inputs, inputs, strict=True))
        tensors: dict[str, torch.Tensor] = {}
        for node in graph.nodes:
            if node.kind == "input":
                tensor = by_name[node.name].tensor
                if tensor is not None:
                    tensors[node.name] = tensor
            elif node.kind == "parameter":
                tensors[node.name] = self.model.get_parameter(node.target)
            elif node.kind == "buffer":
                tensors[node.name] = self.model.get_buffer(node.target)
            elif node.kind == "seed":
                tensors[node.name] = _signed(draw_seed())
            elif node.kind != "operator":
                tensors[node.name] = _attribute(self.model, node.target)
        paths = {path for _, path in ready.captured.capture.graph.updates}
        return Leaves(
            names=tuple(tensors),
            tensors=tuple(tensors.values()),
            device=self._dtype_and_device()[1],
            updated=frozenset(node.name for node in graph.nodes if node.kind == "buffer" and node.target in paths),
            sources={name: value.source for name, value in by_name.items() if value.source is not None},
            witnesses=tuple(value.witness for value in inputs if value.witness is not None),
            sinks={name: value.make_sink for name, value in by_name.items() if value.make_sink is not None},
        )

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        first = next((t for t in tensors if t.is_floating_point()), None)
        return (first.dtype, first.device) if first is not None else (torch.get_default_dtype(), torch.device("cpu"))

    def _resolve(self, inputs: Sequence[Any], input_grad: Any) -> tuple[Given, ...]:
        return resolve_inputs(inputs, input_grad, *self._dtype_and_device())

    def _kind_of(self, inputs: Sequence[Given]) -> _CallKind:
        kind = self._kind(
            tuple(value.shape for value in inputs),
            *self._dtype_and_device(),
            tuple(value.is_channels_last for value in inputs),
            tuple(value.needs_grad for value in inputs),
        )
        splits_batch = all(value.splits_batch for value in inputs)
        return replace(kind, from_source=tuple(value.source is not None for value in inputs), splits_batch=splits_batch)

    def _kind(
        self,
        shapes: tuple[Shape, ...],
        dtype: torch.dtype,
        device: torch.device,
        channels_last: tuple[bool, ...],
        input_grads: tuple[bool, ...],
    ) -> _CallKind:
        with_grad = torch.is_grad_enabled()
        return _CallKind(
            shapes=shapes,
            dtype=dtype,
            device=device,
            channels_last=channels_last,
            training_flags=tuple(module.training for module in self.model.modules()),
            requires_grad=tuple(p.requires_grad for p in self.model.parameters()) if with_grad else (),
            input_grads=input_grads if with_grad else (),
            with_grad=with_grad,
            from_source=(False,) * len(shapes),
        )

    def _prepare(self, kind: _CallKind) -> _Ready:
        self._refuse_hooks()
        ready = self._ready.get(kind)
        if ready is None:
            ready = self._ready[kind] = self._plan(kind)
        return ready

    def _refuse_hooks(self) -> None:
        problems = [
            f"{name}: {type(module).__name__} has a {what}; hooks on submodules do not run inside a compiled model, remove it"
            for name, module in self.model.named_modules()
            if name
            for what, hooks in (
                ("forward hook", module._forward_hooks),
                ("forward pre-hook", module._forward_pre_hooks),
                ("backward hook", module._backward_hooks),
                ("backward pre-hook", module._backward_pre_hooks),
            )
            if hooks
        ]
        if problems:
            raise UnsupportedError(problems)

    def _plan(self, kind: _CallKind) -> _Ready:
        captured, symbols = self._capture(kind)
        phases = captured.phases
        graph = phases.graph
        inputs = [name for name in graph.inputs]
        shapes = concrete_shapes(phases, symbols, dict(zip(inputs, kind.shapes, strict=True)))
        problem = Problem(
            phases=phases,
            shapes=shapes,
            requires_grad=self._requires_grad(kind, phases),
            channels_last=frozenset(name for name, last in zip(inputs, kind.channels_last, strict=True) if last),
            resident_bytes=self._resident_bytes(),
            from_source=frozenset(name for name, is_read in zip(inputs, kind.from_source, strict=True) if is_read),
            splits_batch=kind.splits_batch,
            on_host=kind.device.type in ("cpu", "meta"),
        )
        self._check_sources(problem)
        planned = self._given(problem) or plan_segments(problem, self.budget_bytes, self.options, kind.device.type)
        plan = describe(problem, planned, budget_bytes=self.budget_bytes)
        return _Ready(plan, planned.region, captured)

    def _check_sources(self, problem: Problem) -> None:
        returned = sorted(problem.from_source.intersection(problem.graph.results))
        if returned:
            raise InputError(f"{', '.join(returned)} is read strip by strip, but the model returns it whole; give it as a tensor")
        tile = self.options.batch_tile
        if not problem.splits_batch and tile is not None and tile < problem.num_batch:
            raise InputError(
                f"batch_tile {tile} takes {problem.num_batch} batch elements in parts, but a source or sink has no method "
                "samples(batch); add one, or leave out batch_tile"
            )

    def _given(self, problem: Problem) -> Planned | None:
        """The plan that the user handed in, where it is for this input."""
        plan = self.given_plan
        shapes = tuple(problem.shapes[name] for name in problem.graph.inputs)
        if plan is None or plan.input_shapes != shapes or plan.training != problem.training:
            return None
        if plan.input_placements != problem.input_placements:
            return None
        known = [name for phase in problem.phases.phases for name in (*phase.streamed, *phase.tail)]
        if sorted(name for segment in plan.segments for name in segment.nodes) != sorted(known):
            raise InputError("the plan names other operators than the model has; make a new one with sft.plan(model, ...)")
        return carry_out(problem, tuple(segment.choice for segment in plan.segments))

    def _capture(self, kind: _CallKind) -> tuple[_Captured, dict[Any, int]]:
        for captured in self._captured:
            if captured.training_flags == kind.training_flags and captured.dtype == kind.dtype:
                symbols = captured.capture.bind(kind.shapes)
                if symbols is not None:
                    return captured, symbols
        if self._captured:
            _LOG.info("capturing %s again for inputs %s", type(self.model).__name__, kind.shapes)
        found = capture(self.model, kind.shapes, kind.dtype, kind.device)
        found = replace(found, graph=with_positional_masks(with_norms_apart(annotated(found.graph))))
        captured = _Captured(found, find_phases(found.graph), kind.training_flags, kind.dtype)
        symbols = found.bind(kind.shapes)
        if symbols is None:
            sizes = ", ".join("x".join(map(str, shape)) for shape in kind.shapes)
            raise UnsupportedError([f"{type(self.model).__name__}: the capture at {sizes} does not hold for that very size"])
        self._captured.append(captured)
        return captured, symbols

    def _requires_grad(self, kind: _CallKind, phases: Phases) -> frozenset[str]:
        if not kind.with_grad:
            return frozenset()
        found: set[str] = set()
        # A buffer's next value is no output: what only leads there has no gradient.
        leading = phases.graph.ancestors(phases.graph.outputs)
        arriving = iter(kind.input_grads)
        for node in phases.graph.nodes:
            if node.kind == "input":
                needs = next(arriving)
            elif node.kind == "parameter":
                needs = self.model.get_parameter(node.target).requires_grad
            elif node.kind == "buffer":
                needs = self.model.get_buffer(node.target).requires_grad
            elif node.kind in ("constant", "seed"):
                needs = False
            else:
                needs = is_differentiable(node) and node.name in leading and any(name in found for name in node.operands)
            if needs:
                found.add(node.name)
        return frozenset(found)

    def _resident_bytes(self) -> int:
        parameters = list(self.model.parameters())
        size = sum(p.numel() * p.element_size() for p in parameters)
        size += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        size += sum(b.numel() * b.element_size() for b in self.model.buffers())
        return size + _optimizer_bytes(self.optimizer)


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state: what it holds, or will hold after its first step."""
    if optimizer is None:
        return 0
    held = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    if held:
        return held
    total = 0
    for group in optimizer.param_groups:
        size = sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
        if isinstance(optimizer, torch.optim.SGD):
            copies = 1 if group.get("momentum") else 0
        else:
            copies = 3 if group.get("amsgrad") else 2
        total += copies * size
    return total


def _signed(seed: int) -> torch.Tensor:
    """A seed of 64 bits as a tensor, its two's complement."""
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])


def _attribute(model: nn.Module, path: str) -> torch.Tensor:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.Tensor)
    return value
