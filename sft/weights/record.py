"""Layout of a block's tensors in one record of bytes.

A block's weights are read with one copy, so they are adjacent. The optimizer's state for them, which only updates read, follows at the next
cache line::

    | weight | weight | ... | padding | state | state | ... | padding |
    0                                 weight_bytes                    record_bytes

Wide elements come first, so that every tensor is aligned without gaps; a record is padded to whole cache lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from sft.common.errors import InputError

__all__ = ["ALIGNMENT_BYTES", "RecordField", "RecordLayout", "RecordPart", "TensorSpec", "layout_difference"]

#: Alignment of records and of the state in them: a cache line.
ALIGNMENT_BYTES = 64

#: Part of a record: the weights that a forward pass reads, the state that only updates read, or both.
RecordPart = Literal["weights", "state", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Metadata of a tensor of a block.

    Attributes:
        name: unique in the block.
        shape: its sizes.
        dtype: its element type.
        is_state: whether only updates read it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_state: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The metadata of a tensor."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """A tensor and its offset in the record.

    Attributes:
        spec: the tensor.
        offset_bytes: offset of its first element.
    """

    spec: TensorSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """The fields of a record in the order of their offsets.

    Attributes:
        fields: all tensors, weights first.
        weight_bytes: length of the weights, in whole cache lines.
        record_bytes: length of the record, in whole cache lines.
    """

    fields: tuple[RecordField, ...]
    weight_bytes: int
    record_bytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> RecordLayout:
        """Layout of a block with these tensors.

        Raises:
            InputError: no tensors are given, or two have the same name.
        """
        tensors = list(specs)
        if not tensors:
            raise InputError("a block without tensors has nothing to store")
        if len({spec.name for spec in tensors}) != len(tensors):
            raise InputError(f"two tensors of a block have one name: {sorted(spec.name for spec in tensors)}")
        ordered = sorted(tensors, key=lambda spec: (spec.is_state, -spec.dtype.itemsize))
        fields, offset, weight_bytes = [], 0, 0
        for spec in ordered:
            if spec.is_state and not weight_bytes:
                offset = weight_bytes = _aligned(offset)
            fields.append(RecordField(spec=spec, offset_bytes=offset))
            offset += spec.num_bytes
        record_bytes = _aligned(offset)
        return cls(fields=tuple(fields), weight_bytes=weight_bytes or record_bytes, record_bytes=record_bytes)

    def span(self, part: RecordPart) -> tuple[int, int]:
        """First and last (exclusive) byte of a part of the record."""
        start = self.weight_bytes if part == "state" else 0
        return start, self.weight_bytes if part == "weights" else self.record_bytes

    def part_bytes(self, part: RecordPart) -> int:
        """Length of a part of the record in bytes."""
        start, stop = self.span(part)
        return stop - start

    def views(self, data: Tensor, part: RecordPart = "all") -> dict[str, Tensor]:
        """Views of the tensors in the bytes of a record, or of a part of one, by name."""
        start, _ = self.span(part)
        views = {}
        for field in self.fields:
            if part == "all" or field.spec.is_state == (part == "state"):
                offset = field.offset_bytes - start
                views[field.spec.name] = data[offset : offset + field.spec.num_bytes].view(field.spec.dtype).view(field.spec.shape)
        return views

    def stacked(self, data: Tensor, num_blocks: int) -> Mapping[str, Tensor]:
        """Views of each tensor in consecutive records, with the block as first dimension."""
        views = {}
        for field in self.fields:
            spec, itemsize = field.spec, field.spec.dtype.itemsize
            strides = [self.record_bytes // itemsize]
            strides += [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
            views[spec.name] = data.view(spec.dtype).as_strided((num_blocks, *spec.shape), strides, field.offset_bytes // itemsize)
        return views


def layout_difference(model_specs: Iterable[TensorSpec], file_specs: Iterable[TensorSpec]) -> str:
    """Description of the first tensor in which a file differs from the model; empty if they agree.

    Args:
        model_specs: tensors of the model.
        file_specs: tensors of the file.
    """
    for expected, actual in zip_longest(model_specs, file_specs):
        if expected != actual:
            return f"{actual or 'nothing'} where the model has {expected or 'nothing'}"
    return ""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
