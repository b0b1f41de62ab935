"""Program builder: emits instructions one by one, then drops dead ones and places the frees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from sft.analysis.frontend.capture import CHANNELS_LAST, is_in_program_layout
from sft.analysis.ir.axes import Axes
from sft.common.errors import InternalError
from sft.common.torch_internals import OpOverload
from sft.lower.program import DEVICE, Instruction, Port, Program, Slot, live_instructions, slots_of

__all__ = ["ProgramBuilder", "copy_with_strides", "restride_as"]

aten = torch.ops.aten

_SLICE = aten.slice.Tensor


@dataclass
class ProgramBuilder:
    """Collects the instructions, ports and results of a program.

    Attributes:
        dtype: default element type of new slots: that of the owner's value.
        owner: the operator of the graph that the next instructions belong to.
        keeps_torch_layouts: True if images have the memory layout that eager PyTorch gives them; otherwise they are channels last.
        makes_gradients: True if the first addition to the gradient of a global tensor allocates it, as a result of the program; otherwise
            such gradients are ports.
        instructions: the operations so far.
        ports: slots bound from outside.
        results: slots for the caller.
        bounded_maxima: numbers of the slots of pool indices without windows of minus infinity.
    """

    dtype: torch.dtype
    owner: str = ""
    keeps_torch_layouts: bool = False
    makes_gradients: bool = False
    instructions: list[Instruction] = field(default_factory=list)
    ports: dict[Port, Slot] = field(default_factory=dict)
    results: dict[Port, Slot] = field(default_factory=dict)
    bounded_maxima: set[int] = field(default_factory=set)
    _num_slots: int = 0

    def slot(self, shape: Iterable[int], dtype: torch.dtype | None = None, root: int | None = None) -> Slot:
        """A new slot; with ``root`` a view of the storage of that slot."""
        number = self._num_slots
        self._num_slots += 1
        return Slot(number, tuple(shape), dtype or self.dtype, number if root is None else root)

    def port(self, role: str, name: str, shape: Iterable[int], dtype: torch.dtype | None = None) -> Slot:
        """The slot of a port, created at its first use."""
        key = Port(role, name)
        if key not in self.ports:
            self.ports[key] = self.slot(shape, dtype)
        return self.ports[key]

    def global_grad(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, value_dtype: torch.dtype) -> Slot:
        """The accumulator of the gradient of a global tensor.

        If the builder makes gradients, the accumulator has the strides of the tensor, as autograd expects.

        Args:
            name: the tensor.
            shape: its extents.
            dtype: element type of the gradient.
            value_dtype: element type of the tensor.
        """
        key = Port("grad_side", name)
        if not self.makes_gradients:
            return self.port(key.role, name, shape, dtype)
        if key not in self.results:
            like = self.port("side", name, shape, value_dtype)
            self.results[key] = self.call(torch.zeros_like, like, shape=shape, dtype=dtype, keywords={"dtype": dtype})
        return self.results[key]

    def emit_global_grad(self, name: str, first: Slot, owned: bool, value_dtype: torch.dtype) -> None:
        """Start the accumulator of a gradient with its first contribution instead of zeros.

        Args:
            name: the tensor.
            first: the first contribution.
            owned: True if ``first`` may become the accumulator, provided that this program allocates all of its storage; otherwise it is
                copied.
            value_dtype: element type of the tensor.
        """
        key = Port("grad_side", name)
        if owned and self.owns(first):
            self.results[key] = first
            if len(first.shape) in CHANNELS_LAST and 1 in first.shape:
                like = self.port("side", name, first.shape, value_dtype)
                self.call(restride_as, first, like, writes=first)
            return
        like = self.port("side", name, first.shape, value_dtype)
        self.results[key] = self.call(copy_with_strides, first, like, shape=first.shape, dtype=first.dtype)

    def result(self, role: str, name: str, slot: Slot) -> None:
        """Declare a slot a result."""
        self.results[Port(role, name)] = slot

    def owns(self, slot: Slot) -> bool:
        """True if a slot is the root of a storage that this program allocated and that no result shares."""
        border = (*self.ports.values(), *self.results.values())
        return slot.root == slot.number and all(slot.root != other.root for other in border)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        view_of: Slot | None = None,
        writes: Slot | None = None,
        keywords: dict[str, Any] | None = None,
        scratch_bytes: int = 0,
    ) -> Slot:
        """Emit an operation with one result: a new tensor, a view of ``view_of``, or a write into ``writes``."""
        if writes is not None:
            self._append(function, arguments, keywords or {}, (), (writes,), scratch_bytes)
            return writes
        assert shape is not None
        out = self.slot(shape, dtype) if view_of is None else self.slot(shape, dtype or view_of.dtype, view_of.root)
        self._append(function, arguments, keywords or {}, (out,), (), scratch_bytes)
        return out

    def call_many(self, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: tuple[Slot | None, ...]) -> None:
        """Emit an operation with several results."""
        self.call_into(function, arguments, {}, outputs, has_many=True)

    def call_into(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Slot | None, ...],
        *,
        has_many: bool,
        scratch_bytes: int = 0,
    ) -> None:
        """Emit an operation with existing slots for its results; ``has_many`` is true if it returns a tuple."""
        if has_many and len(outputs) == 1:
            raise InternalError(f"{function}: a tuple of one result")
        self._append(function, arguments, keywords, outputs, scratch_bytes=scratch_bytes)

    def call_measured(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: tuple[Slot | None, ...],
        *,
        writes: tuple[Slot, ...] = (),
        peak_bytes: int,
        flops: int,
    ) -> None:
        """Emit a call that is a program itself, of known cost.

        Args:
            function: the callable.
            arguments: positional arguments.
            outputs: slots for the results.
            writes: slots written in place.
            peak_bytes: most bytes that it holds at once, results included.
            flops: its floating-point operations.
        """
        num_bytes = sum(out.num_bytes for out in outputs if out is not None)
        scratch_bytes = max(0, peak_bytes - num_bytes)
        self.instructions.append(Instruction(function, arguments, {}, outputs, writes, flops, num_bytes, scratch_bytes, self.owner))

    def empty(self, shape: Iterable[int], dtype: torch.dtype | None = None) -> Slot:
        """An uninitialised buffer, of images channels last unless layouts are left to torch."""
        shape = tuple(shape)
        layout = torch.contiguous_format if self.keeps_torch_layouts else CHANNELS_LAST.get(len(shape), torch.contiguous_format)
        keywords = {"dtype": dtype or self.dtype, "device": DEVICE, "memory_format": layout}
        return self.call(torch.empty, shape, shape=shape, dtype=dtype, keywords=keywords)

    def zeros(self, shape: Iterable[int], dtype: torch.dtype | None = None) -> Slot:
        """A buffer of zeros."""
        out = self.empty(shape, dtype)
        return self.call(torch.ops.aten.zero_.default, out, writes=out)

    def row_major(self, slot: Slot) -> Slot:
        """A row-major copy."""
        keywords = {"memory_format": torch.contiguous_format}
        return self.call(aten.clone.default, slot, shape=slot.shape, dtype=slot.dtype, keywords=keywords)

    def narrow(self, slot: Slot, dim: int, start: int, length: int) -> Slot:
        """A view of ``length`` indices from ``start`` along ``dim``; the slot itself if these are all."""
        shape = slot.shape
        if start == 0 and length == shape[dim]:
            return slot
        out = self.slot((*shape[:dim], length, *shape[dim + 1 :]), slot.dtype, slot.root)
        # Built directly, as most instructions are views: neither bytes nor FLOPs.
        self.instructions.append(Instruction(_SLICE, (slot, dim, start, start + length), {}, (out,), (), 0, 0, 0, self.owner))
        return out

    def narrow_axis(self, slot: Slot, axes: Axes, axis: int, start: int, length: int) -> Slot:
        """A view along an axis of an image; the slot itself if it has no such axis."""
        dim = axes.dim(len(slot.shape), axis)
        return slot if dim is None else self.narrow(slot, dim, start, length)

    def copy(self, destination: Slot, source: Slot) -> Slot:
        """Copy ``source`` into ``destination``."""
        return self.call(torch.ops.aten.copy_.default, destination, source, writes=destination)

    def cast(self, slot: Slot, dtype: torch.dtype) -> Slot:
        """The tensor in another element type; the slot itself if it has that type."""
        if slot.dtype == dtype:
            return slot
        return self.call(aten._to_copy.default, slot, shape=slot.shape, dtype=dtype, keywords={"dtype": dtype})

    def add_into(self, destination: Slot, source: Slot) -> Slot:
        """Add ``source`` to ``destination`` in place."""
        return self.call(torch.ops.aten.add_.Tensor, destination, source, writes=destination)

    def _append(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Slot | None, ...],
        writes: tuple[Slot, ...] = (),
        scratch_bytes: int = 0,
    ) -> None:
        num_bytes = 0
        for out in outputs:
            if out is not None and out.root == out.number:
                num_bytes += out.num_bytes
        flops = _count_flops(function, arguments, keywords, outputs)
        instruction = Instruction(function, arguments, keywords, outputs, writes, flops, num_bytes, scratch_bytes, self.owner)
        self.instructions.append(instruction)

    def prune(self, num_forward: int | None = None) -> int | None:
        """Drop dead instructions; returns how many of the first ``num_forward`` are left."""
        keep = self._prune()[0]
        return None if num_forward is None else sum(keep[:num_forward])

    def pruned_slots(self) -> list[list[Slot]]:
        """Drop dead instructions; returns the slots that each live one reads or writes in place."""
        return self._prune()[1]

    def _prune(self) -> tuple[list[bool], list[list[Slot]]]:
        external = {slot.root for slot in (*self.ports.values(), *self.results.values())}
        slots = [slots_of(instruction) for instruction in self.instructions]
        keep = live_instructions(self.instructions, slots, external)
        self.instructions[:] = [instruction for instruction, kept in zip(self.instructions, keep, strict=True) if kept]
        return keep, [used for used, kept in zip(slots, keep, strict=True) if kept]

    def finish(self) -> Program:
        """The program, without dead instructions and with frees."""
        return self.split(len(self.instructions))[0]

    def split(self, num_forward: int) -> tuple[Program, Program]:
        """Two programs: the first ``num_forward`` instructions and the remaining ones.

        Slots of the first that the second reads are residuals of the first.
        """
        external = {slot.root for slot in self.ports.values()}
        results = {slot.root for slot in self.results.values()}
        slots = [slots_of(instruction) for instruction in self.instructions]
        keep = live_instructions(self.instructions, slots, external | results)
        live = [instruction for instruction, kept in zip(self.instructions, keep, strict=True) if kept]
        slots = [used for used, kept in zip(slots, keep, strict=True) if kept]
        num_forward = sum(keep[:num_forward])
        storage_bytes: dict[int, int] = {}
        last_use: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for position, (instruction, used) in enumerate(zip(live, slots, strict=True)):
            for slot in used:
                last_use[slot.root] = position
            for out in instruction.outputs:
                if out is not None:
                    root, number = out.root, out.number
                    last_use[root] = position
                    if root == number:
                        storage_bytes[number] = out.num_bytes
                        members[number] = [number]
                    else:
                        members.setdefault(root, []).append(number)
        last_used_roots: dict[int, list[int]] = {}
        for root, position in last_use.items():
            if root not in external and root not in results:
                last_used_roots.setdefault(position, []).append(root)
        for position, roots in last_used_roots.items():
            frees = tuple(sorted(number for root in roots for number in members[root]))
            live[position] = live[position].with_frees(frees, sum(storage_bytes.get(root, 0) for root in roots))
        residuals: tuple[int, ...] = ()
        if num_forward < len(live):
            made = {out.number for i in live[:num_forward] for out in i.outputs if out is not None}
            # A residual view keeps its storage alive; so does a root that a later instruction frees.
            residuals = tuple(sorted(made & {slot.number for used in slots[num_forward:] for slot in used}))
        first = _build_program(live[:num_forward], slots[:num_forward], self.ports, self.results, residuals)
        return first, _build_program(live[num_forward:], slots[num_forward:], self.ports, self.results, ())


def copy_with_strides(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of ``value`` with the strides of ``like``."""
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def restride_as(value: torch.Tensor, like: torch.Tensor) -> None:
    """Give a tensor the strides of another one with the same memory order.

    Dimensions of extent 1 may have any stride, and kernels choose other strides than parameters have. Autograd accepts that as the same
    layout, but ``DistributedDataParallel`` warns about it.
    """
    strides = like.stride()
    if value.stride() != strides and is_in_program_layout(value) and is_in_program_layout(like):
        value.as_strided_(value.shape, strides)


