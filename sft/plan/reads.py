"""How many bytes of inputs that are not resident the passes over a segment read.

A thread decodes and normalises them beside the computation, in full width whatever the panels are: each panel's walk reads all columns
again. On the CPU that thread takes its time from the computation; elsewhere a pass lasts at least as long as its reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sft.plan.problem import PlanningProblem
from sft.plan.types import SegmentChoice
from sft.walk.checkpoints import Checkpoints

__all__ = ["input_pass_bytes", "source_bytes"]


def source_bytes(problem: PlanningProblem, nodes: Iterable[str]) -> int:
    """Bytes of the inputs, as the network gets them, that operators read of sources."""
    if not problem.from_source:
        return 0
    operands = {operand for name in nodes for operand in problem.graph[name].operands}
    return sum(map(problem.value_bytes, problem.from_source & operands))


def input_pass_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[tuple[float, float], ...]:
    """For each segment the bytes that its pass forward reads, and its pass back."""
    return tuple(_passes(problem, choice) for choice in choices)


def _passes(problem: PlanningProblem, choice: SegmentChoice) -> tuple[float, float]:
    num_bytes = source_bytes(problem, choice.nodes)
    if not num_bytes or choice.mode != "tiled":
        return float(num_bytes), float(num_bytes)
    num_panels = problem.num_panels(choice.nodes, choice.panel_cols)
    num_walks = num_panels * -(-problem.num_batch // choice.batch_tile)
    num_strips = -(-problem.run_height(choice.nodes) // choice.strip_rows)
    again = 1 - 1 / num_walks if choice.restart else 0.0  # the last walk's states are there
    restored = 0.0
    if choice.halo == "carry":
        restored = Checkpoints(choice.state_every, choice.state_slots).num_restored(num_strips) / num_strips
    return float(num_panels * num_bytes), num_panels * num_bytes * (1 + again + restored)
