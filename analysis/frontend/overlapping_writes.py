"""Overlapping in-place writes: the destination shares memory with another operand, or has several elements at one address.

``y[:, 1:] += y[:, :-1]`` reads elements that it also writes. Its result in eager PyTorch depends on the order of the loop over elements,
which differs between devices, layouts and vector widths. A functionalized program reads the values before the write. So such writes are
refused. Operands that coincide with the destination element by element (``y.mul_(y)``) have one result, and are kept.

Views are compared in bytes of their storage. NumPy decides if two of them have a byte in common (a bounded linear Diophantine equation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from sft.analysis.frontend.graph_builder import module_path_of
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import OpOverload, op_schema, pytree, storage_id

__all__ = ["has_symbolic_overlaps", "refuse_overlapping_writes"]

#: Operators that read a scalar operand before they write.
_FILL_OPS = frozenset({"fill_", "masked_fill_", "index_fill_"})

#: Operators whose results each read many elements: no operand may coincide with the destination.
_PRODUCT_OPS = frozenset({"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "matmul", "mm", "mv"})

#: Work of the exact test of two views; harder pairs count as overlapping.
_MAX_WORK = 2**16


@dataclass(frozen=True)
class _View:
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
    def of(cls, value: torch.Tensor) -> _View:
        """The view of a fake tensor."""
        itemsize = value.element_size()
        return cls(tuple(value.shape), tuple(s * itemsize for s in value.stride()), value.storage_offset() * itemsize, itemsize)

    @property
    def is_symbolic(self) -> bool:
        return not all(isinstance(number, int) for number in (*self.sizes, *self.strides_bytes, self.offset_bytes))

    def at_capture(self) -> _View:
        """The view at the sizes of the capture."""
        sizes, strides = (tuple(map(_at_capture, numbers)) for numbers in (self.sizes, self.strides_bytes))
        return _View(sizes, strides, _at_capture(self.offset_bytes), self.itemsize_bytes)

    def expand_to(self, sizes: tuple[Any, ...]) -> _View:
        """The view broadcast to ``sizes``."""
        strides = (0 if _is_one(size) else stride for size, stride in zip(self.sizes, self.strides_bytes, strict=True))
        return _View(sizes, (0,) * (len(sizes) - len(self.sizes)) + tuple(strides), self.offset_bytes, self.itemsize_bytes)

    def coincides_with(self, other: _View) -> bool:
        """Return true where both have the same address at each index. False may also mean that symbols do not show it."""
        return self.itemsize_bytes == other.itemsize_bytes and _text(self) == _text(other)

    def overlaps(self, other: _View) -> bool:
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

    def repeats(self, source: _View) -> bool:
        """Return true where this view, without ``source`` dimensions of stride 0, contains ``source`` at one index of these dimensions."""
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

    def __init__(self, view: _View) -> None:
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


def _text(view: _View) -> str:
    """Addresses as text: comparing symbols would add guards to the program."""
    strides = [stride for size, stride in zip(view.sizes, view.strides_bytes, strict=True) if not _is_one(size)]
    return str((view.sizes, strides, view.offset_bytes))


@dataclass(frozen=True)
class _Write:
    """A write that may overlap.

    Attributes:
        node: the operator.
        written: the destination.
        operand: the other operand; the destination itself where its own elements may share memory.
    """

    node: fx.Node
    written: torch.Tensor
    operand: torch.Tensor

    @property
    def name(self) -> str:
        """Name of the operator, such as ``add_``."""
        return _operator_name(self.node)

    @property
    def is_self_overlap(self) -> bool:
        return self.operand is self.written

    @property
    def views(self) -> tuple[_View, _View]:
        """Destination, and the operand broadcast to its shape where an operator would do so."""
        written, operand = _View.of(self.written), _View.of(self.operand)
        return written, operand.expand_to(written.sizes) if _broadcasts(operand.sizes, written.sizes) else operand

    @property
    def is_order_dependent(self) -> bool:
        """True where the result depends on the order of the loop; sizes are those of the capture."""
        written, operand = (view.at_capture() for view in self.views)
        if self.is_self_overlap:
            return written.has_shared_elements
        if not written.overlaps(operand):
            return False
        # A copy of one row to all rows also writes that row, with its own values.
        return not (self.name == "copy_" and not written.has_shared_elements and written.repeats(operand))


def _broadcasts(sizes: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    if len(sizes) > len(target):
        return False
    pairs = zip(sizes, target[len(target) - len(sizes) :], strict=True)
    return all(_is_one(size) or str(size) == str(wanted) for size, wanted in pairs)


def has_symbolic_overlaps(exported: ExportedProgram) -> bool:
    """Return true where a write may overlap at some of the sizes for which the program is."""
    return any(any(view.is_symbolic for view in write.views) for write in _possible_overlaps(exported))


def refuse_overlapping_writes(model: nn.Module, exported: ExportedProgram) -> None:
    """Refuse writes with a result that depends on the order of the loop over elements in eager PyTorch.

    Args:
        model: the model.
        exported: its program, before it is functionalized.

    Raises:
        UnsupportedError: names each such write.
    """
    problems = [_problem(model, write) for write in _possible_overlaps(exported) if write.is_order_dependent]
    if problems:
        raise UnsupportedError(list(dict.fromkeys(problems)))


def _problem(model: nn.Module, write: _Write) -> str:
    place = f"{module_path_of(write.node) or type(model).__name__}: {write.name}"
    destination = tuple(write.views[0].at_capture().sizes)
    if write.is_self_overlap:
        return (
            f"{place}: writes to a view of shape {destination} in which several elements have the same memory (unfold, expand), and the "
            "result in eager PyTorch depends on the order of the writes; write to a copy (view.clone())"
        )
    source = tuple(_View.of(write.operand).at_capture().sizes)
    return (
        f"{place}: writes to a view of shape {destination} and reads another of shape {source} that shares some of its memory, and the "
        "result in eager PyTorch depends on the order of the loop over elements; read a copy, as in y[:, 1:] += y[:, :-1].clone()"
    )


def _possible_overlaps(exported: ExportedProgram) -> Iterator[_Write]:
    """Writes with another operand in the same storage that does not coincide with the destination, or with elements at one address."""
    graphs = (module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        if not isinstance(node.target, OpOverload) or not op_schema(node.target).is_mutable:
            continue
        written, operands = _operands_of(node)
        name = _operator_name(node)
        for destination in written:
            if _View.of(destination).at_capture().has_shared_elements:
                yield _Write(node, destination, destination)
            for operand in operands:
                if operand is destination or storage_id(operand) != storage_id(destination) or (operand.dim() == 0 and name in _FILL_OPS):
                    continue
                write = _Write(node, destination, operand)
                view, source = write.views
                if name.removesuffix("_") in _PRODUCT_OPS or not view.coincides_with(source):
                    yield write


def _operator_name(node: fx.Node) -> str:
    assert isinstance(node.target, OpOverload)
    return str(op_schema(node.target).name).removeprefix("aten::")


def _operands_of(node: fx.Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Written and read tensors of an operator."""
    assert isinstance(node.target, OpOverload)
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for index, argument in enumerate(op_schema(node.target).arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(value):
            tensor = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
            if isinstance(tensor, torch.Tensor):
                (written if is_written else read).append(tensor)
    return written, read
