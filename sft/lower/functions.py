"""Our own operators on whole tensors, written in torch: what a node with a ``sft.`` target computes.

They are traced like ATen's, so that their derivatives are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.interval import Interval
from sft.analysis.operators.transposed import Spread

__all__ = ["FUNCTIONS"]


def moments(self: Tensor, groups: int, per_sample: bool, axes: int) -> Tensor:
    """Mean, biased variance and count of each group, ``[B, G, 3]``; in fp32 where the elements are of half precision."""
    self = _wide(self)
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


def root(self: Tensor, order: float) -> Tensor:
    """The ``order``-th root, whose derivative at zero counts as zero, as that of torch's norms and deviations does."""
    positive = torch.where(self == 0, torch.ones_like(self), self)
    found = torch.sqrt(positive) if order == 2 else torch.pow(positive, 1 / order)
    return torch.where(self == 0, torch.zeros_like(self), found)


def extremes(self: Tensor, largest: bool, axes: int) -> Tensor:
    """The largest or smallest element along the axes and how often it occurs, in fp64."""
    dims = list(range(self.dim() - axes, self.dim()))
    value = torch.amax(self, dims, True) if largest else torch.amin(self, dims, True)
    count = (self == value).sum(dims)
    return torch.stack([value.flatten(-axes).squeeze(-1).double(), count.double()], -1)


def peak(self: Tensor, axes: int) -> Tensor:
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
    return _towards(running, moments[..., 0].mean(0), _momentum(momentum, num_batches, num_calls))


def running_var(moments: Tensor, running: Tensor, momentum: float, num_batches: Tensor | None = None, num_calls: int = 0) -> Tensor:
    """The running variance after this step: it follows the unbiased variance."""
    variance, count = moments[..., 1], moments[..., 2]
    return _towards(running, (variance * (count / (count - 1))).mean(0), _momentum(momentum, num_batches, num_calls))


def _momentum(momentum: float, num_batches: Tensor | None, num_calls: int) -> float | Tensor:
    """The momentum; with a number of batches seen before this step that of a cumulative average."""
    return momentum if num_batches is None else 1.0 / (num_batches + num_calls).double()


def rearrange(self: Tensor, split: Sequence[int], order: Sequence[int], shape: Sequence[int], axes: int) -> Tensor:
    """The channels of each pixel split, put into another order, and merged: a view where they are only split, else a copy."""
    batch, extents = self.shape[0], self.shape[self.dim() - axes :]
    parts = self.reshape(batch, *split, *extents)
    moved_places = [place for place in order if split[place] != 1]
    if moved_places == sorted(moved_places) and len(shape) == len(split):
        return self.reshape(batch, *shape, *extents)
    first_axis = 1 + len(split)
    moved = parts.permute(0, *(1 + place for place in order), *range(first_axis, first_axis + axes))
    return moved.clone(memory_format=torch.contiguous_format).view(batch, *shape, *extents)


