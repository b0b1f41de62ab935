"""Block sizes and launch variants of the convolution kernels, without an import of Triton.

A *program* is one instance of a kernel in Triton's grid. It computes a block of pixels and channels of the result.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sft.kernels.geometry import Geometry

__all__ = [
    "BlockSizes",
    "LaunchVariant",
    "block_size",
    "can_stream_rows",
    "default_blocks",
    "few_channels_blocks",
    "has_few_channels",
    "has_triton",
    "has_warp_groups",
    "row_blocks",
    "variant_blocks",
]

#: Ways to split a convolution into programs; the fastest depends on the layer and the GPU. ``small`` and ``tall`` have fewer and more
#: pixels in a block, ``wide`` more channels, ``deep`` more pipeline stages, ``rows`` streams down the rows
#: (:mod:`sft.kernels.conv.rows2d_triton`). All have the inner block of the default.
LaunchVariant = Literal["default", "small", "tall", "wide", "deep", "rows"]

#: smallest extent of a matrix product of blocks on every target
_MIN_BLOCK_SIZE = 16
#: smallest number of pixels of Hopper's warp-group products
_WARP_GROUP = 64
#: rows that one program of the variant ``rows`` computes; it reads two more
_ROWS_PER_PROGRAM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Extents of the block that one program computes: powers of two, at least 16."""

    #: pixels of the result
    pixels: int
    #: channels of the result
    channels: int
    #: inner axis of the products; the bits of the result depend on it
    inner: int
    num_warps: int = 4
    num_stages: int = 3
    #: rows of the variant ``rows``, an even number; 0 for an implicit matrix product
    rows: int = 0


def has_few_channels(group_in: int) -> bool:
    """True if the channels of one tap do not fill the smallest block, so that inner blocks have those of several taps."""
    return group_in < _MIN_BLOCK_SIZE


def default_blocks(num_channels: int, num_inner: int, dtype: torch.dtype) -> BlockSizes:
    """Default blocks of a layer. They compile without spills for sm_80 and sm_90 (see the tests), and are not tuned.

    Args:
        num_channels: channels of the result.
        num_inner: channels of one tap, which are summed over.
        dtype: dtype of the elements.
    """
    inner = block_size(num_inner, 32 if dtype == torch.float32 else 64)
    # If each element has an address of its own, a larger block runs out of registers.
    pixels = 64 if dtype == torch.float32 or has_few_channels(num_inner) else 128
    return BlockSizes(pixels=pixels, channels=block_size(num_channels, 64), inner=inner)


def few_channels_blocks(num_channels: int, num_inner: int, precision: str) -> BlockSizes:
    """Blocks of a layer of images with few channels: a pixel for each thread, so that a thread has all elements of its pixel's window.

    Args:
        num_channels: channels of the result.
        num_inner: elements of the window.
        precision: as of ``launch_conv2d``. Without matrix instructions a larger block runs out of registers.
    """
    pixels, channels = (64, 32) if precision == "ieee" else (128, 64)
    return BlockSizes(pixels=pixels, channels=block_size(num_channels, channels), inner=block_size(num_inner, 32))


def variant_blocks(blocks: BlockSizes, variant: LaunchVariant, num_channels: int, *, is_loaded: bool) -> BlockSizes:
    """Blocks of a launch variant, from the default blocks.

    Args:
        blocks: the default blocks.
        variant: the variant.
        num_channels: channels of the result.
        is_loaded: true if a program does more than load, multiply and store, so that fewer registers are left for sums.
    """
    if variant == "small":
        return replace(blocks, pixels=max(min(blocks.pixels, _WARP_GROUP), blocks.pixels // 2))
    if variant == "tall":
        return replace(blocks, pixels=2 * blocks.pixels)
    if variant == "wide":
        return replace(blocks, channels=block_size(num_channels, 128))
    if variant == "deep":
        return replace(blocks, num_stages=blocks.num_stages + 1)
    if variant == "rows":
        return replace(blocks, pixels=64, channels=min(blocks.channels, 32 if is_loaded else 64), num_stages=2, rows=_ROWS_PER_PROGRAM)
    return blocks


def has_warp_groups(device: torch.device) -> bool:
    """True if matrix products are those of Hopper's warp groups; assumed of tensors that are not on a GPU."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9)


def can_stream_rows(geometry: Geometry, num_inner: int, groups: int, weight: Tensor) -> bool:
    """True if a layer has the variant ``rows``.

    The window is 3 x 3 without stride and dilation, the layer has one group, and at most 64 channels of half precision are summed over, so
    that the weight fits into shared memory. It needs Hopper: its products read operands from shared memory.
    """
    if not has_warp_groups(weight.device):
        return False
    is_plain = all((w.kernel, w.stride, w.dilation) == (3, 1, 1) for w in (axis.window for axis in geometry.axes))
    return is_plain and groups == 1 and not has_few_channels(num_inner) and num_inner <= 64 and weight.element_size() == 2


def row_blocks(columns: int, pixels: int) -> tuple[int, bool]:
    """Columns of a row with those that fill its last block of pixels, and true if the blocks of a kernel are aligned to rows.

    Aligned blocks have scalar coordinates, so that each pixel's address is one addition. Narrow images have blocks of several rows, since
    the last block of a row would be mostly empty.

    >>> row_blocks(1000, 64), row_blocks(128, 64), row_blocks(100, 64)
    ((1024, True), (128, True), (100, False))
    """
    width = -(-columns // pixels) * pixels
    return (width, True) if width - columns <= columns // 8 else (columns, False)


def block_size(number: int, largest: int) -> int:
    """The smallest power of two that is at least ``number``, between 16 and ``largest``."""
    return max(_MIN_BLOCK_SIZE, min(largest, 1 << max(0, number - 1).bit_length()))


@functools.cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None
