"""Maximum and average pools of a tile, and their gradients, on the geometry of every kernel on images.

The maximum keeps the number of the tap that it came from, in two bits for windows of at most four elements (four channels to
a byte) and eight bits otherwise, where PyTorch keeps an index of eight bytes. Rows beyond the border count as nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import empty_channels_last, uses_triton
from sft.kernels.geometry import Geometry, check_buffer, raise_problems
from sft.kernels.pool.pool_reference import (
    CODES_PER_BYTE,
    pack_taps,
    reference_average_pool,
    reference_average_pool_gradient,
    reference_max_pool,
    reference_max_pool_gradient,
    unpack_taps,
)

__all__ = ["average_pool2d", "average_pool2d_gradient", "max_pool2d", "max_pool2d_gradient", "max_pool2d_with_taps", "tap_channels"]

_NO_TILE = "these tensors are not a tile of this pool"


def tap_channels(num_channels: int, geometry: Geometry) -> int:
    """Bytes that the taps of one pixel take.

    >>> from sft.kernels.geometry import Geometry, Window
    >>> [tap_channels(6, Geometry.whole((8, 8), Window(kernel=k), Window(kernel=k))) for k in (2, 3)]
    [2, 6]
    """
    return -(-num_channels // CODES_PER_BYTE) if _is_packed(geometry) else num_channels


def max_pool2d_with_taps(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima of one tile, and where they came from.

    Args:
        x: ``[N, C, h, w]``, channels-last, the buffer that ``geometry`` calls input.

    Returns:
        ``[N, C, rows, columns]``, and uint8 ``[N, tap_channels, rows, columns]``, both channels-last. Of equal elements the
        first; NaN beats everything, as in PyTorch. Minus infinity for a window without any data.

    Raises:
        InputError: a tensor does not fit the geometry, the geometry lacks a halo, or the window has more than 255 elements.
    """
    _check(geometry, "x", x, x.shape[1], geometry.input_size)
    geometry.check_forward()
    out = empty_channels_last(x, (*x.shape[:2], *geometry.output_size))
    size = (x.shape[0], tap_channels(x.shape[1], geometry), *geometry.output_size)
    taps = torch.empty(size, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    if not out.numel():
        return out, taps
    if uses_triton(x):
        from sft.kernels.pool.pool_triton import launch_max_pool  # not above: it imports Triton

        launch_max_pool(x, out, taps, geometry)
    else:
        y, chosen = reference_max_pool(x, geometry)
        out.copy_(y)
        taps.copy_(pack_taps(chosen) if _is_packed(geometry) else chosen)
    return out, taps


def max_pool2d_gradient(gradient: Tensor, taps: Tensor, geometry: Geometry, *, partial: bool = False) -> Tensor:
    """The gradient of a maximum pool's input, for the rows that ``geometry`` calls input.

    Args:
        gradient: of the output, ``[N, C, rows, columns]``, channels-last: the buffer that ``geometry`` calls output, with a halo.
        taps: for the same rows, from ``max_pool2d_with_taps``.
        partial: gradients beyond the buffer count as zero: the share of this tile, to be added to those of others.

    Returns:
        ``[N, C, h, w]``, channels-last; zero in rows that are not data.

    Raises:
        InputError: a tensor does not fit the geometry, or the geometry lacks a halo.
    """
    _check(geometry, "gradient", gradient, gradient.shape[1], geometry.output_size)
    _check(geometry, "taps", taps, tap_channels(gradient.shape[1], geometry), geometry.output_size)
    if taps.dtype != torch.uint8:
        raise InputError(f"taps are uint8, got {taps.dtype}; give what max_pool2d_with_taps returned")
    if not partial:
        geometry.check_adjoint()
    out = empty_channels_last(gradient, (*gradient.shape[:2], *geometry.input_size))
    if not out.numel():
        return out
    if uses_triton(gradient):
        from sft.kernels.pool.pool_triton import launch_max_pool_gradient  # not above: it imports Triton

        launch_max_pool_gradient(gradient, taps, out, geometry)
        return out
    return out.copy_(
        reference_max_pool_gradient(gradient, unpack_taps(taps, gradient.shape[1]) if _is_packed(geometry) else taps, geometry)
    )


def max_pool2d(x: Tensor, geometry: Geometry) -> Tensor:
    """The maxima of one tile, differentiable once; the gradient is this tile's share. See ``max_pool2d_with_taps``.

    >>> from sft.kernels.geometry import Window
    >>> x = torch.tensor([[[[1.0, 5.0, 2.0], [0.0, 3.0, 9.0]]]])
    >>> max_pool2d(x, Geometry.whole((2, 3), Window(kernel=2), Window(kernel=2))).flatten().tolist()
    [5.0, 9.0]
    """
    result: Tensor = _MaxPool.apply(x, geometry)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def average_pool2d(x: Tensor, geometry: Geometry, *, count_padding: bool = True, divisor: int | None = None) -> Tensor:
    """The averages of one tile, differentiable once; the gradient is this tile's share.

    Args:
        x: ``[N, C, h, w]``, channels-last, the buffer that ``geometry`` calls input.
        count_padding: elements of the padding count (PyTorch's ``count_include_pad``).
        divisor: divides each sum instead of the number of elements.

    Returns:
        ``[N, C, rows, columns]``, channels-last.

    Raises:
        InputError: a tensor does not fit the geometry, the geometry lacks a halo, or the window is dilated.
    """
    result: Tensor = _AveragePool.apply(x, geometry, count_padding, divisor)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def average_pool2d_gradient(
    gradient: Tensor, geometry: Geometry, *, count_padding: bool = True, divisor: int | None = None, partial: bool = False
) -> Tensor:
    """The gradient of an average pool's input; arguments as for ``max_pool2d_gradient`` and ``average_pool2d``."""
    _check(geometry, "gradient", gradient, gradient.shape[1], geometry.output_size)
    _check_average(geometry, divisor)
    if not partial:
        geometry.check_adjoint()
    out = empty_channels_last(gradient, (*gradient.shape[:2], *geometry.input_size))
    if not out.numel():
        return out
    if uses_triton(gradient):
        from sft.kernels.pool.pool_triton import launch_average_pool_gradient  # not above: it imports Triton

        launch_average_pool_gradient(gradient, out, geometry, count_padding=count_padding, divisor=divisor)
        return out
    return out.copy_(reference_average_pool_gradient(gradient, geometry, count_padding=count_padding, divisor=divisor))


class _MaxPool(torch.autograd.Function):
    """Saves the taps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry) -> Tensor:
        y, taps = max_pool2d_with_taps(x, geometry)
        ctx.save_for_backward(taps)
        ctx.geometry = geometry
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (taps,) = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        return max_pool2d_gradient(gradient, taps, ctx.geometry, partial=True), None


class _AveragePool(torch.autograd.Function):
    """A linear map; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry, count_padding: bool, divisor: int | None) -> Tensor:
        _check(geometry, "x", x, x.shape[1], geometry.input_size)
        _check_average(geometry, divisor)
        geometry.check_forward()
        ctx.geometry, ctx.options = geometry, {"count_padding": count_padding, "divisor": divisor}
        out = empty_channels_last(x, (*x.shape[:2], *geometry.output_size))
        if not out.numel():
            return out
        if uses_triton(x):
            from sft.kernels.pool.pool_triton import launch_average_pool  # not above: it imports Triton

            launch_average_pool(x, out, geometry, count_padding=count_padding, divisor=divisor)
            return out
        return out.copy_(reference_average_pool(x, geometry, count_padding=count_padding, divisor=divisor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        return average_pool2d_gradient(gradient, ctx.geometry, partial=True, **ctx.options), None, None, None


def _is_packed(geometry: Geometry) -> bool:
    return geometry.kernel[0] * geometry.kernel[1] <= 4


def _check(geometry: Geometry, name: str, tensor: Tensor, num_channels: int, size: tuple[int, int]) -> None:
    problems: list[str] = []
    check_buffer(name, tensor, tensor.shape[0], num_channels, size, problems)
    if geometry.kernel[0] * geometry.kernel[1] > 255:
        problems.append(f"a window of {geometry.kernel} has more than 255 elements, and a tap's number has one byte; use PyTorch's pool")
    raise_problems(_NO_TILE, problems)


def _check_average(geometry: Geometry, divisor: int | None) -> None:
    if any(axis.window.dilation != 1 for axis in geometry.axes) or (divisor is not None and divisor < 1):
        dilations = tuple(axis.window.dilation for axis in geometry.axes)
        raise InputError(f"an average takes dilation 1 and a divisor of at least 1, got {dilations} and {divisor}")
