"""Launches of the norm kernels as calls of a program.

Statistics of a norm reach a kernel as a mean and one over a standard deviation for each group, in fp32. An affine map of each channel, as
a norm over the image becomes when its statistics are known, is the same kernel with the mean zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sft.backends.kernel_call import KernelCall, to_channels_last

__all__ = ["AffineCall", "FrozenNormCall", "MomentsCall", "num_norm_splits"]

#: enough programs for any GPU, and the least pixels of one
_PROGRAMS, _LEAST_PIXELS, _CHANNELS = 512, 512, 64


def num_norm_splits(num_keys: int, num_channels: int, num_pixels: int) -> int:
    """How many sums run beside each other.

    >>> num_norm_splits(1, 64, 2**22), num_norm_splits(1, 512, 2**22), num_norm_splits(2, 8, 1024)
    (512, 64, 2)
    """
    return max(1, min(_PROGRAMS // max(1, num_keys * -(-num_channels // _CHANNELS)), num_pixels // _LEAST_PIXELS))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenNormCall(KernelCall):
    """A batch norm in evaluation mode.

    Attributes:
        eps: added to the variance.
        relu: whether there is a ReLU behind it.
        num_splits: sums that run beside each other in the backward pass.
    """

    eps: float
    relu: bool = False
    num_splits: int = 1

    def _statistics(self, space: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and one over the deviation, ``[1, C]`` each, in a workspace."""
        own_mean, rstd = space.view(2, 1, -1).unbind()
        own_mean.copy_(mean)
        rstd.copy_(variance).add_(self.eps).rsqrt_()
        return own_mean, rstd

    def run(
        self,
        out: Tensor,
        space: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        residual: Tensor | None,
    ) -> None:
        """Write ``activation(norm(x) + residual)``; the workspace is fp32 ``[2 * C]``."""
        if not self.begins(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        own_mean, rstd = self._statistics(space, mean, variance)
        residual = None if residual is None else to_channels_last(residual)
        launch_normalize(to_channels_last(x), own_mean, rstd, weight, bias, residual, out, relu=self.relu)

    def differentiate(
        self, out: Tensor, space: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, output: Tensor | None
    ) -> None:
        """Write the input's gradient."""
        if not self.begins(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        own_mean, rstd = self._statistics(space, mean, variance)
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, own_mean, rstd, weight, None, out)

    def sum(self, sums: Tensor, space: Tensor, gradient: Tensor, x: Tensor, mean: Tensor, variance: Tensor, output: Tensor | None) -> None:
        """Find the gradients of bias and weight in a workspace of zeros, fp64 ``[2 * splits * C]``: each is then in its first row."""
        if not self.begins(sums):
            return
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        own_mean, rstd = self._statistics(space, mean, variance)
        first, second = sums.view(2, self.num_splits, 1, -1).unbind()
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_sums(gradient, output, to_channels_last(x), own_mean, rstd, first, second)
        _reduce_splits(first, second)

    def write_bias_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the bias's gradient."""
        out.copy_(sums.view(2, self.num_splits, -1)[0, 0])

    def write_weight_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the weight's gradient."""
        out.copy_(sums.view(2, self.num_splits, -1)[1, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCall(KernelCall):
    """``x * scale + shift`` with a scale and a shift for each channel, of each sample or of all.

    Attributes:
        num_keys: samples that have their own.
        relu: whether there is a ReLU behind it.
        num_splits: sums that run beside each other in the backward pass.
    """

    num_keys: int
    relu: bool = False
    num_splits: int = 1

    def _parts(self, space: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros for the mean, scale and shift, ``[num_keys, C]`` each, in a workspace."""
        zeros, own_scale, own_shift = space.view(3, self.num_keys, -1).unbind()
        zeros.zero_()
        own_scale.view(scale.shape).copy_(scale)
        if shift is not None:
            own_shift.view(shift.shape).copy_(shift)
        return zeros, own_scale, own_shift

    def _samples(self, image: Tensor) -> range:
        """Launches: one for each sample with its own scale."""
        return range(1) if self.num_keys == 1 else range(image.shape[0])

    def _of(self, image: Tensor | None, sample: int) -> Tensor | None:
        return image if image is None or self.num_keys == 1 else image[sample : sample + 1]

    def run(self, out: Tensor, space: Tensor, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> None:
        """Write ``activation(x * scale + shift + residual)``; the workspace is fp32 ``[3 * num_keys * C]``."""
        if not self.begins(out):
            return
        from sft.kernels.norm.norm_triton import launch_normalize  # not above: it imports Triton

        zeros, own_scale, own_shift = self._parts(space, scale, shift)
        x, residual = to_channels_last(x), None if residual is None else to_channels_last(residual)
        for sample in self._samples(x):
            mean, rstd, bias = zeros[sample : sample + 1], own_scale[sample : sample + 1], own_shift[sample]
            image, target = self._of(x, sample), self._of(out, sample)
            assert image is not None and target is not None
            launch_normalize(image, mean, rstd, None, bias, self._of(residual, sample), target, relu=self.relu)

    def differentiate(self, out: Tensor, space: Tensor, gradient: Tensor, scale: Tensor, output: Tensor | None) -> None:
        """Write the input's gradient; ``out`` may be the gradient itself."""
        if not self.begins(out):
            return
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # not above: it imports Triton

        zeros, own_scale, _ = self._parts(space, scale, None)
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_gradient(gradient, output, gradient, zeros, own_scale, None, None, out)

    def sum(self, sums: Tensor, space: Tensor, gradient: Tensor, x: Tensor, output: Tensor | None) -> None:
        """Find the gradients of shift and scale in a workspace of zeros, fp64 ``[2 * splits * num_keys * C]``."""
        if not self.begins(sums):
            return
        from sft.kernels.norm.norm_triton import launch_norm_sums  # not above: it imports Triton

        zeros, ones = space.view(2, self.num_keys, -1).unbind()
        zeros.zero_()
        ones.fill_(1.0)
        first, second = sums.view(2, self.num_splits, self.num_keys, -1).unbind()
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        launch_norm_sums(gradient, output, to_channels_last(x), zeros, ones, first, second)
        _reduce_splits(first, second)

    def write_shift_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the shift's gradient, of any shape of ``[num_keys, C]``."""
        out.view(self.num_keys, -1).copy_(sums.view(2, self.num_splits, self.num_keys, -1)[0, 0])

    def write_scale_grad(self, out: Tensor, sums: Tensor) -> None:
        """Write the scale's gradient."""
        out.view(self.num_keys, -1).copy_(sums.view(2, self.num_splits, self.num_keys, -1)[1, 0])


def _reduce_splits(*slots: Tensor) -> None:
    """Add the splits up into the first, in their order."""
    for one in slots:
        for part in one[1:]:
            one[0].add_(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsCall(KernelCall):
    """Mean, biased variance of each channel of a strip, as ATen's ``var_mean`` has them: ``[num_keys, groups]``.

    Attributes:
        num_keys: samples that are measured on their own; 1 for all together.
        num_groups: of channels.
        num_splits: sums that run beside each other.
    """

    num_keys: int
    num_groups: int
    num_splits: int

    def run(self, variance: Tensor, mean: Tensor, counts: Tensor, sums: Tensor, x: Tensor) -> None:
        """Write both, by way of workspaces of zeros: int64 ``[splits * num_keys * C]`` and fp64 of twice that size."""
        if not self.begins(variance):
            return
        from sft.kernels.norm.norm_triton import launch_moments  # not above: it imports Triton

        shape = (self.num_splits, self.num_keys, -1)
        means, squares = sums.view(2, *shape).unbind()
        launch_moments(to_channels_last(x), counts.view(shape), means, squares)
        split = (self.num_splits, self.num_keys, self.num_groups, -1)
        self._merge(counts.view(split), means.view(split), squares.view(split), variance, mean)

    def _merge(self, counts: Tensor, means: Tensor, squares: Tensor, variance: Tensor, mean: Tensor) -> None:
        """All parts at once in fp64: around the mean of means, the squares of a part are its own and its distance's."""
        count = counts.sum((0, 3))
        middle = (counts * means).sum((0, 3)) / count
        spread = squares + counts * (means - middle[:, :, None]).square()
        mean.view(count.shape).copy_(middle)
        variance.view(count.shape).copy_(spread.sum((0, 3)) / count)

    @property
    def scratch_elements(self) -> int:
        """Of eight bytes that merging takes beside the workspaces, for each of a workspace's: temporaries of the expressions."""
        return 6
