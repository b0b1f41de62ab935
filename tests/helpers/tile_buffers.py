"""Tiles of images for kernels: channels-last views into memory that is NaN outside of the tile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sft.kernels.geometry import Geometry, KernelWindow, Span, TileAxis

__all__ = [
    "assert_close",
    "assert_nothing_else_written",
    "empty_buffer",
    "fill_buffer",
    "launch_on_gpu",
    "normal_numbers",
    "pixels_of",
    "tile_geometry",
    "weight_slots",
]


def normal_numbers(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function from a shape to normal numbers in fp64 with values of ``dtype``, the same sequence for a seed."""
    random = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).double()


def pixels_of(image: Tensor, tile: tuple[range, range], share: int = 1) -> Tensor:
    """A tile of an image, or of one with a ``share`` of its rows and columns."""
    rows, columns = (slice(interval.start // share, interval.stop // share) for interval in tile)
    return image[:, :, rows, columns]


def tile_geometry(
    extents: tuple[int, int],
    windows: tuple[KernelWindow, KernelWindow],
    outputs: tuple[range, range],
    *,
    around: int = 1,
    adjoint: bool = False,
) -> Geometry:
    """The geometry of one tile of an image of these extents, with a source buffer that has ``around`` more rows than necessary.

    Args:
        outputs: rows and columns of the result: of the output, or of the input for the ``adjoint``.
    """
    axes = []
    for extent, window, interval in zip(extents, windows, outputs, strict=True):
        out = window.outputs(extent)
        source, needed = (
            (out, window.writes(interval.start, interval.stop)) if adjoint else (extent, window.reads(interval.start, interval.stop))
        )
        first, last = max(0, needed[0]) - around, min(source, needed[1]) + around
        buffer = Span(start=first, size=last - first, extent=source)
        result = Span(start=interval.start, size=len(interval), extent=extent if adjoint else out)
        axes.append(
            TileAxis(input=result, output=buffer, window=window) if adjoint else TileAxis(input=buffer, output=result, window=window)
        )
    return Geometry(height=axes[0], width=axes[1])


def empty_buffer(num_samples: int, num_channels: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A channels-last buffer of NaN (or of the dtype's largest value) in the middle of a larger one of the same."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    memory = torch.full((num_samples + 2, size[0] + 2, size[1] + 2, num_channels + 3), value, dtype=dtype)
    return memory.permute(0, 3, 1, 2)[1:-1, 1 : num_channels + 1, 1:-1, 1:-1]


def fill_buffer(image: Tensor, spans: tuple[Span, Span], dtype: torch.dtype) -> Tensor:
    """The buffer with the spans of an image ``[N, C, H, W]``, NaN beyond the border."""
    buffer = empty_buffer(image.shape[0], image.shape[1], (spans[0].size, spans[1].size), dtype)
    (top, bottom), (left, right) = (span.data for span in spans)
    rows, columns = spans[0].start, spans[1].start
    buffer[:, :, top:bottom, left:right] = image[:, :, rows + top : rows + bottom, columns + left : columns + right].to(dtype)
    return buffer


def assert_nothing_else_written(buffer: Tensor, context: object) -> None:
    """Assert that all of the buffer is written, and nothing of the memory around it."""
    memory = torch.empty(0, dtype=buffer.dtype).set_(buffer.untyped_storage())
    assert not buffer.isnan().any(), ("not written", context)
    assert int((~memory.isnan()).sum()) == buffer.numel(), ("written beyond the buffer", context)


def assert_close(result: Tensor, truth: Tensor, scale: Tensor, num_terms: int, context: object) -> None:
    """Compare a sum of ``num_terms`` products in fp32, rounded to the result's dtype, with fp64.

    Args:
        scale: the same sum of absolute values: each product and each addition is off by 2**-24 of it at most.
    """
    # Triton's interpreter truncates to bfloat16: off by a whole step, where a GPU rounds to half a step.
    rounding = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float64: 2.0**-50}[result.dtype]
    smallest = 2.0**-24 if result.dtype == torch.float16 else 0.0  # half of it is the largest error of a subnormal
    bound = (num_terms + 4) * 2.0**-24 * scale + rounding * truth.abs() + smallest
    error = (result.double() - truth).abs()
    assert bool((error <= bound * 1.01).all()), (float((error / (bound + 1e-300)).max()), context)


def weight_slots(weight: Tensor, *, num_splits: int = 2) -> tuple[Tensor, Tensor]:
    """Empty fp32 slots of the gradients of ``weight``, ``[splits, outputs, *kernel, inputs of a group]``, and of a bias."""
    num_out, num_in, *kernel = weight.shape
    return torch.zeros(num_splits, num_out, *kernel, num_in), torch.zeros(num_splits, num_out)


def launch_on_gpu(module: str, launch: str, arguments: dict[str, Any], results: list[str]) -> list[Tensor]:
    """Call a launch of ``sft.kernels`` on copies of its tensors on the GPU, and bring the named arguments back."""

    def copied(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(copied(item) for item in value)
        return value.cuda() if isinstance(value, Tensor) else value

    on_gpu = {name: copied(value) for name, value in arguments.items()}
    getattr(importlib.import_module(f"sft.kernels.{module}"), launch)(**on_gpu)
    return [on_gpu[name].cpu() for name in results]
