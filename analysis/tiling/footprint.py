"""Bytes of a strip as an expression in its height, and the strip height that a number of bytes allows.

In the steady state of a walk each value ``v`` gains ``rate_v * h`` rows to a strip of ``h`` rows and carries a constant number of
rows ``carry_v``. The backward pass of a strip is at its largest about where the recomputed forward ends: every value that some
derivative reads is alive then, with one gradient beside it. Hence

    working(h) = sum over kept v of row_bytes_v * (rate_v * h + carry_v)  +  max over v of 2 * row_bytes_v * (rate_v * h + carry_v)

and a state of the walk, which a checkpoint keeps, is ``sum of row_bytes_v * carry_v``. The state is exact; the working set is an
estimate that grows with ``h``, affine from some height on. What a plan promises is projected from the lowered programs, byte for byte.

What the symbolic analysis can say about a run of operators, for people: receptive field, stride, halo, delay, carried rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import sympy as sp

from sft.analysis.ir.access import Frontier
from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.sft_partition import fused_dimensions
from sft.analysis.tiling.strips import row_rates, source_rates, total_stride

__all__ = [
    "Footprint",
    "ReceptiveField",
    "ValueFootprint",
    "footprint_formulas",
    "frontier_formulas",
    "receptive_field",
    "run_footprint",
    "run_formulas",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFootprint:
    """One value of a run in the steady state.

    Attributes:
        name: the value.
        row_bytes: bytes of one row (all channels and columns, one walk's batch elements).
        rate: rows to one row of the walked input.
        carried_rows: rows carried from strip to strip.
        is_source: whether it comes from outside, whole, so that nothing of it is carried.
        is_kept: whether the backward pass of a strip reads it.
    """

    name: str
    row_bytes: int
    rate: Fraction
    carried_rows: int
    is_source: bool
    is_kept: bool

    def bytes_at(self, strip_rows: int) -> int:
        """Bytes of its buffer in a strip."""
        rows = -(-self.rate.numerator * strip_rows // self.rate.denominator)
        return self.row_bytes * (rows + self.carried_rows)

    @property
    def affine(self) -> tuple[Fraction, int]:
        """Bytes for each row of the strip, and bytes of the carried rows: ``bytes_at`` without its rounding."""
        return self.row_bytes * self.rate, self.row_bytes * self.carried_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The values of a run."""

    values: tuple[ValueFootprint, ...]
    training: bool

    def working_bytes(self, strip_rows: int) -> int:
        """Bytes that one strip's program needs beside what is carried into it."""
        sizes = [value.bytes_at(strip_rows) for value in self.values]
        if not sizes:
            return 0
        kept = sum(size for size, value in zip(sizes, self.values, strict=True) if value.is_kept) if self.training else 0
        return kept + 2 * max(sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state: all carried rows."""
        return sum(value.row_bytes * value.carried_rows for value in self.values if not value.is_source)

    def largest_strip(self, num_bytes: int, stride: int) -> int | None:
        """The largest multiple of ``stride`` rows whose working bytes fit; ``None`` when not even one stride does."""
        if self.working_bytes(stride) > num_bytes:
            return None
        low, high = 1, 2
        while self.working_bytes(high * stride) <= num_bytes and high < 2**40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.working_bytes(middle * stride) <= num_bytes else (low, middle)
        return low * stride

    def expr(self, strip_rows: sp.Expr) -> sp.Expr:
        """``working(h)`` in SymPy, without the rounding of ``rate * h``: exact at multiples of the run's stride."""
        if not self.values:
            return sp.Integer(0)
        slope, offset = self._kept
        # Short strips are mostly halo and tall ones mostly new rows, so which value is the largest depends on h.
        largest = sp.Max(*(_affine_coefficients(*line, strip_rows) for line in _upper_envelope(value.affine for value in self.values)))
        return sp.expand(_affine_coefficients(slope, offset, strip_rows)) + 2 * largest

    @property
    def tall(self) -> tuple[Fraction, int]:
        """Bytes a row and bytes besides of ``working(h)`` where ``h`` is large: a single affine expression."""
        if not self.values:
            return Fraction(0), 0
        (slope, offset), (steepest, beside) = self._kept, max(value.affine for value in self.values)
        return slope + 2 * steepest, offset + 2 * beside

    @property
    def _kept(self) -> tuple[Fraction, int]:
        kept = [value.affine for value in self.values if value.is_kept and self.training]
        return sum((slope for slope, _ in kept), Fraction(0)), sum(offset for _, offset in kept)


def _upper_envelope(lines: Iterable[tuple[Fraction, int]]) -> list[tuple[Fraction, int]]:
    """The lines that no other one is above for all ``h >= 0``."""
    found: list[tuple[Fraction, int]] = []
    for line in sorted(set(lines), reverse=True):
        if not found or line[1] > found[-1][1]:
            found.append(line)
    return found


def _affine_coefficients(slope: Fraction, offset: int, strip_rows: sp.Expr) -> sp.Expr:
    return sp.Rational(slope.numerator, slope.denominator) * strip_rows + offset


def run_footprint(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    requires_grad: Collection[str],
    batch: int,
) -> Footprint:
    """The footprint of a run of streamed operators at one input size."""
    inside = set(names)
    sources = graph.sources(names, streamed)
    rates = row_rates(graph, names, source_rates({name: graph.axes.extent(shapes[name], ROWS) for name in sources}), rows)
    carried = _steady_carried_rows(graph, names, rows, rates, sources)
    values = []
    for name, rate in rates.items():
        readers = [r for r in graph.users[name] if r in inside]
        keeps_operand = any(r in requires_grad and rows[r].saves_for_backward(graph[r])[0] for r in readers)
        keeps_result = name in inside and name in requires_grad and rows[name].saves_for_backward(graph[name])[1]
        values.append(
            ValueFootprint(
                name=name,
                row_bytes=batch * prod(graph.axes.with_extent(shapes[name], ROWS, 1)[1:]) * graph[name].itemsize_bytes,
                rate=rate,
                carried_rows=carried.get(name, 0),
                is_source=name in sources,
                is_kept=keeps_operand or keeps_result,
            )
        )
    return Footprint(values=tuple(values), training=any(name in requires_grad for name in names))


def _steady_carried_rows(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    rates: Mapping[str, Fraction],
    sources: Sequence[str],
) -> dict[str, int]:
    """Carried rows of each value at strip boundaries that are multiples of the total stride, far from both borders."""
    stride = total_stride(rates)
    position = stride * 4096
    front = {name: int(rates[name] * position) for name in sources}
    lowest: dict[str, int] = {}
    for name in names:
        row = rows[name]
        operands = [o for o in graph[name].operands if o in front]
        if not operands:
            continue
        access = row.access(graph[name], 0)
        if row.role == "reduce":
            least = min(front[o] for o in operands)
            lowest.update((o, min(lowest.get(o, least), least)) for o in operands if front[o] > least)
            continue
        front[name] = min(access.frontier(front[o]) for o in operands)
        for operand in operands:
            low = access.low(front[name])
            lowest[operand] = min(lowest.get(operand, low), low)
    return {name: max(0, front[name] - low) for name, low in lowest.items()}


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
        through = [(found[o] if o in inside else Frontier()).compose(access) for o in dict.fromkeys(operands)]
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
