"""Statistics and products of channels: moments, norms, running statistics, minima and maxima, contractions over pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sft.common.torch_internals import add_number, copy_tensors
from sft.lower.custom_ops.row_reductions import row_moments, row_moments_bytes, sum_rows, sum_rows_bytes

__all__ = [
    "affine",
    "affine_channels",
    "affine_gradient_sums",
    "argmax",
    "axis_minmax",
    "axis_sum",
    "biased_var_mean",
    "channel_norm",
    "channel_rms_norm",
    "channel_sums",
    "channel_sums_bytes",
    "channel_var_mean",
    "channel_var_mean_bytes",
    "contract_pixels",
    "folded_bias",
    "folded_weight",
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
    "update_counters",
    "update_running_statistics",
    "variance",
    "weight_norm",
]

aten = torch.ops.aten

#: Elements from which sums by wide rows are faster, and take less memory.
_LEAST_ELEMENTS = 2**21


def moments(self: Tensor, groups: int, per_sample: bool, axes: int) -> Tensor:
    """Mean, biased variance and count of each group, ``[B, G, 3]``; in fp32 for elements of half precision."""
    self = _widened(self)
    grouped = self.reshape(self.shape[0], groups, -1)
    dims = [2] if per_sample else [0, 2]
    variance, mean = torch.var_mean(grouped, dims, correction=0)
    count = torch.full_like(mean, grouped.numel() // mean.numel())
    stacked = torch.stack([mean, variance, count], -1)
    return stacked if per_sample else stacked.unsqueeze(0)


def moment_mean(moments: Tensor, shape: Sequence[int]) -> Tensor:
    """The means of moments."""
    return moments[..., 0].reshape(tuple(shape))


def variance(moments: Tensor, correction: float, shape: Sequence[int]) -> Tensor:
    """The variances of moments, with ``correction`` degrees of freedom subtracted from the count."""
    count = moments[..., 2].detach()
    return (moments[..., 1] * (count / (count - correction).clamp_min(0.0))).reshape(tuple(shape))


def nth_root(self: Tensor, order: float) -> Tensor:
    """The ``order``-th root, with derivative zero at zero, as torch's norms and standard deviations have."""
    positive = torch.where(self == 0, torch.ones_like(self), self)
    root = torch.sqrt(positive) if order == 2 else torch.pow(positive, 1 / order)
    return torch.where(self == 0, torch.zeros_like(self), root)


