"""Optimizer steps on flat buffers: bit for bit ``torch.optim`` on a CPU, the interpreted kernels bit for bit the reference."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sft
from sft import InputError
from sft.optim import AdamWUpdate, SGDUpdate
from sft.optim.update import KernelUpdate
from tests.helpers.tile_buffers import launch_on_gpu
from tests.helpers.triton_gates import Gate, check_gates
from tests.helpers.triton_process import interpret, needs_triton
from tests.kernels.oracles.optimizers import reference_adamw, reference_sgd

_SIZE = 1003
_SGD_DEFAULTS: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
_ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}
_SGD: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True},
    {"lr": 0.03, "momentum": 0.8, "dampening": 0.3, "maximize": True},
]
_ADAMW: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.4, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
]


@pytest.fixture
def nearest_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square roots rounded to nearest; those of PyTorch on a CPU sometimes differ by one unit in the last place."""
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda tensor: sqrt(tensor.double()).to(tensor.dtype))


def _draw(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(_SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _kind(options: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


def _sgd_step(parameter: Tensor, gradient: Tensor, momentum_buffer: Tensor | None, *, first: bool, **options: Any) -> None:
    reference_sgd(parameter, gradient, momentum_buffer, first=first, **_SGD_DEFAULTS | options)


def _adamw_step(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, **options: Any) -> None:
    reference_adamw(parameter, gradient, mean, square, step=step, **_ADAMW_DEFAULTS | options)


def _state(options: dict[str, Any]) -> dict[str, Any]:
    return {"momentum_buffer": torch.full((_SIZE,), math.nan) if options.get("momentum") else None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", _SGD, ids=_kind)
def test_sgd_is_torch_s(options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = torch.nn.Parameter(_draw(0, dtype))
    optimizer = torch.optim.SGD([theirs], **options, foreach=False)
    ours = theirs.detach().clone()
    state: dict[str, Any] = {name: None if buffer is None else buffer.to(dtype) for name, buffer in _state(options).items()}
    for step in range(3):
        theirs.grad = _draw(step + 1, dtype)
        optimizer.step()
        _sgd_step(ours, theirs.grad, **state, first=step == 0, **options)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", _ADAMW, ids=_kind)
def test_adamw_is_torch_s(options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = torch.nn.Parameter(_draw(0, dtype))
    optimizer = torch.optim.AdamW([theirs], **options, foreach=False)
    ours, mean, square = theirs.detach().clone(), torch.zeros(_SIZE, dtype=dtype), torch.zeros(_SIZE, dtype=dtype)
    for step in range(3):
        theirs.grad = _draw(step + 1, dtype)
        optimizer.step()
        _adamw_step(ours, theirs.grad, mean, square, step=step + 1, **options)
        assert torch.equal(ours, theirs)


@needs_triton
@pytest.mark.usefixtures("nearest_roots")
def test_interpreted_kernels(tmp_path: Path) -> None:
    """Three steps of each, on the same buffers; the copy is the parameter in half precision."""
    jobs: list[dict[str, Any]] = []
    expected: list[dict[str, Tensor | None]] = []
    for options, dtype in [*((options, torch.float32) for options in _SGD), (_SGD[1], torch.float16)]:
        ours, states = _draw(0), _state(options)
        parameter, state, copy = ours.clone(), _state(options), torch.zeros(_SIZE, dtype=torch.float16)
        for step in range(3):
            gradient = _draw(step + 1, dtype)
            _sgd_step(parameter, gradient, **state, first=step == 0, **options)
            arguments = {"parameter": ours, "gradient": gradient, **states, "copy": copy, "first": step == 0, **_SGD_DEFAULTS, **options}
            results = ["parameter", "momentum_buffer", "copy"]
            call = {"run": "launch", "module": "sft.kernels.optim.optimizers_triton", "function": "launch_sgd", "results": results}
            jobs.append(call | {"arguments": arguments})
            expected.append({"parameter": parameter, **state, "copy": parameter} if step == 2 else {})
    for options in _ADAMW:
        buffers: dict[str, Tensor] = {"parameter": _draw(0), "mean": torch.zeros(_SIZE), "square": torch.zeros(_SIZE)}
        truth: dict[str, Any] = {name: buffer.clone() for name, buffer in buffers.items()}
        for step in range(3):
            gradient = _draw(step + 1)
            _adamw_step(**truth, gradient=gradient, step=step + 1, **options)
            arguments = {**_ADAMW_DEFAULTS, **options, "step": step + 1, "copy": None}
            call = {"run": "launch", "module": "sft.kernels.optim.optimizers_triton", "function": "launch_adamw", "results": list(buffers)}
            jobs.append(call | {"arguments": {**buffers, "gradient": gradient, **arguments}})
            expected.append(dict(truth) if step == 2 else {})
    for truths, results in zip(expected, interpret(jobs, tmp_path), strict=True):
        for (name, own), result in zip(truths.items(), results, strict=False):
            assert (own is None and result is None) or (own is not None and torch.equal(result, own.to(result.dtype))), name


@needs_triton
def test_streamed_weights_by_interpreted_kernels(tmp_path: Path) -> None:
    """The bits of ``torch.optim``, also if the state moves from one backend to the other and back; in half precision those of ATen.

    On a GPU to rounding: PyTorch's kernels there contract products and sums.
    """
    single, half = torch.float32, torch.bfloat16
    cases: list[tuple[str, dict[str, Any], torch.dtype, bool, str]] = [
        ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, single, False, "torch"),
        ("sgd", {"lr": torch.tensor(0.1), "maximize": True}, single, True, "torch"),
        ("adamw", {"lr": 0.01, "betas": (0.8, 0.95)}, single, True, "torch"),
        ("adamw", {"lr": 0.01, "weight_decay": 0.0}, half, False, "aten"),
        ("adamw", {"lr": 0.01, "amsgrad": True}, single, False, "aten"),
    ]
    jobs = []
    for kind, settings, dtype, two_phase, other in cases:
        for backends in (["triton", "aten", "triton"], [other] * 3):
            jobs.append({"run": "train", "kind": kind, "settings": settings, "backends": backends, "dtype": dtype, "two_phase": two_phase})
    results = interpret(jobs, tmp_path)
    for case, (ours, counts), (expected, none) in zip(cases, results[::2], results[1::2], strict=True):
        if os.environ.get("SFT_KERNELS_ON_GPU") == "1":
            torch.testing.assert_close(ours, expected)
        else:
            assert all(torch.equal(own, theirs) for own, theirs in zip(ours, expected, strict=True)), case
        # Two steps of the weights and biases of a layer and three blocks.
        assert counts == ([0, 0, 0] if "amsgrad" in case[1] else [16, 0, 16]) and none == [0, 0, 0], (case, counts)


def test_updates_without_a_kernel_run_on_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("sft.backends.resolve.has_triton", lambda: True)
    sgd, adamw = KernelUpdate(SGDUpdate()), KernelUpdate(AdamWUpdate())
    plain, vector, matrix = sgd.defaults, torch.zeros(6), torch.zeros(2, 3)
    state = {"exp_avg": vector, "exp_avg_sq": vector, "max_exp_avg_sq": vector}
    assert sgd.selects_kernel(vector, vector, {}, plain) and sgd.selects_kernel(matrix, matrix, {}, plain)
    assert sgd.selects_kernel(vector, vector, {}, plain | {"lr": torch.tensor(0.1)})
    assert not sgd.selects_kernel(vector, vector, {"momentum_buffer": vector.double()}, plain | {"momentum": 0.9})
    assert not sgd.selects_kernel(vector.double(), vector.double(), {}, plain)
    assert not sgd.selects_kernel(vector.bfloat16(), vector.bfloat16(), {}, plain)
    assert not sgd.selects_kernel(matrix.t(), matrix.t(), {}, plain)
    assert not sgd.selects_kernel(vector[:0], vector[:0], {}, plain)
    assert not sgd.selects_kernel(vector.to("meta"), vector.to("meta"), {}, plain)
    assert adamw.selects_kernel(vector, vector, state, adamw.defaults)
    assert not adamw.selects_kernel(vector, vector, state, adamw.defaults | {"amsgrad": True})
    assert not adamw.selects_kernel(vector, vector, state, adamw.defaults | {"lr": torch.tensor(0.1)})
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not sgd.selects_kernel(vector, vector, {}, plain)


def test_missing_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = sft.nn.Repeat(lambda: torch.nn.Linear(2, 2), 2).stream("1KiB")
    with pytest.raises(InputError, match=r"backend='cuda': updates are computed by one of aten, triton; give one of these"):
        sft.StreamedOptimizer(model, "sgd", backend="cuda")  # type: ignore[arg-type]  # the point
    with pytest.raises(InputError, match=r'backend "triton"'):
        sft.StreamedOptimizer(model, "sgd", backend="triton")
    with pytest.raises(
        InputError, match=r"backend='triton' with update=KernelUpdate: there are kernels for 2 updates; give one of sgd, adamw"
    ):
        sft.StreamedOptimizer(model, KernelUpdate(SGDUpdate()), backend="triton")
    sft.StreamedOptimizer(model, "sgd").close()


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    vector = torch.empty(1 << 26, device="meta")
    common = {
        "parameter": vector,
        "gradient": vector.bfloat16(),
        "copy": vector.bfloat16(),
        "lr": 0.1,
        "weight_decay": 0.1,
        "maximize": False,
    }
    sgd = common | {"momentum_buffer": vector, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "first": False}
    adamw = common | {"mean": vector, "square": vector, "step": 3, "betas": (0.9, 0.999), "eps": 1e-8}
    gates = [
        Gate(module="optim.optimizers_triton", launch="launch_sgd", when=(80,), arguments=sgd),
        Gate(module="optim.optimizers_triton", launch="launch_adamw", when=(90,), arguments=adamw),
    ]
    check_gates(gates, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.usefixtures("nearest_roots")
def test_on_a_gpu() -> None:
    for options in _SGD:
        truth: dict[str, Any] = {"parameter": _draw(0)} | _state(options)
        ours: dict[str, Any] = {name: None if buffer is None else buffer.clone() for name, buffer in truth.items()}
        names = [name for name, buffer in ours.items() if buffer is not None]
        for step in range(3):
            gradient = _draw(step + 1)
            _sgd_step(gradient=gradient, first=step == 0, **truth, **options)
            arguments = ours | {"gradient": gradient, "copy": None, "first": step == 0, **_SGD_DEFAULTS, **options}
            ours |= zip(names, launch_on_gpu("optim.optimizers_triton", "launch_sgd", arguments, names), strict=True)
        assert torch.equal(ours["parameter"], truth["parameter"])
    for options in _ADAMW:
        truth = {"parameter": _draw(0), "mean": torch.zeros(_SIZE), "square": torch.zeros(_SIZE)}
        ours = {name: buffer.clone() for name, buffer in truth.items()}
        for step in range(3):
            gradient = _draw(step + 1)
            _adamw_step(gradient=gradient, step=step + 1, **truth, **options)
            arguments = ours | {"gradient": gradient, "copy": None, "step": step + 1, **_ADAMW_DEFAULTS, **options}
            ours |= zip(truth, launch_on_gpu("optim.optimizers_triton", "launch_adamw", arguments, list(truth)), strict=True)
        assert all(torch.equal(ours[name], buffer) for name, buffer in truth.items())
