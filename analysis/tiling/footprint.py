"""Closed-form footprint of a run of operators: bytes of a strip, receptive field, halo and frontier.

*Footprint.* In the steady state of a sweep each value ``v`` gains ``rate_v * h`` rows in a strip of ``h`` rows and carries a constant
number of rows ``carry_v``. The backward pass of a strip peaks about where the recomputed forward ends: every value that some derivative
reads is alive then, together with one gradient. Hence

    working(h) = sum over kept v of row_bytes_v * (rate_v * h + carry_v)  +  max over v of 2 * row_bytes_v * (rate_v * h + carry_v)

and a state of the sweep, which a checkpoint stores, has ``sum of row_bytes_v * carry_v`` bytes. The state is exact; the working set is an
estimate that grows with ``h``, affine from some height on. The memory that a plan promises is projected from the lowered programs, byte
for byte.

*Receptive field.* Composing the access maps along a run gives the input rows that one row of a value depends on, and the halo of an
independent tile. :func:`run_formulas` prints them for ``plan.explain()``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import sympy as sp

from sft.analysis.ir.access import Frontier
from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.operator_run import OperatorRun
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
        row_bytes: bytes of one row (all channels and columns, the samples of one sweep).
        rate: rows per row of the swept input.
        carried_rows: rows carried from strip to strip.
        is_source: True if it comes from outside, untiled, so no row of it is carried.
        is_kept: True if the backward pass of a strip reads it.
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
        """Bytes per row of the strip, and bytes of the carried rows: ``bytes_at`` without its rounding."""
        return self.row_bytes * self.rate, self.row_bytes * self.carried_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The values of a run.

    Attributes:
        values: steady-state sizes of all values, sources included.
        training: True if any of them requires a gradient.
    """

    values: tuple[ValueFootprint, ...]
    training: bool

    def working_bytes(self, strip_rows: int) -> int:
        """Bytes that one strip's program needs in addition to its carried-in rows."""
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
        """The largest multiple of ``stride`` rows with working bytes within ``num_bytes``; ``None`` if not even one stride fits."""
        if self.working_bytes(stride) > num_bytes:
            return None
        low, high = 1, 2
        while self.working_bytes(high * stride) <= num_bytes and high < 2**40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.working_bytes(middle * stride) <= num_bytes else (low, middle)
        return low * stride

    @property
    def tall(self) -> tuple[Fraction, int]:
        """Slope (bytes per row) and offset (bytes) of ``working(h)`` for large ``h``, where it is affine."""
        if not self.values:
            return Fraction(0), 0
        (slope, offset), (steepest, steepest_offset) = self._kept, max(value.affine for value in self.values)
        return slope + 2 * steepest, offset + 2 * steepest_offset

    @property
    def _kept(self) -> tuple[Fraction, int]:
        kept = [value.affine for value in self.values if value.is_kept and self.training]
        return sum((slope for slope, _ in kept), Fraction(0)), sum(offset for _, offset in kept)


def run_footprint(run: OperatorRun, shapes: Mapping[str, tuple[int, ...]], requires_grad: Collection[str], batch: int) -> Footprint:
    """The footprint of a run of streamed operators at one input size."""
    graph, rows, inside = run.graph, run.rows, set(run.names)
    rates = row_rates(run, source_rates({name: graph.axes.extent(shapes[name], ROWS) for name in run.sources}))
    carried = _steady_carried_rows(run, rates)
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
                is_source=name in run.sources,
                is_kept=keeps_operand or keeps_result,
            )
        )
    return Footprint(values=tuple(values), training=not inside.isdisjoint(requires_grad))


def _steady_carried_rows(run: OperatorRun, rates: Mapping[str, Fraction]) -> dict[str, int]:
    """Carried rows of each value at strip boundaries that are multiples of the total stride, far from both borders."""
    stride = total_stride(rates)
    position = stride * 4096
    front = {name: int(rates[name] * position) for name in run.sources}
    lowest: dict[str, int] = {}
    for name in run.names:
        node, row = run.graph[name], run.rows[name]
        operands = [o for o in node.operands if o in front]
        if not operands:
            continue
        access = row.access(node, ROWS)
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
    """The receptive field of one row of a value: the input rows of a run that it depends on.

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
        """Rows beyond a tile's own that an independent tile must read."""
        return max(0, self.num_rows - max(1, int(self.jump)))


def frontier_formulas(run: OperatorRun) -> dict[str, Frontier]:
    """The frontier of every value of a run as a function of the rows ``R`` of its sources, in the normal form."""
    inside = set(run.names)
    frontiers: dict[str, Frontier] = {}
    for name in run.names:
        node, row = run.graph[name], run.rows[name]
        if row.role == "reduce":
            continue
        access = row.access(node, ROWS)
        operands = [o for o in node.operands if o in run.streamed]
        composed = [(frontiers[o] if o in inside else Frontier()).compose(access) for o in dict.fromkeys(operands)]
        meet = composed[0]
        for other in composed[1:]:
            meet = meet.meet(other)
        frontiers[name] = meet
    return frontiers


def receptive_field(run: OperatorRun) -> dict[str, ReceptiveField]:
    """The receptive field of every value of a run in rows of its sources: the composition of access maps."""
    inside = set(run.names)
    fields: dict[str, ReceptiveField] = {}
    start = ReceptiveField(Fraction(1), Fraction(0), Fraction(0))
    for name in run.names:
        node, row = run.graph[name], run.rows[name]
        if row.role == "reduce":
            continue
        access = row.access(node, ROWS)
        operand_fields = [fields[o] if o in inside else start for o in node.operands if o in run.streamed]
        scale = Fraction(access.scale, access.divisor)
        low = min(f.low + f.jump * Fraction(access.first, access.divisor) for f in operand_fields)
        high = max(f.high + f.jump * Fraction(access.last, access.divisor) for f in operand_fields)
        fields[name] = ReceptiveField(operand_fields[0].jump * scale, low, high)
    return fields


def run_formulas(run: OperatorRun) -> tuple[tuple[str, str], ...]:
    """Named formulas of a tiled run that hold at all sizes, printed."""
    fields = receptive_field(run)
    if not fields:
        return ()
    widest = max(fields.values(), key=lambda field: field.num_rows)
    last = next(reversed(fields))
    rows_symbol = sp.Symbol("R", integer=True)
    frontier = frontier_formulas(run)[last]
    frontier_text = str(frontier.expr(rows_symbol)) if frontier.terms else "not a single floor (rates that do not divide)"
    # A reduction at the end of the run accumulates strip by strip and restricts no dimension.
    fused = fused_dimensions(run.of(tuple(fields)))
    return (
        ("fused-tileable dimensions", ", ".join(fused) or "none"),
        ("receptive field", f"{widest.num_rows} rows, stride {fields[last].jump}"),
        ("halo of an independent tile", f"{widest.halo_rows} rows in all"),
        ("frontier of the last value", f"F(R) = {frontier_text}"),
    )


def footprint_formulas(footprint: Footprint) -> tuple[tuple[str, str], ...]:
    """Named formulas of a run's bytes at one size, printed."""
    carried = [(value.name, value.carried_rows) for value in footprint.values if value.carried_rows and not value.is_source]
    largest = max(carried, key=lambda item: item[1], default=("", 0))
    slope, offset = (float(num_bytes) / 2**20 for num_bytes in footprint.tall)
    return (
        ("carried rows", f"{sum(n for _, n in carried)} rows of {len(carried)} values, at most {largest[1]} of one"),
        ("footprint of a strip", f"{slope:.4g} MiB * h + {offset:.4g} MiB + O(1)"),
    )
