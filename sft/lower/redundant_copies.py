"""Elimination of redundant copies in programs of full tensors.

Operators are lowered one by one, and their traces may not assume a memory layout (:mod:`sft.lower.joint_traces`). So a reshape that merges
dimensions, such as the flattening of tokens before a product, becomes a copy. So does an image-like operand of a kernel that requires
contiguous tensors. In a whole program many of these copies are redundant:

- the operand is known to be row-major (:mod:`sft.lower.slot_strides`), as the copy is: a view has the same elements and strides;
- the copy is only read, through views, by further row-major copies, which may as well read the operand, or by fused attention, which
  requires adjacent channels alone: queries, keys and values are slices of a permuted product;
- the operand is a sum of slices (:func:`sft.lower.concat.sum_slices`), which only the copy reads, permuted: the sum is made in the memory
  order of the copy.

Such a copy becomes a view of its operand. All other calls still get operands of the same elements and strides, so results keep their
bits. A view shares the storage of its operand, so a copy stays a copy in these cases:

- either of both storages is written while the other one is still read, or a backward program that may run twice writes it;
- the copy is a result of the program, or the operand belongs to the caller and the backward program does not read it otherwise;
- the storage of the operand is larger than the copy and would live longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.common.torch_internals import OpOverload, op_schema
from sft.lower.builder import ProgramBuilder
from sft.lower.concat import sum_slices
from sft.lower.context import SegmentInfo
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward
from sft.lower.joint_traces import only_splits
from sft.lower.program import Instruction, Slot
from sft.lower.slot_strides import ROW_MAJOR_COPIES, SlotStrides, is_row_major_copy

__all__ = ["replace_redundant_copies"]

aten = torch.ops.aten

_ATTENTION = (fused_attention, fused_attention_backward)

#: Views of operands of every layout.
_VIEWS = frozenset(
    {
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
    }
)


def replace_redundant_copies(scope: SegmentInfo, builder: ProgramBuilder, num_forward: int | None = None) -> int | None:
    """Replace redundant copies of a lowered program on full tensors by views.

    Args:
        scope: the segment.
        builder: holds the program.
        num_forward: number of instructions of the forward half, if the program will be split.

    Returns:
        ``num_forward`` without dead instructions.
    """
    if not any(map(_is_copy, builder.instructions)):
        return num_forward
    num_forward = builder.prune(num_forward)  # dead readers must not prevent a replacement
    elimination = _CopyElimination(builder, len(builder.instructions) if num_forward is None else num_forward)
    ports = [slot for port, slot in builder.ports.items() if port.role == "side" and _is_row_major_value(scope, port.name)]
    strides = SlotStrides(ports)
    for position, instruction in enumerate(builder.instructions):
        if _is_copy(instruction) and strides.is_row_major(instruction.arguments[0]):
            elimination.replace(position)
        strides.note(builder.instructions[position])
    for position, instruction in enumerate(builder.instructions):
        if instruction.function is sum_slices:
            elimination.order_sum(position)
    strides = SlotStrides(ports)
    for position, instruction in enumerate(builder.instructions):
        # Transposed again, an operand that was a clone before may be row-major.
        is_redundant = _is_copy(instruction) and strides.is_row_major(instruction.arguments[0])
        if is_redundant or (is_row_major_copy(instruction) and elimination.is_read_in_any_layout(position, strides)):
            elimination.replace(position)
        strides.note(builder.instructions[position])
    elimination.finish()
    return num_forward


def _is_copy(instruction: Instruction) -> bool:
    return instruction.function is aten._reshape_copy.default or is_row_major_copy(instruction)


def _is_row_major_value(scope: SegmentInfo, name: str) -> bool:
    """True for a value of an earlier segment in a buffer of the library, all of it or a contiguous block."""
    is_operator = scope.graph[name].kind == "operator" and name not in scope.strided
    return is_operator and (len(scope.shapes[name]) not in CHANNELS_LAST or name in scope.row_major)


class _CopyElimination:
    """Replaces copies by views where neither storage is overwritten while the other one is read, and no storage lives longer.

    Args:
        builder: holds the program.
        num_forward: number of instructions before the backward half.
    """

    def __init__(self, builder: ProgramBuilder, num_forward: int) -> None:
        self._builder, self._num_forward = builder, num_forward
        self._results = {slot.root for slot in builder.results.values()}
        self._border = {slot.root for slot in builder.ports.values()} | self._results
        self._roots: dict[int, int] = {}  # storage of a replaced copy -> storage of its operand
        self._bytes: dict[int, int] = {}
        self._made: dict[int, int] = {}  # position of the instruction that allocates a storage
        self._uses: dict[int, list[int]] = {}
        self._writes: dict[int, list[int]] = {}
        for position, instruction in enumerate(builder.instructions):
            for root in {slot.root for slot in _slots_in((instruction.arguments, instruction.keywords, instruction.writes))}:
                self._uses.setdefault(root, []).append(position)
            for root in {slot.root for slot in _written_slots(instruction)}:
                self._writes.setdefault(root, []).append(position)
            for out in instruction.outputs:
                if out is not None and out.root == out.number:
                    self._bytes[out.number], self._made[out.number] = out.num_bytes, position

    def is_read_in_any_layout(self, position: int, strides: SlotStrides) -> bool:
        """True if no reader of a clone requires its layout: row-major copies, and fused attention, through views of any layout."""
        instruction = self._builder.instructions[position]
        (copy,) = instruction.outputs
        assert copy is not None
        viewed = strides.if_view(copy, instruction.arguments[0])
        for reader in (self._builder.instructions[use] for use in self._uses.get(copy.root, ())):
            if _is_view_in_any_layout(reader):
                viewed.note(reader)
            elif reader.function in _ATTENTION:
                if not all(viewed.has_adjacent_channels(slot) for slot in _slots_in(reader.arguments) if slot.root == copy.root):
                    return False
            elif reader.function not in ROW_MAJOR_COPIES and not is_row_major_copy(reader):
                return False
        return True

    def order_sum(self, position: int) -> None:
        """Give a sum of slices the memory order of the copy of its permuted elements, if nothing else reads it."""
        instruction = self._builder.instructions[position]
        (out,) = instruction.outputs
        assert out is not None
        readers = [self._builder.instructions[use] for use in self._uses.get(out.root, ())]
        if out.root in self._border or not readers or not _is_copy(readers[-1]):
            return
        slot: Slot | None = out
        order = tuple(range(len(out.shape)))
        for reader in readers:
            if slot is None or type(reader.arguments[0]) is not Slot or reader.arguments[0].number != slot.number:
                return
            if reader is not readers[-1]:
                permutation = _permutation(reader)
                if permutation is None:
                    return
                order = tuple(order[dim] for dim in permutation)
                (slot,) = reader.outputs
        tensors, spans, shape, _, dtype = instruction.arguments
        self._builder.instructions[position] = instruction._replace(arguments=(tensors, spans, shape, order, dtype))

    def replace(self, position: int) -> None:
        """Make the copy of an instruction a view of its operand, if that is safe and takes no memory."""
        instruction = self._builder.instructions[position]
        source, (copy,) = instruction.arguments[0], instruction.outputs
        assert copy is not None
        root = self._root_of(source)
        if copy.root in self._results or self._is_overwritten(root, copy.root, position) or not self._is_free(root, copy.root):
            return
        self._builder.instructions[position] = instruction._replace(
            function=aten.view.default if instruction.function is aten._reshape_copy.default else aten.alias.default,
            keywords={},
            outputs=(Slot(copy.number, copy.shape, copy.dtype, root),),
            num_bytes=0,
            scratch_bytes=0,
        )
        self._roots[copy.root] = root
        for events in (self._uses, self._writes):
            merged = sorted({*events.get(root, ()), *events.pop(copy.root, ())})
            if merged:
                events[root] = merged

    def finish(self) -> None:
        """Give all views of replaced copies their new storage."""
        if self._roots:
            self._builder.instructions[:] = [self._with_new_roots(instruction) for instruction in self._builder.instructions]

    def _root_of(self, slot: Slot) -> int:
        root = slot.root
        while root in self._roots:
            root = self._roots[root]
        return root

    def _last_use(self, root: int) -> int:
        return self._uses.get(root, (-1,))[-1]

    def _is_overwritten(self, source: int, copy: int, position: int) -> bool:
        """True if a write to one storage would be seen by a reader of the other one."""
        last_read = math.inf if source in self._border else self._last_use(source)
        source_writes = [write for write in self._writes.get(source, ()) if write > position]
        copy_writes = self._writes.get(copy, [])
        is_residual = source not in self._made or self._made[source] < self._num_forward
        return (
            any(write <= self._last_use(copy) for write in source_writes)
            or any(write <= last_read for write in copy_writes)
            or (is_residual and any(write >= self._num_forward for write in (*source_writes, *copy_writes)))
        )

    def _is_free(self, source: int, copy: int) -> bool:
        """True if no storage lives longer, unless it takes the place of one of its size."""
        if source in self._border:
            return self._last_use(copy) < self._num_forward or self._last_use(source) >= self._num_forward
        return self._bytes[source] == self._bytes[copy] or self._last_use(source) >= self._last_use(copy)

    def _with_new_roots(self, instruction: Instruction) -> Instruction:
        slots = [out for out in instruction.outputs if out is not None]
        slots += _slots_in((instruction.arguments, instruction.keywords, instruction.writes))
        if not any(slot.root in self._roots for slot in slots):
            return instruction
        renamed = _map_slots((instruction.arguments, instruction.keywords, instruction.outputs, instruction.writes), self._with_new_root)
        arguments, keywords, outputs, writes = renamed
        return instruction._replace(arguments=arguments, keywords=keywords, outputs=outputs, writes=writes)

    def _with_new_root(self, slot: Slot) -> Slot:
        return Slot(slot.number, slot.shape, slot.dtype, self._root_of(slot)) if slot.root in self._roots else slot


def _permutation(instruction: Instruction) -> tuple[int, ...] | None:
    """The dimensions of the operand in the order of the result, for a permutation of dimensions; ``None`` for other operators."""
    function, arguments = instruction.function, instruction.arguments[1:]
    order = list(range(len(instruction.arguments[0].shape)))
    if function is aten.alias.default:
        return tuple(order)
    if function is aten.permute.default:
        return tuple(dim % len(order) for dim in arguments[0])
    if function is aten.t.default:
        return tuple(reversed(order))
    if function is aten.transpose.int:
        first, second = arguments
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    return None


def _is_view_in_any_layout(instruction: Instruction) -> bool:
    if instruction.function is aten.view.default:
        (out,) = instruction.outputs
        return out is not None and only_splits(instruction.arguments[0].shape, out.shape)
    return instruction.function in _VIEWS


def _written_slots(instruction: Instruction) -> Iterator[Slot]:
    """Slots that an instruction writes; all of its operands if an ATen call of a trace writes in place."""
    yield from instruction.writes
    if not instruction.writes and type(instruction.function) is OpOverload and op_schema(instruction.function).is_mutable:
        yield from _slots_in((instruction.arguments, instruction.keywords))


def _slots_in(value: Any) -> Iterator[Slot]:
    if type(value) is Slot:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _slots_in(item)
    elif isinstance(value, dict):
        yield from _slots_in(tuple(value.values()))


def _map_slots(value: Any, function: Callable[[Slot], Slot]) -> Any:
    if type(value) is Slot:
        return function(value)
    if type(value) is tuple or type(value) is list:
        return type(value)(_map_slots(item, function) for item in value)
    return {key: _map_slots(item, function) for key, item in value.items()} if type(value) is dict else value
