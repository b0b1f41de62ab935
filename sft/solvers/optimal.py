"""Strategy ``optimal``: the fastest persistent recomputation within a byte budget, with the real sizes of every stage.

Source: Butt, "Precise, optimal checkpointing", thesis, Algorithm 3.4, extended by stages with a backward that reads more than the input, as
in Beaumont, Herrmann et al., RR-9302, 2019. ``C(i, j, m)`` is the least time to reverse the stages ``i+1..j`` with ``m`` bytes. ``x_i`` is
not counted, ``y_j`` is counted and freed:

    C(i, j, m) = min( min over k: uF(i+1..k) + C(k, j, m - |x_k|) + C(i, k, m),
                      uF(i+1) + uB(i+1) + C(i+1, j, m - |x_{i+1}| - |s_{i+1}|) )

A term is infinite if one of its forwards or backwards does not fit: forwards to ``k`` need ``|y_j|``, two neighbouring activations and the
workspace. ``P(i, m)`` is the same for the first pass, in which ``y_n`` does not exist until the loss. Repeated recomputation follows from
the nesting. Butt also tracks the peak of each solution; it is used only to know that a solution fits ``m``, which a finite ``C`` implies.

*Optimal* means among persistent schedules (see `reversal`); a schedule that drops a checkpoint before its backward can be faster, rarely.
Memory is counted in buckets, all sizes rounded up, so a plan never exceeds its stated memory. Complexity: O(n^3 M) time in vectors of
length M (the number of buckets), O(n^2 M) memory; spans of equal stages are solved once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import InternalError
from sft.solvers.chain import HostLink, StageChain, stage_classes
from sft.solvers.reversal import reversal, segment_reversal
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.simulate import simulate
from sft.solvers.solver import budget_error

__all__ = ["CostTable", "MinMemorySchedule", "solve_optimal"]

_NUM_BUCKETS = 2000

_Vector = npt.NDArray[np.float64]


def solve_optimal(
    chain: StageChain,
    *,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    link: HostLink | None = None,
    bucket_bytes: int | None = None,
) -> Schedule:
    """Fastest persistent schedule.

    Args:
        chain: the chain; alternatives are not used.
        budget_bytes: most bytes on the device, including weights.
        host_budget_bytes: unused: no values leave for the host.
        link: unused.
        bucket_bytes: unit of memory. Default: `None`, a 2000th of the budget

    Raises:
        BudgetError: even the persistent schedule of least memory does not fit.
    """
    room_bytes = budget_bytes - chain.resident_bytes - chain.input_bytes
    min_memory = MinMemorySchedule(chain)
    if min_memory.first_pass_bytes(0) > room_bytes:
        raise budget_error("optimal", budget_bytes, min_memory.first_pass_bytes(0) + chain.resident_bytes + chain.input_bytes)
    bucket = bucket_bytes or max(1, -(-room_bytes // _NUM_BUCKETS))
    table = CostTable(chain, num_buckets=room_bytes // bucket, bucket_bytes=bucket)
    fitting = math.isfinite(table.first_pass_seconds(room_bytes // bucket))
    # Rounding up can hide that a tight budget suffices; then the schedule of least memory is taken.
    operations = reversal(chain, table.decide, room_bytes // bucket) if fitting else reversal(chain, min_memory.decide)
    schedule = Schedule(strategy="optimal", operations=operations)
    if simulate(chain, schedule).peak_bytes > budget_bytes:
        raise InternalError(f"the optimal schedule of {chain.num_stages} stages exceeds its budget of {budget_bytes} bytes")
    return schedule


class CostTable:
    """``C`` and ``P`` for all spans of a chain and all numbers of buckets up to ``num_buckets``."""

    def __init__(self, chain: StageChain, *, num_buckets: int, bucket_bytes: int) -> None:
        self.chain, self.bucket_bytes, self.num_buckets = chain, bucket_bytes, max(0, num_buckets)
        self._needs = _OperationMemory(chain, bucket_bytes)
        n, width = chain.num_stages, self.num_buckets + 1
        self._levels = np.arange(width)
        # The tables are touched only for i < j; untouched pages take no memory.
        self._cost = np.empty((n + 1, n + 1, width))  # [i, k]: C(i, k, m)
        self._shifted_cost = np.empty((n + 1, n + 1, width))  # [j, k]: C(k, j, m - |x_k|)
        self._choice = np.empty((n + 1, n + 1, width), dtype=np.int16)
        self._first: list[_Vector] = []
        self._first_choice = np.zeros((n + 1, width), dtype=np.int16)
        self._solve_spans()
        self._solve_first_pass()

    def seconds(self, i: int, j: int, num_buckets: int) -> float:
        """``C(i, j, m)``; infinite if no schedule fits."""
        return float(self._cost[i, j, num_buckets])

    def row(self, i: int, j: int) -> _Vector:
        """``C(i, j, m)`` for every number of buckets."""
        row: _Vector = self._cost[i, j]
        return row

    def first_pass_row(self, i: int) -> _Vector:
        """``P(i, m)`` for every number of buckets."""
        return self._first[i]

    def curve(self, i: int, j: int) -> list[tuple[int, float]]:
        """Steps of ``C(i, j, m)``: (buckets, seconds), from the smallest number of buckets that works."""
        row = self._cost[i, j]
        steps = np.flatnonzero(np.isfinite(row) & (np.concatenate(([np.inf], row[:-1])) > row))
        return [(int(m), float(row[m])) for m in steps]

    def first_pass_seconds(self, num_buckets: int) -> float:
        """``P(0, m)``."""
        return float(self._first[0][num_buckets])

    def decide(self, i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        """The decision for `reversal`, with the number of buckets as state."""
        k = int(self._first_choice[i, state] if pending else self._choice[i, j, state])
        if k == i:
            return k, state - self._needs.kept[i + 1], 0
        return k, state - self._needs.activation[k], state

    def operations(self, i: int, j: int, num_buckets: int) -> tuple[Operation, ...]:
        """The operations of ``C(i, j, m)``."""
        return segment_reversal(self.chain, i, j, self.decide, num_buckets)

    def _at_least(self, row: _Vector, num_buckets: int) -> _Vector:
        """The row, infinite below a number of buckets."""
        row[:num_buckets] = np.inf
        return row

    def _shifted(self, row: _Vector, num_buckets: int) -> _Vector:
        """The row with so many buckets less available."""
        out = np.full(self.num_buckets + 1, np.inf)
        if num_buckets <= self.num_buckets:
            out[num_buckets:] = row[: self.num_buckets + 1 - num_buckets]
        return out

    def _solve_spans(self) -> None:
        """Solve all spans, each class of equal spans once."""
        chain, needs, n = self.chain, self._needs, self.chain.num_stages
        classes = stage_classes(chain)
        first_span: dict[tuple[Any, ...], tuple[int, int]] = {}
        span: dict[tuple[int, int], int] = {}  # equal numbers: equal stages, with an equal gradient at their start
        numbers: dict[tuple[int, int], int] = {}
        for i in range(n - 1, -1, -1):
            for j in range(i + 1, n + 1):
                prefix = -1 - chain.grad_bytes(i) if j == i + 1 else span[i, j - 1]
                span[i, j] = numbers.setdefault((prefix, classes[j - 1]), len(numbers))
                equal = first_span.setdefault((span[i, j],), (i, j))
                if equal == (i, j):
                    self._solve_span(i, j)
                else:
                    self._cost[i, j] = self._cost[equal]
                    self._choice[i, j] = self._choice[equal] + (i - equal[0])
                self._shifted_cost[j, i] = self._shifted(self._cost[i, j], needs.activation[i])

    def _solve_span(self, i: int, j: int) -> None:
        """Solve one span from its sub-spans."""
        needs, stage = self._needs, self.chain.stage(i + 1)
        row = self._cost[i, j]
        self._choice[i, j] = i
        if j == i + 1:
            row[:] = stage.backward_seconds + (0.0 if stage.is_light else stage.forward_seconds)
            self._at_least(row, needs.single_stage(j))
            return
        keep = self._shifted(self._cost[i + 1, j], needs.kept[i + 1])
        keep += stage.forward_seconds + stage.backward_seconds
        row[:] = self._at_least(keep, needs.keep_decision(i + 1, j))
        advance = self._shifted_cost[j, i + 1 : j] + self._cost[i, i + 1 : j]
        advance += self._forward_seconds[i + 1 : j, None] - self._forward_seconds[i]
        advance[self._levels < needs.advance_forwards(i, j)[:, None]] = np.inf
        best = advance.argmin(axis=0)
        value = advance[best, self._levels]
        better = value < row
        row[better] = value[better]
        self._choice[i, j][better] = best[better] + i + 1

    def _solve_first_pass(self) -> None:
        """Solve ``P`` from the end of the chain."""
        needs, n = self._needs, self.chain.num_stages
        rows: list[_Vector] = [np.zeros(0)] * (n + 1)
        rows[n] = self._at_least(np.zeros(self.num_buckets + 1), needs.grad[n])
        for i in range(n - 1, -1, -1):
            stage = self.chain.stage(i + 1)
            row = self._shifted(rows[i + 1], needs.kept[i + 1]) + (stage.forward_seconds + stage.backward_seconds)
            self._at_least(row, max(needs.keeping_forward(i + 1), needs.kept_backward(i + 1)))
            self._first_choice[i] = i
            advance_forwards = needs.advance_forwards(i, n + 1)
            for k in range(i + 1, n + 1):
                value = self._shifted(rows[k], needs.activation[k]) + self._cost[i, k]
                value += self._forward_seconds[k] - self._forward_seconds[i]
                self._at_least(value, int(advance_forwards[k - i - 1]))
                better = value < row
                row[better] = value[better]
                self._first_choice[i][better] = k
            rows[i] = row
        self._first = rows

    @cached_property
    def _forward_seconds(self) -> _Vector:
        """Sums of the forwards of the first stages."""
        return np.cumsum([0.0, *(stage.forward_seconds for stage in self.chain.stages)])


class _OperationMemory:
    """Memory of single operations in buckets, without the ``x_i`` of their span."""

    def __init__(self, chain: StageChain, bucket_bytes: int) -> None:
        def up(num_bytes: int) -> int:
            return -(-num_bytes // bucket_bytes)

        n = chain.num_stages
        self.activation = [up(chain.activation_bytes(i)) for i in range(n + 1)]
        self.grad = [up(chain.grad_bytes(i)) for i in range(n + 1)]
        self.saved = [0, *(up(stage.saved_bytes) for stage in chain.stages)]
        self.forward_workspace = [0, *(up(stage.forward_workspace_bytes) for stage in chain.stages)]
        self.backward_workspace = [0, *(up(stage.backward_workspace_bytes) for stage in chain.stages)]
        self.kept = [0, *(self.activation[i] + self.saved[i] for i in range(1, n + 1))]
        self._output_read = [0, *(self.activation[i] if chain.stage(i).reads_output else 0 for i in range(1, n + 1))]
        self._light = [False, *(stage.is_light for stage in chain.stages)]
        self._reach = [self._forwards_from(i) for i in range(n)]

    def keeping_forward(self, i: int) -> int:
        """A forward that keeps all values."""
        return self.kept[i] + self.forward_workspace[i]

    def kept_backward(self, i: int) -> int:
        """The backward of a kept stage."""
        return self.grad[i] + self.grad[i - 1] + self.saved[i] + self._output_read[i] + self.backward_workspace[i]

    def single_stage(self, i: int) -> int:
        """The reversal of one stage."""
        return self.kept_backward(i) if self._light[i] else max(self.grad[i] + self.keeping_forward(i), self.kept_backward(i))

    def keep_decision(self, i: int, j: int) -> int:
        """The decision to keep stage ``i`` first, in a span that ends at ``j``."""
        return max(self.grad[j] + self.keeping_forward(i), self.kept_backward(i))

    def advance_forwards(self, i: int, j: int) -> npt.NDArray[np.int64]:
        """For each ``k`` of ``i+1..j-1`` the forwards from ``i`` to ``k``, with ``y_j`` present (if ``j <= n``)."""
        grad = self.grad[j] if j < len(self.grad) else 0
        return self._reach[i][: j - 1 - i] + grad

    def _forwards_from(self, i: int) -> npt.NDArray[np.int64]:
        """Running maximum of the memory of the forwards from ``i`` on."""
        sizes = [
            self.activation[k] + self.forward_workspace[k] + (self.activation[k - 1] if k > i + 1 else 0)
            for k in range(i + 1, len(self.activation))
        ]
        return np.maximum.accumulate(np.array(sizes, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _MinMemoryEntry:
    """Peak bytes of a span, and its first decision ``k``."""

    num_bytes: int
    k: int


class MinMemorySchedule:
    """Persistent schedule of least memory, regardless of time, exact to the byte: the same recursion with the peak as its value. O(n^3)."""

    def __init__(self, chain: StageChain) -> None:
        self._needs = needs = _OperationMemory(chain, 1)
        n = chain.num_stages
        self._spans: dict[tuple[int, int], _MinMemoryEntry] = {}
        self._first: dict[int, _MinMemoryEntry] = {n: _MinMemoryEntry(needs.grad[n], n)}
        least = np.zeros((n + 1, n + 1), dtype=np.int64)
        sizes = np.array(needs.activation, dtype=np.int64)
        for i in range(n - 1, -1, -1):
            least[i, i + 1] = needs.single_stage(i + 1)
            for j in range(i + 2, n + 1):
                keep = max(needs.keep_decision(i + 1, j), needs.kept[i + 1] + int(least[i + 1, j]))
                advance = np.maximum(np.maximum(needs.advance_forwards(i, j), sizes[i + 1 : j] + least[i + 1 : j, j]), least[i, i + 1 : j])
                k = int(advance.argmin())
                self._spans[i, j] = _MinMemoryEntry(keep, i) if keep <= advance[k] else _MinMemoryEntry(int(advance[k]), i + 1 + k)
                least[i, j] = self._spans[i, j].num_bytes
            choices = [
                _MinMemoryEntry(
                    max(needs.keeping_forward(i + 1), needs.kept_backward(i + 1), needs.kept[i + 1] + self._first[i + 1].num_bytes), i
                )
            ]
            advance_forwards = needs.advance_forwards(i, n + 1)
            for k in range(i + 1, n + 1):
                peak = max(int(advance_forwards[k - i - 1]), needs.activation[k] + self._first[k].num_bytes, int(least[i, k]))
                choices.append(_MinMemoryEntry(peak, k))
            self._first[i] = min(choices, key=lambda choice: choice.num_bytes)

    def first_pass_bytes(self, i: int) -> int:
        """Least bytes to run all stages after ``x_i``, without ``x_i`` itself."""
        return self._first[i].num_bytes

    def decide(self, i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        """The decision for `reversal`."""
        return (self._first[i] if pending else self._spans[i, j]).k, 0, 0
