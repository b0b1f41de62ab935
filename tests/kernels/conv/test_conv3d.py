"""Convolution of tiles of volumes: the interpreted kernels against the untiled volume in float64; memory around the tiles is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft.kernels.common import BlockSizes
from sft.kernels.geometry import KernelWindow, Span, TileAxis, VolumeGeometry
from tests.helpers.tile_buffers import assert_close, assert_nothing_else_written, launch_on_gpu, normal_numbers, weight_slots
from tests.helpers.triton_gates import Gate, check_gates, in_fp32, meta_image
from tests.helpers.triton_process import interpret, needs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    name: str
    extents: tuple[int, int, int]
    windows: tuple[KernelWindow, KernelWindow, KernelWindow]
    channels: tuple[int, int]
    relu: bool
    num_samples: int = 1
    #: with a scale, and a residual
    fused: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the output."""
        return tuple(window.outputs(extent) for window, extent in zip(self.windows, self.extents, strict=True))


def _window(kernel: int, stride: int = 1, dilation: int = 1, padding: int = 0) -> KernelWindow:
    return KernelWindow(kernel=kernel, stride=stride, dilation=dilation, padding=padding)


_MODULES = {
    "launch_conv3d": "conv.forward3d_triton",
    "launch_volume_data_gradient": "conv.data_grad3d_triton",
    "launch_volume_weight_gradient": "conv.weight_grad3d_triton",
}
_LAYERS = [
    _Layer(name="plain", extents=(5, 4, 6), windows=(_window(3, padding=1),) * 3, channels=(18, 5), relu=True, num_samples=2, fused=True),
    _Layer(name="strided", extents=(7, 5, 6), windows=(_window(3, 2, 1, 1), _window(2), _window(3, 2, 3, 3)), channels=(3, 17), relu=False),
    _Layer(
        name="anisotropic", extents=(6, 5, 8), windows=(_window(1, 2), _window(3, padding=1), _window(2, 3)), channels=(16, 4), relu=True
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Operands with values of a dtype, in fp64, the exact results, and the same sums of absolute values."""

    operands: dict[str, Tensor]
    truth: dict[str, Tensor]
    scale: dict[str, Tensor]


def _problem(layer: _Layer, dtype: torch.dtype) -> _Problem:
    draw = normal_numbers(7, dtype)
    num_in, num_out = layer.channels
    operands = {
        "x": draw(layer.num_samples, num_in, *layer.extents),
        "weight": draw(num_out, num_in, *(window.kernel for window in layer.windows)),
        "bias": draw(num_out),
        "dy": draw(layer.num_samples, num_out, *layer.size),
    }
    if layer.fused:
        # Powers of two, so that a weight with the scale in it has values of the dtype, too.
        operands |= {"scale": draw(num_out).sign() * 2.0 ** (torch.arange(num_out) % 3 - 1)}
        operands |= {"residual": draw(layer.num_samples, num_out, *layer.size)}
    options: dict[str, Any] = {
        "stride": [window.stride for window in layer.windows],
        "padding": [window.padding for window in layer.windows],
        "dilation": [window.dilation for window in layer.windows],
    }

    def linear(sign: Any, mask: Tensor | None) -> dict[str, Tensor]:
        leaves = {name: sign(tensor).requires_grad_() for name, tensor in operands.items() if name != "dy"}
        y = F.conv3d(leaves["x"], leaves["weight"], None if layer.fused else leaves["bias"], **options)
        if layer.fused:
            y = y * leaves["scale"].view(-1, 1, 1, 1) + leaves["bias"].view(-1, 1, 1, 1) + leaves["residual"]
        gradients = torch.autograd.grad(y if mask is None else y * mask, list(leaves.values()), sign(operands["dy"]))
        named = dict(zip(leaves, gradients, strict=True))
        # The kernel of the weight's gradient has no scale, and that of the data takes a scaled weight.
        scale = named.pop("scale", None)
        if layer.fused:
            named["weight"] = named["weight"] / leaves["scale"].detach().view(-1, 1, 1, 1, 1)
        results = {"y": y.detach(), "dx": named["x"], "dw": named["weight"], "db": named["bias"]}
        return results | ({"ds": scale, "dr": named["residual"]} if scale is not None else {})

    y = linear(torch.clone, None)["y"]
    mask = (y.to(dtype) > 0).double() if layer.relu else None
    truth = linear(torch.clone, mask)
    truth["y"] = y.relu() if layer.relu else y
    return _Problem(operands=operands, truth=truth, scale=linear(torch.abs, mask))


def _geometry(layer: _Layer, tile: tuple[range, range, range], *, adjoint: bool = False) -> VolumeGeometry:
    """Geometry of one tile of the output, or of the input for the adjoint; its source buffer has one more slice than necessary."""
    axes = []
    for extent, window, inner in zip(layer.extents, layer.windows, tile, strict=True):
        length = window.outputs(extent)
        source, needed = (length, window.writes(inner.start, inner.stop)) if adjoint else (extent, window.reads(inner.start, inner.stop))
        first, last = max(0, needed[0]) - 1, min(source, needed[1]) + 1
        buffer = Span(start=first, size=last - first, extent=source)
        result = Span(start=inner.start, size=len(inner), extent=extent if adjoint else length)
        axes.append(
            TileAxis(input=result, output=buffer, window=window) if adjoint else TileAxis(input=buffer, output=result, window=window)
        )
    return VolumeGeometry(depth=axes[0], height=axes[1], width=axes[2])


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A buffer ``[N, C, d, h, w]`` of NaN in the middle of a larger one."""
    memory = torch.full((shape[0], *(size + 2 for size in shape[2:]), shape[1] + 3), math.nan, dtype=dtype)
    return memory.permute(0, 4, 1, 2, 3)[:, 1 : shape[1] + 1, 1:-1, 1:-1, 1:-1]


def _filled(volume: Tensor, spans: list[Span], dtype: torch.dtype) -> Tensor:
    buffer = _empty((*volume.shape[:2], *(span.size for span in spans)), dtype)
    inside = [slice(*span.data) for span in spans]
    source = [slice(span.start + span.data[0], span.start + span.data[1]) for span in spans]
    buffer[(slice(None), slice(None), *inside)] = volume[(slice(None), slice(None), *source)].to(dtype)
    return buffer


def _tiles(size: tuple[int, ...], *, is_single: bool) -> list[tuple[range, range, range]]:
    """Strips of different depths, the last in two panels; or the full volume."""
    depth, height, width = size
    if is_single:
        return [(range(depth), range(height), range(width))]
    return [
        (range(1), range(height), range(width)),
        (range(1, depth), range(height), range(2)),
        (range(1, depth), range(height), range(2, width)),
    ]


def _cut(volume: Tensor, tile: tuple[range, range, range]) -> Tensor:
    return volume[(slice(None), slice(None), *(slice(inner.start, inner.stop) for inner in tile))]


def _last(volume: Tensor, dtype: torch.dtype) -> Tensor:
    return volume.to(dtype).contiguous(memory_format=torch.channels_last_3d)


def _spans(geometry: VolumeGeometry, side: str) -> list[Span]:
    return [getattr(axis, side) for axis in geometry.axes]


def _forward(layer: _Layer, problem: _Problem, tile: tuple[range, range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry, operands = _geometry(layer, tile), problem.operands
    x = _filled(operands["x"], _spans(geometry, "input"), dtype)
    arguments = {"x": x, "weight": _last(operands["weight"], dtype), "bias": operands["bias"].to(dtype), "geometry": geometry}
    if layer.fused:
        arguments |= {"scale": operands["scale"].to(dtype), "residual": _filled(operands["residual"], _spans(geometry, "output"), dtype)}
    return arguments


def _adjoint(layer: _Layer, problem: _Problem, tile: tuple[range, range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry = _geometry(layer, tile, adjoint=True)
    dy, y = (_filled(volume, _spans(geometry, "output"), dtype) for volume in (problem.operands["dy"], problem.truth["y"]))
    weight = problem.operands["weight"]
    weight = weight * problem.operands["scale"].view(-1, 1, 1, 1, 1) if layer.fused else weight
    return {"gradient": dy, "output": y if layer.relu else None, "weight": _last(weight, dtype), "geometry": geometry}


def _weight(layer: _Layer, problem: _Problem, tile: tuple[range, range, range], dtype: torch.dtype) -> dict[str, Any]:
    geometry = _geometry(layer, tile)
    dy, y = (_filled(volume, _spans(geometry, "output"), dtype) for volume in (problem.operands["dy"], problem.truth["y"]))
    x = _filled(problem.operands["x"], _spans(geometry, "input"), dtype)
    return {"gradient": dy, "output": y if layer.relu else None, "x": x, "geometry": geometry}


@needs_triton
@pytest.mark.parametrize("layer", _LAYERS, ids=lambda layer: layer.name)
def test_interpreted_kernels(layer: _Layer, tmp_path: Path) -> None:
    """Tiled and untiled in fp32, the first layer untiled in half precision; tiles have the bits of the untiled result."""
    blocks: dict[str, Any] = {"precision": "ieee", "blocks": BlockSizes(pixels=256, channels=32, inner=32)}
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[torch.dtype, str, _Problem, tuple[range, range, range], bool]] = []

    def add(launch: str, arguments: dict[str, Any], results: list[str]) -> None:
        module = f"sft.kernels.{_MODULES[launch]}"
        jobs.append({"run": "launch", "module": module, "function": launch, "arguments": arguments, "results": results})

    also = [(torch.bfloat16, True), (torch.float16, True)] if layer is _LAYERS[0] else []
    for dtype, is_single in [(torch.float32, True), (torch.float32, False), *also]:
        problem = _problem(layer, dtype)
        weights, biases = weight_slots(problem.operands["weight"])
        for tile in _tiles(layer.size, is_single=is_single):
            arguments = _forward(layer, problem, tile, dtype)
            out = _empty((layer.num_samples, layer.channels[1], *arguments["geometry"].output_size), dtype)
            add("launch_conv3d", {"residual": None} | arguments | blocks | {"relu": layer.relu, "out": out}, ["out"])
            checks.append((dtype, "y", problem, tile, is_single))
            arguments = _weight(layer, problem, tile, dtype) | {"weights": weights, "biases": biases}
            options = {"precision": "ieee", "block": (64, 32, 32)}
            add("launch_volume_weight_gradient", arguments | options, ["weights", "biases"])
            checks.append((dtype, "dw", problem, tile, is_single))
        for tile in _tiles(layer.extents, is_single=is_single):
            arguments = _adjoint(layer, problem, tile, dtype)
            out = _empty((layer.num_samples, layer.channels[0], *arguments["geometry"].input_size), dtype)
            add("launch_volume_data_gradient", arguments | blocks | {"out": out}, ["out"])
            checks.append((dtype, "dx", problem, tile, is_single))
    wholes: dict[str, Tensor] = {}
    for (dtype, key, problem, tile, is_single), results in zip(checks, interpret(jobs, tmp_path), strict=True):
        context = (str(dtype), key, tile)
        taps = math.prod(window.kernel for window in layer.windows)
        if key == "dw":  # tiles were added to the same slots, so every result is the last
            num_terms = layer.num_samples * math.prod(layer.size)
            for ours, name in zip(results, ("dw", "db"), strict=True):
                total = ours.double().sum(0).float()
                total = total.movedim(-1, 1) if name == "dw" else total
                assert_close(total, problem.truth[name], problem.scale[name], num_terms, context)
            continue
        (result,) = results
        num_terms = taps * layer.channels[0 if key == "y" else 1] + 2
        assert_nothing_else_written(result, context)
        assert_close(result, _cut(problem.truth[key], tile), _cut(problem.scale[key], tile), num_terms, context)
        if dtype == torch.float32 and is_single:
            wholes[key] = result
        elif dtype == torch.float32:
            assert torch.equal(result, _cut(wholes[key], tile)), ("tiles have other bits than the whole", context)


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    half, size = torch.bfloat16, (32, 256, 256)
    window = KernelWindow(kernel=3, padding=1)
    geometry = VolumeGeometry.whole(size, window, window, window)
    x, weight = meta_image(64, half, size), torch.empty(64, 3, 3, 3, 64, dtype=half, device="meta").permute(0, 4, 1, 2, 3)
    slots = {"weights": torch.empty(32, 64, 3, 3, 3, 64, device="meta"), "biases": torch.empty(32, 64, device="meta")}
    common: dict[str, Any] = {"geometry": geometry, "precision": "bf16"}
    forward: dict[str, Any] = common | {"bias": slots["biases"][0], "scale": slots["biases"][0], "residual": x, "relu": True, "out": x}
    backward = common | {"gradient": x, "output": x}
    first = {"x": meta_image(1, half, size), "weight": weight[:, :1]}
    launches: list[tuple[str, tuple[int, ...], dict[str, Any], bool]] = [
        ("launch_conv3d", (90,), forward | {"x": x, "weight": weight}, True),
        ("launch_conv3d", (), forward | first, False),
        ("launch_volume_data_gradient", (80,), backward | {"weight": weight, "out": x}, False),
        ("launch_volume_weight_gradient", (90,), backward | {"x": x, **slots}, False),
        ("launch_volume_weight_gradient", (), backward | {"x": x, **slots, "output": None}, False),
    ]
    gates = [
        Gate(
            module=_MODULES[launch],
            launch=launch,
            when=when,
            arguments=arguments,
            matrix=True,
            wide=wide,
            copied_operands=launch == "launch_conv3d",
        )
        for launch, when, arguments, wide in launches
    ]
    singles = [in_fp32(gate, precision) for gate in gates if gate.when for precision in ("ieee", "tf32")]
    check_gates(gates + singles, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", _LAYERS, ids=lambda layer: layer.name)
def test_on_a_gpu(layer: _Layer, dtype: torch.dtype) -> None:
    """The untiled volume by each launch, with its default blocks."""
    problem = _problem(layer, dtype)
    (outputs,), (inputs,) = _tiles(layer.size, is_single=True), _tiles(layer.extents, is_single=True)
    options = {"precision": "ieee" if dtype == torch.float32 else "bf16"}

    def run(launch: str, arguments: dict[str, Any], results: list[str]) -> list[Tensor]:
        return launch_on_gpu(_MODULES[launch], launch, arguments | options, results)

    forward = {"residual": None} | _forward(layer, problem, outputs, dtype) | {"relu": layer.relu}
    forward["out"] = _empty((layer.num_samples, layer.channels[1], *layer.size), dtype)
    adjoint = _adjoint(layer, problem, inputs, dtype)
    adjoint["out"] = _empty((layer.num_samples, layer.channels[0], *layer.extents), dtype)
    weights, biases = weight_slots(problem.operands["weight"], num_splits=32)
    slots = _weight(layer, problem, outputs, dtype) | {"weights": weights, "biases": biases}
    dw, db = (gradients.sum(0).to(dtype) for gradients in run("launch_volume_weight_gradient", slots, ["weights", "biases"]))
    (y,), (dx,) = run("launch_conv3d", forward, ["out"]), run("launch_volume_data_gradient", adjoint, ["out"])
    for name, result in {"y": y, "dx": dx, "dw": dw.movedim(-1, 1), "db": db}.items():
        assert_close(result, problem.truth[name], problem.scale[name], 1000, (layer.name, dtype, name))
