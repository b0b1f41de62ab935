"""One step of AdamW in Triton. Products and sums are rounded once where ATen's vectorised CPU code rounds them once.

Affixes as in ``conv2d_triton``.

One step of SGD in Triton. Products and sums are rounded once where ATen's vectorised CPU code rounds them once.

Affixes as in ``conv2d_triton``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["adamw_kernel", "launch_adamw", "launch_sgd", "sgd_kernel"]

_RATES = ["kept", "share", "rest", "beta", "one_less_beta", "correction", "eps", "step_size"]


@triton.jit(do_not_specialize=["size", *_RATES])
def adamw_kernel(
    p_parameter,  # fp32 [size]
    p_gradient,  # [size]
    p_mean,  # fp32 [size]
    p_square,  # fp32 [size]
    p_copy,  # [size]
    size,
    kept,  # of the parameter, after its decay
    share,  # of the gradient in the mean
    rest,
    beta,  # of the square
    one_less_beta,
    correction,  # of the square's root
    eps,
    step_size,
    DECAY: tl.constexpr,
    NEAR: tl.constexpr,  # share < 0.5: ATen takes the nearer end of the interpolation
    MAXIMIZE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    parameter = tl.load(p_parameter + i, mask=m, other=0.0)
    gradient = tl.load(p_gradient + i, mask=m, other=0.0).to(tl.float32)
    mean = tl.load(p_mean + i, mask=m, other=0.0)
    zeros = tl.zeros_like(parameter)
    if MAXIMIZE:
        gradient = -gradient
    if DECAY:
        parameter = parameter * kept
    if NEAR:
        mean = tl.fma(gradient - mean, zeros + share, mean)
    else:
        mean = tl.fma(gradient - mean, zeros - rest, gradient)
    square = tl.fma(gradient * one_less_beta, gradient, tl.load(p_square + i, mask=m, other=0.0) * beta)
    spread = tl.div_rn(tl.sqrt_rn(square), zeros + correction) + eps
    parameter = parameter + tl.div_rn(mean * (zeros - step_size), spread)
    tl.store(p_parameter + i, parameter, mask=m)
    tl.store(p_mean + i, mean, mask=m)
    tl.store(p_square + i, square, mask=m)
    if COPY:
        tl.store(p_copy + i, parameter.to(p_copy.dtype.element_ty), mask=m)


def launch_adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    block: int = 1024,
) -> None:
    """One step; arguments as ``adamw.adamw_step`` checks them, not empty."""
    share = 1.0 - betas[0]
    with torch.cuda.device_of(parameter):
        adamw_kernel[(ceil_div(parameter.numel(), block),)](
            parameter,
            gradient,
            mean,
            square,
            parameter if copy is None else copy,
            parameter.numel(),
            1.0 - lr * weight_decay,
            share,
            1.0 - float(torch.tensor(share, dtype=torch.float32, device="cpu")),
            float(betas[1]),
            1.0 - betas[1],
            (1.0 - betas[1] ** step) ** 0.5,
            float(eps),
            lr / (1.0 - betas[0] ** step),
            DECAY=weight_decay != 0,
            NEAR=share < 0.5,
            MAXIMIZE=maximize,
            COPY=copy is not None,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["size", "lr", "momentum", "damped", "weight_decay"])
def sgd_kernel(
    p_parameter,  # fp32 [size]
    p_gradient,  # [size]
    p_momentum,  # fp32 [size]
    p_copy,  # [size]
    size,
    lr,
    momentum,
    damped,  # one minus the dampening
    weight_decay,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    parameter = tl.load(p_parameter + i, mask=m, other=0.0)
    update = tl.load(p_gradient + i, mask=m, other=0.0).to(tl.float32)
    if MAXIMIZE:
        update = -update
    if DECAY:
        update = tl.fma(parameter, tl.zeros_like(parameter) + weight_decay, update)
    if MOMENTUM:
        if FIRST:
            held = update
        else:
            held = tl.fma(update, tl.zeros_like(update) + damped, tl.load(p_momentum + i, mask=m, other=0.0) * momentum)
        tl.store(p_momentum + i, held, mask=m)
        if NESTEROV:
            update = tl.fma(held, tl.zeros_like(held) + momentum, update)
        else:
            update = held
    parameter = tl.fma(update, tl.zeros_like(update) - lr, parameter)
    tl.store(p_parameter + i, parameter, mask=m)
    if COPY:
        tl.store(p_copy + i, parameter.to(p_copy.dtype.element_ty), mask=m)


def launch_sgd(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    copy: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
    block: int = 1024,
) -> None:
    """One step; arguments as ``sgd.sgd_step`` checks them, not empty."""
    with torch.cuda.device_of(parameter):
        sgd_kernel[(ceil_div(parameter.numel(), block),)](
            parameter,
            gradient,
            parameter if momentum_buffer is None else momentum_buffer,
            parameter if copy is None else copy,
            parameter.numel(),
            float(lr),
            float(momentum),
            1.0 - dampening,
            float(weight_decay),
            DECAY=weight_decay != 0,
            MOMENTUM=momentum_buffer is not None,
            FIRST=first,
            NESTEROV=nesterov,
            MAXIMIZE=maximize,
            COPY=copy is not None,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
