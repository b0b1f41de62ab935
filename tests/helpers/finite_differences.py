"""Central differences in float64, which decide between two different gradients.

Eager PyTorch is the reference of most tests, and can be wrong itself (docs/exactness.md). A directional derivative along the difference of
two gradients tells which of them is the gradient of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sft.nn import Repeat

__all__ = ["Verdict", "judge_gradients", "with_contiguous_norm_gradients"]

_MARGIN = 10.0
"""One derivative is right if it is this much closer to the central difference than the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Derivatives along one direction."""

    difference: float
    """Central difference of the function."""
    ours: float
    """Of our gradient."""
    eager: float
    """Of eager PyTorch's gradient."""

    @property
    def culprit(self) -> str:
        """The wrong gradient: ``"ours"``, ``"eager PyTorch"``, or ``"undecided"`` where the function is not smooth there."""
        of_ours, of_eager = abs(self.ours - self.difference), abs(self.eager - self.difference)
        if of_ours * _MARGIN < of_eager:
            return "eager PyTorch"
        return "ours" if of_eager * _MARGIN < of_ours else "undecided"

    def __str__(self) -> str:
        who = f"{self.culprit} is wrong" if self.culprit != "undecided" else "undecided"
        return f"finite differences give {self.difference:.9g}, ours {self.ours:.9g}, eager PyTorch {self.eager:.9g}: {who}"


def judge_gradients(function: Callable[[Tensor], Tensor], value: Tensor, ours: Tensor, eager: Tensor) -> Verdict:
    """The derivatives of a scalar function along the difference of two gradients.

    Args:
        function: a scalar function of a tensor.
        value: the tensor at which the gradients are taken.
        ours: one gradient.
        eager: the other one.
    """
    direction = (ours - eager).detach().double()
    direction = direction / direction.abs().max()
    step = 1e-6 * max(1.0, float(value.detach().abs().max()))
    with torch.no_grad():
        up, down = (float(function(value.detach() + sign * step * direction)) for sign in (1, -1))
    along = [float((gradient.detach().double() * direction).sum()) for gradient in (ours, eager)]
    return Verdict(difference=(up - down) / (2 * step), ours=along[0], eager=along[1])


def with_contiguous_norm_gradients(model: nn.Module) -> nn.Module:
    """The model, with gradients made contiguous where they enter a batch norm.

    On the CPU the backward pass of ``nn.BatchNorm2d`` misreads gradients of some other strides. Blocks of ``sft.nn.Repeat`` take no hooks.
    """
    repeated = {inner for module in model.modules() if isinstance(module, Repeat) for inner in module.modules()}
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in repeated:
            module.register_forward_hook(_make_gradient_contiguous)
    return model


def _make_gradient_contiguous(module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(Tensor.contiguous)
