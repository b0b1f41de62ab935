"""One step of AdamW (Loshchilov and Hutter 2019) on flat buffers, in one pass over memory.

The parameter and both moments are fp32; the gradient may be a half precision, and so may a second copy of the parameter, which is
rounded from the first. On a CPU the result has the bits of ``torch.optim.AdamW(foreach=False)``. The kernel has them, too, but for the
square root: its root is the nearest number, where the one that PyTorch takes on a CPU may be the next.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sft.errors import InputError
from sft.kernels.adamw_reference import reference_adamw
from sft.kernels.dispatch import uses_triton
from sft.kernels.flat import check_flat, check_rates

__all__ = ["adamw_step"]


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
        from sft.kernels.adamw_triton import launch_adamw  # not above: it imports Triton

        launch_adamw(parameter, gradient, mean, square, copy, **options)
        return
    reference_adamw(parameter, gradient, mean, square, **options)
    if copy is not None:
        copy.copy_(parameter)
