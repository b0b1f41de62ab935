"""Convolution and ReLU as one operator: equal to the two, also on fake tensors; the choice between cuDNN's call and the two operators."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.backends import convolution_relu as module
from sft.backends.convolution_relu import FusionDevice, convolution_add_relu, convolution_relu, keeps_nan
from sft.common.torch_internals import FakeTensorMode

_aten = torch.ops.aten

#: Name, input, weight, and stride, padding, dilation, groups; the last value is true for a bias.
_LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], bool]] = {
    "3x3": ((2, 16, 31, 45), (32, 16, 3, 3), ([1, 1], [1, 1], [1, 1], 1), True),
    "three channels": ((1, 3, 33, 47), (64, 3, 3, 3), ([1, 1], [1, 1], [1, 1], 1), True),
    "strided": ((1, 8, 29, 37), (24, 8, 5, 3), ([2, 3], [2, 0], [1, 1], 1), True),
    "dilated": ((1, 16, 41, 33), (8, 16, 3, 3), ([1, 1], [2, 3], [2, 3], 1), True),
    "grouped": ((1, 16, 17, 19), (32, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 4), True),
    "no bias": ((1, 16, 17, 19), (24, 16, 3, 3), ([1, 1], [1, 1], [1, 1], 1), False),
    "1x1": ((1, 7, 13, 11), (5, 7, 1, 1), ([1, 1], [0, 0], [1, 1], 1), True),
    "volume": ((1, 8, 7, 9, 11), (16, 8, 3, 3, 3), ([1, 2, 1], [1, 0, 1], [1, 1, 1], 1), True),
}


def _operands(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    shape, weight_shape, geometry, has_bias = _LAYERS[name]
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(weight_shape) / prod(weight_shape[1:]) ** 0.5, torch.randn(weight_shape[0])
    x, weight = (value.to(device, dtype, memory_format=layout) for value in (x, weight))
    return (x, weight, bias.to(device, dtype) if has_bias else None, *geometry)


def _two_operators(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return _operators(x, weight, bias, None, module._Geometry(stride, padding, dilation, groups))


def _operators(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, at: Any) -> Tensor:
    zeros = [0] * len(at.stride)
    convolved: Tensor = _aten.convolution.default(x, weight, bias, at.stride, at.padding, at.dilation, False, zeros, at.groups)
    return (convolved if addend is None else convolved + addend).relu()


def _with_addend(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of the operator with an addend, and its result's layout."""
    x, weight, bias, *geometry = operands
    return x, weight, bias, torch.randn_like(_two_operators(*operands)), *geometry


