"""Joint trace of a block: forward and backward as flat lists of ATen calls, traced once for all blocks.

The block runs on fake tensors with autograd enabled while a dispatch recorder (`op_recorder`) lists the calls, which are those of eager
PyTorch. The list is then replayed under ``torch.func.functionalize``, which removes writes in place, and recorded again. So every value is
written once, by the call that creates it. Buffers are cloned at the start; the clones' values at the end are the buffers' next values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize

from sft.analysis.frontend.diagnostics.model_errors import is_own_error, raised_error
from sft.analysis.frontend.module_state import AttributeChanges, override_attributes, preserve_attributes
from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.frontend.trace_context import suppress_output
from sft.common.errors import UnsupportedError, input_error_of, typed
from sft.common.torch_internals import FakeTensorMode
from sft.lower.joint_traces import JointTrace, TraceBuilder
from sft.lower.op_recorder import OpRecording, record_calls

__all__ = ["BlockTrace", "TensorMeta", "trace_block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """A tensor without its content: shape, element type, and True if it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The metadata of a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """The joint trace of a block.

    Attributes:
        calls: the calls. Its inputs are the block's input, parameters and buffers, its result is the block's output; its ``gradients`` are
            the buffers' next values, then the gradients of the input and of the parameters (None if a parameter has none).
        x: the input.
        params: the parameters, by name.
        buffers: the buffers, by name.
        device: device of all tensors.
    """

    calls: JointTrace
    x: TensorMeta
    params: Mapping[str, TensorMeta]
    buffers: Mapping[str, TensorMeta]
    device: torch.device

    @property
    def next_values(self) -> tuple[int, ...]:
        """Indices of the buffers' next values."""
        return tuple(index for index in self.calls.gradients[: len(self.buffers)] if index is not None)

    @property
    def grads(self) -> tuple[int | None, ...]:
        """Indices of the gradients of the input and of the parameters."""
        return self.calls.gradients[len(self.buffers) :]


@dataclass(frozen=True, slots=True)
class _JointFunction:
    """Forward and backward of a block as one function of its input, parameters, buffers and the gradient of its output.

    The results are the output, the buffers' next values, and the gradients of the input and of the parameters.
    """

    block: nn.Module
    x: TensorMeta
    params: Mapping[str, TensorMeta]
    buffers: Mapping[str, TensorMeta]
    device: torch.device
    autocast: torch.dtype | None

    def __call__(self, image: Tensor, *tensors: Tensor) -> list[Tensor | None]:
        leaf = image.detach().requires_grad_()
        leaves = {name: w.detach().requires_grad_(self.params[name].requires_grad) for name, w in zip(self.params, tensors, strict=False)}
        clones = {name: state.clone() for name, state in zip(self.buffers, tensors[len(self.params) : -1], strict=True)}
        with torch.enable_grad(), _autocast_context(self.device, self.autocast):
            out = functional_call(self.block, {**leaves, **clones}, (leaf,))
        _check_output(out, self.x, self.device)
        differentiated = [leaf, *(tensor for tensor in leaves.values() if tensor.requires_grad)]
        grads: Sequence[Tensor | None] = [None] * len(differentiated)
        if out.requires_grad:
            grads = torch.autograd.grad(out, differentiated, tensors[-1], allow_unused=True)
        image_grad, *weight_grads = grads
        of_weights = iter(weight_grads)
        return [
            out.detach().contiguous(),
            *clones.values(),
            torch.zeros_like(tensors[-1]) if image_grad is None else image_grad.contiguous(),
            *(next(of_weights) if tensor.requires_grad else None for tensor in leaves.values()),
        ]


