"""Launches of kernels, and their replays without Triton's just-in-time path.

A launch by ``kernel[grid](...)`` binds some forty arguments, derives the specialization from them, and looks up the compiled kernel: 20
to 40 microseconds of Python. A call of a program repeats the same launches with other pointers. So the first call with operands of given
shapes, strides and alignment *records* them: the compiled kernel, the grid, all arguments, and for each pointer the operand that it points
into. Later calls *replay* them: they fill the pointers in and call the launchers of the compiled kernels.

A compiled kernel is specialized for its integers, for the types of its pointers, and for the divisibility of both by 16. All are part of
the key of a recording, and so are operands that are the same tensor. A call is not recorded if a launch reads a tensor that is not part of
an operand.

No import of Triton: launches are recorded after their kernels were imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Recording", "launch", "launch_key", "record_launches"]

#: divisibility of pointers that kernels are specialized for
_ALIGNMENT = 16


class _State(threading.local):
    """Launches of the recording in progress, for each thread."""

    launches: list[tuple[Any, tuple[int, ...], list[Any]]] | None = None


_STATE = _State()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel[grid]``, which a recording in progress notes."""
    started: Callable[..., Any] = kernel[grid]
    launches = _STATE.launches
    if launches is None:
        return started

    def note(*arguments: Any, **keywords: Any) -> None:
        compiled = started(*arguments, **keywords)
        names = kernel.arg_names
        launches.append((compiled, grid, [*arguments, *(keywords[name] for name in names[len(arguments) :])]))

    return note


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch with free pointers.

    Attributes:
        run: launcher of the compiled kernel.
        function: handle of the kernel.
        metadata: the compiled kernel's packed metadata.
        grid: three numbers of programs.
        arguments: all arguments of the kernel, with placeholders for pointers.
        pointers: position of an argument, number of the operand, and offset in bytes.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Launches of a call, ready to be replayed."""

    launches: tuple[_Launch, ...]

    def replay(self, pointers: Sequence[int], device: int) -> bool:
        """Launch with operands at these addresses.

        Returns:
            False if nothing was launched: the operands' ``device`` is not the current one, or a profiler has hooks on launches, which a
            replay would not call.
        """
        runtime, driver = _triton_runtime()
        current = driver.get_current_device()
        if (device not in (-1, current)) or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook):
            return False
        stream = driver.get_current_stream(current)
        for each in self.launches:
            arguments = list(each.arguments)
            for position, operand, offset in each.pointers:
                arguments[position] = pointers[operand] + offset
            each.run(*each.grid, stream, each.function, each.metadata, None, None, None, *arguments)
        return True


def _triton_runtime() -> tuple[Any, Any]:
    """Triton's settings of launches, and the active driver. Its modules are loaded: a kernel was launched."""
    return sys.modules["triton.knobs"].runtime, sys.modules["triton.runtime.driver"].driver.active


def launch_key(operands: Sequence[Any]) -> tuple[Hashable, list[int], list[Tensor]]:
    """Key of a recording, addresses of all tensors, and the tensors, in order. Operands may be lists of tuples."""
    key: list[Hashable] = []
    pointers: list[int] = []
    tensors: list[Tensor] = []
    for operand in operands:
        if isinstance(operand, Tensor):
            pointer = operand.data_ptr()
            pointers.append(pointer)
            tensors.append(operand)
            key += (operand.shape, operand.stride(), pointer % _ALIGNMENT, operand.dtype)
        elif isinstance(operand, (list, tuple)):
            inner_key, inner_pointers, inner_tensors = launch_key(operand)
            key.append(inner_key)
            pointers += inner_pointers
            tensors += inner_tensors
        else:
            key.append(operand)
    return tuple(key), pointers, tensors


def record_launches(call: Callable[[], None], tensors: Sequence[Tensor]) -> Recording | None:
    """Run a call and record its launches; None if it has none, or if they cannot be replayed."""
    previous = _STATE.launches
    _STATE.launches = []
    try:
        call()
        recorded = _STATE.launches
    finally:
        _STATE.launches = previous
    launches = [_replayable(compiled, grid, arguments, tensors) for compiled, grid, arguments in recorded]
    complete = [each for each in launches if each is not None]
    return Recording(tuple(complete)) if complete and len(complete) == len(launches) else None


def _replayable(compiled: Any, grid: tuple[int, ...], arguments: list[Any], tensors: Sequence[Tensor]) -> _Launch | None:
    """A launch with free pointers; None under the interpreter, or if a tensor is not part of exactly one operand."""
    if getattr(compiled, "function", None) is None:
        return None
    pointers = []
    for position, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            owner = _operand_of(argument, tensors)
            if owner is None:
                return None
            pointers.append((position, owner, argument.data_ptr() - tensors[owner].data_ptr()))
            arguments[position] = None
    x, y, z, *_ = (*grid, 1, 1)
    return _Launch(compiled.run, compiled.function, compiled.packed_metadata, (x, y, z), tuple(arguments), tuple(pointers))


def _operand_of(argument: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """Number of the operand that a kernel's argument is, or that contains it; None if there is none, or more than one."""
    for number, tensor in enumerate(tensors):
        if tensor is argument:
            return number
    owners = [number for number, tensor in enumerate(tensors) if _lies_within(argument, tensor)]
    return owners[0] if len(owners) == 1 else None


def _lies_within(argument: Tensor, tensor: Tensor) -> bool:
    size = tensor.element_size() * (1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return 0 <= argument.data_ptr() - tensor.data_ptr() < size
