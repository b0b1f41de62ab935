"""In-place updates of a single parameter: SGD and AdamW, with ATen's operators or with one kernel each.

``torch.optim`` iterates over all parameters once all gradients exist. If the gradients of a model never exist together, the update of a
parameter runs as soon as its own gradient is known, and the gradient is freed before the next one exists (the *fused* update of the Scorch
thesis, section 4). An `Update` is therefore a function of one parameter: it changes the parameter and its state in place, and overwrites
the gradient with intermediate results, so that at most one tensor is allocated.

The arithmetic is that of ``torch.optim`` with ``foreach=False, fused=False``, operation by operation and in the same order. Intermediate
results that torch puts into new tensors go into the gradient instead, which changes no bit.

*Kernels* (:mod:`sft.kernels.optim.optimizers_triton`). ATen reads and writes a parameter, its gradient and its state once for each of five
to ten operations. A kernel reads each of them once, writes the changed ones, and allocates no memory either. It takes fp32 vectors; a
parameter for which it would not compute identical results is updated by ATen. The state is the same for both.

Sources: SGD with momentum: Sutskever, Martens, Dahl and Hinton, 2013. AdamW: Loshchilov and Hutter, "Decoupled weight decay
regularization", 2019. AMSGrad: Reddi, Kale and Kumar, 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sft.backends.resolve import runs_kernels
from sft.common.errors import InputError

__all__ = [
    "UPDATE_BACKENDS",
    "AdamWUpdate",
    "Hyper",
    "KernelUpdate",
    "SGDUpdate",
    "Update",
    "UpdateBackend",
    "check_range",
    "plain_number",
]

#: Settings of a parameter's group: learning rate, momentum and so on, by torch's names.
Hyper = Mapping[str, Any]


class Update(Protocol):
    """An update rule. All numbers are arguments of each call, so one object serves all groups, at any learning rate."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of a new group, with all of torch's keys."""
        ...

    def check(self, hyper: Hyper) -> None:
        """Check that the settings are supported.

        Raises:
            InputError: a number is out of range, or the variant is another arithmetic.
        """
        ...

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """Names of the state tensors of a parameter's shape."""
        ...

    def counts(self, hyper: Hyper) -> bool:
        """True if the state has ``step``, the number of updates, as torch's does."""
        ...

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update ``param`` and the tensors of ``state`` in place. The content of ``grad`` is destroyed.

        Args:
            param: the parameter.
            grad: its gradient, of the same shape and type, not shared.
            state: a tensor for each of :meth:`slots`. Before the first update their content is zero, or arbitrary where the update
                initialises it.
            hyper: the settings.
            num_updates: number of earlier updates of this parameter.
        """
        ...


def plain_number(value: Any) -> float:
    """A setting as a Python float: torch allows a tensor of one element for learning rates."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def check_range(name: str, value: Any, *, below: float | None = None) -> None:
    """Check that a setting is at least 0, and below a limit if it has one.

    Raises:
        InputError: it is not.
    """
    number = plain_number(value)
    if not number >= 0 or (below is not None and not number < below):
        upper = "" if below is None else f" and below {below:g}"
        raise InputError(f"{name}={value!r}: give a number of at least 0{upper}")


