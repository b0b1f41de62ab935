"""State memory: bytes that a run keeps for the states of its sweeps.

Closed form: value ``v`` carries ``c`` rows and gains ``n`` rows per strip. If one state in ``k`` is kept, it holds ``min(c, k n)`` rows
that the state before does not, and a group of ``k`` strips has ``(k - 1) min(c, n)`` more rows of its own. This assumes that all strips
equal those in the middle of the image. Counting row by row gives what a backward sweep really holds; :func:`state_shares` is the ratio of
the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from sft.analysis.tiling.independent_tiles import TileSchedule
from sft.analysis.tiling.strips import StripSchedule
from sft.common.array_types import FloatArray, IntArray
from sft.planner.problem import PlanningProblem
from sft.planner.search_limits import SearchLimits
from sft.runtime.analytic_profile import first_block_rows, live_bytes_per_action
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["closed_form_rows", "deduplicate_frontiers", "num_restored", "state_shares"]


def deduplicate_frontiers(schedule: StripSchedule | TileSchedule, names: Sequence[str]) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct frontiers and first kept rows, [row, state], and for each value the index of its row."""
    index_of: dict[tuple[int, int], int] = {}
    pairs: list[tuple[IntArray, IntArray]] = []
    row_of = np.empty(len(names), dtype=np.int64)
    for number, name in enumerate(names):
        pair = schedule.frontier[name], schedule.kept[name]
        index = row_of[number] = index_of.setdefault((id(pair[0]), id(pair[1])), len(pairs))
        if index == len(pairs):
            pairs.append(pair)
    if not pairs:
        empty = np.zeros((0, schedule.num_steps + 1), dtype=np.int64)
        return empty, empty, row_of
    return np.stack([frontier for frontier, _ in pairs]), np.stack([kept for _, kept in pairs]), row_of


def closed_form_rows(
    policies: Sequence[Checkpoints], carried: FloatArray, gained: FloatArray, num_steps: FloatArray, *, training: bool
) -> FloatArray:
    """Rows of values kept for states if all strips were as those of the middle, [value, height, policy].

    Args:
        policies: state policies.
        carried: rows that each value carries from strip to strip, [value, height].
        gained: rows that each value gains per strip, [value, height].
        num_steps: strips, [height].
        training: true if states are kept for a backward pass.
    """
    every = np.minimum(np.array([policy.every for policy in policies], dtype=np.float64), num_steps[:, None])  # [height, policy]
    slots = np.array([policy.slots for policy in policies])
    spaced = np.minimum(carried[..., None], gained[..., None] * every)
    inner = np.minimum(carried, gained)[..., None] * (every - 1)
    kept_rows = spaced * np.maximum(0, np.ceil(num_steps[:, None] / every) - 1) + inner
    by_policy: FloatArray = np.where(slots > 0, carried[..., None] * (slots + 1), kept_rows)
    return by_policy if training else np.broadcast_to(carried[..., None] * 2, kept_rows.shape)


# Runs of a network have few distinct heights.
@lru_cache(maxsize=1024)
def num_restored(policies: tuple[Checkpoints, ...], num_steps: int) -> FloatArray:
    """Strips that run forward once more to restore states, [policy]."""
    return np.array([policy.num_restored(num_steps) for policy in policies], dtype=np.float64)


def state_shares(
    problem: PlanningProblem,
    policies: Sequence[Checkpoints],
    rows: tuple[IntArray, IntArray, IntArray],
    row_bytes: IntArray,
    carried: IntArray,
    gained: IntArray,
) -> FloatArray:
    """Ratio of counted to closed-form state bytes, [policy]; ones where counting takes too long.

    Args:
        problem: memoizes the counts.
        policies: state policies.
        rows: result of :func:`deduplicate_frontiers`.
        row_bytes: bytes of a row of each value, [value].
        carried: as in :func:`closed_form_rows`, for one height.
        gained: likewise.
    """
    frontier, kept, row_of = rows
    num_steps, shares = frontier.shape[1] - 1, np.ones(len(policies))
    at_once = (carried[:, None].astype(np.float64), gained[:, None].astype(np.float64), np.array([float(num_steps)]))
    closed = row_bytes @ closed_form_rows(policies, *at_once, training=problem.sized.training)[:, 0, :]
    if not problem.sized.training or not len(row_of) or len(row_of) * num_steps > problem.limits.max_counted_values:
        return shares
    # Values with equal frontiers are counted as one.
    row_bytes = np.bincount(row_of, weights=row_bytes, minlength=len(frontier)).astype(np.int64)
    # For few values rows are counted, which runs with other channel counts share; for many values bytes.
    is_few = len(frontier) <= problem.limits.few_counted_values
    counted, factors = (np.eye(len(frontier), dtype=np.int64), row_bytes) if is_few else (row_bytes[None], np.ones(1, dtype=np.int64))
    key = ("rows of states", frontier.shape, frontier.tobytes(), kept.tobytes(), counted.tobytes(), tuple(policies))
    for index, state_bytes in problem.memo.memoize(
        key, lambda: _live_state_bytes(policies, frontier, kept, counted, problem.limits)
    ).items():
        if closed[index]:
            shares[index] = (factors @ state_bytes).max() / closed[index]
    return shares


def _live_state_bytes(
    policies: Sequence[Checkpoints], frontier: IntArray, kept: IntArray, row_bytes: IntArray, limits: SearchLimits
) -> dict[int, IntArray]:
    """State bytes at some moments of a backward sweep, [..., moment], by index of the policy; policies that take too long are left out.

    Arguments are arrays of [value, state], and the bytes of a row, [..., value].
    """
    num_steps, begins = frontier.shape[1] - 1, first_block_rows(frontier, kept)
    state_bytes: dict[int, IntArray] = {}

    def bytes_of(states: Iterable[int]) -> IntArray:
        at = sorted(states)
        below = np.concatenate([np.zeros((len(frontier), 1), dtype=np.int64), frontier[:, at[:-1]]], axis=1)
        rows: IntArray = row_bytes @ (frontier[:, at] - np.maximum(begins[:, at], below)).clip(0).sum(axis=1)
        return rows

    for index, policy in enumerate(policies):
        if not policy.slots:
            # The last group may be short, and states become small at the end of the image: groups before it may need more bytes.
            last = (num_steps - 1) // policy.every * policy.every
            ends = [last - group * policy.every for group in range(limits.num_counted_groups)] if policy.every > 1 else []
            state_bytes[index] = np.stack([bytes_of(policy.kept(end)) for end in (num_steps, *ends) if end > 0], axis=-1)
        elif num_steps <= limits.max_counted_strips and policy.num_restored(num_steps) <= limits.max_restored * num_steps:
            state_bytes[index] = live_bytes_per_action(policy, row_bytes, frontier, begins)
    return state_bytes
