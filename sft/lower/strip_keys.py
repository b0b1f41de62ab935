"""Cache keys of the strips of one sweep, and the program fragments stored under them.

Facts that strips share (rows of a value, work of an operator, buffers, gradients) are interned as small integers. So the key of a
fragment is a short tuple of integers (:mod:`sft.lower.strip_programs`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sft.analysis.tiling.strips import NodeRows
from sft.common.interval import Interval
from sft.lower.fragments import ProgramFragment
from sft.lower.program import Slot

__all__ = ["BackwardFragment", "ForwardFragment", "Interner", "OperatorFragments", "StripKey", "ValueStripKey"]


@dataclass(frozen=True, slots=True)
class ValueStripKey:
    """The rows of one value, relative to its first row, in all steps with equal rows.

    Attributes:
        number: unique number of this value and these rows.
        has_no_work: True if the operator computes and reads no rows.
        appends: True if rows go to the row store.
        zero_row_requests: for operands that the operator reads with padding: the operand, rows of zeros above and below.
    """

    number: int
    has_no_work: bool
    appends: bool
    zero_row_requests: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StripKey:
    """Facts that all programs of a step share.

    Attributes:
        index: number of the step.
        rows: the key of each value's rows.
        zero_rows: rows of zeros above and below the buffers of values.
        read: the rows that are read of each source.
        keys: the work of each operator as a number, without slots; operators without work have none.
        nodes: rows of values in this step, cached from the schedule.
    """

    index: int
    rows: Mapping[str, ValueStripKey]
    zero_rows: Mapping[str, tuple[int, int]]
    read: Mapping[str, Interval]
    keys: Mapping[str, int]
    nodes: dict[str, NodeRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFragment:
    """The forward fragment of an operator, and the slots that it leaves for readers and for its backward pass.

    Attributes:
        number: its unique number.
        fragment: the instructions, if any.
        buffer: the number of its value's buffer, if the value is streamed.
        global_slot: the accumulator, if the operator is a reduction.
        context: the rule's saved facts for the backward pass, its destination and its overwritten operand.
    """

    number: int
    fragment: ProgramFragment | None
    buffer: int | None
    global_slot: Slot | None
    context: tuple[dict[str, Any], Slot | None, Slot | None] | None


@dataclass(frozen=True, slots=True)
class BackwardFragment:
    """The backward fragment of an operator, and the numbers of the gradients that it contributes to its operands."""

    fragment: ProgramFragment | None
    contributions: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class OperatorFragments:
    """One operator of the segment, with its cached fragments.

    Attributes:
        name: the operator.
        reads: the streamed values that it reads, each once.
        global_reads: the global values that it reads and that the segment computes.
        has_outputs: True if its fragment depends on whether outputs are written.
        needs_grad: True if it is differentiated.
        is_inactive: True if it has no columns in the panel.
        forward: forward fragments by work, writing of outputs, and operands.
        append: fragments that copy rows to the row store, by work and buffer.
        backward: backward fragments by forward fragment and gradients of the value.
    """

    name: str
    reads: tuple[str, ...]
    global_reads: tuple[str, ...]
    has_outputs: bool
    needs_grad: bool
    is_inactive: bool
    forward: dict[tuple[Any, ...], ForwardFragment] = field(default_factory=dict)
    append: dict[tuple[int, int], ProgramFragment] = field(default_factory=dict)
    backward: dict[tuple[int, ...], BackwardFragment] = field(default_factory=dict)


class Interner:
    """Numbers equal values consecutively from 0.

    >>> interner = Interner()
    >>> [interner.number_of(value) for value in "abca"], interner.values
    ([0, 1, 2, 0], ['a', 'b', 'c'])
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number_of(self, value: Hashable) -> int:
        """The number of a value; a new one if no equal value has been numbered."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number
