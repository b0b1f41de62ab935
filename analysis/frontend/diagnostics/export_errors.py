"""Refusals of models that the exporter cannot follow: the reason in terms of the model, its line, and a remedy."""

from __future__ import annotations

import functools
import itertools
import os
import re
import traceback
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.export import ExportedProgram

from sft.analysis.frontend.constants.expressions import tensor_attribute
from sft.analysis.frontend.constants.tracking import ConstantRead, UnknownRead
from sft.analysis.frontend.graph_builder import module_path_of
from sft.analysis.frontend.source_location import called_function, error_line, error_location, is_distributions_error
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import REGISTER_PYTREE_NODE, storage_id

__all__ = [
    "MIXED_DTYPES",
    "refusal_of",
    "refuse_reads_of_updated_buffers",
    "refuse_tensor_to_number",
    "refuse_writes_to_empty_buffers",
]

aten = torch.ops.aten

MIXED_DTYPES = "operands of two types meet there, as autocast allows in eager PyTorch; cast one of them with .to()"
#: Remedies by words of the exporter's errors.
_REMEDIES = {
    "tensor subclasses": "numbers leave torch there; compute with tensors, or outside of the compiled model",
    "DataDependentOutput": "this operator looks at values to decide what to do; compute it outside of the compiled model",
    "DynamicOutputShape": "the size of what this operator makes depends on values; compute it outside of the compiled model",
    "expected scalar type": MIXED_DTYPES,
    "Creating a new Tensor subclass": "a compiled model computes with plain tensors; make the subclass of what it returns",
    "Couldn't swap": "`forward` casts or moves a module; do so before it is compiled",
    "pickle": "`forward` copies or stores a tensor as bytes; do so outside of the compiled model",
    "_share_f": "`forward` shares the memory of a tensor between processes; share what the compiled model returns",
    "data pointer": "`forward` copies a tensor, or gives its address away; do so outside of the compiled model",
}
_DISTRIBUTIONS_REMEDY = "distributions look at their values to check them; make them with validate_args=False"
_BRANCH_REMEDY = "control flow that depends on tensor values must move out of `forward`"
_READ_REMEDY = "a compiled model has no numbers of its inputs; use the tensor itself, or read it outside of the compiled model"
_OTHER_REMEDY = "write this line with plain operators on tensors, or compute it outside of the compiled model"
_DICE_REMEDY = "sft.nn.DiceLoss is a Dice loss that compiles, and runs in strips"

#: The exporter's error about an output of an unregistered class.
_UNREGISTERED_OUTPUT = re.compile(r"Found <class '(.*?)'> in output")


def refusal_of(model: nn.Module, error: Exception, unknown_reads: Sequence[UnknownRead]) -> UnsupportedError:
    """The exporter's error as a refusal with a remedy.

    Args:
        model: the model.
        error: the exporter's error.
        unknown_reads: reads of values that depend on inputs, in the order of the trace.
    """
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if match := _UNREGISTERED_OUTPUT.search(first_line):
        return UnsupportedError(
            [
                f"(the model itself): returns a {match[1]}, and torch.export does not know what is inside; register the class with "
                f"torch.export.register_dataclass or {REGISTER_PYTREE_NODE}, or return a tuple or a dict"
            ]
        )
    message = f"{type(error).__name__}: {first_line.partition(' (unhinted:')[0]}"
    line = error_line(error)
    location = error_location(error)
    place = f"the model at {location}" if location else "the model"
    code = f". The line is `{line.text}`" if line is not None and line.text else ""
    remedy = _remedy(error, message, unknown_reads)
    if _is_in_dice_loss(error):
        remedy = f"{remedy}; {_DICE_REMEDY}"
    return UnsupportedError([f"{type(model).__name__}: torch.export cannot follow {place} ({message}); {remedy}{code}"])


