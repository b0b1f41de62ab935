"""What a tiled segment costs, as array arithmetic over its steps.

The row store's content has a closed form. Step ``s`` appends to value ``v`` the block of rows ``[max(K[s+1], F[s]), F[s+1])``. Positions
only grow, so of the states after it the next kept one, ``j(s) >= s + 1``, needs the block most: the block outlives the forward pass iff
``F[s+1] > K[j(s)]``. Before that it lives as long as the walk's own state needs it, i.e. while ``F[s+1] > K[t+1]`` after step ``t``. In the
backward pass the held states are a stack, and each has the blocks between the one below it and itself that it needs.

Reading an input that is not resident adds its buffers all along, or a copy of the strip on a device of its own memory. A strip of an
output on the host, or of its gradient, is there while the strip's program runs. Where strips may be left out
(``sft.runtime.skip_constant``), rows are compared at a walk's begin, and the gradient of a source may be made apart; how many strips that
will be nobody knows, so all run.

So the bytes at every event are sums over prefixes, and a walk of thousands of strips is projected without walking it. That this equals
the walk on the phantom machine, byte for byte, is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sft.lower.program import Program
from sft.runtime.skip_constant import comparison_bytes, same_geometry_strips, separate_grad_bytes
from sft.runtime.streamed_inputs import input_buffer_bytes, input_strip_bytes
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.tiled_layout import Sweep, TiledLayout

__all__ = ["ProgramRuns", "SweepProfile", "SweepProfiles", "first_block_rows", "live_bytes_per_action", "profile_sweep"]

Ints = npt.NDArray[np.int64]
#: Programs and how often each of them runs.
ProgramRuns = tuple[tuple[Program, int], ...]
#: Pairs of states in a table of all values.
_MAX_PAIRS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProfile:
    """Bytes above what was live before, for one walk, and FLOPs.

    Attributes:
        forward_peak_bytes: most bytes during the forward walk, row blocks included.
        store_bytes: row blocks that stay after it.
        backward_peak_bytes: most bytes during the backward walk, the row blocks at its start included; where these did not stay,
            during the walk that restores them, too.
        forward_flops: of the forward walk.
        backward_flops: of the backward walk, restored strips included.
        forward_runs: the programs of the forward walk.
        backward_runs: those of the backward walk, restored strips included.
    """

    forward_peak_bytes: int
    store_bytes: int
    backward_peak_bytes: int
    forward_flops: int
    backward_flops: int
    forward_runs: ProgramRuns = ()
    backward_runs: ProgramRuns = ()


def profile_sweep(segment: TiledLayout, walk: Sweep, *, keep: bool, differentiate: bool, on_host: bool = True) -> SweepProfile:
    """Project one walk of a segment.

    Args:
        segment: the segment; programs of its step kinds are lowered.
        walk: the walk.
        keep: whether a backward pass follows.
        differentiate: whether that backward pass runs this segment at all.
        on_host: whether the device's memory is the host's, and so holds the buffers for reading inputs that are not resident.
    """
    schedule = segment.schedule
    num_steps, checkpoints = schedule.num_steps, segment.checkpoints
    all_steps = np.arange(num_steps)
    first, kinds = schedule.kinds
    forward = [segment.program("forward", int(step), walk) for step in first]
    forward_peaks = np.array([program.peak_bytes + segment.host_strip_bytes(program) for program in forward])[kinds]
    names = [name for name in schedule.names if name not in schedule.sources and name in segment.scope.streamed]
    frontier, kept = (_stack_rows([array[name] for name in names], num_steps + 1) for array in (schedule.frontier, schedule.kept))
    row_bytes = np.array([segment.row_bytes(name, walk) for name in names], dtype=np.int64)
    blocks = row_bytes[:, None] * (frontier[:, 1:] - np.maximum(kept[:, 1:], frontier[:, :-1])).clip(0)
    states = np.array(sorted(checkpoints.kept(num_steps))) if keep else np.array([], dtype=np.int64)
    lasting = blocks * _is_needed_later(frontier, kept, states, num_steps)
    stays = lasting if segment.keeps_states(walk) else np.zeros_like(lasting)
    before = _live_bytes_before(frontier, kept, blocks, stays)
    num_of_kind = np.bincount(kinds, minlength=len(first)).tolist()
    forward_runs = tuple(zip(forward, num_of_kind, strict=True))
    forward_flops = int(np.array([program.flops for program in forward])[kinds].sum())
    read = input_buffer_bytes(segment, "forward", walk) if on_host else input_strip_bytes(segment, "forward", "source", all_steps, walk)
    forward_peak = int((before + forward_peaks + read).max())
    comparing = comparison_bytes(segment, walk, backward=False) if segment.skips_repeats else 0
    forward_peak = max(forward_peak, comparing)
    store = int(stays.sum())
    if not differentiate:
        return SweepProfile(
            forward_peak_bytes=forward_peak,
            store_bytes=store,
            backward_peak_bytes=0,
            forward_flops=forward_flops,
            backward_flops=0,
            forward_runs=forward_runs,
        )
    joint = [segment.program("joint", int(step), walk) for step in first]
    wanted = np.array([name in segment.scope.requires_grad for name in names], dtype=bool)
    gradients = (row_bytes[wanted, None] * (frontier - kept)[wanted]).sum(0)
    joint_peaks = np.array([program.peak_bytes + segment.host_strip_bytes(program) for program in joint])[kinds]
    if segment.skips_repeats:
        is_twin = np.zeros(len(first), dtype=bool)
        is_twin[kinds[same_geometry_strips(segment)]] = True
        joint_peaks += (is_twin * np.array([separate_grad_bytes(segment, program) for program in joint]))[kinds]
    buffers = input_buffer_bytes(segment, "backward", walk) if on_host else 0
    strips = input_strip_bytes(segment, "joint", "grad_source", all_steps, walk)
    if not on_host:
        strips += input_strip_bytes(segment, "joint", "source", all_steps, walk)
    actions = checkpoints.actions(num_steps)
    strip = np.array([action.strip for action in actions])
    is_joint = np.array([action.kind == "joint" for action in actions])
    alive = live_bytes_per_action(checkpoints, row_bytes, frontier, first_block_rows(frontier, kept))
    comparing_back = int(alive[0]) + comparison_bytes(segment, walk, backward=True) if segment.skips_repeats else 0
    # The gradient that waits at an action is that of the state behind which all strips are done.
    done = np.concatenate([[num_steps], np.minimum.accumulate(np.where(is_joint, strip, num_steps))[:-1]])
    alive += gradients[done] + buffers
    peak = max(comparing_back, int((alive[is_joint] + (joint_peaks + strips)[strip[is_joint]]).max()))
    flops = int(np.array([program.flops for program in joint])[kinds].sum())
    backward_runs = list(zip(joint, num_of_kind, strict=True))

    def restore(strips: Ints, alive: Ints) -> int:
        """The peak of strips that run forward for their rows alone."""
        nonlocal flops
        programs = {int(k): segment.program("restore", int(first[k]), walk) for k in np.unique(kinds[strips])}
        flops += sum(programs[int(k)].flops for k in kinds[strips])
        backward_runs.extend((program, int((kinds[strips] == kind).sum())) for kind, program in programs.items())
        copies = 0 if on_host or not strips.size else input_strip_bytes(segment, "restore", "source", strips, walk)
        return int((alive + np.array([programs[int(k)].peak_bytes for k in kinds[strips]]) + copies).max(initial=0))

    peak = max(peak, restore(strip[~is_joint], alive[~is_joint]))
    if not segment.keeps_states(walk):
        again = np.arange(states.max())
        buffers = input_buffer_bytes(segment, "restore", walk) if on_host else 0
        peak = max(peak, comparing, restore(again, _live_bytes_before(frontier, kept, blocks, lasting)[again] + buffers))
    return SweepProfile(
        forward_peak_bytes=forward_peak,
        store_bytes=store,
        backward_peak_bytes=peak,
        forward_flops=forward_flops,
        backward_flops=flops,
        forward_runs=forward_runs,
        backward_runs=tuple(backward_runs),
    )


@dataclass(frozen=True, slots=True)
class SweepProfiles:
    """The profiles of a segment's walks, which keeps them; walks of one geometry share theirs. Arguments as for :func:`profile_sweep`."""

    segment: TiledLayout
    keep: bool
    differentiate: bool
    on_host: bool = True

    def __getitem__(self, walk: Sweep) -> SweepProfile:
        segment, how = self.segment, (self.keep, self.differentiate, self.on_host)
        key = (*how, len(walk.chunk), segment.panel_kinds[walk.panel], segment.keeps_states(walk))
        found: SweepProfile | None = segment.profiles.get(key)
        if found is None:
            found = profile_sweep(segment, walk, keep=self.keep, differentiate=self.differentiate, on_host=self.on_host)
            segment.profiles[key] = found
        return found


