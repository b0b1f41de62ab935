"""Positional masks: each element of a tensor has a random word that depends on its position in the untiled tensor, not on the tile.

A mask is defined on *extents*, the sizes (N, C, H, W) of the untiled tensor, which need not exist in memory. Philox
(:mod:`sft.kernels.rng.philox`) gets the counter (index low, index high, call site, draw) and the seed as its key, where

    index = ((n * ceil(C / 4) + c // 4) * H + h) * W + w,        and channel c takes word c % 4 of the four.

So one call serves four neighbouring channels. A tile always has all channels, so no tile border splits a call, as it would with four
neighbouring elements of a row; and in channels-last layout the four channels are neighbours in memory. An element is kept if its word is at
least the threshold.

The remaining kinds apply the same rule to smaller extents and broadcast the mask:

    element  (N, C, H, W)   torch.nn.Dropout
    channel  (N, C, 1, 1)   torch.nn.Dropout2d
    row      (N, 1, 1, 1)   stochastic depth, each sample on its own (Huang et al. 2016)
    batch    (1, 1, 1, 1)   stochastic depth, the whole batch at once
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import InputError
from sft.kernels.rng.philox import KeyWord, key_of

__all__ = ["CHANNELS_PER_CALL", "MaskKind", "MaskTile", "ceil_div", "threshold_of"]

MaskKind = Literal["element", "channel", "row", "batch"]

#: a Philox call gives four words
CHANNELS_PER_CALL = 4


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up.

    >>> ceil_div(5, 4), ceil_div(4, 4), ceil_div(0, 4)
    (2, 1, 0)
    """
    return -(-numerator // denominator)


def threshold_of(p: float) -> int:
    """The smallest 32-bit word that keeps an element: ``p * 2**32``, rounded half to even.

    So the probability of a drop is a multiple of 2**-32, within 2**-33 of ``p``. A ``p`` that rounds to 0 keeps all elements, one that
    rounds to 1 drops all.

    >>> threshold_of(0.0), threshold_of(0.5) == 2**31, threshold_of(1.0) == 2**32, threshold_of(1.5 * 2**-32)
    (0, True, True, 2)
    """
    return round(p * 2**32)  # a product with a power of two is exact


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTile:
    """The mask of a tile ``[n, C, h, w]`` of a tensor ``[N, C, H, W]``."""

    #: sizes of the tile: batch, channels, height, width
    shape: tuple[int, int, int, int]
    #: sizes of the untiled tensor
    extents: tuple[int, int, int, int]
    #: position of the tile's first element in the untiled tensor: batch, row, column
    origin: tuple[int, int, int]
    #: the key, 64 bits; in an int64 tensor with one element if it differs between the replays of a recording
    seed: KeyWord
    #: number of the random operator in the network, 32 bits
    site: int
    #: number of the mask among several masks of one seed and site, 32 bits
    draw: int
    #: probability of a drop
    p: float
    #: unit of a drop: an element, a channel, a sample or the batch
    kind: MaskKind

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in get_args(MaskKind):
            problems.append(f"kind is {self.kind!r}; choose one of {', '.join(get_args(MaskKind))}")
        if not 0.0 <= self.p <= 1.0:
            problems.append(f"p is {self.p}; it is a probability, from 0 to 1")
        if isinstance(self.seed, Tensor):
            if self.seed.dtype != torch.int64 or self.seed.numel() != 1:
                problems.append(f"seed is a tensor {tuple(self.seed.shape)} of {self.seed.dtype}; give one int64 element")
        elif not -(2**63) <= self.seed < 2**64:
            problems.append(f"seed is {self.seed}, which has more than 64 bits; draw one with sft.kernels.rng.philox.draw_seed()")
        for name, word in (("site", self.site), ("draw", self.draw)):
            if not 0 <= word < 2**32:
                problems.append(f"{name} is {word}; it is a word, from 0 to 2**32 - 1")
        if not self._is_inside():
            problems.append(f"a tile {self.shape} at (batch, row, column) {self.origin} is not a part of {self.extents} with all channels")
        elif math.prod(self.extents) >= 2**62:
            problems.append(f"extents {self.extents} have {math.prod(self.extents)} elements; an index has 62 bits")
        if problems:
            raise InputError("this dropout mask is not defined:\n" + "\n".join(f"  - {line}" for line in problems))

    def _is_inside(self) -> bool:
        num_samples, num_channels, num_rows, num_columns = self.shape
        tile = (num_samples, num_rows, num_columns)
        untiled = (self.extents[0], *self.extents[2:])
        spans = zip(self.origin, tile, untiled, strict=True)
        return num_channels == self.extents[1] and all(at >= 0 and size >= 0 and at + size <= extent for at, size, extent in spans)

    @property
    def threshold(self) -> int:
        """The smallest word that keeps an element, in [0, 2**32]."""
        return threshold_of(self.p)

    @property
    def key(self) -> tuple[KeyWord, KeyWord]:
        """Philox's key, low word first."""
        return key_of(self.seed)

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        """Sizes of the tile's mask, with 1 for axes along which the mask is constant."""
        n, c, h, w = self.shape
        return {"element": (n, c, h, w), "channel": (n, c, 1, 1), "row": (n, 1, 1, 1), "batch": (1, 1, 1, 1)}[self.kind]

    @property
    def index_strides(self) -> tuple[int, int, int, int]:
        """Strides of the index along samples, groups of four channels, rows and columns."""
        _, num_channels, height, width = self.extents
        groups = ceil_div(num_channels, CHANNELS_PER_CALL)
        per_element = (groups * height * width, height * width, width, 1)
        return {"element": per_element, "channel": (groups, 1, 0, 0), "row": (1, 0, 0, 0), "batch": (0, 0, 0, 0)}[self.kind]

    @property
    def index_start(self) -> int:
        """Index of the tile's first element."""
        per_sample, _, per_row, per_column = self.index_strides
        sample, row, column = self.origin
        return sample * per_sample + row * per_row + column * per_column

    def scale(self, dtype: torch.dtype) -> float:
        """Factor of kept values, ``1 / (1 - p)`` with the roundings of eager PyTorch: a number of ``dtype``.

        Eager PyTorch divides a mask of ones and zeros of the tensor's dtype by ``1 - p``, in fp32 for half precisions, and multiplies by
        the result. (Its fused CUDA dropout keeps the factor of half-precision tensors in fp32.)
        """
        if self.p == 1.0:
            return 0.0
        if dtype == torch.float64:
            return 1.0 / (1.0 - self.p)
        single = np.float32(1.0) / np.float32(1.0 - self.p)
        if dtype == torch.float16:
            return float(np.float16(single))
        if dtype == torch.bfloat16:
            bits = int(single.view(np.uint32))
            bits += 0x7FFF + (bits >> 16 & 1)  # to nearest, half to even
            return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
        return float(single)
