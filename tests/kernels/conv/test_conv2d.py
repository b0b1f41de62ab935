"""Convolution of tiles: the interpreted kernels against the untiled image in float64.

Memory is NaN around every tile, and in a tile beyond the border of the image.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft.kernels.common import BlockSizes
from sft.kernels.geometry import Geometry, KernelWindow
from tests.helpers.tile_buffers import (
    assert_close,
    assert_nothing_else_written,
    empty_buffer,
    fill_buffer,
    launch_on_gpu,
    normal_numbers,
    pixels_of,
    tile_geometry,
    weight_slots,
)
from tests.helpers.triton_process import interpret, needs_triton

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    name: str
    extents: tuple[int, int]
    windows: tuple[KernelWindow, KernelWindow]
    groups: int
    #: of a group
    channels: tuple[int, int]
    relu: bool
    residual: bool = False
    bias: bool = True
    num_samples: int = 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.channels[0] == 1


def _window(kernel: int, stride: int = 1, dilation: int = 1, padding: int = 0) -> KernelWindow:
    return KernelWindow(kernel=kernel, stride=stride, dilation=dilation, padding=padding)


_SAME = (_window(3, padding=1), _window(3, padding=1))
_LAYERS = [
    _Layer(name="plain", extents=(9, 7), windows=_SAME, groups=1, channels=(20, 18), relu=True, residual=True, num_samples=2),
    _Layer(name="strided", extents=(11, 8), windows=(_window(3, 2, padding=1),) * 2, groups=2, channels=(3, 5), relu=False),
    _Layer(
        name="dilated",
        extents=(12, 9),
        windows=(_window(4, 2, 2, 3), _window(2, 3, 3, 1)),
        groups=1,
        channels=(17, 4),
        relu=True,
        bias=False,
    ),
    _Layer(name="pointwise", extents=(7, 9), windows=(_window(1, 2), _window(1, 2)), groups=1, channels=(16, 33), relu=False),
    _Layer(name="depthwise", extents=(9, 7), windows=_SAME, groups=5, channels=(1, 2), relu=True, residual=True),
    _Layer(
        name="dilated depthwise", extents=(11, 9), windows=(_window(3, 2, 3, 3), _window(2, 1, 2)), groups=6, channels=(1, 1), relu=False
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Operands in a dtype, the exact results in fp64, and the same sums of absolute values."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    dy: Tensor
    y: Tensor
    truth: dict[str, Tensor]
    scale: dict[str, Tensor]


def _problem(layer: _Layer, dtype: torch.dtype) -> _Problem:
    draw = normal_numbers(1, dtype)
    num_in, num_out = (count * layer.groups for count in layer.channels)
    size = tuple(window.outputs(extent) for window, extent in zip(layer.windows, layer.extents, strict=True))
    kernel = tuple(window.kernel for window in layer.windows)
    x, weight = draw(layer.num_samples, num_in, *layer.extents), draw(num_out, layer.channels[0], *kernel)
    bias = draw(num_out) if layer.bias else None
    residual = draw(layer.num_samples, num_out, *size) if layer.residual else None
    dy = draw(layer.num_samples, num_out, *size)
    options: dict[str, Any] = {"groups": layer.groups}
    for name, index in (("stride", 0), ("padding", 1), ("dilation", 2)):
        options[name] = tuple((w.stride, w.padding, w.dilation)[index] for w in layer.windows)

    def linear(sign: Any, mask: Tensor | None) -> dict[str, Tensor]:
        z, w = sign(x).requires_grad_(), sign(weight).requires_grad_()
        s = F.conv2d(z, w, None, **options)
        shift = torch.zeros(1, num_out, 1, 1, dtype=torch.float64, requires_grad=True)
        y = s + shift + (0 if bias is None else sign(bias).view(1, -1, 1, 1)) + (0 if residual is None else sign(residual))
        mask = torch.ones_like(y) if mask is None else mask
        dx, dw, db = torch.autograd.grad(y * mask, (z, w, shift), sign(dy))
        return {"y": y.detach(), "dx": dx, "dw": dw, "db": db.flatten()}

    y = linear(lambda t: t.clone(), None)["y"]
    mask = (y.to(dtype) > 0).double() if layer.relu else None
    truth, scale = linear(lambda t: t.clone(), mask), linear(lambda t: t.abs(), mask)
    if layer.relu:
        truth["y"] = y.relu()
    return _Problem(x=x, weight=weight, bias=bias, residual=residual, dy=dy, y=truth["y"], truth=truth, scale=scale)


def _ranges(extent: int, *, is_single: bool) -> list[range]:
    """An axis in three tiles of different sizes (top, middle, bottom), or untiled."""
    return [range(extent)] if is_single else [range(extent // 3), range(extent // 3, extent // 3 + 2), range(extent // 3 + 2, extent)]


def _tiles(extents: tuple[int, ...], *, is_single: bool) -> list[tuple[range, range]]:
    rows, columns = _ranges(extents[0], is_single=is_single), _ranges(extents[1], is_single=is_single)
    return [
        (r, c) for r, c in itertools.product(rows, columns if is_single else [range(columns[1].start), range(columns[1].start, extents[1])])
    ]


def _last(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).contiguous(memory_format=torch.channels_last)


def _spans(geometry: Geometry, side: str) -> Any:
    return getattr(geometry.height, side), getattr(geometry.width, side)


def _forward_arguments(layer: _Layer, problem: _Problem, tile: tuple[range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry = tile_geometry(layer.extents, layer.windows, tile)
    residual = None if problem.residual is None else fill_buffer(problem.residual, _spans(geometry, "output"), dtype)
    bias = None if problem.bias is None else problem.bias.to(dtype)
    x = fill_buffer(problem.x, _spans(geometry, "input"), dtype)
    return {"x": x, "weight": _last(problem.weight, dtype), "bias": bias, "residual": residual, "geometry": geometry}


def _adjoint_arguments(layer: _Layer, problem: _Problem, tile: tuple[range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry = tile_geometry(layer.extents, layer.windows, tile, adjoint=True)
    dy, y = (fill_buffer(image, _spans(geometry, "output"), dtype) for image in (problem.dy, problem.y))
    return {"gradient": dy, "output": y if layer.relu else None, "weight": _last(problem.weight, dtype), "geometry": geometry}


def _weight_arguments(layer: _Layer, problem: _Problem, tile: tuple[range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry = tile_geometry(layer.extents, layer.windows, tile)
    dy, y = (fill_buffer(image, _spans(geometry, "output"), dtype) for image in (problem.dy, problem.y))
    x = fill_buffer(problem.x, _spans(geometry, "input"), dtype)
    return {"gradient": dy, "output": y if layer.relu else None, "x": x, "geometry": geometry}


def _num_terms(layer: _Layer) -> dict[str, int]:
    taps = layer.windows[0].kernel * layer.windows[1].kernel
    pixels = layer.num_samples * layer.extents[0] * layer.extents[1]
    return {"y": taps * layer.channels[0] + 2, "dx": taps * layer.channels[1], "dw": pixels, "db": pixels}


def _launches(layer: _Layer) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Module, launch and options of each direction."""
    if layer.depthwise:
        module, block = "sft.kernels.conv.depthwise_triton", {"block": (64, 8)}
        names = ("launch_depthwise", "launch_depthwise_gradient", "launch_depthwise_weight")
        return {key: (module, name, block) for key, name in zip(("y", "dx", "dw"), names, strict=True)}
    common: dict[str, Any] = {"groups": layer.groups, "precision": "ieee"}
    blocked = common | {"blocks": BlockSizes(pixels=64, channels=32, inner=16)}
    return {
        "y": ("sft.kernels.conv.forward2d_triton", "launch_conv2d", blocked),
        "dx": ("sft.kernels.conv.data_grad2d_triton", "launch_data_gradient", blocked),
        "dw": ("sft.kernels.conv.weight_grad2d_triton", "launch_weight_gradient", common | {"block": (64, 32, 32)}),
    }


