"""Runs that do the same: equal blocks of a deep network, told by what their operators do and not by what they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from sft.analysis.axes import COLUMNS, ROWS
from sft.analysis.graph import Ref, map_refs
from sft.plan.problem import PlanningProblem

__all__ = ["structural_run_key"]


def structural_run_key(problem: PlanningProblem, names: tuple[str, ...], *, any_size: bool) -> Hashable:
    """What two runs of a problem have in common whose strips differ in nothing but names.

    Args:
        problem: the model at one size.
        names: the run's operators, in order.
        any_size: whether images may differ in their extents along the axes that are tiled, too.
    """
    general, values = problem.shared_by_sizes(("likeness of a run", names), lambda: _structural_key(problem, names), weight=len(names))
    if any_size:
        return general
    return problem.remembered(("likeness of a run", names), lambda: (general, tuple(problem.shapes[name] for name in values)))


def _structural_key(problem: PlanningProblem, names: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """That for images of any size, and the run's values, those that it reads from outside included."""
    graph, phases, axes = problem.graph, problem.phases, problem.graph.axes
    inputs, outputs, handed_on = frozenset(graph.inputs), frozenset(graph.results), frozenset(graph.handed_on(names))
    weights = frozenset() if problem.weights is None else frozenset(problem.weights.num_bytes)
    placed = (problem.requires_grad, problem.from_source, problem.host_outputs, problem.channels_last, problem.per_sample, weights)
    number = {name: place for place, name in enumerate(names)}
    digest = hashlib.sha256()

    def add(name: str, *facts: Hashable) -> None:
        shape = problem.shapes[name]
        streamed = name in phases.streamed
        if streamed:
            shape = axes.with_extent(axes.with_extent(shape, ROWS, 0), COLUMNS, 0)
        where = tuple(name in each for each in (*placed, inputs, outputs, handed_on))
        digest.update(repr((streamed, shape, problem.dtypes[name], problem.grad_dtypes[name], where, facts)).encode())

    for name in names:
        node, row = graph[name], phases.rows[name]
        for operand in node.operands:
            if operand not in number:
                number[operand] = len(number)
                add(operand, graph[operand].kind)
        arguments = map_refs(node.arguments, lambda operand: Ref(str(number[operand])))
        add(name, node.target, arguments, node.effect, row.name, row.role)
    return digest.digest(), tuple(number)
