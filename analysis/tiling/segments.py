"""Legal segments: where a run of operators may be cut, and how far it stays fused-tileable.

A segment hands on what later segments read. Where exactly one value crosses from the operators before a place to those behind it,
that place is a *separator*: a cut there is one tensor. Between separators the maximal fused-tileable segments follow from the
operators' dimension maps (Xu et al., CC 2022, section 4.1.2: no operator can be added on either side).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.graph_cuts import crossing_values

__all__ = ["Separator", "cut_positions", "separators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A place between two operators that a single value crosses.

    Attributes:
        position: number of the run's operators before it.
        value: what crosses.
    """

    position: int
    value: str


def separators(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[Separator, ...]:
    """The separators inside a run of operators, its two ends left out.

    Args:
        graph: the graph.
        names: the run, in execution order.
        streamed: values that count as crossing even when they come from outside: the images. Parameters and global values
            from outside are at hand on either side and never cross; every value that the run itself makes does, up to the run's own
            last read of it.
    """
    inner = crossing_values(graph, names, streamed)[1:-1]
    return tuple(Separator(position=cut, value=values[0]) for cut, values in enumerate(inner, start=1) if len(values) == 1)


def cut_positions(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[int, ...]:
    """Where a run may be cut in two: 0, every separator, its end."""
    if not names:
        return (0,)
    return (0, *(separator.position for separator in separators(graph, names, streamed)), len(names))
