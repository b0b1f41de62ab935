"""What a run costs at every strip height, from a few lowered strips of it.

Between multiples of the run's stride a steady strip's live bytes at each instruction are affine in its height. Their maximum is convex, so
interpolating between sampled heights errs on the safe side. A strip is lowered once for images of all sizes that have it
(``sft.planner.cost.strip_memory``). The bytes of the states have a closed form (``sft.planner.cost.state_memory``); at a sampled height
the rows are counted state by state, and what the closed form is off by there is interpolated, too.

Runs that do the same: equal blocks of a deep network, told by what their operators do and not by what they are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Ref, map_refs
from sft.analysis.tiling.independent_tiles import tile_lengths_at
from sft.analysis.tiling.strips import StripSchedule
from sft.common.interval import Interval
from sft.lower.lower_strip import emit_strip
from sft.planner.cost.roofline import DeviceRates
from sft.planner.cost.state_memory import closed_form_rows, deduplicate_frontiers, num_restored, state_shares
from sft.planner.cost.strip_memory import ExtentsByAxis, StripMemoryModel
from sft.planner.cost.tiling import Tiling
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment
from sft.sources.strip_reader import reader_bytes_at

__all__ = ["Floats", "RunSampler", "RunSamples", "TiledCosts", "halo_shares", "structural_run_key"]


def structural_run_key(problem: PlanningProblem, names: tuple[str, ...], *, any_size: bool) -> Hashable:
    """What two runs of a problem have in common whose strips differ in nothing but names.

    Args:
        problem: the model at one size.
        names: the run's operators, in order.
        any_size: whether images may differ in their extents along the axes that are tiled, too.
    """
    general, values = problem.memoize_across_sizes(("likeness of a run", names), lambda: _structural_key(problem, names), weight=len(names))
    if any_size:
        return general
    return problem.remembered(("likeness of a run", names), lambda: (general, tuple(problem.shapes[name] for name in values)))


def _structural_key(problem: PlanningProblem, names: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """That for images of any size, and the run's values, those that it reads from outside included."""
    graph, phases, axes = problem.graph, problem.phases, problem.graph.axes
    inputs, outputs, live_out = frozenset(graph.inputs), frozenset(graph.results), frozenset(graph.live_out(names))
    weights = frozenset() if problem.weights is None else frozenset(problem.weights.num_bytes)
    placed = (problem.requires_grad, problem.from_source, problem.host_outputs, problem.channels_last, problem.per_sample, weights)
    number = {name: place for place, name in enumerate(names)}
    digest = hashlib.sha256()

    def add(name: str, *facts: Hashable) -> None:
        shape = problem.shapes[name]
        streamed = name in phases.streamed
        if streamed:
            shape = axes.with_extent(axes.with_extent(shape, ROWS, 0), COLUMNS, 0)
        where = tuple(name in each for each in (*placed, inputs, outputs, live_out))
        digest.update(repr((streamed, shape, problem.dtypes[name], problem.grad_dtypes[name], where, facts)).encode())

    for name in names:
        node, row = graph[name], phases.rows[name]
        for operand in node.operands:
            if operand not in number:
                number[operand] = len(number)
                add(operand, graph[operand].kind)
        arguments = map_refs(node.arguments, lambda operand: Ref(str(number[operand])))
        add(name, node.target, arguments, node.effect, row.name, row.role)
    return digest.digest(), tuple(number)


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: At how many cuts, about, it is counted what tiles compute twice.
_NUM_HALO_SAMPLES = 8
#: Strips of so few columns (or rows, where they are all of an image) of some value are looked at for themselves: what is a border there?
_MIN_ALIKE = 8
#: Of runs of so few operators these of the sampled heights are lowered: few operators peak one behind the other as strips grow.
_FEW_OPERATORS, _SAMPLES_OF_FEW = 8, (0, 2, -2, -1)
#: Of an outline besides its operators, in operators.
_WEIGHT_OF_OUTLINE = 16


