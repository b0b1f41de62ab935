"""One step of SGD on a flat buffer, in one pass over memory: with weight decay, momentum, Nesterov's or not.

The parameter is fp32; the gradient may be a half precision, and so may a second copy of the parameter, which is rounded from
the first (Micikevicius et al. 2018). On a CPU the result has the bits of ``torch.optim.SGD(foreach=False)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sft.errors import InputError
from sft.kernels.dispatch import uses_triton
from sft.kernels.flat import check_flat, check_rates
from sft.kernels.sgd_reference import reference_sgd

__all__ = ["sgd_step"]


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
        from sft.kernels.sgd_triton import launch_sgd  # not above: it imports Triton

        launch_sgd(parameter, gradient, momentum_buffer, copy, **options)
        return
    reference_sgd(parameter, gradient, momentum_buffer, **options)
    if copy is not None:
        copy.copy_(parameter)
