"""What else may be around a call of a compiled model: transforms and tracers that would not see what it computes, meters and counters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from sft.common.errors import InputError, UnsupportedError
from sft.common.process_lock import is_locked_by_other_thread

__all__ = [
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


def refuse_tracing(inputs: Sequence[Any]) -> None:
    """Whether this is a call at all, and not one that somebody records.

    Raises:
        UnsupportedError: naming who does, and what to use instead.
    """
    found = None
    if torch._C._is_tracing():
        found = f"torch.jit.trace, {_TRACING_MESSAGE}; trace the original model"
    elif any(isinstance(value, torch.fx.Proxy) for value in inputs):
        found = f"torch.fx, {_TRACING_MESSAGE}; trace the original model"
    elif torch.compiler.is_exporting() and not is_locked_by_other_thread():  # torch says so in all threads
        found = f"torch.export or another sft.compile, {_TRACING_MESSAGE}; export or compile the original model, as a whole"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        found = (
            "a transform of torch.func (grad, vmap, jvp, ...), which differentiates or batches operators one by one. Use "
            "torch.autograd.grad on net(x) or on torch.func.functional_call(net, parameters, (x,)), and a batch instead of vmap"
        )
    if found is not None:
        raise UnsupportedError([f"(the compiled model): called inside {found}"])


def refuse_batched_grads(tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients that stand for several at once (``is_grads_batched=True``, ``vectorize=True``).

    Raises:
        UnsupportedError: one of the tensors is such.
    """
    functorch = torch._C._functorch
    if any(t is not None and (functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t)) for t in tensors):
        raise UnsupportedError(
            ["(the compiled model): batched gradients (is_grads_batched, vectorize) have no strips; call backward once for each of them"]
        )


def refuse_after_failure(kept: Any) -> None:
    """Refuse a backward pass after one that failed; after one that succeeded autograd has freed its own and says so itself.

    Args:
        kept: what the backward pass needs of the forward pass, which the failed one took with it; ``None`` then.

    Raises:
        RuntimeError: it is gone.
    """
    if kept is None:
        raise RuntimeError(
            "the backward pass of this call has failed before and took with it what was kept of the forward pass; call the model again"
        )


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Without the caller's dispatch modes (memory meters, counters of FLOPs): planning runs on fake tensors, of sizes that are symbols.

    Modes that stand for torch's own machinery, such as fake tensors around everything, stay.
    """
    if any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):
        yield
    else:
        with _disable_current_modes():
            yield


def dynamo_disabled(method: CallableT) -> CallableT:
    """Make ``torch.compile`` leave a method, and all that it calls, as it is; the code around it is compiled in parts."""

    disabled: list[Any] = []

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # torch.compiler.disable loads the compiler, which takes a second: not before somebody else has loaded it.
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    vars(wrapper)["_torchdynamo_disable"] = True
    vars(wrapper)["_torchdynamo_disable_msg"] = "a compiled model of sft runs as it is"
    return cast(CallableT, wrapper)


def refuse_wrapping(what: str, instead: str) -> None:
    """Say that a wrapper cannot take a compiled model.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError([f"(the compiled model): {what} cannot take it; {instead}"])


def positional_inputs(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call's inputs in the order of the model's ``forward``; the last ones that are its defaults are left out.

    Raises:
        InputError: a keyword that ``forward`` has not, one that it takes by name only, or one after an input that is left out.
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
