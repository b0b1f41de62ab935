"""Region builder: decisions become a region with schedules, scopes, and the values that each segment reads and makes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import window_of
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleLevel
from sft.analysis.ir.ops.sample_rules import graph_of_samples
from sft.analysis.ir.targets import RANDOM_TARGETS
from sft.analysis.tiling.independent_tiles import TileSchedule, independent_tiles
from sft.analysis.tiling.sample_runs import run_cuts
from sft.analysis.tiling.strips import NodeRows, OperandRead, StripSchedule, StripStep, build_schedule
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_samples import SampleProgramKind
from sft.lower.program import Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.runtime.region import Region
from sft.runtime.sample_segment import ChunkLevel, SamplePart, SampleSegment
from sft.runtime.skip_constant import SkipConstantStrips
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.strip_policy import RUN_ALL_STRIPS
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.whole_segment import WholeSegment

__all__ = ["build_region", "can_stream", "full_extent_step", "segment_borders"]

_AnySegment = TiledSegment | WholeSegment | SampleSegment


def segment_borders(graph: Graph, choices: Sequence[SegmentChoice]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Values that each segment reads from outside, and those of its own that later segments or the caller read."""
    borders = []
    for choice in choices:
        inside = set(choice.nodes)
        reads = tuple(o for o in dict.fromkeys(o for name in choice.nodes for o in graph[name].operands) if o not in inside)
        borders.append((reads, graph.live_out(choice.nodes)))
    return borders


def build_region(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> Region:
    """Build the region of these decisions. Programs are lowered when first used, and shared by segments with equal ones.

    Raises:
        InputError: a value is marked as streamed that cannot be.
    """
    graph = problem.sized.graph
    borders = segment_borders(graph, choices)
    streamed = frozenset(name for choice in choices for name in choice.streamed)
    row_major = _row_major_cuts(problem, choices, borders)
    _check_streamed(problem, choices, borders)
    direct = problem.resources.direct_cuts(choices)
    single = {name for choice in choices for name in _single_grads(problem, choice)}
    leaving = problem.resources.host_outputs.intersection(problem.sized.phases.streamed).difference(*(reads for reads, _ in borders))
    return Region(
        graph=graph,
        segments=[
            _segment(problem, choice, makes, reads, leaving, streamed, direct, row_major)
            for choice, (reads, makes) in zip(choices, borders, strict=True)
        ],
        reads=[(*reads, *_reread_globals(problem, choice, makes)) for choice, (reads, makes) in zip(choices, borders, strict=True)],
        writes=[makes for _, makes in borders],
        shapes=problem.sized.shapes,
        dtypes=problem.sized.dtypes,
        grad_dtypes=problem.sized.grad_dtypes | {name: problem.sized.dtypes[name] for name in single},
        requires_grad=problem.sized.requires_grad,
        outputs=graph.results,
        contiguous=(frozenset(graph.results) - problem.sized.channels_last) | row_major,
        from_source=problem.resources.from_source,
        host_outputs=problem.resources.host_outputs,
        streamed=streamed,
        direct=direct,
        weights=problem.resources.weights,
    )


def _row_major_cuts(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], borders: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
) -> frozenset[str]:
    """Cuts of chunks of samples with the rank of images, but no images: queries, keys and values. Untiled operators read them row-major."""
    return frozenset(
        name
        for choice, (_, makes) in zip(choices, borders, strict=True)
        if _takes_chunks(problem, choice)
        for name in makes
        if len(problem.sized.shapes[name]) in CHANNELS_LAST
        and name not in problem.sized.phases.streamed
        and name not in problem.sized.graph.results
    )


def _takes_chunks(problem: PlanningProblem, choice: SegmentChoice) -> bool:
    """True for an untiled segment that takes some samples, windows or tokens at a time."""
    return choice.mode == "whole" and (bool(choice.strip_rows) or 0 < choice.batch_tile < problem.sized.num_batch)


def _single_grads(problem: PlanningProblem, choice: SegmentChoice) -> frozenset[str]:
    """Parameters with gradients of a single contribution, in a segment that runs once."""
    is_run_once = choice.mode != "tiled" and not _takes_chunks(problem, choice)
    return problem.sized.single_grads(choice.nodes) if is_run_once else frozenset()


