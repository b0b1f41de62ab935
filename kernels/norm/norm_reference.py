"""Norms of a strip in plain PyTorch, on any device and in any floating dtype: what the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["per_channel", "reference_moments", "reference_norm_gradient", "reference_norm_sums", "reference_normalize", "relu_gradient"]


def per_channel(statistic: Tensor, num_channels: int) -> Tensor:
    """A value for each group ``[samples or 1, groups]`` as one for each channel, to be broadcast over an image: ``[., C, 1, 1]``."""
    return statistic.repeat_interleave(num_channels // statistic.shape[1], 1)[:, :, None, None]


def relu_gradient(gradient: Tensor, output: Tensor | None) -> Tensor:
    """The gradient where the ReLU with this output is on; torch's rule, in which NaN counts as on."""
    return gradient if output is None else torch.where(output <= 0, 0, gradient)


def reference_moments(x: Tensor, *, each_sample: bool) -> tuple[int, Tensor, Tensor]:
    """Number of elements, mean and sum of squared distances from it of each channel, in fp64, ``[samples or 1, C]``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = (2, 3) if each_sample else (0, 2, 3)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    count = x.numel() // (mean.numel() or 1)
    shape = (x.shape[0] if each_sample else 1, x.shape[1])
    return count, mean.double().view(shape), variance.double().view(shape) * count


def reference_normalize(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *, relu: bool
) -> Tensor:
    """``activation((x - mean) * rstd * weight + bias + residual)``, in the dtype of ``x``."""
    y = _normalized(x, mean, rstd)
    if weight is not None:
        y = y * weight.to(y.dtype)[:, None, None]
    if bias is not None:
        y = y + bias.to(y.dtype)[:, None, None]
    if residual is not None:
        y = y + residual
    return (y.relu() if relu else y).to(x.dtype)


def reference_norm_sums(
    gradient: Tensor, output: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, *, each_sample: bool
) -> tuple[Tensor, Tensor]:
    """The sums over pixels of the gradient, and of its product with the normalised ``x``: fp64 ``[samples or 1, C]``."""
    g = relu_gradient(gradient, output)
    dims = (2, 3) if each_sample else (0, 2, 3)
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    sums = [part.sum(dims, dtype=torch.float64) for part in (wide, wide * _normalized(x, mean, rstd))]
    return sums[0].view(-1, x.shape[1]), sums[1].view(-1, x.shape[1])


def reference_norm_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    back: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """``rstd * (weight * g - back[0] - back[1] * xhat)``, in the dtype of ``x``; see ``norm.normalize_gradient``."""
    distance = _normalized(x, mean, rstd)
    g = relu_gradient(gradient, output).to(distance.dtype)
    if weight is not None:
        g = g * weight.to(g.dtype)[:, None, None]
    if back is not None:
        first, second = (per_channel(value, x.shape[1]).to(g.dtype) for value in back)
        g = g - first - second * distance
    return (g * per_channel(rstd, x.shape[1]).to(g.dtype)).to(x.dtype)


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The normalised ``x``, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) - per_channel(mean, x.shape[1]).to(wide)) * per_channel(rstd, x.shape[1]).to(wide)
