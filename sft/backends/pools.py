"""Rewrites of maximum and average pools, and their kernel calls.

A kernel keeps the tap of each maximum, the number of the window element that it came from, in two or eight bits. ATen keeps an index of
eight bytes. The program of a strip drops these indices after its forward half, since they would be its largest residual, and pools again
in its backward half. Taps are small enough to keep, so with a kernel the pool runs once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.backends.kernel_call import KernelCall, allocation, kernel_instruction, replayable, to_channels_last
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.backends.window_geometry import PaddedBuffer, WindowParameters, find_padded_buffer, geometry_of
from sft.kernels.geometry import Geometry
from sft.kernels.pool.taps import tap_channels
from sft.lower.custom_ops.windows import average_pool_gradient, max_pool_of_one_channel, raise_to_first_pixels
from sft.lower.program import Instruction, Slot

__all__ = [
    "AveragePoolCall",
    "MaxPoolCall",
    "match_average_pools",
    "match_infinite_maxima",
    "match_max_pools",
    "match_padded_average_pool_gradients",
    "match_single_maxima",
]

aten = torch.ops.aten

#: a tap has one byte
_MAX_TAPS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolCall(KernelCall):
    """Maxima and their taps.

    Attributes:
        geometry: geometry of the buffers.
    """

    geometry: Geometry

    @replayable
    def run(self, out: Tensor, taps: Tensor, x: Tensor) -> None:
        """Write maxima and taps."""
        if self.begin_launch(out):
            from sft.kernels.pool.pool_triton import launch_max_pool  # not above: it imports Triton

            launch_max_pool(to_channels_last(x), out, taps, self.geometry)

    @replayable
    def differentiate(self, out: Tensor, gradient: Tensor, taps: Tensor) -> None:
        """Write the input's gradient."""
        if self.begin_launch(out):
            from sft.kernels.pool.pool_triton import launch_max_pool_gradient  # not above: it imports Triton

            launch_max_pool_gradient(to_channels_last(gradient), taps, out, self.geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePoolCall(KernelCall):
    """Averages of windows.

    Attributes:
        geometry: geometry of the buffers.
        count_padding: true if elements of the padding count.
        divisor: divisor of each sum; None for the number of elements.
    """

    geometry: Geometry
    count_padding: bool
    divisor: int | None

    @replayable
    def run(self, out: Tensor, x: Tensor) -> None:
        """Write the averages."""
        if self.begin_launch(out):
            from sft.kernels.pool.pool_triton import launch_average_pool  # not above: it imports Triton

            launch_average_pool(to_channels_last(x), out, self.geometry, count_padding=self.count_padding, divisor=self.divisor)

    @replayable
    def differentiate(self, out: Tensor, gradient: Tensor) -> None:
        """Write the input's gradient."""
        if self.begin_launch(out):
            from sft.kernels.pool.pool_triton import launch_average_pool_gradient  # not above: it imports Triton

            launch_average_pool_gradient(
                to_channels_last(gradient), out, self.geometry, count_padding=self.count_padding, divisor=self.divisor
            )


def _selects_kernel(context: MatchContext, operator: str, windows: WindowParameters, image: Slot, num_pixels: int) -> bool:
    numbers = context.selector.number_format_of(image.dtype)
    if numbers is None or len(image.shape) != 4 or not all(image.shape) or not num_pixels:
        return False
    shape_class = ShapeClass(
        operator=operator,
        numbers=numbers,
        channels=(image.shape[1], image.shape[1]),
        kernel=windows.kernel,
        stride=windows.stride,
        dilation=windows.dilation,
        pixels=pixel_class(num_pixels),
    )
    return context.selector.selects_kernel(shape_class)


def match_max_pools(context: MatchContext) -> Iterator[Rewrite]:
    """Maximum pools, with their gradients."""
    def_use = context.def_use
    for at, call in list(context.unclaimed_calls(aten.max_pool2d_with_indices.default)):
        if at in context.claimed:
            continue  # the second call of a pool that was matched
        x, kernel, stride, padding, dilation, _ = call.arguments
        pools = [
            p for p in def_use.users(x) if context.is_unclaimed(p, call.function) and def_use.instructions[p].arguments == call.arguments
        ]
        if at != pools[0] or def_use.is_written_between(x, at, pools[-1]):
            pools = [at]
        indices = [slot for p in pools if (slot := def_use.instructions[p].outputs[1]) is not None]
        readers = sorted({p for slot in indices for p in def_use.users(slot)})
        if any(slot.root in def_use.outside for slot in indices) or len(readers) > 1:
            continue
        if any(not context.is_unclaimed(p, aten.max_pool2d_with_indices_backward.default) for p in readers):
            continue
        if any(def_use.is_read(def_use.instructions[p].outputs[0]) for p in pools[1:]):
            continue
        windows = WindowParameters.of(kernel, stride, padding, dilation)
        out = call.outputs[0]
        if out is None or math.prod(windows.kernel) > _MAX_TAPS or out.root != out.number:
            continue
        num_pixels = math.prod(out.shape) // max(1, out.shape[1])
        if _selects_kernel(context, "max pool", windows, x, num_pixels) and all(
            [_selects_kernel(context, "max pool gradient", windows, x, num_pixels) for _ in readers]
        ):
            yield _rewrite_max_pool(context, pools, readers, windows, find_padded_buffer(def_use, x, at, float("-inf")))


def _rewrite_max_pool(
    context: MatchContext, pools: list[int], readers: list[int], windows: WindowParameters, padded: PaddedBuffer
) -> Rewrite:
    call = context.def_use.instructions[pools[0]]
    x, out, owner = call.arguments[0], call.outputs[0], call.owner
    assert out is not None
    # The gradient is that of the padded copy, in which the padding is data.
    forward: Any = geometry_of(windows, padded.slot.shape[2:], out.shape[2:], padded.before)
    backward: Any = geometry_of(windows, x.shape[2:], out.shape[2:])
    taps = context.builder.slot((out.shape[0], tap_channels(out.shape[1], forward), *out.shape[2:]), torch.uint8)
    image, body = context.to_channels_last(padded.slot, owner)
    launch = kernel_instruction(MaxPoolCall(geometry=forward).run, out, taps, image, writes=(out, taps), owner=owner)
    inserted = {pools[0]: (*body, allocation(out, owner), allocation(taps, owner), launch)}
    for at in readers:
        reader = context.def_use.instructions[at]
        dx = reader.outputs[0]
        assert dx is not None
        gradient, body = context.to_channels_last(reader.arguments[0], owner)
        launch = kernel_instruction(MaxPoolCall(geometry=backward).differentiate, dx, gradient, taps, writes=(dx,), owner=owner)
        inserted[at] = (*body, allocation(dx, owner), launch)
    return Rewrite(removed=frozenset({*pools, *readers}), inserted=inserted)


def match_average_pools(context: MatchContext) -> Iterator[Rewrite]:
    """Average pools, and their gradients."""
    for at, call in [*context.unclaimed_calls(aten.avg_pool2d.default), *context.unclaimed_calls(aten.avg_pool2d_backward.default)]:
        rewrite = _rewrite_average_pool(context, at, call)
        if rewrite is not None:
            yield rewrite


def match_padded_average_pool_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of padded average pools without a kernel, on a CUDA device: ATen's are wrong if images are channels last."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.avg_pool2d_backward.default)):
        out, grad, kernel, stride, padding = call.outputs[0], call.arguments[0], *call.arguments[2:5]
        if out is None or not any(padding):
            continue
        extents = [size + 2 * pad + step for size, pad, step in zip(out.shape[2:], padding, stride or kernel, strict=True)]
        # The padded image and its gradient, and twice the result's gradient, over numbers of elements along both axes.
        scratch_bytes = 2 * math.prod((*out.shape[:2], *extents)) * out.dtype.itemsize + 2 * grad.num_bytes
        gradient = call._replace(function=average_pool_gradient, scratch_bytes=scratch_bytes)
        yield Rewrite(removed=frozenset((at,)), inserted={at: (gradient,)})


def match_single_maxima(context: MatchContext) -> Iterator[Rewrite]:
    """Maximum pools of one channel to one pixel in float64, on a CUDA device: ATen's kernel for channels last fails."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.max_pool2d_with_indices.default)):
        out = call.outputs[0]
        if out is not None and out.dtype == torch.float64 and len(out.shape) == 4 and out.shape[1:] == (1, 1, 1):
            yield Rewrite(removed=frozenset((at,)), inserted={at: (call._replace(function=max_pool_of_one_channel),)})


def match_infinite_maxima(context: MatchContext) -> Iterator[Rewrite]:
    """Indices of maximum pools without a kernel, on a CUDA device: ATen's are wrong for windows of minus infinity, channels last."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.max_pool2d_with_indices.default)):
        x, _, stride, padding, dilation, _ = call.arguments
        indices = call.outputs[1]
        if indices is None or len(indices.shape) != 4 or not context.def_use.is_read(indices):
            continue
        if indices.number in context.builder.bounded_maxima:
            continue
        counts = indices.shape[2:]
        # The first pixels, and for each axis four vectors on the way to them.
        scratch_bytes = (math.prod(counts) + 4 * sum(counts)) * indices.dtype.itemsize
        raised = kernel_instruction(
            raise_to_first_pixels,
            *(indices, x.shape[3], stride, padding, dilation),
            writes=(indices,),
            owner=call.owner,
            scratch_bytes=scratch_bytes,
        )
        yield Rewrite(removed=frozenset((at,)), inserted={at: (call, raised)})


def _rewrite_average_pool(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    is_backward = call.function is aten.avg_pool2d_backward.default
    gradient, x = call.arguments[:2] if is_backward else (None, call.arguments[0])
    kernel, stride, padding, _, count_padding, divisor = call.arguments[2 if is_backward else 1 :]
    result, owner = call.outputs[0], call.owner
    windows = WindowParameters.of(kernel, stride or kernel, padding, [1, 1])
    if result is None or result.root != result.number or not isinstance(x, Slot):
        return None
    output = result if gradient is None else gradient
    operator = "average pool gradient" if is_backward else "average pool"
    if not _selects_kernel(context, operator, windows, x, math.prod(output.shape) // max(1, output.shape[1])):
        return None
    # The number of elements of a mean depends on the border of the buffer that ATen reads, so a padded copy stays.
    pool = AveragePoolCall(geometry=geometry_of(windows, x.shape[2:], output.shape[2:]), count_padding=count_padding, divisor=divisor)
    image, body = context.to_channels_last(x if gradient is None else gradient, owner)
    run = pool.run if gradient is None else pool.differentiate
    launch = kernel_instruction(run, result, image, writes=(result,), owner=owner)
    return Rewrite(removed=frozenset({at}), inserted={at: (*body, allocation(result, owner), launch)})
