"""Resizing of a tile, nearest or linear, to any size: strips and panels by global tables. Both directions gather.

A tile is said by two ``ResizeAxis``: which rows of the whole input and of the whole output the buffers hold, and the rule between
them. The gradient is that of the mathematical function; ATen's own for ``nearest`` sometimes finds other rows than its forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.kernels.band import ResizeAxis
from sft.kernels.dispatch import empty_channels_last, uses_triton
from sft.kernels.geometry import check_buffer, raise_problems
from sft.kernels.resize_reference import BandTable, reference_resize

__all__ = ["band_table", "resize2d", "resize2d_gradient"]

_NO_TILE = "this tile cannot be resized"


@functools.lru_cache(maxsize=256)
def band_table(axis: ResizeAxis, *, adjoint: bool, double: bool, device: torch.device) -> BandTable:
    """What the kernel reads for one axis: of the forward direction, or of the adjoint. Rows beyond the buffer are left out.

    Args:
        double: for images in fp64.
    """
    band = axis.adjoint_band(single=not double) if adjoint else axis.band(single=not double)
    held = axis.output if adjoint else axis.input
    start, stop = (held.start + edge for edge in held.data)
    # Leave out what the buffer does not hold: rows at the front move the others up, rows at the back go.
    cut = (start - band.first).clip(0, band.count)
    count = (stop - band.first).clip(cut, band.count) - cut
    places = (torch.arange(band.weights.shape[1], device="cpu")[None, :] + torch.from_numpy(cut)[:, None]).clamp(
        max=band.weights.shape[1] - 1
    )
    weights = torch.from_numpy(band.weights).gather(1, places)
    return BandTable(
        first=torch.from_numpy(band.first + cut - held.start).to(device, torch.int32),
        count=torch.from_numpy(count).to(device, torch.int32),
        weights=weights.to(device, torch.float64 if double else torch.float32).contiguous(),
    )


def resize2d(x: Tensor, height: ResizeAxis, width: ResizeAxis, *, out: Tensor | None = None) -> Tensor:
    """The tile of the resized image that the axes call output. Differentiable once if ``out`` is None; the gradient is this tile's share.

    Args:
        x: ``[N, C, h, w]``, channels-last, the buffer that the axes call input.
        out: where to write, channels-last.

    Returns:
        ``[N, C, rows, columns]``, channels-last.

    Raises:
        InputError: a tensor does not fit the axes, or the buffer lacks rows that the output needs.

    >>> from sft.kernels.geometry import Span
    >>> x = torch.tensor([[[[1.0, 2.0]]]])
    >>> rows, columns = ResizeAxis(input=Span.whole(1), output=Span.whole(1)), ResizeAxis(input=Span.whole(2), output=Span.whole(4))
    >>> resize2d(x, rows, columns).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if out is not None:
        return _forward(x, height, width, out)
    result: Tensor = _Resize.apply(x, height, width)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def resize2d_gradient(
    gradient: Tensor, height: ResizeAxis, width: ResizeAxis, *, partial: bool = False, out: Tensor | None = None
) -> Tensor:
    """The gradient of ``resize2d``'s input, for the rows that the axes call input.

    Args:
        gradient: of the output, ``[N, C, rows, columns]``, channels-last: the buffer that the axes call output, with a halo.
        partial: gradients beyond the buffer count as zero: the share of this tile, to be added to those of others.
        out: where to write, channels-last.

    Returns:
        ``[N, C, h, w]``, channels-last; zero in rows that are not data.

    Raises:
        InputError: as ``resize2d``.
    """
    problems: list[str] = []
    num_samples, num_channels = gradient.shape[:2]
    double = gradient.dtype == torch.float64
    size = (height.input.size, width.input.size)
    out = empty_channels_last(gradient, (num_samples, num_channels, *size)) if out is None else out
    check_buffer("gradient", gradient, num_samples, num_channels, (height.output.size, width.output.size), problems)
    check_buffer("out", out, num_samples, num_channels, size, problems)
    for name, axis in (("height", height), ("width", width)):
        if not partial and (missing := axis.missing_output(single=not double)) is not None:
            held = f"[{axis.output.start}, {axis.output.stop})"
            problems.append(
                f"{name}: the gradient reads outputs [{missing[0]}, {missing[1]}), the buffer holds {held}; give it the halo as well"
            )
    raise_problems(_NO_TILE, problems)
    return _resize_forward(gradient, out, height, width, adjoint=True)


class _Resize(torch.autograd.Function):
    """A linear map; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: ResizeAxis, width: ResizeAxis) -> Tensor:
        ctx.axes = (height, width)
        return _forward(x, height, width, empty_channels_last(x, (*x.shape[:2], height.output.size, width.output.size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        return resize2d_gradient(gradient, *ctx.axes, partial=True), None, None


def _forward(x: Tensor, height: ResizeAxis, width: ResizeAxis, out: Tensor) -> Tensor:
    problems: list[str] = []
    check_buffer("x", x, x.shape[0], x.shape[1], (height.input.size, width.input.size), problems)
    check_buffer("out", out, x.shape[0], x.shape[1], (height.output.size, width.output.size), problems)
    for name, axis in (("height", height), ("width", width)):
        output, missing = axis.output, axis.missing_input(single=x.dtype != torch.float64)
        if output.start < 0 or output.stop > output.extent:
            problems.append(f"{name}: outputs [{output.start}, {output.stop}) are not all in [0, {output.extent}); ask for those only")
        elif missing is not None:
            held = f"[{axis.input.start}, {axis.input.stop})"
            problems.append(
                f"{name}: the outputs read input [{missing[0]}, {missing[1]}), the buffer holds {held}; give it the halo as well"
            )
    raise_problems(_NO_TILE, problems)
    return _resize_forward(x, out, height, width, adjoint=False)


def _resize_forward(x: Tensor, out: Tensor, height: ResizeAxis, width: ResizeAxis, *, adjoint: bool) -> Tensor:
    if not out.numel():
        return out
    if not x.numel():
        return out.zero_()
    tables = [band_table(axis, adjoint=adjoint, double=x.dtype == torch.float64, device=x.device) for axis in (height, width)]
    if uses_triton(x):
        from sft.kernels.resize_triton import launch_resize  # not above: it imports Triton

        launch_resize(x, out, *tables)
        return out
    return out.copy_(reference_resize(x, *tables))
