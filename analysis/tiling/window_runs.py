"""Window runs: untiled operators that compute every row of windows of an image, or every token of a sequence, on its own.

A model partitions an image into windows, computes each of them, and joins or pools the results::

    x.view(B, C, H // t, t, W // t, t).permute(0, 2, 4, 1, 3, 5).reshape(-1, C, t, t)

Passes turn the partition into an image of ``H / t`` rows whose channels are the pixels of a window (``sft.pixel_unshuffle``), and a
permutation of its dimensions (``sft.restore_dims``). A row of this image is a row of windows. So the windows are samples along the rows:
:class:`~sft.analysis.ir.ops.sample_axis.SampleAxis` follows them through the operators after the partition, and back into an image
(``[B, H / t, t, W, C]`` has ``inner = t``). A run takes some rows of windows at a time, without halos.

Operators that exchange rows of windows (a cyclic shift, a norm over all windows, pooling of their vectors) end a run, as in
:mod:`sft.analysis.tiling.sample_runs`. Streamed operators before the partition join the run if each row of windows reads rows of its own;
the image may then be read from a source, a row of windows at a time. Otherwise they run in strips, as a segment before it.

**Windows of a row.** If the operators of a run compute every window on its own, and the values that cross its border have the windows in
contiguous blocks, a chunk may also be some windows of one row. Positions of windows in a row are found in the graph of a single row: there
the columns of images are what rows are in the graph.

**Tokens.** Attention over all tokens of an image reads keys and values in full, and some queries at a time. If the tokens are rows of
pixels, windows of one row of pixels follow them. A class token breaks the rows; then the samples are the tokens themselves, from the join
on.

**Other windows.** Windows that no rows of the image hold (a grid of strided windows, a partition by indices) are samples once they are in
the first dimension of a value. The partition is then an exchange. Operators that no level of samples follows are sorted again by the other
levels.

**Several images.** A chunk is then a part of one image: windows are found in the graph of a single image, and the images are samples of a
level above (:mod:`sft.analysis.tiling.sample_runs`). Operators that exchange images run on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops.sample_axis import SampleLevel, SampleTracker
from sft.analysis.ir.ops.sample_rules import graph_of_samples
from sft.analysis.tiling.phases import Phase, PhasedGraph
from sft.analysis.tiling.sample_runs import SampleRuns, sort_into_runs
from sft.analysis.tiling.window_trackers import (
    ImageTracker,
    SequenceTracker,
    TrackerScope,
    extents_read,
    num_windows_read,
    sequence_lengths,
)

__all__ = ["PhaseWindows", "WindowStage", "find_window_runs"]

#: A new tracker that must leave these operators out of runs.
TrackerWithout = Callable[[frozenset[str]], SampleTracker]
#: Tokens of a chunk at least, and chunks of a sequence at most up to this number of tokens.
_TOKENS_PER_CHUNK, _MAX_CHUNKS = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStage:
    """Operators of a phase between two exchanges of rows of windows, or such an exchange.

    Attributes:
        names: operators in execution order.
        rows: the rows of windows, the windows, or the tokens; ``None`` for an exchange.
        columns: the windows of a row, in the graph of a single row; ``None`` if they cannot be taken one by one.
        images: the elements of the batch, of which a chunk takes one; ``None`` for a single image.
        unit: samples of ``rows``.
        rows_per_chunk: samples of ``rows`` that a chunk takes at least.
        read_in_full: values of which a chunk reads all samples: keys and values of attention.
    """

    names: tuple[str, ...]
    rows: SampleLevel | None = None
    columns: SampleLevel | None = None
    images: SampleLevel | None = None
    unit: Literal["window rows", "windows", "tokens"] = "window rows"
    rows_per_chunk: int = 1
    read_in_full: frozenset[str] = frozenset()

    @property
    def num_windows(self) -> int:
        """Largest number of chunks of an image that the stage can be divided into."""
        num_rows = 1 if self.rows is None else -(-self.rows.num_samples // self.rows_per_chunk)
        return num_rows * (1 if self.columns is None else self.columns.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows:
    """Window runs of one phase.

    Attributes:
        stages: the stages in execution order.
        has_streamed: True if the stages include the phase's streamed operators; otherwise its tail alone.
    """

    stages: tuple[WindowStage, ...]
    has_streamed: bool

    @property
    def run_names(self) -> frozenset[str]:
        """Operators inside of runs."""
        return frozenset(name for stage in self.stages if stage.rows is not None for name in stage.names)


def find_window_runs(phases: PhasedGraph, samples: SampleRuns | None = None) -> Mapping[int, PhaseWindows]:
    """Window runs by index of the phase, for those that have any.

    Args:
        phases: the phased graph at one input size.
        samples: runs of operators that are independent along the batch, for several images; without them several images have no runs.
    """
    num_images = max((phases.graph[name].shape[0] for name in phases.graph.inputs if name in phases.streamed), default=1)
    if num_images > 1 and samples is None:
        return {}
    search = _WindowSearch.of(phases, samples if num_images > 1 else None, num_images)
    by_phase = ((index, search.phase_windows(phase)) for index, phase in enumerate(phases.phases))
    return {index: windows for index, windows in by_phase if windows is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowSearch:
    """Search for window runs in the graph of a single image.

    Attributes:
        phases: the phased graph of a single image.
        images: the elements of the batch; ``None`` for a single image.
        allowed: operators that may be inside of a run.
    """

    phases: PhasedGraph
    images: SampleLevel | None
    allowed: frozenset[str]

    @classmethod
    def of(cls, phases: PhasedGraph, samples: SampleRuns | None, num_images: int) -> _WindowSearch:
        if samples is None:
            allowed = frozenset(node.name for node in phases.graph.operators).difference(phases.prologue)
            return cls(phases=phases, images=None, allowed=allowed)
        images = SampleLevel(num_samples=num_images, axes=samples.axes)
        graph = graph_of_samples(phases.graph, samples.axes, 1)
        return cls(phases=replace(phases, graph=graph), images=images, allowed=samples.run_names.difference(samples.read_in_full))

    @property
    def graph(self) -> Graph:
        """The graph of a single image."""
        return self.phases.graph

    def phase_windows(self, phase: Phase) -> PhaseWindows | None:
        """Stages of a phase; ``None`` if no operator is in a run."""
        results = [
            PhaseWindows(stages=tuple(self._refined(stages)), has_streamed=has_streamed)
            for has_streamed in (True, False)
            if (stages := self._stages((*(phase.streamed if has_streamed else ()), *phase.tail), phase.streamed if has_streamed else ()))
        ]
        return max(results, key=lambda windows: self._num_elements(windows.stages), default=None)

    def _refined(self, stages: Sequence[WindowStage]) -> Iterator[WindowStage]:
        """The stages, with exchanges divided into stages of other levels."""
        for stage in stages:
            inner = self._stages(stage.names) if stage.rows is None else ()
            yield from self._refined(inner) if inner else (stage,)

    def _stages(self, names: Sequence[str], required: Sequence[str] = ()) -> Sequence[WindowStage]:
        """Stages at the level with most elements in runs; empty if no operator is in a run, or a required one is in none."""
        candidates = [
            stages
            for stages in self._stages_by_level(names, has_images=bool(required))
            if frozenset(required).issubset(name for stage in stages if stage.rows is not None for name in stage.names)
        ]
        best: Sequence[WindowStage] = max(candidates, key=self._num_elements, default=())
        return best if any(stage.rows is not None for stage in best) else ()

    def _stages_by_level(self, names: Sequence[str], *, has_images: bool) -> Iterator[Sequence[WindowStage]]:
        """Stages at each level of samples; only rows of windows have streamed operators."""
        among = frozenset(names)
        for num_rows in extents_read(self.phases, names, ROWS):
            yield self._sorted(names, num_rows, partial(self._image_tracker, self.graph, among, num_rows, ROWS), has_columns=True)
        if has_images:
            return
        for num_windows in num_windows_read(self.graph, names):
            stages = self._sorted(names, num_windows, partial(self._sequence_tracker, among, num_windows, is_leading=True))
            yield [replace(stage, unit="windows") for stage in stages]
        for num_tokens in sequence_lengths(self.graph, names):
            stages = self._sorted(names, num_tokens, partial(self._sequence_tracker, among, num_tokens, is_leading=False))
            chunk = min(_TOKENS_PER_CHUNK, -(-num_tokens // _MAX_CHUNKS))
            yield [replace(stage, unit="tokens", rows_per_chunk=chunk) for stage in stages]

    def _image_tracker(self, graph: Graph, names: frozenset[str], num_samples: int, axis: int, excluded: frozenset[str]) -> ImageTracker:
        return ImageTracker.of(self.phases, graph, num_samples, **self._scope(names, excluded)).begin_at_images(axis)

    def _sequence_tracker(self, names: frozenset[str], num_samples: int, excluded: frozenset[str], *, is_leading: bool) -> SequenceTracker:
        tracker = SequenceTracker.of(self.phases, self.graph, num_samples, **self._scope(names, excluded))
        return tracker.begin_at_sequences(is_leading=is_leading)

    def _scope(self, names: frozenset[str], excluded: frozenset[str]) -> TrackerScope:
        batch_axes = {} if self.images is None else self.images.axes
        return {"allowed": names & self.allowed, "excluded": excluded | (names - self.allowed), "batch_axes": batch_axes}

    def _sorted(
        self, names: Sequence[str], num_samples: int, tracker_without: TrackerWithout, *, has_columns: bool = False
    ) -> Sequence[WindowStage]:
        """Operators sorted into runs of one level, and exchanges."""
        inside = frozenset(names)
        operators = [node for node in self.graph.operators if node.name in inside]
        runs = sort_into_runs(self.graph, operators, frozenset(), tracker_without)
        stages = []
        for stage in runs.stages:
            if not stage.is_run:
                stages.append(WindowStage(names=stage.names))
                continue
            rows = SampleLevel(num_samples=num_samples, axes=stage.axes)
            columns = self._columns(stage.names, rows) if has_columns else None
            images = self._images_of(stage.names)
            stages.append(WindowStage(names=stage.names, rows=rows, columns=columns, images=images, read_in_full=stage.read_in_full))
        return stages

    def _images_of(self, names: Sequence[str]) -> SampleLevel | None:
        """The elements of the batch in the values of a run."""
        if self.images is None:
            return None
        touched = {*names, *(operand for name in names for operand in self.graph[name].operands)}
        return replace(self.images, axes={name: axis for name, axis in sorted(self.images.axes.items()) if name in touched})

    def _columns(self, names: Sequence[str], rows: SampleLevel) -> SampleLevel | None:
        """Windows of a row of a run; ``None`` if its operators exchange them, or if they are not blocks of its results."""
        row = graph_of_samples(self.graph, rows.axes, 1)
        for num_columns in extents_read(self.phases, names, COLUMNS):
            tracker = self._image_tracker(row, frozenset(names), num_columns, COLUMNS, frozenset())
            if all(tracker.track(row[name]) for name in names) and not tracker.read_in_full:
                crossing = self.graph.live_out(names)
                if all(tracker.is_sliceable(name, tracker.axes[name]) for name in crossing):
                    return SampleLevel(num_samples=num_columns, axes=tracker.axes)
        return None

    def _num_elements(self, stages: Sequence[WindowStage]) -> int:
        """Elements of the values that runs compute."""
        return sum(math.prod(self.graph[name].shape) for stage in stages if stage.rows is not None for name in stage.names)
