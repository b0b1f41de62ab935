"""Rematerialization: images of the first phase are computed again for their readers after a barrier.

A norm in training is a barrier: its statistics need the image that it normalises. The image is a cut between two phases, and so is its
gradient. Where the first convolution of a network enlarges the image, these two are the largest values of the step::

    phase 0   y = conv(x); m = moments(y)                       phase 0   y = conv(x); m = moments(y)
    -- y crosses                                     ->         -- x crosses
    phase 1   z = relu(norm(y, m))                              phase 1   y' = conv(x); z = relu(norm(y', m))

The clone reads the input, which exists in any case. Its gradient and that of the original are two contributions to the same weights. A
step computes the cloned operators up to three times more: once forward, and, as segments in strips are computed again, once forward and
once back in the backward pass. Later phases would be cloned with all phases before them, so their images stay cuts.

Rematerialization: Briggs, Cooper and Torczon (1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sft.analysis.ir.graph import Node, Ref, map_refs
from sft.analysis.ir.ops.pointwise import RandomOpSpec
from sft.analysis.tiling.phases import PhasedGraph, find_phases

__all__ = ["rematerialize"]

#: Most clones: more operators are a network, not its first layers, and take longer than they save.
_MAX_CLONES = 32


def rematerialize(phases: PhasedGraph) -> PhasedGraph | None:
    """Clone operators of the first phase for readers in later phases.

    Returns:
        The phases of the graph with clones; ``None`` if no image crosses the first barrier, or too many operators make it.
    """
    graph = phases.graph
    phase_of = {name: number for number, phase in enumerate(phases.phases) for name in (*phase.streamed, *phase.tail)}
    needed = _phases_of_clones(phases, phase_of)
    clones = {(name, number): f"{name}_in_phase_{number}" for name, numbers in needed.items() for number in numbers}
    if not 0 < len(clones) <= _MAX_CLONES:
        return None

    def reading_clones(node: Node, number: int) -> Node:
        """A node that reads the clones of a phase."""
        arguments = tuple((key, map_refs(value, lambda ref: Ref(clones.get((ref, number), ref)))) for key, value in node.arguments)
        return replace(node, arguments=arguments)

    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(reading_clones(node, phase_of[node.name]) if node.kind == "operator" else node)
        nodes += (replace(reading_clones(node, number), name=clones[node.name, number]) for number in sorted(needed.get(node.name, ())))
    return replace(find_phases(replace(graph, nodes=tuple(nodes))), clones=frozenset(clones.values()))


def _phases_of_clones(phases: PhasedGraph, phase_of: Mapping[str, int]) -> dict[str, set[int]]:
    """The later phases in which each image of the first phase is computed again: those of its readers, and of clones that read it.

    Results of the model are stored in any case. Random numbers are drawn once.
    """
    graph, results = phases.graph, frozenset(phases.graph.results)
    first = next((phase.streamed for phase in phases.phases if phase.streamed), ())
    images = {name for name in first if name in phases.streamed and name not in results and not isinstance(phases.rows[name], RandomOpSpec)}
    needed: dict[str, set[int]] = {name: set() for name in images}
    for node in reversed(graph.operators):
        numbers = needed.get(node.name, set[int]()) if node.name in first else {phase_of[node.name]}
        for name in images.intersection(node.operands):
            needed[name] |= numbers - {phase_of[name]}
    return needed
