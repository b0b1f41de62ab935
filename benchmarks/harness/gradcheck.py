"""Gradient checks: no time is reported for a method with wrong gradients.

The same body, built by the same code, takes one step in float64 at a small odd size by plain PyTorch and by the
method. Output and every parameter's gradient must agree to `TOLERANCE`, relative to the largest plain value of the
same module. `ours` is checked twice: with forced strips, so that the small image is cut, and with the planner's choice under the same share
of plain's activation peak as in the timed runs (or the smallest budget that works, if that is larger).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import sft
from harness.cases import Built, Case, build, prepare
from harness.memory import PlainNeed

__all__ = ["CHECK_SIZE", "TOLERANCE", "Check", "check_gradients", "collect", "worst_difference"]

TOLERANCE = 1e-10
CHECK_SIZE = (167, 139)
CHECK_STRIP_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Largest error over all variants of a method."""

    height: int
    width: int
    worst_error: float
    """Largest absolute difference over the largest plain value of the same module."""
    worst_tensor: str
    """The tensor that has it."""
    ways: tuple[str, ...]
    """Variants of the method: strips and budgets."""

    @property
    def passed(self) -> bool:
        """True if timings may be reported."""
        return self.worst_error <= TOLERANCE


def collect(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """The output and every parameter's gradient, copied."""
    tensors = {"output": output.clone()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[name] = parameter.grad.clone()
    return tensors


def worst_difference(reference: dict[str, Tensor], gradients: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, over the largest plain value of the same module, and the tensor that has it."""
    if reference.keys() != gradients.keys():
        return float("inf"), f"gradients present in only one run: {sorted(reference.keys() ^ gradients.keys())}"
    scale: dict[str, float] = defaultdict(float)
    for name, tensor in reference.items():
        module = name.rpartition(".")[0] or name
        scale[module] = max(scale[module], float(tensor.abs().max()))
    worst = (0.0, "output")
    for name, tensor in reference.items():
        difference = float((gradients[name] - tensor).abs().max())
        error = difference / scale[name.rpartition(".")[0] or name] if difference else 0.0
        if not error <= worst[0]:  # also catches NaN
            worst = (error if error == error else float("inf"), name)
    return worst


def _ways(case: Case, built: Built) -> list[Case]:
    """The variants of a case to check."""
    if case.method != "ours":
        return [case]
    plain, _ = prepare(replace(case, method="plain"), built)
    built.body.zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as peak:
        plain()
    activation_bytes = peak.num_bytes - built.gradient_bytes
    need = PlainNeed(activation_bytes=activation_bytes, resident_bytes=built.resident_bytes, gradient_bytes=built.gradient_bytes)
    budget_bytes = need.budget_bytes(case.fraction)
    try:
        sft.plan(built.body, tuple(built.x.shape), budget=budget_bytes)
    except sft.BudgetError as error:
        budget_bytes = error.needed_bytes
    return [
        replace(case, strip_rows=CHECK_STRIP_ROWS, budget_bytes=None),
        replace(case, strip_rows=None, budget_bytes=budget_bytes),
    ]


def check_gradients(case: Case) -> Check:
    """Compare a case's method with plain PyTorch in float64 at `CHECK_SIZE`."""
    torch.set_num_threads(case.threads)
    height, width = CHECK_SIZE
    case = replace(case, height=height, width=width)
    built = build(case, torch.float64)
    plain, _ = prepare(replace(case, method="plain"), built)
    reference = collect(built.body, plain())
    worst, described = (0.0, "output"), []
    for way in _ways(case, built):
        step, plan = prepare(way, built)
        worst = max(worst, worst_difference(reference, collect(built.body, step())))
        described.append(way.method if plan is None else plan.strips)
    return Check(height=height, width=width, worst_error=worst[0], worst_tensor=worst[1], ways=tuple(described))
