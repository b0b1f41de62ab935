"""Kernel calls as instructions of a program.

A kernel call is a frozen dataclass with all parameters of a launch except its tensors; its ``run`` method takes the tensors. The bound
method is the function of an instruction. So a program with kernels can be printed, hashed and counted like any other program. A call
allocates no memory: its outputs and workspaces are slots of the program, allocated by instructions before it.

Methods that launch kernels are :func:`replayable`: after the first run with operands of given shapes and strides, Python fills in pointers
and calls the launchers of compiled kernels (:mod:`sft.kernels.launching`).

Two rules hold for every call:

1. On meta tensors it returns at once: a program on meta tensors is a dry run.
2. It reports the floating-point operations of the operators that it replaces. ``torch.utils.flop_counter`` counts at the dispatcher and
   never sees a Triton launch, so the call dispatches the operator ``sft::kernel_flops``, which has no effect but its FLOP formula.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.common.errors import InternalError
from sft.common.torch_internals import has_dispatch_mode
from sft.kernels.geometry import is_channels_last
from sft.kernels.launching import Recording, launch_key, record_launches
from sft.lower.program import DEVICE, Instruction, Program, Slot

__all__ = [
    "KernelCall",
    "allocation",
    "count_flops",
    "kernel_call_of",
    "kernel_instruction",
    "kernel_operators",
    "replayable",
    "to_channels_last",
]

TensorT = TypeVar("TensorT", Tensor, Tensor | None)
_Operands = ParamSpec("_Operands")
#: recordings of a method at most: strips at the borders of an image, and operands of other alignment
_MAX_RECORDINGS = 64

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("kernel_flops(Tensor like, int flops) -> ()")
_LIBRARY.impl("kernel_flops", lambda like, flops: None, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.sft.kernel_flops, get_raw=True)
def _kernel_flops(like: Any, flops: int, *arguments: Any, **keywords: Any) -> int:
    return flops


def count_flops(like: Tensor, flops: int) -> None:
    """Report the floating-point operations of a kernel on the device of ``like`` to active FLOP counters."""
    if flops and has_dispatch_mode():
        torch.ops.sft.kernel_flops.default(like, flops)


class _LaunchCache:
    """Recordings of a call's launches. Not a field: recordings are neither compared, printed, copied nor pickled."""

    __slots__ = ("_recordings",)
    _recordings: dict[Hashable, Recording | None]


def replayable(method: Callable[_Operands, None]) -> Callable[_Operands, None]:
    """A method of a kernel call that records its launches, and replays them for operands like those of an earlier run."""
    name, plain = method.__name__, cast(Any, method)

    @functools.wraps(method)
    def run(self: Any, *operands: Any) -> None:
        if has_dispatch_mode():  # FLOP counters, and tensors without memory
            plain(self, *operands)
            return
        try:
            recordings = self._recordings
        except AttributeError:
            recordings = {}
            object.__setattr__(self, "_recordings", recordings)
        key, pointers, tensors = launch_key(operands)
        device = tensors[0].get_device()
        aliases = None if len(set(pointers)) == len(pointers) else tuple(map(pointers.index, pointers))
        full_key = (name, key, device, aliases)
        if full_key not in recordings:
            if len(recordings) >= _MAX_RECORDINGS or tensors[0].device.type == "meta":
                plain(self, *operands)
                return
            recordings[full_key] = record_launches(lambda: plain(self, *operands), tensors)
            return
        recording = recordings[full_key]
        if recording is None or not recording.replay(pointers, device):
            plain(self, *operands)

    return cast(Callable[_Operands, None], run)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall(_LaunchCache):
    """Launch of one or a few kernels.

    Attributes:
        flops: floating-point operations of the operators that it replaces.
    """

    flops: int = 0

    @property
    def uploads(self) -> bool:
        """True if each run copies a table from the host."""
        return False

    def begin_launch(self, like: Tensor) -> bool:
        """Report the FLOPs; return false on the meta device, where no kernel runs.

        Args:
            like: the first tensor that the launch writes.

        Raises:
            InternalError: ``like`` is an image that is not channels-last, as kernels require.
        """
        count_flops(like, self.flops)
        if like.device.type == "meta":
            return False
        if like.dim() in CHANNELS_LAST and not is_channels_last(like):
            raise InternalError(f"{type(self).__name__}: a result of strides {like.stride()} is not channels-last; use backend='aten'")
        return True


def to_channels_last(tensor: TensorT) -> TensorT:
    """The tensor itself if it is channels-last, or ``None``; a copy otherwise. Programs lay their images out; this is for other tensors."""
    return tensor if tensor is None or is_channels_last(tensor) else tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


def kernel_call_of(function: Callable[..., Any]) -> KernelCall | None:
    """The kernel call that an instruction's function is a method of; None for any other function."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, KernelCall) else None


def kernel_operators(programs: Iterable[Program]) -> tuple[str, ...]:
    """Operators of the graph that programs run by kernels, sorted. A fused group counts under the name of its first operator."""
    return tuple(sorted({i.owner for program in programs for i in program.instructions if kernel_call_of(i.function) is not None}))


def kernel_instruction(
    function: Callable[..., Any], *arguments: Any, writes: tuple[Slot, ...], owner: str, scratch_bytes: int = 0
) -> Instruction:
    """An instruction that runs a method of a kernel call and writes into slots. Only ``run`` counts the call's FLOPs."""
    call = kernel_call_of(function)
    flops = call.flops if call is not None and getattr(function, "__name__", "") == "run" else 0
    return Instruction(function, arguments, {}, (), writes, flops, 0, scratch_bytes, owner)


def allocation(slot: Slot, owner: str) -> Instruction:
    """An instruction that allocates uninitialised memory for a slot, channels-last if the slot is an image."""
    layout = CHANNELS_LAST.get(len(slot.shape), torch.contiguous_format)
    keywords = {"dtype": slot.dtype, "device": DEVICE, "memory_format": layout}
    return Instruction(torch.empty, (slot.shape,), keywords, (slot,), (), 0, slot.num_bytes, 0, owner)
