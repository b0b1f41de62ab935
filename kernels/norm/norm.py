"""Norms over the image, strip by strip: batch, group and instance norm, with affine map, residual and ReLU fused.

The forward pass reads the image twice. First every strip is merged into ``MomentSlots`` (count, mean and sum of squared distances
of each channel); ``MomentSlots.total`` makes the ``NormStatistics`` of each group of channels of them. Then ``normalize`` is
elementwise. The backward pass does the same the other way round: ``NormGradientSlots`` of the output's gradient, strip by strip, whose
``total`` gives the gradients of weight and bias and what ``normalize_gradient`` takes off everywhere. With statistics that
are not the image's own (a norm in evaluation mode) the first of each pair falls away.

Every element of the image must come once, so a strip is given without its halo, as a view; batch norm has one group for
each channel and all samples together, group norm has groups of channels of each sample, instance norm a group for each channel
of each sample. The slots that strips are added to are fp64: they are few, and an image has many strips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import empty_channels_last, uses_triton
from sft.kernels.geometry import check_buffer, raise_problems
from sft.kernels.norm.norm_reference import (
    reference_moments,
    reference_norm_gradient,
    reference_norm_sums,
    reference_normalize,
    relu_gradient,
)

__all__ = [
    "MomentSlots",
    "NormGradientSlots",
    "NormGradients",
    "NormStatistics",
    "add_moments",
    "add_norm_sums",
    "norm2d",
    "normalize",
    "normalize_gradient",
]

_NO_STRIP = "these tensors are not a strip of this norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStatistics:
    """Of each group of channels, of each sample or of all together: ``[samples or 1, groups]``."""

    #: elements of a group, int64
    counts: Tensor
    mean: Tensor
    #: mean squared distance from the mean, fp64
    variance: Tensor

    @property
    def unbiased(self) -> Tensor:
        """The variance that running statistics take: the sum of squared distances over one less than the count."""
        return self.variance * self.counts / (self.counts - 1)

    def rstd(self, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """One over the standard deviation, of the variance plus ``eps``."""
        return (self.variance + eps).rsqrt().to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSlots:
    """Where strips are merged: slots ``[splits, samples or 1, C]``, contiguous."""

    #: elements, int64
    counts: Tensor
    #: fp64
    means: Tensor
    #: sums of squared distances from the mean, fp64
    squares: Tensor

    @classmethod
    def zeros(
        cls, num_channels: int, *, device: torch.device | str, num_samples: int | None = None, num_splits: int | None = None
    ) -> MomentSlots:
        """Moments of nothing.

        Args:
            num_samples: each sample has statistics of its own; None for one of all samples together.
            num_splits: how many sums run beside each other; the bits of the result depend on it (default: by the layer).
        """
        means = _slots(num_channels, device, num_samples, num_splits)
        return cls(counts=torch.zeros_like(means, dtype=torch.int64), means=means, squares=torch.zeros_like(means))

    def total(self, num_groups: int | None = None) -> NormStatistics:
        """The statistics of ``num_groups`` groups of equally many neighbouring channels (default: of each channel).

        All parts are merged at once in fp64: around the mean of means, the squares of a part are its own and its distance's.
        """
        num_splits, num_samples, num_channels = self.means.shape
        num_groups = num_channels if num_groups is None else num_groups
        _check_groups(num_channels, num_groups)
        shape = (num_splits, num_samples, num_groups, num_channels // num_groups)
        counts, means, squares = (part.view(shape) for part in (self.counts, self.means, self.squares))
        count = counts.sum((0, 3))
        mean = (counts * means).sum((0, 3)) / count
        spread = squares + counts * (means - mean[:, :, None]).square()
        return NormStatistics(counts=count, mean=mean, variance=spread.sum((0, 3)) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGradients:
    """What the sums over the image come to."""

    #: fp64 ``[C]``
    weight: Tensor
    #: fp64 ``[C]``
    bias: Tensor
    #: what ``normalize_gradient`` takes off: everywhere, and for each unit of the normalised input; fp64 ``[samples or 1, groups]``
    back: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGradientSlots:
    """Where strips add up what the backward pass of a norm needs of the image: fp64 slots ``[splits, samples or 1, C]``, contiguous."""

    #: of the output's gradient
    first: Tensor
    #: of its product with the normalised input
    second: Tensor

    @classmethod
    def zeros(
        cls, num_channels: int, *, device: torch.device | str, num_samples: int | None = None, num_splits: int | None = None
    ) -> NormGradientSlots:
        """Empty sums; arguments as for ``MomentSlots.zeros``."""
        first = _slots(num_channels, device, num_samples, num_splits)
        return cls(first=first, second=torch.zeros_like(first))

    def total(self, statistics: NormStatistics, weight: Tensor | None) -> NormGradients:
        """The gradients; ``statistics`` and ``weight`` as in the forward pass."""
        first, second = self.first.sum(0), self.second.sum(0)
        parts = []
        for part in (first, second):
            weighted = part if weight is None else part * weight.double()
            parts.append(weighted.view(*statistics.counts.shape, -1).sum(2) / statistics.counts)
        return NormGradients(weight=second.sum(0), bias=first.sum(0), back=(parts[0], parts[1]))


def add_moments(x: Tensor, *, into: MomentSlots) -> None:
    """Merge a strip into the moments, in place.

    Args:
        x: ``[N, C, rows, columns]``, channels-last, every element of it part of the image and in no other strip.

    Raises:
        InputError: the moments are for other channels or samples.

    >>> x = torch.randn(2, 3, 8, 5).to(memory_format=torch.channels_last)
    >>> moments = MomentSlots.zeros(3, device="cpu")
    >>> for strip in x.split(3, dim=2):
    ...     add_moments(strip, into=moments)
    >>> torch.allclose(moments.total().mean.float(), x.mean((0, 2, 3)))
    True
    """
    problems: list[str] = []
    check_buffer("x", x, x.shape[0], x.shape[1], (x.shape[2], x.shape[3]), problems)
    each_sample = _each_sample(x, into.means, problems)
    raise_problems(_NO_STRIP, problems)
    if not x.numel():
        return
    if uses_triton(x):
        from sft.kernels.norm.norm_triton import launch_moments  # not above: it imports Triton

        launch_moments(x, into.counts, into.means, into.squares)
        return
    count, mean, squares = reference_moments(x, each_sample=each_sample)
    held, held_mean = into.counts[0].clone(), into.means[0].clone()
    share, delta = count / (held + count).double(), mean - held_mean
    into.counts[0] += count
    into.means[0] += delta * share
    into.squares[0] += squares + delta * delta * (held * share)


def normalize(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``activation((x - mean) * rstd * weight + bias + residual)`` of a strip.

    Args:
        x: ``[N, C, rows, columns]``, channels-last.
        mean: fp32 (fp64 for an fp64 ``x``), ``[N or 1, groups]``, contiguous.
        rstd: one over the standard deviation, like ``mean``.
        weight, bias: ``[C]``.
        residual: added before the activation; like ``x``.
        out: where to write, like ``x``; may be ``x`` itself.

    Returns:
        Like ``x``, channels-last.

    Raises:
        InputError: tensors of different shapes, dtypes or layouts.
    """
    problems: list[str] = []
    out = empty_channels_last(x, tuple(x.shape)) if out is None else out
    _check_images(x, [("residual", residual), ("out", out)], problems)
    mean, rstd = _check_statistics(x, mean, rstd, problems)
    _check_vectors(x, [("weight", weight), ("bias", bias)], problems)
    raise_problems(_NO_STRIP, problems)
    if not x.numel():
        return out
    if uses_triton(x):
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        launch_normalize(x, mean, rstd, weight, bias, residual, out, relu=relu)
        return out
    return out.copy_(reference_normalize(x, mean, rstd, weight, bias, residual, relu=relu))


