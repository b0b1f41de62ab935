"""Moves of rows between buffers, in Triton: one or two moves in a launch, each a copy or an addition.

A general concatenation allocates, and copies each operand by a kernel of its own. Here one kernel moves carried and new rows to their
places in a buffer, or adds them. A program moves some columns and channels of one row; a contiguous row counts as one long column. Affixes
as in :mod:`sft.kernels.conv.forward2d_triton`. P columns, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common_triton import pixel_strides
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_move_rows", "move_rows_kernel"]

_CONTIGUOUS = 1024


@triton.jit
def _move_block(p_source, p_target, source_w, target_w, i_w, i_c, m, ADD: tl.constexpr):
    """Copy or add one block of columns and channels."""
    values = tl.load(p_source + i_w * source_w + i_c, mask=m, other=0.0)
    p_target += i_w * target_w + i_c
    if ADD:
        values = (tl.load(p_target, mask=m, other=0.0).to(tl.float32) + values.to(tl.float32)).to(values.dtype)
    tl.store(p_target, values, mask=m)


@triton.jit(do_not_specialize=["rows_a", "rows_b", "columns"])
def move_rows_kernel(
    p_source_a,  # [N, channels, rows_a, columns]
    p_target_a,
    p_source_b,  # [N, channels, rows_b, columns]
    p_target_b,
    rows_a,
    rows_b,
    columns,
    num_channels,
    source_a_n,
    source_a_h,
    source_a_w,
    target_a_n,
    target_a_h,
    target_a_w,
    source_b_n,
    source_b_h,
    source_b_w,
    target_b_n,
    target_b_h,
    target_b_w,
    ADD_A: tl.constexpr,
    ADD_B: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Carry out both moves; a grid with one move has ``rows_b`` 0."""
    # Only the first axis of the grid takes as many programs as a wide row of many channels has blocks.
    num_blocks = tl.cdiv(num_channels, CHANNELS)
    row_blocks = tl.cdiv(columns, PIXELS) * num_blocks
    line, i_b = (tl.program_id(0) // row_blocks).to(tl.int64), tl.program_id(0) % row_blocks
    i_n, i_h = line // (rows_a + rows_b), line % (rows_a + rows_b)
    i_w = (i_b // num_blocks * PIXELS + tl.arange(0, PIXELS)[:, None]).to(tl.int64)  # [P, 1]
    i_c = i_b % num_blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m = (i_w < columns) & (i_c < num_channels)
    if i_h < rows_a:
        o_source, o_target = i_n * source_a_n + i_h * source_a_h, i_n * target_a_n + i_h * target_a_h
        _move_block(p_source_a + o_source, p_target_a + o_target, source_a_w, target_a_w, i_w, i_c, m, ADD_A)
    else:
        i_h -= rows_a
        o_source, o_target = i_n * source_b_n + i_h * source_b_h, i_n * target_b_n + i_h * target_b_h
        _move_block(p_source_b + o_source, p_target_b + o_target, source_b_w, target_b_w, i_w, i_c, m, ADD_B)


def launch_move_rows(moves: list[tuple[Tensor, Tensor, bool]], *, block: tuple[int, int] | None = None) -> None:
    """Carry out one or two moves ``(source, target, add)`` of rows ``[N, C, rows, columns]``, channels-last and not empty.

    Args:
        moves: moves of the same samples, channels, columns and dtype. No move may read or write rows that the other one writes. An
            addition of half precisions is in fp32.
        block: columns and channels of one program, powers of two (default: by the layout).
    """
    num_samples, num_channels, _, columns = moves[0][0].shape
    tensors = [tensor for source, target, _ in moves for tensor in (source, target)]
    if all(tensor.stride(3) == num_channels for tensor in tensors):
        columns, num_channels = 1, columns * num_channels
        block = (1, _CONTIGUOUS) if block is None else (1, block[0] * block[1])
    elif block is None:
        channels = min(64, triton.next_power_of_2(num_channels))
        block = _CONTIGUOUS // channels, channels
    rows = [source.shape[2] for source, _, _ in moves] + [0]
    if len(moves) == 1:
        tensors += tensors
    grid = (num_samples * (rows[0] + rows[1]) * ceil_div(columns, block[0]) * ceil_div(num_channels, block[1]),)
    with torch.cuda.device_of(tensors[0]):
        launch(move_rows_kernel, grid)(
            *tensors,
            rows[0],
            rows[1],
            columns,
            num_channels,
            *(stride for tensor in tensors for stride in pixel_strides(tensor)),
            ADD_A=moves[0][2],
            ADD_B=moves[-1][2],
            PIXELS=block[0],
            CHANNELS=block[1],
            num_warps=4,
            enable_fp_fusion=False,
        )
