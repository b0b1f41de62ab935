"""What the symbolic analysis can say about a run of operators, for people: receptive field, stride, halo, delay, carried rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy as sp

from sft.analysis.access import Frontier
from sft.analysis.compat import fused_dimensions
from sft.analysis.footprint import Footprint
from sft.analysis.graph import Graph
from sft.analysis.operators import Operator

__all__ = ["ReceptiveField", "footprint_formulas", "frontier_formulas", "receptive_field", "run_formulas"]


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """Rows of a run's input that one row of a value depends on.

    Row ``o`` of the value depends on rows ``floor(jump * o) + low .. floor(jump * o) + high`` at most.
    """

    jump: Fraction
    low: Fraction
    high: Fraction

    @property
    def num_rows(self) -> int:
        """Rows from the first to the last."""
        return int(self.high - self.low) + 1

    @property
    def halo_rows(self) -> int:
        """Rows beyond a tile's own that a tile computed by itself must read."""
        return max(0, self.num_rows - max(1, int(self.jump)))


def frontier_formulas(graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str]) -> dict[str, Frontier]:
    """The frontier of every value of a run as a function of the rows ``R`` of its sources, in the normal form."""
    inside = set(names)
    found: dict[str, Frontier] = {}
    for name in names:
        if rows[name].role == "reduce":
            continue
        access = rows[name].access(graph[name], 0)
        operands = [o for o in graph[name].operands if o in streamed]
        through = [(found[o] if o in inside else Frontier()).through(access) for o in dict.fromkeys(operands)]
        meet = through[0]
        for other in through[1:]:
            meet = meet.meet(other)
        found[name] = meet
    return found


def receptive_field(
    graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str], axis: int = 0
) -> dict[str, ReceptiveField]:
    """The receptive field of every value of a run with respect to its sources, along one axis."""
    inside = set(names)
    found: dict[str, ReceptiveField] = {}
    start = ReceptiveField(Fraction(1), Fraction(0), Fraction(0))
    for name in names:
        if rows[name].role == "reduce":
            continue
        access = rows[name].access(graph[name], axis)
        fields = [found[o] if o in inside else start for o in graph[name].operands if o in streamed]
        scale = Fraction(access.scale, access.divisor)
        low = min(f.low + f.jump * Fraction(access.first, access.divisor) for f in fields)
        high = max(f.high + f.jump * Fraction(access.last, access.divisor) for f in fields)
        found[name] = ReceptiveField(fields[0].jump * scale, low, high)
    return found


def run_formulas(
    graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Named formulas of a tiled run, printed: those that hold at all sizes."""
    fields = receptive_field(graph, names, rows, streamed)
    if not fields:
        return ()
    widest = max(fields.values(), key=lambda field: field.num_rows)
    deepest = fields[[name for name in names if name in fields][-1]]
    rows_symbol = sp.Symbol("R", integer=True)
    last = [name for name in names if name in fields][-1]
    frontier = frontier_formulas(graph, names, rows, streamed)[last]
    shown = str(frontier.expr(rows_symbol)) if frontier.terms else "not a single floor (rates that do not divide)"
    # A reduction at the end of the run is summed up strip by strip and restricts nothing.
    fused = fused_dimensions(graph, [name for name in names if name in fields], rows, streamed)
    return (
        ("fused-tileable dimensions", ", ".join(fused) or "none"),
        ("receptive field", f"{widest.num_rows} rows, stride {deepest.jump}"),
        ("halo of an independent tile", f"{widest.halo_rows} rows in all"),
        ("frontier of the last value", f"F(R) = {shown}"),
    )


def footprint_formulas(footprint: Footprint) -> tuple[tuple[str, str], ...]:
    """Those of its bytes at one size."""
    carried = [(value.name, value.carried_rows) for value in footprint.values if value.carried_rows and not value.is_source]
    most = max(carried, key=lambda item: item[1], default=("", 0))
    slope, offset = (float(part) / 2**20 for part in footprint.tall)
    return (
        ("carried rows", f"{sum(n for _, n in carried)} rows of {len(carried)} values, at most {most[1]} of one"),
        ("footprint of a strip", f"{slope:.4g} MiB * h + {offset:.4g} MiB + O(1)"),
    )
