"""Sample runs: maximal runs of operators that are independent along samples, and the operators between them.

A run may be computed for some samples at a time: no operator in it reads another sample. Operators that exchange samples (pooling of a bag
of tiles, the moments of a BatchNorm in training) need all of them, and end a run. Operators are sorted into *stages*, even ones of runs and
odd ones of other operators, each as early as its operands allow::

    y = encoder(tiles)           stage 0, a run
    w = softmax(score(y), 0)     softmax: stage 1
    z = (w * y).sum(0)           stage 1: a run without a FLOP would save no memory that is worth its calls

Values that cross between stages have their samples in slices of a dimension; an operator that makes another one is left out of its run.

**Operands read in full.** Attention over samples (the tokens of a sequence, the vectors of a bag) computes some queries from all keys and
values. Keys and values are then computed in one run, and attention is the begin of the next one, which reads them as it reads weights::

    q, k, v = qkv(norm(x))                stage 0, a run
    y = x + project(attention(q, k, v))   stage 2, a run of queries: k and v are complete
    z = y + mlp(norm(y))                  stage 2

The gradients of keys and values are sums over all queries; attention is never a matrix of all queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleTracker
from sft.analysis.ir.ops.sample_rules import PRODUCT_TARGETS, SAMPLE_IMAGE_RULES, SAMPLE_RULES

__all__ = ["SampleRuns", "SampleStage", "find_sample_runs", "run_cuts", "sort_into_runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStage:
    """Operators between two exchanges of samples, or such an exchange.

    Attributes:
        names: operators in execution order.
        is_run: True if they are independent along samples.
        axes: of a run, position of the samples in its values, and in those from outside that it takes sample by sample.
        read_in_full: of a run, values with samples of which it reads all.
    """

    names: tuple[str, ...]
    is_run: bool
    axes: Mapping[str, SampleAxis]
    read_in_full: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRuns:
    """Operators of a graph in stages.

    Attributes:
        stages: the stages in execution order.
        axes: position of the samples in the values of runs, and in those from outside that runs take sample by sample.
        read_in_full: by operator, operands that have samples, of which it reads all.
    """

    stages: tuple[SampleStage, ...]
    axes: Mapping[str, SampleAxis]
    read_in_full: Mapping[str, frozenset[str]]

    @property
    def run_names(self) -> frozenset[str]:
        """Operators inside of runs."""
        return frozenset(name for stage in self.stages if stage.is_run for name in stage.names)


def find_sample_runs(
    graph: Graph,
    *,
    rows: Mapping[str, Operator],
    streamed: frozenset[str],
    per_sample: frozenset[str],
    prologue: tuple[str, ...],
    num_samples: int,
) -> SampleRuns:
    """Sort the operators into runs and exchanges.

    Args:
        graph: the graph at one input size.
        rows: row of the operator table of each operator.
        streamed: values in the layout of images.
        per_sample: other values with an entry for each sample in their first dimension.
        prologue: operators that depend on no input.
        num_samples: number of samples, more than one.
    """

    def tracker_without(excluded: frozenset[str]) -> SampleTracker:
        tracker = SampleTracker(
            graph=graph,
            rows=rows,
            streamed=streamed,
            per_sample=per_sample,
            num_samples=num_samples,
            rules=SAMPLE_RULES,
            image_rules=SAMPLE_IMAGE_RULES,
            excluded=excluded,
        )
        tracker.axes |= {name: SampleAxis(dim=0) for name in graph.inputs if name in streamed or name in per_sample}
        return tracker

    return sort_into_runs(graph, graph.operators, frozenset(prologue), tracker_without)


def sort_into_runs(
    graph: Graph, operators: Sequence[Node], prologue: frozenset[str], tracker_without: Callable[[frozenset[str]], SampleTracker]
) -> SampleRuns:
    """Sort some operators of a graph into runs and exchanges.

    Args:
        graph: the graph at one input size.
        operators: the operators in execution order.
        prologue: operators that depend on no input.
        tracker_without: a new tracker that must leave these operators out of runs.
    """
    excluded: set[str] = set()
    while True:
        tracker = tracker_without(frozenset(excluded))
        inside = {node.name for node in operators if tracker.track(node)} | tracker.uniform
        stage_of = _stages(operators, inside, prologue, tracker.read_in_full)
        runs: dict[int, list[str]] = {}
        views = _views_in_runs(graph, prologue, stage_of)
        for node in operators:
            if node.name not in views:
                runs.setdefault(stage_of[node.name], []).extend((*(name for name in node.operands if name in views), node.name))
        before = len(excluded)
        before_runs = [node for node in operators if stage_of[node.name] < 0]
        excluded.update(name for node in before_runs for name in node.operands if stage_of.get(name, -1) >= 0)
        for stage, names in runs.items():
            if stage >= 0 and stage % 2 == 0:
                no_work = not any(graph[name].target in PRODUCT_TARGETS for name in names)
                crossing = [name for name in graph.live_out(names) if not tracker.is_sliceable(name, tracker.axes[name])]
                excluded.update(names if no_work else (*crossing, *_reads_twice(graph, names, tracker)))
        if len(excluded) == before:
            stages = tuple(
                _run(graph, names, tracker)
                if stage >= 0 and stage % 2 == 0
                else SampleStage(names=tuple(names), is_run=False, axes={}, read_in_full=frozenset())
                for stage, names in sorted(runs.items())
            )
            return SampleRuns(stages=stages, axes=tracker.axes, read_in_full=tracker.read_in_full)


def _views_in_runs(graph: Graph, prologue: frozenset[str], stage_of: Mapping[str, int]) -> set[str]:
    """Reshaped parameters that one operator of a run reads alone: they are views inside of the run, and copies outside of it."""
    views = set()
    for name in prologue.difference(graph.results):
        users = graph.users[name]
        is_view = graph[name].target == "sft.align_dims" and all(graph[operand].kind != "operator" for operand in graph[name].operands)
        if is_view and len(users) == 1 and stage_of.get(users[0], -1) >= 0 and stage_of[users[0]] % 2 == 0:
            views.add(name)
    return views


def _reads_twice(graph: Graph, names: Sequence[str], tracker: SampleTracker) -> list[str]:
    """Operators of a stage that read a value in full of which the stage also reads single samples."""
    by_samples = {operand for name in names for operand in graph[name].operands if operand not in tracker.read_in_full.get(name, ())}
    return [name for name in names if not by_samples.isdisjoint(tracker.read_in_full.get(name, ()))]


def _run(graph: Graph, names: Sequence[str], tracker: SampleTracker) -> SampleStage:
    """A run, with the position of the samples in the values that its operators compute, or read by samples."""
    full = frozenset[str]().union(*(tracker.read_in_full.get(name, ()) for name in names))
    touched = {*names, *(operand for name in names for operand in graph[name].operands)} - full
    axes = {name: axis for name, axis in sorted(tracker.axes.items()) if name in touched}
    return SampleStage(names=tuple(names), is_run=True, axes=axes, read_in_full=full)


def run_cuts(graph: Graph, names: Sequence[str], axes: Mapping[str, SampleAxis], outputs: Sequence[str], num_cuts: int) -> tuple[int, ...]:
    """Positions at which a run is cut into parts of about equal bytes, where few bytes cross.

    Args:
        graph: the graph.
        names: operators of the run in execution order.
        axes: position of the samples in their values.
        outputs: values that are read outside; none of them may cross a cut.
        num_cuts: number of cuts; the result may have fewer.
    """
    if not num_cuts:
        return ()
    sizes = [math.prod(graph[name].shape) * graph[name].itemsize_bytes for name in names]
    total = list(accumulate(sizes))
    position = {name: index for index, name in enumerate(names)}
    last_read = [max((position.get(user, -1) for user in graph.users[name]), default=-1) for name in names]
    crossing: dict[int, int] = {}
    for cut in range(1, len(names)):
        read_later = [index for index in range(cut) if last_read[index] >= cut]
        if all(names[index] in axes and names[index] not in outputs for index in read_later):
            crossing[cut] = sum(sizes[index] for index in read_later)
    cuts = []
    for number in range(1, num_cuts + 1):
        low, high = ((number + shift) * total[-1] / (num_cuts + 1) for shift in (-0.4, 0.4))
        near = [cut for cut in crossing if low <= total[cut - 1] <= high]
        if near:
            cuts.append(min(near, key=lambda cut: crossing[cut]))
    return tuple(sorted(set(cuts)))


def _stages(
    operators: Sequence[Node], inside: set[str], prologue: frozenset[str], read_in_full: Mapping[str, frozenset[str]]
) -> dict[str, int]:
    """Stage of each operator: even for those inside of runs, odd for other ones; -1 for the prologue.

    An operator comes in a later stage than the values that it reads in full.
    """
    stage_of: dict[str, int] = {}
    for node in operators:
        full = read_in_full.get(node.name, ())
        first = max((stage_of[name] + (name in full) for name in node.operands if name in stage_of), default=0)
        first = max(first, 0)
        is_inside = node.name in inside
        stage_of[node.name] = -1 if node.name in prologue and not is_inside else first + (first % 2 != (0 if is_inside else 1))
    return stage_of
