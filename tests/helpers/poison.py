"""Poisoned allocations: an element that nobody writes can not look right by luck.

An uninitialised buffer usually holds zeros or the right values of an earlier run, so a kernel that forgets a row passes
its tests. Inside :func:`poisoned` every buffer that is asked for without a value is filled first: NaN in floating and
complex buffers, the largest value in integer ones, True in boolean ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["poisoned"]

_aten = torch.ops.aten

_UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""The overloads that hand out a buffer without a value."""

_ENTRY_POINTS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""The Python names of the same, patched as well: code may call them where dispatch modes are switched off."""


def _is_tracing() -> bool:
    """Whether a mode other than ours is active: a fill would then end up in somebody's traced program."""
    return any(not isinstance(mode, _PoisonMode) for mode in _get_current_dispatch_mode_stack())


def _poison(buffer: Tensor) -> None:
    if type(buffer) is not Tensor or buffer.device.type == "meta" or buffer.layout != torch.strided:
        return
    with torch.no_grad():
        if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
            buffer.fill_(float("nan"))
        elif buffer.dtype == torch.bool:
            buffer.fill_(True)
        else:
            buffer.fill_(torch.iinfo(buffer.dtype).max)


class _PoisonMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED:  # a mode above ours (a tracer) has taken the call away before it comes here
            _poison(out)
        return out


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        buffer = allocate(*args, **kwargs)
        if not _is_tracing():
            _poison(buffer)
        return buffer

    return allocate_poisoned


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every buffer allocated without a value, until the block ends.

    >>> with poisoned():
    ...     torch.empty(2), torch.empty(1, dtype=torch.int8)
    (tensor([nan, nan]), tensor([127], dtype=torch.int8))
    """
    with ExitStack() as stack:
        for owner, name in _ENTRY_POINTS:
            stack.enter_context(patch.object(owner, name, _poisoning(getattr(owner, name))))
        stack.enter_context(_PoisonMode())  # type: ignore[no-untyped-call]
        yield
