"""One parameter, one gradient, one call: what an optimizer does, without the optimizer.

``torch.optim`` walks over all parameters when all gradients are there. Where the gradients of a model are never all there, the update
of a parameter runs as soon as its own gradient is known, and the gradient is gone before the next one exists (the *fused* update of the
Scorch thesis, section 4). So an update here is a function of one parameter: it changes the parameter and its state in place, and uses
the gradient's memory for its intermediate results, so that nothing, or one tensor at most, is allocated.

The arithmetic is that of ``torch.optim`` with ``foreach=False, fused=False``, operation by operation and in the same order. Intermediate
results that torch puts into new tensors are put into the gradient instead, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.errors import InputError

__all__ = ["Hyper", "State", "Update", "check_range", "plain_number"]

#: The settings of a parameter's group: learning rate, momentum and so on, by torch's names.
Hyper = Mapping[str, Any]
#: The state of a parameter: tensors of its shape and the step count, by torch's names.
State = dict[str, Tensor]


class Update(Protocol):
    """A kind of update. All numbers come with each call, so one object serves all groups, at any learning rate."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of a new group, in torch's names and with all of torch's keys."""
        ...

    def check(self, hyper: Hyper) -> None:
        """Whether the settings are ones that can be followed.

        Raises:
            InputError: a number is out of range, or a variant is asked for that is not this arithmetic.
        """
        ...

    def slots(self, hyper: Hyper) -> tuple[str, ...]:
        """The names of the state tensors of a parameter's shape."""
        ...

    def counts(self, hyper: Hyper) -> bool:
        """Whether the state holds ``step``, the number of updates, as torch's does."""
        ...

    def apply(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Hyper, num_updates: int) -> None:
        """Update ``param`` and the tensors of ``state`` in place. The content of ``grad`` is lost.

        Args:
            param: the parameter.
            grad: its gradient, of the same shape and type, which nobody else reads.
            state: a tensor for each of :meth:`slots`; before the first update their content does not matter where the update sets it,
                and is zero elsewhere.
            hyper: the settings.
            num_updates: how many updates this parameter has had before.
        """
        ...


def plain_number(value: Any) -> float:
    """A setting as Python has it: torch allows a tensor of one element for learning rates."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def check_range(name: str, value: Any, *, low: float, below: float | None = None) -> None:
    """Whether a setting is in its range.

    Raises:
        InputError: it is not.
    """
    number = plain_number(value)
    if not number >= low or (below is not None and not number < below):
        upper = "" if below is None else f" and below {below:g}"
        raise InputError(f"{name}={value!r}: give a number of at least {low:g}{upper}")
