"""Strips of one signature replayed as CUDA graphs: a strip's program is recorded once, and started again by a single call.

A recorded program runs on the addresses that it was recorded on. The model's weights stay where they are, and are recorded so. All else
goes through buffers of the recording, copied in before a replay and out behind it: rows of sources, of outputs and of their gradients and
carried rows, which move from strip to strip; global values and sums over strips, which are other tensors in each step. Results are copied
into new tensors, since they live on and the next replay writes over them. Where weights have moved, the program is recorded anew.

The buffers stay for as long as the recording does, and so does the memory that recorded programs work in. That is one pool for all of them:
nothing in it outlives a replay. So recordings are chosen when everything else is planned, from what the budget has left, and their bytes
are added to the projected peak. A program whose calls depend on where its strip lies (masks, interpolation), or that uploads a table, is
not recorded: what it would upload is fixed then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.backends.kernel_call import kernel_call_of
from sft.common.interval import Interval
from sft.lower.program import Port, Program, Slot, carried_dim, load_rows
from sft.runtime.region import Region
from sft.runtime.tiled_segment import TiledSegment

__all__ = ["ActiveGraphs", "CudaGraphRecorder", "GraphCache", "GraphRecorder", "buffer_bytes", "recordable_programs"]

#: Ports whose tensors are written.
_WRITTEN = frozenset({"out", "grad_source", "partial", "grad_side"})
#: A program that runs less often in a step is not worth its memory.
_MIN_RUNS = 4
#: The allocator takes memory for a pool in segments; one for large blocks and one for small ones may be nearly empty.
_SEGMENTS_BYTES = 22 * 2**20

PortBindings = Mapping[Port, Any]
#: Runs a program on tensors; its results by port.
RunProgram = Callable[[Program, PortBindings], dict[Port, Tensor]]


class GraphRecorder(Protocol):
    """Records what is done on a device."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work, once or more, and return what does it again on the same memory."""


@dataclass(slots=True)
class CudaGraphRecorder:
    """Records CUDA graphs, all on one stream (libraries keep workspaces for each stream that they have run on) and in one pool of memory.

    Attributes:
        device: the GPU.
    """

    device: torch.device
    _stream: torch.cuda.Stream | None = None
    _pool: Any = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run once on a stream of their own (kernels are compiled and chosen then), then record."""
        with torch.cuda.device(self.device):
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # Other threads, such as a reader's, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
        return graph.replay


def buffer_bytes(program: Program, weights: Collection[str]) -> int:
    """Bytes of a recording's buffers: for all that a program reads but the model's weights, and for its results."""
    ports = sum(slot.num_bytes for port, slot in program.ports.items() if not _has_fixed_address(port, weights))
    return ports + sum(program.result_bytes.values())


def _has_fixed_address(port: Port, weights: Collection[str]) -> bool:
    """Whether a port's tensor is where it is in all steps."""
    return port.role == "side" and port.name in weights


def recordable_programs(region: Region, *, training: bool) -> list[Program]:
    """Programs that run often in a step and can be recorded, those that run most often first."""
    runs: dict[int, int] = {}
    programs: dict[int, Program] = {}
    for segment in region.segments:
        if not isinstance(segment, TiledSegment):
            continue
        first, kinds = segment.schedule.kinds
        differentiate = training and not segment.scope.requires_grad.isdisjoint(segment.scope.names)
        for sweep in segment.sweeps:
            for number, index in enumerate(first):
                count = int((kinds == number).sum())
                for kind in ("forward", "joint") if differentiate else ("forward",):
                    program = segment.program(kind, int(index), sweep)
                    programs[id(program)] = program
                    runs[id(program)] = runs.get(id(program), 0) + count
    often = sorted((key for key, count in runs.items() if count >= _MIN_RUNS), key=lambda key: -runs[key])
    return [programs[key] for key in often if _is_recordable(programs[key])]


def _is_recordable(program: Program) -> bool:
    calls = (kernel_call_of(instruction.function) for instruction in program.instructions)
    is_fixed = not any(call is not None and call.uploads for call in calls)
    return is_fixed and not program.saved and all(port.role != "origin" for port in program.ports)


@dataclass(slots=True)
class _RecordedGraph:
    """A recorded program.

    Attributes:
        fixed: addresses of the weights.
        buffers: of all else.
        results: where results are.
        replay: does it again.
    """

    fixed: tuple[tuple[Port, int], ...]
    buffers: dict[Port, Tensor]
    results: dict[Port, Tensor]
    replay: Callable[[], None]


