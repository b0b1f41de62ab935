"""Tuning cases: for a class of operations, ATen's calls of a program and the kernels that would replace them, ready to run.

Both come from the rewriting pass, so the verified and timed kernels are those that will run, with all fused operations, and no operator is
described twice. A case draws its own random operands. ATen's calls on the same operands in fp64 are the exact results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.backends.convolution_relu import FusionDevice, convolution_relu
from sft.backends.def_use import DefUse, slots_in
from sft.backends.kernel_call import kernel_call_of
from sft.backends.pattern import Rewrite
from sft.backends.resize import selects_resize
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel, NumberFormat, ShapeClass, storage_format
from sft.common.interval import Interval
from sft.kernels.common import LaunchVariant
from sft.lower.builder import ProgramBuilder
from sft.lower.program import DEVICE, Instruction, Port, Slot
from sft.lower.rules.norms import empty_statistics

__all__ = ["CaseCollector", "TuningCase"]

_NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Operations that a GPU of the last years does in the time in which it moves a byte, in half precision.
_FLOPS_PER_BYTE = 200
Operands = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class TuningCase:
    """One class of operations, by ATen's calls and by kernels.

    Attributes:
        shape_class: the class.
        aten: ATen's calls, in order.
        kernels: the instructions that would replace them.
        operands: slots that exist before.
        ports: role of each operand that is a port, by the slot's number.
        results: slots that are read afterwards.
    """

    shape_class: ShapeClass
    aten: tuple[Instruction, ...]
    kernels: tuple[Instruction, ...]
    operands: tuple[Slot, ...]
    ports: dict[int, str]
    results: tuple[Slot, ...]

    @property
    def estimated_work(self) -> float:
        """Relative time of the operations on a GPU: the larger of operations and moved bytes, at the balance of a GPU."""
        num_bytes = sum(slot.num_bytes for slot in (*self.operands, *self.results))
        return max(sum(call.flops for call in self.aten), num_bytes * _FLOPS_PER_BYTE)

    def with_variant(self, variant: LaunchVariant) -> TuningCase:
        """The same case with another launch variant of the kernels."""
        kernels = []
        for call in self.kernels:
            owner = kernel_call_of(call.function)
            if owner is not None and hasattr(owner, "variant"):
                call = call._replace(function=getattr(replace(owner, variant=variant), call.function.__name__))  # type: ignore[call-arg]  # a field of the subclass
            kernels.append(call)
        return replace(self, kernels=tuple(kernels))

    def draw(self, device: torch.device, dtype: torch.dtype | None = None) -> Operands:
        """Random operands, the same for every dtype; ``dtype`` replaces the dtypes of fp32 and half-precision operands."""
        random = torch.Generator(device).manual_seed(0)
        convolutions = (torch.ops.aten.convolution.default, convolution_relu)
        weights = {call.arguments[1].number for call in self.aten if call.function in convolutions}
        weights |= {call.arguments[2].number for call in self.aten if call.function is torch.ops.aten.convolution_backward.default}
        return {slot.number: self._random_operand(slot, device, dtype, random, slot.number in weights) for slot in self.operands}

    def _random_operand(self, slot: Slot, device: torch.device, dtype: torch.dtype | None, random: torch.Generator, is_weight: bool) -> Any:
        role = self.ports.get(slot.number, "")
        if role == "origin":
            return (0, 0, 0)
        if not slot.dtype.is_floating_point:
            return torch.zeros(slot.shape, dtype=slot.dtype, device=device)
        if 0 in slot.shape:  # empty statistics: no forward pass has saved them
            return empty_statistics(
                torch.empty(slot.shape, dtype=dtype if dtype is not None and slot.dtype in _NARROW_DTYPES else slot.dtype, device=device)
            )
        if len(slot.shape) == 1:  # positive, since a vector may be a variance
            value = torch.rand(slot.shape, generator=random, device=device) + 0.5
        else:
            value = torch.randn(slot.shape, generator=random, device=device)
        if is_weight:
            value /= max(1.0, float(value[0].numel())) ** 0.5
        value = value.to(slot.dtype)
        if not is_weight and len(slot.shape) in CHANNELS_LAST:
            value = value.contiguous(memory_format=CHANNELS_LAST[len(slot.shape)])
        if dtype is not None and slot.dtype in _NARROW_DTYPES:
            value = value.to(dtype)
        return [(0, Interval(0, slot.shape[2]), value)] if role == "carry" else value

    def run_aten(self, tensors: Operands) -> list[Tensor]:
        """Results of ATen's calls."""
        return self._run(self.aten, tensors)

    def run_kernels(self, tensors: Operands) -> list[Tensor]:
        """Results of the kernels."""
        return self._run(self.kernels, tensors)

    def run_float64(self, device: torch.device) -> list[Tensor]:
        """Results of ATen's calls in fp64."""
        return self._run([_in_float64(call) for call in self.aten], self.draw(device, torch.float64))

    def _run(self, calls: Collection[Instruction], tensors: Operands) -> list[Tensor]:
        values = dict(tensors)
        for call in calls:
            device = next(value.device for value in values.values() if isinstance(value, Tensor))
            arguments = [_resolve_slots(value, values, device) for value in call.arguments]
            result = call.function(*arguments, **{name: _resolve_slots(value, values, device) for name, value in call.keywords.items()})
            outputs = () if not call.outputs else (result,) if len(call.outputs) == 1 else result
            for slot, value in zip(call.outputs, outputs, strict=True):
                if slot is not None:
                    values[slot.number] = value
        return [values[slot.number] for slot in self.results]


