"""What a run costs at every strip height, from a few lowered strips of it.

Between multiples of the run's stride a steady strip's live bytes at each instruction are affine in its height. Their maximum is convex, so
interpolating between sampled heights errs on the safe side. The bytes of the states have a closed form. Value ``v`` carries ``c`` rows and
gains ``n`` a strip; one state in ``k`` kept holds ``min(c, k n)`` rows that the one before does not, and a group of ``k`` strips has
``(k - 1) min(c, n)`` more of its own. That takes all strips for those of the middle. At a sampled height the rows are counted state by
state, and what the closed form is off by there is interpolated, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.analysis.interval import Interval
from sft.analysis.schedule import Schedule
from sft.analysis.tile import TileSchedule, tile_at
from sft.lower.step import emit_strip
from sft.plan.build import build_region
from sft.plan.peaks import prefix_peaks
from sft.plan.problem import Problem
from sft.plan.rates import Rates
from sft.plan.tiling import Tiling
from sft.sources.readahead import reader_bytes
from sft.walk.checkpoints import Checkpoints
from sft.walk.layout import Walk
from sft.walk.profile import alive_at, first_block_rows
from sft.walk.segments import TiledSegment

__all__ = ["MOST_RESTORED", "Floats", "RunSampler", "SampledRun", "halo_shares"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: At how many cuts, about, it is counted what tiles compute twice.
_NUM_HALO_SAMPLES = 12
#: Of the sampled heights those at which strips of panels are lowered: the lowest, and two in the middle.
_ANCHORS = (0, -3, -2)
#: States are counted where all have no more values than this; where they are held in slots, where there are no more strips than this.
_MOST_COUNTED_VALUES, _MOST_COUNTED_STEPS = 2**17, 512
#: Groups of strips that are looked at, from the last one on.
_NUM_GROUPS = 4
#: A strip restored more often than this, on average, is no plan that anybody wants.
MOST_RESTORED = 6.0


def halo_shares(problem: Problem, names: tuple[str, ...], tile_px: int, axis: int) -> dict[str, float]:
    """How often each operator's rows (columns) are computed, on average, when each tile of ``tile_px`` computes its own halo."""

    def found() -> dict[str, float]:
        if not names:
            return {}
        phases, extents = problem.phases, problem.extents(axis)
        extent = max(extents[name] for name in problem.graph.sources(names, phases.streamed))
        num_tiles = -(-extent // tile_px)
        start = num_tiles // 2 * tile_px
        span = Interval(start, min(start + tile_px, extent))
        step = tile_at(problem.graph, names, phases.rows, phases.streamed, extents, span, axis=axis)
        return {node.name: max(1.0, len(node.new) / len(span) * extent / extents[node.name]) for node in step.nodes if node.name in extents}

    return problem.remembered(("shares", names, tile_px, axis), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRun:
    """The streamed run of a phase, sampled at the heights of the survey; arrays are [cut, height]."""

    names: tuple[str, ...]
    cuts: tuple[int, ...]
    #: [height]
    num_steps: Floats
    #: [cut, height]: of one strip
    peak: Floats
    #: of one strip, in FLOPs
    overhead: Floats
    #: [cut, height]: FLOPs forward and in all, halos computed twice included
    forward_flops: Floats
    flops: Floats
    #: [cut, height, policy]
    states: Floats
    #: [height, policy]: strips that are restored in the backward pass, of all strips
    restored_share: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSampler:
    """Samples runs.

    Attributes:
        tiling: how they are tiled.
        rates: what an instruction costs besides its FLOPs.
        strip_rows: the heights that are asked for, of the tallest source.
        sampled: indices of those that are lowered.
        policies: for states.
    """

    tiling: Tiling
    rates: Rates
    strip_rows: Sequence[int]
    sampled: Sequence[int]
    policies: Sequence[Checkpoints]

    def run(self, names: tuple[str, ...], cuts: tuple[int, ...], forward_flops: Mapping[str, int], flops: Mapping[str, int]) -> SampledRun:
        """Lower a run's largest strip at the sampled heights, and fill in the others."""
        problem = self.tiling.problem
        strip_rows = tuple(self.tiling.rows_of(names, rows) for rows in self.strip_rows)
        sampled = self._samples(names, cuts, [strip_rows[index] for index in self.sampled])
        at = np.array([strip_rows[index] for index in self.sampled], dtype=np.float64)
        wanted = np.array(strip_rows, dtype=np.float64)

        def spread(key: str) -> Floats:
            columns = np.array([np.asarray(sample[key], dtype=np.float64) for sample in sampled])  # [sample, ...]
            flat = columns.reshape(len(at), -1)
            out = np.array([np.interp(wanted, at, column) for column in flat.T])
            return out.reshape(*columns.shape[1:], len(wanted))

        carried, gained = spread("carried"), spread("gained")  # [value, height]
        row_bytes = np.asarray(sampled[0]["row_bytes"], dtype=np.float64)
        places = np.asarray(sampled[0]["places"])
        num_steps = np.ceil(problem.run_height(names) / wanted) + spread("extra_steps")
        rows = self._closed_rows(carried, gained, num_steps)
        held = row_bytes[:, None, None] * rows * spread("state_share").T * self.tiling.num_stores
        # A prefix carries the values before its cut, except the one that crosses it.
        inside = places[None, :] < (np.array(cuts) - (np.array(cuts) < len(names)))[:, None]
        states = np.einsum("cv,vhk->chk", inside.astype(np.float64), held)
        return SampledRun(
            names=names,
            cuts=cuts,
            num_steps=num_steps,
            peak=spread("peak"),
            overhead=spread("overhead"),
            forward_flops=self._with_halos(names, cuts, strip_rows, forward_flops),
            flops=self._with_halos(names, cuts, strip_rows, flops),
            states=states,
            restored_share=np.array([[policy.num_restored(int(n)) / n for policy in self.policies] for n in num_steps]),
        )

    def _closed_rows(self, carried: Floats, gained: Floats, num_steps: Floats) -> Floats:
        """Rows of values that are held for states, if all strips were as those of the middle, [value, height, policy]."""
        every = np.minimum(np.array([policy.every for policy in self.policies], dtype=np.float64), num_steps[:, None])  # [height, policy]
        slots = np.array([policy.slots for policy in self.policies])
        spaced = np.minimum(carried[..., None], gained[..., None] * every)
        inner = np.minimum(carried, gained)[..., None] * (every - 1)
        rows = spaced * np.maximum(0, np.ceil(num_steps[:, None] / every) - 1) + inner
        found: Floats = np.where(slots > 0, carried[..., None] * (slots + 1), rows)
        return found if self.tiling.problem.training else np.broadcast_to(carried[..., None] * 2, rows.shape)

    def _samples(self, names: tuple[str, ...], cuts: Sequence[int], heights: Sequence[int]) -> list[dict[str, Any]]:
        """Samples at some heights. Of panels only strips of a few heights are lowered: what part they are of strips in full width, which
        have been lowered before, hardly depends on the height."""
        if self.tiling.num_panels == 1 or self.tiling.halo != "carry" or len(heights) <= len(_ANCHORS) + 1:
            return [self._remembered_sample(names, cuts, rows) for rows in heights]
        in_full = replace(self, tiling=replace(self.tiling, panel_cols=self.tiling.width))
        wide = [in_full._remembered_sample(names, cuts, rows) for rows in heights]
        own = {heights[index]: self._remembered_sample(names, cuts, heights[index]) for index in _ANCHORS}
        row_bytes = own[heights[0]]["row_bytes"]
        shares = {
            key: np.array([sample[key] / np.maximum(1.0, wide[heights.index(rows)][key]) for rows, sample in own.items()])
            for key in ("peak", "overhead")
        }

        def estimated(rows: int, sample: dict[str, Any]) -> dict[str, Any]:
            parts = {key: [np.interp(rows, list(own), column) for column in share.T] for key, share in shares.items()}
            return {**sample, "row_bytes": row_bytes, **{key: sample[key] * np.array(part) for key, part in parts.items()}}

        return [own.get(rows) or estimated(rows, sample) for rows, sample in zip(heights, wide, strict=True)]

    def _remembered_sample(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: int) -> dict[str, Any]:
        key = ("sample", replace(self.tiling.choice(names, 1), restart=False), strip_rows, tuple(self.policies))
        return self.tiling.problem.remembered(key, lambda: self._sample(names, cuts, strip_rows))

    def _sample(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: int) -> dict[str, Any]:
        problem = self.tiling.problem
        choice = replace(self.tiling.choice(names, self.tiling.height), strip_rows=strip_rows)
        segment = build_region(problem, (choice,)).segments[0]
        assert isinstance(segment, TiledSegment)
        schedule = segment.schedule
        walk = Walk(segment.chunks[0], len(segment.panels) // 2)
        own = [name for name in names if name in problem.phases.streamed]
        row_bytes = np.array([segment.row_bytes(name, walk) for name in own], dtype=np.int64)
        held = np.zeros(schedule.num_steps)
        for name, size in zip(own, row_bytes, strict=True):
            held += size * (schedule.frontier[name][1:] - schedule.kept[name][:-1])
        index = int(held.argmax()) if self.tiling.halo == "carry" else schedule.num_steps // 2
        place = {name: i for i, name in enumerate(names)}
        quarter = schedule.num_steps // 4
        steady = slice(quarter, schedule.num_steps + 1 - quarter)
        carried = np.array([(schedule.frontier[name] - schedule.kept[name])[steady].max() for name in own], dtype=np.int64)
        gained = np.array([np.diff(schedule.frontier[name])[steady].max() for name in own], dtype=np.int64)
        least = -(-problem.run_height(names) // schedule.strip_rows)
        differentiated = problem.training and any(name in problem.requires_grad for name in names)
        # What runs forward holds less than what runs forward and backward: one of the two tells enough.
        emitter = emit_strip(segment.scope_of(walk), schedule.step(index), "joint" if differentiated else "forward")
        peak = prefix_peaks(emitter, place, cuts)
        gradients = row_bytes * carried * np.array([name in problem.requires_grad for name in own], dtype=np.int64)
        places = np.array([place[name] for name in own], dtype=np.int64)
        incoming = np.array([gradients[places < cut].sum() for cut in cuts]) + self._read_strips(segment, walk, names, cuts)
        for port, slot in emitter.ports.items():
            if port.name in segment.to_host and port.role in ("out", "grad_out"):
                incoming += np.where(np.array(cuts) > place[port.name], slot.num_bytes, 0)
        owners = np.array([place[i.owner] for i in emitter.instructions])
        overhead = np.array([self.rates.overhead(i) for i in emitter.instructions])
        passes = 1.5 if differentiated else 1.0  # the forward pass is half as long as both
        return {
            "row_bytes": row_bytes,
            "places": places,
            "carried": carried,
            "gained": gained,
            "state_share": self._state_share(schedule, own, row_bytes, carried, gained),
            "extra_steps": 0 if self.tiling.halo == "recompute" else schedule.num_steps - least,
            "peak": peak + incoming,
            "overhead": passes * np.array([overhead[owners < cut].sum() for cut in cuts]),
        }

    def _state_share(self, schedule: Schedule | TileSchedule, names: Sequence[str], row_bytes: Ints, carried: Ints, gained: Ints) -> Floats:
        """Bytes of the states as a walk back counts them, of those of the closed form, [policy]; ones where counting takes too long."""
        num_steps, shares = schedule.num_steps, np.ones(len(self.policies))
        rows = self._closed_rows(carried[:, None].astype(np.float64), gained[:, None].astype(np.float64), np.array([float(num_steps)]))
        closed = row_bytes @ rows[:, 0, :]
        if not self.tiling.problem.training or not names or len(names) * num_steps > _MOST_COUNTED_VALUES:
            return shares
        frontier, kept = (np.stack([array[name] for name in names]) for array in (schedule.frontier, schedule.kept))
        begins = first_block_rows(frontier, kept)

        def held(states: Iterable[int]) -> int:
            at = sorted(states)
            below = np.concatenate([np.zeros((len(names), 1), dtype=np.int64), frontier[:, at[:-1]]], axis=1)
            return int((row_bytes @ (frontier[:, at] - np.maximum(begins[:, at], below)).clip(0)).sum())

        for index, policy in enumerate(self.policies):
            if not closed[index]:
                continue
            if not policy.slots:
                # The last group may be short, and at an image's end states become small: groups before it may need more.
                last = (num_steps - 1) // policy.every * policy.every
                ends = [last - behind * policy.every for behind in range(_NUM_GROUPS)] if policy.every > 1 else []
                counted = max(held(policy.kept(end)) for end in (num_steps, *ends) if end > 0)
            elif num_steps <= _MOST_COUNTED_STEPS and policy.num_restored(num_steps) <= MOST_RESTORED * num_steps:
                counted = int(alive_at(policy, row_bytes, frontier, begins).max())
            else:
                continue
            shares[index] = counted / closed[index]
        return shares

    def _with_halos(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: Sequence[int], flops: Mapping[str, int]) -> Floats:
        """FLOPs of the operators before each cut at each height, [cut, height], with what tiles in the middle compute twice.

        How much that is of what would be computed once is found at some of the cuts, and interpolated between them.
        """
        problem = self.tiling.problem
        once = np.array([float(sum(flops[name] for name in names[:cut])) for cut in cuts])
        if self.tiling.num_panels == 1 and self.tiling.halo == "carry":
            return np.repeat(once[:, None], len(strip_rows), axis=1)
        at = sorted({*range(0, len(cuts), max(1, len(cuts) // _NUM_HALO_SAMPLES)), len(cuts) - 1})
        ratios = np.ones((len(at), len(strip_rows)))
        for row, c in enumerate(at):
            head = names[: cuts[c]]
            wide = halo_shares(problem, head, self.tiling.cols_of(names), 1) if self.tiling.num_panels > 1 else {}
            if not once[c]:
                continue
            if self.tiling.halo != "recompute":  # whatever the height is
                ratios[row, :] = sum(flops[name] * wide.get(name, 1.0) for name in head) / once[c]
                continue
            for h, rows in enumerate(strip_rows):
                tall = halo_shares(problem, head, rows, 0)
                ratios[row, h] = sum(flops[name] * wide.get(name, 1.0) * tall.get(name, 1.0) for name in head) / once[c]
        spread = [np.interp(np.arange(len(cuts)), at, ratios[:, h]) for h in range(len(strip_rows))]
        return once[:, None] * np.stack(spread, axis=1)

    def _read_strips(self, segment: TiledSegment, walk: Walk, names: Sequence[str], cuts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes that reading adds while a strip of the operators before each cut runs."""
        problem, total = self.tiling.problem, np.zeros(len(cuts), dtype=np.int64)
        for name in sorted(segment.from_source):
            strips = [Interval(int(a), int(b)) for a, b in zip(*segment.schedule.rows_read(name, names), strict=True)]
            count, strip_bytes, carry_bytes = reader_bytes(strips, segment.source_row_bytes(name, walk))
            size = count * strip_bytes + carry_bytes if problem.on_host else strip_bytes
            size += strip_bytes if name in problem.requires_grad else 0
            first = next(i for i, reader in enumerate(names) if name in problem.graph[reader].operands)
            total += np.where(np.array(cuts) > first, size, 0)
        return total