@dataclass(frozen=True, slots=True)
class AdamWUpdate:
    """The update rule of :class:`torch.optim.AdamW`, including AMSGrad and maximize."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of ``torch.optim.AdamW``."""
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
        """Check that the settings are supported.

        Raises:
            InputError: they are not.
        """
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, hyper[name])
        for beta in hyper["betas"]:
            check_range("a beta", beta, below=1.0)
        if not hyper.get("decoupled_weight_decay", True):
            raise InputError("decoupled_weight_decay=False is torch.optim.Adam, not AdamW; use AdamW's settings")

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """Averages of gradients and of their squares; with AMSGrad also the maximum of the latter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def counts(self, hyper: Hyper) -> bool:
        """True: torch's AdamW counts its steps."""
        return True

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content is destroyed."""
        lr, eps = hyper["lr"], hyper["eps"]  # a tensor's arithmetic is its type's, as in torch
        beta1, beta2 = (plain_number(beta) for beta in hyper["betas"])
        weight_decay = plain_number(hyper["weight_decay"])
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        if hyper["maximize"]:
            grad.neg_()
        if weight_decay != 0:
            param.mul_(plain_number(1 - lr * weight_decay))
        if param.is_complex():  # real and imaginary parts are separate numbers, as in torch
            param, grad, average, squares = map(torch.view_as_real, (param, grad, average, squares))
        average.lerp_(grad, 1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(num_updates + 1)
        step_size = plain_number(lr / (1 - beta1**step))
        correction = (1 - beta2**step) ** 0.5
        if hyper["amsgrad"]:
            largest = torch.view_as_real(state["max_exp_avg_sq"]) if state["max_exp_avg_sq"].is_complex() else state["max_exp_avg_sq"]
            squares = torch.maximum(largest, squares, out=largest)
        # The gradient is dead: its memory takes the denominator.
        denominator = torch.sqrt(squares, out=grad).div_(correction).add_(eps)
        param.addcdiv_(average, denominator, value=-step_size)


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
        """Settings of ``torch.optim.SGD``."""
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
        """Check that the settings are supported.

        Raises:
            InputError: they are not.
        """
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, hyper[name])
        if hyper["nesterov"] and (hyper["momentum"] <= 0 or hyper["dampening"] != 0):
            raise InputError(
                f"nesterov with momentum={hyper['momentum']!r}, dampening={hyper['dampening']!r}: it needs a momentum, and no dampening"
            )

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """The momentum buffer, if momentum is on."""
        return ("momentum_buffer",) if plain_number(hyper["momentum"]) != 0 else ()

    def counts(self, hyper: Hyper) -> bool:
        """False: torch's SGD does not count steps."""
        return False

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content is destroyed."""
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


#: Implementation of an update.
UpdateBackend = Literal["aten", "triton"]
UPDATE_BACKENDS: tuple[UpdateBackend, ...] = ("aten", "triton")


@dataclass(frozen=True, slots=True)
class KernelUpdate:
    """An update by a kernel if one computes identical results, otherwise by ATen.

    The kernels take contiguous fp32 parameters, gradients and state on a device that runs kernels. AdamW's excludes AMSGrad, and a
    learning rate or epsilon that is a tensor, since its arithmetic has the tensor's type.

    Attributes:
        update: the update rule.
    """

    update: SGDUpdate | AdamWUpdate

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of the update rule."""
        return self.update.defaults

    def check(self, hyper: Hyper) -> None:
        """Check that the settings are supported.

        Raises:
            InputError: they are not.
        """
        self.update.check(hyper)

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """Names of the state tensors of a parameter's shape."""
        return self.update.slots(hyper)

    def counts(self, hyper: Hyper) -> bool:
        """True if the state has the number of updates."""
        return self.update.counts(hyper)

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content may be destroyed."""
        if not self.selects_kernel(param, grad, state, hyper):
            self.update.apply(param, grad, state, hyper, num_updates)
            return
        vector, gradient = param.detach().view(-1), grad.view(-1)
        lr, weight_decay = plain_number(hyper["lr"]), plain_number(hyper["weight_decay"])
        if isinstance(self.update, SGDUpdate):
            from sft.kernels.optim.optimizers_triton import launch_sgd  # not above: it imports Triton

            launch_sgd(
                vector,
                gradient,
                state["momentum_buffer"].view(-1) if self.update.slots(hyper) else None,
                None,
                lr=lr,
                weight_decay=weight_decay,
                momentum=plain_number(hyper["momentum"]),
                dampening=plain_number(hyper["dampening"]),
                nesterov=bool(hyper["nesterov"]),
                maximize=bool(hyper["maximize"]),
                first=num_updates == 0,
            )
            return
        from sft.kernels.optim.optimizers_triton import launch_adamw  # not above: it imports Triton

        first, second = (plain_number(beta) for beta in hyper["betas"])
        launch_adamw(
            vector,
            gradient,
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            None,
            lr=lr,
            weight_decay=weight_decay,
            step=num_updates + 1,
            betas=(first, second),
            eps=plain_number(hyper["eps"]),
            maximize=bool(hyper["maximize"]),
        )

    def selects_kernel(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper) -> bool:
        """True if the kernel computes this update; arguments as for :meth:`apply`."""
        if isinstance(self.update, AdamWUpdate) and (hyper["amsgrad"] or any(isinstance(hyper[name], Tensor) for name in ("lr", "eps"))):
            return False
        tensors = (param, grad, *(state[name] for name in self.update.slots(hyper)))
        fits = all(tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device == param.device for tensor in tensors)
        return fits and param.numel() > 0 and runs_kernels(param.device)
