"""Sampled cost model: cost and bytes of a run at every strip height, interpolated from a few lowered strips.

Between multiples of the run's stride the live bytes of a steady strip at each instruction are affine in its height. Their maximum is
convex, so interpolation between sampled heights overestimates it. A strip is lowered once for all image sizes that contain it
(``sft.planner.cost.strip_memory``). State bytes have a closed form (``sft.planner.cost.state_memory``); at a sampled height rows are
counted state by state, and the ratio to the closed form is interpolated, too.

Runs that differ only in names, as the equal blocks of a deep network, are sampled once: a structural hash identifies them.
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
from sft.common.array_types import FloatArray
from sft.common.interval import Interval
from sft.lower.lower_strip import emit_strip
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.state_memory import closed_form_rows, deduplicate_frontiers, num_restored, state_shares
from sft.planner.cost.strip_memory import ExtentsByAxis, StripMemoryModel
from sft.planner.cost.tiling import Tiling
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment
from sft.sources.strip_reader import reader_bytes_at

__all__ = ["RunSampler", "RunSamples", "TiledCosts", "halo_shares", "structural_run_key"]


#: Weight of a memory profile in the shared cache in addition to its operators, in operators.
_PROFILE_WEIGHT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
    """Samples of the streamed run of a phase at all strip heights of a candidate grid.

    Attributes:
        names: operators of the run.
        cuts: numbers of operators before each cut.
        num_steps: strips, [height].
        peak: peak bytes of one strip, [cut, height].
        overhead: cost of one strip in addition to its FLOPs, in FLOPs, [cut, height].
        forward_flops: FLOPs of the forward pass, including recomputed halos, [cut, height].
        flops: FLOPs of forward and backward pass, including recomputed halos, [cut, height].
        states: bytes of kept states, [cut, height, policy].
        restored_share: strips restored in the backward pass, over all strips, [height, policy].
    """

    names: tuple[str, ...]
    cuts: tuple[int, ...]
    num_steps: FloatArray
    peak: FloatArray
    overhead: FloatArray
    forward_flops: FloatArray
    flops: FloatArray
    states: FloatArray
    restored_share: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledCosts:
    """Bytes and costs that runs, or the beginning of one, add to a plan when tiled; arrays are [height, policy].

    Attributes:
        states: bytes of kept states.
        peaks: peak bytes of a strip of each run, [height].
        cost: cost in addition to plain PyTorch's, in FLOPs.
        read_bytes: bytes read of inputs that are not resident.
        is_allowed: true if no strip is restored too often.
    """

    states: FloatArray
    peaks: tuple[FloatArray, ...]
    cost: FloatArray
    read_bytes: FloatArray
    is_allowed: npt.NDArray[np.bool_]

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> TiledCosts:
        """Costs of a plan without tiled runs."""
        zeros = np.zeros(shape)
        return cls(states=zeros, peaks=(), cost=zeros, read_bytes=zeros, is_allowed=np.ones(shape, dtype=bool))

    def plus(self, run: TiledCosts) -> TiledCosts:
        """Costs with a further run."""
        return TiledCosts(
            states=self.states + run.states,
            peaks=(*self.peaks, *run.peaks),
            cost=self.cost + run.cost,
            read_bytes=self.read_bytes + run.read_bytes,
            is_allowed=self.is_allowed & run.is_allowed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSampler:
    """Samples runs at the strip heights of a candidate grid.

    Attributes:
        tiling: common parameters of the tiled runs.
        rates: cost of instructions in addition to their FLOPs.
        strip_rows: strip heights, in rows of the tallest source.
        sampled: indices of the heights that are lowered.
        policies: state policies.
    """

    tiling: Tiling
    rates: DeviceRates
    strip_rows: Sequence[int]
    sampled: Sequence[int]
    policies: Sequence[Checkpoints]

    def sample(
        self, names: tuple[str, ...], cuts: tuple[int, ...], forward_flops: Mapping[str, int], flops: Mapping[str, int]
    ) -> RunSamples:
        """Lower a run's largest strip at the sampled heights, and interpolate the remaining ones; equal runs are sampled once."""
        problem, tiling = self.tiling.problem, replace(self.tiling.choice(names, 1), nodes=(), restart=False)
        heights = (tuple(self.strip_rows), tuple(self.sampled))
        run_key = structural_run_key(problem, names, any_size=False)
        key = (
            "run",
            run_key,
            cuts,
            tiling,
            self.tiling.num_panels,
            self.tiling.num_stored_sweeps,
            heights,
            tuple(self.policies),
            self.rates.device_type,
        )
        return replace(problem.memo.memoize(key, lambda: self._interpolate(names, cuts, forward_flops, flops)), names=names)

    def _interpolate(
        self, names: tuple[str, ...], cuts: tuple[int, ...], forward_flops: Mapping[str, int], flops: Mapping[str, int]
    ) -> RunSamples:
        problem, limits = self.tiling.problem, self.tiling.problem.limits
        strip_rows, indices = self.tiling.heights_of(names, self.strip_rows), self.sampled
        if len(names) <= limits.few_run_operators and len(indices) > len(limits.samples_of_few):
            indices = sorted({indices[sample] for sample in limits.samples_of_few})
        samples = [self._memoized_sample(names, cuts, strip_rows[index]) for index in indices]
        sampled_heights = np.array([strip_rows[index] for index in indices], dtype=np.float64)
        all_heights = np.array(strip_rows, dtype=np.float64)

        def spread(key: str) -> FloatArray:
            columns = np.array([np.asarray(sample[key], dtype=np.float64) for sample in samples])  # [sample, ...]
            flat = columns.reshape(len(sampled_heights), -1)
            out = np.array([np.interp(all_heights, sampled_heights, column) for column in flat.T])
            return out.reshape(*columns.shape[1:], len(all_heights))

        carried, gained = spread("carried"), spread("gained")  # [value, height]
        row_bytes = np.asarray(samples[0]["row_bytes"], dtype=np.float64)
        value_index = np.asarray(samples[0]["value_index"])
        num_steps = np.ceil(problem.sized.run_height(names) / all_heights) + spread("extra_steps")
        rows = closed_form_rows(self.policies, carried, gained, num_steps, training=problem.sized.training)
        state_bytes = row_bytes[:, None, None] * rows * spread("state_share").T * self.tiling.num_stored_sweeps
        # A prefix carries the values before its cut, except the one that crosses it.
        inside = value_index[None, :] < (np.array(cuts) - (np.array(cuts) < len(names)))[:, None]
        states = np.einsum("cv,vhk->chk", inside.astype(np.float64), state_bytes)
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
        key = (
            "sample",
            structural_run_key(problem, names, any_size=False),
            tuple(cuts),
            choice,
            strip_rows,
            tuple(self.policies),
            self.rates.device_type,
        )
        return problem.memo.memoize(key, lambda: self._lower_sample(names, cuts, strip_rows))

    def _lower_sample(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: int) -> dict[str, Any]:
        problem = self.tiling.problem
        choice = replace(self.tiling.choice(names, self.tiling.height), strip_rows=strip_rows)
        segment = build_region(problem, (choice,)).segments[0]
        assert isinstance(segment, TiledSegment)
        schedule = segment.schedule
        sweep = Sweep(segment.chunks[0], len(segment.panels) // 2)
        values = [name for name in names if name in problem.sized.phases.streamed]
        row_bytes = np.array([segment.row_bytes(name, sweep) for name in values], dtype=np.int64)
        frontier, kept, row_of = deduplicate_frontiers(schedule, values)
        carried_bytes = np.bincount(row_of, weights=row_bytes, minlength=len(frontier)) @ (frontier[:, 1:] - kept[:, :-1])
        strip = int(carried_bytes.argmax()) if self.tiling.halo == "carry" else schedule.num_steps // 2
        index_of = {name: i for i, name in enumerate(names)}
        quarter = schedule.num_steps // 4
        steady = slice(quarter, schedule.num_steps + 1 - quarter)
        carried = (frontier - kept)[:, steady].max(axis=1)[row_of]
        gained = np.diff(frontier, axis=1)[:, steady].max(axis=1)[row_of]
        min_steps = -(-problem.sized.run_height(names) // schedule.strip_rows)
        differentiated = problem.sized.training and any(name in problem.sized.requires_grad for name in names)
        profile, extents = self._memory_profile(segment, sweep, strip, index_of, cuts, differentiated=differentiated)
        gradients = row_bytes * carried * np.array([name in problem.sized.requires_grad for name in values], dtype=np.int64)
        value_index = np.array([index_of[name] for name in values], dtype=np.int64)
        incoming = np.array([gradients[value_index < cut].sum() for cut in cuts]) + self._reader_bytes(segment, sweep, names, cuts)
        for port, num_bytes in profile.ports(extents) if segment.to_host else ():
            if segment.is_exchanged(port):
                incoming = incoming + np.where(np.array(cuts) > index_of[port.name], num_bytes, 0)
        passes = 1.5 if differentiated else 1.0  # the forward pass is half as long as both
        return {
            "row_bytes": row_bytes,
            "value_index": value_index,
            "carried": carried,
            "gained": gained,
            "state_share": state_shares(problem, self.policies, (frontier, kept, row_of), row_bytes, carried, gained),
            "extra_steps": 0 if self.tiling.halo == "recompute" else schedule.num_steps - min_steps,
            "peak": profile.peaks(extents) + incoming,
            "overhead": passes * profile.overheads(extents, self.rates),
        }

    def _memory_profile(
        self, segment: TiledSegment, sweep: Sweep, strip: int, index_of: Mapping[str, int], cuts: Sequence[int], *, differentiated: bool
    ) -> tuple[StripMemoryModel, ExtentsByAxis]:
        """Memory profile of a strip, and the strip's extents along the axes in which the profile is parametric."""
        scope, schedule = segment.scope_of(sweep), segment.schedule
        values = [name for name in (*scope.sources, *scope.names) if name in scope.streamed]
        extents: dict[int, tuple[int, ...]] = {}
        if scope.axes.count > 1:
            extents[COLUMNS] = tuple(len(scope.columns[name].new) for name in values)
        geometry: bytes | None = None
        if isinstance(schedule, StripSchedule):
            if strip or schedule.strip_rows < self.tiling.problem.sized.run_height(scope.names):
                geometry = schedule.geometry(strip)
            else:  # the strip is the full image, of any height
                extents[ROWS] = tuple(int(schedule.frontier[name][1]) for name in values)

        def compute() -> StripMemoryModel:
            # A forward program needs fewer bytes than the joint program of forward and backward, so one of the two suffices.
            builder = emit_strip(scope, segment.step(strip), "joint" if differentiated else "forward")
            return StripMemoryModel(builder, scope, extents, index_of, cuts)

        problem, min_shared_extent = self.tiling.problem, self.tiling.problem.limits.min_shared_extent
        narrowest = min((extent for known in extents.values() for extent in known), default=min_shared_extent)
        if not isinstance(schedule, StripSchedule) or narrowest < min_shared_extent:
            return compute(), extents
        run_key, exchanged = structural_run_key(problem, scope.names, any_size=True), tuple(sorted(segment.to_host))
        key = ("outline", run_key, exchanged, scope.batch, len(segment.panels) > 1, differentiated, geometry, tuple(cuts))
        return problem.memoize_across_sizes(key, compute, weight=_PROFILE_WEIGHT + len(scope.names)), extents

    def _with_halos(self, names: tuple[str, ...], cuts: Sequence[int], strip_rows: Sequence[int], flops: Mapping[str, int]) -> FloatArray:
        """FLOPs of the operators before each cut, including halos that tiles in the middle recompute, [cut, height].

        The ratio to FLOPs without halos is computed at some of the cuts, and interpolated between them.
        """
        problem = self.tiling.problem
        once = np.array([float(sum(flops[name] for name in names[:cut])) for cut in cuts])
        if self.tiling.num_panels == 1 and self.tiling.halo == "carry":
            return np.repeat(once[:, None], len(strip_rows), axis=1)
        sampled_cuts = sorted({*range(0, len(cuts), max(1, len(cuts) // problem.limits.num_halo_samples)), len(cuts) - 1})
        ratios = np.ones((len(sampled_cuts), len(strip_rows)))
        for row, c in enumerate(sampled_cuts):
            head = names[: cuts[c]]
            panel_shares = halo_shares(problem, head, self.tiling.cols_of(names), 1) if self.tiling.num_panels > 1 else {}
            if not once[c]:
                continue
            if self.tiling.halo != "recompute":  # the same at every height
                ratios[row, :] = sum(flops[name] * panel_shares.get(name, 1.0) for name in head) / once[c]
                continue
            for h, rows in enumerate(strip_rows):
                strip_shares = halo_shares(problem, head, rows, 0)
                total = sum(flops[name] * panel_shares.get(name, 1.0) * strip_shares.get(name, 1.0) for name in head)
                ratios[row, h] = total / once[c]
        spread = [np.interp(np.arange(len(cuts)), sampled_cuts, ratios[:, h]) for h in range(len(strip_rows))]
        return once[:, None] * np.stack(spread, axis=1)

    def _reader_bytes(self, segment: TiledSegment, sweep: Sweep, names: Sequence[str], cuts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes that input streaming adds while a strip of the operators before each cut runs."""
        problem, total = self.tiling.problem, np.zeros(len(cuts), dtype=np.int64)
        for name in sorted(segment.from_source):
            start, stop = segment.schedule.rows_read(name, names)
            count, strip_bytes, carry_bytes = reader_bytes_at(start, stop, segment.source_row_bytes(name, sweep))
            size = count * strip_bytes + (carry_bytes if problem.resources.on_host else 0)
            size += strip_bytes if name in problem.sized.requires_grad else 0
            first = next(i for i, reader in enumerate(names) if name in problem.sized.graph[reader].operands)
            total += np.where(np.array(cuts) > first, size, 0)
        return total


def halo_shares(problem: PlanningProblem, names: tuple[str, ...], tile_px: int, axis: int) -> dict[str, float]:
    """Mean number of computations of each operator's rows (columns) if each tile of ``tile_px`` computes its own halo."""

    def compute() -> dict[str, float]:
        if not names:
            return {}
        run, extents = problem.sized.phases.run(names), problem.sized.extents(axis)
        extent = max(extents[name] for name in run.sources)
        num_tiles = -(-extent // tile_px)
        start = num_tiles // 2 * tile_px
        span = Interval(start, min(start + tile_px, extent))
        lengths = tile_lengths_at(run, extents, span, axis=axis)
        return {name: max(1.0, length / len(span) * extent / extents[name]) for name, length in lengths.items() if name in extents}

    return problem.memo.memoize(("shares", names, tile_px, axis), compute)


def structural_run_key(problem: PlanningProblem, names: tuple[str, ...], *, any_size: bool) -> Hashable:
    """Key shared by runs with strips that differ only in names.

    Args:
        problem: the planning problem.
        names: operators of the run, in order.
        any_size: true for a key that is also equal at other image extents along the tiled axes.
    """
    general, values = problem.memoize_across_sizes(("likeness of a run", names), lambda: _run_hash(problem, names), weight=len(names))
    if any_size:
        return general
    return problem.memo.memoize(("likeness of a run", names), lambda: (general, tuple(problem.sized.shapes[name] for name in values)))


def _run_hash(problem: PlanningProblem, names: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Size-independent hash of a run, and the names of its values, including those that it reads from outside."""
    graph, phases, axes = problem.sized.graph, problem.sized.phases, problem.sized.graph.axes
    inputs, outputs, live_out = frozenset(graph.inputs), frozenset(graph.results), frozenset(graph.live_out(names))
    weights = frozenset() if problem.resources.weights is None else frozenset(problem.resources.weights.num_bytes)
    properties = (
        problem.sized.requires_grad,
        problem.resources.from_source,
        problem.resources.host_outputs,
        problem.sized.channels_last,
        problem.sized.per_sample,
        weights,
    )
    number = {name: index for index, name in enumerate(names)}
    digest = hashlib.sha256()

    def add(name: str, *facts: Hashable) -> None:
        shape = problem.sized.shapes[name]
        streamed = name in phases.streamed
        if streamed:
            shape = axes.with_extent(axes.with_extent(shape, ROWS, 0), COLUMNS, 0)
        memberships = tuple(name in each for each in (*properties, inputs, outputs, live_out))
        digest.update(repr((streamed, shape, problem.sized.dtypes[name], problem.sized.grad_dtypes[name], memberships, facts)).encode())

    for name in names:
        node, row = graph[name], phases.rows[name]
        for operand in node.operands:
            if operand not in number:
                number[operand] = len(number)
                add(operand, graph[operand].kind)
        arguments = map_refs(node.arguments, lambda operand: Ref(str(number[operand])))
        add(name, node.target, arguments, node.effect, row.name, row.role)
    return digest.digest(), tuple(number)
