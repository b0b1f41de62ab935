"""Dropout masks in plain PyTorch, on any device. The Triton kernels have the same bits.

The integers of Philox take about 80 bytes for each call of four words, many times the memory of the masked strip. So the mask of a tile is
made block by block, and only the mask of one block exists at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from sft.kernels.rng.mask_tile import CHANNELS_PER_CALL, MaskTile, ceil_div
from sft.kernels.rng.philox import philox4x32

__all__ = ["block_words", "mask_blocks", "reference_block", "reference_dropout", "reference_keep_mask", "reference_write_mask"]

#: Philox calls of a block: less than 4 MiB of temporaries, and enough to hide the launches
_BLOCK_CALLS = 2**15

BlockSlices = tuple[slice, slice, slice, slice]


def reference_keep_mask(tile: MaskTile, device: torch.device) -> Tensor:
    """The mask as a bool tensor of shape ``tile.mask_shape``, True where kept."""
    mask = torch.empty(tile.mask_shape, dtype=torch.bool, device=device)
    for block in mask_blocks(tile.mask_shape):
        mask[block] = _keep_block(tile, block, device)
    return mask


def reference_dropout(x: Tensor, tile: MaskTile, out: Tensor) -> None:
    """Write ``x`` times mask times scale to ``out``, which has the shape and dtype of ``x`` and may be ``x``."""
    scale = tile.scale(x.dtype)
    for block in mask_blocks(tile.mask_shape):
        region = tuple(slice(None) if size == 1 else rows for size, rows in zip(tile.mask_shape, block, strict=True))
        # A product instead of a selection, as in eager PyTorch: a dropped NaN stays NaN.
        torch.mul(x[region], _keep_block(tile, block, x.device), out=out[region]).mul_(scale)


def reference_write_mask(tile: MaskTile, out: Tensor) -> None:
    """Write the mask as ones and zeros to ``out``, of shape ``tile.shape`` and any dtype."""
    mask = out[tuple(slice(None) if size != 1 else slice(0, 1) for size in tile.mask_shape)]
    for block in mask_blocks(tile.mask_shape):
        mask[block] = _keep_block(tile, block, out.device)
    if mask.shape != out.shape:
        out.copy_(mask.expand(out.shape))


def reference_block(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Sizes of the largest block of a mask of ``shape``, which bounds the temporaries."""
    block = next(mask_blocks(shape))
    return (len(range(*block[0].indices(shape[0]))), *(extent.stop - extent.start for extent in block[1:]))


def mask_blocks(shape: tuple[int, int, int, int]) -> Iterator[BlockSlices]:
    """Blocks that cover ``shape``. A block grows along columns first, then along rows, groups of channels, and samples."""
    samples, channels, rows, columns = shape
    calls = _BLOCK_CALLS
    sizes: list[int] = []
    for extent in (columns, rows, ceil_div(channels, CHANNELS_PER_CALL), samples):
        sizes.append(max(1, min(extent, calls)))
        calls //= sizes[-1]
    steps = (sizes[3], sizes[2] * CHANNELS_PER_CALL, sizes[1], sizes[0])
    slices = [[slice(at, min(at + step, extent)) for at in range(0, extent, step)] for extent, step in zip(shape, steps, strict=True)]
    yield from itertools.product(slices[0], slices[1], slices[2], slices[3])


def block_words(tile: MaskTile, block: BlockSlices, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words of one block of ``tile.mask_shape``: for each channel of a group of four a tensor ``[n, groups, h, w]``."""
    sample, channel, row, column = block
    group = slice(channel.start // CHANNELS_PER_CALL, ceil_div(channel.stop, CHANNELS_PER_CALL))
    index = torch.full((1, 1, 1, 1), tile.index_start, dtype=torch.int64, device=device)
    for axis, (extent, stride) in enumerate(zip((sample, group, row, column), tile.index_strides, strict=True)):
        steps = torch.arange(extent.start, extent.stop, dtype=torch.int64, device=device) * stride
        index = index + steps.view([-1 if dim == axis else 1 for dim in range(4)])
    site, draw = (torch.full((1, 1, 1, 1), word, dtype=torch.int64, device=device) for word in (tile.site, tile.draw))
    return philox4x32((index & 0xFFFFFFFF, index >> 32, site, draw), tile.key)


def _keep_block(tile: MaskTile, block: BlockSlices, device: torch.device) -> Tensor:
    """The mask of one block of ``tile.mask_shape``."""
    words = block_words(tile, block, device)
    samples, groups, rows, columns = words[0].shape
    keep = torch.empty((samples, groups, CHANNELS_PER_CALL, rows, columns), dtype=torch.bool, device=device)
    for channel, word in enumerate(words):
        torch.ge(word, tile.threshold, out=keep[:, :, channel])
    return keep.flatten(1, 2)[:, : block[1].stop - block[1].start]