def _build_program(
    instructions: list[Instruction],
    slots: list[list[Slot]],
    ports: dict[Port, Slot],
    results: dict[Port, Slot],
    residuals: tuple[int, ...],
) -> Program:
    bytes_now = peak = 0
    for instruction in instructions:
        bytes_now += instruction.num_bytes
        peak = max(peak, bytes_now + instruction.scratch_bytes)
        bytes_now -= instruction.freed_bytes
    outputs = {out.number: out for i in instructions for out in i.outputs if out is not None}
    own_results = {port: slot for port, slot in results.items() if slot.number in outputs}
    touched = {slot.root for used in slots for slot in used}
    return Program(
        instructions=tuple(instructions),
        ports={port: slot for port, slot in ports.items() if slot.root in touched},
        results=own_results,
        result_bytes={port: outputs[slot.root].num_bytes for port, slot in own_results.items()},
        residuals=residuals,
        peak_bytes=peak,
        end_bytes=bytes_now,
        flops=sum(i.flops for i in instructions),
    )


def _count_flops(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], outputs: tuple[Slot | None, ...]
) -> int:
    """FLOPs by the formulas of ``torch.utils.flop_counter``, on the shapes of slots."""
    formula = _flop_formula(function) if type(function) is OpOverload else None
    if formula is None:
        return 0
    # The registered formula takes tensors; the function that it wraps takes shapes.
    shapes = tuple(a.shape if isinstance(a, Slot) else a for a in arguments)
    out = tuple(None if slot is None else slot.shape for slot in outputs)
    return int(formula(*shapes, out_shape=out[0] if len(out) == 1 else out))


@cache
def _flop_formula(overload: OpOverload) -> Callable[..., int] | None:
    registered: Any = flop_registry.get(overload.overloadpacket)
    formula: Callable[..., int] | None = None if registered is None else registered.__wrapped__
    return formula
