"""Sums of slots, in Triton: one or two arrays of slots in a launch, each summed in one fixed order.

The kernels of gradients and norms leave a partial sum for each split of the pixels. A launch adds these and writes the total, or adds it to
an accumulator, in the layout and the type of the destination. Affixes as in :mod:`sft.kernels.conv.forward2d_triton`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.common.errors import InternalError
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_reduce", "reduce_kernel"]

_BLOCK = 256
#: splits that are loaded at a time
_SPLITS = 8


@triton.jit
def _add_slots(p_slots, p_out, i, o_out, size, num_splits, ADD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the slots of the elements ``i``, some splits at a time: their loads are in flight together."""
    mask = i < size
    acc = tl.zeros((BLOCK,), p_slots.dtype.element_ty)
    own = tl.arange(0, SPLITS)[:, None]
    for first in range(0, num_splits, SPLITS):
        o_slot = i[None, :] + (first + own).to(tl.int64) * size
        acc += tl.sum(tl.load(p_slots + o_slot, mask=mask[None, :] & (first + own < num_splits), other=0.0), axis=0)
    p_out += o_out
    if ADD:
        acc += tl.load(p_out, mask=mask, other=0.0).to(acc.dtype)
    if p_out.dtype.element_ty == tl.bfloat16:
        acc = acc.to(tl.float32)  # PTX has no conversion from float64, and the interpreter one of bit patterns
    tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    p_slots,  # [splits, outputs, taps, inner], contiguous
    p_out,  # [outputs, inner, taps]
    p_vector_slots,  # [splits, vector_size], contiguous
    p_vector_out,  # [vector_size]
    num_splits,
    size,  # outputs * taps * inner
    num_taps,
    num_inner,
    out_o,
    out_t,
    out_i,
    vector_size,
    vector_out_i,
    ADD: tl.constexpr,  # add to the destinations
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum both arrays of slots; a grid with one array has no programs for the vector."""
    num_blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    if program < num_blocks:
        i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = i // num_inner
        o_out = row // num_taps * out_o + row % num_taps * out_t + i % num_inner * out_i
        _add_slots(p_slots, p_out, i, o_out, size, num_splits, ADD, SPLITS, BLOCK)
    else:
        i = (program - num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _add_slots(p_vector_slots, p_vector_out, i, i * vector_out_i, vector_size, num_splits, ADD, SPLITS, BLOCK)


def launch_reduce(
    slots: Tensor, out: Tensor, vector_slots: Tensor | None = None, vector_out: Tensor | None = None, *, add: bool = False
) -> None:
    """Write the sums of slots over their first axis, or add them to the destinations.

    Args:
        slots: contiguous ``[splits, outputs, *kernel, inputs]``, or ``[splits, ...]`` for a vector.
        out: ``[outputs, inputs, *kernel]``, contiguous or channels-last, or a dense vector of the other elements; may be the first slot
            of a vector.
        vector_slots, vector_out: a second sum, of a vector.
        add: true to add to ``out`` and ``vector_out``.
    """
    if out.dim() > 2 and slots.dim() == out.dim() + 1:
        num_taps, num_inner = math.prod(out.shape[2:]), out.shape[1]
        strides = (out.stride(0), _tap_stride(out), out.stride(1))
    else:
        num_taps, num_inner, strides = 1, out.numel(), (0, 0, _vector_stride(out))
    size = out.numel()
    vector_size = 0 if vector_out is None else vector_out.numel()
    grid = (ceil_div(size, _BLOCK) + ceil_div(vector_size, _BLOCK),)
    with torch.cuda.device_of(slots):
        launch(reduce_kernel, grid)(
            slots,
            out,
            slots if vector_slots is None else vector_slots,
            out if vector_out is None else vector_out,
            slots.shape[0],
            size,
            num_taps,
            num_inner,
            *strides,
            vector_size,
            1 if vector_out is None else _vector_stride(vector_out),
            ADD=add,
            SPLITS=_SPLITS,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _tap_stride(out: Tensor) -> int:
    """Stride of the taps of a weight, numbered row by row."""
    taps = [(length, stride) for length, stride in zip(out.shape[2:], out.stride()[2:], strict=True) if length > 1]
    _check_dense(all(stride == inner_length * inner for (_, stride), (inner_length, inner) in pairwise(taps)), out)
    return taps[-1][1] if taps else 0


def _vector_stride(out: Tensor) -> int:
    """Stride of the elements of a vector, or of a dense tensor in their order."""
    if out.dim() == 1:
        return out.stride(0)
    _check_dense(out.is_contiguous(), out)
    return 1


def _check_dense(is_dense: bool, out: Tensor) -> None:
    if not is_dense:
        shape, strides = list(out.shape), list(out.stride())
        raise InternalError(f"sums into a tensor of shape {shape} with strides {strides}, which are not dense; use backend='aten'")
