"""Positional dropout and masks of a tile, in Triton: the bits of ``dropout_reference``, with one Philox call for four channels.

Philox is a device function of its own, with the bits of ``philox.philox4x32``. ``tl.rand`` and ``tl.randint4x`` are not used, since their
counters and words may change with Triton, while masks must stay the same.

A program computes some columns of one row, and some channels. Affixes: ``p_`` pointer, ``i_`` index, ``o_`` offsets, ``m_`` mask. P
columns, G groups of four channels, C = 4 G channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.rng import philox
from sft.kernels.rng.mask_tile import CHANNELS_PER_CALL, MaskTile, ceil_div

__all__ = ["dropout_kernel", "keep_kernel", "launch_dropout", "launch_keep_mask", "philox4x32"]

# Triton reads module constants only as constexpr.
_MULTIPLIER_0 = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIERS[1])
_KEY_INCREMENT_0 = tl.constexpr(philox.KEY_INCREMENTS[0])
_KEY_INCREMENT_1 = tl.constexpr(philox.KEY_INCREMENTS[1])
_NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four uint32 blocks of random words for a counter of four uint32 blocks and a key of two, all of one shape."""
    m0 = tl.full(c0.shape, _MULTIPLIER_0, tl.uint32)
    m1 = tl.full(c0.shape, _MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full(k0.shape, _KEY_INCREMENT_0, tl.uint32)
        k1 += tl.full(k1.shape, _KEY_INCREMENT_1, tl.uint32)
    return c0, c1, c2, c3


# Values that change from tile to tile or from step to step, which must not specialize the kernel.
_RUNTIME = ["num_rows", "num_columns", "start", "index_n", "index_g", "index_h", "index_w"]
_RUNTIME += ["site", "draw", "threshold"]


@triton.jit
def _place(num_channels, num_rows, num_columns, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sample, row, first column and first channel of the program, in int64, since they are multiplied by strides."""
    num_channel_blocks = tl.cdiv(num_channels, CHANNELS)
    num_blocks = tl.cdiv(num_columns, COLUMNS)
    pid = tl.program_id(0)
    i_c = (pid % num_channel_blocks).to(tl.int64) * CHANNELS
    i_w = (pid // num_channel_blocks % num_blocks).to(tl.int64) * COLUMNS
    line = pid // num_channel_blocks // num_blocks
    return (line // num_rows).to(tl.int64), (line % num_rows).to(tl.int64), i_w, i_c


@triton.jit
def _words(index, p_seed, site, draw):
    """Four blocks of words [P, G] for a block of int64 indices [P, G]."""
    seed = tl.load(p_seed)
    none = tl.zeros_like(index).to(tl.uint32)
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = none + site.to(tl.uint32), none + draw.to(tl.uint32)
    return philox4x32(low, high, c2, c3, none + seed.to(tl.uint32), none + (seed >> 32).to(tl.uint32))


@triton.jit
def _keep(index, p_seed, site, draw, threshold, CHANNELS: tl.constexpr):
    """The mask [P, C] of a block of indices [P, G]: channel 4 g + j takes word j of index g."""
    w0, w1, w2, w3 = _words(index, p_seed, site, draw)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [P, G, 2, 2]
    words = tl.reshape(words, (index.shape[0], CHANNELS))
    return words.to(tl.int64) >= threshold  # in int64, since a threshold of 2**32 drops all elements


@triton.jit(do_not_specialize=_RUNTIME)
def keep_kernel(
    p_mask,  # uint8 [n, C, h, w], contiguous
    p_seed,  # int64 [1]
    num_channels,
    num_rows,
    num_columns,
    start: tl.int64,
    index_n: tl.int64,
    index_g: tl.int64,
    index_h: tl.int64,
    index_w: tl.int64,
    site: tl.int64,
    draw: tl.int64,
    threshold: tl.int64,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mask as bytes."""
    i_n, i_h, i_w, i_c = _place(num_channels, num_rows, num_columns, COLUMNS, CHANNELS)
    o_w = i_w + tl.arange(0, COLUMNS)[:, None]  # [P, 1]
    o_c = i_c + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    o_g = i_c // 4 + tl.arange(0, CHANNELS // 4)[None, :]  # [1, G]
    index = start + i_n * index_n + i_h * index_h + o_g * index_g + o_w * index_w
    keep = _keep(index, p_seed, site, draw, threshold, CHANNELS)
    o_mask = ((i_n * num_channels + o_c) * num_rows + i_h) * num_columns + o_w
    tl.store(p_mask + o_mask, keep.to(tl.uint8), mask=(o_w < num_columns) & (o_c < num_channels))


@triton.jit(do_not_specialize=_RUNTIME)
def dropout_kernel(
    p_x,  # [n, C, h, w]
    p_out,  # [n, C, h, w]
    p_seed,  # int64 [1]
    num_channels,
    num_rows,
    num_columns,
    x_n,
    x_c,
    x_h,
    x_w,
    out_n,
    out_c,
    out_h,
    out_w,
    start: tl.int64,
    index_n: tl.int64,
    index_g: tl.int64,
    index_h: tl.int64,
    index_w: tl.int64,
    site: tl.int64,
    draw: tl.int64,
    threshold: tl.int64,
    scale: tl.float64,
    PER_COLUMN: tl.constexpr,  # each column has an index of its own
    PER_CHANNEL: tl.constexpr,  # each channel has a word of its own
    COMPUTE: tl.constexpr,  # the dtype of products
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Elements times mask times scale."""
    i_n, i_h, i_w, i_c = _place(num_channels, num_rows, num_columns, COLUMNS, CHANNELS)
    o_w = i_w + tl.arange(0, COLUMNS)[:, None]  # [P, 1]
    o_c = i_c + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_x = (o_w < num_columns) & (o_c < num_channels)
    x = tl.load(p_x + (i_n * x_n + i_h * x_h) + o_w * x_w + o_c * x_c, mask=m_x, other=0.0)

    # The mask is computed once along axes on which it is constant, in a block of size 1.
    index = tl.full((1, 1), 0, tl.int64) + (start + i_n * index_n + i_h * index_h)
    if PER_COLUMN:
        index += o_w * index_w
    if PER_CHANNEL:
        index += (i_c // 4 + tl.arange(0, CHANNELS // 4)[None, :]) * index_g  # [P, G]
        keep = _keep(index, p_seed, site, draw, threshold, CHANNELS)
    else:
        word, _w1, _w2, _w3 = _words(index, p_seed, site, draw)
        keep = word.to(tl.int64) >= threshold

    # A product instead of a selection, as in eager PyTorch: a dropped NaN stays NaN.
    y = x.to(COMPUTE) * keep.to(COMPUTE) * tl.full((1, 1), scale, COMPUTE)
    tl.store(p_out + (i_n * out_n + i_h * out_h) + o_w * out_w + o_c * out_c, y.to(p_out.dtype.element_ty), mask=m_x)


def launch_keep_mask(tile: MaskTile, mask: Tensor, block: tuple[int, int] | None = None) -> None:
    """Write the mask of a tile to ``mask``, a contiguous bool tensor of shape ``tile.mask_shape``, which is not empty.

    Args:
        block: columns and channels of one program, powers of two, the channels at least 4 (default: by the layout).
    """
    num_samples, num_channels, num_rows, num_columns = mask.shape
    columns, channels = block or _block(num_channels, num_columns, channels_last=False)
    grid = (num_samples * num_rows * ceil_div(num_columns, columns) * ceil_div(num_channels, channels),)
    with torch.cuda.device_of(mask):
        keep_kernel[grid](
            mask.view(torch.uint8),
            _seed_on(tile, mask.device),
            num_channels,
            num_rows,
            num_columns,
            *_rule(tile),
            COLUMNS=columns,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=False,
        )


def launch_dropout(x: Tensor, tile: MaskTile, out: Tensor, block: tuple[int, int] | None = None) -> None:
    """Write ``x`` times mask times scale to ``out``, of the shape and dtype of ``x``, which is not empty; any strides.

    Args:
        block: columns and channels of one program, powers of two, the channels at least 4 (default: by the layout).
    """
    num_samples, num_channels, num_rows, num_columns = x.shape
    columns, channels = block or _block(num_channels, num_columns, channels_last=x.stride(1) == 1)
    grid = (num_samples * num_rows * ceil_div(num_columns, columns) * ceil_div(num_channels, channels),)
    with torch.cuda.device_of(x):
        dropout_kernel[grid](
            x,
            out,
            _seed_on(tile, x.device),
            num_channels,
            num_rows,
            num_columns,
            *x.stride(),
            *out.stride(),
            *_rule(tile),
            tile.scale(x.dtype),
            PER_COLUMN=tile.kind == "element",
            PER_CHANNEL=tile.kind in ("element", "channel"),
            COMPUTE=tl.float64 if x.dtype == torch.float64 else tl.float32,
            COLUMNS=columns,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _seed_on(tile: MaskTile, device: torch.device) -> Tensor:
    """The seed in memory of the device: kernels that a CUDA graph replays read that of their step."""
    return tile.seed if isinstance(tile.seed, Tensor) else philox.seed_tensor(tile.seed, device)


def _rule(tile: MaskTile) -> tuple[int, ...]:
    """Arguments of the kernels from ``start`` to ``threshold``."""
    return (tile.index_start, *tile.index_strides, tile.site, tile.draw, tile.threshold)


def _block(num_channels: int, num_columns: int, channels_last: bool) -> tuple[int, int]:
    """Columns and channels of one program: 2048 elements, most of them along the axis that is contiguous in memory."""
    widest = 128 if channels_last else CHANNELS_PER_CALL
    channels = max(CHANNELS_PER_CALL, min(widest, triton.next_power_of_2(num_channels)))
    columns = min(2048 // channels, triton.next_power_of_2(num_columns))
    return columns, channels