def _resolve_slots(value: Any, tensors: Operands, device: torch.device) -> Any:
    if isinstance(value, Slot):
        return tensors[value.number]
    if isinstance(value, tuple) and any(isinstance(item, Slot) for item in value):
        return [_resolve_slots(item, tensors, device) for item in value]
    return device if value is DEVICE else value


def _in_float64(call: Instruction) -> Instruction:
    """The call with a narrow ``dtype`` argument replaced by fp64."""
    if call.keywords.get("dtype") in _NARROW_DTYPES:
        return call._replace(keywords={**call.keywords, "dtype": torch.float64})
    return call


@dataclass(frozen=True, slots=True)
class _SingleClassSelector:
    """Selects the kernel of a single class, or of no class for ``None``; records all classes that it is called with."""

    selected: ShapeClass | None
    allows_tf32: bool
    recorded: dict[ShapeClass, None] = field(default_factory=dict)

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        self.recorded[shape_class] = None
        return shape_class == self.selected

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        return "default"

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        return storage_format(dtype, allows_tf32=self.allows_tf32 and multiplies)


@dataclass(kw_only=True)
class CaseCollector:
    """Backend that leaves programs as they are, and makes a case of every class that a program has a kernel for.

    Attributes:
        allows_tf32: true if products of fp32 numbers may round operands to ten bits.
        computes_operands: see :class:`sft.backends.pattern.MatchContext`.
        fusion_device: device whose library fuses convolutions and ReLUs in ATen's calls; None for calls one by one.
        cases: one case for each class, in order of appearance.
    """

    allows_tf32: bool = False
    computes_operands: bool = True
    fusion_device: FusionDevice | None = None
    cases: dict[ShapeClass, TuningCase] = field(default_factory=dict)
    decomposes_norms: ClassVar[bool] = False
    without_kernels: ClassVar[None] = None

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """True if attention of this element type is one operator on the device."""
        return self.fusion_device is not None and self.fusion_device.fuses_attention(dtype)

    def resamples(self, dtype: torch.dtype, shape: Sequence[int], num_terms: Sequence[int], *, is_adjoint: bool) -> bool:
        """True if there is a kernel, so that there is a case of it."""
        return selects_resize(AlwaysKernel(self.allows_tf32), dtype, shape, num_terms, is_adjoint=is_adjoint)

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Collect the cases of a program; its instructions stay as they are."""
        def_use = DefUse(instructions=tuple(builder.instructions), ports=builder.ports, results=builder.results)
        recorder = _SingleClassSelector(None, self.allows_tf32)
        for _ in self._backend_of(recorder).rewrites(def_use, builder, laid_out, training=training):
            raise AssertionError("no class is selected")
        library = KernelBackend(selector=None, fusion_device=self.fusion_device)
        fusions = list(library.rewrites(def_use, builder, laid_out, training=training))
        for shape_class in recorder.recorded:
            if shape_class not in self.cases:
                backend = self._backend_of(_SingleClassSelector(shape_class, self.allows_tf32))
                rewrite = next(backend.rewrites(def_use, builder, laid_out, training=training), None)
                if rewrite is not None:
                    self.cases[shape_class] = _make_case(shape_class, def_use, rewrite, fusions)
        return num_forward

    def _backend_of(self, selector: _SingleClassSelector) -> KernelBackend:
        return KernelBackend(selector=selector, computes_operands=self.computes_operands)


def _make_case(shape_class: ShapeClass, def_use: DefUse, rewrite: Rewrite, fusions: Sequence[Rewrite]) -> TuningCase:
    removed, kernels = rewrite.removed, rewrite.instructions
    fused = {at: each.inserted.get(at, ()) for each in fusions if each.removed <= removed for at in each.removed}
    aten = tuple(call for at in sorted(removed) for call in fused.get(at, (def_use.instructions[at],)))
    # Views inside the group are made again. A padded copy that a kernel does not need is part of ATen's work.
    aten = _with_padding(def_use, aten)
    by_aten = {out.number for call in aten for out in call.outputs if out is not None}
    by_kernels = {out.number for call in kernels for out in call.outputs if out is not None}
    operands = {slot.number: slot for slot in _slots_read(aten) if slot.number not in by_aten}
    operands |= {slot.number: slot for slot in _slots_read(kernels) if slot.number not in by_kernels and slot.number not in operands}
    inside = removed | {at for at, call in enumerate(def_use.instructions) if any(call is instruction for instruction in aten)}
    written = {slot.number: slot for call in aten for slot in (*call.outputs, *call.writes) if slot is not None}
    reached = by_kernels | {slot.number for call in kernels for slot in call.writes}
    results = [slot for slot in written.values() if slot.number in reached and not def_use.is_private(slot, inside)]
    roles = {slot.number: port.role for port, slot in def_use.ports.items()}
    return TuningCase(
        shape_class=shape_class,
        aten=aten,
        kernels=kernels,
        operands=tuple(operands.values()),
        ports={number: roles[number] for number in operands if number in roles},
        results=tuple(results),
    )


def _with_padding(def_use: DefUse, aten: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Calls of ATen with the views and padded copies that make their operands."""
    calls: list[Instruction] = []
    for call in aten:
        for slot in slots_in(call.arguments):
            maker = def_use.maker(slot)
            is_padding = maker is not None and maker.function is torch.ops.aten.constant_pad_nd.default
            is_view = maker is not None and maker.function is torch.ops.aten.view.default
            if maker is not None and (is_padding or is_view) and not any(maker is instruction for instruction in (*calls, *aten)):
                calls.append(maker)
        calls.append(call)
    return tuple(calls)


def _slots_read(calls: Collection[Instruction]) -> Iterator[Slot]:
    for call in calls:
        yield from slots_in((call.arguments, call.keywords))
