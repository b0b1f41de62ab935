"""How the tensors of a block lie in one record of bytes.

A block's weights are read with one copy, so they lie side by side; behind them, from the next cache line on, lies what an optimizer
keeps for them, which only updates read. Wide elements come first, so that every tensor is aligned without gaps; a record is filled up
to whole cache lines.
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

#: Records, and the state in them, start at multiples of this: a cache line.
ALIGNMENT_BYTES = 64

#: Which half of a record: what a forward pass reads, what only an update reads, or both.
RecordPart = Literal["weights", "state", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a block, without its content.

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

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """A tensor and its place in the record.

    Attributes:
        spec: the tensor.
        offset_bytes: where its first element is.
    """

    spec: TensorSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """A record: its fields in the order of their offsets.

    Attributes:
        fields: all of them, weights first.
        weight_bytes: the length of the first half, in whole cache lines.
        record_bytes: the length of the record, in whole cache lines.
    """

    fields: tuple[RecordField, ...]
    weight_bytes: int
    record_bytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> RecordLayout:
        """The layout of a block of these tensors.

        Raises:
            InputError: there is none, or two have one name.
        """
        given = list(specs)
        if not given:
            raise InputError("a block without tensors has nothing to store")
        if len({spec.name for spec in given}) != len(given):
            raise InputError(f"two tensors of a block have one name: {sorted(spec.name for spec in given)}")
        ordered = sorted(given, key=lambda spec: (spec.is_state, -spec.dtype.itemsize))
        fields, offset, weight_bytes = [], 0, 0
        for spec in ordered:
            if spec.is_state and not weight_bytes:
                offset = weight_bytes = _aligned(offset)
            fields.append(RecordField(spec=spec, offset_bytes=offset))
            offset += spec.num_bytes
        record_bytes = _aligned(offset)
        return cls(fields=tuple(fields), weight_bytes=weight_bytes or record_bytes, record_bytes=record_bytes)

    def span(self, part: RecordPart) -> tuple[int, int]:
        """Where a half begins and ends in the record, in bytes."""
        start = self.weight_bytes if part == "state" else 0
        return start, self.weight_bytes if part == "weights" else self.record_bytes

    def part_bytes(self, part: RecordPart) -> int:
        """The length of a half."""
        start, stop = self.span(part)
        return stop - start

    def views(self, data: Tensor, part: RecordPart = "all") -> dict[str, Tensor]:
        """The tensors in the bytes of a record, or of a half of one, by name; no copies."""
        start, _ = self.span(part)
        found = {}
        for field in self.fields:
            if part == "all" or field.spec.is_state == (part == "state"):
                at = field.offset_bytes - start
                found[field.spec.name] = data[at : at + field.spec.num_bytes].view(field.spec.dtype).view(field.spec.shape)
        return found

    def stacked(self, data: Tensor, num_blocks: int) -> Mapping[str, Tensor]:
        """Each tensor of so many records that lie one behind the other, with the block as first dimension; no copies."""
        found = {}
        for field in self.fields:
            spec, itemsize = field.spec, field.spec.dtype.itemsize
            strides = [self.record_bytes // itemsize]
            strides += [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
            found[spec.name] = data.view(spec.dtype).as_strided((num_blocks, *spec.shape), strides, field.offset_bytes // itemsize)
        return found


def layout_difference(own: Iterable[TensorSpec], theirs: Iterable[TensorSpec]) -> str:
    """The first tensor that a file has otherwise than the model; empty where there is none.

    Args:
        own: the model's.
        theirs: the file's.
    """
    for here, there in zip_longest(own, theirs):
        if here != there:
            return f"{there or 'nothing'} where the model has {here or 'nothing'}"
    return ""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
