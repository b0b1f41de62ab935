"""Planning problems of models, without a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.capture import capture, is_in_program_layout
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import differentiable_operands
from sft.analysis.passes.infer_attributes import infer_attributes
from sft.analysis.tiling.phases import find_phases
from sft.planner.problem import PlanningProblem
from sft.planner.resources import Resources
from sft.planner.sized_graph import SizedGraph, specialize_phases

__all__ = ["problem_of", "problems_of", "with_resources", "with_sized"]


Shape = tuple[int, int, int, int]


def problem_of(
    model: nn.Module,
    shape: Shape,
    *,
    training: bool,
    passes: Callable[[Graph], Graph] = infer_attributes,
    dtype: torch.dtype = torch.float32,
) -> PlanningProblem:
    """The model at one input size; in training every parameter needs a gradient, the input does not."""
    return problems_of(model, [shape], training=training, passes=passes, dtype=dtype)[0]


def problems_of(
    model: nn.Module,
    shapes: Sequence[Shape],
    *,
    training: bool,
    passes: Callable[[Graph], Graph] = infer_attributes,
    dtype: torch.dtype = torch.float32,
) -> list[PlanningProblem]:
    """Problems of a model at several sizes, from one capture."""
    captured = capture(model, [shapes[0]], [dtype], torch.device("cpu"))
    phases = find_phases(passes(captured.graph))
    requires_grad: set[str] = set()
    for node in phases.graph.nodes if training else ():
        if node.kind == "parameter" or any(name in requires_grad for name in differentiable_operands(node)):
            requires_grad.add(node.name)
    weights = {node.name: model.get_parameter(node.target) for node in phases.graph.nodes if node.kind == "parameter"}
    laid_out = frozenset(name for name, weight in weights.items() if is_in_program_layout(weight))
    row_major = frozenset(name for name, weight in weights.items() if weight.is_contiguous())
    problems = []
    for shape in shapes:
        symbols = captured.bind([shape])
        assert symbols is not None
        sized_phases = specialize_phases(phases, symbols, {captured.graph.inputs[0]: shape})
        sized = SizedGraph(
            phases=sized_phases,
            requires_grad=frozenset(requires_grad),
            weights_in_layout=laid_out,
            row_major_weights=row_major,
        )
        problems.append(PlanningProblem(resources=Resources(sized=sized)))
    return problems


def with_resources(problem: PlanningProblem, **changes: Any) -> PlanningProblem:
    """The problem with these fields of its resources changed."""
    return replace(problem, resources=replace(problem.resources, **changes))


def with_sized(problem: PlanningProblem, **changes: Any) -> PlanningProblem:
    """The problem with these fields of its sized graph changed."""
    return with_resources(problem, sized=replace(problem.sized, **changes))
