"""What a kernel call in a program is.

A call is data: a frozen value that says all that a launch must know besides its tensors, with a method that takes these. Its bound method
is the function of an instruction, so a program with kernels prints, has a signature, and is counted like any other. A call allocates
nothing: outputs and workspaces are slots of the program, made by instructions in front of it.

Two more rules hold for every call. On meta tensors it does nothing, since a program on meta tensors is a dry run. And its floating-point
operations are those of what it replaces: an operator without any effect, ``sft::kernel_flops``, tells them to whoever counts at the
dispatcher (``torch.utils.flop_counter``), which never sees a Triton launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.common.errors import InternalError
from sft.common.torch_internals import has_dispatch_mode
from sft.kernels.geometry import is_channels_last
from sft.lower.program import DEVICE, Instruction, Program, Slot

__all__ = [
    "KernelCall",
    "allocation",
    "count_flops",
    "kernel_call_of",
    "kernel_instruction",
    "kernel_operators",
    "to_channels_last",
    "zeroed_workspace",
]

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("kernel_flops(Tensor like, int flops) -> ()")
_LIBRARY.impl("kernel_flops", lambda like, flops: None, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.sft.kernel_flops, get_raw=True)
def _kernel_flops(like: Any, flops: int, *arguments: Any, **keywords: Any) -> int:
    return flops


def count_flops(like: Tensor, flops: int) -> None:
    """Tell whoever counts that a kernel on the device of ``like`` does so many operations."""
    if flops and has_dispatch_mode():
        torch.ops.sft.kernel_flops.default(like, flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A launch of one kernel or a few.

    Attributes:
        flops: floating-point operations that it stands for.
    """

    #: whether it copies something from the host each time
    uploads: ClassVar[bool] = False
    flops: int = 0

    def begins(self, like: Tensor) -> bool:
        """Say the operations, and whether there is anything to do: not on the meta device.

        Args:
            like: what is written first. Kernels take its channels for neighbours, so an image that is laid out otherwise would be garbage.
        """
        count_flops(like, self.flops)
        if like.device.type == "meta":
            return False
        if like.dim() in CHANNELS_LAST and not is_channels_last(like):
            raise InternalError(f"{type(self).__name__}: a result of strides {like.stride()} is not channels-last; use backend='aten'")
        return True


def to_channels_last(tensor: Tensor) -> Tensor:
    """The tensor channels-last, as kernels take it. Programs lay it out so; this is for a tensor that came otherwise all the same."""
    return tensor if is_channels_last(tensor) else tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


def kernel_call_of(function: Callable[..., Any]) -> KernelCall | None:
    """The call whose method is an instruction's function; None for anything else."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, KernelCall) else None


def kernel_operators(programs: Iterable[Program]) -> tuple[str, ...]:
    """Operators of the graph that programs run by kernels, sorted; what is fused into one counts under its name."""
    return tuple(sorted({i.owner for program in programs for i in program.instructions if kernel_call_of(i.function) is not None}))


def kernel_instruction(
    function: Callable[..., Any], *arguments: Any, writes: tuple[Slot, ...], owner: str, scratch_bytes: int = 0
) -> Instruction:
    """A call as an instruction that writes into slots. Its operations are those of ``run``; other methods only hand results on."""
    call = kernel_call_of(function)
    flops = call.flops if call is not None and getattr(function, "__name__", "") == "run" else 0
    return Instruction(function, arguments, {}, (), writes, flops, 0, scratch_bytes, owner)


def allocation(slot: Slot, owner: str) -> Instruction:
    """Memory for a slot, uninitialised; channels-last where it is an image."""
    layout = CHANNELS_LAST.get(len(slot.shape), torch.contiguous_format)
    keywords = {"dtype": slot.dtype, "device": DEVICE, "memory_format": layout}
    return Instruction(torch.empty, (slot.shape,), keywords, (slot,), (), 0, slot.num_bytes, 0, owner)


def zeroed_workspace(slot: Slot, owner: str) -> tuple[Instruction, Instruction]:
    """Memory for a slot of one dimension, and zeros in it."""
    zero = torch.ops.aten.zero_.default
    return allocation(slot, owner), Instruction(zero, (slot,), {}, (), (slot,), 0, 0, 0, owner)
