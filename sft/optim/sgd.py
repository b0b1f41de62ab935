"""Stochastic gradient descent with momentum (Sutskever, Martens, Dahl and Hinton, 2013), as ``torch.optim.SGD`` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sft.errors import InputError
from sft.optim.update import Hyper, check_range, plain_number

__all__ = ["SGDUpdate"]


@dataclass(frozen=True, slots=True)
class SGDUpdate:
    """The update of :class:`torch.optim.SGD`: momentum, dampening, Nesterov, weight decay, maximize.

    >>> import torch
    >>> param, grad = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])
    >>> update = SGDUpdate()
    >>> update.apply(param, grad, {}, {**update.defaults, "lr": 0.1}, 0)
    >>> param
    tensor([0.9500, 1.9500])
    """

    @property
    def defaults(self) -> dict[str, Any]:
        """Torch's settings."""
        return {
            "lr": 1e-3,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": False,
            "differentiable": False,
            "fused": False,
        }

    def check(self, hyper: Hyper) -> None:
        """Whether the settings can be followed.

        Raises:
            InputError: they cannot.
        """
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, hyper[name], low=0.0)
        if hyper["nesterov"] and (hyper["momentum"] <= 0 or hyper["dampening"] != 0):
            raise InputError(
                f"nesterov with momentum={hyper['momentum']!r}, dampening={hyper['dampening']!r}: it needs a momentum, and no dampening"
            )

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """The momentum buffer, where there is a momentum."""
        return ("momentum_buffer",) if plain_number(hyper["momentum"]) != 0 else ()

    def counts(self, hyper: Hyper) -> bool:
        """Torch's SGD counts nothing."""
        return False

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content is lost."""
        momentum = plain_number(hyper["momentum"])
        weight_decay = plain_number(hyper["weight_decay"])
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0:
            grad.add_(param, alpha=weight_decay)
        direction = grad
        if momentum != 0:
            buffer = state["momentum_buffer"]
            if num_updates == 0:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - hyper["dampening"])
            direction = grad.add_(buffer, alpha=momentum) if hyper["nesterov"] else buffer
        param.add_(direction, alpha=-plain_number(hyper["lr"]))
