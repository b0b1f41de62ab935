"""The convolution that streams along rows, and its gradient: the bits of the implicit matrix product, tiled and untiled."""

from __future__ import annotations

from collections.abc import Callable
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
    normal_numbers,
    pixels_of,
    tile_geometry,
)
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton

_EXTENTS = (9, 11)
_WINDOWS = (KernelWindow(kernel=3, padding=1), KernelWindow(kernel=3, padding=1))
_CHANNELS = (18, 5)
_WHOLE = (range(9), range(11))
#: first and last strips, one row alone, two panels
_TILES = [(range(4), range(11)), (range(4, 5), range(11)), (range(5, 9), range(6)), (range(5, 9), range(6, 11))]
#: whole maxima; the last odd row and column have none
_POOLED = [(range(9), range(11)), (range(2, 6), range(4)), (range(6, 9), range(4, 11))]
_BLOCKS = BlockSizes(pixels=16, channels=16, inner=32, rows=4)
_SAME: dict[str, Any] = {"precision": "ieee", "groups": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Operands with values of a dtype, in fp64."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    scale: Tensor
    residual: Tensor
    dy: Tensor


def _problem(dtype: torch.dtype) -> _Problem:
    draw = normal_numbers(8, dtype)
    num_in, num_out = _CHANNELS
    return _Problem(
        x=draw(2, num_in, *_EXTENTS),
        weight=draw(num_out, num_in, 3, 3),
        bias=draw(num_out),
        scale=draw(num_out),
        residual=draw(2, num_out, *_EXTENTS),
        dy=draw(2, num_out, *_EXTENTS),
    )


def _last(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous(memory_format=torch.channels_last)


def _job(launch: str, arguments: dict[str, Any], results: list[str]) -> dict[str, Any]:
    module = "conv.forward2d_triton" if launch == "launch_conv2d" else "conv.data_grad2d_triton"
    return {"run": "launch", "module": f"sft.kernels.{module}", "function": launch, "arguments": arguments, "results": results}


def _forward(problem: _Problem, tile: tuple[range, range], dtype: torch.dtype, blocks: BlockSizes) -> dict[str, Any]:
    geometry = tile_geometry(_EXTENTS, _WINDOWS, tile)
    spans = (geometry.height, geometry.width)
    x, residual = fill_buffer(problem.x, (spans[0].input, spans[1].input), dtype), problem.residual
    return {
        "x": x,
        "weight": _last(problem.weight, dtype),
        "bias": problem.bias.to(dtype),
        "scale": problem.scale.to(dtype),
        "residual": fill_buffer(residual, (spans[0].output, spans[1].output), dtype),
        "out": empty_buffer(2, _CHANNELS[1], geometry.output_size, dtype),
        "geometry": geometry,
        "relu": True,
        "blocks": blocks,
        **_SAME,
    }


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interpreted_forward(dtype: torch.dtype, tmp_path: Path) -> None:
    problem, jobs = _problem(dtype), []
    tiles = [_WHOLE, *(_TILES if dtype == torch.float32 else [])]
    implicit = BlockSizes(pixels=128, channels=16, inner=32)
    jobs.append(_job("launch_conv2d", _forward(problem, _WHOLE, dtype, implicit), ["out"]))
    jobs += [_job("launch_conv2d", _forward(problem, tile, dtype, _BLOCKS), ["out"]) for tile in tiles]
    (expected,), *results = interpret(jobs, tmp_path)
    for tile, (y,) in zip(tiles, results, strict=True):
        assert_nothing_else_written(y, (dtype, tile))
        assert torch.equal(y, pixels_of(expected, tile)), (dtype, tile)

    def linear(sign: Callable[[Tensor], Tensor]) -> Tensor:
        scaled = F.conv2d(sign(problem.x), sign(problem.weight), padding=1) * sign(problem.scale)[:, None, None]
        return scaled + sign(problem.bias)[:, None, None] + sign(problem.residual)

    assert_close(expected, linear(lambda t: t).relu(), linear(torch.abs), 9 * _CHANNELS[0] + 3, dtype)


@needs_triton
def test_interpreted_maxima(tmp_path: Path) -> None:
    """Maxima and taps are those of the implicit matrix product, bit for bit, also of NaN and of equal elements."""
    problem, dtype = _problem(torch.float32), torch.float32
    problem.x[0, 3, 2, 2] = float("nan")
    problem.x[1, :, 4:7, 5:] = 0.0
    jobs = []
    for blocks in (BlockSizes(pixels=128, channels=16, inner=32), _BLOCKS):
        for tile in _POOLED:
            arguments = _forward(problem, tile, dtype, blocks) | {"residual": None}
            size = tuple(length // 2 for length in arguments["geometry"].output_size)
            arguments |= {"out": empty_buffer(2, _CHANNELS[1], size, dtype), "taps": empty_buffer(2, 2, size, torch.uint8)}
            jobs.append(_job("launch_conv2d", arguments, ["out", "taps"]))
    results = interpret(jobs, tmp_path)
    for (maxima, taps), (ours, our_taps) in zip(results[: len(_POOLED)], results[len(_POOLED) :], strict=True):
        assert bool(torch.equal(ours.nan_to_num(-1.0), maxima.nan_to_num(-1.0))) and torch.equal(our_taps, taps)
    assert bool(results[0][0].isnan().any()) and not bool(results[0][0].isnan().all())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_interpreted_gradient(dtype: torch.dtype, tmp_path: Path) -> None:
    """Plain and under a ReLU; tiles have the bits of the untiled result, and zeros in rows outside of the image."""
    problem, jobs, num_in = _problem(dtype), [], _CHANNELS[0]
    y = F.conv2d(problem.x, problem.weight, problem.bias, padding=1).to(dtype).relu()
    tiles = [_WHOLE, *(_TILES[1::2] if dtype == torch.float32 else [])]
    common: dict[str, Any] = {
        "weight": _last(problem.weight, dtype),
        "blocks": BlockSizes(pixels=16, channels=32, inner=16, rows=4),
        **_SAME,
    }
    for tile in tiles:
        geometry = tile_geometry(_EXTENTS, _WINDOWS, tile, adjoint=True)
        spans = (geometry.height.output, geometry.width.output)
        dy, on = fill_buffer(problem.dy, spans, dtype), fill_buffer(y.double(), spans, dtype)
        for output in (None, on):
            arguments = {"gradient": dy, "output": output, "geometry": geometry, "out": empty_buffer(2, num_in, geometry.input_size, dtype)}
            jobs.append(_job("launch_data_gradient", common | arguments, ["out"]))
    results = interpret(jobs, tmp_path)
    for number, masked_dy in enumerate((problem.dy, problem.dy * (y > 0))):
        (dx,) = results[number]
        truth, scale = (F.conv_transpose2d(sign(masked_dy), sign(problem.weight), padding=1) for sign in (lambda t: t, torch.abs))
        assert_nothing_else_written(dx, (dtype, number))
        assert_close(dx, truth, scale, 9 * _CHANNELS[1], (dtype, number))
    for place, tile in enumerate(tiles):
        for number in range(2):
            assert torch.equal(results[2 * place + number][0], pixels_of(results[number][0], tile)), (dtype, tile, number)


@needs_triton
def test_interpreted_buffers_beyond_the_border(tmp_path: Path) -> None:
    """Rows of the result that are not data get zero."""
    problem, dtype = _problem(torch.float32), torch.float32
    geometry = tile_geometry(_EXTENTS, _WINDOWS, (range(-1, 10), range(-2, 12)), adjoint=True)
    dy = fill_buffer(problem.dy, (geometry.height.output, geometry.width.output), dtype)
    arguments = {"gradient": dy, "output": None, "geometry": geometry, "weight": _last(problem.weight, dtype)}
    blocks = BlockSizes(pixels=16, channels=32, inner=16, rows=4)
    job = _job("launch_data_gradient", arguments | {"out": empty_buffer(2, 18, (11, 14), dtype), "blocks": blocks, **_SAME}, ["out"])
    ((dx,),) = interpret([job], tmp_path)
    assert_nothing_else_written(dx, "beyond")
    truth = F.pad(F.conv_transpose2d(problem.dy, problem.weight, padding=1), (2, 1, 1, 1))
    torch.testing.assert_close(dx.double(), truth, rtol=1e-4, atol=1e-4)
    assert torch.equal(dx == 0, truth == 0)


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    """For Hopper alone, where products read the weight from shared memory; on other GPUs it would be in registers."""
    half, geometry = torch.bfloat16, Geometry.whole((256, 4096), *_WINDOWS)
    image, pooled, taps = meta_image(64, half), meta_image(64, half, (128, 2048)), meta_image(16, torch.uint8, (128, 2048))
    weight, bias = torch.empty(64, 3, 3, 64, dtype=half, device="meta").permute(0, 3, 1, 2), torch.empty(64, device="meta")
    common: dict[str, Any] = {"weight": weight, "geometry": geometry, "groups": 1, "precision": "bf16", "variant": "rows"}
    forward = common | {"x": image, "bias": bias, "scale": bias, "relu": True}
    backward = common | {"out": image}
    launches: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("launch_conv2d", forward | {"residual": image, "out": image}, ()),
        ("launch_conv2d", forward | {"residual": None, "out": pooled, "taps": taps}, (90,)),
        ("launch_data_gradient", backward | {"gradient": image, "output": None}, ()),
        ("launch_data_gradient", backward | {"gradient": image, "output": image}, ()),
    ]
    modules = {"launch_conv2d": "conv.forward2d_triton", "launch_data_gradient": "conv.data_grad2d_triton"}
    gates = [
        Gate(
            module=modules[launch],
            launch=launch,
            when=when,
            only=(90,),
            arguments=arguments,
            matrix=True,
            wide=launch == "launch_conv2d",
            copied_operands=arguments.get("output") is None,
        )
        for launch, arguments, when in launches
    ]
    check_gates(gates, tmp_path)
