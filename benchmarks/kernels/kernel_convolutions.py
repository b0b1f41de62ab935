"""Cases of convolutions: layers of VGG-16, a depthwise layer, a volume. Each next to cuDNN's, with its separate bias, ReLU and pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import kernel_launches as kernels
import torch
import torch.nn.functional as F
from kernel_case import Case, Draw, Problem, all_rows
from torch import Tensor

from sft.kernels.common import LaunchVariant
from sft.kernels.geometry import Geometry, KernelWindow, VolumeGeometry

__all__ = ["convolution_cases"]

_FLOATS = (torch.bfloat16, torch.float32)
_SAME = KernelWindow(kernel=3, padding=1)


def _flops(weight: Tensor, size: tuple[int, ...]) -> int:
    return 2 * weight.numel() * math.prod(size)


def _backward(dy: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool], padding: int = 1, groups: int = 1) -> Any:
    """ATen's gradients of input, weight and bias, as far as they are requested."""
    ones, bias = [1] * (x.dim() - 2), [weight.shape[0]]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, bias, ones, [padding] * len(ones), ones, False, [0] * len(ones), groups, list(mask)
    )


def _forward(num_in: int, num_out: int, *, variant: LaunchVariant = "default", precision: str | None = None) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        x, weight, bias = draw.image(num_in), draw.weight(num_out, num_in, 3, 3), draw.vector(num_out)
        geometry = Geometry.whole((draw.size[0], draw.size[1]), _SAME, _SAME)
        out = torch.empty_like(draw.image(num_out))

        def ours() -> list[Tensor]:
            return [kernels.conv2d(x, weight, bias, geometry, precision=precision, variant=variant, out=out)]

        def theirs() -> Tensor:
            cudnn = torch.backends.cudnn
            with cudnn.flags(enabled=True, benchmark=cudnn.benchmark, allow_tf32=precision == "tf32"):
                return F.conv2d(x, weight, bias, padding=1).relu_()

        return Problem(
            ours=ours,
            theirs=theirs,
            exact=lambda: [F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()],
            num_bytes=all_rows([x, weight, out]),
            num_flops=_flops(weight, draw.size),
        )

    return build


def _pooled(num_in: int, num_out: int) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        x, weight, bias = draw.image(num_in), draw.weight(num_out, num_in, 3, 3), draw.vector(num_out)
        geometry = Geometry.whole((draw.size[0], draw.size[1]), _SAME, _SAME)
        y, taps = kernels.conv2d_max_pool(x, weight, bias, geometry)

        def exact() -> list[Tensor]:
            return [F.max_pool2d(F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu(), 2)]

        return Problem(
            ours=lambda: [kernels.conv2d_max_pool(x, weight, bias, geometry)[0]],
            theirs=lambda: F.max_pool2d(F.conv2d(x, weight, bias, padding=1).relu_(), 2, return_indices=True),
            exact=exact,
            num_bytes=all_rows([x, weight, y, taps]),
            num_flops=_flops(weight, draw.size),
        )

    return build


