"""Blocks of the weight gradients: aligned to rows in wide images, over several rows and samples in narrow ones; one tap or three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sft.common.errors import UnsupportedError
from sft.kernels.common import row_blocks
from sft.kernels.geometry import Geometry, KernelWindow, VolumeGeometry
from tests.helpers.triton_process import interpret, needs_triton

_PIXELS = 16


def _channels_last(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1)


def _case(size: tuple[int, ...], window: KernelWindow, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    """A launch for two samples with a ReLU and a bias, and the gradients of weight and bias in fp64."""
    random = torch.Generator().manual_seed(sum(size))
    axes = (window,) * len(size)
    geometry: Any = Geometry.whole(size, *axes) if len(size) == 2 else VolumeGeometry.whole(size, *axes)  # type: ignore[arg-type]
    shape = (32, 16, *geometry.kernel)
    x = torch.randn(2, 16, *size, generator=random).to(dtype).double()
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(32, dtype=torch.float64, requires_grad=True)
    convolve = F.conv2d if len(size) == 2 else F.conv3d
    y = convolve(x, weight, bias, window.stride, window.padding, window.dilation)
    dy, output = (torch.randn(y.shape, generator=random).to(dtype).double() for _ in range(2))
    truth = torch.autograd.grad(y, (weight, bias), torch.where(output > 0, dy, 0))
    arguments: dict[str, Any] = {"gradient": _channels_last(dy, dtype), "output": _channels_last(output.relu(), dtype)}
    arguments |= {"x": _channels_last(x, dtype), "geometry": geometry, "accumulate": False, "block": (_PIXELS, 32, 16)}
    arguments |= {"weights": torch.full((3, 32, *geometry.kernel, 16), float("nan")), "biases": torch.full((3, 32), float("nan"))}
    return arguments | {"precision": "ieee" if dtype == torch.float32 else "fp16"}, list(truth)


@needs_triton
def test_blocks_of_all_widths(tmp_path: Path) -> None:
    """Widths of complete blocks, of a partial block, and of several rows and samples in a block; strides and dilations."""
    three, strided = KernelWindow(kernel=3, padding=1), KernelWindow(kernel=3, stride=2, padding=2, dilation=2)
    cases = [
        *(((5, width), three, dtype) for width in (48, 21, 3) for dtype in (torch.float16, torch.float32)),
        ((9, 32), strided, torch.float16),
        ((1, 2), three, torch.float16),
        ((3, 4, 32), three, torch.float16),
        ((3, 2, 3), three, torch.float16),
    ]
    assert {row_blocks(size[-1], _PIXELS)[1] for size, *_ in cases} == {False, True}
    jobs, truths = [], []
    for case in cases:
        arguments, truth = _case(*case)
        is_image = len(case[0]) == 2
        module = "sft.kernels.conv.weight_grad2d_triton" if is_image else "sft.kernels.conv.weight_grad3d_triton"
        name = "launch_weight_gradient" if is_image else "launch_volume_weight_gradient"
        arguments |= {"groups": 1} if is_image else {}
        jobs.append({"run": "launch", "module": module, "function": name, "arguments": arguments, "results": ["weights", "biases"]})
        truths.append(truth)
    for case, truth, (weights, biases) in zip(cases, truths, interpret(jobs, tmp_path), strict=True):
        torch.testing.assert_close(weights.double().sum(0).movedim(-1, 1), truth[0], rtol=1e-4, atol=1e-4, msg=str(case))
        torch.testing.assert_close(biases.double().sum(0), truth[1], rtol=1e-4, atol=1e-4, msg=str(case))


@needs_triton
@pytest.mark.parametrize("width", [32, 30, 5])
def test_blocks_of_depthwise_gradients(width: int, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(width)
    window = KernelWindow(kernel=3, padding=1)
    x, dy = (torch.randn(2, 8, 3, width, generator=random) for _ in range(2))
    weight = torch.zeros(8, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    truth = torch.autograd.grad(F.conv2d(x.double(), weight, padding=1, groups=8), weight, dy.double())[0]
    arguments: dict[str, Any] = {"gradient": _channels_last(dy, torch.float32), "output": None, "x": _channels_last(x, torch.float32)}
    arguments |= {"weights": torch.full((3, 8, 3, 3), float("nan")), "biases": torch.full((3, 8), float("nan"))}
    arguments |= {"geometry": Geometry.whole((3, width), window, window), "accumulate": False, "block": (_PIXELS, 8)}
    job = {"run": "launch", "module": "sft.kernels.conv.depthwise_triton", "function": "launch_depthwise_weight"}
    ((weights, biases),) = interpret([job | {"arguments": arguments, "results": ["weights", "biases"]}], tmp_path)
    torch.testing.assert_close(weights.double().sum(0)[:, None], truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(biases.double().sum(0), dy.double().sum((0, 2, 3)), rtol=1e-5, atol=1e-5)


@needs_triton
def test_windows_beyond_32_bits_are_refused() -> None:
    from sft.kernels.common_triton import check_reach  # here, because it imports Triton
    from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient

    window = KernelWindow(kernel=3, dilation=40, padding=40)
    geometry, x = Geometry.whole((200, 200), window, window), torch.empty(1, device="meta")
    wide = x.as_strided((1, 8, 100, 20_000_000), (0, 1, 160_000_000, 8))
    with pytest.raises(UnsupportedError, match=r"kernels count up to 2,147,483,647"):
        check_reach(wide, geometry.axes)
    gradient, slots = torch.empty(1, 4, 200, 200, device="meta"), torch.empty(2, 4, 3, 3, 8, device="meta")
    with pytest.raises(UnsupportedError, match=r"kernels count up to 2,147,483,647"):
        launch_weight_gradient(gradient, None, wide, slots, None, geometry, groups=1, precision="ieee")
    check_reach(torch.empty(1, 20_480, 20_480, 64, device="meta").permute(0, 3, 1, 2), geometry.axes)
