"""Resizing of tiles: the plain reference against PyTorch's whole image, the interpreted kernel against both; NaN all around."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft import InputError
from sft.kernels.geometry import Span
from sft.kernels.resize.resize import Interpolation, ResizeAxis, band_table, resize2d, resize2d_gradient
from tests.helpers.tile_buffers import assert_close, assert_nothing_else_written, empty_buffer, fill_buffer
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton

_NUM_CHANNELS = 5
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resize:
    name: str
    mode: Interpolation
    extents: tuple[int, int]
    lengths: tuple[int, int]
    align_corners: bool = False
    scales: tuple[float, float] | None = None

    def whole(self, x: Tensor) -> Tensor:
        """PyTorch's own."""
        mode = "bilinear" if self.mode == "linear" else self.mode
        size: dict[str, Any] = {"size": self.lengths} if self.scales is None else {"scale_factor": self.scales}
        y = F.interpolate(x, **size, mode=mode, align_corners=self.align_corners if mode == "bilinear" else None)
        assert y.shape[2:] == self.lengths
        return y

    @property
    def axes(self) -> list[ResizeAxis]:
        """Of the whole image."""
        rule: dict[str, Any] = {"mode": self.mode, "align_corners": self.align_corners}
        return [
            ResizeAxis(input=Span.whole(extent), output=Span.whole(length), scale=None if self.scales is None else self.scales[i], **rule)
            for i, (extent, length) in enumerate(zip(self.extents, self.lengths, strict=True))
        ]


_RESIZES = [
    _Resize(name="nearest doubled", mode="nearest", extents=(7, 5), lengths=(14, 10)),
    _Resize(name="nearest to any size", mode="nearest", extents=(9, 7), lengths=(13, 5)),
    _Resize(name="nearest exact", mode="nearest-exact", extents=(6, 7), lengths=(10, 4)),
    _Resize(name="linear doubled", mode="linear", extents=(7, 6), lengths=(14, 12)),
    _Resize(name="linear to any size", mode="linear", extents=(8, 9), lengths=(11, 5)),
    _Resize(name="linear by factors", mode="linear", extents=(8, 6), lengths=(13, 15), scales=(1.7, 2.5)),
    _Resize(name="linear, corners", mode="linear", extents=(6, 7), lengths=(11, 7), align_corners=True),
]


