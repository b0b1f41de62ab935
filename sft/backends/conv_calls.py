"""Kernel calls of convolutions and their gradients: of images, also depthwise, and of volumes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sft.backends.kernel_call import KernelCall, to_channels_last
from sft.kernels.common import LaunchVariant
from sft.kernels.geometry import Geometry

__all__ = [
    "ConvolutionCall",
    "DataGradientCall",
    "NormedConvolutionCall",
    "PooledConvolutionCall",
    "WeightGradientCall",
    "num_gradient_slots",
]

#: ``precision`` argument of the launches, by number format
_PRECISIONS = {"float32": "ieee", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
#: enough programs to fill a current GPU a few times
_NUM_PROGRAMS = 1024
_MAX_SPLITS = 32
#: pixels that a slot sums up at least
_MIN_PIXELS = 512
_WEIGHT_BLOCK = 32


def num_gradient_slots(weight: tuple[int, ...], num_pixels: int) -> int:
    """Number of slots that sum up a weight's gradient: enough programs for a GPU, but no more, since each slot is as large as the weight.

    >>> num_gradient_slots((64, 3, 3, 3), 2**20), num_gradient_slots((512, 512, 3, 3), 2**20), num_gradient_slots((64, 3, 3, 3), 1024)
    (32, 1, 2)
    """
    num_out, num_in, *kernel = weight
    num_taps = math.prod(kernel)
    num_blocks = -(-num_out // _WEIGHT_BLOCK) * (
        -(-num_taps * num_in // _WEIGHT_BLOCK) if num_in < _WEIGHT_BLOCK else num_taps * -(-num_in // _WEIGHT_BLOCK)
    )
    return max(1, min(_MAX_SPLITS, _NUM_PROGRAMS // num_blocks, num_pixels // _MIN_PIXELS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConvolutionCallBase(KernelCall):
    """Kernel call of a convolution.

    Attributes:
        geometry: geometry of the buffers, a `Geometry` or a `VolumeGeometry`.
        groups: number of channel groups.
        numbers: number format.
        variant: launch variant, for images.
    """

    geometry: Any
    groups: int = 1
    numbers: str = "float32"
    variant: LaunchVariant = "default"

    @property
    def precision(self) -> str:
        """The ``precision`` argument of the launches."""
        return _PRECISIONS[self.numbers]

    @property
    def is_image(self) -> bool:
        """True for images, false for volumes."""
        return isinstance(self.geometry, Geometry)

    def is_depthwise(self, num_in: int) -> bool:
        """True if each of the input channels is a group; ``num_in`` are the inputs of a group."""
        return num_in == 1 and self.groups > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCall(_ConvolutionCallBase):
    """``relu(conv(x) + bias + residual)``; all but the convolution is optional.

    Attributes:
        relu: true if the ReLU is fused.
    """

    relu: bool = False

    def run(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        """Write the result to ``out``."""
        if not self.begin_launch(out):
            return
        x, residual = to_channels_last(x), None if residual is None else to_channels_last(residual)
        if not self.is_image:
            from sft.kernels.conv.forward3d_triton import launch_conv3d  # not above: it imports Triton

            launch_conv3d(x, weight, bias, residual, out, self.geometry, relu=self.relu, precision=self.precision)
        elif self.is_depthwise(weight.shape[1]):
            from sft.kernels.conv.depthwise_triton import launch_depthwise  # not above: it imports Triton

            launch_depthwise(x, weight, bias, residual, out, self.geometry, relu=self.relu)
        else:
            from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

            launch_conv2d(
                x,
                weight,
                bias,
                residual,
                out,
                self.geometry,
                groups=self.groups,
                relu=self.relu,
                precision=self.precision,
                variant=self.variant,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedConvolutionCall(_ConvolutionCallBase):
    """``relu(norm(conv(x) + bias) + residual)`` with a frozen norm, applied as a scale and a shift of each channel.

    Attributes:
        eps: added to the variance.
        relu: true if the ReLU is fused.
    """

    eps: float
    relu: bool = False

    def run(
        self,
        out: Tensor,
        workspace: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
    ) -> None:
        """Write the result to ``out``; the workspace is fp32 ``[2 * outputs]``."""
        if not self.begin_launch(out):
            return
        scale, shift = workspace.view(2, -1).unbind()
        scale.copy_(variance).add_(self.eps).rsqrt_()
        shift.copy_(mean).neg_()
        if bias is not None:
            shift.add_(bias)
        if norm_weight is not None:
            scale.mul_(norm_weight)
        shift.mul_(scale)
        if norm_bias is not None:
            shift.add_(norm_bias)
        x, residual = to_channels_last(x), None if residual is None else to_channels_last(residual)
        options: dict[str, Any] = {"relu": self.relu, "precision": self.precision, "scale": scale}
        if not self.is_image:
            from sft.kernels.conv.forward3d_triton import launch_conv3d  # not above: it imports Triton

            launch_conv3d(x, weight, shift, residual, out, self.geometry, **options)
            return
        from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

        launch_conv2d(x, weight, shift, residual, out, self.geometry, groups=self.groups, variant=self.variant, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledConvolutionCall(_ConvolutionCallBase):
    """The maxima of 2 x 2 pixels of ``relu(conv(x) + bias)``, and the numbers of the chosen pixels (taps)."""

    def run(self, out: Tensor, taps: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write the maxima to ``out`` and their taps to ``taps``."""
        if not self.begin_launch(out):
            return
        from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

        options: dict[str, Any] = {"groups": 1, "relu": True, "precision": self.precision, "variant": self.variant}
        launch_conv2d(to_channels_last(x), weight, bias, None, out, self.geometry, taps=taps, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGradientCall(_ConvolutionCallBase):
    """The gradient of a convolution's input."""

    def run(self, out: Tensor, gradient: Tensor, weight: Tensor, output: Tensor | None, taps: Tensor | None) -> None:
        """Write to ``out``. ``output``, of a ReLU, masks the gradient; with ``taps`` both are of maxima of 2 x 2 pixels."""
        if not self.begin_launch(out):
            return
        gradient, output = to_channels_last(gradient), None if output is None else to_channels_last(output)
        if not self.is_image:
            from sft.kernels.conv.data_grad3d_triton import launch_volume_data_gradient  # not above: it imports Triton

            launch_volume_data_gradient(gradient, output, weight, out, self.geometry, precision=self.precision)
        elif self.is_depthwise(weight.shape[1]):
            from sft.kernels.conv.depthwise_triton import launch_depthwise_gradient  # not above: it imports Triton

            launch_depthwise_gradient(gradient, output, weight, out, self.geometry)
        else:
            from sft.kernels.conv.data_grad2d_triton import launch_data_gradient  # not above: it imports Triton

            launch_data_gradient(
                gradient,
                output,
                weight,
                out,
                self.geometry,
                groups=self.groups,
                precision=self.precision,
                taps=taps,
                variant=self.variant,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradientCall(_ConvolutionCallBase):
    """Contribution of a strip to the gradients of weight and bias: fp32 sums in slots, which are added up in their order.

    Attributes:
        weight: shape of the weight, ``[outputs, inputs of a group, *kernel]``.
        has_bias: true if the bias's gradient is computed as well.
        num_splits: number of slots.
    """

    weight: tuple[int, ...]
    has_bias: bool
    num_splits: int

    @property
    def num_elements(self) -> int:
        """Number of fp32 elements of the workspace: the slots of the weight, then those of the bias."""
        return self.num_splits * (math.prod(self.weight) + (self.weight[0] if self.has_bias else 0))

    def _slots(self, workspace: Tensor) -> tuple[Tensor, Tensor | None]:
        num_out, num_in, *kernel = self.weight
        num_biases = self.num_splits * num_out if self.has_bias else 0
        weights = workspace[: workspace.numel() - num_biases].view(self.num_splits, num_out, *kernel, num_in)
        return weights, workspace[workspace.numel() - num_biases :].view(self.num_splits, num_out) if self.has_bias else None

    def run(self, workspace: Tensor, gradient: Tensor, x: Tensor, output: Tensor | None, taps: Tensor | None) -> None:
        """Sum up in a zeroed workspace; the first slot of each sum then has the total."""
        if not self.begin_launch(workspace):
            return
        weights, biases = self._slots(workspace)
        gradient, x, output = to_channels_last(gradient), to_channels_last(x), None if output is None else to_channels_last(output)
        if not self.is_image:
            from sft.kernels.conv.weight_grad3d_triton import launch_volume_weight_gradient  # not above: it imports Triton

            launch_volume_weight_gradient(gradient, output, x, weights, biases, self.geometry, precision=self.precision)
        elif self.is_depthwise(self.weight[1]):
            from sft.kernels.conv.depthwise_triton import launch_depthwise_weight  # not above: it imports Triton

            launch_depthwise_weight(gradient, output, x, weights, biases, self.geometry)
        else:
            from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient  # not above: it imports Triton

            options: dict[str, Any] = {"groups": self.groups, "precision": self.precision, "variant": self.variant}
            launch_weight_gradient(gradient, output, x, weights, biases, self.geometry, taps=taps, **options)
        if self.num_splits > 1:
            from sft.kernels.conv.weight_grad2d_triton import launch_reduce  # not above: it imports Triton

            for slots in (weights, biases):
                if slots is not None:
                    launch_reduce(slots, slots[0])  # each element is read from all slots before it is written

    def add_weight(self, total: Tensor, workspace: Tensor) -> None:
        """Add the weight's gradient to ``total``, of the weight's shape."""
        total.add_(self._weight(workspace))

    def write_weight_grad(self, out: Tensor, workspace: Tensor) -> None:
        """Write the weight's gradient to ``out``."""
        out.copy_(self._weight(workspace))

    def _weight(self, workspace: Tensor) -> Tensor:
        return self._slots(workspace)[0][0].movedim(-1, 1)

    def add_bias(self, total: Tensor, workspace: Tensor) -> None:
        """Add the bias's gradient to ``total``."""
        total.add_(self._bias(workspace))

    def write_bias_grad(self, out: Tensor, workspace: Tensor) -> None:
        """Write the bias's gradient to ``out``."""
        out.copy_(self._bias(workspace))

    def _bias(self, workspace: Tensor) -> Tensor:
        biases = self._slots(workspace)[1]
        assert biases is not None
        return biases[0]
