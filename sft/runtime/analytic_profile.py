"""Analytic profile: peak bytes and FLOPs of a sweep by array arithmetic, without running it.

The content of the carry cache has a closed form. Let ``F[s]`` be the frontier of a value (rows computed at state ``s``) and ``K[s]`` the
first row that state ``s`` needs. Strip ``s`` appends the block of rows ``[max(K[s+1], F[s]), F[s+1])``. Both grow monotonically, so of the
later states the next kept one, ``j(s) >= s + 1``, needs the most of the block: the block outlives the forward pass iff ``F[s+1] >
K[j(s)]``. Until then it lives as long as the current state needs it, i.e. while ``F[s+1] > K[t+1]`` after strip ``t``. In the backward
pass the retained states form a stack; each adds the blocks between the state below it and itself that it needs.

Other terms:

- the loaders' buffers of an input that is not resident (for a device with its own memory, a copy of the strip);
- the strip of an output on the host or of its gradient while the strip's program runs;
- strips of direct cuts and of their gradients, which leave while the next strip is computed;
- rows of such a gradient that come back from the host to be added, after a strip, while its results and its gradients of inputs are live;
- the bytes that the strip policy reserves. The policy decides on data, so every strip is assumed to run.

The bytes at every event are thus prefix sums. Tests compare them with a sweep on the simulated machine, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sft.common.array_types import BoolArray, IntArray
from sft.lower.program import Program
from sft.runtime.streamed_inputs import (
    SweepDirection,
    grad_buffer_bytes,
    input_buffer_bytes,
    input_grad_bytes,
    input_pixel_bytes,
    returned_bytes,
)
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.tiled_layout import Sweep, TiledLayout

__all__ = ["ProgramRuns", "SweepProfile", "SweepProfiles", "first_block_rows", "live_bytes_per_action", "profile_sweep"]

#: Programs, each with its number of runs.
ProgramRuns = tuple[tuple[Program, int], ...]
#: Maximum number of state pairs in a table over all values.
_MAX_PAIRS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProfile:
    """Cost of one sweep; bytes count above those that are live before it.

    Attributes:
        forward_peak_bytes: peak of the forward sweep, carried blocks included.
        store_bytes: carried blocks that remain after the forward sweep.
        backward_peak_bytes: peak of the backward sweep, including the carried blocks at its start and, where these did not remain, the
            sweep that restores them.
        forward_flops: FLOPs of the forward sweep.
        backward_flops: FLOPs of the backward sweep, restored strips included.
        forward_runs: programs of the forward sweep.
        backward_runs: programs of the backward sweep, restored strips included.
    """

    forward_peak_bytes: int
    store_bytes: int
    backward_peak_bytes: int
    forward_flops: int
    backward_flops: int
    forward_runs: ProgramRuns = ()
    backward_runs: ProgramRuns = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SweepRows:
    """Rows and carried blocks of one sweep, the common part of its forward and backward profile.

    Attributes:
        first: first strip of each signature.
        kinds: number of the signature of each strip.
        has_grad: for each carried value, true if it has a gradient.
        frontier: rows computed at each state, [value, state].
        kept: first row that each state needs, [value, state].
        row_bytes: bytes of a row of each value.
        blocks: bytes of the block that each strip appends, [value, strip].
        states: states that the forward pass keeps.
        lasting: bytes of the blocks that these states need, [value, strip].
    """

    first: IntArray
    kinds: IntArray
    has_grad: BoolArray
    frontier: IntArray
    kept: IntArray
    row_bytes: IntArray
    blocks: IntArray
    states: IntArray
    lasting: IntArray

    @classmethod
    def of(cls, segment: TiledLayout, sweep: Sweep, *, keep: bool) -> _SweepRows:
        """The rows of a sweep; ``keep`` is true if a backward pass follows."""
        schedule, scope = segment.schedule, segment.scope
        num_steps = schedule.num_steps
        names = [name for name in schedule.names if name not in schedule.sources and name in scope.streamed]
        frontier, kept = (_stack_rows([array[name] for name in names], num_steps + 1) for array in (schedule.frontier, schedule.kept))
        row_bytes = np.array([segment.row_bytes(name, sweep) for name in names], dtype=np.int64)
        blocks = row_bytes[:, None] * (frontier[:, 1:] - np.maximum(kept[:, 1:], frontier[:, :-1])).clip(0)
        states = np.array(sorted(segment.checkpoints.kept(num_steps))) if keep else np.array([], dtype=np.int64)
        first, kinds = schedule.kinds
        return cls(
            first=first,
            kinds=kinds,
            has_grad=np.array([name in scope.requires_grad for name in names], dtype=bool),
            frontier=frontier,
            kept=kept,
            row_bytes=row_bytes,
            blocks=blocks,
            states=states,
            lasting=blocks * _is_needed_later(frontier, kept, states, num_steps),
        )

    def runs(self, programs: Sequence[Program]) -> ProgramRuns:
        """Programs, one for each signature, with their numbers of strips."""
        return tuple(zip(programs, np.bincount(self.kinds, minlength=len(self.first)).tolist(), strict=True))

    def flops(self, programs: Sequence[Program]) -> int:
        """FLOPs of all strips."""
        return int(np.array([program.flops for program in programs])[self.kinds].sum())


def profile_sweep(
    segment: TiledLayout,
    sweep: Sweep,
    *,
    keep: bool,
    differentiate: bool,
    on_host: bool = True,
) -> SweepProfile:
    """Project one sweep of a segment.

    Args:
        segment: the segment; a program of each strip signature is lowered.
        sweep: the sweep.
        keep: True if a backward pass follows.
        differentiate: True if that backward pass runs this segment.
        on_host: True if the device's memory is the host's, so that the loaders' buffers count.
    """
    rows = _SweepRows.of(segment, sweep, keep=keep)
    programs = [segment.program("forward", int(step), sweep) for step in rows.first]
    peaks = np.array([program.peak_bytes + segment.host_strip_bytes(program) for program in programs])[rows.kinds]
    peaks[1:] += np.array([segment.direct_strip_bytes(program) for program in programs])[rows.kinds][:-1]
    stays = rows.lasting if segment.keeps_states(sweep) else np.zeros_like(rows.lasting)
    before = _live_bytes_before(rows.frontier, rows.kept, rows.blocks, stays)
    read = input_buffer_bytes(segment, "forward", sweep, on_host=on_host)
    selection_bytes = segment.strip_policy.selection_bytes(segment, sweep, backward=False)
    backward_peak, backward_flops = 0, 0
    backward_runs: ProgramRuns = ()
    if differentiate:
        backward_peak, backward_flops, backward_runs = _profile_backward(segment, sweep, rows, on_host=on_host)
        if not segment.keeps_states(sweep):  # the sweep that restores them selects its strips again
            backward_peak = max(backward_peak, selection_bytes)
    pixels = _pixel_bytes(segment, "forward", sweep, on_host=on_host)
    sweep_peak = int((before + read + np.maximum(pixels[:-1], peaks + pixels[1:])).max())
    return SweepProfile(
        forward_peak_bytes=max(sweep_peak, selection_bytes),
        store_bytes=int(stays.sum()),
        backward_peak_bytes=backward_peak,
        forward_flops=rows.flops(programs),
        backward_flops=backward_flops,
        forward_runs=rows.runs(programs),
        backward_runs=backward_runs,
    )


def _profile_backward(segment: TiledLayout, sweep: Sweep, rows: _SweepRows, *, on_host: bool) -> tuple[int, int, ProgramRuns]:
    """Peak bytes, FLOPs and programs of the backward sweep, restored strips included."""
    kinds, checkpoints, num_steps = rows.kinds, segment.checkpoints, segment.schedule.num_steps
    programs = [segment.program("joint", int(step), sweep) for step in rows.first]
    flops, runs = rows.flops(programs), list(rows.runs(programs))

    def restore(strips: IntArray, alive: IntArray) -> int:
        """Peak of strips that run forward to restore carried rows; counts their FLOPs and runs."""
        nonlocal flops
        restoring = {int(k): segment.program("restore", int(rows.first[k]), sweep) for k in np.unique(kinds[strips])}
        flops += sum(restoring[int(k)].flops for k in kinds[strips])
        runs.extend((program, int((kinds[strips] == kind).sum())) for kind, program in restoring.items())
        return int((alive + np.array([restoring[int(k)].peak_bytes for k in kinds[strips]])).max(initial=0))

    joint_peaks = np.array([program.peak_bytes + segment.host_strip_bytes(program) for program in programs])[kinds]
    joint_peaks += segment.strip_policy.separate_grad_bytes(segment, programs)[kinds]
    sink_grads = input_grad_bytes(segment, "joint", np.arange(num_steps), sweep)
    joint_peaks += sink_grads
    sums = np.array([sum(program.result_bytes.values()) for program in programs])[kinds] + sink_grads
    sums += returned_bytes(segment, np.arange(num_steps), sweep)
    actions = checkpoints.actions(num_steps)
    strip = np.array([action.strip for action in actions])
    is_joint = np.array([action.kind == "joint" for action in actions])
    begins = first_block_rows(rows.frontier, rows.kept)
    alive = live_bytes_per_action(checkpoints, rows.row_bytes, rows.frontier, begins)
    selection_peak = int(alive[0]) + segment.strip_policy.selection_bytes(segment, sweep, backward=True)
    # The carried gradient at an action is that of the state after which all strips are differentiated.
    gradients = (rows.row_bytes[rows.has_grad, None] * (rows.frontier - rows.kept)[rows.has_grad]).sum(0)
    done = np.concatenate([[num_steps], np.minimum.accumulate(np.where(is_joint, strip, num_steps))[:-1]])
    pixels = _pixel_bytes(segment, "backward", sweep, on_host=on_host)
    alive += input_buffer_bytes(segment, "backward", sweep, on_host=on_host) + grad_buffer_bytes(segment, sweep) + pixels[1:]
    sums_peak = int((alive[is_joint] + sums[strip[is_joint]]).max())
    leaving = input_grad_bytes(segment, "joint", np.arange(num_steps), sweep, segment.from_source & segment.direct)
    alive += gradients[done] + np.append(leaving, 0)[done]
    selection_peak = max(selection_peak, int((alive - np.diff(pixels)).max()))
    peak = max(selection_peak, sums_peak, int((alive[is_joint] + joint_peaks[strip[is_joint]]).max()))
    peak = max(peak, restore(strip[~is_joint], alive[~is_joint]))
    if not segment.keeps_states(sweep):
        again = np.arange(rows.states.max())
        before = _live_bytes_before(rows.frontier, rows.kept, rows.blocks, rows.lasting)[again]
        before += input_buffer_bytes(segment, "restore", sweep, on_host=on_host)
        pixels = _pixel_bytes(segment, "restore", sweep, on_host=on_host)
        peak = max(peak, restore(again, before + pixels[1:]), int((before + pixels[:-1]).max(initial=0)))
    return peak, flops, tuple(runs)


def _pixel_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep, *, on_host: bool) -> IntArray:
    """Bytes for pixels before each strip of a sweep and after the last one: :func:`input_pixel_bytes`, none on the host."""
    pixels = input_pixel_bytes(segment, direction, sweep)
    return np.zeros_like(pixels) if on_host else pixels


@dataclass(frozen=True, slots=True)
class SweepProfiles:
    """Profiles of a segment's sweeps, cached in the segment; sweeps of one geometry share one.

    Attributes: as the arguments of :func:`profile_sweep`.
    """

    segment: TiledLayout
    keep: bool
    differentiate: bool
    on_host: bool = True

    def __getitem__(self, sweep: Sweep) -> SweepProfile:
        segment, options = self.segment, (self.keep, self.differentiate, self.on_host)
        key = (*options, len(sweep.chunk), segment.panel_kinds[sweep.panel], segment.keeps_states(sweep))
        profile: SweepProfile | None = segment.profiles.get(key)
        if profile is None:
            profile = profile_sweep(segment, sweep, keep=self.keep, differentiate=self.differentiate, on_host=self.on_host)
            segment.profiles[key] = profile
        return profile


def first_block_rows(frontier: IntArray, kept: IntArray) -> IntArray:
    """First row of the cached blocks of each state, [value, state]; a state retains complete blocks.

    Args:
        frontier: rows computed at each state, [value, state].
        kept: first row that the state needs, [value, state].
    """
    first_rows = frontier.copy()
    states = np.arange(frontier.shape[1])
    for row, front, low in zip(first_rows, frontier, kept, strict=True):
        since = np.searchsorted(front[1:], low, side="right")
        needs = since < states
        first = since[needs]
        row[needs] = np.maximum(low[first + 1], front[first])
    return first_rows


def _stack_rows(rows: list[IntArray], length: int) -> IntArray:
    """Array with a row for each value; a segment that only reduces its source has none."""
    return np.stack(rows) if rows else np.zeros((0, length), dtype=np.int64)


def _is_needed_later(frontier: IntArray, kept: IntArray, states: IntArray, num_steps: int) -> BoolArray:
    """For each value and strip, True if the next kept state needs the strip's block."""
    following = np.searchsorted(states, np.arange(1, num_steps + 1))
    exists = following < len(states)
    if not len(states):
        return np.zeros((frontier.shape[0], num_steps), dtype=bool)
    state = states[np.minimum(following, len(states) - 1)]
    return exists[None, :] & (frontier[:, 1:] > kept[:, state])