def add_norm_sums(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, into: NormGradientSlots, output: Tensor | None = None
) -> None:
    """Add a strip's share to the sums, in place.

    Args:
        gradient: of the output, like ``x``.
        x, mean, rstd: as for ``normalize``.
        output: of the activation, where that was ReLU: the gradient counts only where it is above zero.

    Raises:
        InputError: as ``normalize``; or the sums are for other channels or samples.
    """
    problems: list[str] = []
    _check_images(x, [("gradient", gradient), ("output", output)], problems)
    mean, rstd = _check_statistics(x, mean, rstd, problems)
    each_sample = _each_sample(x, into.first, problems)
    if not problems and each_sample != (mean.shape[0] > 1) and x.shape[0] > 1:
        problems.append("the sums are of each sample and the statistics of all together, or the other way round; make both alike")
    raise_problems(_NO_STRIP, problems)
    if not x.numel():
        return
    if uses_triton(x):
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        launch_norm_sums(gradient, output, x, mean, rstd, into.first, into.second)
        return
    first, second = reference_norm_sums(gradient, output, x, mean, rstd, each_sample=each_sample)
    into.first[0] += first
    into.second[0] += second


def normalize_gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    weight: Tensor | None = None,
    output: Tensor | None = None,
    back: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of a norm's input: ``rstd * (weight * g - back[0] - back[1] * xhat)``, xhat being the normalised ``x``.

    Args:
        gradient, x, mean, rstd, output: as for ``add_norm_sums``.
        weight: as for ``normalize``.
        back: of ``NormGradientSlots.total``; None if mean and rstd are not statistics of this image.
        out: where to write, like ``x``; may be ``gradient`` itself.

    Returns:
        Like ``x``, channels-last.

    Raises:
        InputError: as ``normalize``.
    """
    problems: list[str] = []
    out = empty_channels_last(x, tuple(x.shape)) if out is None else out
    _check_images(x, [("gradient", gradient), ("output", output), ("out", out)], problems)
    mean, rstd = _check_statistics(x, mean, rstd, problems)
    _check_vectors(x, [("weight", weight)], problems)
    if back is not None and any(value.shape != mean.shape for value in back):
        problems.append(
            f"back has shapes {[tuple(value.shape) for value in back]}, the statistics {tuple(mean.shape)}; give what total made"
        )
    raise_problems(_NO_STRIP, problems)
    if back is not None:
        back = (back[0].to(mean.dtype).contiguous(), back[1].to(mean.dtype).contiguous())
    if not x.numel():
        return out
    if uses_triton(x):
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        launch_norm_gradient(gradient, output, x, mean, rstd, weight, back, out)
        return out
    return out.copy_(reference_norm_gradient(gradient, output, x, mean, rstd, weight, back))


def norm2d(
    x: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    num_groups: int | None = None,
    eps: float = 1e-5,
    relu: bool = False,
) -> Tensor:
    """A norm of a whole image by its own statistics, differentiable once: all of the above for a single strip.

    Args:
        num_groups: groups of channels of each sample (as many as channels: instance norm); None for batch norm.
        eps: added to the variance.

    >>> x = torch.randn(2, 4, 5, 3).to(memory_format=torch.channels_last)
    >>> torch.allclose(norm2d(x, num_groups=2), torch.nn.functional.group_norm(x, 2), atol=1e-6)
    True
    """
    if num_groups is not None:
        _check_groups(x.shape[1], num_groups)
    result: Tensor = _Norm.apply(x, weight, bias, residual, num_groups, eps, relu)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


class _Norm(torch.autograd.Function):
    """Saves the input and, behind a ReLU, the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        num_groups: int | None,
        eps: float,
        relu: bool,
    ) -> Tensor:
        moments = MomentSlots.zeros(x.shape[1], device=x.device, num_samples=None if num_groups is None else x.shape[0])
        add_moments(x, into=moments)
        statistics = moments.total(num_groups)
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = statistics.mean.to(wide), statistics.rstd(eps, wide)
        y = normalize(x, mean, rstd, weight=weight, bias=bias, residual=residual, relu=relu)
        ctx.save_for_backward(x, weight, mean, rstd, statistics.counts, statistics.variance, y if relu else None)
        ctx.num_groups, ctx.bias = num_groups, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, counts, variance, output = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        sums = NormGradientSlots.zeros(x.shape[1], device=x.device, num_samples=None if ctx.num_groups is None else x.shape[0])
        add_norm_sums(gradient, x, mean, rstd, into=sums, output=output)
        total = sums.total(NormStatistics(counts=counts, mean=mean, variance=variance), weight)
        dx = normalize_gradient(gradient, x, mean, rstd, weight=weight, output=output, back=total.back) if ctx.needs_input_grad[0] else None
        dw = total.weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = total.bias.to(ctx.bias) if ctx.needs_input_grad[2] else None
        dr = relu_gradient(gradient, output) if ctx.needs_input_grad[3] else None
        return dx, dw, db, dr, None, None, None


