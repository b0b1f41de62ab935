"""Operations fused into a convolution: the scale and shift of a norm, maxima of 2 x 2 pixels and their gradient."""

from __future__ import annotations

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
from tests.helpers.triton_gates import Gate, check_gates, in_fp32, meta_image
from tests.helpers.triton_process import interpret, needs_triton
from tests.kernels.oracles.pool import pack_taps, reference_max_pool

_EXTENTS = (10, 9)
_WINDOW = KernelWindow(kernel=3, padding=1)
_WINDOWS = (_WINDOW, _WINDOW)
_SIZE = (5, 4)  # of the maxima
#: rows and columns of the convolution's output: whole maxima, and the last odd column, which has none
_TILES = [(range(4), range(9)), (range(4, 10), range(2)), (range(4, 10), range(2, 9))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Operands with values of a dtype, in fp64, PyTorch's results, and the same sums of absolute values."""

    operands: dict[str, Tensor]
    y: Tensor
    #: gradient of the ReLU's input, from that of the maxima
    dense: Tensor
    truth: dict[str, Tensor]
    scale: dict[str, Tensor]


def _problem(dtype: torch.dtype) -> _Problem:
    draw = normal_numbers(4, dtype)
    operands = {"x": draw(2, 5, *_EXTENTS), "weight": draw(6, 5, 3, 3), "scale": draw(6), "bias": draw(6), "dy": draw(2, 6, *_SIZE)}

    def linear(sign: Any, dense: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        x, weight = sign(operands["x"]).requires_grad_(), sign(operands["weight"]).requires_grad_()
        bias = sign(operands["bias"]).requires_grad_()
        y = F.conv2d(x, weight, bias, padding=1)
        if dense is None:
            return y, {}
        return y, dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, (x, weight, bias), dense), strict=True))

    y, _ = linear(lambda t: t.clone(), None)
    # The largest stored values, as in PyTorch, and their gradient.
    stored = y.detach().to(dtype).relu().double().requires_grad_()
    maxima = F.max_pool2d(stored, 2)
    (spread,) = torch.autograd.grad(maxima, stored, operands["dy"])
    dense = torch.where(stored > 0, spread, 0)
    scale = linear(lambda t: t.abs(), dense.abs())
    return _Problem(
        operands=operands,
        y=y.detach(),
        dense=dense,
        truth=linear(lambda t: t.clone(), dense)[1] | {"y": y.detach()},
        scale=scale[1] | {"y": scale[0].detach()},
    )