@dataclass(slots=True)
class GraphCache:
    """Recordings of some programs.

    Attributes:
        programs: that are recorded.
        recorder: records them.
        weights: names of what stays where it is.
        num_bytes: that all recordings hold.
        num_replays: so far, for tests.
    """

    programs: tuple[Program, ...]
    recorder: GraphRecorder
    weights: frozenset[str] = frozenset()
    num_bytes: int = 0
    num_replays: int = 0
    _recordings: dict[int, _RecordedGraph] = field(default_factory=dict, repr=False)
    _known: frozenset[int] = field(default_factory=frozenset, repr=False)

    def __post_init__(self) -> None:
        self._known = frozenset(map(id, self.programs))

    @classmethod
    def within(
        cls,
        programs: Iterable[Program],
        spare_bytes: int,
        recorder: GraphRecorder,
        weights: frozenset[str] = frozenset(),
        working_bytes: Callable[[Program], int] = attrgetter("peak_bytes"),
    ) -> GraphCache:
        """Recordings of as many of these programs, the first ones first, as so many bytes have room for.

        Args:
            programs: to be recorded.
            spare_bytes: what is left of the budget.
            recorder: records them.
            weights: names of what stays where it is.
            working_bytes: what a program works in.
        """
        chosen: list[Program] = []
        buffers = pool = 0
        for program in programs:
            own, shared = buffer_bytes(program, weights), max(pool, working_bytes(program) + _SEGMENTS_BYTES)
            if buffers + own + shared <= spare_bytes:
                chosen.append(program)
                buffers, pool = buffers + own, shared
        return cls(programs=tuple(chosen), recorder=recorder, weights=weights, num_bytes=buffers + pool)

    def run(self, program: Program, bindings: PortBindings, run: RunProgram) -> dict[Port, Tensor] | None:
        """Run a program by its recording; None where it has none."""
        if id(program) not in self._known:
            return None
        fixed = tuple((port, tensor.data_ptr()) for port, tensor in bindings.items() if _has_fixed_address(port, self.weights))
        recording = self._recordings.get(id(program))
        if recording is None or recording.fixed != fixed:
            recording = self._recorded(program, bindings, fixed, run)
        self._load(program, bindings, recording.buffers)
        recording.replay()
        self.num_replays += 1
        for port, buffer in recording.buffers.items():
            if port.role in _WRITTEN:
                bindings[port].copy_(buffer)
        return {port: result.clone() for port, result in recording.results.items()}

    def _recorded(self, program: Program, bindings: PortBindings, fixed: tuple[tuple[Port, int], ...], run: RunProgram) -> _RecordedGraph:
        """Record a program."""
        self._recordings.pop(id(program), None)  # the old one's memory first
        device = next(tensor.device for tensor in _tensors(bindings.values()))
        buffers = {
            port: _empty_buffer(slot, device) if port.role == "carry" else torch.empty_like(bindings[port])
            for port, slot in program.ports.items()
            if port in bindings and not _has_fixed_address(port, self.weights)
        }
        results = {port: _empty_buffer(slot, device) for port, slot in program.results.items()}
        self._load(program, bindings, buffers)
        given = {**bindings, **buffers}
        for port in (port for port in buffers if port.role == "carry"):
            rows = Interval(0, buffers[port].shape[_carried_dim(program, program.ports[port])])
            given[port] = [(0, rows, buffers[port])]

        def work() -> None:
            for port, result in run(program, given).items():
                results[port].copy_(result)

        recording = _RecordedGraph(fixed=fixed, buffers=buffers, results=results, replay=self.recorder.record(work))
        self._recordings[id(program)] = recording
        return recording

    def clear(self) -> None:
        """Forget all recordings, and give their memory back."""
        self._recordings.clear()

    @staticmethod
    def _load(program: Program, bindings: PortBindings, buffers: Mapping[Port, Tensor]) -> None:
        """Copy what moves into its buffers; of what is only written, nothing."""
        for port, buffer in buffers.items():
            if port.role == "carry":
                load_rows(buffer, _carried_dim(program, program.ports[port]), bindings[port])
            elif port.role != "out":
                buffer.copy_(bindings[port])


@dataclass(slots=True)
class ActiveGraphs:
    """Whose recordings are alive: each plan counts its own and no others, so there are those of one plan at a time.

    Attributes:
        store: the plan's recordings whose pass ran last; None where it has none.
    """

    store: GraphCache | None = None

    def take(self, store: GraphCache | None) -> None:
        """A pass begins: recordings of another plan are forgotten, and their memory is given back."""
        if self.store is not None and self.store is not store:
            self.store.clear()
        self.store = store


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _empty_buffer(slot: Slot, device: torch.device) -> Tensor:
    layout = CHANNELS_LAST.get(len(slot.shape), torch.contiguous_format)
    return torch.empty(slot.shape, dtype=slot.dtype, device=device, memory_format=layout)


def _carried_dim(program: Program, slot: Slot) -> int:
    """The dimension along which a port's rows are carried."""
    dim = carried_dim(program, slot)
    assert dim is not None, "a port of carried rows that nobody loads"
    return dim
