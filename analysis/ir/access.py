"""Access maps: the input rows that each output row reads. Halos, receptive fields and frontiers are derived from them.

Every operator that can be streamed reads, for the output row ``o``, the input rows ``[lo(o), hi(o))`` with

    lo(o) = floor((scale * o + first) / divisor)          hi(o) = floor((scale * o + last) / divisor) + 1

=========================  ========================================================================================
convolution, pooling       ``scale = stride``, ``first = -padding``, ``last = dilation * (kernel - 1) - padding``
nearest upsampling by r    ``scale = 1``, ``divisor = r``
pointwise operator         the identity: ``scale = divisor = 1``, ``first = last = 0``
=========================  ========================================================================================

The *halo* of an output range is the part of ``[lo(start), hi(stop - 1))`` outside the range's own share of the input, so a strided or
dilated convolution needs no rule of its own. Composing the maps along a path gives the *receptive field*
(:func:`sft.analysis.tiling.footprint.receptive_field`); applying them backwards gives the halo of an independent tile
(:mod:`sft.analysis.tiling.independent_tiles`), applying them forwards the rows that a strip carries (:mod:`sft.analysis.tiling.strips`).

The maps are monotone, so the inverse is a single floor. The *frontier*, the largest ``n`` such that every output row below ``n`` can be
computed from the input rows below ``R``, is

    hi(n - 1) <= R   <=>   n <= floor((divisor * R - last - 1) / scale) + 1.

Image borders are ignored on purpose: rows above 0 and below the extent count as available (they are padding, known in advance), and the
schedule clips. A sweep therefore flushes its last rows in strips of the usual size.

Frontiers compose along a path. Composing floors naively nests them without bound; :class:`FloorTerm` is the normal form
``rate * floor((R + advance) / period) + bonus``. It is closed under composition as long as, at each operator, the rate so far and the next
period divide one another, which holds for every common network. Joins take the minimum of several terms; dominated terms are pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

import sympy as sp

from sft.common.interval import Interval

__all__ = ["AxisMap", "AxisPlacement", "FloorTerm", "Frontier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMap:
    """The rows of an input that each row of the output reads (see the module docstring).

    Attributes:
        scale: input rows that one output row advances by, times ``divisor``.
        first: offset of the first row read.
        last: offset of the last row read.
        divisor: output rows to one input row (upsampling); 1 otherwise.
    """

    scale: int = 1
    first: int = 0
    last: int = 0
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.scale < 1 or self.divisor < 1 or self.last < self.first:
            raise ValueError(f"not an access map: {self}")

    @classmethod
    def window(cls, *, kernel: int, stride: int, padding: int, dilation: int) -> AxisMap:
        """The map of a convolution or pooling.

        >>> AxisMap.window(kernel=3, stride=2, padding=1, dilation=1).read(Interval(0, 4))
        Interval(start=-1, stop=8)
        """
        return cls(scale=stride, first=-padding, last=dilation * (kernel - 1) - padding)

    @property
    def is_identity(self) -> bool:
        """True if row ``o`` reads row ``o`` only."""
        return self.scale == 1 and self.divisor == 1 and self.first == 0 and self.last == 0

    def read(self, out: Interval) -> Interval:
        """The input rows that the output rows ``out`` read, borders ignored."""
        if not out:
            return Interval(self.low(out.start), self.low(out.start))
        return Interval(self.low(out.start), (self.scale * (out.stop - 1) + self.last) // self.divisor + 1)

    def low(self, row: int) -> int:
        """The first input row that output row ``row`` reads. The map is monotone, so no later row reads an earlier one."""
        return (self.scale * row + self.first) // self.divisor

    def phase(self, row: int) -> int:
        """Index of output row ``row`` among the output rows with the same first input row."""
        return (self.scale * row + self.first) % self.divisor

    def frontier(self, rows: int) -> int:
        """Number of output rows that the first ``rows`` input rows complete, borders ignored."""
        return (self.divisor * rows - self.last - 1) // self.scale + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The rows that output row ``o`` reads, without rounding: ``stride * o + first`` to ``stride * o + last``, both included.

    An access map rounds rows down. Upsampling by 2 reads row ``floor(o / 2)``: row 0 for ``o = 0`` and ``o = 1``. A placement has the
    mean over all output rows, ``o / 2 - 1 / 4``: the centre of ``o`` in units of input rows.

    Attributes:
        stride: input rows from one output row to the next.
        first: offset of the first row read.
        last: offset of the last row read.
    """

    stride: Fraction = Fraction(1)
    first: Fraction = Fraction(0)
    last: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if self.stride <= 0 or self.last < self.first:
            raise ValueError(f"not a placement: {self}")

    @classmethod
    def of_access(cls, access: AxisMap) -> AxisPlacement:
        """The placement of an access map: each floor is replaced by its mean.

        >>> AxisPlacement.of_access(AxisMap.window(kernel=3, stride=2, padding=1, dilation=1)).centre, AxisPlacement.of_access(
        ...     AxisMap(divisor=2)
        ... ).centre
        (Fraction(0, 1), Fraction(-1, 4))
        """
        divisor = access.divisor
        step = gcd(access.scale, divisor)  # the remainders of (scale * o + offset) / divisor are `step` apart

        def mean(offset: int) -> Fraction:
            return (offset - offset % step - Fraction(divisor - step, 2)) / divisor

        return cls(stride=Fraction(access.scale, divisor), first=mean(access.first), last=mean(access.last))

    @classmethod
    def equal_cells(cls, extent: int, length: int) -> AxisPlacement:
        """The placement of ``length`` rows that divide ``extent`` input rows into equal cells.

        >>> AxisPlacement.equal_cells(8, 2)
        AxisPlacement(stride=Fraction(4, 1), first=Fraction(0, 1), last=Fraction(3, 1))
        """
        stride = Fraction(extent, length)
        return cls(stride=stride, first=min(Fraction(0), (stride - 1) / 2), last=max(stride - 1, (stride - 1) / 2))

    @property
    def centre(self) -> Fraction:
        """Offset of the middle of the rows read."""
        return (self.first + self.last) / 2

    @property
    def width(self) -> Fraction:
        """Rows from the first to the last one read, less one."""
        return self.last - self.first

    def then(self, following: AxisPlacement) -> AxisPlacement:
        """The composition: the input rows that ``following`` reads through this placement."""
        first, last = (self.stride * offset for offset in (following.first, following.last))
        return AxisPlacement(stride=self.stride * following.stride, first=self.first + first, last=self.last + last)

    def join(self, other: AxisPlacement) -> AxisPlacement:
        """The placement of a row that reads both: their hull; of different strides, the one that reads fewer rows."""
        if self.stride != other.stride:
            return other if other.width < self.width else self
        return AxisPlacement(stride=self.stride, first=min(self.first, other.first), last=max(self.last, other.last))


