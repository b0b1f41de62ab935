"""Views of memory: the addresses of a tensor's elements in its storage, and their overlaps.

Numbers may be symbols of the exporter. They are compared as text, since a comparison of symbols would add guards to the program.
NumPy decides if two views have a byte in common (a bounded linear Diophantine equation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["MemoryView"]

#: Work of the exact test of two views; harder pairs count as overlapping.
_MAX_WORK = 2**16


@dataclass(frozen=True)
class MemoryView:
    """The bytes of a tensor in its storage. Numbers may be symbols (:class:`torch.SymInt`).

    Attributes:
        sizes: extent of each dimension.
        strides_bytes: distance of neighbours along each dimension.
        offset_bytes: position of the first element.
        itemsize_bytes: size of an element.
    """

    sizes: tuple[Any, ...]
    strides_bytes: tuple[Any, ...]
    offset_bytes: Any
    itemsize_bytes: int

    @classmethod
    def of(cls, value: torch.Tensor) -> MemoryView:
        """The view of a tensor, which may be fake."""
        itemsize = value.element_size()
        return cls(tuple(value.shape), tuple(s * itemsize for s in value.stride()), value.storage_offset() * itemsize, itemsize)

    @property
    def is_symbolic(self) -> bool:
        return not all(isinstance(number, int) for number in (*self.sizes, *self.strides_bytes, self.offset_bytes))

    def at_capture(self) -> MemoryView:
        """The view at the sizes of the capture."""
        sizes, strides = (tuple(map(_at_capture, numbers)) for numbers in (self.sizes, self.strides_bytes))
        return MemoryView(sizes, strides, _at_capture(self.offset_bytes), self.itemsize_bytes)

    def broadcast_to(self, sizes: tuple[Any, ...]) -> MemoryView:
        """The view broadcast to ``sizes``; the view itself where they are not a broadcast of its own."""
        if not _broadcasts(self.sizes, sizes):
            return self
        strides = (0 if _is_one(size) else stride for size, stride in zip(self.sizes, self.strides_bytes, strict=True))
        return MemoryView(sizes, (0,) * (len(sizes) - len(self.sizes)) + tuple(strides), self.offset_bytes, self.itemsize_bytes)

    def coincides_with(self, other: MemoryView) -> bool:
        """Return true where both have the same address at each index. False may also mean that symbols do not show it."""
        return self.itemsize_bytes == other.itemsize_bytes and _text(self) == _text(other)

    def overlaps(self, other: MemoryView) -> bool:
        """Return true where both have a byte in common."""
        try:
            return bool(np.shares_memory(self._array(), other._array(), max_work=_MAX_WORK))  # type: ignore[arg-type]  # any work
        except np.exceptions.TooHardError:
            return True

    def _array(self) -> np.ndarray[Any, Any]:
        """An array of this geometry at a made-up address, which is not accessed."""
        return np.asarray(_ArrayInterface(self))

    @property
    def has_shared_elements(self) -> bool:
        """True where two indices may have the same address: an expanded tensor, windows of ``unfold`` that overlap."""
        if 0 in self.sizes:
            return False
        extent = self.itemsize_bytes
        for stride, size in sorted((stride, size) for size, stride in zip(self.sizes, self.strides_bytes, strict=True) if size > 1):
            if stride < extent:
                return True
            extent = stride * (size - 1) + extent
        return False

    def repeats(self, source: MemoryView) -> bool:
        """Return true where ``source``, broadcast to this shape, is a slice of this view at one index of the broadcast dimensions.

        A copy of the slice to the whole view then writes to the slice its own values.
        """
        distance = source.offset_bytes - self.offset_bytes
        dims = sorted(zip(self.strides_bytes, source.strides_bytes, self.sizes, strict=True), reverse=True)
        for stride, source_stride, size in dims:
            if size == 1 or stride == source_stride:
                continue
            if source_stride != 0:
                return False
            steps = min(max(distance, 0) // stride, size - 1) if stride else 0
            distance -= steps * stride
        return bool(distance == 0)


class _ArrayInterface:
    """NumPy's array interface of a view."""

    def __init__(self, view: MemoryView) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{view.itemsize_bytes}",
            "data": (2**40 + view.offset_bytes, False),
            "shape": view.sizes,
            "strides": view.strides_bytes,
        }


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # a symbol stands for at least 2: the exporter makes none for a size of 1


def _at_capture(number: Any) -> int:
    if isinstance(number, int):
        return number
    # A number of selected elements has no value at capture; such a tensor is new memory.
    return int(number.node.hint) if number.node.has_hint() else 1


def _text(view: MemoryView) -> str:
    """Addresses as text: comparing symbols would add guards to the program."""
    strides = [stride for size, stride in zip(view.sizes, view.strides_bytes, strict=True) if not _is_one(size)]
    return str((view.sizes, strides, view.offset_bytes))


def _broadcasts(sizes: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    if len(sizes) > len(target):
        return False
    pairs = zip(sizes, target[len(target) - len(sizes) :], strict=True)
    return all(_is_one(size) or str(size) == str(wanted) for size, wanted in pairs)
