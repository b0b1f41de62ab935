"""Checks of the context in which a compiled model is called.

Transforms and tracers (``torch.jit.trace``, ``torch.fx``, ``torch.export``, ``torch.func``) cannot see the strips that a compiled model
computes, so a call inside one is refused. Dispatch modes of the caller (memory meters, FLOP counters) are suspended while a plan is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from sft.common.errors import UnsupportedError
from sft.common.process_lock import is_locked_by_other_thread
from sft.common.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    break_dynamo_graph,
    current_dispatch_modes,
    disable_current_modes,
    is_batched_tensor,
    is_dynamo_loaded,
    is_jit_tracing,
    is_parametrization_cached,
    is_under_functorch_transform,
)

__all__ = [
    "autocast_dtype",
    "break_graph_where_compiled",
    "dynamo_disabled",
    "not_inlined",
    "refuse_batched_grads",
    "refuse_cached_updates",
    "refuse_tracing",
    "refuse_wrapping",
    "without_dispatch_modes",
]

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

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
    elif any(isinstance(value, (FakeTensor, FunctionalTensor)) for value in inputs) or any(
        mode.is_infra_mode() for mode in current_dispatch_modes()
    ):
        tracer = f"make_fx or a mode of fake tensors, {_TRACING_MESSAGE}; trace the original model"
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


def refuse_cached_updates(paths: Iterable[str]) -> None:
    """Refuse updates of parametrizations inside ``torch.nn.utils.parametrize.cached()``: once in a block, and here once in a call.

    Args:
        paths: buffers that a call updates.

    Raises:
        UnsupportedError: a parametrization (a spectral norm in training) updates its buffers, and its result is to be cached.
    """
    updated = sorted({path.rpartition(".")[0] for path in paths if "parametrizations." in path}) if is_parametrization_cached() else []
    if updated:
        raise UnsupportedError(
            [
                f"{path}: updates its buffers in each call of the compiled model, and once in torch.nn.utils.parametrize.cached(); "
                "call the compiled model outside of cached(), or after .eval()"
                for path in updated
            ]
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


#: The reason that torch.compile reports, with ``fullgraph=True`` as an error.
_DYNAMO_REASON = (
    "sft computes a compiled model strip by strip, outside of what torch.compile compiles: leave out fullgraph=True, or compile the "
    "original model with torch.compile alone"
)


def dynamo_disabled(method: CallableT) -> CallableT:
    """Exclude a method, and all that it calls, from ``torch.compile``; the code around it is compiled in pieces."""

    disabled: CallableT | None = None

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled  # no list: torch.compile of PyTorch 2.11 warns about its methods
        break_graph_where_compiled()  # this function itself is compiled
        # torch.compiler.disable imports the compiler, which takes a second: wait until another import has loaded it.
        if not is_dynamo_loaded():
            return method(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(method, reason=_DYNAMO_REASON)
        return disabled(*args, **kwargs)

    return cast(CallableT, not_inlined(wrapper))


def break_graph_where_compiled() -> None:
    """Break the graph of ``torch.compile`` where it traces the calling function."""
    if torch.compiler.is_dynamo_compiling():
        break_dynamo_graph(_DYNAMO_REASON)


def not_inlined(function: CallableT) -> CallableT:
    """Mark a function so that ``torch.compile`` breaks the graph where it is called."""
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = _DYNAMO_REASON
    return function


def refuse_wrapping(wrapper: str, remedy: str) -> None:
    """Report that a wrapper cannot take a compiled model.

    Args:
        wrapper: name of the wrapper.
        remedy: clause that names the alternative.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError([f"(the compiled model): {wrapper} cannot take it; {remedy}"])
