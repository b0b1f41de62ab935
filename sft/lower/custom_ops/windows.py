"""Window operators: im2col and col2im, overlap-add of transposed convolutions, circular padding, 1-d unpooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.ops.transposed import TransposedWindow
from sft.common.interval import Interval

__all__ = [
    "RowMajorCall",
    "average_pool_gradient",
    "border_rows",
    "circular_pad",
    "col2im",
    "im2col",
    "kernel_rows",
    "max_pool_of_one_channel",
    "max_unpool1d",
    "overlap_add",
    "raise_to_first_pixels",
]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowMajorCall:
    """An operator of ATen on row-major copies of images, with a result channels last. Each call gets a block of images and channels.

    All images, the result as well, have the same number of images and channels, and each channel is computed by itself: upsampling,
    pools, and their gradients.

    Attributes:
        operator: its name, such as ``upsample_bilinear2d``; it has one result.
        images_per_call: images of a block.
        channels_per_call: channels of a block.
    """

    operator: str
    images_per_call: int
    channels_per_call: int

    @classmethod
    def of(cls, operator: str, shapes: Sequence[Sequence[int]], max_elements: int) -> RowMajorCall:
        """The call with the largest blocks of at most so many elements, but of one channel at least.

        Args:
            operator: name of the operator.
            shapes: of all images.
            max_elements: of a block of any of the images.
        """
        images, channels = shapes[0][:2]
        channel_elements = max(math.prod(shape[2:]) for shape in shapes)
        channels_per_call = min(channels, max(1, max_elements // channel_elements))
        images_per_call = min(images, max(1, max_elements // (channels * channel_elements)))
        return cls(operator, images_per_call, channels_per_call)

    @property
    def function(self) -> Any:
        """The operator."""
        return getattr(aten, self.operator).default

    def __call__(self, *arguments: Any) -> Tensor:
        """Call the operator, once for each block."""
        images, channels = next(each for each in arguments if _is_image(each)).shape[:2]
        if (self.images_per_call, self.channels_per_call) == (images, channels):
            return self._block(arguments).contiguous(memory_format=torch.channels_last)
        result: Tensor | None = None
        for image in range(0, images, self.images_per_call):
            for channel in range(0, channels, self.channels_per_call):
                window = (slice(image, image + self.images_per_call), slice(channel, channel + self.channels_per_call))
                block = self._block([_block_argument(each, window) for each in arguments])
                if result is None:
                    shape = (images, channels, *block.shape[2:])
                    result = torch.empty(shape, dtype=block.dtype, device=block.device, memory_format=torch.channels_last)
                result[window] = block
                del block  # before the next one is computed
        assert result is not None
        return result

    def _block(self, arguments: Sequence[Any]) -> Tensor:
        result: Tensor = self.function(*(each.contiguous() if _is_image(each) else each for each in arguments))
        return result


def _is_image(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dim() == 4


def _block_argument(argument: Any, window: tuple[slice, slice]) -> Any:
    """The argument of a call for a block: of images, and of the shape of an image, the images and channels of the block."""
    if _is_image(argument):
        return argument[window]
    if isinstance(argument, (list, tuple)) and len(argument) == 4:  # input_size of gradients of upsampling
        sizes = (len(range(size)[each]) for size, each in zip(argument[:2], window, strict=True))
        return [*sizes, *argument[2:]]
    return argument


def average_pool_gradient(
    grad: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """The gradient of ``avg_pool2d``'s input, channels last, by an operator without padding; arguments as of ``avg_pool2d_backward``.

    ATen's own gradient is wrong on a CUDA device for images that are channels last and padded (pytorch/pytorch#188344).
    """
    strides = stride or kernel_size
    extents, reaches = [], []
    for at, size, length in zip((0, 1), self.shape[2:], grad.shape[2:], strict=True):
        reaches.append((length - 1) * strides[at] + kernel_size[at])
        extents.append(max(reaches[at], padding[at] + size))  # of the padded image, as far as windows and the image reach
    if divisor_override is None:
        if count_include_pad and all(reaches[at] <= self.shape[2 + at] + 2 * padding[at] for at in (0, 1)):
            divisor_override = math.prod(kernel_size)
        else:
            counts = [
                _window_counts(grad, self.shape[2 + at], 2 + at, kernel_size[at], strides[at], padding[at], count_include_pad)
                for at in (0, 1)
            ]
            grad, divisor_override = grad / counts[0][:, None] / counts[1], 1
    padded = torch.empty((*self.shape[:2], *extents), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    result = aten.avg_pool2d_backward.default(grad, padded, kernel_size, strides, [0, 0], False, True, divisor_override)
    (above, left), (rows, columns) = padding, self.shape[2:]
    image: Tensor = result[:, :, above : above + rows, left : left + columns].contiguous(memory_format=torch.channels_last)
    return image


def _window_counts(grad: Tensor, size: int, dim: int, kernel: int, stride: int, padding: int, counts_padding: bool) -> Tensor:
    """Elements of each window along an axis that count."""
    starts = torch.arange(grad.shape[dim], device=grad.device) * stride - padding
    border = padding if counts_padding else 0
    return ((starts + kernel).clamp_max(size + border) - starts.clamp_min(-border)).to(grad.dtype)


def max_pool_of_one_channel(
    self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """``max_pool2d_with_indices`` of images with one channel, with the strides of contiguous images; arguments as of ATen's operator.

    The memory is the same in both formats. ATen's CUDA kernel for channels last fails on float64 ("misaligned address") where a block has
    a single thread: it stores the maxima after the indices, which are 4 bytes each.
    """
    planes = self.squeeze(1).unsqueeze(1)  # the stride of the channel becomes that of an image
    result: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices.default(planes, kernel_size, stride, padding, dilation, ceil_mode)
    return result


def raise_to_first_pixels(indices: Tensor, width: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> None:
    """Raise pool indices to the first pixel of their windows that is inside the image, in place.

    That changes windows of minus infinity alone, for which ATen's CUDA kernel for channels last has the index 0: any other index is that of
    a pixel of the window.

    Args:
        indices: indices of a 2-d pool.
        width: columns of the pooled image.
        stride, padding, dilation: geometry of the pool.
    """
    starts = []
    for axis, count in enumerate(indices.shape[2:]):
        start = torch.arange(count, device=indices.device) * stride[axis] - padding[axis]
        starts.append(torch.where(start < 0, start % dilation[axis], start) if padding[axis] else start)
    rows, columns = starts
    torch.clamp_min(indices, rows[:, None] * width + columns, out=indices)


def max_unpool1d(self: Tensor, indices: Tensor, output_size: Sequence[int], factors: Sequence[int] | None) -> Tensor:
    """``max_unpool1d`` by ``max_unpool2d``."""
    size = [*output_size, 1]
    out: Tensor = torch.ops.aten.max_unpool2d.default(self.unsqueeze(-1), indices.unsqueeze(-1), size)
    return out.squeeze(-1)


def border_rows(self: Tensor, low: int, high: int, axes: int) -> Tensor:
    """The last ``low`` rows of an image followed by its first ``high``; of an image with fewer rows, which repeat."""
    dim = self.dim() - axes
    rows = self.shape[dim]
    if max(low, high) > rows:
        return torch.cat([self.narrow(dim, row % rows, 1) for row in (*range(-low, 0), *range(high))], dim)
    return torch.cat([self.narrow(dim, rows - low, low), self.narrow(dim, 0, high)], dim)


def circular_pad(self: Tensor, border: Tensor, low: int, high: int, axes: int) -> Tensor:
    """Pad an image with the rows of :func:`border_rows`: the first ``low`` above, the remaining ``high`` below."""
    dim = self.dim() - axes
    return torch.cat([border.narrow(dim, 0, low), self, border.narrow(dim, low, high)], dim)


def kernel_rows(self: Tensor) -> Tensor:
    """A kernel ``[Cin, Cout, kh, ...]`` with its rows as output channels, ``[Cin, kh * Cout, 1, ...]``."""
    inputs, channels, kernel, *rest = self.shape
    return self.movedim(2, 1).reshape(inputs, kernel * channels, 1, *rest)


def overlap_add(self: Tensor, bias: Tensor | None, groups: int, spread: Sequence[Sequence[Any]]) -> Tensor:
    """Overlap-add: the products with :func:`kernel_rows`, each row of the kernel shifted to its output row, and summed."""
    along = TransposedWindow(**{name: value for name, value in spread})
    batch, channels, rows, *rest = self.shape
    products = self.reshape(batch, groups, along.kernel, channels // along.kernel // groups, rows, *rest)
    extent = along.extent(rows)
    out = products.new_zeros((batch, groups, products.shape[3], extent, *rest))
    for tap, (first, count, start) in enumerate(along.tap_ranges(Interval(0, rows), Interval(0, extent))):
        if count:
            index = torch.arange(start, start + along.stride * (count - 1) + 1, along.stride, device=self.device)
            out = out.index_add(3, index, products[:, :, tap].narrow(3, first, count))
    out = out.reshape(batch, channels // along.kernel, extent, *rest)
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))


def im2col(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], channels: Sequence[int]) -> Tensor:
    """Windows of an image ``[N, channels..., axes...]``, with the pixels of a window as the fastest channels."""
    first = self.dim() - len(kernel_size)
    for axis, (kernel, step, spacing) in reversed(list(enumerate(zip(kernel_size, stride, dilation, strict=True)))):
        # Window pixels along later axes already precede the axes.
        dim = axis - len(kernel_size)
        count = (self.shape[dim] - spacing * (kernel - 1) - 1) // step + 1
        indices = [torch.arange(count, device=self.device) * step + spacing * tap for tap in range(kernel)]
        self = torch.stack([self.index_select(dim, index) for index in indices], first)
    return self.reshape(self.shape[0], *channels, *self.shape[self.dim() - len(kernel_size) :])


def col2im(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The sum of windows ``[N, C * kernel..., axes...]`` at their positions in the image."""
    batch, channels, *counts = self.shape
    self = self.reshape(batch, channels // math.prod(kernel_size), *kernel_size, *counts)
    for axis, (kernel, step, spacing) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        dim, count = axis - len(kernel_size), self.shape[axis - len(kernel_size)]
        extent = (count - 1) * step + spacing * (kernel - 1) + 1
        sums = self.new_zeros((*self.shape[:2], *self.shape[3:dim], extent, *self.shape[self.dim() + dim + 1 :]))
        for tap in range(kernel):
            index = torch.arange(count, device=self.device) * step + spacing * tap
            sums = sums.index_add(dim, index, self.select(2, tap))
        self = sums
    return self