@needs_triton
@pytest.mark.parametrize("layer", _LAYERS, ids=lambda layer: layer.name)
def test_interpreted_kernels(layer: _Layer, tmp_path: Path) -> None:
    """Tiled and untiled in fp32, untiled in fp16 and bf16; tiles have the bits of the untiled result."""
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[torch.dtype, str, _Problem, tuple[range, range], bool]] = []

    def add(direction: str, arguments: dict[str, Any], results: list[str]) -> None:
        module, function, options = _launches(layer)[direction]
        jobs.append({"run": "launch", "module": module, "function": function, "arguments": arguments | options, "results": results})

    for dtype in _DTYPES:
        problem = _problem(layer, dtype)
        num_in, num_out = problem.x.shape[1], problem.y.shape[1]
        for is_single in (True, False) if dtype == torch.float32 else (True,):
            for tile in _tiles(tuple(problem.y.shape[2:]), is_single=is_single):
                arguments = _forward_arguments(layer, problem, tile, dtype)
                arguments["out"] = empty_buffer(layer.num_samples, num_out, arguments["geometry"].output_size, dtype)
                add("y", arguments | {"relu": layer.relu}, ["out"])
                checks.append((dtype, "y", problem, tile, is_single))
            for tile in _tiles(layer.extents, is_single=is_single):
                arguments = _adjoint_arguments(layer, problem, tile, dtype)
                arguments["out"] = empty_buffer(layer.num_samples, num_in, arguments["geometry"].input_size, dtype)
                add("dx", arguments, ["out"])
                checks.append((dtype, "dx", problem, tile, is_single))
            for tile in _tiles(tuple(problem.y.shape[2:]), is_single=is_single):
                weights, biases = weight_slots(problem.weight)
                slots = {"weights": weights, "biases": biases if layer.bias else None}
                add("dw", _weight_arguments(layer, problem, tile, dtype) | slots, ["weights", "biases"])
                checks.append((dtype, "dw", problem, tile, is_single))
    wholes: dict[str, Tensor] = {}
    sums: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for (dtype, key, problem, tile, is_single), results in zip(checks, interpret(jobs, tmp_path), strict=True):
        context, terms = (str(dtype), key, tile), _num_terms(layer)
        if key == "dw":
            assert not any(bool(result.isnan().any()) for result in results if result is not None), context
            sums.setdefault((dtype, is_single), []).append(results)
            continue
        (result,) = results
        assert_nothing_else_written(result, context)
        assert_close(result, pixels_of(problem.truth[key], tile), pixels_of(problem.scale[key], tile), terms[key], context)
        if dtype == torch.float32 and is_single:
            wholes[key] = result
        elif dtype == torch.float32:
            assert torch.equal(result, pixels_of(wholes[key], tile)), ("tiles have other bits than the whole", context)
    for dtype, key, problem, _, is_single in checks:
        if key == "dw" and (shares := sums.pop((dtype, is_single), None)):
            sort = (str(dtype), "tiles" if not is_single else "whole")
            dw = torch.stack([share[0] for share in shares]).double().sum((0, 1)).permute(0, 3, 1, 2)
            assert_close(dw.float(), problem.truth["dw"], problem.scale["dw"], _num_terms(layer)["dw"], sort)
            if layer.bias:
                db = torch.stack([share[1] for share in shares]).double().sum((0, 1))
                assert_close(db.float(), problem.truth["db"], problem.scale["db"], _num_terms(layer)["db"], sort)


