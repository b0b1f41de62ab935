"""Norms of strips: the plain reference against PyTorch's own norms in float64, the interpreted kernels against the reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.tile_buffers import assert_nothing_else_written, empty_buffer, launch_on_gpu, normal_numbers
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton
from tests.kernels.oracles.norm import (
    Moments,
    NormStatistics,
    NormSums,
    reference_norm_gradient,
    reference_normalize,
)

_EPS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    name: str
    #: N, C, H, W
    shape: tuple[int, int, int, int]
    #: of each sample; None for batch norm
    num_groups: int | None
    affine: bool = True
    residual: bool = False
    relu: bool = False
    #: of the input
    mean: float = 0.0

    @property
    def num_samples(self) -> int | None:
        return None if self.num_groups is None else self.shape[0]

    def own(self, operands: dict[str, Tensor]) -> Tensor:
        """PyTorch's own norm."""
        if self.num_groups is None:
            y = F.batch_norm(operands["x"], None, None, operands.get("weight"), operands.get("bias"), True, eps=_EPS)
        else:
            y = F.group_norm(operands["x"], self.num_groups, operands.get("weight"), operands.get("bias"), eps=_EPS)
        y = y + operands.get("residual", torch.zeros(()))
        return y.relu() if self.relu else y


_NORMS = [
    _Norm(name="batch", shape=(2, 6, 11, 7), num_groups=None, residual=True, relu=True),
    _Norm(name="batch far from zero", shape=(1, 5, 9, 8), num_groups=None, affine=False, mean=1000.0),
    _Norm(name="group", shape=(2, 12, 8, 5), num_groups=3, relu=True),
    _Norm(name="instance", shape=(3, 4, 7, 6), num_groups=4, residual=True),
]
_IDS = [norm.name for norm in _NORMS]


