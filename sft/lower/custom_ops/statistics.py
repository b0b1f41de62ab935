"""What of an image is one number for a channel: moments, extremes, norms.

Products of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "affine",
    "argmax",
    "channel_norm",
    "channel_rms_norm",
    "contract_pixels",
    "inverse_sqrt",
    "logsumexp",
    "minmax",
    "mix_channels",
    "moment_mean",
    "moments",
    "nth_root",
    "running_mean",
    "running_var",
    "scale_shift",
    "variance",
    "weight_norm",
]


def moments(self: Tensor, groups: int, per_sample: bool, axes: int) -> Tensor:
    """Mean, biased variance and count of each group, ``[B, G, 3]``; in fp32 where the elements are of half precision."""
    self = _widened(self)
    grouped = self.reshape(self.shape[0], groups, -1)
    dims = [2] if per_sample else [0, 2]
    variance, mean = torch.var_mean(grouped, dims, correction=0)
    count = torch.full_like(mean, grouped.numel() // mean.numel())
    stacked = torch.stack([mean, variance, count], -1)
    return stacked if per_sample else stacked.unsqueeze(0)


def moment_mean(moments: Tensor, shape: Sequence[int]) -> Tensor:
    """The means."""
    return moments[..., 0].reshape(tuple(shape))


def variance(moments: Tensor, correction: float, shape: Sequence[int]) -> Tensor:
    """The variances with so many degrees of freedom less."""
    count = moments[..., 2].detach()
    return (moments[..., 1] * (count / (count - correction).clamp_min(0.0))).reshape(tuple(shape))


def nth_root(self: Tensor, order: float) -> Tensor:
    """The ``order``-th root, whose derivative at zero counts as zero, as that of torch's norms and deviations does."""
    positive = torch.where(self == 0, torch.ones_like(self), self)
    found = torch.sqrt(positive) if order == 2 else torch.pow(positive, 1 / order)
    return torch.where(self == 0, torch.zeros_like(self), found)


def minmax(self: Tensor, largest: bool, axes: int) -> Tensor:
    """The largest or smallest element along the axes and how often it occurs, in fp64."""
    dims = list(range(self.dim() - axes, self.dim()))
    value = torch.amax(self, dims, True) if largest else torch.amin(self, dims, True)
    count = (self == value).sum(dims)
    return torch.stack([value.flatten(-axes).squeeze(-1).double(), count.double()], -1)


def argmax(self: Tensor, axes: int) -> Tensor:
    """The largest element along the axes and the first place where it is, in row-major order, in fp64."""
    value, place = torch.max(self.flatten(-axes), -1)
    return torch.stack([value.double(), place.double()], -1)


def logsumexp(self: Tensor, axes: int) -> Tensor:
    """The logarithm of the sum of exponentials along the axes."""
    return torch.logsumexp(self, list(range(self.dim() - axes, self.dim())))