def scale_shift(moments: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int, channels: int, eps: float) -> Tensor:
    """Scale and shift of a norm, ``[B, C, 1, ..., 1, 2]`` with a 1 for each axis of the image."""
    batch, groups, _ = moments.shape
    by_channel = moments.unsqueeze(2).expand(batch, groups, channels // groups, 3).reshape(batch, channels, 3)
    mean, variance = by_channel[..., 0], by_channel[..., 1]
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return torch.stack([scale, shift], -1).view(batch, channels, *[1] * axes, 2)


def folded_weight(self: Tensor, norm_weight: Tensor | None, running_var: Tensor, eps: float, dtype: str) -> Tensor:
    """The weight of a convolution times the scale of the norm that follows it; computed in fp32 for elements of half precision."""
    scale = _frozen_scale(norm_weight, running_var, eps)
    return (_widened(self) * scale.view(-1, *[1] * (self.dim() - 1))).to(getattr(torch, dtype))


def folded_bias(
    self: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    dtype: str,
) -> Tensor:
    """The bias of a convolution after the norm that follows it; ``dtype`` is that of the convolution."""
    mean = _widened(running_mean)
    centered = -mean if self is None else _widened(self) - mean
    shift = centered * _frozen_scale(norm_weight, running_var, eps)
    return (shift if norm_bias is None else shift + _widened(norm_bias)).to(getattr(torch, dtype))


def _frozen_scale(weight: Tensor | None, running_var: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(_widened(running_var) + eps)
    return scale if weight is None else scale * _widened(weight)


def affine(self: Tensor, scale_shift: Tensor) -> Tensor:
    """``self * scale + shift``."""
    return torch.addcmul(scale_shift[..., 1], self, scale_shift[..., 0]).to(self.dtype)


def affine_channels(self: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """``self * scale + shift`` in the type of the image, in one pass.

    Composed of operators, the image is cast to fp32, mapped, and rounded: three passes. ATen's norm in evaluation mode takes
    images and coefficients of these types. With mean 0, variance 0 and ``eps`` 1 it is ``(x - 0) * rsqrt(0 + 1) * weight + bias``, computed
    in fp32 and rounded once.

    Args:
        self: image ``[N, C, ...]`` in half precision.
        scale: ``[1, C, 1, ...]`` in fp32.
        shift: the same, or ``None`` for 0.
    """
    zeros = torch.zeros_like(scale).flatten()
    bias = None if shift is None else shift.flatten()
    result: Tensor = aten._native_batch_norm_legit_no_training.default(self, scale.flatten(), bias, zeros, zeros, 0.0, 1.0)[0]
    return result


def affine_gradient_sums(grad: Tensor, self: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of ``grad * self`` and of ``grad`` for each channel, ``[1, C, 1, ...]`` in fp32: the gradients of scale and shift.

    Args:
        grad: gradient of the map's result, ``[N, C, ...]`` in half precision.
        self: the image, in the same type and layout.
    """
    zeros = torch.zeros(self.shape[1], dtype=torch.float32, device=self.device)
    saved = torch.empty(0, dtype=torch.float32, device=self.device)
    arguments = (grad, self, zeros, zeros, zeros, saved, saved, False, 1.0, [False, True, True])
    _, products, sums = aten.native_batch_norm_backward.default(*arguments)
    shape = (1, -1, *[1] * (self.dim() - 2))
    return products.view(shape), sums.view(shape)


def running_mean(moments: Tensor, running: Tensor, momentum: float, num_batches: Tensor | None = None, num_calls: int = 0) -> Tensor:
    """The running mean after this step; it follows the mean, averaged over samples if each has its own."""
    return _lerp_to(running, _mean_over_samples(moments[..., 0]), _effective_momentum(momentum, num_batches, num_calls))


def running_var(moments: Tensor, running: Tensor, momentum: float, num_batches: Tensor | None = None, num_calls: int = 0) -> Tensor:
    """The running variance after this step; it follows the unbiased variance."""
    variance, count = moments[..., 1], moments[..., 2]
    return _lerp_to(running, _mean_over_samples(variance * (count / (count - 1))), _effective_momentum(momentum, num_batches, num_calls))


def update_running_statistics(
    targets: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor], running: Sequence[Tensor], momentum: float
) -> None:
    """Write the next running statistics of several norms, as :func:`running_mean` and :func:`running_var` compute each of them.

    Args:
        targets: vectors for the next running means, then for the next running variances.
        means: moments ``[1, C, 3]`` of the running means.
        variances: moments of the running variances.
        running: present running means and running variances.
        momentum: weight of the moments.
    """
    statistics = []
    if means:
        statistics.append(torch.cat([moments[0].t() for moments in means], 1)[0])
    if variances:
        _, biased, counts = torch.cat([moments[0].t() for moments in variances], 1)
        statistics.append(biased * (counts / (counts - 1)))
    updated = _lerp_to(torch.cat([*running]), torch.cat(statistics), momentum)
    copy_tensors(targets, updated.split([len(target) for target in targets]))


def update_counters(targets: Sequence[Tensor], counters: Sequence[Tensor], amount: float) -> None:
    """Write counters plus an amount into ``targets``."""
    copy_tensors(targets, counters)
    add_number(targets, amount)


def channel_sums(self: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums over all dimensions but the channels, of images channels last, by wide rows if they have many elements.

    Few elements are summed at once, as each call takes time on the host.
    """
    channels = self.shape[1]
    rows = self.movedim(1, -1)
    if not rows.is_contiguous() or rows.numel() < _LEAST_ELEMENTS:
        return self.sum([0, *range(2, self.dim())], dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)  # half precision would round each column
    return sum_rows(rows.view(-1, channels), wide).to(dtype)


def channel_sums_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Most bytes that :func:`channel_sums` takes besides its result, for an image of this shape."""
    wide, channels = torch.promote_types(dtype, torch.float32), shape[1]
    rounded_bytes = channels * wide.itemsize if wide != dtype else 0
    return sum_rows_bytes(math.prod(shape) // max(1, channels), channels, wide.itemsize) + rounded_bytes


def biased_var_mean(self: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Variance, divided by the number of elements, and mean."""
    return torch.var_mean(self, dims, correction=0)


def channel_var_mean(self: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Biased variance and mean of each channel, of images channels last, by wide rows."""
    rows = self.movedim(1, -1)
    if not rows.is_contiguous():
        variance, mean = torch.var_mean(self, [0, *range(2, self.dim())], correction=0)
    else:
        variance, mean = row_moments(rows.view(-1, self.shape[1]))
    return variance.view(shape), mean.view(shape)


def channel_var_mean_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Most bytes that :func:`channel_var_mean` takes besides its results, for an image of this shape."""
    return row_moments_bytes(math.prod(shape) // max(1, shape[1]), shape[1], dtype.itemsize)


def channel_norm(self: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: Sequence[int]) -> Tensor:
    """Layer norm of each pixel's channels (Ba, Kiros, Hinton 2016; as ConvNeXt uses it)."""
    moved, last_dims = _move_dims_last(self, dims)
    return torch.nn.functional.layer_norm(moved, moved.shape[-len(dims) :], weight, bias, eps).movedim(last_dims, tuple(dims))


def channel_rms_norm(self: Tensor, weight: Tensor | None, eps: float | None, dims: Sequence[int]) -> Tensor:
    """RMS norm of each pixel's channels (Zhang and Sennrich, 2019)."""
    moved, last_dims = _move_dims_last(self, dims)
    return torch.nn.functional.rms_norm(moved, moved.shape[-len(dims) :], weight, eps).movedim(last_dims, tuple(dims))


def inverse_sqrt(self: Tensor, eps: float | None, dtype: str) -> Tensor:
    """Reciprocal square root of a mean of squares plus ``eps`` (by default the machine epsilon of ``dtype``, as in torch)."""
    return torch.rsqrt(self + (torch.finfo(getattr(torch, dtype)).eps if eps is None else eps))


def weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """Weight normalisation: direction ``v``, length ``g`` (Salimans and Kingma, 2016).

    Torch's fused form copies non-contiguous operands. A trace of contiguous tensors would not show these copies, but gradients in programs
    have other layouts.
    """
    dims = [index for index in range(v.dim()) if dim == -1 or index != dim % v.dim()]
    return v * (g / (v * v).sum(dims, keepdim=dim != -1).sqrt())


def minmax(self: Tensor, largest: bool, axes: int) -> Tensor:
    """The largest or smallest element along the axes, and its number of occurrences, in fp64."""
    dims = list(range(self.dim() - axes, self.dim()))
    value = torch.amax(self, dims, True) if largest else torch.amin(self, dims, True)
    count = (self == value).sum(dims)
    return torch.stack([value.flatten(-axes).squeeze(-1).double(), count.double()], -1)


def axis_sum(self: Tensor, reduced: Sequence[int], divides: bool, keepdim: bool, axes: int) -> Tensor:
    """Sum, or (``divides``) mean, over some of the axes."""
    dims = [self.dim() - axes + axis for axis in reduced]
    return self.mean(dims, keepdim) if divides else self.sum(dims, keepdim)


def axis_minmax(self: Tensor, largest: bool, reduced: Sequence[int], axes: int) -> Tensor:
    """The largest or smallest element along some of the axes, and its number of occurrences, in fp64."""
    dims = [self.dim() - axes + axis for axis in reduced]
    value = torch.amax(self, dims, True) if largest else torch.amin(self, dims, True)
    count = (self == value).sum(dims)
    return torch.stack([value.squeeze(dims).double(), count.double()], -1)


def argmax(self: Tensor, axes: int) -> Tensor:
    """The largest element along the axes, and its first index in row-major order, in fp64."""
    value, index = torch.max(self.flatten(-axes), -1)
    return torch.stack([value.double(), index.double()], -1)


def logsumexp(self: Tensor, axes: int) -> Tensor:
    """The logarithm of the sum of exponentials along the axes."""
    return torch.logsumexp(self, list(range(self.dim() - axes, self.dim())))


def contract_pixels(
    self: Tensor,
    other: Tensor,
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
    shape: Sequence[int],
    axes: int,
) -> Tensor:
    """Contraction of two images over all pixels, for each sample and group.

    Args:
        self: ``[N, channels..., axes...]``.
        other: ``[N, channels..., axes...]``.
        left: the group dimensions and the free dimensions among the channels of ``self``.
        right: the same for ``other``.
        shape: shape of the result for a sample.
        axes: number of axes of the image.
    """
    product = torch.bmm(_pixel_matrices(self, left, axes), _pixel_matrices(other, right, axes).transpose(1, 2))
    return product.view(self.shape[0], *shape)


def mix_channels(self: Tensor, matrix: Tensor, part: Sequence[Sequence[int]], channels: Sequence[int], axes: int) -> Tensor:
    """Each pixel's channels multiplied with a matrix of its sample, ``[N, groups, to, from, 1]``."""
    pixels = _pixel_matrices(self, part, axes)
    product = torch.bmm(matrix.reshape(pixels.shape[0], -1, pixels.shape[1]), pixels)
    return product.view(self.shape[0], *channels, *self.shape[self.dim() - axes :])


def _mean_over_samples(value: Tensor) -> Tensor:
    return value[0] if len(value) == 1 else value.mean(0)


def _effective_momentum(momentum: float, num_batches: Tensor | None, num_calls: int) -> float | Tensor:
    """The momentum; with a number of earlier batches, that of a cumulative average."""
    return momentum if num_batches is None else 1.0 / (num_batches + num_calls).double()


def _lerp_to(running: Tensor, value: Tensor, momentum: float | Tensor) -> Tensor:
    """``running + momentum * (value - running)``, by single operations: ``torch.lerp`` rounds the last elements of a vector differently."""
    wide = _widened(running)
    return (wide + momentum * (value.to(wide.dtype) - wide)).to(running.dtype)


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _move_dims_last(value: Tensor, dims: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """The value with some dimensions moved to the end, and their new indices."""
    last_dims = tuple(range(-len(dims), 0))
    return value.movedim(tuple(dims), last_dims), last_dims


def _pixel_matrices(value: Tensor, dims: Sequence[Sequence[int]], axes: int) -> Tensor:
    """An image as matrices of channels by pixels, one for each sample and group; ``dims`` are group and free dimensions of channels."""
    groups, free = dims
    moved = value.permute(0, *groups, *free, *range(value.dim() - axes, value.dim()))
    count = math.prod(value.shape[dim] for dim in (0, *groups))
    return moved.reshape(count, math.prod(value.shape[dim] for dim in free), -1)