def can_stream(problem: PlanningProblem, name: str) -> bool:
    """True if a value may pass through the host between two segments: an image (signal, volume) that is not an output of the model."""
    return name in problem.sized.phases.streamed and name not in problem.sized.graph.results


def _check_streamed(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], borders: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    for choice, (_, makes) in zip(choices, borders, strict=True):
        invalid = [name for name in choice.streamed if choice.mode != "tiled" or name not in makes or not can_stream(problem, name)]
        if invalid:
            raise InputError(
                f"{', '.join(invalid)} cannot pass to later segments strip by strip: only images made by a tiled segment can; "
                "make a new plan with sft.plan(...)"
            )


def _reread_globals(problem: PlanningProblem, choice: SegmentChoice, makes: Sequence[str]) -> tuple[str, ...]:
    """Global values made by a tiled segment that its own backward pass reads."""
    if choice.mode != "tiled":
        return ()
    return tuple(
        name
        for name in makes
        if name not in problem.sized.phases.streamed and problem.sized.phases.rows[name].saves_for_backward(problem.sized.graph[name])[1]
    )


def _segment(
    problem: PlanningProblem,
    choice: SegmentChoice,
    outputs: tuple[str, ...],
    outside: tuple[str, ...],
    leaving: frozenset[str],
    streamed: frozenset[str],
    direct: frozenset[str],
    row_major: frozenset[str],
) -> _AnySegment:
    """The segment of one decision; ``leaving`` are the outputs that may go to the host strip by strip, as no segment reads them again.

    Segments that differ only in their kept states, or in which of their borders are streamed, share programs.
    """
    shared = replace(choice, state_every=1, restart=False, streamed=())
    if choice.mode == "tiled":
        shared = replace(shared, state_slots=0)
    row_major = row_major.intersection(outside)
    key = ("segment", shared, outputs, outside, leaving, row_major)
    segment = problem.memo.memoize(key, lambda: _build_segment(problem, shared, outputs, outside, leaving, row_major))
    borders = (streamed.intersection(outside), streamed.intersection(outputs), direct.intersection((*outside, *outputs)))
    # The segment object caches the cost of its sweeps: of many segments few differ from one proposal to the next.
    states = (choice.state_every, choice.state_slots, choice.restart)
    return problem.memo.memoize((*key, states, borders), lambda: _with_borders(segment, choice, *borders))


def _with_borders(
    segment: _AnySegment, choice: SegmentChoice, arrives: frozenset[str], leaves: frozenset[str], direct: frozenset[str]
) -> _AnySegment:
    """The segment with these state policies and streamed borders."""
    if not isinstance(segment, TiledSegment):
        return replace(segment, from_source=segment.from_source | arrives)
    return replace(
        segment,
        checkpoints=Checkpoints(choice.state_every, choice.state_slots),
        restart=choice.restart,
        from_source=segment.from_source | arrives,
        to_host=segment.to_host | leaves,
        direct=direct,
    )


