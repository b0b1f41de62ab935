"""Sample segment: runs operators that compute every sample on its own, for some samples at a time.

The batch is the streamed axis: no halo, no carried state, and no FLOP more than one recomputation. Forward, a few samples run through all
operators, and only the outputs remain. Backward, they are recomputed and differentiated, a few at a time; the gradients of parameters are
sums over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.ops.sample_axis import SampleAxis
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_samples import SampleProgramKind, lower_samples
from sft.lower.program import Port, Program
from sft.runtime.machine import Buffer, BufferOps, Gradients, Machine, ProgramOps, ValueBindings

__all__ = ["SampleSegment"]


@dataclass(kw_only=True)
class SampleSegment:
    """Segment that runs some samples at a time, on full tensors of these.

    Attributes:
        scope: input of the lowering, for all samples.
        scopes: the same, by number of samples of a chunk.
        step: one strip that covers the image.
        num_batch: number of samples.
        chunk_samples: samples of a chunk; the last one may have fewer.
        axes: position of the samples in the values that are taken, or made, sample by sample.
        from_source: inputs, and cuts on the host, that are not resident; a chunk of them is read at a time.
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
    scopes: Mapping[int, SegmentInfo]
    step: StripStep
    num_batch: int
    chunk_samples: int
    axes: Mapping[str, SampleAxis]
    from_source: frozenset[str] = frozenset()
    _programs: dict[tuple[SampleProgramKind, int], Program] = field(default_factory=dict, repr=False)

    @cached_property
    def chunks(self) -> tuple[Interval, ...]:
        """Samples of each chunk."""
        size = self.chunk_samples
        return tuple(Interval(start, min(start + size, self.num_batch)) for start in range(0, self.num_batch, size))

    def program(self, kind: SampleProgramKind, num_samples: int) -> Program:
        """Program of a chunk of so many samples."""
        key = (kind, num_samples)
        if key not in self._programs:
            self._programs[key] = lower_samples(self.scopes[num_samples], self.step, kind)
        return self._programs[key]

    def chunk_programs(self, kind: SampleProgramKind) -> tuple[Program, ...]:
        """Program of each chunk."""
        return tuple(self.program(kind, len(chunk)) for chunk in self.chunks)

    @property
    def lowered_programs(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(self._programs.values())

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
        for chunk in self.chunks:
            program = self.program("forward", len(chunk))
            with self._bound_values(machine, program, values, chunk) as bindings:
                for port in program.ports:
                    if port.role == "out":
                        bindings[port] = self._samples(machine, values.by_name[port.name], port.name, chunk)
                machine.run(program, bindings)

    def backward(self, machine: Machine, values: ValueBindings, saved: Any, grads: Gradients, *, consume: bool = True) -> None:
        """Recompute and differentiate all chunks, in reverse order."""
        for chunk in reversed(self.chunks):
            program = self.program("joint", len(chunk))
            sink_grads: dict[str, Buffer] = {}
            with self._bound_values(machine, program, values, chunk) as bindings:
                for port in program.ports:
                    if port.role == "grad_source" and port.name in grads.sinks:
                        shape, dtype = self.scopes[len(chunk)].shapes[port.name], self._sink_dtype(port.name)
                        sink_grads[port.name] = bindings[port] = machine.allocate(shape, dtype, zero=True)
                    elif port.role in ("grad_out", "grad_source", "grad_side"):
                        bindings[port] = self._samples(machine, grads.by_name[port.name], port.name, chunk)
                machine.run(program, bindings)
            for name in list(sink_grads):
                gradient = sink_grads.pop(name)
                machine.add_to_sink(grads.sinks[name], chunk, Interval(0, self.scope.extent(name, ROWS)), gradient)
                del gradient

    @contextmanager
    def _bound_values(self, machine: Machine, program: Program, values: ValueBindings, chunk: Interval) -> Iterator[dict[Port, Buffer]]:
        """Bindings of the values that a program reads; an input that is not resident is read for the chunk, and dropped at the end."""
        bindings: dict[Port, Buffer] = {}
        with ExitStack() as stack:
            for port in program.ports:
                if port.role == "source" and port.name in self.from_source:
                    rows = Interval(0, self.scope.extent(port.name, ROWS))
                    loader = machine.open_input(values.by_name[port.name], chunk, (rows,), self._row_bytes(port.name, chunk))
                    stack.enter_context(closing(loader))
                    bindings[port] = loader.take(rows)
                elif port.role in ("source", "side"):
                    bindings[port] = self._samples(machine, values.by_name[port.name], port.name, chunk)
                elif port.role == "origin":
                    bindings[port] = (self._indices(port.name, chunk).start, 0, 0)
            yield bindings
            bindings.clear()

    def _samples(self, machine: BufferOps, buffer: Buffer, name: str, chunk: Interval) -> Buffer:
        """View of the samples of a chunk; the full buffer of a value that all samples share."""
        return machine.view(buffer, self._indices(name, chunk), None) if name in self.axes else buffer

    def _indices(self, name: str, chunk: Interval) -> Interval:
        """Indices of the first dimension that hold the samples of a chunk."""
        inner = self.axes[name].inner
        return Interval(chunk.start * inner, chunk.stop * inner)

    def _row_bytes(self, name: str, chunk: Interval) -> int:
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, 1)
        return len(chunk) * math.prod(shape[1:]) * self.scope.dtype_of(name).itemsize

    def _sink_dtype(self, name: str) -> torch.dtype:
        """Element type in which a sink receives gradients: for a cut that of its gradient, for an input the input's."""
        return self.scope.grad_dtype(name) if self.scope.graph[name].kind == "operator" else self.scope.dtype_of(name)