def _live_bytes_before(frontier: IntArray, kept: IntArray, blocks: IntArray, lasting: IntArray) -> IntArray:
    """Bytes in the carry cache before each strip of the forward sweep."""
    num_steps = blocks.shape[1]
    total = np.zeros(num_steps, dtype=np.int64)
    steps = np.arange(1, num_steps + 1)
    for front, low, block_bytes, lasting_bytes in zip(frontier, kept, blocks, lasting, strict=True):
        appended = np.concatenate([[0], np.cumsum(block_bytes)])
        permanent = np.concatenate([[0], np.cumsum(lasting_bytes)])
        # The current state needs the blocks from `since` on.
        since = np.minimum(np.searchsorted(front[1:], low[1:], side="right"), steps)
        total += permanent[since] + appended[steps] - appended[since]
    return np.concatenate([[0], total[:-1]])


def live_bytes_per_action(checkpoints: Checkpoints, row_bytes: IntArray, frontier: IntArray, begins: IntArray) -> IntArray:
    """Bytes in the carry cache before each action of the backward sweep, [..., action].

    Args:
        checkpoints: policy that selects the retained states.
        row_bytes: bytes of a row of each value, [..., value].
        frontier: rows computed at each state, [value, state].
        begins: result of :func:`first_block_rows`.
    """
    num_actions, at, sign, below_states, above = _state_changes(checkpoints, frontier.shape[1] - 1)
    sizes = [
        row_bytes @ (frontier[:, state] - np.maximum(begins[:, state], frontier[:, below])).clip(0)
        for below, state in zip(_chunks(below_states), _chunks(above), strict=True)
    ]
    change = np.zeros((*row_bytes.shape[:-1], num_actions + 1), dtype=np.int64)
    np.add.at(change.T, at, (sign * np.concatenate(sizes, axis=-1)).T)
    live: IntArray = np.cumsum(change, axis=-1)[..., :-1]
    return live


