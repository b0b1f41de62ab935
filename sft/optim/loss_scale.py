"""Loss scaling (Micikevicius et al., "Mixed precision training", 2018) for an optimizer that receives gradients one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sft.common.errors import InputError

__all__ = ["LossScale"]

#: As in ``torch.amp.GradScaler``.
_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The factor on the loss, constant or dynamic.

    Args:
        value: a number, ``"dynamic"``, or ``None`` for no scaling.

    Raises:
        InputError: the number is not positive.
    """

    def __init__(self, value: float | Literal["dynamic"] | None) -> None:
        if value is not None and value != "dynamic" and not (isinstance(value, (int, float)) and value > 0):
            raise InputError(f"loss_scale={value!r}: give a positive number, 'dynamic' or None")
        self.is_off = value is None
        self.is_dynamic = value == "dynamic"
        self.value = 1.0 if value is None else _FIRST if value == "dynamic" else float(value)
        self._num_good_steps = 0

    def unscale(self, grads: Sequence[Tensor | None], *, is_whole_step: bool = True) -> bool:
        """Divide gradients by the scale in place; true if all of them are finite. Without scaling no check is made.

        Args:
            grads: the gradients.
            is_whole_step: whether one tensor may occur twice, as ``.grad`` of tied parameters.
        """
        if self.is_off:
            return True
        finite = True
        seen: set[int] = set()
        for grad in grads:
            if grad is None or (is_whole_step and id(grad) in seen):
                continue
            seen.add(id(grad))
            grad.mul_(1.0 / self.value)
            # The largest absolute value: no sum that could overflow, and no copy of the gradient.
            finite = finite and (not grad.numel() or bool(torch.linalg.vector_norm(grad, float("inf")).isfinite()))
        return finite

    def update(self, is_finite: bool) -> None:
        """Adapt a dynamic scale after a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value *= _BACKOFF
            self._num_good_steps = 0
            return
        self._num_good_steps += 1
        if self._num_good_steps == _INTERVAL:
            self.value *= _GROWTH
            self._num_good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """State of a dynamic scale, for resuming; empty if the scale is constant."""
        return {"value": self.value, "num_good_steps": self._num_good_steps} if self.is_dynamic else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a dynamic scale.

        Raises:
            InputError: it is not such a state.
        """
        if not self.is_dynamic or not state:
            return
        value, count = state.get("value"), state.get("num_good_steps")
        if not isinstance(value, float) or not 0 < value < math.inf or not isinstance(count, int) or count < 0:
            raise InputError(f"loss_scale {dict(state)!r} is not what state_dict() returned")
        self.value, self._num_good_steps = value, count
