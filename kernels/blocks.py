"""How much of a convolution one program computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Blocks", "block_size", "default_blocks", "is_flat"]

#: the least extent of a product of blocks that every target has
_SMALLEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How much one program computes. Powers of two of at least 16."""

    #: pixels of a block
    pixels: int
    #: channels of a block of the result
    channels: int
    #: inner axis of the products; bits depend on it
    inner: int
    num_warps: int = 4
    num_stages: int = 3


def is_flat(group_in: int) -> bool:
    """Whether a block's inner axis takes channels of several taps: where a tap's own would not fill the smallest block."""
    return group_in < _SMALLEST


def default_blocks(num_channels: int, num_inner: int, dtype: torch.dtype) -> Blocks:
    """Blocks for any layer: they compile without spills for sm_80 and sm_90 (see the tests), and were tuned on nothing.

    Args:
        num_channels: channels of the result.
        num_inner: channels of one tap that are summed over.
    """
    inner = block_size(num_inner, 32 if dtype == torch.float32 else 64)
    # Where each element of a block has an address of its own, a larger one runs out of registers.
    pixels = 64 if dtype == torch.float32 or is_flat(num_inner) else 128
    return Blocks(pixels=pixels, channels=block_size(num_channels, 64), inner=inner)


def block_size(number: int, largest: int) -> int:
    """The least power of two that is not less than ``number``, within 16 and ``largest``."""
    return max(_SMALLEST, min(largest, 1 << max(0, number - 1).bit_length()))
