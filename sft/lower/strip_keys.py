"""What is known of the strips of one walk: what each operator does in some of them, by number, and the parts that it came to.

Whatever strips have in common has a number; so what an operator's part depends on is a short tuple (``sft.lower.lower_walk``).
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
    """What one value does in some steps.

    Attributes:
        number: that no other value, and no other doing of this one, has.
        has_no_work: whether there is nothing to do.
        appends: whether rows go to the row store.
        paddings: borders that it wants of its operands' buffers.
    """

    number: int
    has_no_work: bool
    appends: bool
    paddings: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StripKey:
    """What all programs of a step have in common.

    Attributes:
        index: which step.
        rows: of each value.
        borders: rows of zeros above and below values.
        read: the rows that are read of each source.
        keys: what the work of each operator depends on, in any direction, besides slots; those that are idle have none.
        nodes: what has been asked for of the schedule.
    """

    index: int
    rows: Mapping[str, ValueStripKey]
    zero_rows: Mapping[str, tuple[int, int]]
    read: Mapping[str, Interval]
    keys: Mapping[str, int]
    nodes: dict[str, NodeRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFragment:
    """An operator's forward part and what it leaves for others.

    Attributes:
        number: that no other has.
        part: the instructions, where there are any.
        value: the number of its value's buffer.
        whole: a running reduction.
        context: what its rule has put aside for the backward pass, with the buffers that it wrote into.
    """

    number: int
    part: ProgramFragment | None
    value: int | None
    whole: Slot | None
    context: tuple[dict[str, Any], Slot | None, Slot | None] | None


@dataclass(frozen=True, slots=True)
class BackwardFragment:
    """An operator's backward part and the gradients of what it reads, as numbers of patches."""

    part: ProgramFragment | None
    patches: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class OperatorFragments:
    """One operator of the segment, with its parts so far.

    Attributes:
        name: the operator.
        reads: the streamed values that it reads, each once.
        reduced: the global values that it reads of operators in the segment.
        leaves: whether its own output depends on whether outputs are written.
        needs_grad: whether it is differentiated.
        is_inactive: whether the panel has nothing for it.
    """

    name: str
    reads: tuple[str, ...]
    reduced: tuple[str, ...]
    leaves: bool
    needs_grad: bool
    is_inactive: bool
    forward: dict[tuple[Any, ...], ForwardFragment] = field(default_factory=dict)
    append: dict[tuple[int, int], ProgramFragment] = field(default_factory=dict)
    backward: dict[tuple[int, ...], BackwardFragment] = field(default_factory=dict)


class Interner:
    """Numbers for things, from 0 on, in the order in which they are first asked for; equal things have one."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._of: dict[Hashable, int] = {}

    def of(self, thing: Hashable) -> int:
        """The number of a thing."""
        number = self._of.get(thing)
        if number is None:
            number = self._of[thing] = len(self.things)
            self.things.append(thing)
        return number
