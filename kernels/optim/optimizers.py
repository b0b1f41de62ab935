"""One step of SGD on a flat buffer, in one pass over memory: with weight decay, momentum, Nesterov's or not.

The parameter is fp32; the gradient may be a half precision, and so may a second copy of the parameter, which is rounded from
the first (Micikevicius et al. 2018). On a CPU the result has the bits of ``torch.optim.SGD(foreach=False)``.

What optimizer steps on flat buffers have in common: which buffers go together.

One step of AdamW (Loshchilov and Hutter 2019) on flat buffers, in one pass over memory.

The parameter and both moments are fp32; the gradient may be a half precision, and so may a second copy of the parameter, which is
rounded from the first. On a CPU the result has the bits of ``torch.optim.AdamW(foreach=False)``. The kernel has them, too, but for the
square root: its root is the nearest number, where the one that PyTorch takes on a CPU may be the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sft.common.errors import InputError
from sft.kernels.common import uses_triton
from sft.kernels.geometry import raise_problems
from sft.kernels.optim.optimizers_reference import reference_adamw, reference_sgd

__all__ = ["adamw_step", "check_flat", "check_rates", "sgd_step"]


def check_flat(parameter: Tensor, gradient: Tensor, states: dict[str, Tensor | None], copy: Tensor | None) -> None:
    """Raise unless all are contiguous vectors of one length, states of the parameter's dtype, fp32 or fp64."""
    problems = []
    if parameter.dtype not in (torch.float32, torch.float64):
        problems.append(f"parameter is {parameter.dtype}; keep a master copy in torch.float32 and give the other as copy")
    vectors = {"parameter": parameter, "gradient": gradient, **states, "copy": copy}
    for name, tensor in vectors.items():
        if tensor is None:
            continue
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != parameter.numel() or tensor.device != parameter.device:
            what = f"{tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            problems.append(f"{name} is {what}; give a contiguous vector of {parameter.numel()} elements on {parameter.device}")
        elif not tensor.is_floating_point() or (name in states and tensor.dtype != parameter.dtype):
            problems.append(f"{name} is {tensor.dtype}, parameter is {parameter.dtype}; cast it")
    raise_problems("these buffers are not one optimizer's", problems)


def check_rates(**rates: float) -> None:
    """Raise unless all are at least 0."""
    if any(not rate >= 0 for rate in rates.values()):
        raise InputError(f"an optimizer's rates are at least 0, got {', '.join(f'{name}={rate}' for name, rate in rates.items())}")


def sgd_step(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    copy: Tensor | None = None,
) -> None:
    """Change ``parameter`` and ``momentum_buffer`` in place, and write ``copy``.

    Args:
        parameter: fp32 (or fp64), a contiguous vector.
        gradient: like ``parameter``, or of half precision.
        momentum_buffer: like ``parameter``; None if there is no momentum.
        first: the first step, which sets the momentum buffer whatever it holds.
        copy: of half precision; the new parameter, rounded.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in ``torch.optim.SGD``.

    Raises:
        InputError: vectors that do not go together, or a rate below 0.

    >>> import torch
    >>> parameter = torch.ones(3)
    >>> sgd_step(parameter, torch.tensor([1.0, 0.0, -2.0]), lr=0.5)
    >>> parameter.tolist()
    [0.5, 1.0, 2.0]
    """
    check_flat(parameter, gradient, {"momentum_buffer": momentum_buffer}, copy)
    check_rates(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if (momentum_buffer is None) != (momentum == 0) or (nesterov and (momentum == 0 or dampening != 0)):
        given = f"momentum={momentum}, dampening={dampening}, nesterov={nesterov}, {'no' if momentum_buffer is None else 'a'} buffer"
        raise InputError(f"momentum and its buffer come together, and Nesterov's takes momentum without dampening; got {given}")
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    options |= {"nesterov": nesterov, "maximize": maximize, "first": first}
    if not parameter.numel():
        return
    if uses_triton(parameter):
        from sft.kernels.optim.optimizers_triton import launch_sgd  # not above: it imports Triton

        launch_sgd(parameter, gradient, momentum_buffer, copy, **options)
        return
    reference_sgd(parameter, gradient, momentum_buffer, **options)
    if copy is not None:
        copy.copy_(parameter)


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    copy: Tensor | None = None,
) -> None:
    """Change ``parameter``, ``mean`` and ``square`` in place, and write ``copy``.

    Args:
        parameter: fp32 (or fp64), a contiguous vector.
        gradient: like ``parameter``, or of half precision.
        mean: running mean of the gradient (``exp_avg``), like ``parameter``.
        square: running mean of its square (``exp_avg_sq``), like ``parameter``.
        step: number of this step, from 1.
        copy: of half precision; the new parameter, rounded.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.

    Raises:
        InputError: vectors that do not go together, a rate below 0, a beta that is not in [0, 1), or a step below 1.

    >>> import torch
    >>> parameter, state = torch.ones(2), torch.zeros(2, 2)
    >>> adamw_step(parameter, torch.tensor([3.0, -3.0]), state[0], state[1], step=1, lr=0.25, weight_decay=0.0)
    >>> parameter.tolist()
    [0.75, 1.25]
    """
    check_flat(parameter, gradient, {"mean": mean, "square": square}, copy)
    check_rates(lr=lr, eps=eps, weight_decay=weight_decay)
    if step < 1 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"steps are counted from 1 and betas are in [0, 1), got step {step} and betas {betas}")
    if not parameter.numel():
        return
    options: dict[str, Any] = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    if uses_triton(parameter):
        from sft.kernels.optim.optimizers_triton import launch_adamw  # not above: it imports Triton

        launch_adamw(parameter, gradient, mean, square, copy, **options)
        return
    reference_adamw(parameter, gradient, mean, square, **options)
    if copy is not None:
        copy.copy_(parameter)