def halo_shares(problem: PlanningProblem, names: tuple[str, ...], tile_px: int, axis: int) -> dict[str, float]:
    """How often each operator's rows (columns) are computed, on average, when each tile of ``tile_px`` computes its own halo."""

    def found() -> dict[str, float]:
        if not names:
            return {}
        phases, extents = problem.phases, problem.extents(axis)
        extent = max(extents[name] for name in problem.graph.sources(names, phases.streamed))
        num_tiles = -(-extent // tile_px)
        start = num_tiles // 2 * tile_px
        span = Interval(start, min(start + tile_px, extent))
        lengths = tile_lengths_at(problem.graph, names, phases.rows, phases.streamed, extents, span, axis=axis)
        return {name: max(1.0, length / len(span) * extent / extents[name]) for name, length in lengths.items() if name in extents}

    return problem.remembered(("shares", names, tile_px, axis), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
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
class TiledCosts:
    """What runs, or the beginning of one, add to a plan when they are tiled; arrays are [height, policy].

    Attributes:
        states: bytes that are held for states.
        peaks: of a strip of each run, [height].
        cost: besides what plain PyTorch costs.
        read_bytes: of inputs that are not resident.
        is_wanted: whether no strip is restored too often.
    """

    states: Floats
    peaks: tuple[Floats, ...]
    cost: Floats
    read_bytes: Floats
    is_wanted: npt.NDArray[np.bool_]

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> TiledCosts:
        """Where nothing is tiled."""
        zeros = np.zeros(shape)
        return cls(states=zeros, peaks=(), cost=zeros, read_bytes=zeros, is_wanted=np.ones(shape, dtype=bool))

    def and_run(self, other: TiledCosts) -> TiledCosts:
        """With another run behind."""
        return TiledCosts(
            states=self.states + other.states,
            peaks=(*self.peaks, *other.peaks),
            cost=self.cost + other.cost,
            read_bytes=self.read_bytes + other.read_bytes,
            is_wanted=self.is_wanted & other.is_wanted,
        )


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
    rates: DeviceRates
    strip_rows: Sequence[int]
    sampled: Sequence[int]
    policies: Sequence[Checkpoints]

    def run(self, names: tuple[str, ...], cuts: tuple[int, ...], forward_flops: Mapping[str, int], flops: Mapping[str, int]) -> RunSamples:
        """Lower a run's largest strip at the sampled heights, and fill in the others; equal runs are sampled once."""
        problem, tiling = self.tiling.problem, replace(self.tiling.choice(names, 1), nodes=(), restart=False)
        heights = (tuple(self.strip_rows), tuple(self.sampled))
        likeness = structural_run_key(problem, names, any_size=False)
        key = ("run", likeness, cuts, tiling, self.tiling.num_panels, self.tiling.num_stores, heights, tuple(self.policies), self.rates)
        return replace(problem.remembered(key, lambda: self._run(names, cuts, forward_flops, flops)), names=names)

    def _run(self, names: tuple[str, ...], cuts: tuple[int, ...], forward_flops: Mapping[str, int], flops: Mapping[str, int]) -> RunSamples:
        problem = self.tiling.problem
        strip_rows, indices = self.tiling.heights_of(names, self.strip_rows), self.sampled
        if len(names) <= _FEW_OPERATORS and len(indices) > len(_SAMPLES_OF_FEW):
            indices = sorted({indices[sample] for sample in _SAMPLES_OF_FEW})
        sampled = [self._memoized_sample(names, cuts, strip_rows[index]) for index in indices]
        at = np.array([strip_rows[index] for index in indices], dtype=np.float64)
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
        rows = closed_form_rows(self.policies, carried, gained, num_steps, training=problem.training)
        held = row_bytes[:, None, None] * rows * spread("state_share").T * self.tiling.num_stores
        # A prefix carries the values before its cut, except the one that crosses it.
        inside = places[None, :] < (np.array(cuts) - (np.array(cuts) < len(names)))[:, None]
        states = np.einsum("cv,vhk->chk", inside.astype(np.float64), held)
        return RunSamples(
            names=names,
            cuts=cuts,
            num_steps=num_steps,
            peak=spread("peak"),
            overhead=spread("overhead"),
            forward_flops=self._with_halos(names, cuts, strip_rows, forward_flops),
            flops=self._with_halos(names, cuts, strip_rows, flops),
            states=states,
            restored_share=np.stack([num_restored(tuple(self.policies), int(n)) / n for n in num_steps]),
        )

    def _memoized_sample(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: int) -> dict[str, Any]:
        problem = self.tiling.problem
        choice = replace(self.tiling.choice(names, 1), nodes=(), restart=False)
        key = ("sample", structural_run_key(problem, names, any_size=False), tuple(cuts), choice, strip_rows, tuple(self.policies))
        return problem.remembered(key, lambda: self._sample(names, cuts, strip_rows))

    def _sample(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: int) -> dict[str, Any]:
        problem = self.tiling.problem
        choice = replace(self.tiling.choice(names, self.tiling.height), strip_rows=strip_rows)
        segment = build_region(problem, (choice,)).segments[0]
        assert isinstance(segment, TiledSegment)
        schedule = segment.schedule
        walk = Sweep(segment.chunks[0], len(segment.panels) // 2)
        own = [name for name in names if name in problem.phases.streamed]
        row_bytes = np.array([segment.row_bytes(name, walk) for name in own], dtype=np.int64)
        frontier, kept, place_of = deduplicate_frontiers(schedule, own)
        held = np.bincount(place_of, weights=row_bytes, minlength=len(frontier)) @ (frontier[:, 1:] - kept[:, :-1])
        index = int(held.argmax()) if self.tiling.halo == "carry" else schedule.num_steps // 2
        place = {name: i for i, name in enumerate(names)}
        quarter = schedule.num_steps // 4
        steady = slice(quarter, schedule.num_steps + 1 - quarter)
        carried = (frontier - kept)[:, steady].max(axis=1)[place_of]
        gained = np.diff(frontier, axis=1)[:, steady].max(axis=1)[place_of]
        least = -(-problem.run_height(names) // schedule.strip_rows)
        differentiated = problem.training and any(name in problem.requires_grad for name in names)
        outline, extents = self._outline(segment, walk, index, place, cuts, differentiated=differentiated)
        gradients = row_bytes * carried * np.array([name in problem.requires_grad for name in own], dtype=np.int64)
        places = np.array([place[name] for name in own], dtype=np.int64)
        incoming = np.array([gradients[places < cut].sum() for cut in cuts]) + self._read_strips(segment, walk, names, cuts)
        for port, num_bytes in outline.ports(extents) if segment.to_host else ():
            if segment.is_exchanged(port):
                incoming = incoming + np.where(np.array(cuts) > place[port.name], num_bytes, 0)
        passes = 1.5 if differentiated else 1.0  # the forward pass is half as long as both
        return {
            "row_bytes": row_bytes,
            "places": places,
            "carried": carried,
            "gained": gained,
            "state_share": state_shares(problem, self.policies, (frontier, kept, place_of), row_bytes, carried, gained),
            "extra_steps": 0 if self.tiling.halo == "recompute" else schedule.num_steps - least,
            "peak": outline.peaks(extents) + incoming,
            "overhead": passes * outline.overheads(extents, self.rates),
        }

    def _outline(
        self, segment: TiledSegment, walk: Sweep, index: int, place: Mapping[str, int], cuts: Sequence[int], *, differentiated: bool
    ) -> tuple[StripMemoryModel, ExtentsByAxis]:
        """What a strip holds, and what it has of each value along the axes along which the outline holds for others, too."""
        scope, schedule = segment.scope_of(walk), segment.schedule
        values = [name for name in (*scope.sources, *scope.names) if name in scope.streamed]
        extents: dict[int, tuple[int, ...]] = {}
        if scope.axes.count > 1:
            extents[COLUMNS] = tuple(len(scope.columns[name].new) for name in values)
        geometry: bytes | None = None
        if isinstance(schedule, StripSchedule):
            if index or schedule.strip_rows < self.tiling.problem.run_height(scope.names):
                geometry = schedule.geometry(index)
            else:  # all rows of the image, whatever their number
                extents[ROWS] = tuple(int(schedule.frontier[name][1]) for name in values)

        def outlined() -> StripMemoryModel:
            # What runs forward holds less than what runs forward and backward: one of the two tells enough.
            emitter = emit_strip(scope, segment.step(index), "joint" if differentiated else "forward")
            return StripMemoryModel(emitter, scope, extents, place, cuts)

        narrowest = min((extent for known in extents.values() for extent in known), default=_MIN_ALIKE)
        if not isinstance(schedule, StripSchedule) or narrowest < _MIN_ALIKE:
            return outlined(), extents
        problem = self.tiling.problem
        likeness, exchanged = structural_run_key(problem, scope.names, any_size=True), tuple(sorted(segment.to_host))
        key = ("outline", likeness, exchanged, scope.batch, len(segment.panels) > 1, differentiated, geometry, tuple(cuts))
        return problem.memoize_across_sizes(key, outlined, weight=_WEIGHT_OF_OUTLINE + len(scope.names)), extents

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

    def _read_strips(self, segment: TiledSegment, walk: Sweep, names: Sequence[str], cuts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes that reading adds while a strip of the operators before each cut runs."""
        problem, total = self.tiling.problem, np.zeros(len(cuts), dtype=np.int64)
        for name in sorted(segment.from_source):
            start, stop = segment.schedule.rows_read(name, names)
            count, strip_bytes, carry_bytes = reader_bytes_at(start, stop, segment.source_row_bytes(name, walk))
            size = count * strip_bytes + carry_bytes if problem.on_host else strip_bytes
            size += strip_bytes if name in problem.requires_grad else 0
            first = next(i for i, reader in enumerate(names) if name in problem.graph[reader].operands)
            total += np.where(np.array(cuts) > first, size, 0)
        return total