def _slots(num_channels: int, device: torch.device | str, num_samples: int | None, num_splits: int | None) -> Tensor:
    num_keys = 1 if num_samples is None else num_samples
    if num_splits is None:
        num_splits = max(8, 512 // max(1, num_keys * (-(-num_channels // 64))))  # enough programs for any GPU, and not many slots
    if num_splits < 1:
        raise InputError(f"slots need at least one split, got {num_splits}")
    return torch.zeros(num_splits, num_keys, num_channels, dtype=torch.float64, device=device)


def _check_groups(num_channels: int, num_groups: int) -> None:
    if num_groups < 1 or num_channels % num_groups:
        raise InputError(f"{num_channels} channels do not make {num_groups} groups; choose a number that divides them")


def _each_sample(x: Tensor, slots: Tensor, problems: list[str]) -> bool:
    """Whether the slots are of each sample."""
    num_samples = slots.shape[1]
    if slots.shape[2] != x.shape[1] or num_samples not in (1, x.shape[0]):
        problems.append(
            f"the slots are for {num_samples} samples of {slots.shape[2]} channels, x has {tuple(x.shape[:2])}; make them for x"
        )
    return num_samples > 1 or x.shape[0] == 1


def _check_images(x: Tensor, others: list[tuple[str, Tensor | None]], problems: list[str]) -> None:
    """Add what keeps these from being images like ``x``."""
    for name, tensor in [("x", x), *others]:
        if tensor is None:
            continue
        check_buffer(name, tensor, x.shape[0], x.shape[1], (x.shape[2], x.shape[3]), problems)
        if tensor.dtype != x.dtype:
            problems.append(f"{name} is {tensor.dtype}, x is {x.dtype}; cast one")


def _check_statistics(x: Tensor, mean: Tensor, rstd: Tensor, problems: list[str]) -> tuple[Tensor, Tensor]:
    """The statistics, contiguous; or add what keeps them from being statistics of ``x``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        if tensor.dim() != 2 or tensor.shape[0] not in (1, x.shape[0]) or not tensor.shape[1] or x.shape[1] % tensor.shape[1]:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, x has {tuple(x.shape[:2])}; give [N or 1, groups of equal size]")
        elif tensor.shape != mean.shape or tensor.dtype != wide:
            problems.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, mean {tuple(mean.shape)}; give both as {wide} in one shape")
    return mean.contiguous(), rstd.contiguous()


def _check_vectors(x: Tensor, vectors: list[tuple[str, Tensor | None]], problems: list[str]) -> None:
    for name, tensor in vectors:
        if tensor is not None and (tuple(tensor.shape) != (x.shape[1],) or not tensor.is_contiguous()):
            problems.append(f"{name} has shape {tuple(tensor.shape)}, x has {x.shape[1]} channels; give a contiguous value for each")
