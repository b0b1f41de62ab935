"""A class of operations as something that can be run: ATen's calls as they stand in a program, and the kernels that would replace them.

Both come from the pass itself, so what is verified and timed is what will run, with all that is fused into it: no second description of any
operator. A trial has its own random operands. ATen's calls on the same operands in fp64 are the truth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.backends.def_use import DefUse, slots_in
from sft.backends.kernel_call import kernel_call_of
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import NumberFormat, ShapeClass, storage_format
from sft.common.interval import Interval
from sft.kernels.common import LaunchVariant
from sft.lower.builder import ProgramBuilder
from sft.lower.program import DEVICE, Instruction, Port, Slot
from sft.lower.rules.norms import empty_statistics

__all__ = ["CaseCollector", "TuningCase"]

_NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Operands = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class TuningCase:
    """Two ways to do one thing.

    Attributes:
        shape_class: what is done.
        aten: ATen's calls, in order.
        kernels: what would stand in their place.
        operands: slots that exist before.
        ports: roles of those that are the caller's.
        results: slots that are read afterwards.
    """

    shape_class: ShapeClass
    aten: tuple[Instruction, ...]
    kernels: tuple[Instruction, ...]
    operands: tuple[Slot, ...]
    ports: dict[int, str]
    results: tuple[Slot, ...]

    def varied(self, variant: LaunchVariant) -> TuningCase:
        """The same with kernels that are split into programs in another way."""
        kernels = []
        for call in self.kernels:
            owner = kernel_call_of(call.function)
            if owner is not None and hasattr(owner, "variant"):
                call = call._replace(function=getattr(replace(owner, variant=variant), call.function.__name__))  # type: ignore[call-arg]  # it has one
            kernels.append(call)
        return replace(self, kernels=tuple(kernels))

    def draw(self, device: torch.device, dtype: torch.dtype | None = None) -> Operands:
        """Random operands, the same for every type; ``dtype`` stands for that of the floating-point ones."""
        random = torch.Generator(device).manual_seed(0)
        weights = {call.arguments[1].number for call in self.aten if call.function is torch.ops.aten.convolution.default}
        weights |= {call.arguments[2].number for call in self.aten if call.function is torch.ops.aten.convolution_backward.default}
        return {slot.number: self._drawn(slot, device, dtype, random, slot.number in weights) for slot in self.operands}

    def _drawn(self, slot: Slot, device: torch.device, dtype: torch.dtype | None, random: torch.Generator, is_weight: bool) -> Any:
        role = self.ports.get(slot.number, "")
        if role == "origin":
            return (0, 0, 0)
        if not slot.dtype.is_floating_point:
            return torch.zeros(slot.shape, dtype=slot.dtype, device=device)
        if 0 in slot.shape:  # statistics that no forward pass has saved
            return empty_statistics(
                torch.empty(slot.shape, dtype=dtype if dtype is not None and slot.dtype in _NARROW_DTYPES else slot.dtype, device=device)
            )
        if len(slot.shape) == 1:  # a vector may be a variance
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
        """ATen's way; the results."""
        return self._run(self.aten, tensors)

    def run_kernels(self, tensors: Operands) -> list[Tensor]:
        """The kernels' way."""
        return self._run(self.kernels, tensors)

    def run_float64(self, device: torch.device) -> list[Tensor]:
        """ATen's way in fp64."""
        return self._run([_in_float64(call) for call in self.aten], self.draw(device, torch.float64))

    def _run(self, calls: Collection[Instruction], tensors: Operands) -> list[Tensor]:
        held = dict(tensors)
        for call in calls:
            device = next(value.device for value in held.values() if isinstance(value, Tensor))
            arguments = [_resolve_slots(value, held, device) for value in call.arguments]
            result = call.function(*arguments, **{name: _resolve_slots(value, held, device) for name, value in call.keywords.items()})
            made = () if not call.outputs else (result,) if len(call.outputs) == 1 else result
            for slot, value in zip(call.outputs, made, strict=True):
                if slot is not None:
                    held[slot.number] = value
        return [held[slot.number] for slot in self.results]


def _resolve_slots(value: Any, tensors: Operands, device: torch.device) -> Any:
    if isinstance(value, Slot):
        return tensors[value.number]
    if isinstance(value, tuple) and any(isinstance(item, Slot) for item in value):
        return [_resolve_slots(item, tensors, device) for item in value]
    return device if value is DEVICE else value


