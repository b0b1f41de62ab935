"""A block as a graph of ATen calls, forward and backward in one, traced once whatever number of blocks there are.

The block runs on fake tensors with autograd recording and ``make_fx`` listening: what comes out is what eager PyTorch would call. A second
trace of that graph removes the writes in place, so that every value is written once, by the call that makes it. Buffers are cloned at the
start, and what the clones hold at the end are the buffers' next values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from sft.analysis.frontend.module_state import AttributeChanges, override_attributes, preserve_attributes
from sft.analysis.frontend.trace_context import suppress_output
from sft.common.errors import InputError, UnsupportedError
from sft.common.torch_internals import FakeTensorMode

__all__ = ["BlockTrace", "TensorMeta", "trace_block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """A tensor without its content: its sizes, element type, and whether it wants a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """That of a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """The joint graph of a block.

    Its placeholders are the input, the parameters, the buffers and the gradient of the output; its outputs the output, the buffers' next
    values, and the gradients of the input and of the parameters (None where there is none).
    """

    graph: torch.fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    device: torch.device


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
        x: its input.
        params: its parameters, by name.
        buffers: its buffers, by name.
        device: where it is to run.
        autocast: the type that autocast casts to, if it is on.

    Raises:
        InputError: the block itself refuses such an input.
        UnsupportedError: it cannot be traced, or its output is not like its input.
    """
    _refuse_hooks(block)
    mode = FakeTensorMode()
    with torch.inference_mode(False), mode:
        image, gradient = (torch.empty(x.shape, dtype=x.dtype, device=device) for _ in range(2))
        weights = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in params.items()}
        states = {name: torch.empty(b.shape, dtype=b.dtype, device=device) for name, b in buffers.items()}
        given: list[Any] = [image, [*weights.values()], [*states.values()], gradient]

    def joint(value: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        leaf = value.detach().requires_grad_()
        leaves = {name: w.detach().requires_grad_(params[name].requires_grad) for name, w in zip(params, weights, strict=True)}
        clones = {name: state.clone() for name, state in zip(buffers, states, strict=True)}
        with torch.enable_grad(), _autocast_context(device, autocast):
            out = functional_call(block, {**leaves, **clones}, (leaf,))
        _check_output(out, x, device)
        wanted = [leaf, *(tensor for tensor in leaves.values() if tensor.requires_grad)]
        found = iter(torch.autograd.grad(out, wanted, gradient, allow_unused=True) if out.requires_grad else [None] * len(wanted))
        first = next(found)
        grads = [next(found) if tensor.requires_grad else None for tensor in leaves.values()]
        return [
            out.detach().contiguous(),
            *clones.values(),
            torch.zeros_like(gradient) if first is None else first.contiguous(),
            *grads,
        ]

    off = torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else contextlib.nullcontext()
    try:
        with torch.inference_mode(False), mode, torch.no_grad(), off, suppress_output():
            with preserve_attributes(block) as changes:
                first = make_fx(joint)(*given)
            if changes:
                with preserve_attributes(block), override_attributes(changes):
                    later = make_fx(joint)(*given)
                _refuse_stateful_block(first, later, changes)
            graph = make_fx(functionalize(lambda *values: first(*values), remove="mutations"))(*given)
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
            refused = _eager_error(lambda: functional_call(block, {**weights, **states}, (image,)))
        if refused is not None:
            raise InputError(f"the repeated block refuses an input of {x.dtype} and shape {x.shape}: {refused}") from error
        remedy = "Give it registered parameters and buffers alone, and let it take no decisions on their values"
        if "in-place operation" in str(error):
            remedy = "Its input is that of another block as well: let its first operator not work in place"
        raise UnsupportedError([f"(the repeated block): it cannot be traced: {_first_line(error)}. {remedy}"]) from error
    return BlockTrace(graph=graph, params=tuple(params), buffers=tuple(buffers), device=device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".")


def _eager_error(call: Callable[[], Any]) -> str | None:
    """What eager PyTorch says to the input; ``None`` where it takes it."""
    try:
        call()
    except Exception as error:  # a decision on values, which fake tensors do not have, is of a type of its own
        return _first_line(error) if type(error) in (RuntimeError, ValueError, TypeError, IndexError) else None
    return None


def _refuse_stateful_block(first: torch.fx.GraphModule, later: torch.fx.GraphModule, changes: AttributeChanges) -> None:
    """Refuse a block that sets attributes and computes something else then: which of all blocks is the first one?"""
    if later.code != first.code:
        names = ", ".join(name for _, name in changes)
        raise UnsupportedError([f"(the repeated block): its `forward` sets {names}, and computes something else at the next call"])


def _autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def _check_output(out: Any, x: TensorMeta, device: torch.device) -> None:
    if not isinstance(out, Tensor):
        raise UnsupportedError([f"(the repeated block): it returns a {type(out).__name__}; let it take and return one tensor"])
    if (tuple(out.shape), out.dtype, out.device.type) != (x.shape, x.dtype, device.type):
        raise UnsupportedError(
            [
                f"(the repeated block): it makes {out.dtype} of shape {tuple(out.shape)} of {x.dtype} of shape {x.shape}; "
                "a block that is repeated returns what it takes"
            ]
        )


def _refuse_hooks(block: nn.Module) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [name or "(itself)" for name, module in block.named_modules() if any(getattr(module, kind) for kind in kinds)]
    if hooked:
        raise UnsupportedError([f"{name}: a hook, which a block that is traced once would call once; remove it" for name in hooked])
