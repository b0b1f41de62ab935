"""What is fused into a convolution: a norm's scale and shift, maxima of 2 x 2 pixels and their gradient, an image of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft import InputError
from sft.kernels.common import BlockSizes
from sft.kernels.conv.conv2d import GradientSlots, conv2d
from sft.kernels.conv.conv2d_pool import (
    conv2d_max_pool,
    conv2d_max_pool_data_gradient,
    conv2d_max_pool_weight_gradient,
    conv2d_max_pool_with_taps,
    pooled_size,
)
from sft.kernels.conv.uint8_stem import PixelLevels, stem_conv2d
from sft.kernels.geometry import Geometry, KernelWindow
from tests.helpers.tile_buffers import assert_close, assert_nothing_else_written, empty_buffer, fill_buffer, tile_geometry
from tests.helpers.triton_gates import Gate, check_gates, in_fp32, meta_image
from tests.helpers.triton_process import interpret, needs_triton

_EXTENTS = (10, 9)
_WINDOW = KernelWindow(kernel=3, padding=1)
_WINDOWS = (_WINDOW, _WINDOW)
_SIZE = (5, 4)  # of the maxima
#: rows and columns of the convolution's output: whole maxima, and the last odd column, which has none
_TILES = [(range(4), range(9)), (range(4, 10), range(2)), (range(4, 10), range(2, 9))]
_BYTE_LEVELS = PixelLevels.of([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Operands with values of a dtype, in fp64, and what PyTorch makes of them, with the sums of absolute values beside it."""

    parts: dict[str, Tensor]
    y: Tensor
    #: where the maxima's gradient goes
    dense: Tensor
    truth: dict[str, Tensor]
    scale: dict[str, Tensor]


def _problem(dtype: torch.dtype, *, num_in: int = 5) -> _Problem:
    random = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).double()

    parts = {"x": draw(2, num_in, *_EXTENTS), "weight": draw(6, num_in, 3, 3), "scale": draw(6), "bias": draw(6), "dy": draw(2, 6, *_SIZE)}

    def linear(sign: Any, dense: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        x, weight = sign(parts["x"]).requires_grad_(), sign(parts["weight"]).requires_grad_()
        bias = sign(parts["bias"]).requires_grad_()
        y = F.conv2d(x, weight, bias, padding=1)
        if dense is None:
            return y, {}
        return y, dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, (x, weight, bias), dense), strict=True))

    y, _ = linear(lambda t: t.clone(), None)
    # The largest of the values that are stored, as PyTorch would have it, and the gradient that they get.
    stored = y.detach().to(dtype).relu().double().requires_grad_()
    maxima = F.max_pool2d(stored, 2)
    (spread,) = torch.autograd.grad(maxima, stored, parts["dy"])
    dense = torch.where(stored > 0, spread, 0)
    scale = linear(lambda t: t.abs(), dense.abs())
    return _Problem(
        parts=parts,
        y=y.detach(),
        dense=dense,
        truth=linear(lambda t: t.clone(), dense)[1] | {"y": y.detach()},
        scale=scale[1] | {"y": scale[0].detach()},
    )


