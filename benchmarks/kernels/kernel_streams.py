"""Cases of kernels that are bound by memory: norms, pools, resizing, rows, dropout, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import kernel_launches as kernels
import torch
import torch.nn.functional as F
from kernel_case import Case, Draw, Problem, all_rows
from torch import Tensor

from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.backends.resize import band_table
from sft.kernels.geometry import Geometry, KernelWindow
from sft.kernels.rng.dropout import dropout, keep_mask
from sft.lower.rules.resampled_range import ResampledRange

__all__ = ["stream_cases"]

_FLOATS = (torch.bfloat16, torch.float32)
_EPS = 1e-5


def _moments(draw: Draw) -> Problem:
    x = draw.image(64)

    def exact() -> list[Tensor]:
        variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
        return [mean, variance]

    return Problem(
        ours=lambda: list(kernels.norm_moments(x)), theirs=lambda: torch.var_mean(x, (0, 2, 3)), exact=exact, num_bytes=all_rows([x])
    )


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean[None], (variance + _EPS).rsqrt()[None]


def _normalize(draw: Draw) -> Problem:
    x, residual, weight, bias = draw.image(64), draw.image(64), draw.vector(64, torch.float32), draw.vector(64, torch.float32)
    mean, rstd = _statistics(x)
    out = torch.empty_like(x)

    def exact() -> list[Tensor]:
        distance = (x.double() - mean.double()[0, :, None, None]) * rstd.double()[0, :, None, None]
        return [(distance * weight.double()[:, None, None] + bias.double()[:, None, None] + residual.double()).relu()]

    def ours() -> list[Tensor]:
        from sft.kernels.norm.norm_triton import launch_normalize  # here, because it imports Triton

        launch_normalize(x, mean, rstd, weight, bias, residual, out, relu=True)
        return [out]

    def theirs() -> Tensor:
        variance = (1 / rstd[0] ** 2 - _EPS).clamp(min=0)
        return F.batch_norm(x, mean[0], variance, weight, bias, False, eps=_EPS).add_(residual).relu_()

    return Problem(
        ours=ours,
        theirs=theirs,
        exact=exact,
        num_bytes=all_rows([x, residual, out]),
    )


def _norm_backward(draw: Draw) -> Problem:
    x, dy, weight = draw.image(64), draw.image(64), draw.vector(64, torch.float32)
    mean, rstd = _statistics(x)
    distance = (x.float() - mean[0, :, None, None]) * rstd[0, :, None, None]
    y = (distance * weight[:, None, None]).relu().to(draw.dtype)
    out = torch.empty_like(x)

    def ours() -> list[Tensor]:
        from sft.kernels.norm.norm_triton import launch_norm_gradient  # here, because it imports Triton

        sums = kernels.norm_sums(dy, y, x, mean, rstd)
        launch_norm_gradient(dy, y, x, mean, rstd, weight, kernels.norm_terms(sums, weight, draw.size[0] * draw.size[1]), out)
        return [out, sums[1], sums[0]]

    def exact() -> list[Tensor]:
        leaves = [x.double().requires_grad_(), weight.double().requires_grad_(), torch.zeros(64, dtype=torch.float64, device=x.device)]
        leaves[2].requires_grad_()
        z = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, eps=_EPS)
        return list(torch.autograd.grad(z, leaves, (dy * (y > 0)).double()))

    def theirs() -> object:
        masked = torch.ops.aten.threshold_backward(dy, y, 0)
        return torch.ops.aten.native_batch_norm_backward(masked, x, weight, None, None, mean[0], rstd[0], True, _EPS, [True, True, True])

    return Problem(ours=ours, theirs=theirs, exact=exact, num_bytes=all_rows([x, dy, y, x, dy, y, out]))


def _max_pool(draw: Draw) -> Problem:
    window = KernelWindow(kernel=2, stride=2)
    x, geometry = draw.image(64), Geometry.whole((draw.size[0], draw.size[1]), window, window)
    y, taps = kernels.max_pool(x, geometry)
    return Problem(
        ours=lambda: [kernels.max_pool(x, geometry)[0]],
        theirs=lambda: F.max_pool2d(x, 2, return_indices=True),
        exact=lambda: [F.max_pool2d(x.double(), 2)],
        num_bytes=all_rows([x, y, taps]),
    )


def _max_pool_backward(draw: Draw) -> Problem:
    window = KernelWindow(kernel=2, stride=2)
    x, geometry = draw.image(64), Geometry.whole((draw.size[0], draw.size[1]), window, window)
    y, taps = kernels.max_pool(x, geometry)
    dy = draw.image(64, (y.shape[2], y.shape[3]))
    _, indices = F.max_pool2d(x, 2, return_indices=True)

    def exact() -> list[Tensor]:
        leaf = x.double().requires_grad_()
        return list(torch.autograd.grad(F.max_pool2d(leaf, 2), leaf, dy.double()))

    return Problem(
        ours=lambda: [kernels.max_pool_gradient(dy, taps, geometry)],
        theirs=lambda: torch.ops.aten.max_pool2d_with_indices_backward(dy, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices),
        exact=exact,
        num_bytes=all_rows([dy, taps, x]),
    )


def _average_pool(draw: Draw) -> Problem:
    window = KernelWindow(kernel=3, stride=2, padding=1)
    x, geometry = draw.image(64), Geometry.whole((draw.size[0], draw.size[1]), window, window)
    y = kernels.average_pool(x, geometry)
    dy = draw.image(64, (y.shape[2], y.shape[3]))
    back = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "ceil_mode": False, "count_include_pad": True}

    def exact() -> list[Tensor]:
        leaf = x.double().contiguous().requires_grad_()  # PyTorch's gradient is wrong channels last (pytorch/pytorch#188344)
        pooled = F.avg_pool2d(leaf, 3, 2, 1)
        return [pooled.detach(), *torch.autograd.grad(pooled, leaf, dy.double())]

    def theirs() -> object:
        return F.avg_pool2d(x, 3, 2, 1), torch.ops.aten.avg_pool2d_backward(dy, x, **back, divisor_override=None)

    return Problem(
        ours=lambda: [kernels.average_pool(x, geometry), kernels.average_pool_gradient(dy, geometry)],
        theirs=theirs,
        exact=exact,
        num_bytes=all_rows([x, y, dy, x]),
    )


def _resize(mode: str, *, backward: bool) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        tables = []
        for size in draw.size:
            sampling = AxisResampling(kind="linear" if mode == "bilinear" else "nearest", extent=size, length=2 * size)
            span = ResampledRange(sampling, 0, 2 * size, size, is_adjoint=backward)
            tables.append(band_table(span, (0, 0, 0), span.num_rows, draw.device))
        x, dy = draw.image(64), draw.image(64, (2 * draw.size[0], 2 * draw.size[1]))
        out = torch.empty_like(x if backward else dy)

        def exact() -> list[Tensor]:
            leaf = x.double().requires_grad_()
            y = F.interpolate(leaf, scale_factor=2, mode=mode)
            return list(torch.autograd.grad(y, leaf, dy.double())) if backward else [y.detach()]

        def theirs() -> object:
            if not backward:
                return F.interpolate(x, scale_factor=2, mode=mode)
            sizes = [2 * draw.size[0], 2 * draw.size[1]], list(x.shape)
            if mode == "bilinear":
                return torch.ops.aten.upsample_bilinear2d_backward(dy, *sizes, False, 2.0, 2.0)
            return torch.ops.aten.upsample_nearest2d_backward(dy, *sizes, 2.0, 2.0)

        def ours() -> list[Tensor]:
            from sft.kernels.resize.resize_triton import launch_resize  # here, because it imports Triton

            launch_resize(dy if backward else x, out, tables[0], tables[1])
            return [out]

        return Problem(ours=ours, theirs=theirs, exact=exact, num_bytes=all_rows([x, dy]))

    return build


def _rows(draw: Draw) -> Problem:
    carried, new = draw.image(64, (2, draw.size[1])), draw.image(64)
    out = torch.empty_like(draw.image(64, (draw.size[0] + 2, draw.size[1])))

    def ours() -> list[Tensor]:
        from sft.kernels.rows.rows_triton import launch_move_rows  # here, because it imports Triton

        launch_move_rows([(carried, out[:, :, :2], False), (new, out[:, :, 2:], False)])
        return [out]

    return Problem(
        ours=ours,
        theirs=lambda: torch.cat([carried, new], 2),
        exact=lambda: [torch.cat([carried, new], 2).double()],
        num_bytes=2 * all_rows([carried, new]),
    )


def _rows_backward(draw: Draw) -> Problem:
    joined, carried, new = draw.image(64, (draw.size[0] + 2, draw.size[1])), draw.image(64, (2, draw.size[1])), draw.image(64)
    saved, out = carried.clone(), torch.empty_like(new)

    def ours() -> list[Tensor]:
        from sft.kernels.rows.rows_triton import launch_move_rows  # here, because it imports Triton

        carried.copy_(saved)
        launch_move_rows([(joined[:, :, :2], carried, True), (joined[:, :, 2:], out, False)])
        return [carried, out]

    def theirs() -> object:
        return saved + joined[:, :, :2], joined[:, :, 2:].clone(memory_format=torch.channels_last)

    return Problem(
        ours=ours,
        theirs=theirs,
        exact=lambda: [saved.double() + joined[:, :, :2].double(), joined[:, :, 2:].double()],
        num_bytes=all_rows([joined, out, carried, saved]),
    )


def _dropout(draw: Draw) -> Problem:
    x = draw.image(64)
    place = {"seed": 5, "site": 2, "draw": 1, "p": 0.3}
    extents = (1, 64, draw.size[0], draw.size[1])
    out = torch.empty_like(x)

    def exact() -> list[Tensor]:
        mask = keep_mask(extents, origin=(0, 0, 0), extents=extents, kind="element", **place, device="cpu")  # type: ignore[arg-type]  # words and a rate
        return [x.double() * mask.to(x.device) / 0.7]

    return Problem(
        ours=lambda: [dropout(x, origin=(0, 0, 0), extents=extents, kind="element", out=out, **place)],  # type: ignore[arg-type]  # words and a rate
        theirs=lambda: F.dropout(x, 0.3),
        exact=exact,
        num_bytes=all_rows([x, out]),
    )


def _optimizer(kind: str) -> Callable[[Draw], Problem]:
    def build(draw: Draw) -> Problem:
        size = math.prod(draw.size)
        start = [draw.vector(size, torch.float32), draw.vector(size, torch.float32), draw.vector(size, torch.float32).square()]
        gradient, copy = draw.vector(size), torch.empty(size, dtype=torch.bfloat16, device=draw.device)
        parameter, first, second = (buffer.clone() for buffer in start)
        theirs = torch.nn.Parameter(start[0].clone())
        theirs.grad = gradient.float()
        optimizer: torch.optim.Optimizer
        if kind == "sgd":
            optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True, fused=draw.device.type == "cuda")
        else:
            optimizer = torch.optim.AdamW([theirs], lr=0.1, fused=draw.device.type == "cuda")

        def ours() -> list[Tensor]:
            from sft.kernels.optim.optimizers_triton import launch_adamw, launch_sgd  # here, because it imports Triton

            if kind == "sgd":
                momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "first": False}
                launch_sgd(parameter, gradient, first, copy, lr=0.1, weight_decay=1e-2, maximize=False, **momentum)  # type: ignore[arg-type]  # mixed options
                return [parameter, first]
            decay = {"weight_decay": 1e-2, "maximize": False}
            launch_adamw(parameter, gradient, first, second, copy, step=7, lr=0.1, betas=(0.9, 0.999), eps=1e-8, **decay)  # type: ignore[arg-type]  # mixed options
            return [parameter, first, second]

        def exact() -> list[Tensor]:
            wide = [buffer.double() for buffer in start]
            leaf = torch.nn.Parameter(wide[0])
            leaf.grad = gradient.double()
            if kind == "sgd":
                sgd = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True, foreach=False)
                sgd.state[leaf] = {"momentum_buffer": wide[1]}
                sgd.step()
                return [leaf.detach(), wide[1]]
            adamw = torch.optim.AdamW([leaf], lr=0.1, foreach=False)
            adamw.state[leaf] = {"step": torch.tensor(6.0), "exp_avg": wide[1], "exp_avg_sq": wide[2]}
            adamw.step()
            return [leaf.detach(), wide[1], wide[2]]

        tensors = [parameter, first, parameter, first, gradient, copy] + ([second, second] if kind == "adamw" else [])
        return Problem(ours=ours, theirs=optimizer.step, exact=exact, num_bytes=all_rows(tensors))

    return build


def stream_cases() -> list[Case]:
    """All cases of this module."""
    cases = []

    def add(name: str, family: str, build: Callable[[Draw], Problem], size: tuple[int, ...] = (2048, 2048)) -> None:
        cases.append(Case(name=name, family=family, dtypes=_FLOATS, build=build, large=size, small=(34, 46)))

    add("moments of 64 channels", "norm", _moments)
    add("normalise, affine, residual, relu", "norm", _normalize)
    add("norm gradients", "norm", _norm_backward)
    add("max pool 2x2", "pool", _max_pool)
    add("max pool 2x2 gradient", "pool", _max_pool_backward)
    add("average pool 3x3 and gradient", "pool", _average_pool)
    for mode in ("nearest", "bilinear"):
        add(f"{mode} doubled", "resize", _resize(mode, backward=False), (1024, 1024))
        add(f"{mode} doubled, gradient", "resize", _resize(mode, backward=True), (1024, 1024))
    add("join rows", "rows", _rows, (256, 8192))
    add("split rows", "rows", _rows_backward, (256, 8192))
    add("dropout", "dropout", _dropout)
    add("sgd step", "optimizer", _optimizer("sgd"), (8192, 8192))
    add("adamw step", "optimizer", _optimizer("adamw"), (8192, 8192))
    return cases