def _last(image: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return image.to(dtype).contiguous(memory_format=torch.channels_last)


def _whole() -> Geometry:
    return Geometry.whole(_EXTENTS, *_WINDOWS)


def _maxima_and_taps(problem: _Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Maxima of 2 x 2 pixels of ReLU of the convolution, and the packed numbers of the pixels that they came from."""
    x, weight, bias = (problem.operands[name].to(dtype) for name in ("x", "weight", "bias"))
    pool = KernelWindow(kernel=2, stride=2)
    maxima, taps = reference_max_pool(F.conv2d(x, weight, bias, padding=1).relu(), Geometry.whole(_EXTENTS, pool, pool))
    return _last(maxima, dtype), pack_taps(taps).contiguous(memory_format=torch.channels_last)


_BLOCKS = {"blocks": BlockSizes(pixels=64, channels=16, inner=16), "groups": 1, "precision": "ieee"}


def _job(module: str, launch: str, arguments: dict[str, Any], results: list[str]) -> dict[str, Any]:
    return {"run": "launch", "module": f"sft.kernels.{module}", "function": launch, "arguments": arguments, "results": results}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interpreted_maxima(dtype: torch.dtype, tmp_path: Path) -> None:
    """Maxima and taps are those of the unfused kernel's output, bit for bit, also of NaN; the gradients are near fp64."""
    jobs: list[dict[str, Any]] = []
    problem = _problem(dtype)
    operands = problem.operands
    x, weight, bias = operands["x"].clone(), _last(operands["weight"], dtype), operands["bias"].to(dtype)
    x[1, 0, 2, 3] = float("nan")
    common: dict[str, Any] = {
        "weight": weight,
        "bias": bias,
        "residual": None,
        "relu": True,
        "scale": operands["scale"].to(dtype),
        **_BLOCKS,
    }
    plain = {"x": fill_buffer(x, (_whole().height.input, _whole().width.input), dtype), "geometry": _whole()}
    jobs.append(
        _job(
            "conv.forward2d_triton",
            "launch_conv2d",
            common | plain | {"out": torch.empty(2, 6, *_EXTENTS, dtype=dtype).to(memory_format=torch.channels_last)},
            ["out"],
        )
    )
    for tile in _TILES if dtype == torch.float32 else _TILES[:1]:
        geometry = tile_geometry(_EXTENTS, _WINDOWS, tile)
        arguments = common | {"x": fill_buffer(x, (geometry.height.input, geometry.width.input), dtype), "geometry": geometry}
        rows, columns = geometry.output_size
        arguments["out"] = empty_buffer(2, 6, (rows // 2, columns // 2), dtype)
        arguments["taps"] = empty_buffer(2, 2, (rows // 2, columns // 2), torch.uint8)
        jobs.append(_job("conv.forward2d_triton", "launch_conv2d", arguments, ["out", "taps"]))
    maxima, taps = _maxima_and_taps(problem, dtype)
    backward = {"gradient": _last(operands["dy"], dtype), "output": maxima, "taps": taps, "geometry": _whole()}
    dx = empty_buffer(2, 5, _EXTENTS, dtype)
    jobs.append(_job("conv.data_grad2d_triton", "launch_data_gradient", backward | {"weight": weight, "out": dx, **_BLOCKS}, ["out"]))
    slots = dict(zip(("weights", "biases"), weight_slots(operands["weight"]), strict=True))
    arguments = backward | {"x": _last(operands["x"], dtype), **slots}
    options = {"groups": 1, "precision": "ieee", "block": (64, 16, 16)}
    jobs.append(_job("conv.weight_grad2d_triton", "launch_weight_gradient", arguments | options, ["weights", "biases"]))
    results = iter(interpret(jobs, tmp_path))
    (y,) = next(results)
    assert bool(y.isnan().any()) and not bool(y.isnan().all())
    expected, taps = F.max_pool2d(y, 2, return_indices=True)
    numbers = taps // _EXTENTS[1] % 2 * 2 + taps % _EXTENTS[1] % 2
    for tile in _TILES if dtype == torch.float32 else _TILES[:1]:
        maxima, packed = next(results)
        assert torch.equal(maxima.nan_to_num(-1.0), pixels_of(expected, tile, 2).nan_to_num(-1.0)), (dtype, tile)
        for channel in range(6):
            ours = packed[:, channel // 4] >> channel % 4 * 2 & 3
            assert torch.equal(ours.long(), pixels_of(numbers, tile, 2)[:, channel]), (dtype, tile, channel)
        assert not bool((packed[:, 1] >> 4).any()), "channels that are not there"
    (dx,) = next(results)
    assert_nothing_else_written(dx, dtype)
    assert_close(dx, problem.truth["dx"], problem.scale["dx"], 9 * 6, (dtype, "dx"))
    weights, biases = next(results)
    dw = weights.double().sum(0).permute(0, 3, 1, 2).float()
    assert_close(dw, problem.truth["dw"], problem.scale["dw"], 180, (dtype, "dw"))
    assert_close(biases.double().sum(0).float(), problem.truth["db"], problem.scale["db"], 180, (dtype, "db"))


@needs_triton
def test_interpreted_with_an_old_assembler(tmp_path: Path) -> None:
    """Operands are materialized for assemblers that multiply computed ones wrongly. Results have the same bits,
    except sums over pixels: their slots begin with other pixels if the last column has no maximum."""
    problem, dtype, geometry = _problem(torch.float16), torch.float16, _whole()
    operands = problem.operands
    maxima, taps = _maxima_and_taps(problem, dtype)
    backward: dict[str, Any] = {"gradient": _last(operands["dy"], dtype), "output": maxima, "taps": taps, "geometry": geometry}
    summed = {"groups": 1, "precision": "ieee", "block": (64, 16, 16)}

    def jobs() -> list[dict[str, Any]]:
        slots = dict(zip(("weights", "biases"), weight_slots(operands["weight"]), strict=True))
        data = {"weight": _last(operands["weight"], dtype), "out": empty_buffer(2, 5, _EXTENTS, dtype), **_BLOCKS}
        weight = {"x": _last(operands["x"], dtype), **slots, **summed}
        return [
            _job("conv.data_grad2d_triton", "launch_data_gradient", backward | data, ["out"]),
            _job("conv.weight_grad2d_triton", "launch_weight_gradient", backward | weight, ["weights", "biases"]),
        ]

    (data, weight), (data_apart, weight_apart) = (
        interpret([job | {"affected": affected} for job in jobs()], tmp_path) for affected in (False, True)
    )
    assert bool((data[0] != 0).any()) and torch.equal(data[0], data_apart[0])
    for fused, apart in zip(weight, weight_apart, strict=True):
        assert bool((fused != 0).any())
        torch.testing.assert_close(fused.sum(0), apart.sum(0), rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("family", ["forward", "backward"])
def test_compiles_ahead_of_time(family: str, tmp_path: Path) -> None:
    half, window = torch.bfloat16, KernelWindow(kernel=3, padding=1)
    geometry = Geometry.whole((256, 4096), window, window)
    x, pooled, taps = (
        meta_image(c, t, s) for c, t, s in ((64, half, (256, 4096)), (64, half, (128, 2048)), (16, torch.uint8, (128, 2048)))
    )
    weight, vector = torch.empty(64, 3, 3, 64, dtype=half, device="meta").permute(0, 3, 1, 2), torch.empty(64, device="meta")
    common: dict[str, Any] = {"geometry": geometry, "groups": 1, "precision": "bf16"}
    forward: dict[str, Any] = common | {"bias": vector, "residual": None, "relu": True, "scale": vector}
    slots = {"weights": torch.empty(32, 64, 3, 3, 64, device="meta"), "biases": torch.empty(32, 64, device="meta")}
    backward = common | {"gradient": pooled, "output": pooled, "taps": taps}

    def gate(module: str, launch: str, when: tuple[int, ...], arguments: dict[str, Any], **facts: Any) -> Gate:
        return Gate(module=module, launch=launch, when=when, arguments=arguments, matrix=True, **facts)

    gates = {
        "forward": [
            gate(
                "conv.forward2d_triton",
                "launch_conv2d",
                (90,),
                forward | {"x": x, "weight": weight, "out": pooled, "taps": taps},
                wide=True,
                copied_operands=True,
            ),
        ],
        "backward": [
            gate("conv.data_grad2d_triton", "launch_data_gradient", (90,), backward | {"weight": weight, "out": x}),
            gate("conv.weight_grad2d_triton", "launch_weight_gradient", (80,), backward | {"x": x, **slots}),
        ],
    }
    check_gates([*gates[family], *(in_fp32(gate, precision) for gate in gates[family] for precision in ("ieee", "tf32"))], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    problem = _problem(dtype)
    operands = problem.operands
    maxima, taps = _maxima_and_taps(problem, dtype)
    x, weight = _last(operands["x"], dtype), _last(operands["weight"], dtype)
    common: dict[str, Any] = {"geometry": _whole(), "groups": 1, "precision": "ieee" if dtype == torch.float32 else "bf16"}
    backward = common | {"gradient": _last(operands["dy"], dtype), "output": maxima, "taps": taps}
    forward = common | {"x": x, "weight": weight, "bias": operands["bias"].to(dtype), "residual": None, "relu": True}
    forward |= {"out": torch.empty_like(maxima), "taps": torch.empty_like(taps)}
    (y,) = launch_on_gpu("conv.forward2d_triton", "launch_conv2d", forward, ["out"])
    assert_close(y, F.max_pool2d(problem.truth["y"].relu(), 2), F.max_pool2d(problem.scale["y"], 2), 46, (dtype, "y"))
    (dx,) = launch_on_gpu(
        "conv.data_grad2d_triton", "launch_data_gradient", backward | {"weight": weight, "out": torch.empty_like(x)}, ["out"]
    )
    slots = dict(zip(("weights", "biases"), weight_slots(operands["weight"], num_splits=32), strict=True))
    weights, biases = launch_on_gpu("conv.weight_grad2d_triton", "launch_weight_gradient", backward | {"x": x, **slots}, list(slots))
    results = (dx, weights.sum(0).permute(0, 3, 1, 2).to(dtype), biases.sum(0).to(dtype))
    for name, result, terms in zip(("dx", "dw", "db"), results, (54, 180, 180), strict=True):
        assert_close(result, problem.truth[name], problem.scale[name], terms, (dtype, name))
