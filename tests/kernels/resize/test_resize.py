"""Resizing of tiles: the interpreted kernel against PyTorch and a plain reference on the untiled image; memory around the tiles is NaN."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft.analysis.ir.ops.resize_matrix import AxisResampling, ResamplingKind
from sft.backends.resize import band_rows
from sft.kernels.geometry import Span
from sft.kernels.resize.tile_axis import BandTable, LinearAxis
from sft.lower.rules.resampled_range import ResampledRange
from tests.helpers.tile_buffers import assert_close, assert_nothing_else_written, empty_buffer, fill_buffer, launch_on_gpu, pixels_of
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton
from tests.kernels.oracles.resize import reference_resize

_NUM_CHANNELS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resize:
    name: str
    mode: ResamplingKind
    extents: tuple[int, int]
    lengths: tuple[int, int]
    align_corners: bool = False
    scales: tuple[float, float] | None = None

    def whole(self, x: Tensor) -> Tensor:
        """PyTorch's own interpolation."""
        mode = {"linear": "bilinear", "nearest exact": "nearest-exact"}.get(self.mode, self.mode)
        size: dict[str, Any] = {"size": self.lengths} if self.scales is None else {"scale_factor": self.scales}
        y = F.interpolate(x, **size, mode=mode, align_corners=self.align_corners if mode == "bilinear" else None)
        assert y.shape[2:] == self.lengths
        return y

    @property
    def axes(self) -> list[AxisResampling]:
        """Both axes, with positions in double precision: those of the mathematical function."""
        return [
            AxisResampling(
                kind=self.mode,
                extent=extent,
                length=length,
                scale=None if self.scales is None else self.scales[i],
                align_corners=self.align_corners,
            )
            for i, (extent, length) in enumerate(zip(self.extents, self.lengths, strict=True))
        ]


_RESIZES = [
    _Resize(name="nearest doubled", mode="nearest", extents=(7, 5), lengths=(14, 10)),
    _Resize(name="nearest to any size", mode="nearest", extents=(9, 7), lengths=(13, 5)),
    _Resize(name="nearest exact", mode="nearest exact", extents=(6, 7), lengths=(10, 4)),
    _Resize(name="linear doubled", mode="linear", extents=(7, 6), lengths=(14, 12)),
    _Resize(name="linear to any size", mode="linear", extents=(8, 9), lengths=(11, 5)),
    _Resize(name="linear by factors", mode="linear", extents=(8, 6), lengths=(13, 15), scales=(1.7, 2.5)),
    _Resize(name="linear, corners", mode="linear", extents=(6, 7), lengths=(11, 7), align_corners=True),
]


