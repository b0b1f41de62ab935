"""Maximum and average pools of a program.

A maximum keeps the number of the element that it came from, in two or eight bits, where ATen keeps an index of eight bytes. A strip's
program leaves ATen's indices out of its forward half, since they would be the largest thing that it keeps, and finds them again in its
backward half; the numbers are small enough to keep, so here a pool runs once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.backends.kernel_call import KernelCall, allocation, kernel_instruction, to_channels_last
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.backends.window_geometry import PaddedBuffer, WindowParameters, find_padded_buffer, geometry_of
from sft.kernels.geometry import Geometry
from sft.kernels.pool.taps import tap_channels
from sft.lower.program import Instruction, Slot

__all__ = ["AveragePoolCall", "MaxPoolCall", "match_average_pools", "match_max_pools"]

aten = torch.ops.aten

#: a tap's number has one byte
_MAX_TAPS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolCall(KernelCall):
    """Maxima, and where they came from.

    Attributes:
        geometry: of the buffers.
    """

    geometry: Geometry

    def run(self, out: Tensor, taps: Tensor, x: Tensor) -> None:
        """Write maxima and taps."""
        if self.begins(out):
            from sft.kernels.pool.pool_triton import launch_max_pool  # not above: it imports Triton

            launch_max_pool(to_channels_last(x), out, taps, self.geometry)

    def differentiate(self, out: Tensor, gradient: Tensor, taps: Tensor) -> None:
        """Write the input's gradient."""
        if self.begins(out):
            from sft.kernels.pool.pool_triton import launch_max_pool_gradient  # not above: it imports Triton

            launch_max_pool_gradient(to_channels_last(gradient), taps, out, self.geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePoolCall(KernelCall):
    """Averages.

    Attributes:
        geometry: of the buffers.
        count_padding: whether elements of the padding count.
        divisor: divides each sum instead of the number of elements.
    """

    geometry: Geometry
    count_padding: bool
    divisor: int | None

    def run(self, out: Tensor, x: Tensor) -> None:
        """Write the averages."""
        if self.begins(out):
            from sft.kernels.pool.pool_triton import launch_average_pool  # not above: it imports Triton

            launch_average_pool(to_channels_last(x), out, self.geometry, count_padding=self.count_padding, divisor=self.divisor)

    def differentiate(self, out: Tensor, gradient: Tensor) -> None:
        """Write the input's gradient."""
        if self.begins(out):
            from sft.kernels.pool.pool_triton import launch_average_pool_gradient  # not above: it imports Triton

            launch_average_pool_gradient(
                to_channels_last(gradient), out, self.geometry, count_padding=self.count_padding, divisor=self.divisor
            )


def _selects_kernel(question: MatchContext, operator: str, windows: WindowParameters, image: Slot, num_pixels: int) -> bool:
    numbers = question.selector.number_format_of(image.dtype)
    if numbers is None or len(image.shape) != 4 or not all(image.shape) or not num_pixels:
        return False
    wanted = ShapeClass(
        operator=operator,
        numbers=numbers,
        channels=(image.shape[1], image.shape[1]),
        kernel=windows.kernel,
        stride=windows.stride,
        dilation=windows.dilation,
        pixels=pixel_class(num_pixels),
    )
    return question.selector.selects_kernel(wanted)


def match_max_pools(question: MatchContext) -> Iterator[Rewrite]:
    """Maximum pools, with their gradients."""
    listing = question.listing
    for at, call in list(question.free(aten.max_pool2d_with_indices.default)):
        if at in question.taken:
            continue  # the second call of one that was found
        x, kernel, stride, padding, dilation, _ = call.arguments
        alike = [p for p in listing.users(x) if question.is_free(p, call.function) and listing.instructions[p].arguments == call.arguments]
        if at != alike[0] or listing.is_written_between(x, at, alike[-1]):
            alike = [at]
        indices = [slot for p in alike if (slot := listing.instructions[p].outputs[1]) is not None]
        readers = sorted({p for slot in indices for p in listing.users(slot)})
        if any(slot.root in listing.outside for slot in indices) or len(readers) > 1:
            continue
        if any(not question.is_free(p, aten.max_pool2d_with_indices_backward.default) for p in readers):
            continue
        if any(_reads_result(question, p) for p in alike[1:]):
            continue
        windows = WindowParameters.of(kernel, stride, padding, dilation)
        out = call.outputs[0]
        if out is None or math.prod(windows.kernel) > _MAX_TAPS or out.root != out.number:
            continue
        num_pixels = math.prod(out.shape) // max(1, out.shape[1])
        if _selects_kernel(question, "max pool", windows, x, num_pixels) and all(
            [_selects_kernel(question, "max pool gradient", windows, x, num_pixels) for _ in readers]
        ):
            yield _rewrite_max_pool(question, alike, readers, windows, find_padded_buffer(listing, x, at, float("-inf")))


def _reads_result(question: MatchContext, at: int) -> bool:
    out = question.listing.instructions[at].outputs[0]
    return out is not None and (bool(question.listing.users(out)) or out.root in question.listing.outside)


def _rewrite_max_pool(
    question: MatchContext, pools: list[int], readers: list[int], windows: WindowParameters, padded: PaddedBuffer
) -> Rewrite:
    call = question.listing.instructions[pools[0]]
    x, out, owner = call.arguments[0], call.outputs[0], call.owner
    assert out is not None
    # Of a padded copy the gradient is of the copy: there its border is data like any other.
    forward: Any = geometry_of(windows, padded.slot.shape[2:], out.shape[2:], padded.before)
    backward: Any = geometry_of(windows, x.shape[2:], out.shape[2:])
    taps = question.emitter.slot((out.shape[0], tap_channels(out.shape[1], forward), *out.shape[2:]), torch.uint8)
    image, body = question.image(padded.slot, owner)
    launch = kernel_instruction(MaxPoolCall(geometry=forward).run, out, taps, image, writes=(out, taps), owner=owner)
    inserted = {pools[0]: (*body, allocation(out, owner), allocation(taps, owner), launch)}
    for at in readers:
        reader = question.listing.instructions[at]
        dx = reader.outputs[0]
        assert dx is not None
        gradient, body = question.image(reader.arguments[0], owner)
        launch = kernel_instruction(MaxPoolCall(geometry=backward).differentiate, dx, gradient, taps, writes=(dx,), owner=owner)
        inserted[at] = (*body, allocation(dx, owner), launch)
    return Rewrite(gone=frozenset({*pools, *readers}), inserted=inserted)


def match_average_pools(question: MatchContext) -> Iterator[Rewrite]:
    """Average pools, and their gradients."""
    for at, call in [*question.free(aten.avg_pool2d.default), *question.free(aten.avg_pool2d_backward.default)]:
        found = _rewrite_average_pool(question, at, call)
        if found is not None:
            yield found


def _rewrite_average_pool(question: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    is_backward = call.function is aten.avg_pool2d_backward.default
    gradient, x = call.arguments[:2] if is_backward else (None, call.arguments[0])
    kernel, stride, padding, _, count_padding, divisor = call.arguments[2 if is_backward else 1 :]
    made, owner = call.outputs[0], call.owner
    windows = WindowParameters.of(kernel, stride or kernel, padding, [1, 1])
    if made is None or made.root != made.number or not isinstance(x, Slot):
        return None
    output = made if gradient is None else gradient
    operator = "average pool gradient" if is_backward else "average pool"
    if not _selects_kernel(question, operator, windows, x, math.prod(output.shape) // max(1, output.shape[1])):
        return None
    # What counts in a mean is told by the buffer's own border, so a padded copy stays one.
    pool = AveragePoolCall(geometry=geometry_of(windows, x.shape[2:], output.shape[2:]), count_padding=count_padding, divisor=divisor)
    image, body = question.image(x if gradient is None else gradient, owner)
    run = pool.run if gradient is None else pool.differentiate
    launch = kernel_instruction(run, made, image, writes=(made,), owner=owner)
    return Rewrite(gone=frozenset({at}), inserted={at: (*body, allocation(made, owner), launch)})
