"""Kernel calls of norms.

A kernel takes the statistics of a norm as a mean and a variance of each group, or as a mean and a reciprocal standard deviation (rstd). A
norm over the image with known statistics is an affine map of each channel: the same kernel without a mean.

``num_keys`` is the number of rows of statistics: the number of samples if each sample has its own, 1 if all samples share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sft.backends.gradient_sums import GradientSumsCall
from sft.backends.kernel_call import KernelCall, replayable, to_channels_last

__all__ = ["AffineCall", "FrozenNormCall", "MomentsCall", "num_norm_splits"]

#: enough programs for a current GPU
_NUM_PROGRAMS = 512
#: pixels of a program at least, and channels of a program
_MIN_PIXELS, _CHANNELS = 512, 64


def num_norm_splits(num_keys: int, num_channels: int, num_pixels: int) -> int:
    """Number of splits of the pixels, each with its own sums.

    >>> num_norm_splits(1, 64, 2**22), num_norm_splits(1, 512, 2**22), num_norm_splits(2, 8, 1024)
    (512, 64, 2)
    """
    return max(1, min(_NUM_PROGRAMS // max(1, num_keys * -(-num_channels // _CHANNELS)), num_pixels // _MIN_PIXELS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormSumsCall(GradientSumsCall):
    """Kernel call of a map of each channel; the gradients of its parameters are sums over pixels.

    Attributes:
        relu: true if a ReLU after it is fused.
        num_splits: splits of the sums in the backward pass.
    """

    relu: bool = False
    num_splits: int = 1

    def slots(self, workspace: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slots of weight and bias, or of scale and shift: of the gradient times the image, and of the gradient."""
        first, second = workspace.view(2, self.num_splits, -1).unbind()
        return second, first

    def _sum(
        self,
        workspace: Tensor,
        gradient: Tensor,
        x: Tensor,
        statistics: tuple[Tensor, Tensor] | None,
        output: Tensor | None,
        *,
        num_keys: int = 1,
        eps: float | None = None,
    ) -> None:
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        first, second = workspace.view(2, self.num_splits, num_keys, -1).unbind()
        gradient, output = to_channels_last(gradient), to_channels_last(output)
        mean, rstd = (None, None) if statistics is None else statistics
        launch_norm_sums(gradient, output, to_channels_last(x), mean, rstd, first, second, eps=eps, accumulate=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenNormCall(_NormSumsCall):
    """Batch norm in evaluation mode.

    Attributes:
        eps: added to the variance.
    """

    eps: float

    @replayable
    def run(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        residual: Tensor | None,
    ) -> None:
        """Write ``relu(norm(x) + residual)``."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        residual = to_channels_last(residual)
        launch_normalize(to_channels_last(x), mean, variance, weight, bias, residual, out, relu=self.relu, eps=self.eps)

    @replayable
    def differentiate(self, out: Tensor, gradient: Tensor, weight: Tensor | None, variance: Tensor, output: Tensor | None) -> None:
        """Write the input's gradient."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        gradient, output = to_channels_last(gradient), to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, None, variance, weight, None, out, eps=self.eps)

    @replayable
    def sum(self, workspace: Tensor, gradient: Tensor, x: Tensor, mean: Tensor, variance: Tensor, output: Tensor | None) -> None:
        """Sum the gradients of bias and weight, split by split, in an fp64 workspace ``[2 * splits * C]``."""
        if self.begin_launch(workspace):
            self._sum(workspace, gradient, x, (mean, variance), output, eps=self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCall(_NormSumsCall):
    """``x * scale + shift`` with a scale and a shift for each channel.

    Attributes:
        num_keys: rows of scales and shifts, one for each sample or 1.
    """

    num_keys: int

    @replayable
    def run(self, out: Tensor, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> None:
        """Write ``relu(x * scale + shift + residual)``; scale and shift are fp32 ``[num_keys, C, 1, 1]``."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        x, residual = to_channels_last(x), to_channels_last(residual)
        launch_normalize(x, None, scale, None, shift, residual, out, relu=self.relu)

    @replayable
    def differentiate(self, out: Tensor, gradient: Tensor, scale: Tensor, output: Tensor | None) -> None:
        """Write the input's gradient; ``out`` may be the gradient itself."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        gradient, output = to_channels_last(gradient), to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, None, scale, None, None, out)

    @replayable
    def sum(self, workspace: Tensor, gradient: Tensor, x: Tensor, output: Tensor | None) -> None:
        """Sum the gradients of shift and scale, split by split, in an fp64 workspace ``[2 * splits * num_keys * C]``."""
        if self.begin_launch(workspace):
            self._sum(workspace, gradient, x, None, output, num_keys=self.num_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsCall(KernelCall):
    """Mean and biased variance of each group of channels of a strip, as of ATen's ``var_mean``: ``[num_keys, groups]``.

    Attributes:
        num_keys: rows of statistics, one for each sample or 1.
        num_groups: number of channel groups.
        num_splits: number of splits of the pixels.
    """

    num_keys: int
    num_groups: int
    num_splits: int

    @replayable
    def run(self, variance: Tensor, mean: Tensor, counts: Tensor, sums: Tensor, x: Tensor) -> None:
        """Write both, with workspaces: int64 ``[splits * num_keys * C]``, and fp64 of twice that size."""
        if not self.begin_launch(variance):
            return
        from sft.kernels.norm.norm_triton import launch_merge_moments, launch_moments  # not above: it imports Triton

        shape = (self.num_splits, self.num_keys, -1)
        means, squares = sums.view(2, *shape).unbind()
        counts = counts.view(shape)
        launch_moments(to_channels_last(x), counts, means, squares, accumulate=False)
        launch_merge_moments(counts, means, squares, variance, mean)