def scale_shift(moments: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int, channels: int, eps: float) -> Tensor:
    """What a norm multiplies with and adds, ``[B, C, 1, ..., 1, 2]`` with a 1 for each axis of the image."""
    batch, groups, _ = moments.shape
    each = moments.unsqueeze(2).expand(batch, groups, channels // groups, 3).reshape(batch, channels, 3)
    mean, variance = each[..., 0], each[..., 1]
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return torch.stack([scale, shift], -1).view(batch, channels, *[1] * axes, 2)


def affine(self: Tensor, scale_shift: Tensor) -> Tensor:
    """``self * scale + shift``."""
    return torch.addcmul(scale_shift[..., 1], self, scale_shift[..., 0]).to(self.dtype)


def running_mean(moments: Tensor, running: Tensor, momentum: float, num_batches: Tensor | None = None, num_calls: int = 0) -> Tensor:
    """The running mean after this step: it follows the mean, which is that over the samples where each has its own."""
    return _lerp_to(running, _mean_over_samples(moments[..., 0]), _effective_momentum(momentum, num_batches, num_calls))


def running_var(moments: Tensor, running: Tensor, momentum: float, num_batches: Tensor | None = None, num_calls: int = 0) -> Tensor:
    """The running variance after this step: it follows the unbiased variance."""
    variance, count = moments[..., 1], moments[..., 2]
    return _lerp_to(running, _mean_over_samples(variance * (count / (count - 1))), _effective_momentum(momentum, num_batches, num_calls))


def _mean_over_samples(value: Tensor) -> Tensor:
    return value[0] if len(value) == 1 else value.mean(0)


def _effective_momentum(momentum: float, num_batches: Tensor | None, num_calls: int) -> float | Tensor:
    """The momentum; with a number of batches seen before this step that of a cumulative average."""
    return momentum if num_batches is None else 1.0 / (num_batches + num_calls).double()


def _lerp_to(running: Tensor, value: Tensor, momentum: float | Tensor) -> Tensor:
    wide = _widened(running)
    value = value.to(wide.dtype)
    found = torch.lerp(wide, value, momentum) if isinstance(momentum, float) else wide + momentum * (value - wide)
    return found.to(running.dtype)


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def channel_norm(self: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: Sequence[int]) -> Tensor:
    """Layer norm of each pixel's channels (Ba, Kiros, Hinton 2016; as ConvNeXt uses it)."""
    last, places = _move_dims_last(self, dims)
    return torch.nn.functional.layer_norm(last, last.shape[-len(places) :], weight, bias, eps).movedim(places, tuple(dims))


def channel_rms_norm(self: Tensor, weight: Tensor | None, eps: float | None, dims: Sequence[int]) -> Tensor:
    """RMS norm of each pixel's channels (Zhang and Sennrich, 2019)."""
    last, places = _move_dims_last(self, dims)
    return torch.nn.functional.rms_norm(last, last.shape[-len(places) :], weight, eps).movedim(places, tuple(dims))


def inverse_sqrt(self: Tensor, eps: float | None, dtype: str) -> Tensor:
    """One over the root of a mean of squares; without ``eps`` that of the squares' type is added, as torch does."""
    return torch.rsqrt(self + (torch.finfo(getattr(torch, dtype)).eps if eps is None else eps))


def _move_dims_last(value: Tensor, dims: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """The value with some dimensions moved behind all others, and where they are then."""
    places = tuple(range(-len(dims), 0))
    return value.movedim(tuple(dims), places), places


def weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """A weight in its own direction and a length of its own (Salimans and Kingma, 2016).

    Torch's fused form wants everything contiguous and sees to that with copies that a trace of contiguous tensors does not show; the
    gradients that arrive here are laid out otherwise.
    """
    dims = [other for other in range(v.dim()) if dim == -1 or other != dim % v.dim()]
    return v * (g / (v * v).sum(dims, keepdim=dim != -1).sqrt())


def contract_pixels(
    self: Tensor,
    other: Tensor,
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
    shape: Sequence[int],
    axes: int,
) -> Tensor:
    """The product of two images over all pixels.

    Args:
        self: ``[N, channels..., axes...]``.
        other: the same.
        left: the dimensions of channels of ``self`` that a product is made for each of, and the others.
        right: the same of ``other``.
        shape: of the result.
        axes: of the image.
    """
    return torch.bmm(_pixel_matrices(self, left, axes), _pixel_matrices(other, right, axes).transpose(1, 2)).view(tuple(shape))


def mix_channels(self: Tensor, matrix: Tensor, part: Sequence[Sequence[int]], channels: Sequence[int], axes: int) -> Tensor:
    """Every pixel's channels multiplied with a matrix of its sample, ``[N, groups, to, from, 1]``."""
    pixels = _pixel_matrices(self, part, axes)
    found = torch.bmm(matrix.reshape(pixels.shape[0], -1, pixels.shape[1]), pixels)
    return found.view(self.shape[0], *channels, *self.shape[self.dim() - axes :])


def _pixel_matrices(value: Tensor, part: Sequence[Sequence[int]], axes: int) -> Tensor:
    """An image as matrices of channels by pixels, one for each sample and group."""
    groups, rest = part
    moved = value.permute(0, *groups, *rest, *range(value.dim() - axes, value.dim()))
    count = math.prod(value.shape[dim] for dim in (0, *groups))
    return moved.reshape(count, math.prod(value.shape[dim] for dim in rest), -1)
