"""Noise whose numbers depend on positions in the whole tensor: uniform, normal and exponential ones, of Philox's words.

What `torch.rand_like`, `torch.randn_like` and `Tensor.exponential_` draw from a generator is drawn here as masks are (``mask_tile``): each
element has a word of its own, by its place, the seed and the site. A group of four channels shares a call of Philox; two of its words make
two independent normal numbers, by Box and Muller (1958), "A note on the generation of random normal deviates".

It is plain PyTorch on any device. Words are the same everywhere; logarithms and angles are a device's own, in fp64.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from sft.errors import InputError
from sft.kernels.dropout_reference import block_words, mask_blocks
from sft.kernels.mask_tile import MaskTile

__all__ = ["Distribution", "positional_noise", "write_noise"]

Distribution = Literal["uniform", "normal", "exponential"]

#: Of a uniform number: as many bits as its type has for fractions, so that none is rounded to 1.
_MANTISSA_BITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def write_noise(tile: MaskTile, distribution: Distribution, out: Tensor) -> None:
    """Write the noise of a tile to ``out``, of shape ``tile.shape`` and a floating type.

    Uniform numbers are in [0, 1), normal ones have mean 0 and deviation 1, exponential ones mean 1 and are positive.

    Args:
        tile: the tile; its ``p`` does not matter, its kind is ``"element"``.
        distribution: which noise.
        out: where to write.

    Raises:
        InputError: there is no such noise.
    """
    if distribution not in get_args(Distribution) or out.dtype not in _MANTISSA_BITS or tile.kind != "element":
        raise InputError(
            f"there is no {distribution!r} noise of {out.dtype}, drawn by {tile.kind}; choose {', '.join(get_args(Distribution))}"
        )
    for block in mask_blocks(tile.shape):
        words = block_words(tile, block, out.device)
        numbers = torch.stack(_words_to_distribution(words, distribution, out.dtype), 2).flatten(1, 2)
        out[block] = numbers[:, : block[1].stop - block[1].start].to(out.dtype)


def _words_to_distribution(words: tuple[Tensor, Tensor, Tensor, Tensor], distribution: Distribution, dtype: torch.dtype) -> list[Tensor]:
    """The numbers of four words, in fp64."""
    if distribution == "uniform":
        return [(word >> (32 - _MANTISSA_BITS[dtype])).double() * 2.0 ** -_MANTISSA_BITS[dtype] for word in words]
    if distribution == "exponential":
        return [-_open_interval_uniform(word).log() for word in words]
    found = []
    for first, second in (words[:2], words[2:]):
        radius, angle = (-2 * _open_interval_uniform(first).log()).sqrt(), second.double() * (2 * math.pi / 2**32)
        found += [radius * angle.cos(), radius * angle.sin()]
    return found


def _open_interval_uniform(word: Tensor) -> Tensor:
    """Uniform numbers between 0 and 1, neither of which is one."""
    return (word.double() + 0.5) * 2.0**-32


def positional_noise(like: Tensor, distribution: Distribution, *, site: int, seed: int, draw: int = 0) -> Tensor:
    """The noise of a whole tensor: what a tiled run must equal, for tests and plain PyTorch models.

    Args:
        like: ``[N, C, ...]``, of the noise's shape, type and device.
        distribution: which noise.
        site: tells it from the network's other random operators.
        seed: the key.
        draw: tells several of one seed and site apart.

    >>> x = torch.empty(1, 8, 64, 64)
    >>> noise = positional_noise(x, "normal", site=0, seed=7)
    >>> bool(noise.mean().abs() < 0.02), bool((noise.std() - 1).abs() < 0.02)
    (True, True)
    """
    shape = (*like.shape, 1, 1, 1)
    extents = (shape[0], shape[1], shape[2], math.prod(shape[3:]))
    noise = torch.empty(extents, dtype=like.dtype, device=like.device)
    tile = MaskTile(shape=extents, extents=extents, origin=(0, 0, 0), seed=seed, site=site, draw=draw, p=0.0, kind="element")
    write_noise(tile, distribution, noise)
    return noise.view(like.shape)
