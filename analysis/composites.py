"""Functions whose inner operators autocast runs in another precision.

The exporter keeps an interpolation or a cross-entropy whole, and finds the type of its result without autocast; which on GPUs knows the
operator inside, and runs it in single precision. All that follows would be captured in another type than eager PyTorch's. So such functions
are given what autocast would make of their input. Which they are PyTorch is asked, on fake tensors of that device. In the same way the
operands of an ``einsum`` are brought together, which is a product of matrices inside.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["autocast_composites", "contracted_letters"]

_COMPOSITE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch._C._nn, name) for name in dir(torch._C._nn) if "upsample" in name or name == "cross_entropy_loss"
}
_EINSUM: Callable[..., Tensor] = torch._VF.einsum  # type: ignore[attr-defined]  # it makes itself an object
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def autocast_composites(device: torch.device) -> Iterator[None]:
    """A context in which the inputs of such functions are cast as autocast would inside of them; nothing where it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    with contextlib.ExitStack() as stack:
        for name, function in _COMPOSITE_FUNCTIONS.items():
            if _runs_in_float32(name, dtype, device):  # asked here: while the exporter runs it keeps these functions whole for us, too
                stack.enter_context(mock.patch.object(torch._C._nn, name, functools.partial(_call_in_float32, function)))
        einsum = functools.partial(_einsum_in_one_dtype, _EINSUM, dtype)
        stack.enter_context(mock.patch.object(torch._VF, "einsum", einsum))
        yield


def _call_in_float32(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function on an input in single precision."""
    return function(input.float() if input.dtype in _HALF_DTYPES else input, *args, **kwargs)


def _einsum_in_one_dtype(
    function: Callable[..., Tensor], half: torch.dtype, equation: str, operands: Sequence[Tensor], **kwargs: Any
) -> Tensor:
    """Call ``einsum`` on operands of one type, where it multiplies two matrices of different ones."""
    given, (shared, alone) = {operand.dtype for operand in operands}, contracted_letters(equation)
    if len(operands) == 2 and len(given) > 1 and given <= {torch.float32, *_HALF_DTYPES} and shared and not alone:
        operands = [operand.to(half) for operand in operands]
    return function(equation, operands, **kwargs)


def contracted_letters(equation: str) -> tuple[set[str], set[str]]:
    """Letters that an ``einsum`` sums over: those of several operands, for which it multiplies matrices, and those of one.

    >>> contracted_letters("nchw, cd -> ndhw"), contracted_letters("nc,nc->nc"), contracted_letters("nc...,c")
    (({'c'}, set()), (set(), set()), ({'c'}, set()))
    """
    before, arrow, after = equation.replace(" ", "").replace("...", "").partition("->")
    operands, letters = before.split(","), set(before) - {","}
    kept = set(after) if arrow else {letter for letter in letters if before.count(letter) == 1}
    shared = {letter for letter in letters if sum(letter in operand for operand in operands) > 1}
    return (letters - kept) & shared, letters - kept - shared


@functools.lru_cache(maxsize=256)
def _runs_in_float32(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast runs a function in single precision although its input is of a half type."""
    sizes = re.findall(r"(\d)d", name)
    num_axes = int(sizes[0]) if sizes else 2
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        value = torch.empty([4] * (2 + num_axes), dtype=dtype, device=device)
        if name == "cross_entropy_loss":
            arguments: tuple[Any, ...] = (torch.empty([4] * (1 + num_axes), dtype=torch.int64, device=device),)
        else:
            arguments = ([5] * num_axes, None) if "nearest" in name else ([5] * num_axes, False, None)
        with torch.autocast(device.type, dtype):
            return _COMPOSITE_FUNCTIONS[name](value, *arguments).dtype == torch.float32