def aligned(self: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with its dimensions where those of an image are."""
    return self.reshape(tuple(shape))


def restored(self: Tensor, order: Sequence[int], shape: Sequence[int]) -> Tensor:
    """An image in the order of dimensions that the model has it in."""
    return self.permute(tuple(order)).clone(memory_format=torch.contiguous_format).view(tuple(shape))


def expanded(self: Tensor, channels: Sequence[int]) -> Tensor:
    """Channels repeated."""
    first_axis = 1 + len(channels)
    return self.expand(self.shape[0], *channels, *self.shape[first_axis:])


def folded(self: Tensor, factors: Sequence[int]) -> Tensor:
    """``factors`` rows and columns of an image as channels, ``[N, channels..., factors..., axes...]``."""
    first = self.dim() - len(factors)
    pieces = [piece for extent, factor in zip(self.shape[first:], factors, strict=True) for piece in (extent // factor, factor)]
    split = self.reshape(*self.shape[:first], *pieces)
    order = [*range(first), *range(first + 1, split.dim(), 2), *range(first, split.dim(), 2)]
    return split.permute(order).clone(memory_format=torch.contiguous_format)


def unfolded(self: Tensor, rest: Sequence[int], places: Sequence[Sequence[int]], factors: Sequence[int]) -> Tensor:
    """Channels as rows and columns.

    Args:
        self: ``[N, channels..., axes...]``.
        rest: the dimensions of channels that stay; others have one entry, and go.
        places: for each axis those that it takes in, the fastest last.
        factors: their product.
    """
    first = self.dim() - len(places)
    gone = {*range(1, first)} - {*rest, *(dim for taken in places for dim in taken)}
    order = [0, *sorted(gone), *rest, *(dim for axis, taken in enumerate(places) for dim in (first + axis, *taken))]
    grown = [extent * factor for extent, factor in zip(self.shape[first:], factors, strict=True)]
    moved = self.permute(order).clone(memory_format=torch.contiguous_format)
    return moved.view(self.shape[0], *([self.shape[dim] for dim in rest] or [1]), *grown)


def beside(self: Tensor, like: Tensor, split: Sequence[int], order: Sequence[int], axes: int) -> Tensor:
    """What varies along an image, as an image of that one's size."""
    part = self.view(tuple(split)).permute(tuple(order))
    first = like.dim() - axes
    return part.expand(like.shape[0], *part.shape[1:first], *like.shape[first:])


def contracted(
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
    return torch.bmm(_matrices(self, left, axes), _matrices(other, right, axes).transpose(1, 2)).view(tuple(shape))


def mixed(self: Tensor, matrix: Tensor, part: Sequence[Sequence[int]], channels: Sequence[int], axes: int) -> Tensor:
    """Every pixel's channels multiplied with a matrix of its sample, ``[N, groups, to, from, 1]``."""
    pixels = _matrices(self, part, axes)
    found = torch.bmm(matrix.reshape(pixels.shape[0], -1, pixels.shape[1]), pixels)
    return found.view(self.shape[0], *channels, *self.shape[self.dim() - axes :])


def _matrices(value: Tensor, part: Sequence[Sequence[int]], axes: int) -> Tensor:
    """An image as matrices of channels by pixels, one for each sample and group."""
    groups, rest = part
    moved = value.permute(0, *groups, *rest, *range(value.dim() - axes, value.dim()))
    count = math.prod(value.shape[dim] for dim in (0, *groups))
    return moved.reshape(count, math.prod(value.shape[dim] for dim in rest), -1)


def max_unpool1d(self: Tensor, indices: Tensor, output_size: Sequence[int], factors: Sequence[int] | None) -> Tensor:
    """``max_unpool1d`` as torch has it."""
    size = [*output_size, 1]
    out: Tensor = torch.ops.aten.max_unpool2d.default(self.unsqueeze(-1), indices.unsqueeze(-1), size)
    return out.squeeze(-1)


def border_rows(self: Tensor, low: int, high: int, axes: int) -> Tensor:
    """The last ``low`` rows of an image, then its first ``high``."""
    dim = self.dim() - axes
    return torch.cat([self.narrow(dim, self.shape[dim] - low, low), self.narrow(dim, 0, high)], dim)


def wrapped(self: Tensor, border: Tensor, low: int, high: int, axes: int) -> Tensor:
    """An image with such rows above and below it."""
    dim = self.dim() - axes
    return torch.cat([border.narrow(dim, 0, low), self, border.narrow(dim, low, high)], dim)


def kernel_rows(self: Tensor) -> Tensor:
    """A kernel ``[Cin, Cout, kh, ...]`` with its rows as channels, ``[Cin, kh * Cout, 1, ...]``."""
    inputs, channels, kernel, *rest = self.shape
    return self.movedim(2, 1).reshape(inputs, kernel * channels, 1, *rest)


def overlap_add(self: Tensor, bias: Tensor | None, groups: int, spread: Sequence[Sequence[Any]]) -> Tensor:
    """The products of :func:`kernel_rows` summed where they land on one row."""
    along = Spread(**{name: value for name, value in spread})
    batch, channels, rows, *rest = self.shape
    products = self.reshape(batch, groups, along.kernel, channels // along.kernel // groups, rows, *rest)
    extent = along.extent(rows)
    out = products.new_zeros((batch, groups, products.shape[3], extent, *rest))
    for tap, (first, count, start) in enumerate(along.landings(Interval(0, rows), Interval(0, extent))):
        if count:
            index = torch.arange(start, start + along.stride * (count - 1) + 1, along.stride, device=self.device)
            out = out.index_add(3, index, products[:, :, tap].narrow(3, first, count))
    out = out.reshape(batch, channels // along.kernel, extent, *rest)
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))


def im2col(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], channels: Sequence[int]) -> Tensor:
    """Windows of an image ``[N, channels..., axes...]``, their pixels as (the fastest) channels."""
    first = self.dim() - len(kernel_size)
    for axis, (kernel, step, spacing) in reversed(list(enumerate(zip(kernel_size, stride, dilation, strict=True)))):
        # Pixels of windows along later axes stand in front of the axes already.
        dim = axis - len(kernel_size)
        count = (self.shape[dim] - spacing * (kernel - 1) - 1) // step + 1
        places = [torch.arange(count, device=self.device) * step + spacing * tap for tap in range(kernel)]
        self = torch.stack([self.index_select(dim, place) for place in places], first)
    return self.reshape(self.shape[0], *channels, *self.shape[self.dim() - len(kernel_size) :])


def col2im(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Windows ``[N, C * kernel..., axes...]`` put back where they lie, and summed where they overlap."""
    batch, channels, *counts = self.shape
    self = self.reshape(batch, channels // math.prod(kernel_size), *kernel_size, *counts)
    for axis, (kernel, step, spacing) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        dim, count = axis - len(kernel_size), self.shape[axis - len(kernel_size)]
        extent = (count - 1) * step + spacing * (kernel - 1) + 1
        sums = self.new_zeros((*self.shape[:2], *self.shape[3:dim], extent, *self.shape[self.dim() + dim + 1 :]))
        for tap in range(kernel):
            places = torch.arange(count, device=self.device) * step + spacing * tap
            sums = sums.index_add(dim, places, self.select(2, tap))
        self = sums
    return self


def channel_norm(self: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: Sequence[int]) -> Tensor:
    """Layer norm of each pixel's channels (Ba, Kiros, Hinton 2016; as ConvNeXt uses it)."""
    last, places = _last(self, dims)
    return torch.nn.functional.layer_norm(last, last.shape[-len(places) :], weight, bias, eps).movedim(places, tuple(dims))


def channel_rms_norm(self: Tensor, weight: Tensor | None, eps: float | None, dims: Sequence[int]) -> Tensor:
    """RMS norm of each pixel's channels (Zhang and Sennrich, 2019)."""
    last, places = _last(self, dims)
    return torch.nn.functional.rms_norm(last, last.shape[-len(places) :], weight, eps).movedim(places, tuple(dims))


def inverse_root(self: Tensor, eps: float | None, dtype: str) -> Tensor:
    """One over the root of a mean of squares; without ``eps`` that of the squares' type is added, as torch does."""
    return torch.rsqrt(self + (torch.finfo(getattr(torch, dtype)).eps if eps is None else eps))


def _last(value: Tensor, dims: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
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


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number below ``minlength`` occurs; torch's own has as many entries as the largest number asks for."""
    places = self.reshape(-1).long()
    if weights is None:
        weights = torch.ones_like(places)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, places, weights.detach().reshape(-1))


def one_hot(self: Tensor, num_classes: int) -> Tensor:
    """Labels ``[N, 1, axes...]`` as channels of zeros and a one, ``[N, num_classes, axes...]``."""
    classes = torch.arange(num_classes, device=self.device).view(num_classes, *[1] * (self.dim() - 2))
    return (self == classes).to(self.dtype)


def filled(self: Tensor, channels: int, value: float, dtype: str) -> Tensor:
    """So many channels of one value, as large as an image."""
    return self.new_full((self.shape[0], channels, *self.shape[2:]), value, dtype=getattr(torch, dtype))


def cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> Tensor:
    """Cross-entropy of each pixel, ``[N, 1, axes...]``, given labels of that shape or probabilities of the classes."""
    labels = target if target.is_floating_point() else target.squeeze(1)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return torch.nn.functional.cross_entropy(self, labels, reduction="none", **options).unsqueeze(1)


def nll(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The negative of the channel that each pixel's label names, ``[N, 1, axes...]``."""
    found = torch.nn.functional.nll_loss(self, target.squeeze(1), weight=weight, ignore_index=ignore_index, reduction="none")
    return found.unsqueeze(1)


def label_weight(self: Tensor, weight: Tensor | None, ignore_index: int, dtype: str) -> Tensor:
    """What each pixel's label weighs in a mean, ``[N, 1, axes...]``: nothing where it is ignored."""
    counts = self != ignore_index
    kind = getattr(torch, dtype)
    if weight is None:
        return counts.to(kind)
    return torch.where(counts, weight.to(kind)[torch.where(counts, self, torch.zeros_like(self))], torch.zeros((), dtype=kind))


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``src`` in the shape and element type of ``self``: what an assignment in place comes to."""
    return src.to(self.dtype).expand_as(self).clone()


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _towards(running: Tensor, value: Tensor, momentum: float | Tensor) -> Tensor:
    wide = _wide(running)
    return (wide + momentum * (value.to(wide.dtype) - wide)).to(running.dtype)


#: By target.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sft.moments": moments,
    "sft.moment_mean": moment_mean,
    "sft.variance": variance,
    "sft.root": root,
    "sft.extremes": extremes,
    "sft.peak": peak,
    "sft.logsumexp": logsumexp,
    "sft.scale_shift": scale_shift,
    "sft.affine": affine,
    "sft.running_mean": running_mean,
    "sft.running_var": running_var,
    "sft.rearrange": rearrange,
    "sft.aligned": aligned,
    "sft.restored": restored,
    "sft.channel_norm": channel_norm,
    "sft.channel_rms_norm": channel_rms_norm,
    "sft.inverse_root": inverse_root,
    "sft.expanded": expanded,
    "sft.folded": folded,
    "sft.unfolded": unfolded,
    "sft.contracted": contracted,
    "sft.mixed": mixed,
    "sft.beside": beside,
    "sft.max_unpool1d": max_unpool1d,
    "sft.border_rows": border_rows,
    "sft.wrapped": wrapped,
    "sft.kernel_rows": kernel_rows,
    "sft.overlap_add": overlap_add,
    "sft.im2col": im2col,
    "sft.col2im": col2im,
    "aten.bincount.default": bincount,
    "sft.one_hot": one_hot,
    "sft.filled": filled,
    "sft.cross_entropy": cross_entropy,
    "sft.nll": nll,
    "sft.label_weight": label_weight,
    "aten._weight_norm.default": weight_norm,
    "aten.copy.default": copy,
}
