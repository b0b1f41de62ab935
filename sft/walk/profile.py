"""What a tiled segment costs, as array arithmetic over its steps.

The row store's content has a closed form. Step ``s`` appends to value ``v`` the block of rows ``[max(K[s+1], F[s]), F[s+1])``. Positions
only grow, so of the states after it the next kept one, ``j(s) >= s + 1``, needs the block most: the block outlives the forward pass iff
``F[s+1] > K[j(s)]``. Before that it lives as long as the walk's own state needs it, i.e. while ``F[s+1] > K[t+1]`` after step ``t``. In the
backward pass, strip ``s`` of the group that starts at state ``g`` finds the blocks that kept states up to ``g`` need, and those of the
group's strips before ``s``.

Reading an input that is not resident adds its buffers all along, or a copy of the strip on a device of its own memory.

So the bytes at every event are sums over prefixes, and a walk of thousands of strips is projected without walking it. That this equals
the walk on the phantom machine, byte for byte, is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.walk.checkpoints import kept_states
from sft.walk.reading import reading_bytes, strip_bytes
from sft.walk.segments import TiledSegment, Walk

__all__ = ["WalkProfile", "profile_walk"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkProfile:
    """Bytes above what was live before, for one walk, and FLOPs.

    Attributes:
        forward_peak_bytes: most bytes during the forward walk, row blocks included.
        store_bytes: row blocks that stay after it.
        backward_peak_bytes: most bytes during the backward walk, the row blocks at its start included; where these did not stay,
            during the walk that restores them, too.
        forward_flops: of the forward walk.
        backward_flops: of the backward walk, restored strips included.
    """

    forward_peak_bytes: int
    store_bytes: int
    backward_peak_bytes: int
    forward_flops: int
    backward_flops: int


def profile_walk(segment: TiledSegment, walk: Walk, *, keep: bool, differentiate: bool, on_host: bool = True) -> WalkProfile:
    """Project one walk of a segment.

    Args:
        segment: the segment; programs of its step kinds are lowered.
        walk: the walk.
        keep: whether a backward pass follows.
        differentiate: whether that backward pass runs this segment at all.
        on_host: whether the device's memory is the host's, and so holds the buffers for reading inputs that are not resident.
    """
    schedule = segment.schedule
    num_steps, every = schedule.num_steps, segment.state_every
    all_steps = np.arange(num_steps)
    first, kinds = schedule.kinds
    forward = [segment.program("forward", int(step), walk) for step in first]
    forward_peaks = np.array([program.peak_bytes for program in forward])[kinds]
    names = [name for name in schedule.names if name not in schedule.sources and name in segment.scope.streamed]
    frontier, kept = (_stacked([array[name] for name in names], num_steps + 1) for array in (schedule.frontier, schedule.kept))
    row_bytes = np.array([segment.row_bytes(name, walk) for name in names], dtype=np.int64)
    blocks = row_bytes[:, None] * (frontier[:, 1:] - np.maximum(kept[:, 1:], frontier[:, :-1])).clip(0)
    states = np.array(sorted(kept_states(num_steps, every))) if keep else np.array([], dtype=np.int64)
    lasting = blocks * _lasts(frontier, kept, states, num_steps)
    stays = lasting if segment.keeps_states(walk) else np.zeros_like(lasting)
    before = _alive_before(frontier, kept, blocks, stays)
    forward_flops = int(np.array([program.flops for program in forward])[kinds].sum())
    read = reading_bytes(segment, "forward", walk) if on_host else strip_bytes(segment, "forward", "source", all_steps, walk)
    forward_peak = int((before + forward_peaks + read).max())
    store = int(stays.sum())
    if not differentiate:
        return WalkProfile(
            forward_peak_bytes=forward_peak,
            store_bytes=store,
            backward_peak_bytes=0,
            forward_flops=forward_flops,
            backward_flops=0,
        )
    joint = [segment.program("joint", int(step), walk) for step in first]
    group = np.arange(num_steps) // every * every
    # What strip s finds in the store: blocks before its group that kept states need, and the group's own before s.
    need = _needed_by_groups(blocks, lasting)
    own = np.concatenate([[0], np.cumsum(blocks.sum(0))])
    at_strip = need[group] + own[np.arange(num_steps)] - own[group]
    wanted = np.array([name in segment.scope.requires_grad for name in names], dtype=bool)
    gradients = (row_bytes[wanted, None] * (frontier - kept)[wanted]).sum(0)
    joint_peaks = np.array([program.peak_bytes for program in joint])[kinds]
    buffers = reading_bytes(segment, "backward", walk) if on_host else 0
    strips = strip_bytes(segment, "joint", "grad_source", all_steps, walk)
    if not on_host:
        strips += strip_bytes(segment, "joint", "source", all_steps, walk)
    peak = int((at_strip + gradients[1:] + joint_peaks + strips + buffers).max())
    flops = int(np.array([program.flops for program in joint])[kinds].sum())

    def restore(strips: Ints, alive: Ints) -> int:
        """The peak of strips that run forward for their rows alone."""
        nonlocal flops
        programs = {int(k): segment.program("restore", int(first[k]), walk) for k in np.unique(kinds[strips])}
        flops += sum(programs[int(k)].flops for k in kinds[strips])
        copies = 0 if on_host or not strips.size else strip_bytes(segment, "restore", "source", strips, walk)
        return int((alive + np.array([programs[int(k)].peak_bytes for k in kinds[strips]]) + copies).max(initial=0))

    restored = _restored(num_steps, every)
    # The gradient that waits meanwhile is that of the next group's first state.
    waiting = gradients[np.minimum(group[restored] + every, num_steps)]
    peak = max(peak, restore(restored, at_strip[restored] + waiting + buffers))
    if not segment.keeps_states(walk):
        again = np.arange(states.max())
        buffers = reading_bytes(segment, "restore", walk) if on_host else 0
        peak = max(peak, restore(again, _alive_before(frontier, kept, blocks, lasting)[again] + buffers))
    return WalkProfile(
        forward_peak_bytes=forward_peak,
        store_bytes=store,
        backward_peak_bytes=peak,
        forward_flops=forward_flops,
        backward_flops=flops,
    )


def _stacked(rows: list[Ints], length: int) -> Ints:
    """A row for each value; a run that only reduces its source has no values of its own."""
    return np.stack(rows) if rows else np.zeros((0, length), dtype=np.int64)


def _lasts(frontier: Ints, kept: Ints, states: Ints, num_steps: int) -> npt.NDArray[np.bool_]:
    """Whether each step's block is needed by the next kept state."""
    following = np.searchsorted(states, np.arange(1, num_steps + 1))
    exists = following < len(states)
    if not len(states):
        return np.zeros((frontier.shape[0], num_steps), dtype=bool)
    state = states[np.minimum(following, len(states) - 1)]
    return exists[None, :] & (frontier[:, 1:] > kept[:, state])


def _alive_before(frontier: Ints, kept: Ints, blocks: Ints, lasting: Ints) -> Ints:
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


def _needed_by_groups(blocks: Ints, lasting: Ints) -> Ints:
    """For each state ``g`` the bytes of the blocks before it that kept states need."""
    return np.concatenate([[0], np.cumsum(lasting.sum(0))])


def _restored(num_steps: int, every: int) -> Ints:
    """Strips that run forward again in the backward walk."""
    last = (num_steps - 1) // every * every
    steps = np.arange(last)
    restored: Ints = steps[steps % every != every - 1]
    return restored