def first_block_rows(frontier: Ints, kept: Ints) -> Ints:
    """Where the blocks begin that the store holds for each state, [value, state]: it needs all of a block or nothing.

    Args:
        frontier: rows that are there at each state, [value, state].
        kept: rows that the state needs no more.
    """
    found = frontier.copy()
    states = np.arange(frontier.shape[1])
    for row, front, low in zip(found, frontier, kept, strict=True):
        since = np.searchsorted(front[1:], low, side="right")
        needs = since < states
        first = since[needs]
        row[needs] = np.maximum(low[first + 1], front[first])
    return found


def _stack_rows(rows: list[Ints], length: int) -> Ints:
    """A row for each value; a run that only reduces its source has no values of its own."""
    return np.stack(rows) if rows else np.zeros((0, length), dtype=np.int64)


def _is_needed_later(frontier: Ints, kept: Ints, states: Ints, num_steps: int) -> npt.NDArray[np.bool_]:
    """Whether each step's block is needed by the next kept state."""
    following = np.searchsorted(states, np.arange(1, num_steps + 1))
    exists = following < len(states)
    if not len(states):
        return np.zeros((frontier.shape[0], num_steps), dtype=bool)
    state = states[np.minimum(following, len(states) - 1)]
    return exists[None, :] & (frontier[:, 1:] > kept[:, state])


