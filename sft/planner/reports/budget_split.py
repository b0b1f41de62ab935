"""Split of a plan's budget by purpose, at the moment of its largest peak; the shares sum to the budget.

Resident bytes, overhead and the peak are numbers of the plan. The peak is split by the timeline: bytes alive before the first schedule op
are the inputs, bytes alive when the op of the peak begins are kept values, and the remainder is its working set. States of strips are kept
values that the plan counts per segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sft.planner.plan import Plan

__all__ = ["BudgetShare", "SharePurpose", "peak_entry", "split_budget"]

SharePurpose = Literal["resident", "inputs", "kept", "states", "weights", "working", "overhead", "free"]

_LABELS: dict[SharePurpose, str] = {
    "resident": "parameters, gradients, optimizer state",
    "inputs": "inputs",
    "kept": "outputs and kept values",
    "states": "states of strips",
    "weights": "streamed weights, at most",
    "overhead": "allocator and libraries",
    "free": "free",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShare:
    """Bytes of the budget with one purpose.

    Attributes:
        purpose: the purpose.
        label: its name, for readers.
        num_bytes: bytes at the largest peak.
    """

    purpose: SharePurpose
    label: str
    num_bytes: int


def peak_entry(plan: Plan) -> int | None:
    """Index of the schedule op with the largest peak; ``None`` for a plan without operators."""
    entries = plan.timeline.entries
    return max(range(len(entries)), key=lambda index: entries[index].peak_bytes) if entries else None


def split_budget(plan: Plan) -> tuple[BudgetShare, ...]:
    """Shares of the budget at the largest peak, without empty ones; they sum to the budget, or to the total if that is larger."""
    entries, index = plan.timeline.entries, peak_entry(plan)
    remaining = plan.projected_peak_bytes - plan.overhead_bytes
    sizes: dict[SharePurpose, int] = {"resident": plan.resident_bytes}
    if index is None:
        sizes["inputs"], remaining = remaining, 0
    else:
        sizes["inputs"] = min(entries[0].begin_bytes, remaining)
        kept_bytes = max(min(entries[index].begin_bytes, remaining) - sizes["inputs"], 0)
        sizes["states"] = min(_state_bytes(plan, index), kept_bytes)
        sizes["kept"] = kept_bytes - sizes["states"]
        remaining -= sizes["inputs"] + kept_bytes
    sizes["weights"] = min(plan.weights_peak_bytes, remaining)
    sizes["working"] = remaining - sizes["weights"]
    sizes["overhead"] = plan.overhead_bytes
    sizes["free"] = max(plan.budget_bytes - plan.total_bytes, 0)
    order: tuple[SharePurpose, ...] = ("resident", "inputs", "kept", "states", "weights", "working", "overhead", "free")
    labels = {**_LABELS, "working": _working_label(plan, index)}
    return tuple(BudgetShare(purpose=each, label=labels[each], num_bytes=sizes[each]) for each in order if sizes.get(each))


def _state_bytes(plan: Plan, index: int) -> int:
    """Bytes of states at the begin of a schedule op: of tiled segments that ran forward, until their backward pass has completed.

    A segment with ``restart`` has the states of one sweep at a time, most of them while it runs: they count as its working set.
    """
    pending: set[int] = set()
    for entry in plan.timeline.entries[:index]:
        if entry.segment is not None and entry.move.endswith("+"):
            pending.add(entry.segment)
        elif entry.segment is not None and entry.move.startswith("B"):
            pending.discard(entry.segment)
    return sum(plan.segments[number].state_bytes for number in pending if not plan.segments[number].restart)


def _working_label(plan: Plan, index: int | None) -> str:
    """Name of the working set of the schedule op with the largest peak."""
    if index is None:
        return "working set"
    number, kind = plan.timeline.entries[index].segment, plan.timeline.kinds[index]
    if number is None:
        return "gradients of outputs" if kind == "loss" else "copies"
    strips = "strips" if plan.segments[number].mode == "tiled" else "tensors"
    return f"{strips} of segment {number}, {kind}"
