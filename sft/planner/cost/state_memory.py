"""How many bytes a run holds for the states of its walks.

In closed form: value ``v`` carries ``c`` rows and gains ``n`` a strip; one state in ``k`` kept holds ``min(c, k n)`` rows that the one
before does not, and a group of ``k`` strips has ``(k - 1) min(c, n)`` more of its own. That takes all strips for those of the middle.
Counted, state by state, is what a walk back holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sft.analysis.tiling.independent_tiles import TileSchedule
from sft.analysis.tiling.strips import StripSchedule
from sft.planner.problem import PlanningProblem
from sft.runtime.analytic_profile import first_block_rows, live_bytes_per_action
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["MAX_RESTORED", "closed_form_rows", "deduplicate_frontiers", "num_restored", "state_shares"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: States are counted where all have no more values than this; where they are held in slots, where there are no more strips than this.
_MAX_COUNTED_VALUES, _MAX_COUNTED_STEPS = 2**17, 512
#: So many values' rows are counted one by one.
_FEW_VALUES = 4
#: Groups of strips that are looked at, from the last one on.
_NUM_GROUPS = 4
#: A strip restored more often than this, on average, is no plan that anybody wants.
MAX_RESTORED = 6.0


def deduplicate_frontiers(schedule: StripSchedule | TileSchedule, names: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    """Frontiers and first rows kept, [row, state], of values that differ in them, and for each value which row is its own."""
    places: dict[tuple[int, int], int] = {}
    pairs: list[tuple[Ints, Ints]] = []
    place_of = np.empty(len(names), dtype=np.int64)
    for number, name in enumerate(names):
        pair = schedule.frontier[name], schedule.kept[name]
        place = place_of[number] = places.setdefault((id(pair[0]), id(pair[1])), len(pairs))
        if place == len(pairs):
            pairs.append(pair)
    if not pairs:
        nothing = np.zeros((0, schedule.num_steps + 1), dtype=np.int64)
        return nothing, nothing, place_of
    return np.stack([front for front, _ in pairs]), np.stack([low for _, low in pairs]), place_of


def closed_form_rows(policies: Sequence[Checkpoints], carried: Floats, gained: Floats, num_steps: Floats, *, training: bool) -> Floats:
    """Rows of values that are held for states, if all strips were as those of the middle, [value, height, policy].

    Args:
        policies: for states.
        carried: rows that each value carries from strip to strip, [value, height].
        gained: rows that it gains a strip, likewise.
        num_steps: strips, [height].
        training: whether states are kept at all.
    """
    every = np.minimum(np.array([policy.every for policy in policies], dtype=np.float64), num_steps[:, None])  # [height, policy]
    slots = np.array([policy.slots for policy in policies])
    spaced = np.minimum(carried[..., None], gained[..., None] * every)
    inner = np.minimum(carried, gained)[..., None] * (every - 1)
    rows = spaced * np.maximum(0, np.ceil(num_steps[:, None] / every) - 1) + inner
    found: Floats = np.where(slots > 0, carried[..., None] * (slots + 1), rows)
    return found if training else np.broadcast_to(carried[..., None] * 2, rows.shape)


# The runs of a network walk images of few heights.
@lru_cache(maxsize=1024)
def num_restored(policies: tuple[Checkpoints, ...], num_steps: int) -> Floats:
    """Of so many strips those that run forward once more to restore states, [policy]."""
    return np.array([policy.num_restored(num_steps) for policy in policies], dtype=np.float64)


def state_shares(
    problem: PlanningProblem, policies: Sequence[Checkpoints], rows: tuple[Ints, Ints, Ints], row_bytes: Ints, carried: Ints, gained: Ints
) -> Floats:
    """Bytes of the states as a walk back counts them, of those of the closed form, [policy]; ones where counting takes too long.

    Args:
        problem: remembers what is counted.
        policies: for states.
        rows: what :func:`deduplicate_frontiers` finds.
        row_bytes: of a row of each value, [value].
        carried: as of :func:`closed_form_rows`, of one height.
        gained: likewise.
    """
    frontier, kept, place_of = rows
    num_steps, shares = frontier.shape[1] - 1, np.ones(len(policies))
    at_once = (carried[:, None].astype(np.float64), gained[:, None].astype(np.float64), np.array([float(num_steps)]))
    closed = row_bytes @ closed_form_rows(policies, *at_once, training=problem.training)[:, 0, :]
    if not problem.training or not len(place_of) or len(place_of) * num_steps > _MAX_COUNTED_VALUES:
        return shares
    # Values whose rows come and go alike are counted as one.
    row_bytes = np.bincount(place_of, weights=row_bytes, minlength=len(frontier)).astype(np.int64)
    # Of few values the rows are counted, which runs of other channels have in common, of many their bytes.
    is_few = len(frontier) <= _FEW_VALUES
    counted, factors = (np.eye(len(frontier), dtype=np.int64), row_bytes) if is_few else (row_bytes[None], np.ones(1, dtype=np.int64))
    key = ("rows of states", frontier.shape, frontier.tobytes(), kept.tobytes(), counted.tobytes(), tuple(policies))
    for index, held in problem.remembered(key, lambda: _held_state_bytes(policies, frontier, kept, counted)).items():
        if closed[index]:
            shares[index] = (factors @ held).max() / closed[index]
    return shares


def _held_state_bytes(policies: Sequence[Checkpoints], frontier: Ints, kept: Ints, row_bytes: Ints) -> dict[int, Ints]:
    """Bytes that are held for states at some moments of a walk, [..., moment], by index of the policy; none that take too long.

    Arguments are arrays of [value, state], and the bytes of a row, [..., value].
    """
    num_steps, begins = frontier.shape[1] - 1, first_block_rows(frontier, kept)
    found: dict[int, Ints] = {}

    def held(states: Iterable[int]) -> Ints:
        at = sorted(states)
        below = np.concatenate([np.zeros((len(frontier), 1), dtype=np.int64), frontier[:, at[:-1]]], axis=1)
        rows: Ints = row_bytes @ (frontier[:, at] - np.maximum(begins[:, at], below)).clip(0).sum(axis=1)
        return rows

    for index, policy in enumerate(policies):
        if not policy.slots:
            # The last group may be short, and at an image's end states become small: groups before it may need more.
            last = (num_steps - 1) // policy.every * policy.every
            ends = [last - behind * policy.every for behind in range(_NUM_GROUPS)] if policy.every > 1 else []
            found[index] = np.stack([held(policy.kept(end)) for end in (num_steps, *ends) if end > 0], axis=-1)
        elif num_steps <= _MAX_COUNTED_STEPS and policy.num_restored(num_steps) <= MAX_RESTORED * num_steps:
            found[index] = live_bytes_per_action(policy, row_bytes, frontier, begins)
    return found
