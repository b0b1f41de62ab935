"""Loss scaling (Micikevicius et al., "Mixed precision training", 2018) for an optimizer that receives gradients one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sft.common.errors import InputError

__all__ = ["LossScale", "all_true", "gradient_norms"]

#: As in ``torch.amp.GradScaler``.
_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: Bytes of a gradient's norm (twice: alone, and among all norms), and of the flags.
_BYTES_PER_GRAD, _RESULT_BYTES = 24, 8


def all_true(flags: Iterable[Tensor | None]) -> bool:
    """True if no flag is false; one wait for each device that has flags."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        if flag is not None:
            by_device.setdefault(flag.device, []).append(flag)
    return all(bool(torch.stack(group).all()) for group in by_device.values())


def gradient_norms(grads: Sequence[Tensor]) -> list[float]:
    """Euclidean norms in float64; one wait for each device of the gradients."""
    positions: dict[torch.device, list[int]] = {}
    for position, grad in enumerate(grads):
        positions.setdefault(grad.device, []).append(position)
    norms = [0.0] * len(grads)
    for group in positions.values():
        on_device = torch._foreach_norm([grads[position] for position in group], 2, dtype=torch.float64)
        for position, norm in zip(group, torch.stack(on_device).tolist(), strict=True):
            norms[position] = norm
    return norms


def _in_one_dtype(norms: Sequence[Tensor]) -> list[Tensor]:
    """The norms in the widest of their types: a finite norm stays finite."""
    dtypes = {norm.dtype for norm in norms}
    if len(dtypes) == 1:
        return list(norms)
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    return [norm.to(widest) for norm in norms]


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

    def unscale(self, grads: Sequence[Tensor | None], *, is_whole_step: bool = True) -> Tensor | None:
        """Divide gradients by the scale in place.

        Args:
            grads: the gradients.
            is_whole_step: whether one tensor may occur twice, as ``.grad`` of tied parameters.

        Returns:
            On the device of the gradients, true if all of them are finite, for :func:`all_true`; ``None`` without scaling (no check is
            made) or without gradients.
        """
        if self.is_off:
            return None
        present = [grad for grad in grads if grad is not None]
        if is_whole_step:
            present = list({id(grad): grad for grad in present}.values())
        present = [grad for grad in present if grad.numel()]
        if not present:
            return None
        torch._foreach_mul_(present, 1.0 / self.value)
        # The largest absolute values: no sum that could overflow, and no copy of a gradient.
        return torch.stack(_in_one_dtype(torch._foreach_norm(present, math.inf))).isfinite().all()

    def scratch_bytes(self, num_grads: int) -> int:
        """Bytes on the device for the check of this many gradients at once, and for its result over a pass."""
        return 0 if self.is_off else _RESULT_BYTES + _BYTES_PER_GRAD * num_grads

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
