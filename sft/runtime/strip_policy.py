"""Strips that a sweep runs: by default all of them.

A segment has a *strip policy*. Before each sweep it selects the strips that run. A strip that runs may represent neighbours that are left
out; it then counts several times, as its *weight* says. ``sft.runtime.skip_constant`` has the only other policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from sft.analysis.ir.axes import Axes
from sft.common.array_types import BoolArray, IntArray
from sft.common.interval import Interval
from sft.lower.program import Port, Program
from sft.lower.rules.base import AdditivePart

if TYPE_CHECKING:
    from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
    from sft.runtime.tiled_layout import Sweep, TiledLayout
    from sft.runtime.tiled_segment import SweepRun

__all__ = ["ALL_STRIPS", "RUN_ALL_STRIPS", "StripOps", "StripPolicy", "StripSelection"]


@dataclass(frozen=True, slots=True)
class StripSelection:
    """Strips of one sweep that run.

    Attributes:
        skipped: for each strip, True if it is left out; ``None`` if all strips run.
    """

    skipped: BoolArray | None = None

    def runs(self, index: int) -> bool:
        """True if a strip runs."""
        return self.skipped is None or not self.skipped[index]

    def weight(self, index: int, *, step: int) -> int:
        """Number of strips that a strip represents: itself, and those left out directly after it (``step`` 1) or before it (-1)."""
        if self.skipped is None:
            return 1
        neighbours = self.skipped[index + 1 :] if step > 0 else self.skipped[:index][::-1]
        return 1 + (len(neighbours) if neighbours.all() else int(neighbours.argmin()))

    def with_strips_before(self, first: int) -> StripSelection:
        """The selection in which the strips before ``first``, and this one, run: they do not represent others."""
        if self.skipped is None or not first:
            return self
        skipped = self.skipped.copy()
        skipped[: first + 1] = False
        return StripSelection(skipped)


#: Every strip runs.
ALL_STRIPS = StripSelection()


class StripOps(Protocol):
    """Operations of a machine on behalf of strip policies."""

    def equal_rows(self, image: Buffer, batch: Interval, columns: Interval, *, axes: Axes) -> BoolArray | None:
        """For each row, True if it equals the row above it in these batch elements and columns; ``None`` if that is unknown."""

    def reserve(self, num_bytes: int) -> Buffer:
        """Count bytes that only some data need, for as long as the result is referenced; a real machine reserves no bytes."""

    def scale_sums(self, buffer: Buffer, additive: AdditivePart, factor: int, *, divide: bool) -> None:
        """Multiply, or divide, the entries of a running value that are sums."""

    def count_strips(self, program: Program, *, num_run: int, num_skipped: int) -> None:
        """Add strips with this program to the statistics of the pass."""


@dataclass(frozen=True, slots=True)
class StripPolicy:
    """Policy under which every strip runs."""

    #: True if the policy may leave strips out
    skips: ClassVar[bool] = False

    def select_forward(self, machine: Machine, segment: TiledLayout, values: ValueBindings, sweep: Sweep) -> StripSelection:
        """Strips that a forward sweep runs; each one left out equals the strip before it."""
        return ALL_STRIPS

    def select_backward(
        self, machine: Machine, segment: TiledLayout, grads: Gradients, sweep: Sweep, forward: StripSelection
    ) -> StripSelection:
        """Strips that a backward sweep runs; each one left out equals the strip after it.

        Args:
            machine: runs the sweep.
            segment: the segment.
            grads: gradients of the segment's outputs.
            sweep: the sweep.
            forward: selection of the forward sweep.
        """
        return ALL_STRIPS

    def weighted(
        self, run: SweepRun, segment: TiledLayout, index: int, program: Program, bindings: Mapping[Port, Buffer], weight: int
    ) -> AbstractContextManager[None]:
        """Context in which the program of strip ``index`` runs, so that it counts ``weight`` times."""
        return nullcontext()

    def skip(self, machine: Machine, program: Program) -> None:
        """Record that a strip with this program was left out."""

    def selection_bytes(self, segment: TiledLayout, sweep: Sweep, *, backward: bool) -> int:
        """Peak of the device's bytes while the strips of a sweep are selected."""
        return 0

    def separate_grad_bytes(self, segment: TiledLayout, programs: list[Program]) -> IntArray:
        """Bytes that each of these backward programs, one for each strip signature, may need for gradients of its own."""
        return np.zeros(len(programs), dtype=np.int64)


#: The default policy.
RUN_ALL_STRIPS = StripPolicy()