def _live_bytes_before(frontier: Ints, kept: Ints, blocks: Ints, lasting: Ints) -> Ints:
    """Bytes in the store before each step of the forward walk."""
    num_steps = blocks.shape[1]
    total = np.zeros(num_steps, dtype=np.int64)
    steps = np.arange(1, num_steps + 1)
    for front, low, own, last in zip(frontier, kept, blocks, lasting, strict=True):
        everything = np.concatenate([[0], np.cumsum(own)])
        permanent = np.concatenate([[0], np.cumsum(last)])
        # Blocks from `since` on are still needed by the walk's own state.
        since = np.minimum(np.searchsorted(front[1:], low[1:], side="right"), steps)
        total += permanent[since] + everything[steps] - everything[since]
    return np.concatenate([[0], total[:-1]])


def live_bytes_per_action(checkpoints: Checkpoints, row_bytes: Ints, frontier: Ints, begins: Ints) -> Ints:
    """Bytes in the store before each action of the backward walk, [..., action].

    Args:
        checkpoints: which states are held.
        row_bytes: of a row of each value, [..., value].
        frontier: rows that are there at each state, [value, state].
        begins: what :func:`first_block_rows` finds.
    """
    num_actions, at, sign, belows, above = _state_changes(checkpoints, frontier.shape[1] - 1)
    sizes = [
        row_bytes @ (frontier[:, state] - np.maximum(begins[:, state], frontier[:, below])).clip(0)
        for below, state in zip(_chunks(belows), _chunks(above), strict=True)
    ]
    change = np.zeros((*row_bytes.shape[:-1], num_actions + 1), dtype=np.int64)
    np.add.at(change.T, at, (sign * np.concatenate(sizes, axis=-1)).T)
    found: Ints = np.cumsum(change, axis=-1)[..., :-1]
    return found


# Segments of a plan, and the heights of a survey, have few numbers of strips among them.
@lru_cache(maxsize=64)
def _state_changes(checkpoints: Checkpoints, num_strips: int) -> tuple[int, Ints, Ints, Ints, Ints]:
    """How the held states change in a backward walk: the number of its actions, and events.

    Held states are a stack. What the store has for state ``h`` beyond the one held below it, ``g``, are the blocks of steps ``g..h-1``
    whose rows ``h`` needs; so every action changes the sum by a few such pairs: behind which action, whether it comes or goes, g, h.
    """
    held = sorted(checkpoints.kept(num_strips))
    actions = checkpoints.actions(num_strips)
    pairs = [(0, +1, below, state) for below, state in pairwise([0, *held])]
    for event, action in enumerate(actions, start=1):
        strip = action.strip
        if action.kind == "joint":
            held.pop()
            pairs.append((event, -1, held[-1] if held else 0, strip))
        elif action.drops:
            held[-1] = strip + 1
            pairs += [(event, -1, held[-2], strip), (event, +1, held[-2], strip + 1)]
        else:
            held.append(strip + 1)
            pairs.append((event, +1, strip, strip + 1))
    at, sign, below, above = np.array(pairs, dtype=np.int64).T
    return len(actions), at, sign, below, above


def _chunks(indices: Ints) -> list[Ints]:
    """In parts, so that tables of all values stay small."""
    return [indices[start : start + _MAX_PAIRS] for start in range(0, len(indices), _MAX_PAIRS)]