def trace_block(
    block: nn.Module,
    x: TensorMeta,
    params: Mapping[str, TensorMeta],
    buffers: Mapping[str, TensorMeta],
    *,
    device: torch.device,
    autocast: torch.dtype | None,
) -> BlockTrace:
    """Trace a block.

    Args:
        block: the module; its own parameters and buffers are not used.
        x: the input.
        params: the parameters, by name.
        buffers: the buffers, by name.
        device: device of the block.
        autocast: element type of autocast, if it is enabled.

    Raises:
        InputError: the block itself refuses such an input.
        UnsupportedError: the block cannot be traced, or its output differs from its input in shape or type.
    """
    _refuse_hooks(block)
    mode = FakeTensorMode()
    with torch.inference_mode(False), mode:
        image, gradient = (torch.empty(x.shape, dtype=x.dtype, device=device) for _ in range(2))
        weights = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in params.items()}
        states = {name: torch.empty(b.shape, dtype=b.dtype, device=device) for name, b in buffers.items()}
    inputs = (image, *weights.values(), *states.values(), gradient)

    joint = _JointFunction(block, x, params, buffers, device, autocast)
    off = torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else contextlib.nullcontext()
    try:
        with torch.inference_mode(False), mode, torch.no_grad(), off, apply_patches("onednn"), suppress_output():
            with preserve_attributes(block) as changes:
                recording = _record(joint, inputs)
            if changes:
                with preserve_attributes(block), override_attributes(changes):
                    second = _record(joint, inputs)
                _refuse_stateful_block(recording, second, changes)
            functional = _record(functionalize(_Replay(recording), remove="mutations"), inputs)
    except UnsupportedError:
        raise
    except Exception as error:
        with (
            torch.inference_mode(False),
            mode,
            torch.no_grad(),
            _autocast_context(device, autocast),
            preserve_attributes(block),
            suppress_output(),
        ):
            refusal = raised_error(lambda: functional_call(block, {**weights, **states}, (image,)))
        if refusal is not None and is_own_error(refusal):
            raise refusal from None
        raise _trace_error(error, refusal, x) from error
    calls = TraceBuilder(functional, keeps_layouts=True).trace()
    return BlockTrace(calls=calls, x=x, params=dict(params), buffers=dict(buffers), device=device)


def _record(function: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> OpRecording:
    """Record a joint function: its last input is the gradient, its first result the output."""
    with record_calls() as calls:
        output, *gradients = function(*inputs)
    assert output is not None
    return OpRecording(tuple(inputs[:-1]), inputs[-1], tuple(calls), output, tuple(gradients))


def _trace_error(error: Exception, refusal: Exception | None, x: TensorMeta) -> Exception:
    """The error of a block that cannot be traced.

    Args:
        error: the error of the trace.
        refusal: the error of a plain forward pass, if that fails, too.
        x: the input.
    """
    if refusal is not None:
        message = f"the repeated block refuses an input of {x.dtype} and shape {x.shape}: {_first_line(refusal)}"
        return input_error_of(type(refusal), message)
    remedy = "Give it registered parameters and buffers alone, and let it take no decisions on their values"
    if "in-place operation" in str(error):
        remedy = "Its input is that of another block as well: let its first operator not work in place"
    return UnsupportedError([f"(the repeated block): it cannot be traced: {_first_line(error)}. {remedy}"])


class _Replay:
    """Runs the calls of a recording on other tensors."""

    def __init__(self, recording: OpRecording) -> None:
        self._recording = recording
        self._tensors: dict[int, Tensor] = {}

    def __call__(self, *inputs: Tensor) -> list[Tensor | None]:
        recording = self._recording
        self._tensors = dict(zip(map(id, (*recording.inputs, recording.grad)), inputs, strict=True))
        for call in recording.calls:
            returned = call.function(*map(self._replaced, call.arguments), **{name: self._replaced(v) for name, v in call.keywords.items()})
            results = returned if isinstance(returned, (list, tuple)) else [returned]
            for old, new in zip(call.results, results, strict=True) if call.results else ():
                if old is not None:
                    self._tensors[id(old)] = new
        return [None if tensor is None else self._tensors[id(tensor)] for tensor in (recording.output, *recording.gradients)]

    def _replaced(self, value: Any) -> Any:
        """An argument with recorded tensors replaced by those of this run; constants stay."""
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        return type(value)(map(self._replaced, value)) if isinstance(value, (list, tuple)) else value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".")


def _refuse_stateful_block(first: OpRecording, second: OpRecording, changes: AttributeChanges) -> None:
    """Refuse a block that sets attributes and then computes differently: its copies would not be equal."""
    traces = [TraceBuilder(recording, keeps_layouts=True).trace() for recording in (first, second)]
    if repr(traces[0]) != repr(traces[1]):
        names = ", ".join(name for _, name in changes)
        raise UnsupportedError([f"(the repeated block): its `forward` sets {names}, so the next call computes other values"])


def _autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def _check_output(out: Any, x: TensorMeta, device: torch.device) -> None:
    if not isinstance(out, Tensor):
        raise UnsupportedError([f"(the repeated block): it returns {typed(out)}; let it take and return one tensor"])
    if (tuple(out.shape), out.dtype, out.device.type) != (x.shape, x.dtype, device.type):
        raise UnsupportedError(
            [
                f"(the repeated block): it makes {out.dtype} of shape {tuple(out.shape)} of {x.dtype} of shape {x.shape}; "
                "a repeated block must return the shape and dtype of its input"
            ]
        )


def _refuse_hooks(block: nn.Module) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [name or "(itself)" for name, module in block.named_modules() if any(getattr(module, kind) for kind in kinds)]
    if hooked:
        raise UnsupportedError([f"{name}: a hook, which a block that is traced once would call once; remove it" for name in hooked])
