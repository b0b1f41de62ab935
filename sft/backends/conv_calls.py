"""Kernel calls of convolutions and their gradients: of images, also depthwise, and of volumes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sft.backends.gradient_sums import GradientSumsCall
from sft.backends.kernel_call import KernelCall, replayable, to_channels_last
from sft.kernels.common import LaunchVariant, has_few_channels
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
_MAX_SPLITS = 96
#: pixels that a slot sums up at least
_MIN_PIXELS = 512
_WEIGHT_BLOCK = 32
#: output channels and elements of the window that a program sums up for a layer with few channels; these slots are small
_FEW_BLOCK = 64, 32


def num_gradient_slots(weight: tuple[int, ...], num_pixels: int, *, is_depthwise: bool = False) -> int:
    """Number of slots that sum up a weight's gradient: enough programs for a GPU, but no more, since each slot is as large as the weight.

    >>> num_gradient_slots((64, 3, 3, 3), 2**20), num_gradient_slots((512, 512, 3, 3), 2**20), num_gradient_slots((64, 3, 3, 3), 1024)
    (512, 1, 2)
    """
    num_out, num_in, *kernel = weight
    num_taps, num_splits = math.prod(kernel), num_pixels // _MIN_PIXELS
    if len(kernel) == 2 and has_few_channels(num_in) and not is_depthwise:
        num_blocks = -(-num_out // _FEW_BLOCK[0]) * -(-(num_taps * num_in + 1) // _FEW_BLOCK[1])
        return max(1, min(_NUM_PROGRAMS // 2 // num_blocks, num_splits))
    if len(kernel) == 2 and kernel[1] == 3 and num_in >= _WEIGHT_BLOCK:  # a program sums up a row of taps
        num_taps //= 3
    num_blocks = -(-num_out // _WEIGHT_BLOCK) * (
        -(-num_taps * num_in // _WEIGHT_BLOCK) if num_in < _WEIGHT_BLOCK else num_taps * -(-num_in // _WEIGHT_BLOCK)
    )
    return max(1, min(_MAX_SPLITS, _NUM_PROGRAMS // num_blocks, num_splits))


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

    @replayable
    def run(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        """Write the result to ``out``."""
        if not self.begin_launch(out):
            return
        x, residual = to_channels_last(x), to_channels_last(residual)
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

    @replayable
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
        from sft.kernels.norm.fold_triton import launch_fold_norm  # not above: it imports Triton

        scale, shift = workspace.view(2, -1).unbind()
        launch_fold_norm(mean, variance, bias, norm_weight, norm_bias, scale, shift, eps=self.eps)
        x, residual = to_channels_last(x), to_channels_last(residual)
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

    @replayable
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

    @replayable
    def run(self, out: Tensor, gradient: Tensor, weight: Tensor, output: Tensor | None, taps: Tensor | None) -> None:
        """Write to ``out``. ``output``, of a ReLU, masks the gradient; with ``taps`` both are of maxima of 2 x 2 pixels."""
        if not self.begin_launch(out):
            return
        gradient, output = to_channels_last(gradient), to_channels_last(output)
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
class WeightGradientCall(_ConvolutionCallBase, GradientSumsCall):
    """Contribution of a strip to the gradients of weight and bias: fp32 sums in slots, which are added up in a fixed order.

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

    def slots(self, workspace: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slots of the weight ``[splits, outputs, *kernel, inputs]``, and of the bias ``[splits, outputs]``."""
        num_out, num_in, *kernel = self.weight
        shape = (self.num_splits, num_out, *kernel, num_in)
        if not self.has_bias:
            return workspace.view(shape), None
        weights, biases = workspace.split_with_sizes([math.prod(shape), self.num_splits * num_out])
        return weights.view(shape), biases.view(self.num_splits, num_out)

    @replayable
    def run(self, workspace: Tensor, gradient: Tensor, x: Tensor, output: Tensor | None, taps: Tensor | None) -> None:
        """Write the sums of all slots to the workspace."""
        if not self.begin_launch(workspace):
            return
        weights, biases = self.slots(workspace)
        gradient, x, output = to_channels_last(gradient), to_channels_last(x), to_channels_last(output)
        options: dict[str, Any] = {"accumulate": False}
        if self.is_image and self.is_depthwise(self.weight[1]):
            from sft.kernels.conv.depthwise_triton import launch_depthwise_weight  # not above: it imports Triton

            launch_depthwise_weight(gradient, output, x, weights, biases, self.geometry, **options)
            return
        options |= {"precision": self.precision}
        if not self.is_image:
            from sft.kernels.conv.weight_grad3d_triton import launch_volume_weight_gradient  # not above: it imports Triton

            launch_volume_weight_gradient(gradient, output, x, weights, biases, self.geometry, **options)
            return
        from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient  # not above: it imports Triton

        options |= {"groups": self.groups, "variant": self.variant}
        launch_weight_gradient(gradient, output, x, weights, biases, self.geometry, taps=taps, **options)
