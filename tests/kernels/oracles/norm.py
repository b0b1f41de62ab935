"""Norms of a strip in plain PyTorch, on any device and in any floating dtype: the oracle of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments", "NormGradients", "NormStatistics", "NormSums", "reference_norm_gradient", "reference_normalize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStatistics:
    """Statistics of each group of channels, of each sample or of all samples together: ``[samples or 1, groups]``."""

    #: elements of a group, int64
    counts: Tensor
    #: fp64
    mean: Tensor
    #: mean squared distance from the mean, fp64
    variance: Tensor

    @property
    def unbiased(self) -> Tensor:
        """The variance of running statistics: the sum of squared distances over one less than the count."""
        return self.variance * self.counts / (self.counts - 1)

    def rstd(self, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Reciprocal standard deviation, of the variance plus ``eps``."""
        return (self.variance + eps).rsqrt().to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of each channel, merged strip by strip in slots ``[splits, samples or 1, C]``."""

    #: elements, int64
    counts: Tensor
    #: fp64
    means: Tensor
    #: sums of squared distances from the mean, fp64
    squares: Tensor

    @classmethod
    def zeros(cls, num_channels: int, *, num_samples: int | None, num_splits: int = 1) -> Moments:
        """Moments of no elements; ``num_samples`` is None for one statistic of all samples together."""
        means = _slots(num_channels, num_samples, num_splits)
        return cls(counts=torch.zeros_like(means, dtype=torch.int64), means=means, squares=torch.zeros_like(means))

    def add(self, x: Tensor) -> None:
        """Merge a strip into the first slot."""
        count, mean, squares = _moments(x, each_sample=self.means.shape[1] > 1 or x.shape[0] == 1)
        previous_count, previous_mean = self.counts[0].clone(), self.means[0].clone()
        share, delta = count / (previous_count + count).double(), mean - previous_mean
        self.counts[0] += count
        self.means[0] += delta * share
        self.squares[0] += squares + delta * delta * (previous_count * share)

    def total(self, num_groups: int | None = None) -> NormStatistics:
        """Statistics of ``num_groups`` groups of equally many neighbouring channels (default: of each channel).

        All slots are merged at once in fp64: around the mean of means, the squares of a slot are its own plus those of its distance.
        """
        num_splits, num_samples, num_channels = self.means.shape
        num_groups = num_channels if num_groups is None else num_groups
        shape = (num_splits, num_samples, num_groups, num_channels // num_groups)
        counts, means, squares = (values.view(shape) for values in (self.counts, self.means, self.squares))
        count = counts.sum((0, 3))
        mean = (counts * means).sum((0, 3)) / count
        spread = squares + counts * (means - mean[:, :, None]).square()
        return NormStatistics(counts=count, mean=mean, variance=spread.sum((0, 3)) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGradients:
    """Gradients of weight and bias, and the two terms of the input's gradient that depend on the whole image."""

    #: fp64 ``[C]``
    weight: Tensor
    #: fp64 ``[C]``
    bias: Tensor
    #: subtracted everywhere, and for each unit of the normalised input; fp64 ``[samples or 1, groups]``
    back: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSums:
    """Sums of the backward pass over the image: fp64 slots ``[splits, samples or 1, C]``."""

    #: of the output's gradient
    first: Tensor
    #: of its product with the normalised input
    second: Tensor

    @classmethod
    def zeros(cls, num_channels: int, *, num_samples: int | None, num_splits: int = 1) -> NormSums:
        """Empty sums; ``num_samples`` as for `Moments.zeros`."""
        first = _slots(num_channels, num_samples, num_splits)
        return cls(first=first, second=torch.zeros_like(first))

    def add(self, gradient: Tensor, output: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        """Add the sums of a strip to the first slot."""
        each_sample = self.first.shape[1] > 1 or x.shape[0] == 1
        for slots, values in zip(
            (self.first, self.second), _norm_sums(gradient, output, x, mean, rstd, each_sample=each_sample), strict=True
        ):
            slots[0] += values

    def total(self, statistics: NormStatistics, weight: Tensor | None) -> NormGradients:
        """The gradients; ``statistics`` and ``weight`` as in the forward pass."""
        first, second = self.first.sum(0), self.second.sum(0)
        back = []
        for sums in (first, second):
            weighted = sums if weight is None else sums * weight.double()
            back.append(weighted.view(*statistics.counts.shape, -1).sum(2) / statistics.counts)
        return NormGradients(weight=second.sum(0), bias=first.sum(0), back=(back[0], back[1]))


def _slots(num_channels: int, num_samples: int | None, num_splits: int) -> Tensor:
    return torch.zeros(num_splits, 1 if num_samples is None else num_samples, num_channels, dtype=torch.float64)


def _per_channel(statistic: Tensor, num_channels: int) -> Tensor:
    """A value for each group ``[samples or 1, groups]`` as one for each channel, to be broadcast over an image: ``[., C, 1, 1]``."""
    return statistic.repeat_interleave(num_channels // statistic.shape[1], 1)[:, :, None, None]


def _relu_gradient(gradient: Tensor, output: Tensor | None) -> Tensor:
    """The gradient where the ReLU with this output is positive or NaN, as in torch."""
    return gradient if output is None else torch.where(output <= 0, 0, gradient)


def _moments(x: Tensor, *, each_sample: bool) -> tuple[int, Tensor, Tensor]:
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


def _norm_sums(
    gradient: Tensor, output: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, *, each_sample: bool
) -> tuple[Tensor, Tensor]:
    """The sums over pixels of the gradient, and of its product with the normalised ``x``: fp64 ``[samples or 1, C]``."""
    g = _relu_gradient(gradient, output)
    dims = (2, 3) if each_sample else (0, 2, 3)
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    sums = [tensor.sum(dims, dtype=torch.float64) for tensor in (wide, wide * _normalized(x, mean, rstd))]
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
    """``rstd * (weight * g - back[0] - back[1] * xhat)``, in the dtype of ``x``."""
    distance = _normalized(x, mean, rstd)
    g = _relu_gradient(gradient, output).to(distance.dtype)
    if weight is not None:
        g = g * weight.to(g.dtype)[:, None, None]
    if back is not None:
        first, second = (_per_channel(value, x.shape[1]).to(g.dtype) for value in back)
        g = g - first - second * distance
    return (g * _per_channel(rstd, x.shape[1]).to(g.dtype)).to(x.dtype)


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The normalised ``x``, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) - _per_channel(mean, x.shape[1]).to(wide)) * _per_channel(rstd, x.shape[1]).to(wide)
