"""Sample segment: runs operators that compute every sample on its own, for some samples at a time.

Samples are the streamed axis: no halo, no carried state, and no FLOP more than one recomputation. Forward, a few samples run through all
operators, and only the outputs remain. Backward, they are recomputed and differentiated, a few at a time; the gradients of parameters are
sums over all of them. A sample is an element of the batch, or a row of windows or a token of one image
(:mod:`sft.analysis.tiling.window_runs`). Values that operators read in full (keys and values of attention) are read like parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from typing import Any, ClassVar, Literal

from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.analysis.ir.ops.sample_axis import SampleLevel
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_samples import SampleProgramKind, lower_samples
from sft.lower.program import Port, Program
from sft.runtime.machine import Buffer, BufferOps, Gradients, Machine, ProgramOps, ValueBindings

__all__ = ["Chunk", "ChunkLevel", "SamplePart", "SampleSegment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLevel:
    """Division of samples into chunks.

    Attributes:
        samples: the samples, and their position in the values that are taken, or made, sample by sample.
        chunk_samples: samples of a chunk; the last one may have fewer.
    """

    samples: SampleLevel
    chunk_samples: int

    @property
    def chunks(self) -> tuple[Interval, ...]:
        """Samples of each chunk."""
        size, total = self.chunk_samples, self.samples.num_samples
        return tuple(Interval(start, min(start + size, total)) for start in range(0, total, size))

    @property
    def distinct_chunks(self) -> tuple[tuple[Interval, int], ...]:
        """The first chunk of each size, and the number of chunks of this size."""
        size, total = self.chunk_samples, self.samples.num_samples
        num_full, num_left = divmod(total, size)
        full = ((Interval(0, size), num_full),) if num_full else ()
        return (*full, (Interval(total - num_left, total), 1)) if num_left else full

    def indices(self, name: str, chunk: Interval) -> Interval:
        """Indices of a value's dimension of samples that hold the samples of a chunk."""
        inner = self.samples.axes[name].inner
        return Interval(chunk.start * inner, chunk.stop * inner)


#: Samples of a chunk at each level.
Chunk = tuple[Interval, ...]


