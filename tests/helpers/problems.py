"""What the planner is asked about a model, without planning it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sft.analysis.annotate import annotated
from sft.analysis.capture import capture
from sft.analysis.graph import Graph
from sft.analysis.phases import find_phases
from sft.plan.problem import Problem, at_size

__all__ = ["problem_of"]


def problem_of(
    model: nn.Module, shape: tuple[int, int, int, int], *, training: bool, passes: Callable[[Graph], Graph] = annotated
) -> Problem:
    """The model at one input size in float32; in training every parameter needs a gradient, the input does not."""
    found = capture(model, [shape], [torch.float32], torch.device("cpu"))
    symbols = found.bind([shape])
    assert symbols is not None
    phases = find_phases(passes(found.graph))
    requires_grad: set[str] = set()
    for node in phases.graph.nodes if training else ():
        if node.kind == "parameter" or any(name in requires_grad for name in node.operands):
            requires_grad.add(node.name)
    return Problem(
        phases=at_size(phases, symbols, {found.graph.inputs[0]: shape}),
        requires_grad=frozenset(requires_grad),
        channels_last=frozenset(),
        resident_bytes=0,
    )
