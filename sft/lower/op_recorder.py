"""Dispatch recorder: the list of ATen calls of a function and of its derivative.

A :class:`TorchDispatchMode` sees every call below autograd, those of the derivative included. The function runs on fake tensors, so
nothing is computed. ``make_fx`` sees the same calls, but builds a proxy, a name and a line of code for each; recording takes 3 ms for an
operator that takes ``make_fx`` 50 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft.analysis.frontend.torch_patches import apply_patches
from sft.common.errors import InputError
from sft.common.torch_internals import FakeTensorMode, TorchDispatchMode

__all__ = ["ArgumentSpec", "OpRecording", "RecordedOp", "record_calls", "record_ops"]

#: Metadata queries that fake tensors dispatch as calls; not recorded.
_METADATA_OPS = frozenset({torch.ops.prim.device.default})


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """A contiguous tensor without its content.

    Attributes:
        shape: its extents.
        dtype: its element type.
        needs_grad: True if a gradient with respect to it is recorded; ignored for integer and boolean types, which have none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One ATen call with its (fake) tensors.

    Attributes:
        function: the overload.
        arguments: positional arguments.
        keywords: keyword arguments.
        output: a tensor, a list of tensors, or ``None``.
        first_argument_shape: shape of the first argument at the time of the call, ``()`` if that is not a tensor. A later call in place may
            change the tensor's own shape.
        result_shapes: shapes of the results at the time of the call.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any
    first_argument_shape: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]

    @property
    def has_many(self) -> bool:
        """True if the call returns a list of tensors."""
        return isinstance(self.output, (list, tuple))

    @property
    def results(self) -> tuple[torch.Tensor | None, ...]:
        """The results as a tuple, also of a single tensor."""
        return _as_tuple(self.output)


@dataclass(frozen=True, slots=True)
class OpRecording:
    """All calls of a function and of its derivative, in order.

    Attributes:
        inputs: the function's arguments.
        grad: the gradient of its output.
        calls: the calls, forward then backward.
        output: the function's result.
        gradients: the gradient of each input; ``None`` if the input needs none, or the output does not depend on it.
    """

    inputs: tuple[torch.Tensor, ...]
    grad: torch.Tensor
    calls: tuple[RecordedOp, ...]
    output: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]


class _OpRecorder(TorchDispatchMode):
    """Records calls below autograd, where composite operators are already decomposed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        first_shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        try:
            output = func(*args, **keywords)
        except AssertionError as error:  # a check in torch's decomposition that the operator's shape function lacks
            raise InputError(f"{func}: {error}; its operands have shapes {_shapes_of(args)}; give inputs of matching shapes") from error
        if func not in _METADATA_OPS:
            shapes = tuple(() if tensor is None else tuple(tensor.shape) for tensor in _as_tuple(output))
            self.calls.append(RecordedOp(func, tuple(args), keywords, output, first_shape, shapes))
        return output


def _shapes_of(args: Sequence[Any]) -> str:
    return " and ".join(str(tuple(value.shape)) for value in args if isinstance(value, torch.Tensor))


def _as_tuple(output: Any) -> tuple[torch.Tensor | None, ...]:
    """The tensors among the results of a call, in order; ``None`` in the place of numbers."""
    results = output if isinstance(output, (list, tuple)) else () if output is None else (output,)
    return tuple(result if isinstance(result, torch.Tensor) else None for result in results)


@contextlib.contextmanager
def record_calls() -> Iterator[list[RecordedOp]]:
    """Record the calls of the body, autograd's included; dispatch modes that are active already, such as fake tensors, run below."""
    recorder = _OpRecorder()
    with recorder:
        yield recorder.calls


def record_ops(function: Callable[..., torch.Tensor], arguments: Sequence[ArgumentSpec], *, by_shape: bool = False) -> OpRecording:
    """Record the calls of a function and of its derivative.

    Args:
        function: computes one tensor from tensors.
        arguments: its tensors.
        by_shape: True if the function makes the same calls on every device. It then runs on meta tensors, which take a fraction of the
            time of fake CPU tensors.
    """
    with contextlib.nullcontext() if by_shape else _fake_tensors():
        device = "meta" if by_shape else "cpu"
        inputs = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in arguments)
        leaves = []
        for tensor, spec in zip(inputs, arguments, strict=True):
            if spec.needs_grad and (spec.dtype.is_floating_point or spec.dtype.is_complex):
                leaves.append(tensor.requires_grad_())
        recorder = _OpRecorder()
        with recorder, torch.enable_grad():
            output = function(*inputs)
        grad = torch.empty_like(output, requires_grad=False)
        gradients: dict[int, torch.Tensor | None] = {}
        if leaves and output.requires_grad:
            with recorder:
                gradients = dict(zip(map(id, leaves), torch.autograd.grad(output, leaves, grad, allow_unused=True), strict=True))
    return OpRecording(inputs, grad, tuple(recorder.calls), output, tuple(gradients.get(id(tensor)) for tensor in inputs))


def _fake_tensors() -> FakeTensorMode:
    with apply_patches("mode_stacks"):
        return FakeTensorMode(allow_non_fake_inputs=True)
