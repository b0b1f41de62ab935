"""Constants that the exporter lifted out of a model, and the fake tensors of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.export import ExportedProgram

from sft.analysis.frontend.constants.expressions import tensor_attribute
from sft.analysis.frontend.functionalize import FunctionalProgram
from sft.analysis.frontend.side_effect_checks import storage_key
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import FakeTensor, FakeTensorMode, storage_id

__all__ = ["fake_modes", "lifted_constants", "read_storages"]


def lifted_constants(program: ExportedProgram, model: nn.Module, known: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The program's constants by the target of their node: tensors that `forward` makes, or reads from outside of parameters and buffers.

    Args:
        program: the exported program.
        model: the model.
        known: tensors that the model keeps outside of parameters and buffers; they replace the exporter's aliases of them.

    Raises:
        UnsupportedError: the numbers of a constant are unknown.
    """
    constants = {}
    originals = {storage_key(tensor): tensor for tensor in known}
    for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
        value = program.constants[name]
        if tensor_attribute(model, name) is None and isinstance(value, torch.Tensor):
            # A fake tensor that `forward` made of numbers still has them.
            numbers = value.constant if isinstance(value, FakeTensor) else value
            if numbers is None:
                raise UnsupportedError([f"{type(model).__name__}: `forward` {_unknown_constant_problem(value, program)}"])
            constants[name] = originals.get(storage_key(numbers), numbers)
    return constants


def read_storages(functional: FunctionalProgram) -> frozenset[int]:
    """Identities of the memory of constants that operators, outputs, or `forward` itself read."""
    program = functional.program
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    tensors = [program.constants[target] for name, target in names.items() if name in used]
    tensors += [leaf.tensor for read in functional.reads for leaf in read.expression.leaves if leaf.tensor is not None]
    return frozenset(storage_id(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


def fake_modes(program: ExportedProgram) -> set[FakeTensorMode]:
    """The modes of the program's inputs."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    return {value.fake_mode for value in values if isinstance(value, FakeTensor)}


def _unknown_constant_problem(value: torch.Tensor, program: ExportedProgram) -> str:
    if isinstance(value, FakeTensor) and value.fake_mode not in fake_modes(program):
        return (
            "finds a tensor of an earlier trace in a cache (a global, functools.lru_cache): empty it (cache_clear()), and call the model "
            "once before it is compiled, or make that tensor a buffer"
        )
    return "makes a tensor whose numbers are not known; make it a buffer"
