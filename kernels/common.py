"""How much of a convolution one program computes.

What runs on a tensor: a Triton kernel or the plain reference.
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
    "can_walk_rows",
    "default_blocks",
    "has_triton",
    "is_flat",
    "variant_blocks",
]

#: How a convolution is split into programs: what is measured to be fastest may be another for each layer and GPU. ``small`` and ``tall``
#: have fewer and more pixels in a block, ``wide`` more channels, ``deep`` loads further ahead, ``rows`` walks down the rows. The inner
#: block is that of the default.
LaunchVariant = Literal["default", "small", "tall", "wide", "deep", "rows"]

#: the least extent of a product of blocks that every target has
_MIN_BLOCK_SIZE = 16
#: the fewest pixels that Hopper's products of warp groups take
_WARP_GROUP = 64
#: rows that one program walks down; two more are read
_WALK_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """How much one program computes. Powers of two of at least 16."""

    #: pixels of a block
    pixels: int
    #: channels of a block of the result
    channels: int
    #: inner axis of the products; bits depend on it
    inner: int
    num_warps: int = 4
    num_stages: int = 3
    #: rows that one program walks down (see ``conv2d_rows_triton``), an even number; 0 for an implicit matrix product
    rows: int = 0


def is_flat(group_in: int) -> bool:
    """Whether a block's inner axis takes channels of several taps: where a tap's own would not fill the smallest block."""
    return group_in < _MIN_BLOCK_SIZE


def default_blocks(num_channels: int, num_inner: int, dtype: torch.dtype) -> BlockSizes:
    """Blocks for any layer: they compile without spills for sm_80 and sm_90 (see the tests), and were tuned on nothing.

    Args:
        num_channels: channels of the result.
        num_inner: channels of one tap that are summed over.
    """
    inner = block_size(num_inner, 32 if dtype == torch.float32 else 64)
    # Where each element of a block has an address of its own, a larger one runs out of registers.
    pixels = 64 if dtype == torch.float32 or is_flat(num_inner) else 128
    return BlockSizes(pixels=pixels, channels=block_size(num_channels, 64), inner=inner)


def variant_blocks(blocks: BlockSizes, variant: LaunchVariant, num_channels: int, *, is_loaded: bool) -> BlockSizes:
    """The blocks of a variant of a launch whose default these are.

    Args:
        num_channels: channels of the result.
        is_loaded: a program does more than to load, multiply and store: it has less room for sums.
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
        return replace(blocks, pixels=64, channels=min(blocks.channels, 32 if is_loaded else 64), num_stages=2, rows=_WALK_ROWS)
    return blocks


def can_walk_rows(geometry: Geometry, num_inner: int, groups: int, weight: Tensor) -> bool:
    """Whether the variant ``rows`` is there for a layer: 3 x 3 without stride and dilation, one group, at most 64 channels that are summed
    over, whose weight of half precision fits into shared memory; on Hopper, whose products take it from there."""
    if weight.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(weight.device)[0] != 9):
        return False
    plain = all((w.kernel, w.stride, w.dilation) == (3, 1, 1) for w in (axis.window for axis in geometry.axes))
    return plain and groups == 1 and not is_flat(num_inner) and num_inner <= 64 and weight.element_size() == 2


def block_size(number: int, largest: int) -> int:
    """The least power of two that is not less than ``number``, within 16 and ``largest``."""
    return max(_MIN_BLOCK_SIZE, min(largest, 1 << max(0, number - 1).bit_length()))


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
