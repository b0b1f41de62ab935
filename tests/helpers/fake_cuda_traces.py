"""Programs on fake CUDA tensors: a step of a plan without data, in which every result is compared with its slot.

``FakeTensorMode`` gives each operator's shape, type, layout and device as on a GPU, also in a build of torch without CUDA. A few
methods need an operator call in its place there, since they would initialise the device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.backends.convolution_relu import convolution_add_relu, convolution_relu
from sft.common.torch_internals import FakeTensorMode, TorchDispatchMode
from sft.lower.program import Slot
from sft.lower.steps import Step
from sft.runtime.region import Region
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.fake_cuda import DEVICE

__all__ = ["FakeTrace", "trace_step"]

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default, convolution_relu, convolution_add_relu)


def _indexed(tensor: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [each for each in keys if not isinstance(each, Tensor)]:
        position = keys.index(Ellipsis)
        num_missing = tensor.dim() - sum(each is not None and each is not Ellipsis for each in keys)
        keys[position : position + 1] = [slice(None)] * num_missing
    dim = 0
    for each in keys:
        if isinstance(each, int):
            tensor = _aten.select.int(tensor, dim, each)
            continue
        if each is None:
            tensor = _aten.unsqueeze.default(tensor, dim)
        elif isinstance(each, slice):
            if each != slice(None):
                tensor = _aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
        else:
            raise NotImplementedError(f"an index of type {type(each).__name__}")
        dim += 1
    return tensor


def _contiguous(tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    copied: Tensor = _aten.clone.default(tensor, memory_format=memory_format)
    return copied


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    _aten.copy_.default(target, source, non_blocking)
    return target


def _pin(tensor: Any) -> Tensor:
    pinned: Any = _aten.clone.default(tensor)
    pinned.is_page_locked = True
    copied: Tensor = pinned
    return copied


def _as_cudnn(result: Any, operands: Any) -> Any:
    """Results of a convolution in the layout of cuDNN, also in a build without it: channels last if an operand is."""
    images = [each for each in operands if isinstance(each, Tensor) and each.dim() == 4]
    if not any(each.stride(1) == 1 and each.shape[1] > 1 for each in images):
        return result
    if isinstance(result, Tensor):
        return torch.empty_like(result, memory_format=torch.channels_last) if result.dim() == 4 else result
    return tuple(_as_cudnn(each, images) if isinstance(each, Tensor) else each for each in result)


class _Transfers(TorchDispatchMode):
    """Recorder of copies between the devices from memory that is not page-locked, or that make the host wait."""

    def __init__(self, issues: Counter[tuple[Any, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._issues = issues

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten._to_copy.default, _aten.copy_.default):
            source = args[1] if func is _aten.copy_.default else args[0]
            target = args[0].device if func is _aten.copy_.default else kwargs.get("device") or source.device
            if source.device.type != torch.device(target).type and source.dim():  # a number is an argument of the launch
                waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                if waits or not getattr(source, "is_page_locked", False):
                    self._issues["copy between devices", str(func), tuple(source.shape), waits] += 1
        if func in (_aten._local_scalar_dense.default, _aten.nonzero.default):
            self._issues["wait for the device", str(func)] += 1
        result = func(*args, **kwargs)
        return _as_cudnn(result, args) if func in _CONVOLUTIONS else result


@dataclass(slots=True)
class _CheckedMachine(TorchMachine):
    """Machine that compares every result with its slot."""

    issues: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    num_instructions: int = 0

    def _execute(self, step: Step, tensors: dict[int, Any]) -> None:
        TorchMachine._execute(self, step._replace(frees=()), tensors)
        instruction = step.instruction
        self.num_instructions += 1
        name = getattr(instruction.function, "__name__", str(instruction.function))
        for slot in instruction.outputs:
            if slot is not None and isinstance(tensors[slot.number], Tensor):
                self._compare(name, tensors[slot.number], slot)
        for slot in instruction.writes:
            if tensors[slot.number].device.type != "cuda":
                self.issues["device of a write", name] += 1
        for number in instruction.frees:
            tensors.pop(number, None)

    def _compare(self, name: str, tensor: Tensor, slot: Slot) -> None:
        if not tensor.numel():
            return  # absent statistics, with a type that depends on the device
        for aspect, ours, theirs in (
            ("shape", tuple(tensor.shape), slot.shape),
            ("type", tensor.dtype, slot.dtype),
            ("device", tensor.device.type, "cuda"),
        ):
            if ours != theirs:
                self.issues[aspect, name, ours, theirs] += 1
        if slot.root == slot.number and tensor.untyped_storage().nbytes() != slot.num_bytes:
            self.issues["bytes", name, tensor.untyped_storage().nbytes(), slot.num_bytes] += 1
        is_image = tensor.dim() == 4 and min(tensor.shape[1:]) > 1 and slot.root == slot.number
        if is_image and tensor.stride(1) != 1:
            self.issues["layout", name, tuple(tensor.shape), tensor.stride()] += 1


@dataclass(frozen=True, slots=True)
class FakeTrace:
    """Result of a traced step.

    Attributes:
        issues: differences between slots and tensors, waits and pageable copies, with their number.
        num_instructions: executed instructions.
    """

    issues: Counter[tuple[Any, ...]]
    num_instructions: int


@contextlib.contextmanager
def _rerouted() -> Iterator[None]:
    """Context in which methods are operator calls, also inside of decompositions."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.lower.row_gather._can_pin_memory", lambda: True)
        for name, method in {"__getitem__": _indexed, "contiguous": _contiguous, "copy_": _copy, "pin_memory": _pin}.items():
            patches.setattr(torch.Tensor, name, method)
        yield


def trace_step(problem: Any, region: Region) -> FakeTrace:
    """Run a step of a region on fake tensors, forward and backward.

    Args:
        problem: the planning problem.
        region: the plan's region.
    """
    sized = problem.sized
    with _rerouted(), FakeTensorMode(), torch.no_grad():
        machine = _CheckedMachine(DEVICE)
        with _Transfers(machine.issues):
            leaves = {}
            for node in sized.graph.nodes:
                if node.kind != "operator":
                    shape = sized.shapes[node.name]
                    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
                    leaves[node.name] = torch.empty(shape, dtype=sized.dtypes[node.name], device=DEVICE, memory_format=layout)
            outputs, tape = region.forward(machine, leaves, keep=True)
            grads = {
                name: torch.empty(region.output_shape(name), dtype=sized.dtypes[name], device=DEVICE)
                for name in region.outputs
                if name in sized.requires_grad
            }
            del outputs
            region.backward(machine, tape, grads)
    return FakeTrace(machine.issues, machine.num_instructions)