def _build_segment(
    problem: PlanningProblem,
    choice: SegmentChoice,
    outputs: tuple[str, ...],
    outside: tuple[str, ...],
    leaving: frozenset[str],
    row_major: frozenset[str],
) -> _AnySegment:
    phases = problem.sized.phases
    sources = tuple(name for name in outside if name in phases.streamed)
    sides = tuple(name for name in outside if name not in phases.streamed)
    tiled = choice.mode == "tiled"
    full_width = full_extent_step(problem, choice.nodes, sources, axis=COLUMNS)
    scope = SegmentInfo(
        graph=problem.sized.graph,
        specs=phases.rows,
        streamed=phases.streamed,
        names=choice.nodes,
        shapes=problem.sized.shapes,
        requires_grad=problem.sized.requires_grad,
        outputs=outputs,
        sources=sources,
        in_program_layout=problem.images_in_layout(sources) | problem.globals_in_layout(sides, tiled=tiled),
        batch=choice.batch_tile if tiled else problem.sized.num_batch,
        per_sample=problem.sized.per_sample,
        columns={columns.name: columns for columns in full_width.nodes},
        row_major=row_major if _takes_chunks(problem, choice) else frozenset(),
        channels_last_weights=problem.channels_last_weights(sides),
        keeps_torch_layouts=not tiled and problem.keeps_torch_layouts,
        backend=problem.resources.backend,
        deterministic=problem.resources.deterministic,
        on_host=problem.resources.on_host,
        single_grads=_single_grads(problem, choice),
    )
    from_source = problem.resources.from_source.intersection(sources)
    if not tiled:
        step = full_extent_step(problem, choice.nodes, sources)
        if choice.strip_rows:
            return _window_segment(problem, choice, scope, from_source)
        if _takes_chunks(problem, choice):
            return _batch_segment(problem, choice, scope, from_source)
        return WholeSegment(scope=scope, step=step, sides=sides, from_source=from_source)
    panels: tuple[StripStep, ...] = (full_width,)
    if choice.panel_cols and choice.panel_cols < problem.sized.run_width(choice.nodes):
        panels = _tile_steps(problem, choice.nodes, choice.panel_cols, axis=COLUMNS)
    return TiledSegment(
        scope=scope,
        schedule=_strip_schedule(problem, choice),
        panels=panels,
        checkpoints=Checkpoints(),
        restart=False,
        num_batch=problem.sized.num_batch,
        sides=sides,
        from_source=from_source,
        to_host=leaving.intersection(outputs),
        contiguous=leaving - problem.sized.channels_last,
        strip_policy=SkipConstantStrips() if problem.resources.skips_repeats else RUN_ALL_STRIPS,
    )


def _batch_segment(problem: PlanningProblem, choice: SegmentChoice, scope: SegmentInfo, from_source: frozenset[str]) -> SampleSegment:
    """Segment that runs some elements of the batch at a time.

    Raises:
        InputError: its operators exchange samples.
    """
    sized, runs = problem.sized, problem.sized.sample_runs
    stages = () if runs is None else tuple(stage for stage in runs.stages if stage.is_run)
    stage = next((stage for stage in stages if set(stage.names).issuperset(choice.nodes)), None)
    if stage is None:
        inside = {name for each in stages for name in each.names}
        exchange = next((name for name in choice.nodes if name not in inside), choice.nodes[-1])
        raise InputError(
            f"a segment of {len(choice.nodes)} operators cannot take {choice.batch_tile} of {sized.num_batch} samples at a time: "
            f"{sized.graph[exchange].label} exchanges samples; make a new plan with sft.plan(...)"
        )
    samples = SampleLevel(num_samples=sized.num_batch, axes=stage.axes)
    return _sample_segment(problem, choice, scope, from_source, [ChunkLevel(samples=samples, chunk_samples=choice.batch_tile)])


def _window_segment(problem: PlanningProblem, choice: SegmentChoice, scope: SegmentInfo, from_source: frozenset[str]) -> SampleSegment:
    """Segment that runs some rows of windows at a time.

    Raises:
        InputError: its operators exchange rows of windows.
    """
    sized = problem.sized
    stage = sized.window_stage(choice.nodes)
    if stage is None or (choice.panel_cols and stage.columns is None):
        inside = {name for windows in sized.window_runs.values() for name in windows.run_names} if stage is None else set()
        exchange = next((name for name in choice.nodes if name not in inside), choice.nodes[-1])
        windows = f"{choice.panel_cols} windows" if choice.panel_cols else f"{choice.strip_rows} rows of windows"
        raise InputError(
            f"a segment of {len(choice.nodes)} operators cannot take {windows} at a time: "
            f"{sized.graph[exchange].label} exchanges them; make a new plan with sft.plan(...)"
        )
    assert stage.rows is not None
    levels = [] if stage.images is None else [ChunkLevel(samples=stage.images, chunk_samples=1)]
    num_rows = 1 if choice.panel_cols else min(choice.strip_rows, stage.rows.num_samples)
    levels.append(ChunkLevel(samples=stage.rows, chunk_samples=num_rows))
    num_read_levels = len(levels)
    if choice.panel_cols and stage.columns is not None:
        levels.append(ChunkLevel(samples=stage.columns, chunk_samples=min(choice.panel_cols, stage.columns.num_samples)))
    return _sample_segment(problem, choice, scope, from_source, levels, num_read_levels)


