"""``torch.optim.Optimizer`` subclasses on in-place updates; schedulers, parameter groups, hooks and state dicts are torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sft.common.errors import InputError
from sft.optim.update import AdamWUpdate, SGDUpdate, Update

__all__ = ["SGD", "AdamW", "FusedOptimizer"]


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer that frees each gradient as soon as it is used.

    Its state dict is interchangeable with that of the ``torch.optim`` class of the same update.

    Args:
        params: parameters, or groups of them with their own settings.
        update: the arithmetic.
        settings: deviations from the update's defaults.

    Raises:
        InputError: a setting is unknown, or a number is out of range.
    """

    #: Update of pickles without one: version 0.1.0 left it out.
    default_update: ClassVar[type[Update] | None] = None

    def __init__(self, params: Iterable[Any], update: Update, **settings: Any) -> None:
        unknown = sorted(set(settings) - set(update.defaults))
        if unknown:
            raise InputError(f"{type(update).__name__} has no settings {', '.join(unknown)}; there are {', '.join(update.defaults)}")
        self.update = update
        super().__init__(params, {**update.defaults, **settings})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "update": self.update}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "update" not in state and self.default_update is not None:
            state = {**state, "update": self.default_update()}
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Raises:
            InputError: its settings are not supported.
        """
        self.update.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's.

        Raises:
            InputError: its settings are not supported; no state is changed.
            ValueError: its groups differ (torch's error).
        """
        for group in state_dict["param_groups"]:
            self.update.check({**self.defaults, **group})
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and free these gradients.

        Args:
            closure: computes the loss and the gradients, as in torch.

        Raises:
            InputError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad, param.grad = param.grad, None
                    self.update_one(param, grad, group)
        return loss

    def update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter; the gradient's content is destroyed.

        Raises:
            InputError: the gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise InputError("a gradient is sparse; in-place updates take dense ones (sparse=False for the embedding)")
        state = self.state[param]
        new = [name for name in self.update.slots(group) if state.get(name) is None]
        state.update({name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in new})
        if self.update.counts(group):
            num_updates = int(state.setdefault("step", torch.tensor(0.0, device="cpu")))
        else:
            num_updates = 0 if new else 1
        self.update.apply(param, grad, state, group, num_updates)
        if self.update.counts(group):
            state["step"] += 1


class SGD(FusedOptimizer):
    """``torch.optim.SGD(foreach=False, fused=False)``, bit for bit, that frees each gradient in :meth:`step`."""

    default_update = SGDUpdate

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, SGDUpdate(), **settings)


class AdamW(FusedOptimizer):
    """``torch.optim.AdamW(foreach=False, fused=False)``, bit for bit, that frees each gradient in :meth:`step`."""

    default_update = AdamWUpdate

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, AdamWUpdate(), **settings)
