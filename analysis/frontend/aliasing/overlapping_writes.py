"""Checks of in-place writes to memory that another operand, a buffer or an input shares.

``y[:, 1:] += y[:, :-1]`` reads elements that it also writes. Its result in eager PyTorch depends on the order of the loop over elements,
which differs between devices, layouts and vector widths. A functionalized program reads the values before the write. So such writes are
refused. Operands that coincide with the destination element by element (``y.mul_(y)``) have one result, and are kept.

A buffer that `forward` writes may share memory with another tensor of the model (``register_buffer("b", self.a[:2])``), an input with
another input (``net(x, x)``). The program has an input for each of them, and the write changes one. These are refused, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from sft.analysis.frontend.aliasing.memory_view import MemoryView
from sft.analysis.frontend.constants.expressions import tensor_attribute
from sft.analysis.frontend.graph_builder import module_path_of
from sft.common.errors import InputError, UnsupportedError
from sft.common.torch_internals import OpOverload, is_traceable_wrapper_subclass_type, op_schema, pytree, storage_id

__all__ = ["check_written_inputs", "has_symbolic_overlaps", "refuse_overlapping_writes", "refuse_writes_to_shared_buffers"]

#: Operators that read a scalar operand before they write.
_FILL_OPS = frozenset({"fill_", "masked_fill_", "index_fill_"})

#: Operators whose results each read many elements: no operand may coincide with the destination.
_PRODUCT_OPS = frozenset({"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "matmul", "mm", "mv"})


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
    def views(self) -> tuple[MemoryView, MemoryView]:
        """Destination, and the operand broadcast to its shape where an operator would do so."""
        written, operand = MemoryView.of(self.written), MemoryView.of(self.operand)
        return written, operand.broadcast_to(written.sizes)

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
    source = tuple(MemoryView.of(write.operand).at_capture().sizes)
    return (
        f"{place}: writes to a view of shape {destination} and reads another of shape {source} that shares some of its memory, and the "
        "result in eager PyTorch depends on the order of the loop over elements; read a copy, as in y[:, 1:] += y[:, :-1].clone()"
    )


def refuse_writes_to_shared_buffers(model: nn.Module, program: ExportedProgram, updated: Iterable[str]) -> None:
    """Refuse writes to a buffer that change another tensor that `forward` uses.

    Args:
        model: the model.
        program: its program.
        updated: names of the buffers that `forward` writes.

    Raises:
        UnsupportedError: names the buffers, and the tensors that share their memory.
    """
    problems = []
    used = list(_used_tensors(model, program))
    for path in dict.fromkeys(updated):
        buffer = model.get_buffer(path)
        others = [name for name, value in used if value is not buffer and _shares_memory(value, buffer)]
        if others:
            problems.append(
                f"{path}: `forward` writes this buffer, which shares memory with {', '.join(others)}; in a compiled model the write "
                "changes one of them. Make one of them a copy (.clone()) and write to both, or take views of the buffer in `forward`"
            )
    if problems:
        raise UnsupportedError(problems)


def _used_tensors(model: nn.Module, program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and constants that operators of a program use, by name."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in program.graph.nodes:
        if node.op != "placeholder" or not node.users:
            continue
        path = names.get(node.name)
        constant = signature.inputs_to_lifted_tensor_constants.get(node.name, "")
        value = program.constants.get(constant) if path is None else tensor_attribute(model, path)
        if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass_type(type(value)):
            name = path or constant
            yield name if tensor_attribute(model, name) is not None else "a tensor that is not registered", value


def _shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return storage_id(first) == storage_id(second) and MemoryView.of(first).overlaps(MemoryView.of(second))


def check_written_inputs(written: Iterable[int], inputs: Sequence[Any]) -> None:
    """Check that no input shares memory with one that `forward` writes to: the write goes to a copy of that input alone.

    Args:
        written: positions of the inputs that `forward` writes to.
        inputs: inputs of a call.

    Raises:
        InputError: names two inputs.
    """
    for position, other in product(written, range(len(inputs))):
        first, second = inputs[position], inputs[other]
        if position != other and isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and _shares_memory(first, second):
            raise InputError(
                f"inputs {position} and {other} share memory, and `forward` writes into input {position}: in eager PyTorch the write "
                f"changes both, in a compiled model one; give a copy as input {other} (x.clone())"
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
            if MemoryView.of(destination).at_capture().has_shared_elements:
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