def _sample_segment(
    problem: PlanningProblem,
    choice: SegmentChoice,
    scope: SegmentInfo,
    from_source: frozenset[str],
    levels: Sequence[ChunkLevel],
    num_read_levels: int = 1,
) -> SampleSegment:
    graph = problem.sized.graph
    touched = {*choice.nodes, *(operand for name in choice.nodes for operand in graph[name].operands)}
    levels = [replace(level, samples=_among(level.samples, touched)) for level in levels]
    scopes = {
        sizes: _scope_of_samples(problem, scope, levels, sizes)
        for sizes in product(*(sorted({len(chunk) for chunk in level.chunks}) for level in levels))
    }
    cuts = run_cuts(graph, choice.nodes, levels[num_read_levels - 1].samples.axes, scope.outputs, choice.state_slots)
    return SampleSegment(
        scope=scope,
        parts=tuple(_sample_parts(problem, scopes, choice.nodes, cuts)),
        levels=tuple(levels),
        num_read_levels=num_read_levels,
        from_source=from_source,
    )


def _sample_parts(
    problem: PlanningProblem, scopes: Mapping[tuple[int, ...], SegmentInfo], names: tuple[str, ...], cuts: Sequence[int]
) -> Iterator[SamplePart]:
    """The parts of a run between the positions ``cuts`` of its operators."""
    for start, stop in pairwise((0, *cuts, len(names))):
        part_scopes, crossing = {}, frozenset[str]()
        for sizes, scope in scopes.items():
            graph, inside = scope.graph, names[start:stop]
            operands = {operand for name in inside for operand in graph[name].operands}
            outputs = graph.live_out(inside)
            crossing = frozenset(outputs).difference(scope.outputs)
            part_scopes[sizes] = replace(
                scope,
                names=inside,
                outputs=outputs,
                sources=tuple(name for name in (*scope.sources, *names[:start]) if name in operands and name in scope.streamed),
                in_program_layout=scope.in_program_layout.union(names[:start]),
            )
        steps = {sizes: _full_extent_step(each.graph, each.names, each.sources, each.streamed, ROWS) for sizes, each in part_scopes.items()}
        programs: dict[tuple[int, ...], dict[SampleProgramKind, Program]]
        programs = {sizes: problem.shared.get_or_make(_chunk_key(each), dict, len(inside)) for sizes, each in part_scopes.items()}
        yield SamplePart(scopes=part_scopes, steps=steps, programs=programs, cuts=crossing)


def _chunk_key(scope: SegmentInfo) -> Hashable:
    """Key of all that the lowering reads of a run for some samples; equal for any number of other samples."""
    graph, results = scope.graph, set(scope.graph.results)
    touched = sorted({*scope.names, *(operand for name in scope.names for operand in graph[name].operands)})
    values = [
        (
            *(name, graph[name].kind, graph[name].target, graph[name].dtype, graph[name].shape, scope.shapes[name], name in results),
            *(graph[name].arguments if name in set(scope.names) else (), graph.axes),
            *((user, graph[user].target) for user in graph.users[name]),
            *(name in names for names in _name_sets(scope)),
            scope.full_shapes.get(name) if graph[name].target in RANDOM_TARGETS else None,
        )
        for name in touched
    ]
    # Bound methods are equal if their objects are.
    rewrite = None if scope.backend is None else scope.backend.rewrite
    settings = (scope.keeps_torch_layouts, scope.deterministic, scope.on_host, rewrite)
    return ("chunk", hashlib.sha256(repr(values).encode()).digest(), scope.names, scope.outputs, scope.sources, scope.batch, *settings)


def _name_sets(scope: SegmentInfo) -> tuple[frozenset[str], ...]:
    layouts = (scope.in_program_layout, scope.row_major, scope.channels_last_weights, scope.strided)
    return scope.streamed, scope.requires_grad, scope.per_sample, *layouts


def _among(samples: SampleLevel, names: Collection[str]) -> SampleLevel:
    """The samples, with their positions in these values alone."""
    return replace(samples, axes={name: axis for name, axis in sorted(samples.axes.items()) if name in names})