# Segments of a plan, and the strip heights of a survey, have few distinct numbers of strips.
@lru_cache(maxsize=64)
def _state_changes(checkpoints: Checkpoints, num_strips: int) -> tuple[int, IntArray, IntArray, IntArray, IntArray]:
    """Changes of the retained states in a backward sweep.

    Retained states form a stack. State ``h`` adds to the state below it, ``g``, those blocks of strips ``g..h-1`` that it needs. Every
    action therefore adds or removes a few such pairs.

    Returns:
        The number of actions, and for each change: the number of actions before it, +1 (added) or -1 (removed), ``g``, ``h``.
    """
    stack = sorted(checkpoints.kept(num_strips))
    actions = checkpoints.actions(num_strips)
    pairs = [(0, +1, below, state) for below, state in pairwise([0, *stack])]
    for event, action in enumerate(actions, start=1):
        strip = action.strip
        if action.kind == "joint":
            stack.pop()
            pairs.append((event, -1, stack[-1] if stack else 0, strip))
        elif action.drops:
            stack[-1] = strip + 1
            pairs += [(event, -1, stack[-2], strip), (event, +1, stack[-2], strip + 1)]
        else:
            stack.append(strip + 1)
            pairs.append((event, +1, strip, strip + 1))
    at, sign, below, above = np.array(pairs, dtype=np.int64).T
    return len(actions), at, sign, below, above


def _chunks(indices: IntArray) -> list[IntArray]:
    """Chunks of the indices, which bound the size of tables over all values."""
    return [indices[start : start + _MAX_PAIRS] for start in range(0, len(indices), _MAX_PAIRS)]
