"""Notes of a plan: operators that run untiled, that end a run of samples, windows or tokens, or that run again; schedules of repeats."""

from __future__ import annotations

from collections.abc import Iterator

from sft.analysis.ir.graph import Node
from sft.common.byte_units import format_bytes
from sft.planner.materialize import ProjectedPlan
from sft.planner.problem import PlanningProblem
from sft.planner.repeat_budgets import repeated_calls
from sft.runtime.sample_segment import SampleSegment
from sft.runtime.whole_segment import WholeSegment

__all__ = ["plan_notes"]

#: Least share of the bytes of all values that operators after the end of a run make.
_MIN_SHARE = 0.03
_WITHIN_REMEDY = "compute it within each of them, or on pooled values"
#: Remedies by operator.
_REMEDIES = {
    **dict.fromkeys(("roll", "flip"), "move the image as [N, C, H, W], before it is divided"),
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm", "native_batch_norm"), "normalise each of them on its own"),
    "cat": "join values of a pixel or token, or after the pooling",
}


def plan_notes(problem: PlanningProblem, projected: ProjectedPlan) -> tuple[str, ...]:
    """Lines about operators that run untiled or again, each once, and about repeats."""
    lines = (*_whole_reasons(problem, projected), *_run_ends(problem, projected), *_clone_lines(problem))
    return (*dict.fromkeys(lines), *_repeat_lines(problem))


def _clone_lines(problem: PlanningProblem) -> Iterator[str]:
    """Lines that name the images which are computed again for a later phase."""
    sized, clones = problem.sized, problem.sized.phases.clones
    for node in sized.graph.operators:
        if node.name in clones and not clones.issuperset(sized.graph.users[node.name]):
            num_bytes = format_bytes(sized.value_bytes(node.name))
            yield f"{node.label} runs again after the reduction that reads its image, so that the {num_bytes} of the image are not kept"


def _whole_reasons(problem: PlanningProblem, projected: ProjectedPlan) -> Iterator[str]:
    """Reasons of the operators that run untiled although they read an image; none of those that take some samples or windows at a time."""
    segments = (segment for segment in projected.region.segments if isinstance(segment, SampleSegment))
    in_chunks = {name for segment in segments for name in segment.scope.names}
    return (reason for name, reason in problem.sized.phases.whole_reasons.items() if name not in in_chunks)


def _repeat_lines(problem: PlanningProblem) -> tuple[str, ...]:
    """Schedules of the repeats, one line each."""
    calls = repeated_calls(problem)
    return (
        tuple(f"{problem.sized.graph[name].label}: {call.plan.explain()}" for name, call in calls.items()) if problem.sized.training else ()
    )


def _run_ends(problem: PlanningProblem, projected: ProjectedPlan) -> Iterator[str]:
    """Lines that name the operators which read all samples of a run, if many bytes are computed untiled from there on."""
    sized, graph = problem.sized, problem.sized.graph
    unit_of: dict[str, str] = {}
    for choice, segment in zip(projected.choices, projected.region.segments, strict=True):
        if isinstance(segment, SampleSegment):
            stage = sized.window_stage(choice.nodes) if choice.strip_rows else None
            unit_of |= dict.fromkeys(choice.nodes, "samples" if stage is None else stage.unit)
    min_bytes = _MIN_SHARE * sum(map(sized.value_bytes, sized.operators)) if unit_of else 0
    for choice, segment in zip(projected.choices, projected.region.segments, strict=True):
        remaining = list(choice.nodes) if isinstance(segment, WholeSegment) else []
        while remaining:
            first = next((name for name in remaining if any(operand in unit_of for operand in graph[name].operands)), None)
            if first is None:
                break
            after = graph.descendants([first]).intersection(remaining)
            if sum(map(sized.value_bytes, after)) >= min_bytes:
                unit = next(unit_of[operand] for operand in graph[first].operands if operand in unit_of)
                yield _note(_named(graph[first], problem), unit, [graph[name] for name in remaining if name in after])
            remaining = [name for name in remaining if name not in after]


def _named(node: Node, problem: PlanningProblem) -> Node:
    """The operator of the model that a node stands for: a permutation inserted by a pass is named by its reader."""
    users = problem.sized.graph.users[node.name]
    return problem.sized.graph[users[0]] if node.target.startswith("sft.") and users else node


def _note(first: Node, unit: str, nodes: list[Node]) -> str:
    name = first.target.removeprefix("aten.").split(".")[0]
    operators = "runs untiled" if len(nodes) == 1 else f"{len(nodes)} operators, to {nodes[-1].label}, run untiled"
    return f"{first.label}: reads all {unit} at once, so {operators}; {_REMEDIES.get(name, _WITHIN_REMEDY)}"