def _problem(norm: _Norm, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    """Operands with values of ``dtype``, in fp64, and the output's gradient."""
    draw = normal_numbers(3, dtype)
    operands = {"x": (draw(*norm.shape) + norm.mean).to(dtype).double()}
    if norm.affine:
        operands |= {"weight": draw(norm.shape[1]), "bias": draw(norm.shape[1])}
    if norm.residual:
        operands["residual"] = draw(*norm.shape)
    return operands, draw(*norm.shape)


def _last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _strips(image: Tensor) -> list[Tensor]:
    """Three strips of different heights."""
    height = image.shape[2]
    return [image[:, :, : height // 3], image[:, :, height // 3 : height // 3 + 1], image[:, :, height // 3 + 1 :]]


def _statistics(norm: _Norm, x: Tensor) -> NormStatistics:
    moments = Moments.zeros(norm.shape[1], num_samples=norm.num_samples)
    for strip in _strips(x):
        moments.add(strip)
    return moments.total(norm.num_groups)


@pytest.mark.parametrize("norm", _NORMS, ids=_IDS)
def test_strips_are_the_whole(norm: _Norm) -> None:
    operands, dy = _problem(norm)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in operands.items()}
    y = norm.own(leaves)
    truth = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    statistics = _statistics(norm, operands["x"])
    x = operands["x"].view(norm.shape[0], norm.num_groups, -1) if norm.num_groups else operands["x"].transpose(0, 1).flatten(1)[None]
    torch.testing.assert_close(statistics.unbiased, x.var(2), rtol=1e-12, atol=0)
    mean, rstd = statistics.mean, statistics.rstd(_EPS, torch.float64)
    sums = NormSums.zeros(norm.shape[1], num_samples=norm.num_samples)
    outputs = []
    for x, g, r in zip(_strips(operands["x"]), _strips(dy), _strips(operands.get("residual", dy)), strict=True):
        residual = r if norm.residual else None
        outputs.append(reference_normalize(x, mean, rstd, operands.get("weight"), operands.get("bias"), residual, relu=norm.relu))
        sums.add(g, outputs[-1] if norm.relu else None, x, mean, rstd)
    torch.testing.assert_close(torch.cat(outputs, 2), y.detach(), rtol=1e-9, atol=1e-9)
    total = sums.total(statistics, operands.get("weight"))
    shares = [
        reference_norm_gradient(g, o if norm.relu else None, x, mean, rstd, operands.get("weight"), total.back)
        for x, g, o in zip(_strips(operands["x"]), _strips(dy), outputs, strict=True)
    ]
    torch.testing.assert_close(torch.cat(shares, 2), truth["x"], rtol=1e-8, atol=1e-8)
    if norm.affine:
        torch.testing.assert_close(total.weight, truth["weight"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(total.bias, truth["bias"], rtol=1e-9, atol=1e-9)


def _surrounded(image: Tensor, dtype: torch.dtype) -> Tensor:
    buffer = empty_buffer(image.shape[0], image.shape[1], (image.shape[2], image.shape[3]), dtype)
    return buffer.copy_(image)


@needs_triton
def test_interpreted_kernels(tmp_path: Path) -> None:
    """In fp32 elementwise kernels have the bits of the reference; moments and sums are those of fp64 to fp32's precision."""
    jobs: list[dict[str, Any]] = []
    checks: list[tuple[str, _Norm, torch.dtype, Any]] = []

    def add(kind: str, norm: _Norm, dtype: torch.dtype, launch: str, arguments: dict[str, Any], results: list[str], truth: Any) -> None:
        call = {"run": "launch", "module": "sft.kernels.norm.norm_triton", "function": launch, "results": results}
        jobs.append(call | {"arguments": arguments | {"block": (16, 8) if kind in ("moments", "sums") else (64, 16)}})
        checks.append((kind, norm, dtype, truth))

    for norm, dtype in itertools.product(_NORMS, (torch.float32, torch.float16, torch.bfloat16)):
        if dtype != torch.float32 and norm is not _NORMS[0]:
            continue
        operands, dy = _problem(norm, dtype)
        statistics = _statistics(norm, operands["x"])
        mean, rstd = statistics.mean.float(), statistics.rstd(_EPS)
        vectors: dict[str, Tensor | None] = {name: operands[name].to(dtype) if norm.affine else None for name in ("weight", "bias")}
        moments = Moments.zeros(norm.shape[1], num_samples=norm.num_samples, num_splits=3)
        sums, exact, scale = (NormSums.zeros(norm.shape[1], num_samples=norm.num_samples, num_splits=number) for number in (3, 1, 1))
        strips = [_strips(image) for image in (operands["x"], dy, operands.get("residual", dy))]
        for index, (x, g, r) in enumerate(zip(*strips, strict=True)):
            x, g, r = (_surrounded(image, dtype) for image in (x, g, r))
            residual = r if norm.residual else None
            y = reference_normalize(x, mean, rstd, vectors["weight"], vectors["bias"], residual, relu=norm.relu)
            own: dict[str, Any] = {"mean": mean, "rstd": rstd}
            output = _surrounded(y, dtype) if norm.relu else None
            arguments: dict[str, Any] = {"x": x, "counts": moments.counts, "means": moments.means, "squares": moments.squares}
            truth: Any = (moments, statistics) if index == 2 else None
            add("moments", norm, dtype, "launch_moments", arguments, ["counts", "means", "squares"], truth)
            arguments = {"x": x, **own, **vectors, "residual": residual, "relu": norm.relu, "out": _surrounded(x * float("nan"), dtype)}
            add("apply", norm, dtype, "launch_normalize", arguments, ["out"], y)
            common = {"gradient": g, "output": output, "x": x, **own}
            exact.add(g.double(), None if output is None else output.double(), x.double(), mean.double(), rstd.double())
            scale.add(g.double().abs(), None, x.double().abs(), -mean.double().abs(), rstd.double())
            arguments = common | {"first": sums.first, "second": sums.second}
            add("sums", norm, dtype, "launch_norm_sums", arguments, ["first", "second"], (sums, exact, scale) if index == 2 else None)
            back = (mean * 0.01, rstd * 0.02)
            for weight, back_sums in ((vectors["weight"], back), (None, None)):
                dx = reference_norm_gradient(g, output, x, mean, rstd, weight, back_sums)
                arguments = common | {"weight": weight, "back": back_sums, "out": _surrounded(x * float("nan"), dtype)}
                add("gradient", norm, dtype, "launch_norm_gradient", arguments, ["out"], dx)
    for (kind, norm, dtype, truth), results in zip(checks, interpret(jobs, tmp_path), strict=True):
        context = (kind, norm.name, dtype)
        if kind in ("apply", "gradient"):
            assert_nothing_else_written(results[0], context)
            if dtype == torch.float32:
                assert torch.equal(results[0], truth), context
            else:  # the interpreter truncates to bfloat16
                torch.testing.assert_close(results[0].float(), truth.float(), rtol=2.0**-7, atol=2.0**-14, msg=str(context))
        elif kind == "moments" and truth is not None:
            statistics = Moments(counts=results[0], means=results[1], squares=results[2]).total(norm.num_groups)
            assert torch.equal(statistics.counts, truth[1].counts), context
            torch.testing.assert_close(statistics.mean, truth[1].mean, rtol=0, atol=1e-6, msg=str(context))  # of a deviation of one
            torch.testing.assert_close(statistics.variance, truth[1].variance, rtol=2e-6, atol=0, msg=str(context))
        elif kind == "sums" and truth is not None:
            for ours, exact, bound in zip(results, *((sums.first, sums.second) for sums in truth[1:]), strict=True):
                error = (ours.sum(0) - exact.sum(0)).abs()
                assert bool((error <= 2.0**-24 * 100 * bound.sum(0)).all()), context
                assert int((ours != 0).any(2).any(1).sum()) >= 2, ("one split shows nothing", context)


@needs_triton
def test_statistics_of_frozen_and_affine_norms(tmp_path: Path) -> None:
    """Variances in place of deviations; scales and shifts of each sample, every second element of a vector; no mean; replaced slots."""
    random = torch.Generator().manual_seed(5)
    x, g, r = (_last(torch.randn(2, 6, 3, 16, generator=random)) for _ in range(3))  # blocks aligned to rows
    mean, variance, weight, bias = (torch.rand(6, generator=random) + 0.5 for _ in range(4))
    scale, shift = torch.randn(2, 6, 1, 1, 2, generator=random).unbind(-1)
    rstd = 1 / (variance + _EPS).sqrt()
    slots = [torch.full((3, 1, 6), float("nan"), dtype=torch.float64) for _ in range(2)]
    sample_slots = [torch.full((2, 2, 6), float("nan"), dtype=torch.float64) for _ in range(2)]
    frozen: dict[str, Any] = {"mean": mean, "rstd": variance, "eps": _EPS}
    sums: dict[str, Any] = {"gradient": g, "output": None, "x": x, "accumulate": False, "block": (16, 8)}
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        (
            "launch_normalize",
            frozen | {"x": x, "weight": weight, "bias": bias, "residual": r, "out": torch.empty_like(x), "relu": True},
            ["out"],
        ),
        (
            "launch_norm_gradient",
            frozen | {"gradient": g, "output": x, "x": x, "weight": weight, "back": None, "out": torch.empty_like(x)},
            ["out"],
        ),
        ("launch_norm_sums", sums | frozen | {"first": slots[0], "second": slots[1]}, ["first", "second"]),
        (
            "launch_normalize",
            {
                "x": x,
                "mean": None,
                "rstd": scale,
                "weight": None,
                "bias": shift,
                "residual": None,
                "out": torch.empty_like(x),
                "relu": False,
            },
            ["out"],
        ),
        (
            "launch_norm_gradient",
            {"gradient": g, "output": None, "x": g, "mean": None, "rstd": scale, "weight": None, "back": None, "out": torch.empty_like(x)},
            ["out"],
        ),
        (
            "launch_norm_sums",
            sums | {"mean": None, "rstd": None, "first": sample_slots[0], "second": sample_slots[1]},
            ["first", "second"],
        ),
    ]
    call = {"run": "launch", "module": "sft.kernels.norm.norm_triton"}
    jobs = [call | {"function": name, "arguments": arguments, "results": results} for name, arguments, results in cases]
    results = interpret(jobs, tmp_path)

    def pixels(vector: Tensor) -> Tensor:
        return vector[:, None, None]

    normalised = (x - pixels(mean)) * pixels(rstd)
    truths = [
        (normalised * pixels(weight) + pixels(bias) + r).relu(),
        torch.where(x <= 0, 0, g * pixels(weight)) * pixels(rstd),
        (g.sum((0, 2, 3)), (g * normalised).sum((0, 2, 3))),
        x * scale + shift,
        g * scale,
        (g.sum((2, 3)), (g * x).sum((2, 3))),
    ]
    for truth, result in zip(truths, results, strict=True):
        for ours, exact in zip(result, truth if isinstance(truth, tuple) else (truth,), strict=True):
            total = ours.sum(0).view(exact.shape).float() if ours.dim() == 3 else ours
            torch.testing.assert_close(total, exact, rtol=2e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("num_groups", [1, 3, 6])
def test_moments_of_all_slots_are_merged(num_groups: int, tmp_path: Path) -> None:
    """Slots without pixels, groups of several channels, means far from zero; against fp64."""
    width = 32 if num_groups == 3 else 7  # with blocks aligned to rows, and without
    x = torch.randn(2, 6, 5, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 100
    image = x.float().contiguous(memory_format=torch.channels_last)
    shape = (5, 2, 6)
    slots = {"counts": torch.zeros(shape, dtype=torch.int64).fill_(9), "means": torch.full(shape, float("nan"), dtype=torch.float64)}
    slots["squares"] = slots["means"].clone()
    call = {"run": "launch", "module": "sft.kernels.norm.norm_triton"}
    arguments = {"x": image, **slots, "accumulate": False, "block": (16, 8)}
    (moments,) = interpret([call | {"function": "launch_moments", "arguments": arguments, "results": list(slots)}], tmp_path)
    arguments = dict(zip(slots, moments, strict=True)) | {"variance": torch.empty(2, num_groups), "mean": torch.empty(2, num_groups)}
    job = call | {"function": "launch_merge_moments", "arguments": arguments, "results": ["variance", "mean"]}
    ((variance, mean),) = interpret([job], tmp_path)
    exact = torch.var_mean(image.double().reshape(2, num_groups, -1), 2, correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-7, atol=0)


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    x, stat, vector = meta_image(64, torch.bfloat16), torch.empty(1, 64, device="meta"), torch.empty(64, device="meta")
    slots = torch.empty(512, 1, 64, dtype=torch.float64, device="meta")
    own = {"x": x, "mean": stat, "rstd": stat}
    backward = own | {"gradient": x, "output": x}
    launches: list[tuple[str, int, dict[str, Any]]] = [
        ("launch_moments", 90, {"x": x, "counts": slots.long(), "means": slots, "squares": slots}),
        ("launch_merge_moments", 90, {"counts": slots.long(), "means": slots, "squares": slots, "variance": stat, "mean": stat}),
        ("launch_normalize", 80, own | {"weight": vector, "bias": vector, "residual": x, "out": x, "relu": True}),
        ("launch_norm_sums", 80, backward | {"first": slots, "second": slots}),
        ("launch_norm_gradient", 90, backward | {"weight": vector, "back": (stat, stat), "out": x}),
    ]
    check_gates(
        [Gate(module="norm.norm_triton", launch=name, when=(when,), arguments=arguments) for name, when, arguments in launches], tmp_path
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", _NORMS, ids=_IDS)
def test_on_a_gpu(norm: _Norm, dtype: torch.dtype) -> None:
    operands, dy = _problem(norm, dtype)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in operands.items()}
    y = norm.own(leaves)
    truth = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True)) | {"y": y.detach()}
    x, g = _last(operands["x"]).to(dtype), _last(dy).to(dtype)
    weight, bias = (operands[name].to(dtype) if norm.affine else None for name in ("weight", "bias"))

    def run(launch: str, arguments: dict[str, Any], results: list[str]) -> list[Tensor]:
        return launch_on_gpu("norm.norm_triton", launch, arguments, results)

    empty = Moments.zeros(norm.shape[1], num_samples=norm.num_samples, num_splits=8)
    slots = {"counts": empty.counts, "means": empty.means, "squares": empty.squares}
    counts, means, squares = run("launch_moments", {"x": x} | slots, list(slots))
    statistics = Moments(counts=counts, means=means, squares=squares).total(norm.num_groups)
    own: dict[str, Any] = {"x": x, "mean": statistics.mean.float(), "rstd": statistics.rstd(_EPS)}
    residual = _last(operands["residual"]).to(dtype) if norm.residual else None
    forward = own | {"weight": weight, "bias": bias, "residual": residual, "relu": norm.relu, "out": torch.empty_like(x)}
    (result,) = run("launch_normalize", forward, ["out"])
    backward = own | {"gradient": g, "output": result if norm.relu else None}
    sums = NormSums.zeros(norm.shape[1], num_samples=norm.num_samples, num_splits=8)
    first, second = run("launch_norm_sums", backward | {"first": sums.first, "second": sums.second}, ["first", "second"])
    total = NormSums(first=first, second=second).total(statistics, weight)
    back = (total.back[0].float(), total.back[1].float())
    (dx,) = run("launch_norm_gradient", backward | {"weight": weight, "back": back, "out": torch.empty_like(x)}, ["out"])
    ours = {"y": result, "x": dx} | ({"weight": total.weight, "bias": total.bias} if norm.affine else {})
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-3 if norm.mean else 1e-5
    for name, own_result in ours.items():
        assert float((own_result.double() - truth[name]).abs().max()) <= limit * max(1.0, float(truth[name].abs().max())), name