def _data_gradient(num_in: int, num_out: int, *, pooled: bool) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        x, weight, bias = draw.image(num_in), draw.weight(num_out, num_in, 3, 3), draw.vector(num_out)
        geometry = Geometry.whole((draw.size[0], draw.size[1]), _SAME, _SAME)
        out = torch.empty_like(x)
        if pooled:
            y, taps = kernels.conv2d_max_pool(x, weight, bias, geometry)
            dy = draw.image(num_out, (y.shape[2], y.shape[3]))
            before = F.conv2d(x, weight, bias, padding=1).relu_()
            _, indices = F.max_pool2d(before, 2, return_indices=True)

            def spread() -> Tensor:
                dense = torch.ops.aten.max_pool2d_with_indices_backward(dy, before, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
                masked: Tensor = torch.ops.aten.threshold_backward(dense, before, 0)
                return masked

            return Problem(
                ours=lambda: [kernels.conv2d_data_gradient(dy, y, weight, out, geometry, taps=taps)],
                theirs=lambda: _backward(spread(), x, weight, (True, False, False)),
                exact=lambda: [_backward(_spread_exactly(dy, y, taps, draw.size), x.double(), weight.double(), (True, False, False))[0]],
                num_bytes=all_rows([dy, y, taps, weight, x]),
                num_flops=_flops(weight, draw.size),
            )
        y, dy = kernels.conv2d(x, weight, bias, geometry), draw.image(num_out)
        return Problem(
            ours=lambda: [kernels.conv2d_data_gradient(dy, y, weight, out, geometry)],
            theirs=lambda: _backward(torch.ops.aten.threshold_backward(dy, y, 0), x, weight, (True, False, False)),
            exact=lambda: [_backward((dy * (y > 0)).double(), x.double(), weight.double(), (True, False, False))[0]],
            num_bytes=all_rows([dy, y, weight, x]),
            num_flops=_flops(weight, draw.size),
        )

    return build


def _spread_exactly(dy: Tensor, y: Tensor, taps: Tensor, size: tuple[int, ...]) -> Tensor:
    """Gradient of the input of max pooling in fp64, tap by tap."""
    shifts = torch.arange(dy.shape[1], device=dy.device)
    chosen = (taps[:, shifts // 4].int() >> (shifts % 4 * 2)[:, None, None]) & 3
    on = dy.double() * (y > 0)
    dense = torch.zeros(1, dy.shape[1], *size, dtype=torch.float64, device=dy.device)
    for tap in range(4):
        dense[:, :, tap // 2 :: 2, tap % 2 :: 2][:, :, : dy.shape[2], : dy.shape[3]] = on * (chosen == tap)
    return dense


def _weight_gradient(num_in: int, num_out: int, *, pooled: bool = False) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        x, weight, bias = draw.image(num_in), draw.weight(num_out, num_in, 3, 3), draw.vector(num_out)
        geometry = Geometry.whole((draw.size[0], draw.size[1]), _SAME, _SAME)
        if pooled:
            y, taps = kernels.conv2d_max_pool(x, weight, bias, geometry)
            dy = draw.image(num_out, (y.shape[2], y.shape[3]))
        else:
            y, dy, taps = kernels.conv2d(x, weight, bias, geometry), draw.image(num_out), None

        def ours() -> list[Tensor]:
            return kernels.conv2d_weight_gradient(dy, y, x, weight, geometry, taps=taps)

        def exact() -> list[Tensor]:
            dense = (dy * (y > 0)).double() if taps is None else _spread_exactly(dy, y, taps, draw.size)
            return list(_backward(dense, x.double(), weight.double(), (False, True, True))[1:])

        def theirs() -> Any:
            return _backward(torch.ops.aten.threshold_backward(dy, y, 0), x, weight, (False, True, True))

        tensors = [dy, y, x, weight] + ([] if taps is None else [taps])
        return Problem(
            ours=ours, theirs=None if pooled else theirs, exact=exact, num_bytes=all_rows(tensors), num_flops=_flops(weight, draw.size)
        )

    return build


def _stem(draw: Draw) -> Problem:
    x, weight, bias, geometry, out = _stem_operands(draw)
    return Problem(
        ours=lambda: [kernels.conv2d(x, weight, bias, geometry, out=out)],
        theirs=lambda: F.conv2d(x, weight, bias, stride=2, padding=3).relu_(),
        exact=lambda: [F.conv2d(x.double(), weight.double(), bias.double(), stride=2, padding=3).relu()],
        num_bytes=all_rows([x, weight, out]),
        num_flops=_flops(weight, geometry.output_size),
    )


def _stem_gradient(draw: Draw) -> Problem:
    x, weight, _, geometry, dy = _stem_operands(draw)

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        mask = [False, True, True]
        return list(torch.ops.aten.convolution_backward(dy, x, weight, [64], [2, 2], [3, 3], [1, 1], False, [0, 0], 1, mask)[1:])

    return Problem(
        ours=lambda: kernels.conv2d_weight_gradient(dy, None, x, weight, geometry),
        theirs=lambda: backward(dy, x, weight),
        exact=lambda: backward(dy.double(), x.double(), weight.double()),
        num_bytes=all_rows([dy, x, weight]),
        num_flops=_flops(weight, geometry.output_size),
    )


def _stem_operands(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Geometry, Tensor]:
    """Input, weight, bias, geometry and an output of the first layer of a ResNet."""
    window = KernelWindow(kernel=7, stride=2, padding=3)
    geometry = Geometry.whole((draw.size[0], draw.size[1]), window, window)
    return draw.image(3), draw.weight(64, 3, 7, 7), draw.vector(64), geometry, draw.image(64, geometry.output_size)


def _depthwise(draw: Draw) -> Problem:
    window = KernelWindow(kernel=7, padding=3)
    x, weight, bias = draw.image(96), draw.weight(96, 1, 7, 7), draw.vector(96)
    geometry = Geometry.whole((draw.size[0], draw.size[1]), window, window)
    out = torch.empty_like(x)
    return Problem(
        ours=lambda: [kernels.conv2d(x, weight, bias, geometry, groups=96, relu=False, out=out)],
        theirs=lambda: F.conv2d(x, weight, bias, padding=3, groups=96),
        exact=lambda: [F.conv2d(x.double(), weight.double(), bias.double(), padding=3, groups=96)],
        num_bytes=all_rows([x, weight, out]),
        num_flops=_flops(weight, draw.size),
    )


def _depthwise_backward(draw: Draw) -> Problem:
    window = KernelWindow(kernel=7, padding=3)
    x, weight, dy = draw.image(96), draw.weight(96, 1, 7, 7), draw.image(96)
    geometry = Geometry.whole((draw.size[0], draw.size[1]), window, window)
    out = torch.empty_like(x)

    def ours() -> list[Tensor]:
        dx = kernels.conv2d_data_gradient(dy, None, weight, out, geometry, groups=96)
        return [dx, *kernels.conv2d_weight_gradient(dy, None, x, weight, geometry, groups=96)]

    return Problem(
        ours=ours,
        theirs=lambda: _backward(dy, x, weight, (True, True, True), 3, 96),
        exact=lambda: list(_backward(dy.double(), x.double(), weight.double(), (True, True, True), 3, 96)),
        num_bytes=all_rows([x, dy, dy, weight, out]),
        num_flops=2 * _flops(weight, draw.size),
    )


def _volume(draw: Draw) -> Problem:
    x, weight, bias = draw.image(32), draw.weight(32, 32, 3, 3, 3), draw.vector(32)
    geometry = VolumeGeometry.whole((draw.size[0], draw.size[1], draw.size[2]), _SAME, _SAME, _SAME)

    return Problem(
        ours=lambda: [kernels.conv3d(x, weight, bias, geometry)],
        theirs=lambda: F.conv3d(x, weight, bias, padding=1).relu_(),
        exact=lambda: [F.conv3d(x.double(), weight.double(), bias.double(), padding=1).relu()],
        num_bytes=all_rows([x, weight, x]),
        num_flops=_flops(weight, draw.size),
    )


def _volume_backward(draw: Draw) -> Problem:
    x, weight, dy = draw.image(32), draw.weight(32, 32, 3, 3, 3), draw.image(32)
    geometry = VolumeGeometry.whole((draw.size[0], draw.size[1], draw.size[2]), _SAME, _SAME, _SAME)

    def ours() -> list[Tensor]:
        return [kernels.conv3d_data_gradient(dy, weight, geometry), *kernels.conv3d_weight_gradient(dy, x, weight, geometry)]

    return Problem(
        ours=ours,
        theirs=lambda: _backward(dy, x, weight, (True, True, True)),
        exact=lambda: list(_backward(dy.double(), x.double(), weight.double(), (True, True, True))),
        num_bytes=all_rows([x, dy, dy, weight, x]),
        num_flops=2 * _flops(weight, draw.size),
    )


def convolution_cases() -> list[Case]:
    """All cases of this module."""
    cases = []

    def add(name: str, family: str, build: Callable[[Draw], Problem], large: tuple[int, ...], small: tuple[int, ...] = (34, 45)) -> None:
        cases.append(Case(name=name, family=family, dtypes=_FLOATS, build=build, large=large, small=small))

    def add_single(name: str, build: Callable[[Draw], Problem], dtype: torch.dtype, size: int, precision: str | None = None) -> None:
        case = Case(name=name, family="conv2d", dtypes=(dtype,), build=build, large=(size, size), small=(34, 45), precision=precision)
        cases.append(case)

    layers = {"vgg 1_2": (64, 64, 2048), "vgg 2_2": (128, 128, 1024), "vgg 3_2": (256, 256, 512), "vgg 5_1": (512, 512, 128)}
    for name, (num_in, num_out, extent) in layers.items():
        size = (extent, extent)
        add(f"{name} conv bias relu", "conv2d", _forward(num_in, num_out), size)
        add(f"{name} conv bias relu pool", "conv2d", _pooled(num_in, num_out), size)
        add(f"{name} data gradient, relu", "conv2d", _data_gradient(num_in, num_out, pooled=False), size)
        add(f"{name} data gradient, relu pool", "conv2d", _data_gradient(num_in, num_out, pooled=True), size, (34, 46))
        add(f"{name} weight gradient, relu", "conv2d", _weight_gradient(num_in, num_out), size)
    add("vgg 1_1 conv bias relu", "conv2d", _forward(3, 64), (2048, 2048))
    add("vgg 1_1 weight gradient, relu", "conv2d", _weight_gradient(3, 64), (2048, 2048))
    add("resnet stem conv bias relu", "conv2d", _stem, (2048, 2048))
    add("resnet stem weight gradient", "conv2d", _stem_gradient, (2048, 2048))
    variants: tuple[LaunchVariant, ...] = ("small", "deep", "rows")
    for variant in variants:
        add_single(f"vgg 1_2 conv bias relu, {variant}", _forward(64, 64, variant=variant), torch.bfloat16, 2048)
    precisions: tuple[str, ...] = ("tf32", "bf16x3")
    for precision in precisions:
        add_single(f"vgg 2_2 conv bias relu, {precision}", _forward(128, 128, precision=precision), torch.float32, 1024, precision)
    add("vgg 1_2 weight gradient, relu pool", "conv2d", _weight_gradient(64, 64, pooled=True), (2048, 2048), (34, 46))
    add("depthwise 7x7", "depthwise", _depthwise, (1024, 1024))
    add("depthwise 7x7 gradients", "depthwise", _depthwise_backward, (1024, 1024))
    add("volume conv bias relu", "conv3d", _volume, (64, 256, 256), (6, 17, 20))
    add("volume gradients", "conv3d", _volume_backward, (64, 256, 256), (6, 17, 20))
    return cases