@dataclass(kw_only=True)
class SamplePart:
    """Operators of a run between two checkpoints of a chunk.

    Attributes:
        scopes: input of the lowering, by numbers of samples of a chunk at each level.
        steps: one strip that covers the images of a chunk, by these numbers.
        programs: programs lowered so far, by these numbers and kind; parts of regions for other numbers of samples share them.
        cuts: its values that later parts read.
    """

    scopes: Mapping[tuple[int, ...], SegmentInfo]
    steps: Mapping[tuple[int, ...], StripStep]
    programs: Mapping[tuple[int, ...], dict[SampleProgramKind, Program]] = field(repr=False)
    cuts: frozenset[str] = frozenset()

    def program(self, kind: SampleProgramKind, chunk: Chunk) -> Program:
        """Program of a chunk; chunks of as many samples share it."""
        sizes = tuple(map(len, chunk))
        programs = self.programs[sizes]
        if kind not in programs:
            programs[kind] = lower_samples(self.scopes[sizes], self.steps[sizes], kind)
        return programs[kind]

    @property
    def lowered_programs(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(program for programs in self.programs.values() for program in programs.values())

    def allocate(self, machine: BufferOps, name: str, chunk: Chunk, *, is_gradient: bool = False) -> Buffer:
        """Buffer of a cut of a chunk, or zeros for its gradient."""
        scope = self.scopes[tuple(map(len, chunk))]
        dtype = scope.grad_dtype(name) if is_gradient else scope.dtype_of(name)
        return machine.allocate(scope.shapes[name], dtype, zero=is_gradient)


@dataclass(frozen=True, slots=True)
class _ChunkRun:
    """A chunk that a machine runs.

    Attributes:
        machine: runs the programs.
        values: the values.
        inputs: inputs that are not resident, read for the chunk.
        chunk: samples at each level.
    """

    machine: Machine
    values: ValueBindings
    inputs: Mapping[str, Buffer]
    chunk: Chunk


@dataclass(kw_only=True)
class SampleSegment:
    """Segment that runs some samples at a time, on full tensors of these.

    Attributes:
        scope: input of the lowering, for all samples.
        parts: its operators, as one part or several; of several, values between them are kept while a chunk runs back, and each part is
            recomputed from these.
        levels: the samples, from outside to inside: elements of the batch, rows of windows (tokens), windows of a row. Levels before the
            last one take one at a time.
        num_read_levels: levels of which a chunk is read at a time: those that divide the batch and the rows of images.
        from_source: inputs, and cuts on the host, that are not resident.
    """

    #: its gradients are added to existing buffers
    accumulates: ClassVar[bool] = True
    #: its backward pass recomputes everything from the values that it reads
    saves: ClassVar[bool] = False
    views: ClassVar[frozenset[str]] = frozenset()
    keeps_buffers: ClassVar[bool] = False
    #: its outputs are buffers on the device, also those that are copied to the host afterwards
    to_host: ClassVar[frozenset[str]] = frozenset()

    scope: SegmentInfo
    parts: tuple[SamplePart, ...]
    levels: tuple[ChunkLevel, ...]
    num_read_levels: int = 1
    from_source: frozenset[str] = frozenset()

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks in order."""
        return tuple(product(*(level.chunks for level in self.levels)))

    @cached_property
    def groups(self) -> tuple[tuple[Chunk, tuple[Chunk, ...]], ...]:
        """Chunks at the levels that are read, each with its chunks at all levels, in order."""
        return tuple((first, tuple(chunks)) for first, chunks in groupby(self.chunks, key=self._read_chunk))

    def programs(self, kind: Literal["forward", "backward"]) -> tuple[Program, ...]:
        """Programs of one pass over all chunks, as often as they run."""
        return tuple(program for chunk in self.chunks for program in self._chunk_programs(kind, chunk))

    def _chunk_programs(self, kind: Literal["forward", "backward"], chunk: Chunk) -> Iterator[Program]:
        repeated_parts = self.parts if kind == "forward" else self.parts[:-1]
        yield from (part.program("forward", chunk) for part in repeated_parts)
        if kind == "backward":
            yield from (part.program("joint", chunk) for part in self.parts)

    @property
    def lowered_programs(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(program for part in self.parts for program in part.lowered_programs)

    @property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        """None: a source has samples that later chunks read."""
        return {}

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that the segment allocates itself: none, since chunks are written into existing buffers."""
        return frozenset()

    def buffers(self, machine: ProgramOps, saved: Any) -> Sequence[Buffer]:
        """Buffers of its residuals: none."""
        return ()

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Values that its backward pass reads: all, since it recomputes the chunks."""
        return reads

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> None:
        """Run all chunks; nothing remains but the outputs."""
        for first, chunks in self.groups:
            self.run_group_forward(machine, values, first, chunks)

    def run_group_forward(self, machine: Machine, values: ValueBindings, first: Chunk, chunks: Sequence[Chunk]) -> None:
        """Run the chunks of a chunk that is read."""
        with self._inputs(machine, values, first) as inputs:
            for chunk in chunks:
                self._run_forward(_ChunkRun(machine, values, inputs, chunk), self.parts, writes_outputs=True).clear()

    def _run_forward(self, run: _ChunkRun, parts: Sequence[SamplePart], *, writes_outputs: bool) -> dict[str, Buffer]:
        """Run the first parts of a chunk; returns the cuts between them. If outputs are written, cuts are dropped after their last use."""
        machine, values, chunk = run.machine, run.values, run.chunk
        cuts: dict[str, Buffer] = {}
        for number, part in enumerate(parts):
            program = part.program("forward", chunk)
            bindings = self._bound_values(run, program, cuts)
            for port in program.ports:
                if port.role == "out" and port.name in part.cuts:
                    bindings[port] = cuts[port.name] = part.allocate(machine, port.name, chunk)
                elif port.role == "out" and writes_outputs:
                    bindings[port] = self._samples(machine, values.by_name[port.name], port.name, chunk)
                elif port.role == "out":
                    bindings[port] = part.allocate(machine, port.name, chunk)
            machine.run(program, bindings)
            bindings.clear()
            if writes_outputs:
                later = {port.name for each in parts[number + 1 :] for port in each.program("forward", chunk).ports}
                for name in [name for name in cuts if name not in later]:
                    del cuts[name]
        return cuts

    def backward(self, machine: Machine, values: ValueBindings, saved: Any, grads: Gradients, *, consume: bool = True) -> None:
        """Recompute and differentiate all chunks, in reverse order."""
        for first, chunks in reversed(self.groups):
            self.run_group_backward(machine, values, grads, first, chunks)

    def run_group_backward(self, machine: Machine, values: ValueBindings, grads: Gradients, first: Chunk, chunks: Sequence[Chunk]) -> None:
        """Recompute and differentiate the chunks of a chunk that is read, in reverse order."""
        sink_grads: dict[str, Buffer] = {}
        with self._inputs(machine, values, first) as inputs:
            for chunk in reversed(chunks):
                run = _ChunkRun(machine, values, inputs, chunk)
                self._run_backward(run, self._run_forward(run, self.parts[:-1], writes_outputs=False), grads, sink_grads)
        for name in list(sink_grads):
            gradient = sink_grads.pop(name)
            machine.add_to_sink(grads.sinks[name], *self._region(name, first), gradient)
            del gradient

    def _run_backward(self, run: _ChunkRun, cuts: dict[str, Buffer], grads: Gradients, sink_grads: dict[str, Buffer]) -> None:
        """Differentiate the parts of a chunk, the last one first."""
        machine, chunk = run.machine, run.chunk
        maker = {name: part for part in self.parts for name in part.cuts}
        cut_grads: dict[str, Buffer] = {}
        for part in reversed(self.parts):
            program = part.program("joint", chunk)
            for name in part.cuts:
                cuts.pop(name, None)
            bindings = self._bound_values(run, program, cuts)
            for port in program.ports:
                if port.role not in ("grad_out", "grad_source", "grad_side"):
                    continue
                if port.name in maker:
                    if port.name not in cut_grads:
                        cut_grads[port.name] = maker[port.name].allocate(machine, port.name, chunk, is_gradient=True)
                    bindings[port] = cut_grads[port.name]
                elif port.role == "grad_source" and port.name in grads.sinks:
                    if port.name not in sink_grads:
                        sink_grads[port.name] = self._zero_gradient(machine, port.name, self._read_chunk(chunk))
                    bindings[port] = self._samples(machine, sink_grads[port.name], port.name, chunk, is_read=True)
                else:
                    bindings[port] = self._samples(machine, grads.by_name[port.name], port.name, chunk)
            machine.run(program, bindings)
            bindings.clear()
            for name in part.cuts:
                cut_grads.pop(name, None)

    def _read_chunk(self, chunk: Chunk) -> Chunk:
        """Samples at the levels of which a chunk is read at a time."""
        return chunk[: self.num_read_levels]

    @contextmanager
    def _inputs(self, machine: Machine, values: ValueBindings, first: Chunk) -> Iterator[dict[str, Buffer]]:
        """Inputs that are not resident, read for a chunk, and dropped at the end."""
        inputs: dict[str, Buffer] = {}
        with ExitStack() as stack:
            for name in self.scope.sources:
                if name in self.from_source:
                    batch, rows = self._region(name, first)
                    loader = machine.open_input(
                        values.by_name[name], batch, (rows,), self._row_bytes(name, batch), self.scope.dtype_of(name)
                    )
                    stack.enter_context(closing(loader))
                    inputs[name] = loader.take(rows)
            yield inputs
            inputs.clear()

    def _bound_values(self, run: _ChunkRun, program: Program, cuts: Mapping[str, Buffer]) -> dict[Port, Buffer]:
        """Bindings of the values that a program reads."""
        machine, chunk = run.machine, run.chunk
        bindings: dict[Port, Buffer] = {}
        for port in program.ports:
            if port.role in ("source", "side") and port.name in cuts:
                bindings[port] = cuts[port.name]
            elif port.role == "source" and port.name in run.inputs:
                bindings[port] = self._samples(machine, run.inputs[port.name], port.name, chunk, is_read=True)
            elif port.role in ("source", "side"):
                bindings[port] = self._samples(machine, run.values.by_name[port.name], port.name, chunk)
            elif port.role == "origin":
                bindings[port] = self._origin(port.name, chunk)
        return bindings

    def _samples(self, machine: BufferOps, buffer: Buffer, name: str, chunk: Chunk, *, is_read: bool = False) -> Buffer:
        """View of the samples of a chunk; the full buffer of a value that all samples share.

        Args:
            machine: the machine.
            buffer: the value, or its gradient.
            name: its name.
            chunk: samples at each level.
            is_read: True if the buffer has the samples of the chunk at the levels that are read.
        """
        for position, (level, samples) in enumerate(zip(self.levels, chunk, strict=True)):
            axis = level.samples.axes.get(name)
            if axis is None or (is_read and position < self.num_read_levels):
                continue
            indices = level.indices(name, samples)
            if axis.dim == 0:
                buffer = machine.view(buffer, indices, None)
            else:
                buffer = machine.view(buffer, None, indices, axes=Axes(len(self.scope.shapes[name]) - axis.dim))
        return buffer

    def _origin(self, name: str, chunk: Chunk) -> tuple[int, ...]:
        """Position of the first element of a chunk: batch element, row and column of an image; of other values channels, too.

        The dimensions of other values count samples, channels, rows, and columns with all further ones (:mod:`sft.lower.rules.random`).
        """
        shape, axes, is_image = self.scope.shapes[name], self.scope.axes, name in self.scope.streamed
        dims = [0, *(axes.dim(len(shape), axis) for axis in (ROWS, COLUMNS))] if is_image else [0, 2, 3, 1]
        origin = [0] * len(dims)
        for level, samples in zip(self.levels, chunk, strict=True):
            axis = level.samples.axes.get(name)
            if axis is not None:
                num_columns = 1 if is_image or axis.dim < 3 else math.prod(shape[4:])
                origin[dims.index(axis.dim)] += level.indices(name, samples).start * num_columns
        return tuple(origin)

    def _region(self, name: str, first: Chunk) -> tuple[Interval, Interval]:
        """Batch elements and rows of an image that hold the samples of a chunk at the levels that are read."""
        batch, rows = Interval(0, self.scope.shapes[name][0]), Interval(0, self.scope.extent(name, ROWS))
        for level, samples in zip(self.levels, first, strict=False):
            axis = level.samples.axes.get(name)
            if axis is not None and axis.dim == 0:
                batch = level.indices(name, samples)
            elif axis is not None:
                rows = level.indices(name, samples)
        return batch, rows

    def _row_bytes(self, name: str, batch: Interval) -> int:
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, 1)
        return len(batch) * math.prod(shape[1:]) * self.scope.dtype_of(name).itemsize

    def _zero_gradient(self, machine: BufferOps, name: str, first: Chunk) -> Buffer:
        shape = self.scope.shapes[name]
        for level, samples in zip(self.levels, first, strict=False):
            if name in level.samples.axes:
                shape = level.samples.axes[name].resize(shape, len(samples))
        return machine.allocate(shape, self.scope.sink_dtype(name), zero=True)