def _scope_of_samples(problem: PlanningProblem, scope: SegmentInfo, levels: Sequence[ChunkLevel], sizes: Sequence[int]) -> SegmentInfo:
    """The scope of a segment for some samples: its graph with the shapes of these."""
    graph, strided = scope.graph, set[str]()
    for level, num_samples in zip(levels, sizes, strict=True):
        strided |= _strided_slices(graph, level.samples.axes)
        graph = graph_of_samples(graph, level.samples.axes, num_samples)
    columns = _full_extent_step(graph, scope.names, scope.sources, scope.streamed, COLUMNS)
    return replace(
        scope,
        graph=graph,
        shapes={node.name: node.shape for node in graph.nodes},
        full_shapes={name: scope.shapes[name] for level in levels for name in level.samples.axes},
        batch=sizes[0] if problem.sized.num_batch > 1 else 1,
        columns={node.name: node for node in columns.nodes},
        per_sample=frozenset(name for name, axis in levels[0].samples.axes.items() if name in scope.per_sample and axis.dim == 0),
        strided=frozenset(
            name
            for name in strided.difference(scope.streamed)
            if len(scope.shapes[name]) not in CHANNELS_LAST or graph[name].kind != "operator" or name in scope.row_major
        ),
    )


def _strided_slices(graph: Graph, axes: Mapping[str, SampleAxis]) -> set[str]:
    """Values of which a slice of some samples is not a contiguous block."""
    return {name for name, axis in axes.items() if math.prod(graph[name].shape[: axis.dim]) != 1}


def _strip_schedule(problem: PlanningProblem, choice: SegmentChoice) -> StripSchedule | TileSchedule:
    """The strips, which do not depend on the division of the width and the batch."""
    return problem.memo.memoize(("schedule", choice.nodes, choice.strip_rows, choice.halo), lambda: _build_strip_schedule(problem, choice))


def _build_strip_schedule(problem: PlanningProblem, choice: SegmentChoice) -> StripSchedule | TileSchedule:
    run = problem.sized.phases.run(choice.nodes)
    if choice.halo == "carry":
        return build_schedule(run, problem.sized.extents(ROWS), choice.strip_rows)
    return TileSchedule(
        sources=run.sources,
        names=(*run.sources, *run.names),
        steps=_tile_steps(problem, choice.nodes, choice.strip_rows, axis=ROWS),
        strip_rows=choice.strip_rows,
    )


def _tile_steps(problem: PlanningProblem, names: Sequence[str], tile_px: int, *, axis: int) -> tuple[StripStep, ...]:
    def compute() -> tuple[StripStep, ...]:
        return independent_tiles(problem.sized.phases.run(names), problem.sized.extents(axis), tile_px, axis=axis)

    return problem.memo.memoize(("tiles", tuple(names), tile_px, axis), compute)


def full_extent_step(problem: PlanningProblem, names: Sequence[str], sources: Sequence[str], *, axis: int = ROWS) -> StripStep:
    """Step of the full extent along an axis: every value gains all its rows (columns) at once and keeps none."""
    key = ("whole step", tuple(names), tuple(sources), axis)
    return problem.memo.memoize(key, lambda: _build_full_extent_step(problem, names, sources, axis))


def _build_full_extent_step(problem: PlanningProblem, names: Sequence[str], sources: Sequence[str], axis: int) -> StripStep:
    return _full_extent_step(problem.sized.graph, names, sources, problem.sized.phases.streamed, axis)


def _full_extent_step(graph: Graph, names: Sequence[str], sources: Sequence[str], streamed: frozenset[str], axis: int) -> StripStep:
    nodes = []
    for name in (*sources, *names):
        rows = Interval(0, graph.axes.extent(graph[name].shape, axis) if name in streamed else 0)
        reads = () if name in sources else _full_reads(graph, graph[name], streamed, axis)
        nodes.append(NodeRows(name=name, new=rows, available=rows, kept=Interval(rows.stop, rows.stop), owned=rows, reads=reads))
    return StripStep(index=0, nodes=tuple(nodes))


def _full_reads(graph: Graph, node: Node, streamed: frozenset[str], axis: int) -> tuple[OperandRead, ...]:
    window = window_of(node, axis)
    low, high = (window.pad_low, window.pad_high) if window is not None else (0, 0)
    return tuple(
        OperandRead(operand=name, rows=Interval(0, graph.axes.extent(graph[name].shape, axis)), pad_low=low, pad_high=high)
        for name in dict.fromkeys(node.operands)
        if name in streamed
    )