def _last(image: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return image.to(dtype).contiguous(memory_format=torch.channels_last)


def _cut(image: Tensor, tile: tuple[range, range], by: int = 1) -> Tensor:
    rows, columns = (slice(part.start // by, part.stop // by) for part in tile)
    return image[:, :, rows, columns]


def _whole() -> Geometry:
    return Geometry.whole(_EXTENTS, *_WINDOWS)


def test_scale_and_its_gradients() -> None:
    problem = _problem(torch.float64)
    leaves = [problem.parts[name].clone().requires_grad_() for name in ("x", "weight", "scale", "bias")]
    theirs = (F.conv2d(leaves[0], leaves[1], padding=1) * leaves[2][:, None, None] + leaves[3][:, None, None]).relu()
    ours = conv2d(_last(leaves[0]), leaves[1], _whole(), scale=leaves[2], bias=leaves[3], activation="relu")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own, expected in zip(*(torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_maxima_and_their_gradients(activation: Any) -> None:
    problem = _problem(torch.float64)
    leaves = [problem.parts[name].clone().requires_grad_() for name in ("x", "weight", "scale", "bias")]
    z = F.conv2d(leaves[0], leaves[1], padding=1) * leaves[2][:, None, None] + leaves[3][:, None, None]
    theirs = F.max_pool2d(z.relu() if activation == "relu" else z, 2)
    ours = conv2d_max_pool(_last(leaves[0]), leaves[1], _whole(), scale=leaves[2], bias=leaves[3], activation=activation)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for own, expected in zip(*(torch.autograd.grad(y, leaves, problem.parts["dy"]) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-11)


def test_tiles_of_maxima_are_the_whole() -> None:
    problem = _problem(torch.float64)
    parts = problem.parts
    maxima, taps = conv2d_max_pool_with_taps(_last(parts["x"]), parts["weight"], _whole(), bias=parts["bias"])
    slots = GradientSlots.zeros(parts["weight"], bias=True, num_splits=2)
    for tile in _TILES:
        geometry = tile_geometry(_EXTENTS, _WINDOWS, tile)
        x = fill_buffer(parts["x"], (geometry.height.input, geometry.width.input), torch.float64)
        ours = conv2d_max_pool_with_taps(x, parts["weight"], geometry, bias=parts["bias"])
        torch.testing.assert_close(ours[0], _cut(maxima, tile, 2), rtol=1e-12, atol=1e-12)
        assert torch.equal(ours[1], _cut(taps, tile, 2))
        given = [_last(_cut(image, tile, 2)) for image in (parts["dy"], maxima)]
        conv2d_max_pool_weight_gradient(
            given[0], _cut(taps, tile, 2).contiguous(memory_format=torch.channels_last), x, geometry, into=slots, output=given[1]
        )
    dw, db = slots.total(torch.float64)
    assert db is not None
    torch.testing.assert_close(dw, problem.truth["dw"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(db, problem.truth["db"], rtol=1e-11, atol=1e-11)
    dx = conv2d_max_pool_data_gradient(_last(parts["dy"]), taps, parts["weight"], _whole(), output=maxima)
    torch.testing.assert_close(dx, problem.truth["dx"], rtol=1e-11, atol=1e-11)


def _bytes() -> Tensor:
    return torch.randint(256, (2, 3, *_EXTENTS), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))


def test_stem_and_its_gradients() -> None:
    problem, x = _problem(torch.float64, num_in=3), _bytes()
    leaves = [problem.parts[name].clone().requires_grad_() for name in ("weight", "scale", "bias")]
    z = F.conv2d(_BYTE_LEVELS.numbers(x, torch.float64), leaves[0], padding=1)
    theirs = (z * leaves[1][:, None, None] + leaves[2][:, None, None]).relu()
    options: dict[str, Any] = {"scale": leaves[1], "bias": leaves[2], "activation": "relu"}
    ours = stem_conv2d(x.contiguous(memory_format=torch.channels_last), _BYTE_LEVELS, leaves[0], _whole(), **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own, expected in zip(*(torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-11)


def test_what_does_not_fit_is_refused() -> None:
    geometry = tile_geometry(_EXTENTS, _WINDOWS, (range(3, 8), range(9)))
    with pytest.raises(InputError, match=r"height: outputs \[3, 8\) of 10 are not whole pairs"):
        pooled_size(geometry)
    x = torch.zeros(1, 3, *_EXTENTS).to(memory_format=torch.channels_last)
    with pytest.raises(InputError, match=r"takes an image of torch.uint8, got torch.float32"):
        stem_conv2d(x, _BYTE_LEVELS, torch.zeros(4, 3, 3, 3), _whole())
    with pytest.raises(InputError, match=r"gain is torch.float32 \(3,\) on cpu; give torch.float32 \[1\]"):
        stem_conv2d(x[:, :1].to(torch.uint8), _BYTE_LEVELS, torch.zeros(4, 1, 3, 3), _whole())
    with pytest.raises(InputError, match=r"scale has shape \(3,\), the layer has 4 outputs"):
        conv2d(x, torch.zeros(4, 3, 3, 3), _whole(), scale=torch.zeros(3))
    gradient = torch.zeros(1, 4, *_SIZE).to(memory_format=torch.channels_last)
    with pytest.raises(InputError, match=r"taps are uint8, got torch.float32"):
        conv2d_max_pool_data_gradient(gradient, gradient[:, :1], torch.zeros(4, 3, 3, 3), _whole())


_BLOCKS = {"blocks": BlockSizes(pixels=64, channels=16, inner=16), "groups": 1, "precision": "ieee"}


def _job(module: str, launch: str, arguments: dict[str, Any], results: list[str]) -> dict[str, Any]:
    return {"run": "launch", "module": f"sft.kernels.{module}", "function": launch, "arguments": arguments, "results": results}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interpreted_maxima(dtype: torch.dtype, tmp_path: Path) -> None:
    """Maxima and taps are those of the unfused kernel's output, bit for bit, also of NaN; the gradients are near fp64."""
    jobs: list[dict[str, Any]] = []
    problem = _problem(dtype)
    parts = problem.parts
    x, weight, bias = parts["x"].clone(), _last(parts["weight"], dtype), parts["bias"].to(dtype)
    x[1, 0, 2, 3] = float("nan")
    common: dict[str, Any] = {
        "weight": weight,
        "bias": bias,
        "residual": None,
        "relu": True,
        "scale": parts["scale"].to(dtype),
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
        arguments["out"] = empty_buffer(2, 6, pooled_size(geometry), dtype)
        arguments["taps"] = empty_buffer(2, 2, pooled_size(geometry), torch.uint8)
        jobs.append(_job("conv.forward2d_triton", "launch_conv2d", arguments, ["out", "taps"]))
    maxima, taps = conv2d_max_pool_with_taps(_last(parts["x"], dtype), weight, _whole(), bias=bias)
    backward = {"gradient": _last(parts["dy"], dtype), "output": maxima, "taps": taps, "geometry": _whole()}
    dx = empty_buffer(2, 5, _EXTENTS, dtype)
    jobs.append(_job("conv.data_grad2d_triton", "launch_data_gradient", backward | {"weight": weight, "out": dx, **_BLOCKS}, ["out"]))
    slots = GradientSlots.zeros(parts["weight"].float(), bias=True, num_splits=2)
    arguments = backward | {"x": _last(parts["x"], dtype), "weights": slots.weights, "biases": slots.biases}
    options = {"groups": 1, "precision": "ieee", "block": (64, 16, 16)}
    jobs.append(_job("conv.weight_grad2d_triton", "launch_weight_gradient", arguments | options, ["weights", "biases"]))
    results = iter(interpret(jobs, tmp_path))
    (y,) = next(results)
    assert bool(y.isnan().any()) and not bool(y.isnan().all())
    expected, taps = F.max_pool2d(y, 2, return_indices=True)
    numbers = taps // _EXTENTS[1] % 2 * 2 + taps % _EXTENTS[1] % 2
    for tile in _TILES if dtype == torch.float32 else _TILES[:1]:
        maxima, packed = next(results)
        assert torch.equal(maxima.nan_to_num(-1.0), _cut(expected, tile, 2).nan_to_num(-1.0)), (dtype, tile)
        for channel in range(6):
            ours = packed[:, channel // 4] >> channel % 4 * 2 & 3
            assert torch.equal(ours.long(), _cut(numbers, tile, 2)[:, channel]), (dtype, tile, channel)
        assert not bool((packed[:, 1] >> 4).any()), "channels that are not there"
    (dx,) = next(results)
    assert_nothing_else_written(dx, dtype)
    assert_close(dx, problem.truth["dx"], problem.scale["dx"], 9 * 6, (dtype, "dx"))
    weights, biases = next(results)
    dw = weights.double().sum(0).permute(0, 3, 1, 2).float()
    assert_close(dw, problem.truth["dw"], problem.scale["dw"], 180, (dtype, "dw"))
    assert_close(biases.double().sum(0).float(), problem.truth["db"], problem.scale["db"], 180, (dtype, "db"))


@needs_triton
def test_interpreted_stem(tmp_path: Path) -> None:
    """Bytes around the tile are 255 and would be seen; tiles have the bits of the whole."""
    jobs: list[dict[str, Any]] = []
    x, dtypes = _bytes(), (torch.float32, torch.float16)
    whole = [(range(_EXTENTS[0]), range(_EXTENTS[1]))]
    levels = (_BYTE_LEVELS.gain, _BYTE_LEVELS.offset)
    problems = {dtype: _problem(dtype, num_in=3).parts for dtype in dtypes}
    for dtype, parts in problems.items():
        for tile in whole + (_TILES if dtype == torch.float32 else []):
            geometry = tile_geometry(_EXTENTS, _WINDOWS, tile)
            arguments: dict[str, Any] = {
                "x": fill_buffer(x, (geometry.height.input, geometry.width.input), torch.uint8),
                "geometry": geometry,
            }
            arguments |= {"weight": _last(parts["weight"], dtype), "bias": parts["bias"].to(dtype), "residual": None, "relu": False}
            arguments |= {"scale": None, "levels": levels, "out": empty_buffer(2, 6, geometry.output_size, dtype), **_BLOCKS}
            jobs.append(_job("conv.forward2d_triton", "launch_conv2d", arguments, ["out"]))
        slots = GradientSlots.zeros(parts["weight"].float(), bias=True, num_splits=2)
        geometry = tile_geometry(_EXTENTS, _WINDOWS, whole[0])
        dy = torch.randn(2, 6, *_EXTENTS, generator=torch.Generator().manual_seed(9)).to(dtype)
        arguments = {
            "x": fill_buffer(x, (geometry.height.input, geometry.width.input), torch.uint8),
            "geometry": geometry,
            "levels": levels,
        }
        arguments |= {"gradient": _last(dy, dtype), "output": None, "weights": slots.weights, "biases": slots.biases}
        options = {"groups": 1, "precision": "ieee", "block": (64, 16, 32)}
        jobs.append(_job("conv.weight_grad2d_triton", "launch_weight_gradient", arguments | options, ["weights", "biases"]))
    results = iter(interpret(jobs, tmp_path))
    for dtype, parts in problems.items():
        numbers = _BYTE_LEVELS.numbers(x, dtype).double()
        y = F.conv2d(numbers, parts["weight"], parts["bias"], padding=1)
        scale = F.conv2d(numbers.abs(), parts["weight"].abs(), parts["bias"].abs(), padding=1)
        (image,) = next(results)
        assert_nothing_else_written(image, dtype)
        assert_close(image, y, scale, 30, dtype)
        for tile in _TILES if dtype == torch.float32 else []:
            (ours,) = next(results)
            assert torch.equal(ours, _cut(image, tile)), tile
        weights, _ = next(results)
        dy = torch.randn(2, 6, *_EXTENTS, generator=torch.Generator().manual_seed(9)).to(dtype).double()
        dw, bound = (torch.nn.grad.conv2d_weight(s(numbers), (6, 3, 3, 3), s(dy), padding=1) for s in (lambda t: t, torch.abs))
        assert_close(weights.double().sum(0).permute(0, 3, 1, 2).float(), dw, bound, 180, (dtype, "dw"))


@needs_triton
def test_interpreted_with_an_old_assembler(tmp_path: Path) -> None:
    """Where products of computed operands are wrong, operands are made in memory first, of the same values: so results have the same bits,
    but for sums over pixels, which begin with other pixels in each slot where a last column has no maximum."""
    problem, dtype, geometry = _problem(torch.float16), torch.float16, _whole()
    parts, stem = problem.parts, _problem(torch.float16, num_in=3).parts
    weight, image = _last(parts["weight"], dtype), _bytes().contiguous(memory_format=torch.channels_last)
    maxima, taps = conv2d_max_pool_with_taps(_last(parts["x"], dtype), weight, geometry, bias=parts["bias"].to(dtype))
    backward: dict[str, Any] = {"gradient": _last(parts["dy"], dtype), "output": maxima, "taps": taps, "geometry": geometry}
    levels = {"levels": (_BYTE_LEVELS.gain, _BYTE_LEVELS.offset), "geometry": geometry, "x": image}
    summed = {"groups": 1, "precision": "ieee", "block": (64, 16, 16)}

    def jobs() -> list[dict[str, Any]]:
        slots, few = (GradientSlots.zeros(given["weight"].float(), bias=True, num_splits=2) for given in (parts, stem))
        dx, y = empty_buffer(2, 5, _EXTENTS, dtype), empty_buffer(2, 6, _EXTENTS, dtype)
        forward = {"weight": _last(stem["weight"], dtype), "bias": None, "residual": None, "relu": True, "out": y}
        sums, own = ({"weights": one.weights, "biases": one.biases} for one in (slots, few))
        plain = {"gradient": _last(problem.dense, dtype), "output": None}
        return [
            _job("conv.data_grad2d_triton", "launch_data_gradient", backward | {"weight": weight, "out": dx, **_BLOCKS}, ["out"]),
            _job(
                "conv.weight_grad2d_triton",
                "launch_weight_gradient",
                backward | {"x": _last(parts["x"], dtype), **sums, **summed},
                ["weights", "biases"],
            ),
            _job("conv.forward2d_triton", "launch_conv2d", levels | forward | _BLOCKS, ["out"]),
            _job("conv.weight_grad2d_triton", "launch_weight_gradient", levels | plain | own | summed, ["weights", "biases"]),
        ]

    results = interpret([*jobs(), *(job | {"affected": True} for job in jobs())], tmp_path)
    assert len(results) == 8
    for number, (fused, apart) in enumerate(zip(results[:4], results[4:], strict=True)):
        for one, other in zip(fused, apart, strict=True):
            assert bool((one != 0).any())
            if number == 1:
                torch.testing.assert_close(one.sum(0), other.sum(0), rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(one, other), number


@needs_triton
@pytest.mark.parametrize("family", ["forward", "backward"])
def test_compiles_ahead_of_time(family: str, tmp_path: Path) -> None:
    half, window = torch.bfloat16, KernelWindow(kernel=3, padding=1)
    geometry = Geometry.whole((256, 4096), window, window)
    x, y, pooled, taps = (
        meta_image(c, t, s)
        for c, t, s in ((64, half, (256, 4096)), (64, half, (256, 4096)), (64, half, (128, 2048)), (16, torch.uint8, (128, 2048)))
    )
    weight, vector = torch.empty(64, 3, 3, 64, dtype=half, device="meta").permute(0, 3, 1, 2), torch.empty(64, device="meta")
    stem_x, stem_weight = meta_image(3, torch.uint8), torch.empty(64, 3, 3, 3, dtype=half, device="meta").permute(0, 3, 1, 2)
    levels = (vector[:3], vector[:3])
    common: dict[str, Any] = {"geometry": geometry, "groups": 1, "precision": "bf16"}
    forward: dict[str, Any] = common | {"bias": vector, "residual": None, "relu": True, "scale": vector}
    slots = {"weights": torch.empty(32, 64, 3, 3, 64, device="meta"), "biases": torch.empty(32, 64, device="meta")}
    backward = common | {"gradient": pooled, "output": pooled, "taps": taps}

    def gate(module: str, launch: str, when: tuple[int, ...], arguments: dict[str, Any], **facts: Any) -> Gate:
        return Gate(module=module, launch=launch, when=when, arguments=arguments, matrix=True, **facts)

    stem_slots = {"weights": torch.empty(32, 64, 3, 3, 3, device="meta"), "biases": slots["biases"]}
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
            gate(
                "conv.forward2d_triton", "launch_conv2d", (80,), forward | {"x": stem_x, "weight": stem_weight, "out": y, "levels": levels}
            ),
        ],
        "backward": [
            gate("conv.data_grad2d_triton", "launch_data_gradient", (90,), backward | {"weight": weight, "out": x}),
            gate("conv.weight_grad2d_triton", "launch_weight_gradient", (80,), backward | {"x": x, **slots}),
            gate(
                "conv.weight_grad2d_triton",
                "launch_weight_gradient",
                (),
                common | {"gradient": y, "output": y, "x": stem_x, "levels": levels, **stem_slots},
            ),
        ],
    }
    check_gates([*gates[family], *(in_fp32(gate, precision) for gate in gates[family] for precision in ("ieee", "tf32"))], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    problem = _problem(dtype)
    x, weight = (_last(problem.parts[name], dtype).cuda().requires_grad_() for name in ("x", "weight"))
    bias = problem.parts["bias"].to(dtype).cuda().requires_grad_()
    y = conv2d_max_pool(x, weight, _whole(), bias=bias)
    results = torch.autograd.grad(y, (x, weight, bias), problem.parts["dy"].to(dtype).cuda())
    for name, result, terms in zip(("dx", "dw", "db"), results, (54, 180, 180), strict=True):
        assert_close(result.cpu(), problem.truth[name], problem.scale[name], terms, (dtype, name))
    image, (kernel, shift) = _bytes(), (_problem(dtype, num_in=3).parts[name] for name in ("weight", "bias"))
    levels = PixelLevels(gain=_BYTE_LEVELS.gain.cuda(), offset=_BYTE_LEVELS.offset.cuda())
    given = image.cuda().contiguous(memory_format=torch.channels_last)
    stem = stem_conv2d(given, levels, _last(kernel, dtype).cuda(), _whole(), bias=shift.to(dtype).cuda())
    numbers = _BYTE_LEVELS.numbers(image, dtype).double()
    scale = F.conv2d(numbers.abs(), kernel.abs(), shift.abs(), padding=1)
    assert_close(stem.detach().cpu(), F.conv2d(numbers, kernel, shift, padding=1), scale, 30, dtype)