def _in_float64(call: Instruction) -> Instruction:
    """The call in fp64, where it names a type."""
    if call.keywords.get("dtype") in _NARROW_DTYPES:
        return call._replace(keywords={**call.keywords, "dtype": torch.float64})
    return call


@dataclass(frozen=True, slots=True)
class _SingleClassSelector:
    """Takes one class; ``None`` takes none. Notes what it is asked for."""

    wanted: ShapeClass | None
    allows_tf32: bool
    asked: dict[ShapeClass, None] = field(default_factory=dict)

    def selects_kernel(self, wanted: ShapeClass) -> bool:
        self.asked[wanted] = None
        return wanted == self.wanted

    def launch_variant_of(self, wanted: ShapeClass) -> LaunchVariant:
        return "default"

    def number_format_of(self, dtype: torch.dtype) -> NumberFormat | None:
        return storage_format(dtype, allows_tf32=self.allows_tf32)


@dataclass(kw_only=True)
class CaseCollector:
    """A backend that replaces nothing, and makes a trial of every class that a program would have a kernel for.

    Attributes:
        allows_tf32: whether products of fp32 numbers may be rounded.
        computes_operands: see :class:`sft.backends.pattern.MatchContext`.
        trials: one for each class, in the order in which they were met.
    """

    allows_tf32: bool = False
    computes_operands: bool = True
    trials: dict[ShapeClass, TuningCase] = field(default_factory=dict)

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Look at a program, and leave it as it is."""
        listing = DefUse(instructions=tuple(builder.instructions), ports=builder.ports, results=builder.results)
        asked = _SingleClassSelector(None, self.allows_tf32)
        for _ in self._kernels(asked).replacements(listing, builder, laid_out, training=training):
            raise AssertionError("nothing was to be taken")
        for wanted in asked.asked:
            if wanted not in self.trials:
                chosen = self._kernels(_SingleClassSelector(wanted, self.allows_tf32))
                one = next(chosen.replacements(listing, builder, laid_out, training=training), None)
                if one is not None:
                    self.trials[wanted] = _make_case(wanted, listing, one.gone, one.instructions)
        return num_forward

    def _kernels(self, selector: _SingleClassSelector) -> KernelBackend:
        return KernelBackend(selector=selector, computes_operands=self.computes_operands)


def _make_case(wanted: ShapeClass, listing: DefUse, gone: Collection[int], kernels: tuple[Instruction, ...]) -> TuningCase:
    aten = tuple(listing.instructions[at] for at in sorted(gone))
    # Views inside the group are made again; a padded copy that a kernel does not need is part of what ATen does.
    aten = _with_padding(listing, aten)
    made = {out.number for call in aten for out in call.outputs if out is not None}
    by_kernels = {out.number for call in kernels for out in call.outputs if out is not None}
    operands = {slot.number: slot for slot in _slots_read(aten) if slot.number not in made}
    operands |= {slot.number: slot for slot in _slots_read(kernels) if slot.number not in by_kernels and slot.number not in operands}
    inside = {at for at, call in enumerate(listing.instructions) if any(call is one for one in aten)}
    written = {slot.number: slot for call in aten for slot in (*call.outputs, *call.writes) if slot is not None}
    reached = by_kernels | {slot.number for call in kernels for slot in call.writes}
    results = [slot for slot in written.values() if slot.number in reached and not listing.is_private(slot, inside)]
    roles = {slot.number: port.role for port, slot in listing.ports.items()}
    return TuningCase(
        shape_class=wanted,
        aten=aten,
        kernels=kernels,
        operands=tuple(operands.values()),
        ports={number: roles[number] for number in operands if number in roles},
        results=tuple(results),
    )


def _with_padding(listing: DefUse, aten: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    found: list[Instruction] = []
    for call in aten:
        for slot in slots_in(call.arguments):
            maker = listing.maker(slot)
            is_padding = maker is not None and maker.function is torch.ops.aten.constant_pad_nd.default
            is_view = maker is not None and maker.function is torch.ops.aten.view.default
            if maker is not None and (is_padding or is_view) and not any(maker is one for one in (*found, *aten)):
                found.append(maker)
        found.append(call)
    return tuple(found)


def _slots_read(calls: Collection[Instruction]) -> Iterator[Slot]:
    for call in calls:
        yield from slots_in((call.arguments, call.keywords))
