"""CUDA graphs of strips: the program of a strip signature is recorded once and replayed with a single call.

A recorded program runs on the addresses that it was recorded on. The model's weights keep theirs and are recorded as they are. Each tensor
that moves is copied into buffers of the recording before a replay, and out of them after it: rows of sources, of outputs and of their
gradients, carried rows, global values and sums over strips. Results are copied into new tensors, since they outlive the next replay, which
overwrites them. If weights have moved, the program is recorded again.

The buffers exist as long as the recording, and so does the memory in which recorded programs work. That is one pool for all of them, since
no value in it outlives a replay. Recordings are therefore chosen last, from the bytes that the budget has left, and their bytes are added
to the projected peak. A program with calls that depend on the strip's position (masks, interpolation), or that uploads a table, is not
recorded: a recording would fix the uploaded content. If the recording of a program fails, it runs without one, and a plan's first failure
is a warning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.backends.kernel_call import kernel_call_of
from sft.common.errors import SftError
from sft.common.interval import Interval
from sft.lower.program import Port, Program, Slot, carried_dim, load_rows
from sft.runtime.region import Region
from sft.runtime.tiled_segment import TiledSegment

__all__ = [
    "ActiveGraphs",
    "CudaGraphRecorder",
    "GraphCache",
    "GraphRecorder",
    "Recordings",
    "buffer_bytes",
    "recordable_programs",
    "recording_stream",
]

#: Roles of ports whose tensors are written.
_WRITTEN = frozenset({"out", "grad_source", "partial", "grad_side"})
#: Minimum number of runs in a step of a program that is recorded.
_MIN_RUNS = 4
#: The allocator reserves memory of a pool in segments; one for large blocks and one for small blocks may be nearly empty.
_SEGMENTS_BYTES = 22 * 2**20

PortBindings = Mapping[Port, Any]
#: Runs a program on bound tensors and returns its results by port.
RunProgram = Callable[[Program, PortBindings], dict[Port, Tensor]]


class GraphRecorder(Protocol):
    """Recorder of device work."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work at least once, and return a function that repeats it on the same memory."""


_STREAMS: dict[torch.device, Any] = {}
_STREAMS_LOCK = threading.RLock()


@contextmanager
def recording_stream(device: torch.device) -> Iterator[Any]:
    """The stream of all recordings on a device, for one recording at a time.

    Libraries keep a workspace for each stream that they have used, so a stream for each plan would add one to the memory of the process.
    """
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        yield _STREAMS[device]


@dataclass(slots=True)
class CudaGraphRecorder:
    """Recorder of CUDA graphs in one memory pool.

    Attributes:
        device: the GPU.
    """

    device: torch.device
    _pool: Any = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once on the recording stream, which compiles and selects kernels, then record it."""
        with torch.cuda.device(self.device), recording_stream(self.device) as stream:
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    work()
            finally:  # also after a failure: the buffers are then freed on the current stream
                torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # Other threads, such as a strip reader's, may use the device during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
        return graph.replay


def buffer_bytes(program: Program, weights: Collection[str]) -> int:
    """Bytes of a recording's buffers: for every port except the model's weights, and for the results."""
    ports = sum(slot.num_bytes for port, slot in program.ports.items() if not _has_fixed_address(port, weights))
    return ports + sum(program.result_bytes.values())


def _has_fixed_address(port: Port, weights: Collection[str]) -> bool:
    """True if a port's tensor has the same address in all steps."""
    return port.role == "side" and port.name in weights


def recordable_programs(region: Region, *, training: bool) -> list[Program]:
    """Recordable programs that run often in a step, most frequent first."""
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
    return is_fixed and not program.residuals and all(port.role != "origin" for port in program.ports)


@dataclass(slots=True)
class _RecordedGraph:
    """Recorded program.

    Attributes:
        weight_addresses: addresses of the weights, by port.
        buffers: buffers of the other ports.
        results: buffers of the results.
        replay: runs the program on these buffers.
    """

    weight_addresses: tuple[tuple[Port, int], ...]
    buffers: dict[Port, Tensor]
    results: dict[Port, Tensor]
    replay: Callable[[], None]