def _remedy(error: Exception, message: str, unknown_reads: Sequence[UnknownRead]) -> str:
    for word, remedy in _REMEDIES.items():
        if word in message:
            return remedy
    if is_distributions_error(error):
        return _DISTRIBUTIONS_REMEDY
    line = error_line(error)
    reads = [read for read in unknown_reads if read.line == line]
    if any(read.is_branch for read in reads) or called_function(error) == "__bool__":
        return _BRANCH_REMEDY
    if reads or "data-dependent" in message:
        functions = ", ".join(dict.fromkeys(read.function for read in reads))
        return f"{functions + ' reads' if functions else 'it needs'} a number of a tensor that depends on the inputs: {_READ_REMEDY}"
    return _OTHER_REMEDY


def _is_in_dice_loss(error: Exception) -> bool:
    """Return true where the error comes out of a Dice loss, by the names of files, functions and classes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(frame.f_locals.get("self")).__name__ for frame in frames]
    names += [name for frame in frames for name in (frame.f_code.co_name, os.path.basename(frame.f_code.co_filename))]
    return any("dice" in name.lower() for name in names)


#: Number of lines that a message names.
_MAX_LINES = 3

#: Operators that turn a tensor into a Python number.
_TO_NUMBER_OPS = (aten.item.default, aten._local_scalar_dense.default)


def refuse_tensor_to_number(exported: ExportedProgram, unknown_reads: Sequence[UnknownRead]) -> None:
    """Refuse computation with Python numbers read from tensors (``item()``): they differ between calls, and a graph has no node for them.

    Raises:
        UnsupportedError: an operator or an output uses such a number.
    """
    numbers: dict[torch.fx.Node, str] = {}
    problems: dict[str, None] = {}
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        paths = [numbers[operand] for operand in node.all_input_nodes if operand in numbers]
        if node.target in _TO_NUMBER_OPS:
            numbers[node] = module_path_of(node) or "(the model itself)"
        elif paths and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            numbers[node] = paths[0]
        elif paths and (value is not None or node.op == "output"):
            problems |= {f"{path}: item: it computes with a Python number read from a tensor": None for path in paths}
    if problems:
        lines = dict.fromkeys(str(read.line) for read in unknown_reads if read.line is not None)
        place = f". Read at {'; '.join(itertools.islice(lines, _MAX_LINES))}" if lines else ""
        raise UnsupportedError([f"{problem}; use the tensor itself, of one element, or a plain attribute{place}" for problem in problems])


def refuse_writes_to_empty_buffers(model: nn.Module, updated: Iterable[str]) -> None:
    """Refuse writes to buffers without elements: the first call gives them a size, and the next ones compute other values.

    Args:
        model: the model.
        updated: names of the buffers that `forward` writes.

    Raises:
        UnsupportedError: names the buffers.
    """
    empty = [path for path in dict.fromkeys(updated) if model.get_buffer(path).numel() == 0]
    if empty:
        raise UnsupportedError(
            [
                f"{path}: `forward` writes this buffer, which has no elements yet; call the model once before it is compiled, which gives "
                "it a size"
                for path in empty
            ]
        )


def refuse_reads_of_updated_buffers(model: nn.Module, reads: Iterable[ConstantRead], updated: Iterable[str]) -> None:
    """Refuse Python numbers read from buffers that ``forward`` writes: they differ between calls.

    Args:
        model: the model.
        reads: reads of constants.
        updated: names of the buffers that `forward` writes.

    Raises:
        UnsupportedError: a value that was read depends on such a buffer.
    """
    storages = {storage_id(model.get_buffer(path)): path for path in updated}
    problems: dict[str, None] = {}
    for read in reads:
        for leaf in read.expression.leaves:
            tensor = leaf.locate(functools.partial(tensor_attribute, model))
            if tensor is not None and storage_id(tensor) in storages:
                place = f" at {read.line}" if read.line else ""
                problem = (
                    f"{storages[storage_id(tensor)]}: item: it computes with a Python number read from a tensor; use the tensor itself. "
                    f"`forward` reads this buffer{place}, and writes it, so the number differs between calls"
                )
                problems[problem] = None
    if problems:
        raise UnsupportedError(list(problems))
