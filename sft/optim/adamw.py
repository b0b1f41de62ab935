"""Adam with decoupled weight decay, as ``torch.optim.AdamW`` computes it.

Sources: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019; AMSGrad: Reddi, Kale and Kumar, 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.errors import InputError
from sft.optim.update import Hyper, check_range, plain_number

__all__ = ["AdamWUpdate"]


@dataclass(frozen=True, slots=True)
class AdamWUpdate:
    """The update of :class:`torch.optim.AdamW`, AMSGrad and maximize included."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Torch's settings."""
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "amsgrad": False,
            "maximize": False,
            "foreach": False,
            "capturable": False,
            "differentiable": False,
            "fused": False,
            "decoupled_weight_decay": True,
        }

    def check(self, hyper: Hyper) -> None:
        """Whether the settings can be followed.

        Raises:
            InputError: they cannot.
        """
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, hyper[name], low=0.0)
        for beta in hyper["betas"]:
            check_range("a beta", beta, low=0.0, below=1.0)
        if not hyper.get("decoupled_weight_decay", True):
            raise InputError("decoupled_weight_decay=False is torch.optim.Adam, not AdamW; use AdamW's settings")

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """The averages of gradients and of their squares; with AMSGrad the largest of the latter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def counts(self, hyper: Hyper) -> bool:
        """Torch's AdamW counts its steps."""
        return True

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content is lost."""
        lr, eps = hyper["lr"], hyper["eps"]  # a tensor's arithmetic is its type's, as in torch
        beta1, beta2 = (plain_number(beta) for beta in hyper["betas"])
        weight_decay = plain_number(hyper["weight_decay"])
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0:
            param.mul_(plain_number(1 - lr * weight_decay))
        if param.is_complex():  # real and imaginary parts are numbers of their own, as in torch
            param, grad, average, squares = map(torch.view_as_real, (param, grad, average, squares))
        average.lerp_(grad, 1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(num_updates + 1)
        step_size = plain_number(lr / (1 - beta1**step))
        correction = (1 - beta2**step) ** 0.5
        if hyper["amsgrad"]:
            largest = torch.view_as_real(state["max_exp_avg_sq"]) if state["max_exp_avg_sq"].is_complex() else state["max_exp_avg_sq"]
            squares = torch.maximum(largest, squares, out=largest)
        # The gradient is read no more: its memory takes the denominator.
        denominator = torch.sqrt(squares, out=grad).div_(correction).add_(eps)
        param.addcdiv_(average, denominator, value=-step_size)