@dataclass(frozen=True, slots=True)
class FloorTerm:
    """``rate * floor((R + advance) / period) + bonus``, with ``0 <= advance < period``."""

    rate: int = 1
    advance: int = 0
    period: int = 1
    bonus: int = 0

    def __call__(self, rows: int) -> int:
        return self.rate * ((rows + self.advance) // self.period) + self.bonus

    def compose(self, access: AxisMap) -> FloorTerm | None:
        """The frontier after one more operator; ``None`` if the normal form does not close.

        >>> stem = FloorTerm().compose(AxisMap.window(kernel=7, stride=2, padding=3, dilation=1))
        >>> stem, stem.compose(AxisMap.window(kernel=3, stride=2, padding=1, dilation=1))
        (FloorTerm(rate=1, advance=0, period=2, bonus=-1), FloorTerm(rate=1, advance=2, period=4, bonus=-1))
        """
        # The operator maps n to floor((divisor * n - last - 1) / scale) + 1.
        rate, bonus, scale = self.rate * access.divisor, self.bonus * access.divisor - access.last - 1, access.scale
        if rate % scale == 0:
            return _normalized_term(rate // scale, self.advance, self.period, bonus // scale + 1)
        if scale % rate == 0:
            # floor((rate * X + bonus) / scale) = floor((X + floor(bonus / rate)) / (scale / rate)) with X a floor itself.
            return _normalized_term(1, self.advance + self.period * (bonus // rate), self.period * (scale // rate), 1)
        return None

    def dominates(self, other: FloorTerm) -> bool:
        """True if ``self(R) <= other(R)`` for every R. Decided for terms of one slope only; otherwise false."""
        if (self.rate, self.period) != (other.rate, other.period):
            return False
        return self.bonus + self.rate <= other.bonus or (self.bonus <= other.bonus and self.advance <= other.advance)

    def expr(self, rows: sp.Expr) -> sp.Expr:
        """The term as a SymPy expression in ``rows``."""
        return self.rate * sp.floor((rows + self.advance) / sp.Integer(self.period)) + self.bonus


def _normalized_term(rate: int, advance: int, period: int, bonus: int) -> FloorTerm:
    quotient, advance = divmod(advance, period)
    return FloorTerm(rate, advance, period, bonus + rate * quotient)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The minimum of several floor terms. An empty tuple means that the normal form does not close."""

    terms: tuple[FloorTerm, ...] = (FloorTerm(),)

    def __call__(self, rows: int) -> int:
        return min(term(rows) for term in self.terms)

    def compose(self, access: AxisMap) -> Frontier:
        """The frontier after one more operator."""
        terms = [term.compose(access) for term in self.terms]
        closed = [term for term in terms if term is not None]
        return Frontier(_without_dominated(closed)) if len(closed) == len(terms) else Frontier(())

    def meet(self, other: Frontier) -> Frontier:
        """The frontier of an operator with two inputs: the minimum of both."""
        if not self.terms or not other.terms:
            return Frontier(())
        return Frontier(_without_dominated([*self.terms, *other.terms]))

    @property
    def period(self) -> int:
        """Input rows after which the frontier's pattern repeats."""
        period = 1
        for term in self.terms:
            period = period * term.period // gcd(period, term.period)
        return period

    def expr(self, rows: sp.Expr) -> sp.Expr:
        """The frontier as a SymPy expression in ``rows``."""
        return sp.Min(*(term.expr(rows) for term in self.terms)) if self.terms else sp.nan


def _without_dominated(terms: list[FloorTerm]) -> tuple[FloorTerm, ...]:
    kept: list[FloorTerm] = []
    for term in dict.fromkeys(terms):
        if not any(other.dominates(term) for other in kept):
            kept = [other for other in kept if not term.dominates(other)] + [term]
    return tuple(kept)
