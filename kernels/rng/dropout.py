"""Positional random operators: dropout and noise that depend on an element's position in the untiled tensor, not on the tiling.

Strips, panels, recomputation in the backward pass and the ranks of a job all use parts of the same mask. None of them stores it: the
backward pass evaluates it again. :mod:`sft.kernels.rng.mask_tile` defines the random word of each element,
:mod:`sft.kernels.rng.philox` computes the words.

*Dropout* runs by a Triton kernel on CUDA and by the plain PyTorch of ``dropout_reference`` on all other devices; the bits are the same.

*Noise* replaces `torch.rand_like`, `torch.randn_like` and `Tensor.exponential_`: uniform, normal and exponential numbers. Each element has
a word of its own, as in a mask. Two words of a Philox call make two independent normal numbers, by Box and Muller (1958), "A note on the
generation of random normal deviates". Noise is plain PyTorch on every device. The words are the same on all devices; logarithms and angles
are computed by the device in fp64.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sft.common.errors import InputError
from sft.kernels.common import has_triton
from sft.kernels.rng.dropout_reference import block_words, mask_blocks, reference_dropout, reference_keep_mask, reference_write_mask
from sft.kernels.rng.mask_tile import MaskKind, MaskTile
from sft.kernels.rng.philox import KeyWord

__all__ = [
    "Distribution",
    "MaskKind",
    "PositionalDropout",
    "dropout",
    "keep_mask",
    "positional_dropout",
    "positional_noise",
    "write_mask",
    "write_noise",
]


def _dropout_forward(x: Tensor, tile: MaskTile, out: Tensor | None) -> Tensor:
    """``x`` times mask times scale, without autograd."""
    result = torch.empty_like(x) if out is None else out
    if x.numel() == 0:
        return result
    if x.is_cuda and has_triton():
        from sft.kernels.rng.rng_triton import launch_dropout  # not above: it imports Triton

        launch_dropout(x, tile, result)
    else:
        reference_dropout(x, tile, result)
    return result


class _Dropout(torch.autograd.Function):
    """Dropout as a diagonal linear map, which is its own adjoint. Saves the tile, not the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tile: MaskTile) -> Tensor:
        ctx.tile = tile
        return _dropout_forward(x, tile, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        result: Tensor = _Dropout.apply(gradient, ctx.tile)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return result, None


def keep_mask(
    shape: tuple[int, int, int, int],
    *,
    extents: tuple[int, int, int, int],
    origin: tuple[int, int, int],
    seed: int,
    site: int,
    draw: int,
    p: float,
    kind: MaskKind,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The mask of one tile.

    Args:
        shape: sizes ``[n, C, h, w]`` of the tile; it has all channels.
        extents: sizes ``[N, C, H, W]`` of the untiled tensor.
        origin: batch index, row and column of the tile's first element in the untiled tensor.
        seed: the key, 64 bits; draw it once per step with ``sft.kernels.rng.philox.draw_seed``.
        site: number of the random operator in the network.
        draw: number of the mask among several masks of one seed and site.
        p: probability of a drop, rounded to a multiple of 2**-32, half to even (``mask_tile.threshold_of``).
        kind: unit of a drop: ``"element"``, ``"channel"`` (``[n, c]``), ``"row"`` (a sample) or ``"batch"``.
        device: device of the mask.

    Returns:
        Bool tensor of ``shape``, True where kept; an expanded view along axes on which the mask is constant.

    Raises:
        InputError: an argument is out of range, or the tile is not a part of the untiled tensor.

    >>> rule = dict(extents=(1, 2, 6, 5), seed=7, site=0, draw=0, p=0.5, kind="element")
    >>> untiled = keep_mask((1, 2, 6, 5), origin=(0, 0, 0), **rule)
    >>> torch.equal(keep_mask((1, 2, 2, 3), origin=(0, 3, 1), **rule), untiled[:, :, 3:5, 1:4])
    True
    """
    tile = MaskTile(shape=shape, extents=extents, origin=origin, seed=seed, site=site, draw=draw, p=p, kind=kind)
    device = torch.device(device)
    if device.type == "cuda" and has_triton():
        from sft.kernels.rng.rng_triton import launch_keep_mask  # not above: it imports Triton

        mask = torch.empty(tile.mask_shape, dtype=torch.bool, device=device)
        if mask.numel():
            launch_keep_mask(tile, mask)
    else:
        mask = reference_keep_mask(tile, device)
    return mask.expand(shape)


def write_mask(tile: MaskTile, out: Tensor) -> None:
    """Write the mask of a tile, as ones and zeros, to ``out`` of shape ``tile.shape`` and any dtype."""
    if out.is_cuda and has_triton():
        from sft.kernels.rng.rng_triton import launch_keep_mask  # not above: it imports Triton

        mask = torch.empty(tile.mask_shape, dtype=torch.bool, device=out.device)
        if mask.numel():
            launch_keep_mask(tile, mask)
        out.copy_(mask.expand(tile.shape))
    elif out.numel():
        reference_write_mask(tile, out)


def dropout(
    x: Tensor,
    *,
    origin: tuple[int, int, int],
    extents: tuple[int, int, int, int],
    seed: KeyWord,
    site: int,
    draw: int,
    p: float,
    kind: MaskKind,
    out: Tensor | None = None,
) -> Tensor:
    """Apply dropout to one tile: ``x * mask * scale`` with the mask of ``keep_mask`` and the scale ``1 / (1 - p)``.

    The products and their roundings are those of eager PyTorch's ``input * noise`` in the dtype of ``x``: a dropped negative number gives
    -0, a dropped NaN or infinity gives NaN. The gradient is the same function of the output's gradient, to any order; it evaluates the mask
    again.

    Args:
        x: tile ``[n, C, h, w]`` of a floating dtype and any strides.
        origin, extents, site, draw, p, kind: as for ``keep_mask``.
        seed: the key, 64 bits, as a number or in an int64 tensor with one element on the device of ``x``.
        out: result of the shape, dtype and device of ``x``; may be ``x``. Not differentiable.

    Returns:
        ``out``, or a new tensor with the layout of ``x``.

    Raises:
        InputError: as ``keep_mask``; or ``x`` is not such a tile, ``out`` does not match it, or ``out`` is given and an argument requires a
            gradient.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise InputError(f"dropout takes a floating tile [n, C, h, w], got {x.dtype} of shape {tuple(x.shape)}; view it as one")
    num_samples, num_channels, num_rows, num_columns = x.shape
    shape = (num_samples, num_channels, num_rows, num_columns)
    tile = MaskTile(shape=shape, extents=extents, origin=origin, seed=seed, site=site, draw=draw, p=p, kind=kind)
    if out is None:
        result: Tensor = _Dropout.apply(x, tile)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return result
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        described = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (x, out))
        raise InputError("dropout writes a tile like its input, {}, but out is {}; allocate it like the input".format(*described))
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise InputError("dropout with out= is not differentiable, and an argument requires grad; leave out= away or use torch.no_grad()")
    return _dropout_forward(x, tile, out)


def positional_dropout(x: Tensor, p: float, *, site: int, seed: int, draw: int = 0, kind: MaskKind = "element") -> Tensor:
    """Positional dropout of an untiled tensor, for plain PyTorch models: a compiled model computes the same.

    Args:
        x: ``[N, C, ...]`` with any number of spatial axes. The first one counts as height, the remaining ones as width.
        p, site, seed, draw, kind: as for ``keep_mask``.

    Raises:
        InputError: as ``dropout``; or ``x`` has fewer than two axes.
    """
    if x.dim() < 2:
        raise InputError(f"positional dropout needs samples and channels, got shape {tuple(x.shape)}; view it as [N, C, ...]")
    num_samples, num_channels, num_rows = (*x.shape[:3], 1)[:3]
    num_columns = x.shape[3:].numel()
    extents = (num_samples, num_channels, num_rows, num_columns)
    y = dropout(x.reshape(extents), origin=(0, 0, 0), extents=extents, seed=seed, site=site, draw=draw, p=p, kind=kind)
    return y.reshape(x.shape)


class PositionalDropout(nn.Module):
    """Module of ``positional_dropout``, in place of ``torch.nn.Dropout`` and its variants; the identity in eval mode.

    Args:
        p: probability of a drop.
        site: number of the random operator in the network.
        kind: unit of a drop; ``"channel"`` is ``torch.nn.Dropout2d``.
        seed: the key; set the attribute to a new one (``sft.kernels.rng.philox.draw_seed``) before each step.
    """

    def __init__(self, p: float = 0.5, *, site: int, kind: MaskKind = "element", seed: int = 0) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.kind: MaskKind = kind
        self.seed = seed
        self.draw = 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout in training mode."""
        if not self.training:
            return x
        return positional_dropout(x, self.p, site=self.site, seed=self.seed, draw=self.draw, kind=self.kind)

    def extra_repr(self) -> str:
        """Arguments of the module."""
        return f"p={self.p}, site={self.site}, kind={self.kind!r}, seed={self.seed}, draw={self.draw}"


Distribution = Literal["uniform", "normal", "exponential"]

#: Bits of a uniform number: those of the dtype's fraction, so that no number is rounded to 1.
_MANTISSA_BITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def write_noise(tile: MaskTile, distribution: Distribution, out: Tensor) -> None:
    """Write the noise of a tile to ``out``, of shape ``tile.shape`` and a floating dtype.

    Uniform numbers are in [0, 1), normal ones have mean 0 and deviation 1, exponential ones mean 1 and are positive.

    Args:
        tile: the tile, of kind ``"element"``; its ``p`` is ignored.
        distribution: distribution of the numbers.
        out: the result.

    Raises:
        InputError: the distribution, the dtype or the kind of the tile is not supported.
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
    """The numbers made from four words, in fp64."""
    if distribution == "uniform":
        return [(word >> (32 - _MANTISSA_BITS[dtype])).double() * 2.0 ** -_MANTISSA_BITS[dtype] for word in words]
    if distribution == "exponential":
        return [-_open_interval_uniform(word).log() for word in words]
    numbers = []
    for first, second in (words[:2], words[2:]):
        radius, angle = (-2 * _open_interval_uniform(first).log()).sqrt(), second.double() * (2 * math.pi / 2**32)
        numbers += [radius * angle.cos(), radius * angle.sin()]
    return numbers


def _open_interval_uniform(word: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1)."""
    return (word.double() + 0.5) * 2.0**-32


def positional_noise(like: Tensor, distribution: Distribution, *, site: int, seed: int, draw: int = 0) -> Tensor:
    """Positional noise of an untiled tensor, for plain PyTorch models: a compiled model draws the same.

    Args:
        like: ``[N, C, ...]``, a tensor of the noise's shape, dtype and device.
        distribution: distribution of the numbers.
        site: number of the random operator in the network.
        seed: the key.
        draw: number of the noise among several of one seed and site.

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
