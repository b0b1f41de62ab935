"""Kernel calls of norms.

A kernel takes the statistics of a norm as a mean and a reciprocal standard deviation (rstd) for each group, in fp32. A norm over the image
with known statistics is an affine map of each channel: the same kernel with a zero mean.

``num_keys`` is the number of rows of statistics: the number of samples if each sample has its own, 1 if all samples share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sft.backends.kernel_call import KernelCall, to_channels_last

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
class FrozenNormCall(KernelCall):
    """Batch norm in evaluation mode.

    Attributes:
        eps: added to the variance.
        relu: true if a ReLU after it is fused.
        num_splits: splits of the sums in the backward pass.
    """

    eps: float
    relu: bool = False
    num_splits: int = 1

    def _statistics(self, workspace: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and rstd, ``[1, C]`` each, in a workspace."""
        fp32_mean, rstd = workspace.view(2, 1, -1).unbind()
        fp32_mean.copy_(mean)
        rstd.copy_(variance).add_(self.eps).rsqrt_()
        return fp32_mean, rstd

    def run(
        self,
        out: Tensor,
        workspace: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        residual: Tensor | None,
    ) -> None:
        """Write ``relu(norm(x) + residual)``; the workspace is fp32 ``[2 * C]``."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        fp32_mean, rstd = self._statistics(workspace, mean, variance)
        residual = None if residual is None else to_channels_last(residual)
        launch_normalize(to_channels_last(x), fp32_mean, rstd, weight, bias, residual, out, relu=self.relu)

    def differentiate(
        self, out: Tensor, workspace: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, output: Tensor | None
    ) -> None:
        """Write the input's gradient."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        fp32_mean, rstd = self._statistics(workspace, mean, variance)
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, fp32_mean, rstd, weight, None, out)

    def sum(
        self, sums: Tensor, workspace: Tensor, gradient: Tensor, x: Tensor, mean: Tensor, variance: Tensor, output: Tensor | None
    ) -> None:
        """Sum the gradients of bias and weight in a zeroed fp64 workspace ``[2 * splits * C]``; the first split then has the totals."""
        if not self.begin_launch(sums):
            return
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        fp32_mean, rstd = self._statistics(workspace, mean, variance)
        first, second = sums.view(2, self.num_splits, 1, -1).unbind()
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_sums(gradient, output, to_channels_last(x), fp32_mean, rstd, first, second)
        _reduce_splits(first, second)

    def write_bias_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the bias's gradient."""
        out.copy_(sums.view(2, self.num_splits, -1)[0, 0])

    def write_weight_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the weight's gradient."""
        out.copy_(sums.view(2, self.num_splits, -1)[1, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCall(KernelCall):
    """``x * scale + shift`` with a scale and a shift for each channel.

    Attributes:
        num_keys: rows of scales and shifts, one for each sample or 1.
        relu: true if a ReLU after it is fused.
        num_splits: splits of the sums in the backward pass.
    """

    num_keys: int
    relu: bool = False
    num_splits: int = 1

    def _scale_and_shift(self, workspace: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """A zero mean, the scale and the shift, ``[num_keys, C]`` each, in a workspace."""
        zeros, fp32_scale, fp32_shift = workspace.view(3, self.num_keys, -1).unbind()
        zeros.zero_()
        fp32_scale.view(scale.shape).copy_(scale)
        if shift is not None:
            fp32_shift.view(shift.shape).copy_(shift)
        return zeros, fp32_scale, fp32_shift

    def _samples(self, image: Tensor) -> range:
        """Sample of each launch: one launch for all samples, or one for each."""
        return range(1) if self.num_keys == 1 else range(image.shape[0])

    def _image_of(self, image: Tensor | None, sample: int) -> Tensor | None:
        """The part of an image that the launch of a sample reads or writes."""
        return image if image is None or self.num_keys == 1 else image[sample : sample + 1]

    def run(self, out: Tensor, workspace: Tensor, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> None:
        """Write ``relu(x * scale + shift + residual)``; the workspace is fp32 ``[3 * num_keys * C]``."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        zeros, fp32_scale, fp32_shift = self._scale_and_shift(workspace, scale, shift)
        x, residual = to_channels_last(x), None if residual is None else to_channels_last(residual)
        for sample in self._samples(x):
            mean, rstd, bias = zeros[sample : sample + 1], fp32_scale[sample : sample + 1], fp32_shift[sample]
            image, target = self._image_of(x, sample), self._image_of(out, sample)
            assert image is not None and target is not None
            launch_normalize(image, mean, rstd, None, bias, self._image_of(residual, sample), target, relu=self.relu)

    def differentiate(self, out: Tensor, workspace: Tensor, gradient: Tensor, scale: Tensor, output: Tensor | None) -> None:
        """Write the input's gradient; ``out`` may be the gradient itself."""
        if not self.begin_launch(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        zeros, fp32_scale, _ = self._scale_and_shift(workspace, scale, None)
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, zeros, fp32_scale, None, None, out)

    def sum(self, sums: Tensor, workspace: Tensor, gradient: Tensor, x: Tensor, output: Tensor | None) -> None:
        """Sum the gradients of shift and scale in a zeroed fp64 workspace ``[2 * splits * num_keys * C]``."""
        if not self.begin_launch(sums):
            return
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        zeros, ones = workspace.view(2, self.num_keys, -1).unbind()
        zeros.zero_()
        ones.fill_(1.0)
        first, second = sums.view(2, self.num_splits, self.num_keys, -1).unbind()
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_sums(gradient, output, to_channels_last(x), zeros, ones, first, second)
        _reduce_splits(first, second)

    def write_shift_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the shift's gradient to ``out``, a tensor of ``num_keys * C`` elements."""
        out.view(self.num_keys, -1).copy_(sums.view(2, self.num_splits, self.num_keys, -1)[0, 0])

    def write_scale_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the scale's gradient."""
        out.view(self.num_keys, -1).copy_(sums.view(2, self.num_splits, self.num_keys, -1)[1, 0])


def _reduce_splits(*slots: Tensor) -> None:
    """Add all splits to the first one, in their order."""
    for splits in slots:
        for split in splits[1:]:
            splits[0].add_(split)


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

    def run(self, variance: Tensor, mean: Tensor, counts: Tensor, sums: Tensor, x: Tensor) -> None:
        """Write both, with zeroed workspaces: int64 ``[splits * num_keys * C]``, and fp64 of twice that size."""
        if not self.begin_launch(variance):
            return
        from sft.kernels.norm.norm_triton import launch_moments  # not above: it imports Triton

        shape = (self.num_splits, self.num_keys, -1)
        means, squares = sums.view(2, *shape).unbind()
        launch_moments(to_channels_last(x), counts.view(shape), means, squares)
        split = (self.num_splits, self.num_keys, self.num_groups, -1)
        self._merge(counts.view(split), means.view(split), squares.view(split), variance, mean)

    def _merge(self, counts: Tensor, means: Tensor, squares: Tensor, variance: Tensor, mean: Tensor) -> None:
        """Merge all splits in fp64. Around the total mean, the squares of a split are its own plus its count times its squared distance."""
        count = counts.sum((0, 3))
        total_mean = (counts * means).sum((0, 3)) / count
        spread = squares + counts * (means - total_mean[:, :, None]).square()
        mean.view(count.shape).copy_(total_mean)
        variance.view(count.shape).copy_(spread.sum((0, 3)) / count)

    @property
    def scratch_elements(self) -> int:
        """Temporary 8-byte elements of the merge, for each element of the int64 workspace."""
        return 6