@dataclass(slots=True)
class GraphCache:
    """Recordings of some programs.

    Attributes:
        programs: the programs to record.
        recorder: records them.
        weights: names of the values that keep their addresses.
        num_bytes: bytes of all recordings.
        num_replays: number of replays so far, for tests.
        num_failures: number of failed recordings; these programs run without one.
    """

    programs: tuple[Program, ...]
    recorder: GraphRecorder
    weights: frozenset[str] = frozenset()
    num_bytes: int = 0
    num_replays: int = 0
    num_failures: int = 0
    _recordings: dict[int, _RecordedGraph] = field(default_factory=dict, repr=False)
    _program_ids: frozenset[int] = field(default_factory=frozenset, repr=False)

    def __post_init__(self) -> None:
        self._program_ids = frozenset(map(id, self.programs))

    @classmethod
    def within(
        cls,
        programs: Iterable[Program],
        spare_bytes: int,
        recorder: GraphRecorder,
        weights: frozenset[str] = frozenset(),
        working_bytes: Callable[[Program], int] = attrgetter("peak_bytes"),
    ) -> GraphCache:
        """Cache for those of these programs that fit into the spare bytes, tried in order.

        Args:
            programs: programs to record.
            spare_bytes: bytes left of the budget.
            recorder: records them.
            weights: names of the values that keep their addresses.
            working_bytes: bytes in which a program works.
        """
        chosen: list[Program] = []
        buffers = pool = 0
        for program in programs:
            program_buffers, new_pool = buffer_bytes(program, weights), max(pool, working_bytes(program) + _SEGMENTS_BYTES)
            if buffers + program_buffers + new_pool <= spare_bytes:
                chosen.append(program)
                buffers, pool = buffers + program_buffers, new_pool
        return cls(programs=tuple(chosen), recorder=recorder, weights=weights, num_bytes=buffers + pool)

    def run(self, program: Program, bindings: PortBindings, run: RunProgram) -> dict[Port, Tensor] | None:
        """Run a program by replaying its recording; ``None`` if it is not to be recorded."""
        if id(program) not in self._program_ids:
            return None
        with torch.inference_mode(False), torch.no_grad():  # the buffers of a recording are written in calls of every mode
            return self._run(program, bindings, run)

    def _run(self, program: Program, bindings: PortBindings, run: RunProgram) -> dict[Port, Tensor] | None:
        addresses = tuple((port, tensor.data_ptr()) for port, tensor in bindings.items() if _has_fixed_address(port, self.weights))
        recording = self._recordings.get(id(program))
        if recording is None or recording.weight_addresses != addresses:
            try:
                recording = self._record(program, bindings, addresses, run)
            except RuntimeError as error:
                if isinstance(error, SftError):
                    raise
                self._give_up(program, error)
                return None
        self._load(program, bindings, recording.buffers)
        recording.replay()
        self.num_replays += 1
        for port, buffer in recording.buffers.items():
            if port.role in _WRITTEN:
                bindings[port].copy_(buffer)
        return {port: result.clone() for port, result in recording.results.items()}

    def _record(self, program: Program, bindings: PortBindings, addresses: tuple[tuple[Port, int], ...], run: RunProgram) -> _RecordedGraph:
        """Record a program; its earlier recording is freed first."""
        self._recordings.pop(id(program), None)
        device = next(tensor.device for tensor in _tensors(bindings.values()))
        buffers = {
            port: _empty_buffer(slot, device) if port.role == "carry" else torch.empty_like(bindings[port])
            for port, slot in program.ports.items()
            if port in bindings and not _has_fixed_address(port, self.weights)
        }
        results = {port: _empty_buffer(slot, device) for port, slot in program.results.items()}
        self._load(program, bindings, buffers)
        recorded_bindings = {**bindings, **buffers}
        for port in (port for port in buffers if port.role == "carry"):
            rows = Interval(0, buffers[port].shape[_carried_dim(program, program.ports[port])])
            recorded_bindings[port] = [(0, rows, buffers[port])]

        def work() -> None:
            for port, result in run(program, recorded_bindings).items():
                results[port].copy_(result)

        recording = _RecordedGraph(weight_addresses=addresses, buffers=buffers, results=results, replay=self.recorder.record(work))
        self._recordings[id(program)] = recording
        return recording

    def _give_up(self, program: Program, error: RuntimeError) -> None:
        """Never record a program again, since its recording failed. Recording works on buffers of its own, so the step is unharmed."""
        self._program_ids -= {id(program)}
        if not self.num_failures:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            warnings.warn(
                f"a strip could not be recorded as a CUDA graph ({reason}): "
                "it runs without one, with the same results. Leave out cuda_graphs to silence this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.num_failures += 1

    def clear(self) -> None:
        """Drop all recordings and free their memory."""
        self._recordings.clear()

    @staticmethod
    def _load(program: Program, bindings: PortBindings, buffers: Mapping[Port, Tensor]) -> None:
        """Copy the bound tensors into the recording's buffers, except those that are only written."""
        for port, buffer in buffers.items():
            if port.role == "carry":
                load_rows(buffer, _carried_dim(program, program.ports[port]), bindings[port])
            elif port.role != "out":
                buffer.copy_(bindings[port])


class Recordings(Protocol):
    """Recordings of one plan."""

    def clear(self) -> None:
        """Drop all recordings and free their memory."""


@dataclass(slots=True)
class ActiveGraphs:
    """The recordings that are alive: those of one plan at a time, since each plan's peak counts only its own.

    Attributes:
        recordings: recordings of the plan that ran last; ``None`` if it has none.
    """

    recordings: Recordings | None = None

    def activate(self, recordings: Recordings | None) -> None:
        """Begin a pass with these recordings; those of another plan are dropped."""
        if self.recordings is not None and self.recordings is not recordings:
            self.recordings.clear()
        self.recordings = recordings


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _empty_buffer(slot: Slot, device: torch.device) -> Tensor:
    layout = CHANNELS_LAST.get(len(slot.shape), torch.contiguous_format)
    return torch.empty(slot.shape, dtype=slot.dtype, device=device, memory_format=layout)


def _carried_dim(program: Program, slot: Slot) -> int:
    """Dimension along which a port's rows are carried."""
    dim = carried_dim(program, slot)
    assert dim is not None, "the program loads no rows into this carry port"
    return dim