def _internal(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of the module's implementations."""
    tensors = operands[:-4] if len(operands) == 8 else (*operands[:-4], None)
    return *tensors, module._Geometry(*operands[-4:])


@pytest.mark.parametrize("adds", [False, True], ids=["relu", "add relu"])
@pytest.mark.parametrize("name", _LAYERS)
def test_it_is_a_convolution_and_a_relu(name: str, adds: bool) -> None:
    operands = _with_addend(_operands(name)) if adds else _operands(name)
    convolution_relu: Any = convolution_add_relu if adds else module.convolution_relu
    with FlopCounterMode(display=False) as flops:
        result = convolution_relu(*operands)
    with FlopCounterMode(display=False) as plain_flops:
        expected = _operators(*_internal(operands))
    assert torch.equal(result, expected) and result.stride() == expected.stride()
    assert flops.get_total_flops() == plain_flops.get_total_flops() > 0
    meta = convolution_relu(*(value.to("meta") if isinstance(value, Tensor) else value for value in operands))
    assert (meta.shape, meta.dtype, meta.device.type) == (result.shape, result.dtype, "meta")
    with FakeTensorMode():
        cuda = convolution_relu(*(torch.empty(v.shape, device="cuda") if isinstance(v, Tensor) else v for v in operands))
    assert (cuda.shape, cuda.dtype, cuda.device.type) == (result.shape, result.dtype, "cuda")


def _stand_in(monkeypatch: pytest.MonkeyPatch, fused: Callable[..., Tensor]) -> None:
    """Stand-in for a build with cuDNN, with this function as fused convolution."""
    operators = {name: getattr(_aten, name) for name in ("convolution", "add_", "relu_")}
    cudnn = {"cudnn_convolution_relu": SimpleNamespace(default=fused)}

    def with_addend(x: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Tensor | None, *geometry: Any) -> Tensor:
        assert alpha == 1
        return _operators(x, weight, bias, z, module._Geometry(*geometry))

    cudnn["cudnn_convolution_add_relu"] = SimpleNamespace(default=with_addend)
    monkeypatch.setattr(module, "aten", SimpleNamespace(**cudnn, **operators))
    monkeypatch.setattr(module, "_has_cudnn", lambda: True)
    monkeypatch.setattr(module, "_WITHOUT_ALGORITHM", set())


def test_cudnn_runs_where_the_settings_permit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0

    def fused(*operands: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return _two_operators(*operands)

    _stand_in(monkeypatch, fused)
    operands = _operands("3x3")
    assert torch.equal(module._by_cudnn(*_internal(operands)), _two_operators(*operands)) and num_calls == 1
    summed = _with_addend(operands)
    assert torch.equal(module._by_cudnn(*_internal(summed)), _operators(*_internal(summed))) and num_calls == 1
    assert module._by_cudnn(*_internal(_operands("3x3", dtype=torch.float64))).dtype == torch.float64 and num_calls == 1
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        module._by_cudnn(*_internal(operands))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    module._by_cudnn(*_internal(operands))
    monkeypatch.undo()
    module._by_cudnn(*_internal(operands))  # a build without cuDNN
    assert num_calls == 1
    assert not module._has_cudnn()


def test_shapes_without_an_algorithm_run_as_two_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [RuntimeError("GET was unable to find an engine to execute this computation")]

    def fused(*operands: Any) -> Tensor:
        raise errors.pop()

    _stand_in(monkeypatch, fused)
    operands = _operands("grouped")
    for _ in range(2):  # the second call does not try again
        assert torch.equal(module._by_cudnn(*_internal(operands)), _two_operators(*operands))
    for error in (torch.OutOfMemoryError("full"), RuntimeError("CUDA error: an illegal memory access was encountered")):
        errors.append(error)
        with pytest.raises(type(error), match=str(error)[:4]):
            module._by_cudnn(*_internal(_operands("3x3")))


@pytest.mark.parametrize("num_axes", [2, 3])
def test_a_relu_that_loses_nan_is_detected(num_axes: int) -> None:
    def without_algorithm(*operands: Any) -> Tensor:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    cpu, half = torch.device("cpu"), torch.bfloat16
    assert module._keeps_nan(_operators, cpu, half, num_axes)
    assert not module._keeps_nan(lambda *operands: _operators(*operands).nan_to_num(0.0), cpu, half, num_axes)
    assert not module._keeps_nan(lambda *operands: _operators(*operands) * torch.nan, cpu, half, num_axes)
    assert not module._keeps_nan(without_algorithm, cpu, half, num_axes)


def test_devices_without_cudnn_fuse_nothing() -> None:
    elsewhere = FusionDevice(None)
    assert all(elsewhere.fuses(dtype, axes) for dtype in (torch.bfloat16, torch.float16, torch.float32) for axes in (2, 3))
    assert not elsewhere.fuses(torch.float64, 2) and not elsewhere.fuses(torch.float32, 1)
    if not torch.cuda.is_available():
        assert not FusionDevice(torch.device("cuda", 0)).fuses(torch.float32, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("adds", [False, True], ids=["relu", "add relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", _LAYERS)
def test_on_a_gpu(name: str, dtype: torch.dtype, adds: bool) -> None:
    """The error against float64 is at most 1.1 times that of the separate operators, or one rounding."""
    operands = _operands(name, "cuda", dtype)
    operands = _with_addend(operands) if adds else operands
    exact = _operators(*_internal(tuple(each.double() if isinstance(each, Tensor) else each for each in operands)))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.no_grad():
        result = (convolution_add_relu if adds else convolution_relu)(*operands)
        separate = _operators(*_internal(operands))
    assert result.dtype == dtype and result.shape == separate.shape and result.stride() == separate.stride()
    error, separate_error = (float((value - exact).norm() / exact.norm()) for value in (result, separate))
    assert error <= max(1.1 * separate_error, torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nan_on_a_gpu(dtype: torch.dtype, num_axes: int) -> None:
    """A failure means that programs on this GPU run convolutions and ReLUs separately, and not that they are wrong."""
    assert keeps_nan(torch.device("cuda", torch.cuda.current_device()), dtype, num_axes)
