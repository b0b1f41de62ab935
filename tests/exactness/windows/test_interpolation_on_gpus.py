"""Interpolation on a GPU: positions and gradients of ATen's CUDA kernels, also without a GPU by a model of their source."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.frontend.capture import capture
from sft.analysis.ir.ops import resampling
from sft.analysis.ir.ops.resize_matrix import AxisResampling, BandedMatrix, interpolated_axes
from sft.common.interval import Interval
from tests.helpers.models import image, seeded

_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _source_row(row: int, scale: np.float32, extent: int, *, is_exact: bool) -> int:
    """``nearest_neighbor_compute_source_index`` and ``nearest_neighbor_exact_compute_source_index`` of ``cuda/UpSample.cuh``."""
    position = np.float32(np.float32(row) + np.float32(0.5)) if is_exact else np.float32(row)
    return min(math.floor(np.float32(position * scale)), extent - 1)


def _gradient_border(row: int, scale: np.float32, length: int, *, is_exact: bool) -> int:
    """``nearest_neighbor_bw_compute_source_index`` and its exact counterpart; nvcc contracts the subtraction to an FMA."""
    exact = Fraction(float(np.float32(row))) * Fraction(float(scale)) - (Fraction(1, 2) if is_exact else 0)
    return min(math.ceil(np.float32(float(exact))), length)


def _cuda_axis(
    extent: int, length: int, scale: float | None, *, is_exact: bool, is_plane: bool, is_unchanged: bool
) -> tuple[list[int], list[range]]:
    """For one axis the source row of each output row, and for each input row the output rows in its gradient."""
    if is_plane and is_unchanged:  # copy_
        return list(range(length)), [range(row, row + 1) for row in range(extent)]
    step = np.float32(1.0 / scale) if scale else np.float32(np.float32(extent) / np.float32(length))
    inverse = np.float32(scale) if scale else np.float32(np.float32(length) / np.float32(extent))
    is_kept = is_plane and extent == length
    rows = [row if is_kept else _source_row(row, step, extent, is_exact=is_exact) for row in range(length)]
    borders = [_gradient_border(row, inverse, length, is_exact=is_exact) for row in range(extent + 1)]
    return rows, [range(start, stop) for start, stop in itertools.pairwise(borders)]


def _windows(matrix: BandedMatrix) -> list[range]:
    for start, stop, weights in zip(matrix.start, matrix.stop, matrix.weights, strict=True):
        assert weights[: stop - start].tolist() == [1.0] * (stop - start)
    return [range(start, stop) for start, stop in zip(matrix.start.tolist(), matrix.stop.tolist(), strict=True)]


@st.composite
def _axes(draw: st.DrawFn) -> tuple[list[int], list[int], list[float | None]]:
    count = draw(st.integers(1, 3))
    extents = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    scale = st.floats(0.3, 3.0) | st.sampled_from([1.0, 1.001, 1.25, 2.0, 2.003])
    if draw(st.booleans()):
        factors = [max(draw(scale), 1.01 / extent) for extent in extents]
        return extents, [int(extent * factor) for extent, factor in zip(extents, factors, strict=True)], [*factors]
    return extents, [draw(st.just(extent) | st.integers(1, 300)) for extent in extents], [None] * count


@given(axes=_axes(), is_exact=st.booleans(), is_double=st.booleans())
def test_nearest_pixels_and_gradients_are_those_of_cuda_kernels(
    axes: tuple[list[int], list[int], list[float | None]], is_exact: bool, is_double: bool
) -> None:
    extents, lengths, scales = axes
    kind: Any = "nearest exact" if is_exact else "nearest"
    samplings = interpolated_axes(kind, extents, lengths, scales, is_double=is_double, is_on_gpu=True)
    for sampling, extent, length, scale in zip(samplings, extents, lengths, scales, strict=True):
        is_plane, is_unchanged = len(extents) == 2, extents == lengths
        rows, gradients = _cuda_axis(extent, length, scale, is_exact=is_exact, is_plane=is_plane, is_unchanged=is_unchanged)
        assert [window.start for window in _windows(sampling.forward)] == rows
        assert [[*window] for window in _windows(sampling.adjoint)] == [[*window] for window in gradients]
        _assert_access_covers(sampling)


def _assert_access_covers(sampling: AxisResampling) -> None:
    """The access map of output rows has all rows that they read, and all rows to whose gradients they contribute."""
    read = [sampling.access.read(Interval(row, row + 1)) for row in range(sampling.length)]
    for row, interval in enumerate(read):
        assert interval.start <= sampling.forward.start[row] < sampling.forward.stop[row] <= interval.stop
    for column in range(sampling.extent):
        for row in range(sampling.adjoint.start[column], sampling.adjoint.stop[column]):
            assert read[row].start <= column < read[row].stop


def test_double_precision_differs_between_cpu_and_gpu() -> None:
    """Row 27 of 54 is row 29 of 58 in double precision, and row 28 in single precision, as 58 / 54 is rounded down."""
    (cpu, _), (gpu, _) = (interpolated_axes("nearest", (58, 90), (54, 90), [None] * 2, is_on_gpu=flag) for flag in (False, True))
    assert (cpu.forward.start[27], gpu.forward.start[27]) == (29, 28)


@pytest.mark.parametrize("kind", ["linear", "cubic", "antialiased linear", "antialiased cubic"])
def test_an_axis_of_unchanged_size_is_copied_only_with_all_others(kind: Any) -> None:
    extents, scales = (100, 20), [1.005, 1.0]
    unchanged = interpolated_axes(kind, extents, (100, 20), scales, is_on_gpu=True)
    assert all(_dense(each.forward).tolist() == np.eye(each.extent).tolist() for each in unchanged)
    assert all(_dense(each.adjoint).tolist() == np.eye(each.extent).tolist() for each in unchanged)
    height, _ = interpolated_axes(kind, extents, (100, 40), [1.005, 2.0], is_on_gpu=True)
    assert abs(_dense(height.forward) - np.eye(100)).max() > 0.1
    assert _dense(height.adjoint).tolist() == _dense(height.forward).T.tolist()


def _dense(matrix: BandedMatrix) -> np.ndarray[Any, Any]:
    dense = np.zeros((len(matrix.start), int(matrix.stop.max())))
    for row, (start, stop, weights) in enumerate(zip(matrix.start, matrix.stop, matrix.weights, strict=True)):
        dense[row, start:stop] = weights[: stop - start]
    return dense


def test_captures_say_which_device_an_interpolation_runs_on() -> None:
    model = nn.Sequential(nn.Upsample((54, 54)), nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.ReLU())
    names = []
    for device in ("cpu", "cuda"):
        graph = capture(model, [(1, 2, 58, 58)], [torch.float64], torch.device(device)).graph
        names.append([node.argument(resampling.DEVICE_TYPE) for node in graph.operators])
    assert names == [[None, None, None], ["cuda", "cuda", None]]


class _CudaNearest(torch.autograd.Function):
    """Nearest pixels and gradients by the model of the CUDA kernels."""

    @staticmethod
    def forward(context: Any, x: Tensor, lengths: Sequence[int], is_exact: bool) -> Tensor:
        extents = x.shape[2:]
        context.axes = [
            _cuda_axis(extent, length, None, is_exact=is_exact, is_plane=len(extents) == 2, is_unchanged=tuple(extents) == tuple(lengths))
            for extent, length in zip(extents, lengths, strict=True)
        ]
        for axis, (rows, _) in enumerate(context.axes):
            x = x.index_select(2 + axis, torch.tensor(rows))
        return x

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        for axis, (_, windows) in enumerate(context.axes):
            dim = 2 + axis
            grad = torch.stack([grad[(slice(None),) * dim + (slice(window.start, window.stop),)].sum(dim) for window in windows], dim)
        return grad, None, None


class _Net(nn.Module):
    """Convolutions around an interpolation to a size."""

    def __init__(self, size: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.size, self.mode, self.is_modelled = size, mode, False
        self.before, self.after = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.before(x))
        is_exact = self.mode == "nearest-exact"
        y = _CudaNearest.apply(y, self.size, is_exact) if self.is_modelled else F.interpolate(y, self.size, mode=self.mode)  # type: ignore[no-untyped-call]
        result: Tensor = self.after(y)
        return result


def _step(model: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


_SIZES = [((58, 30), (54, 35)), ((40, 58), (47, 54)), ((45, 33), (45, 90))]
_TILES = [sft.Options(tile=(7, None)), sft.Options(tile=(9, 11))]


@pytest.mark.parametrize("options", _TILES, ids=["strips", "panels"])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(("extents", "size"), _SIZES)
def test_strips_follow_cuda_kernels(
    extents: tuple[int, int], size: tuple[int, int], mode: str, options: sft.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of a CPU run here with the rows of CUDA kernels."""
    monkeypatch.setattr(resampling, "interpolated_axes", functools.partial(_on_gpu, interpolated_axes))
    model, x = seeded(lambda: _Net(size, mode)), image(1, 2, *extents)
    reference = copy.deepcopy(model)
    reference.is_modelled = True
    net: Any = sft.compile(model, x.requires_grad_(), budget="1GiB", options=options)
    assert [segment.mode for segment in net.plan.segments] == ["tiled"]
    for mine, other in zip(_step(net, x), _step(reference, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def _on_gpu(function: Any, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **{**keywords, "is_on_gpu": True})


@pytest.mark.gpu
@_GPU
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
@pytest.mark.parametrize(("extents", "size"), _SIZES)
def test_plans_agree_with_eager_pytorch_on_a_gpu(
    extents: tuple[int, int], size: tuple[int, int], mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = seeded(lambda: _Net(size, mode)).to("cuda", dtype), image(1, 2, *extents).to("cuda", dtype)
    expected, tolerance = _step(model, x), 1e-10 if dtype == torch.float64 else 1e-3
    for options in (*_TILES, sft.Options(strategy="none")):
        net: Any = sft.compile(copy.deepcopy(model), x.requires_grad_(), budget="1GiB", options=options)
        for mine, other in zip(_step(net, x), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@_GPU
@given(axes=_axes(), is_exact=st.booleans())
def test_matrices_are_those_of_the_device(axes: tuple[list[int], list[int], list[float | None]], is_exact: bool) -> None:
    extents, lengths, scales = axes
    mode, kind = ("nearest-exact", "nearest exact") if is_exact else ("nearest", "nearest")
    how: dict[str, Any] = {"size": tuple(lengths)} if scales[0] is None else {"scale_factor": tuple(scales)}
    for axis, sampling in enumerate(interpolated_axes(kind, extents, lengths, scales, is_on_gpu=True)):  # type: ignore[arg-type]
        shape = [1, 1, *(extent if other == axis else 1 for other, extent in enumerate(extents))]
        rows = torch.arange(sampling.extent, dtype=torch.float64, device="cuda").view(shape).expand(1, 1, *extents)
        rows = rows.contiguous().requires_grad_()
        result = F.interpolate(rows, mode=mode, **how)
        along = result[(0, 0, *(slice(None) if other == axis else 0 for other in range(len(extents))))]
        assert along.tolist() == sampling.forward.start.tolist()
        (grad,) = torch.autograd.grad(along.sum(), rows)
        lines = grad.movedim(2 + axis, 0).flatten(1).sum(1)  # each result row is in the gradient of one row along the other axes
        assert lines.tolist() == (sampling.adjoint.stop - sampling.adjoint.start).tolist()
