"""Memory floor of a network: bytes of the planner's smallest plan, next to those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import sft
from sft.api.pareto import PlanningSession

__all__ = ["Floor", "NetworkFloors", "measure_floor", "measure_floors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor of one pass.

    Attributes:
        resident_bytes: parameters and their gradients, which every plan needs.
        least_bytes: bytes of the smallest plan beyond the resident ones: input, activations, their gradients.
        plain_bytes: the same of plain PyTorch, projected.
    """

    resident_bytes: int
    least_bytes: int
    plain_bytes: int

    @property
    def share(self) -> float:
        """Bytes of the smallest plan relative to plain PyTorch, without the resident bytes of both."""
        return self.least_bytes / self.plain_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFloors:
    """The floors of a network at one input size.

    Attributes:
        shape: shape of the input.
        training: floor of a training step; ``None`` if the network has none at this size.
        inference: floor of a forward pass.
        whole: operators that read an image and run on full tensors, as ``"module: operator"``, by the reason.
        problem: for a network that cannot be planned, the reason.
    """

    shape: tuple[int, ...]
    training: Floor | None = None
    inference: Floor | None = None
    whole: Mapping[str, tuple[str, ...]] | None = None
    problem: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NetworkFloors:
        """The floors that :meth:`to_json` wrote."""
        passes = {name: Floor(**data[name]) if data.get(name) else None for name in ("training", "inference")}
        whole = {reason: tuple(labels) for reason, labels in (data.get("whole") or {}).items()}
        return cls(shape=tuple(data["shape"]), whole=whole, problem=data.get("problem", ""), **passes)

    def to_json(self) -> dict[str, Any]:
        """The floors for a JSON file, without empty entries."""
        return {name: value for name, value in asdict(self).items() if value}


def measure_floors(model: nn.Module, shape: tuple[int, ...]) -> NetworkFloors:
    """Plan a training step and a forward pass of a network; nothing is run."""
    try:
        training, whole = measure_floor(model.train(), shape, training=True)
        inference, more = measure_floor(model.eval(), shape, training=False)
    except (sft.SftError, RuntimeError, ValueError) as error:
        return NetworkFloors(shape=shape, problem=f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
    reasons = {reason: tuple(sorted({*whole.get(reason, ()), *more.get(reason, ())})) for reason in sorted({*whole, *more})}
    return NetworkFloors(shape=shape, training=training, inference=inference, whole=reasons)


def measure_floor(model: nn.Module, shape: tuple[int, ...], *, training: bool) -> tuple[Floor, dict[str, tuple[str, ...]]]:
    """The floor of one pass, and the operators that run whole by reason."""
    with nullcontext() if training else torch.no_grad():
        session = PlanningSession(model, shape)
        try:
            least_bytes = session.plan(1, sft.Options()).total_bytes
        except sft.BudgetError as error:
            least_bytes = error.needed_bytes
    plain = session.plain
    resident = plain.resident_bytes
    whole: dict[str, list[str]] = {}
    for text in plain.notes:
        path, _, rest = text.partition(": ")
        operator, _, reason = rest.partition(": ")
        whole.setdefault(reason, []).append(f"{path}: {operator}")
    floor = Floor(resident_bytes=resident, least_bytes=least_bytes - resident, plain_bytes=plain.total_bytes - resident)
    return floor, {reason: tuple(labels) for reason, labels in whole.items()}
