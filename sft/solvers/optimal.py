"""Strategy ``optimal``: the fastest persistent recomputation inside a byte budget, with the real sizes of every stage.

Source: Butt, "Precise, optimal checkpointing", thesis, Algorithm 3.4, extended by stages whose backward needs more than the input, as in
Beaumont, Herrmann et al., RR-9302, 2019. ``C(i, j, m)`` is the least time to reverse the stages ``i+1..j`` with ``m`` bytes, ``x_i`` not
counted, ``y_j`` counted (whoever is called frees it):

    C(i, j, m) = min( min over k: uF(i+1..k) + C(k, j, m - |x_k|) + C(i, k, m),
                      uF(i+1) + uB(i+1) + C(i+1, j, m - |x_{i+1}| - |s_{i+1}|) )

with an infinite term where a forward or backward on the way does not fit: forwards to ``k`` need ``|y_j|``, two neighbouring activations
and the workspace. ``P(i, m)`` is the same for the first pass, in which ``y_n`` does not exist until the loss. Any number of recomputations
comes out of the nesting. Butt also tracks the peak of each solution; that a solution fits ``m`` is all that is used of it, and is what
``C`` being finite says.

*Optimal* means among persistent schedules (see `reversal`); a schedule that drops a checkpoint before its backward can be faster, rarely.
Memory goes in buckets, all sizes rounded up, so a plan never holds more than it says. Complexity: O(n^3 M) time in vectors of length M
(the number of buckets), O(n^2 M) memory; parts of equal stages are solved once.
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
    """The fastest persistent schedule.

    Args:
        chain: the chain; alternatives are not used.
        budget_bytes: most bytes on the device, weights included.
        host_budget_bytes: not used: nothing goes to the host.
        link: not used.
        bucket_bytes: what memory is counted in; by default a 2000th of the budget.

    Raises:
        BudgetError: even the persistent schedule of least memory does not fit.
    """
    room = budget_bytes - chain.resident_bytes - chain.input_bytes
    least = MinMemorySchedule(chain)
    if least.first_pass_bytes(0) > room:
        raise budget_error("optimal", budget_bytes, least.first_pass_bytes(0) + chain.resident_bytes + chain.input_bytes)
    bucket = bucket_bytes or max(1, -(-room // _NUM_BUCKETS))
    table = CostTable(chain, num_buckets=room // bucket, bucket_bytes=bucket, with_loss=True)
    fitting = math.isfinite(table.first_pass_seconds(room // bucket))
    # Rounding up can hide that a tight budget suffices: then the schedule of least memory is what there is.
    operations = reversal(chain, table.decide, room // bucket) if fitting else reversal(chain, least.decide)
    schedule = Schedule(strategy="optimal", operations=operations)
    if simulate(chain, schedule).peak_bytes > budget_bytes:
        raise InternalError(f"the optimal schedule of {chain.num_stages} stages holds more than its budget of {budget_bytes} bytes")
    return schedule


class CostTable:
    """``C`` and, if wanted, ``P`` for all parts of a chain and all numbers of buckets up to ``num_buckets``."""

    def __init__(self, chain: StageChain, *, num_buckets: int, bucket_bytes: int, with_loss: bool) -> None:
        self.chain, self.bucket_bytes, self.num_buckets = chain, bucket_bytes, max(0, num_buckets)
        self._needs = _OperationMemory(chain, bucket_bytes)
        n, width = chain.num_stages, self.num_buckets + 1
        self._levels = np.arange(width)
        # The tables are touched only where i < j; the operating system hands out the rest of these pages never.
        self._cost = np.empty((n + 1, n + 1, width))  # [i, k]: C(i, k, m)
        self._behind = np.empty((n + 1, n + 1, width))  # [j, k]: C(k, j, m - |x_k|)
        self._choice = np.empty((n + 1, n + 1, width), dtype=np.int16)
        self._first: list[_Vector] = []
        self._first_choice = np.zeros((n + 1, width), dtype=np.int16)
        self._solve_parts()
        if with_loss:
            self._solve_first_pass()

    def seconds(self, i: int, j: int, num_buckets: int) -> float:
        """``C(i, j, m)``; infinite if it cannot be done."""
        return float(self._cost[i, j, num_buckets])

    def row(self, i: int, j: int) -> _Vector:
        """``C(i, j, m)`` for every number of buckets."""
        row: _Vector = self._cost[i, j]
        return row

    def first_pass_row(self, i: int) -> _Vector:
        """``P(i, m)`` for every number of buckets."""
        return self._first[i]

    def curve(self, i: int, j: int) -> list[tuple[int, float]]:
        """Where ``C(i, j, m)`` falls: (buckets, seconds), from the smallest number that works on."""
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
        """The operations behind ``C(i, j, m)``."""
        return segment_reversal(self.chain, i, j, self.decide, num_buckets)

    def _at_least(self, row: _Vector, num_buckets: int) -> _Vector:
        row[:num_buckets] = np.inf
        return row

    def _shifted(self, row: _Vector, num_buckets: int) -> _Vector:
        """The row with so many buckets less to spend."""
        out = np.full(self.num_buckets + 1, np.inf)
        if num_buckets <= self.num_buckets:
            out[num_buckets:] = row[: self.num_buckets + 1 - num_buckets]
        return out

    def _solve_parts(self) -> None:
        chain, needs, n = self.chain, self._needs, self.chain.num_stages
        classes = stage_classes(chain)
        same: dict[tuple[Any, ...], tuple[int, int]] = {}
        part: dict[tuple[int, int], int] = {}  # equal numbers: equal stages, with an equal gradient at their start
        numbers: dict[tuple[int, int], int] = {}
        for i in range(n - 1, -1, -1):
            for j in range(i + 1, n + 1):
                before = -1 - chain.grad_bytes(i) if j == i + 1 else part[i, j - 1]
                part[i, j] = numbers.setdefault((before, classes[j - 1]), len(numbers))
                twin = same.setdefault((part[i, j],), (i, j))
                if twin == (i, j):
                    self._solve_part(i, j)
                else:
                    self._cost[i, j] = self._cost[twin]
                    self._choice[i, j] = self._choice[twin] + (i - twin[0])
                self._behind[j, i] = self._shifted(self._cost[i, j], needs.activation[i])

    def _solve_part(self, i: int, j: int) -> None:
        needs, stage = self._needs, self.chain.stage(i + 1)
        row = self._cost[i, j]
        self._choice[i, j] = i
        if j == i + 1:
            row[:] = stage.backward_seconds + (0.0 if stage.is_light else stage.forward_seconds)
            self._at_least(row, needs.leaf(j))
            return
        keep = self._shifted(self._cost[i + 1, j], needs.kept[i + 1])
        keep += stage.forward_seconds + stage.backward_seconds
        row[:] = self._at_least(keep, needs.keeping(i + 1, j))
        advance = self._behind[j, i + 1 : j] + self._cost[i, i + 1 : j]
        advance += self._forward_seconds[i + 1 : j, None] - self._forward_seconds[i]
        advance[self._levels < needs.advancing(i, j)[:, None]] = np.inf
        best = advance.argmin(axis=0)
        value = advance[best, self._levels]
        better = value < row
        row[better] = value[better]
        self._choice[i, j][better] = best[better] + i + 1

    def _solve_first_pass(self) -> None:
        needs, n = self._needs, self.chain.num_stages
        rows: list[_Vector] = [np.zeros(0)] * (n + 1)
        rows[n] = self._at_least(np.zeros(self.num_buckets + 1), needs.grad[n])
        for i in range(n - 1, -1, -1):
            stage = self.chain.stage(i + 1)
            row = self._shifted(rows[i + 1], needs.kept[i + 1]) + (stage.forward_seconds + stage.backward_seconds)
            self._at_least(row, max(needs.making(i + 1), needs.returning(i + 1)))
            self._first_choice[i] = i
            advancing = needs.advancing(i, n + 1)
            for k in range(i + 1, n + 1):
                value = self._shifted(rows[k], needs.activation[k]) + self._cost[i, k]
                value += self._forward_seconds[k] - self._forward_seconds[i]
                self._at_least(value, int(advancing[k - i - 1]))
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
    """What single operations need, in buckets, beside ``x_i`` of the part that they belong to."""

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

    def making(self, i: int) -> int:
        """A forward that keeps everything."""
        return self.kept[i] + self.forward_workspace[i]

    def returning(self, i: int) -> int:
        """The backward of a kept stage."""
        return self.grad[i] + self.grad[i - 1] + self.saved[i] + self._output_read[i] + self.backward_workspace[i]

    def leaf(self, i: int) -> int:
        """Reversing one stage."""
        return self.returning(i) if self._light[i] else max(self.grad[i] + self.making(i), self.returning(i))

    def keeping(self, i: int, j: int) -> int:
        """Beginning the part that ends at ``j`` by keeping stage ``i``."""
        return max(self.grad[j] + self.making(i), self.returning(i))

    def advancing(self, i: int, j: int) -> npt.NDArray[np.int64]:
        """For each ``k`` of ``i+1..j-1`` the forwards from ``i`` to ``k``, with ``y_j`` held (none if ``j`` is behind the last stage)."""
        held = self.grad[j] if j < len(self.grad) else 0
        return self._reach[i][: j - 1 - i] + held

    def _forwards_from(self, i: int) -> npt.NDArray[np.int64]:
        steps = [
            self.activation[k] + self.forward_workspace[k] + (self.activation[k - 1] if k > i + 1 else 0)
            for k in range(i + 1, len(self.activation))
        ]
        return np.maximum.accumulate(np.array(steps, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _MinMemoryEntry:
    num_bytes: int
    k: int


class MinMemorySchedule:
    """The persistent schedule of least memory, whatever its time, to the byte: the same recursion with the peak as its value. O(n^3)."""

    def __init__(self, chain: StageChain) -> None:
        self._needs = needs = _OperationMemory(chain, 1)
        n = chain.num_stages
        self._parts: dict[tuple[int, int], _MinMemoryEntry] = {}
        self._first: dict[int, _MinMemoryEntry] = {n: _MinMemoryEntry(needs.grad[n], n)}
        least = np.zeros((n + 1, n + 1), dtype=np.int64)
        sizes = np.array(needs.activation, dtype=np.int64)
        for i in range(n - 1, -1, -1):
            least[i, i + 1] = needs.leaf(i + 1)
            for j in range(i + 2, n + 1):
                keep = max(needs.keeping(i + 1, j), needs.kept[i + 1] + int(least[i + 1, j]))
                advance = np.maximum(np.maximum(needs.advancing(i, j), sizes[i + 1 : j] + least[i + 1 : j, j]), least[i, i + 1 : j])
                k = int(advance.argmin())
                self._parts[i, j] = _MinMemoryEntry(keep, i) if keep <= advance[k] else _MinMemoryEntry(int(advance[k]), i + 1 + k)
                least[i, j] = self._parts[i, j].num_bytes
            choices = [
                _MinMemoryEntry(max(needs.making(i + 1), needs.returning(i + 1), needs.kept[i + 1] + self._first[i + 1].num_bytes), i)
            ]
            advancing = needs.advancing(i, n + 1)
            for k in range(i + 1, n + 1):
                peak = max(int(advancing[k - i - 1]), needs.activation[k] + self._first[k].num_bytes, int(least[i, k]))
                choices.append(_MinMemoryEntry(peak, k))
            self._first[i] = min(choices, key=lambda choice: choice.num_bytes)

    def first_pass_bytes(self, i: int) -> int:
        """Least bytes for everything behind ``x_i``, which is not counted."""
        return self._first[i].num_bytes

    def decide(self, i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        """The decision for `reversal`."""
        return (self._first[i] if pending else self._parts[i, j]).k, 0, 0
