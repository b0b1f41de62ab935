"""Updates of one pass over memory: the kernels :mod:`sft.kernels.sgd` and :mod:`sft.kernels.adamw` in the place of ATen's calls.

ATen reads and writes a parameter, its gradient and its state once for each of five to ten operations. A kernel reads each of them once and
writes what has changed, and allocates nothing either. It takes vectors of fp32, so a parameter that it does not compute identically is
updated by ATen's calls as before. State is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sft.backends.select import runs_kernels
from sft.optim.adamw import AdamWUpdate
from sft.optim.sgd import SGDUpdate
from sft.optim.update import Hyper, plain_number

__all__ = ["UPDATE_BACKENDS", "KernelUpdate", "UpdateBackend"]

#: What computes an update.
UpdateBackend = Literal["aten", "triton"]
UPDATE_BACKENDS: tuple[UpdateBackend, ...] = ("aten", "triton")


@dataclass(frozen=True, slots=True)
class KernelUpdate:
    """An update by a kernel where one computes the same, and by ATen elsewhere.

    The kernels are for parameters, gradients and state in fp32 that lie contiguous on a device where kernels run; of AdamW neither for
    AMSGrad nor for a learning rate or an epsilon that is a tensor, whose arithmetic is its type's.

    Attributes:
        update: what is computed.
    """

    update: SGDUpdate | AdamWUpdate

    @property
    def defaults(self) -> dict[str, Any]:
        """Torch's settings."""
        return self.update.defaults

    def check(self, hyper: Hyper) -> None:
        """Whether the settings can be followed.

        Raises:
            InputError: they cannot.
        """
        self.update.check(hyper)

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """The names of the state tensors of a parameter's shape."""
        return self.update.slots(hyper)

    def counts(self, hyper: Hyper) -> bool:
        """Whether the state holds the number of updates."""
        return self.update.counts(hyper)

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update in place; the gradient's content may be lost."""
        if not self.takes_kernel(param, grad, state, hyper):
            self.update.apply(param, grad, state, hyper, num_updates)
            return
        vector, gradient = param.detach().view(-1), grad.view(-1)
        lr, weight_decay = plain_number(hyper["lr"]), plain_number(hyper["weight_decay"])
        if isinstance(self.update, SGDUpdate):
            from sft.kernels.sgd_triton import launch_sgd  # not above: it imports Triton

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
        from sft.kernels.adamw_triton import launch_adamw  # not above: it imports Triton

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

    def takes_kernel(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper) -> bool:
        """Whether the kernel computes this update; arguments as for :meth:`apply`."""
        if isinstance(self.update, AdamWUpdate) and (hyper["amsgrad"] or any(isinstance(hyper[name], Tensor) for name in ("lr", "eps"))):
            return False
        tensors = (param, grad, *(state[name] for name in self.update.slots(hyper)))
        fits = all(each.dtype == torch.float32 and each.is_contiguous() and each.device == param.device for each in tensors)
        return fits and param.numel() > 0 and runs_kernels(param.device)
