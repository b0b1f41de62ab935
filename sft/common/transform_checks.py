"""Checks of the context in which a compiled model is called.

Transforms and tracers (``torch.jit.trace``, ``torch.fx``, ``torch.export``, ``torch.func``) cannot see the strips that a compiled model
computes, so a call inside one is refused. Dispatch modes of the caller (memory meters, FLOP counters) are suspended while a plan is made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from sft.common.errors import InputError, UnsupportedError
from sft.common.process_lock import is_locked_by_other_thread
from sft.common.torch_internals import (
    current_dispatch_modes,
    disable_current_modes,
    is_batched_tensor,
    is_dynamo_loaded,
    is_jit_tracing,
    is_under_functorch_transform,
)

__all__ = [
    "autocast_dtype",
    "dynamo_disabled",
    "positional_inputs",
    "refuse_after_failure",
    "refuse_batched_grads",
    "refuse_tracing",
    "refuse_wrapping",
    "without_dispatch_modes",
]

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

_CONSTANTS = (bool, int, float, str)
_TRACING_MESSAGE = "which cannot see a compiled model: its strips are computed outside of what is traced"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Element type of autocast on a device, ``None`` if it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def refuse_tracing(inputs: Sequence[Any]) -> None:
    """Refuse a call that is being traced or transformed.

    Raises:
        UnsupportedError: names the tracer or transform and the alternative.
    """
    tracer = None
    if is_jit_tracing():
        tracer = f"torch.jit.trace, {_TRACING_MESSAGE}; trace the original model"
    elif any(isinstance(value, torch.fx.Proxy) for value in inputs):
        tracer = f"torch.fx, {_TRACING_MESSAGE}; trace the original model"
    elif torch.compiler.is_exporting() and not is_locked_by_other_thread():  # torch says so in all threads
        tracer = f"torch.export or another sft.compile, {_TRACING_MESSAGE}; export or compile the original model, as a whole"
    elif is_under_functorch_transform():
        tracer = (
            "a transform of torch.func (grad, vmap, jvp, ...), which differentiates or batches operators one by one. Use "
            "torch.autograd.grad on net(x) or on torch.func.functional_call(net, parameters, (x,)), and a batch instead of vmap"
        )
    if tracer is not None:
        raise UnsupportedError([f"(the compiled model): called inside {tracer}"])


def refuse_batched_grads(tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradient tensors that batch several gradients (``is_grads_batched=True``, ``vectorize=True``).

    Raises:
        UnsupportedError: a tensor is batched.
    """
    if any(t is not None and is_batched_tensor(t) for t in tensors):
        raise UnsupportedError(
            ["(the compiled model): batched gradients (is_grads_batched, vectorize) have no strips; call backward once for each of them"]
        )


def refuse_after_failure(residuals: Any) -> None:
    """Refuse a second backward pass after one that failed. After one that succeeded, autograd has freed its residuals and raises itself.

    Args:
        residuals: values that the backward pass needs of the forward pass; ``None`` once a failed pass has released them.

    Raises:
        RuntimeError: they are released.
    """
    if residuals is None:
        raise RuntimeError(
            "the backward pass of this call has failed before and took with it what was kept of the forward pass; call the model again"
        )


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Suspend the caller's dispatch modes (memory meters, FLOP counters): planning runs on fake tensors with symbolic sizes.

    Infrastructure modes of torch, such as an enclosing fake-tensor mode, stay active.
    """
    if any(mode.is_infra_mode() for mode in current_dispatch_modes()):
        yield
    else:
        with disable_current_modes():
            yield


def dynamo_disabled(method: CallableT) -> CallableT:
    """Exclude a method, and all that it calls, from ``torch.compile``; the code around it is compiled in pieces."""

    disabled: list[Any] = []

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # torch.compiler.disable imports the compiler, which takes a second: wait until another import has loaded it.
        if not is_dynamo_loaded():
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    vars(wrapper)["_torchdynamo_disable"] = True
    vars(wrapper)["_torchdynamo_disable_msg"] = "a compiled model of sft runs as it is"
    return cast(CallableT, wrapper)


def refuse_wrapping(wrapper: str, remedy: str) -> None:
    """Report that a wrapper cannot take a compiled model.

    Args:
        wrapper: name of the wrapper.
        remedy: clause that names the alternative.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError([f"(the compiled model): {wrapper} cannot take it; {remedy}"])


def positional_inputs(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Inputs of a call in the order of the model's ``forward``; trailing inputs equal to their defaults are dropped.

    Raises:
        InputError: ``forward`` has no such keyword, takes it by name only, or an earlier input is missing.
    """
    if not keywords and not any(value is None or isinstance(value, _CONSTANTS) for value in inputs):
        return tuple(inputs)
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*inputs, **keywords)
    except TypeError as error:
        raise InputError(f"{f'keyword inputs {sorted(keywords)}' if keywords else 'inputs'}: {error}; forward takes {signature}") from error
    for name in list(reversed(bound.arguments)):
        if not _is_default(bound.arguments[name], signature.parameters[name].default):
            break
        del bound.arguments[name]
    if bound.kwargs:
        raise InputError(f"keyword inputs {sorted(bound.kwargs)} have no position in forward{signature} without what comes before them")
    return bound.args


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and isinstance(value, _CONSTANTS) and value == default)