def _problem(resize: _Resize, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, dy, y and dx of the whole image in fp64, of operands with values of ``dtype``."""
    random = torch.Generator().manual_seed(5)
    shapes = {"x": resize.extents, "dy": resize.lengths}
    tensors = {name: torch.randn(2, _NUM_CHANNELS, *size, generator=random).to(dtype).double() for name, size in shapes.items()}
    x = tensors["x"].clone().requires_grad_()
    y = resize.whole(x)
    (dx,) = torch.autograd.grad(y, x, tensors["dy"])
    return tensors | {"y": y.detach(), "dx": dx}


def _tiles(size: tuple[int, int]) -> list[tuple[range, range]]:
    top, left = size[0] // 3, size[1] // 2
    rows = [range(top), range(top, top + 1), range(top + 1, size[0])]
    return list(itertools.product(rows, (range(left), range(left, size[1]))))


def _source_span(sampling: AxisResampling, rows: range, *, adjoint: bool) -> Span:
    """Rows of the source that some rows of the result read, and one more on each side."""
    band, extent = (sampling.adjoint, sampling.length) if adjoint else (sampling.forward, sampling.extent)
    start, stop = band.start[rows.start : rows.stop], band.stop[rows.start : rows.stop]
    used = stop > start
    first, last = (int(start[used].min()), int(stop[used].max())) if used.any() else (0, 0)
    return Span(start=max(0, first - 1), size=min(extent, last + 1) - max(0, first - 1), extent=extent)


def _table(sampling: AxisResampling, rows: range, source: Span, *, adjoint: bool, device: str = "cpu") -> BandTable:
    """The table of some rows of the result, as a program makes it for a buffer of the source."""
    (inputs, first_input), (outputs, first_output) = (len(rows), rows.start), (source.size, source.start)
    if not adjoint:
        (inputs, first_input), (outputs, first_output) = (outputs, first_output), (inputs, first_input)
    span = ResampledRange(sampling, 0, outputs, inputs, is_adjoint=adjoint)
    first, count, weights = (torch.from_numpy(table).to(device) for table in band_rows(span, first_output, first_input))
    return BandTable(first=first, count=count, weights=weights)


def _whole_tables(resize: _Resize, *, adjoint: bool, device: str = "cpu") -> list[BandTable]:
    """The tables of the untiled image."""
    tables = []
    for axis in resize.axes:
        result, source = (axis.extent, axis.length) if adjoint else (axis.length, axis.extent)
        tables.append(_table(axis, range(result), Span.whole(source), adjoint=adjoint, device=device))
    return tables


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_rows_are_those_of_aten_in_single_precision(mode: str) -> None:
    sizes = [(3, 7), (10, 3), (49, 50), (1000, 333), (3000, 4096), (4095, 12285), (20000, 20001)]
    for extent, length in sizes:
        rows = torch.arange(extent, dtype=torch.float32)[None, None, :, None]
        theirs = F.interpolate(rows, size=(length, 1), mode=mode).flatten()
        kind: ResamplingKind = "nearest" if mode == "nearest" else "nearest exact"
        band = AxisResampling(kind=kind, extent=extent, length=length, is_double=False).forward
        assert torch.equal(torch.from_numpy(band.start), theirs.long()), (extent, length)
        assert (band.stop - band.start == 1).all()


@needs_triton
def test_interpreted_kernel(tmp_path: Path) -> None:
    """In fp32 a tile has the bits of the reference on the full image; in every dtype it is close to fp64."""
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[Any, ...]] = []
    for index, resize in enumerate(_RESIZES):
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if index in (1, 4) else (torch.float32,):
            tensors, single = _problem(resize, dtype), dtype == torch.float32
            scales = _problem(resize, dtype)
            for adjoint in (False, True):
                source = tensors["dy" if adjoint else "x"]
                image = source.to(dtype).contiguous(memory_format=torch.channels_last)
                height, width = _whole_tables(resize, adjoint=adjoint)
                reference = reference_resize(image, height, width)
                scale = _absolute(source, height, width)
                size = resize.extents if adjoint else resize.lengths
                for tile in _tiles(size) if single and index in (1, 4, 5) else [(range(size[0]), range(size[1]))]:
                    spans = [_source_span(axis, rows, adjoint=adjoint) for axis, rows in zip(resize.axes, tile, strict=True)]
                    out = empty_buffer(2, _NUM_CHANNELS, (len(tile[0]), len(tile[1])), dtype)
                    arguments: dict[str, Any] = {"x": fill_buffer(source, (spans[0], spans[1]), dtype), "out": out, "block": (64, 8)}
                    for name, axis, rows, span in zip(("height", "width"), resize.axes, tile, spans, strict=True):
                        arguments[name] = _table(axis, rows, span, adjoint=adjoint)
                    call = {"run": "launch", "module": "sft.kernels.resize.resize_triton", "function": "launch_resize", "results": ["out"]}
                    jobs.append(call | {"arguments": arguments})
                    truth, most = scales["dx" if adjoint else "y"], height.weights.shape[1] * width.weights.shape[1]
                    crop = partial(pixels_of, tile=tile)
                    checks.append(((resize.name, dtype, adjoint, tile), crop(reference), crop(truth), crop(scale), most))
    for (context, reference, truth, scale, most), (result,) in zip(checks, interpret(jobs, tmp_path), strict=True):
        assert_nothing_else_written(result, context)
        if result.dtype == torch.float32:
            assert torch.equal(result, reference), context
        assert_close(result, truth, scale, most + 2, context)  # two more roundings: of the weights


def _absolute(source: Tensor, height: BandTable, width: BandTable) -> Tensor:
    """The sums of absolute terms, by dense matrices."""
    matrices = []
    for table, extent in ((height, source.shape[2]), (width, source.shape[3])):
        columns = table.weights.shape[1]
        weights = torch.where(torch.arange(columns) < table.count[:, None], table.weights, 0).double()
        dense = torch.zeros(len(weights), extent + columns, dtype=torch.float64)
        matrices.append(dense.scatter_add_(1, table.first[:, None].long() + torch.arange(columns), weights)[:, :extent])
    return torch.einsum("nchw,rh,sw->ncrs", source.abs(), *matrices)


_POWERS_OF_TWO = [
    _Resize(name="doubled", mode="linear", extents=(7, 6), lengths=(14, 12)),
    _Resize(name="columns alone", mode="linear", extents=(5, 6), lengths=(5, 24)),
    _Resize(name="rows and columns by other factors", mode="linear", extents=(5, 9), lengths=(40, 18), scales=(8.0, 2.0)),
    _Resize(name="one row", mode="linear", extents=(1, 5), lengths=(4, 10)),
]


def _linear_axis(sampling: AxisResampling, rows: range, source: Span, *, adjoint: bool) -> LinearAxis:
    """The axis of some rows of the result, for a buffer of the source."""
    first_input, first_output = (rows.start, source.start) if adjoint else (source.start, rows.start)
    if sampling.extent == sampling.length:
        return LinearAxis(first_output=first_output, first_input=first_input)
    factor = sampling.power_of_two
    assert factor is not None
    return LinearAxis(factor=factor, extent=sampling.extent, first_output=first_output, first_input=first_input, is_adjoint=adjoint)


@needs_triton
def test_computed_weights_have_the_bits_of_tables(tmp_path: Path) -> None:
    """By powers of two the kernel without tables has the bits of the reference, for the whole image and for tiles."""
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[Any, ...]] = []
    for resize, adjoint in itertools.product(_POWERS_OF_TWO, (False, True)):
        source, size = _problem(resize, torch.float32)["dy" if adjoint else "x"], resize.extents if adjoint else resize.lengths
        image = source.float().contiguous(memory_format=torch.channels_last)
        reference = reference_resize(image, *_whole_tables(resize, adjoint=adjoint))
        for tile in [(range(size[0]), range(size[1])), *[each for each in _tiles(size) if all(each)][::2]]:
            spans = [_source_span(axis, rows, adjoint=adjoint) for axis, rows in zip(resize.axes, tile, strict=True)]
            out = empty_buffer(2, _NUM_CHANNELS, (len(tile[0]), len(tile[1])), torch.float32)
            arguments: dict[str, Any] = {"x": fill_buffer(source, (spans[0], spans[1]), torch.float32), "out": out}
            for name, axis, rows, span in zip(("height", "width"), resize.axes, tile, spans, strict=True):
                arguments[name] = _linear_axis(axis, rows, span, adjoint=adjoint)
            call = {"run": "launch", "module": "sft.kernels.resize.linear_triton", "function": "launch_linear_resize", "results": ["out"]}
            jobs.append(call | {"arguments": arguments})
            checks.append(((resize.name, adjoint, tile), pixels_of(reference, tile=tile)))
    for (context, reference), (result,) in zip(checks, interpret(jobs, tmp_path), strict=True):
        assert_nothing_else_written(result, context)
        assert torch.equal(result, reference), context


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    resize = _Resize(name="", mode="linear", extents=(128, 2048), lengths=(256, 4096))
    x, out = (meta_image(64, torch.bfloat16, size) for size in (resize.extents, resize.lengths))
    gates = []
    for adjoint, when in ((False, 80), (True, 90)):
        height, width = _whole_tables(resize, adjoint=adjoint, device="meta")
        arguments = {"x": out if adjoint else x, "out": x if adjoint else out, "height": height, "width": width}
        gates.append(Gate(module="resize.resize_triton", launch="launch_resize", when=(when,), arguments=arguments))
        sides = zip(("height", "width"), resize.axes, strict=True)
        axes = {name: LinearAxis(factor=2, extent=axis.extent, is_adjoint=adjoint) for name, axis in sides}
        gates.append(Gate(module="resize.linear_triton", launch="launch_linear_resize", when=(when,), arguments=arguments | axes))
    check_gates(gates, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("resize", _RESIZES, ids=lambda resize: resize.name)
def test_on_a_gpu(resize: _Resize) -> None:
    tensors = _problem(resize, torch.float32)
    for source, result, adjoint in (("x", "y", False), ("dy", "dx", True)):
        height, width = _whole_tables(resize, adjoint=adjoint, device="cuda")
        x = tensors[source].float().contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(tensors[result], dtype=torch.float32, memory_format=torch.channels_last)
        (ours,) = launch_on_gpu("resize.resize_triton", "launch_resize", {"x": x, "out": out, "height": height, "width": width}, ["out"])
        torch.testing.assert_close(ours.double(), tensors[result], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("resize", _POWERS_OF_TWO, ids=lambda resize: resize.name)
def test_computed_weights_on_a_gpu(resize: _Resize) -> None:
    tensors = _problem(resize, torch.float32)
    for source, result, adjoint in (("x", "y", False), ("dy", "dx", True)):
        x = tensors[source].float().contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(tensors[result], dtype=torch.float32, memory_format=torch.channels_last)
        sizes = zip(resize.axes, tensors[result].shape[2:], tensors[source].shape[2:], strict=True)
        height, width = (_linear_axis(axis, range(rows), Span.whole(inputs), adjoint=adjoint) for axis, rows, inputs in sizes)
        arguments = {"x": x, "out": out, "height": height, "width": width}
        (ours,) = launch_on_gpu("resize.linear_triton", "launch_linear_resize", arguments, ["out"])
        torch.testing.assert_close(ours.double(), tensors[result], rtol=1e-5, atol=1e-5)