@needs_triton
def test_a_tile_adds_to_its_slots_or_replaces_them(tmp_path: Path) -> None:
    """A second tile adds to the first one's slots, or replaces their content."""
    layer = _LAYERS[1]
    problem = _problem(layer, torch.float32)
    (tile,) = _tiles(tuple(problem.y.shape[2:]), is_single=True)
    arguments = _weight_arguments(layer, problem, tile, torch.float32)
    empty, _ = weight_slots(problem.weight)
    module, function, options = _launches(layer)["dw"]
    contents = torch.randn(empty.shape, generator=torch.Generator().manual_seed(0))
    jobs: list[dict[str, Any]] = []
    for start in (empty, contents):
        slots = {"weights": start.clone(), "biases": torch.zeros_like(start[..., 0, 0, 0])}
        call: dict[str, Any] = {"run": "launch", "module": module, "function": function, "results": ["weights"]}
        jobs.append(call | {"arguments": arguments | slots | options | {"block": (16, 16, 16)}})
    slots = {"weights": contents.clone(), "biases": torch.ones_like(contents[..., 0, 0, 0])}
    jobs.append(call | {"arguments": arguments | slots | options | {"block": (16, 16, 16), "accumulate": False}})
    (share,), (added,), (replaced,) = interpret(jobs, tmp_path)
    assert torch.equal(added, share + contents)
    assert torch.equal(replaced, share)
    assert bool((share[:, 0, 0, 0, 0] != 0).all()), "a split without pixels shows nothing here"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("layer", _LAYERS, ids=lambda layer: layer.name)
def test_on_a_gpu(layer: _Layer, dtype: torch.dtype) -> None:
    """The untiled image by each launch, with its default blocks."""
    problem, num_in = _problem(layer, dtype), layer.channels[0] * layer.groups
    (outputs,), (inputs,) = _tiles(tuple(problem.y.shape[2:]), is_single=True), _tiles(layer.extents, is_single=True)
    products = {torch.float32: "ieee", torch.float16: "fp16", torch.bfloat16: "bf16"}
    options: dict[str, Any] = {} if layer.depthwise else {"groups": layer.groups, "precision": products[dtype]}

    def run(direction: str, arguments: dict[str, Any], result: str) -> Tensor:
        module, function, _ = _launches(layer)[direction]
        return launch_on_gpu(module.removeprefix("sft.kernels."), function, arguments | options, [result])[0]

    forward = _forward_arguments(layer, problem, outputs, dtype) | {"relu": layer.relu}
    forward["out"] = empty_buffer(layer.num_samples, problem.y.shape[1], forward["geometry"].output_size, dtype)
    adjoint = _adjoint_arguments(layer, problem, inputs, dtype)
    adjoint["out"] = empty_buffer(layer.num_samples, num_in, adjoint["geometry"].input_size, dtype)
    weights, biases = weight_slots(problem.weight, num_splits=32)
    slots = run("dw", _weight_arguments(layer, problem, outputs, dtype) | {"weights": weights, "biases": biases}, "weights")
    reduced = {"slots": slots, "out": torch.empty(problem.weight.shape, dtype=dtype)}
    (dw,) = launch_on_gpu("reduce.reduce_triton", "launch_reduce", reduced, ["out"])
    ours = {"y": run("y", forward, "out"), "dx": run("dx", adjoint, "out"), "dw": dw}
    for name, result in ours.items():
        assert_close(result, problem.truth[name], problem.scale[name], _num_terms(layer)[name], (layer.name, dtype, name))
