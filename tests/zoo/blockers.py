"""Counts of refusals by reason.

A reason is a user's message without names and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .outcome import Outcome

__all__ = ["Blocker", "blocker_of", "blockers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """A reason of refusals."""

    reason: str
    models: tuple[str, ...]
    """Labels of the models that it blocks."""
    num_alone: int
    """Of these, models that nothing else blocks."""
    num_unblocked: int
    """Models that compile once this reason and those before it are gone."""


def blocker_of(problem: str) -> str:
    """The reason in one line of a refusal.

    >>> blocker_of("features.3: conv_transpose2d has no exact rule; use nearest upsampling followed by a convolution")
    'conv_transpose2d'
    >>> blocker_of("avgpool: adaptive_avg_pool2d: pools to (7, 7); only (1, 1) streams, use AdaptiveAvgPool2d(1)")
    'adaptive_avg_pool2d: pools to ..'
    >>> blocker_of("ghost: add: operand slice_4 of shape (2, 8, 44, s77) varies along the image; make its height and width 1")
    'slice, whole, meets a strip'
    """
    exporter = re.search(r"torch\.export cannot follow the model[^(]* \((\w+)", problem)
    if exporter:
        return f"torch.export: {exporter[1]}"
    rest = problem.partition(": ")[2] or problem
    # The named operator is supported; the one that makes its operand whole is not. Values have the names of their operators.
    whole = re.search(r"operand ([a-z]\w*?)(?:_\d+)? (?:of shape|is not an image)", rest)
    if whole:
        return f"{whole[1]}, whole, meets a strip"
    without_rule = re.match(r"(\w+) has no exact rule", rest)
    if without_rule:
        return without_rule[1]
    reason = re.split(r"[;\n]", rest)[0]
    reason = re.sub(r"[(\[].*?[)\]]+", "..", reason)
    return re.sub(r"\b[a-z_]*_\d+\b|\b\d+\b", "..", reason)


def blockers(outcomes: Sequence[Outcome]) -> list[Blocker]:
    """All reasons in greedy order: each is the one that unblocks most models after the earlier ones."""
    open_reasons = {
        f"{outcome.package}/{outcome.name}": frozenset(blocker_of(problem) for problem in outcome.problems)
        for outcome in outcomes
        if outcome.kind == "refused"
    }
    entries: list[Blocker] = []
    removed: set[str] = set()
    reasons = sorted({reason for reasons in open_reasons.values() for reason in reasons})
    while len(removed) < len(reasons):

        def gain(reason: str) -> tuple[int, int]:
            left = [blocking - removed for blocking in open_reasons.values()]
            return sum(blocking == {reason} for blocking in left), sum(reason in blocking for blocking in left)

        best = max((reason for reason in reasons if reason not in removed), key=gain)
        removed.add(best)
        entries.append(
            Blocker(
                reason=best,
                models=tuple(label for label, blocking in open_reasons.items() if best in blocking),
                num_alone=sum(blocking == {best} for blocking in open_reasons.values()),
                num_unblocked=sum(blocking <= removed for blocking in open_reasons.values()),
            )
        )
    return entries
