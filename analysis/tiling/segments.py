"""Separators: the positions at which a run of operators can be cut into segments.

A segment's results are the values that later segments read. A position that exactly one value crosses is a *separator*: a cut at it stores
one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.graph_cuts import crossing_values

__all__ = ["Separator", "cut_positions", "separators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A position between two operators that a single value crosses.

    Attributes:
        position: number of the run's operators before it.
        value: the crossing value.
    """

    position: int
    value: str


def separators(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[Separator, ...]:
    """The separators inside a run of operators, its two ends excluded.

    Args:
        graph: the graph.
        names: the run, in execution order.
        streamed: values that count as crossing even if they are computed outside the run: the images. Parameters and global values from
            outside are available on either side and never cross. Every value that the run computes crosses up to the run's own last read.
    """
    inner = crossing_values(graph, names, streamed)[1:-1]
    return tuple(Separator(position=cut, value=values[0]) for cut, values in enumerate(inner, start=1) if len(values) == 1)


def cut_positions(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[int, ...]:
    """Positions at which a run may be cut in two: 0, every separator, its end."""
    if not names:
        return (0,)
    return (0, *(separator.position for separator in separators(graph, names, streamed)), len(names))
