"""Optimizer steps on flat buffers, in Triton: SGD, and AdamW (Loshchilov and Hutter 2019), each in one pass over memory.

Parameter and states are fp32. The gradient may have half precision, and so may a second copy of the parameter, which is rounded from the
first (Micikevicius et al. 2018). A product and a sum are rounded once where ATen's vectorised CPU code rounds them once (fma), so the
results have the bits of ``torch.optim`` with ``foreach=False`` on a CPU. The one exception is AdamW's square root: here it is the nearest
number, while PyTorch's on a CPU may be the next one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["adamw_kernel", "launch_adamw", "launch_sgd", "sgd_kernel"]

_RATES = ["decay", "share", "complement", "beta", "one_less_beta", "correction", "eps", "step_size"]


@triton.jit(do_not_specialize=["size", *_RATES])
def adamw_kernel(
    p_parameter,  # fp32 [size]
    p_gradient,  # [size]
    p_mean,  # fp32 [size]
    p_square,  # fp32 [size]
    p_copy,  # [size]
    size,
    decay,  # factor of the parameter
    share,  # weight of the gradient in the running mean
    complement,  # one minus share
    beta,  # factor of the running square
    one_less_beta,
    correction,  # divisor of the root of the square
    eps,
    step_size,
    DECAY: tl.constexpr,
    NEAR: tl.constexpr,  # share < 0.5: ATen interpolates from the nearer end
    MAXIMIZE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of AdamW, in place."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    parameter = tl.load(p_parameter + i, mask=m, other=0.0)
    gradient = tl.load(p_gradient + i, mask=m, other=0.0).to(tl.float32)
    mean = tl.load(p_mean + i, mask=m, other=0.0)
    zeros = tl.zeros_like(parameter)
    if MAXIMIZE:
        gradient = -gradient
    if DECAY:
        parameter = parameter * decay
    if NEAR:
        mean = tl.fma(gradient - mean, zeros + share, mean)
    else:
        mean = tl.fma(gradient - mean, zeros - complement, gradient)
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
    """One step of AdamW, in place, on contiguous vectors that are not empty.

    Args:
        parameter: fp32.
        gradient: of any floating dtype.
        mean, square: running means of the gradient and of its square (``exp_avg``, ``exp_avg_sq``), fp32.
        copy: gets the new parameter, rounded; None for no copy.
        step: number of this step, from 1.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.
        block: elements of one program.
    """
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
    """One step of SGD, in place."""
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
            velocity = update
        else:
            velocity = tl.fma(update, tl.zeros_like(update) + damped, tl.load(p_momentum + i, mask=m, other=0.0) * momentum)
        tl.store(p_momentum + i, velocity, mask=m)
        if NESTEROV:
            update = tl.fma(velocity, tl.zeros_like(velocity) + momentum, update)
        else:
            update = velocity
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
    """One step of SGD, in place, on contiguous vectors that are not empty.

    Args:
        parameter: fp32.
        gradient: of any floating dtype.
        momentum_buffer: fp32; None without momentum.
        copy: gets the new parameter, rounded; None for no copy.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in ``torch.optim.SGD``.
        first: true for the first step, which sets the momentum buffer.
        block: elements of one program.
    """
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
