"""One step of AdamW in plain PyTorch: the operations of ``torch.optim.AdamW(foreach=False)`` in their order."""

from __future__ import annotations

from torch import Tensor

__all__ = ["reference_adamw"]


def reference_adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Change ``parameter``, ``mean`` and ``square`` in place; see ``adamw.adamw_step``."""
    gradient = gradient.to(parameter.dtype)
    if maximize:
        gradient = -gradient
    if weight_decay != 0:
        parameter.mul_(1 - lr * weight_decay)
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    step_size = lr / (1 - betas[0] ** step)
    spread = (square.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    parameter.addcdiv_(mean, spread, value=-step_size)