def _problem(resize: _Resize, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, dy, y and dx of the whole image in fp64, of operands with values of ``dtype``."""
    random = torch.Generator().manual_seed(5)
    shapes = {"x": resize.extents, "dy": resize.lengths}
    parts = {name: torch.randn(2, _NUM_CHANNELS, *size, generator=random).to(dtype).double() for name, size in shapes.items()}
    x = parts["x"].clone().requires_grad_()
    y = resize.whole(x)
    (dx,) = torch.autograd.grad(y, x, parts["dy"])
    return parts | {"y": y.detach(), "dx": dx}


def _tiles(size: tuple[int, int]) -> list[tuple[range, range]]:
    top, left = size[0] // 3, size[1] // 2
    rows = [range(top), range(top, top + 1), range(top + 1, size[0])]
    return list(itertools.product(rows, (range(left), range(left, size[1]))))


def _axes(resize: _Resize, tile: tuple[range, range], *, adjoint: bool, single: bool) -> list[ResizeAxis]:
    """The axes of a tile of the output, or for the adjoint of the input, its source buffer one row larger than it needs to be."""
    axes = []
    for axis, part in zip(resize.axes, tile, strict=True):
        source, result = (axis.output, axis.input) if adjoint else (axis.input, axis.output)
        held = Span(start=part.start, size=len(part), extent=result.extent)
        axis = replace(axis, input=held) if adjoint else replace(axis, output=held)
        band = axis.adjoint_band(single=single) if adjoint else axis.band(single=single)
        first, last = band.reads()
        around = Span(start=max(0, first - 1), size=min(source.extent, last + 1) - max(0, first - 1), extent=source.extent)
        axes.append(replace(axis, output=around) if adjoint else replace(axis, input=around))
    return axes


def _cut(image: Tensor, tile: tuple[range, range]) -> Tensor:
    return image[:, :, tile[0].start : tile[0].stop, tile[1].start : tile[1].stop]


@pytest.mark.parametrize("resize", _RESIZES, ids=lambda resize: resize.name)
def test_reference_of_tiles_is_the_whole(resize: _Resize) -> None:
    parts = _problem(resize, torch.float64)
    total = torch.zeros_like(parts["x"])
    for tile in _tiles(resize.lengths):
        height, width = _axes(resize, tile, adjoint=False, single=False)
        part = fill_buffer(parts["x"], (height.input, width.input), torch.float64).requires_grad_()
        y = resize2d(part, height, width)
        torch.testing.assert_close(y, _cut(parts["y"], tile), rtol=1e-12, atol=1e-12)
        (share,) = torch.autograd.grad(y, part, _cut(parts["dy"], tile).contiguous(memory_format=torch.channels_last))
        total[:, :, height.input.start : height.input.stop, width.input.start : width.input.stop] += share
    torch.testing.assert_close(total, parts["dx"], rtol=1e-11, atol=1e-11)
    for tile in _tiles(resize.extents):
        height, width = _axes(resize, tile, adjoint=True, single=False)
        dx = resize2d_gradient(fill_buffer(parts["dy"], (height.output, width.output), torch.float64), height, width)
        torch.testing.assert_close(dx, _cut(parts["dx"], tile), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_rows_are_those_of_aten_in_single_precision(mode: Interpolation) -> None:
    sizes = [(3, 7), (10, 3), (49, 50), (1000, 333), (3000, 4096), (4095, 12285), (20000, 20001)]
    for extent, length in sizes:
        rows = torch.arange(extent, dtype=torch.float32)[None, None, :, None]
        theirs = F.interpolate(rows, size=(length, 1), mode=mode).flatten()
        band = ResizeAxis(input=Span.whole(extent), output=Span.whole(length), mode=mode).band(single=True)
        assert torch.equal(torch.from_numpy(band.first), theirs.long()), (extent, length)
        assert (band.count == 1).all()


def test_what_does_not_fit_is_refused() -> None:
    whole = ResizeAxis(input=Span.whole(4), output=Span.whole(8), mode="linear")
    strip = replace(whole, input=Span(start=2, size=2, extent=4), output=Span(start=4, size=4, extent=8))
    x = torch.zeros(1, 3, 2, 4).to(memory_format=torch.channels_last)
    with pytest.raises(InputError, match=r"height: the outputs read input \[1, 4\), the buffer holds \[2, 4\)"):
        resize2d(x, strip, whole)
    with pytest.raises(InputError, match=r"height: the gradient reads outputs \[3, 8\), the buffer holds \[4, 8\)"):
        resize2d_gradient(torch.zeros(1, 3, 4, 8).to(memory_format=torch.channels_last), strip, whole)
    with pytest.raises(InputError, match=r"x has shape \(1, 3, 2, 4\), the geometry says \(1, 3, 4, 4\)"):
        resize2d(x, whole, whole)
    with pytest.raises(InputError, match="align_corners is for linear"):
        replace(whole, mode="nearest", align_corners=True)
    with pytest.raises(InputError, match="'cubic'; choose one of nearest, nearest-exact, linear"):
        replace(whole, mode="cubic")  # type: ignore[arg-type]


@needs_triton
def test_interpreted_kernel(tmp_path: Path) -> None:
    """In fp32 a tile has the bits of the reference of the whole image; in every dtype it is near fp64."""
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[Any, ...]] = []
    for index, resize in enumerate(_RESIZES):
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if index in (1, 4) else (torch.float32,):
            parts, single = _problem(resize, dtype), dtype == torch.float32
            scales = _problem(resize, dtype)
            whole = resize.axes
            for adjoint in (False, True):
                source = parts["dy" if adjoint else "x"]
                image = source.to(dtype).contiguous(memory_format=torch.channels_last)
                reference = (resize2d_gradient if adjoint else resize2d)(image, *whole)
                tables = {"adjoint": adjoint, "double": True, "device": _CPU}
                height, width = (band_table(axis, **tables) for axis in whole)
                scale = _absolute(source, height.weights, height.first, width.weights, width.first)
                size = resize.extents if adjoint else resize.lengths
                for tile in _tiles(size) if single and index in (1, 4, 5) else [(range(size[0]), range(size[1]))]:
                    axes = _axes(resize, tile, adjoint=adjoint, single=True)
                    spans = (axes[0].output, axes[1].output) if adjoint else (axes[0].input, axes[1].input)
                    out = empty_buffer(2, _NUM_CHANNELS, (len(tile[0]), len(tile[1])), dtype)
                    arguments: dict[str, Any] = {"x": fill_buffer(source, spans, dtype), "out": out, "block": (64, 8)}
                    for name, axis in zip(("height", "width"), axes, strict=True):
                        arguments[name] = band_table(axis, adjoint=adjoint, double=False, device=_CPU)
                    call = {"run": "launch", "module": "sft.kernels.resize.resize_triton", "function": "launch_resize", "results": ["out"]}
                    jobs.append(call | {"arguments": arguments})
                    truth, most = scales["dx" if adjoint else "y"], height.weights.shape[1] * width.weights.shape[1]
                    checks.append(((resize.name, dtype, adjoint, tile), _cut(reference, tile), _cut(truth, tile), _cut(scale, tile), most))
    for (context, reference, truth, scale, most), (result,) in zip(checks, interpret(jobs, tmp_path), strict=True):
        assert_nothing_else_written(result, context)
        if result.dtype == torch.float32:
            assert torch.equal(result, reference), context
        assert_close(result, truth, scale, most + 2, context)  # two more roundings: of the weights


def _absolute(source: Tensor, rows: Tensor, first_row: Tensor, columns: Tensor, first_column: Tensor) -> Tensor:
    """The sums of absolute terms, by dense matrices."""
    matrices = []
    for weights, first, extent in ((rows, first_row, source.shape[2]), (columns, first_column, source.shape[3])):
        dense = torch.zeros(len(weights), extent + weights.shape[1], dtype=torch.float64)
        matrices.append(dense.scatter_add_(1, first[:, None].long() + torch.arange(weights.shape[1]), weights)[:, :extent])
    return torch.einsum("nchw,rh,sw->ncrs", source.abs(), *matrices)


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    resize = _Resize(name="", mode="linear", extents=(128, 2048), lengths=(256, 4096))
    x, out = (meta_image(64, torch.bfloat16, size) for size in (resize.extents, resize.lengths))
    gates = []
    for adjoint, when in ((False, 80), (True, 90)):
        height, width = (band_table(axis, adjoint=adjoint, double=False, device=torch.device("meta")) for axis in resize.axes)
        given = {"x": out if adjoint else x, "out": x if adjoint else out, "height": height, "width": width}
        gates.append(Gate(module="resize.resize_triton", launch="launch_resize", when=(when,), arguments=given))
    check_gates(gates, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("resize", _RESIZES, ids=lambda resize: resize.name)
def test_on_a_gpu(resize: _Resize) -> None:
    parts = _problem(resize, torch.float32)
    x = parts["x"].float().cuda().contiguous(memory_format=torch.channels_last).requires_grad_()
    y = resize2d(x, *resize.axes)
    (dx,) = torch.autograd.grad(y, x, parts["dy"].float().cuda())
    torch.testing.assert_close(y.detach().cpu().double(), parts["y"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.cpu().double(), parts["dx"], rtol=1e-5, atol=1e-5)
