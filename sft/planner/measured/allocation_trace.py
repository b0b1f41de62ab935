"""Allocation trace: all allocations and frees of one step of a plan on a device, in order.

The plan's own schedule runs on a machine that records. Every instruction of every program allocates its results, and frees what the program
frees after it, so the peak of the requested bytes is that of the projection, or less where strips of inputs are freed early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from sft.common.interval import Interval
from sft.lower.program import Instruction, Port, Program
from sft.planner.measured.event_sequence import AllocationTrace, Event, EventSequence
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.carry_cache import CarryCache
from sft.runtime.machine import Buffer, Gradients, Machine, Residuals, ValueBindings
from sft.runtime.region import Region
from sft.runtime.simulated_machine import MemoryCounter, SimulatedBuffer, SimulatedMachine
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment
from sft.sources.strip_reader import reader_bytes
from sft.torch_runtime.profiling import SimulatedResiduals, producer_program

__all__ = ["Workspaces", "record_program", "record_step"]

#: Bytes of the workspaces of a program's instructions, by position, given its forward program if it is a backward program.
Workspaces = Callable[[Program, Program | None], Mapping[int, int]]


def _no_workspaces(program: Program, first: Program | None) -> Mapping[int, int]:
    return {}


class _TraceRecorder(MemoryCounter):
    """Counter that records every allocation and every free, in place of counting bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.caller_numbers: set[int] = set()
        self.is_caller = False
        self.num_allocations = 0

    def allocate(self, num_bytes: int) -> int | None:
        if num_bytes <= 0:
            return None
        self.num_allocations += 1
        self.events.append((self.num_allocations, num_bytes))
        if self.is_caller:
            self.caller_numbers.add(self.num_allocations)
        return self.num_allocations

    def free(self, num_bytes: int, address: int | None) -> None:
        if address is not None:
            self.events.append((address, 0))

    def record_peak(self, num_bytes: int) -> None:
        """Record an allocation that is freed at once."""
        self.free(num_bytes, self.allocate(num_bytes))

    def close_sequence(self, start: int, first: int) -> EventSequence:
        """Turn the events from ``start`` on, before which there were ``first`` allocations, into one sequence, which is returned."""
        sequence = EventSequence.of((number - first, value) for number, value in self.events[start:])
        self.events[start:] = [(first, sequence)] if sequence.items else []
        return sequence

    def repeat(self, sequence: EventSequence) -> int:
        """Record a sequence again; the number of the allocations before it is returned."""
        first = self.num_allocations
        if sequence.items:
            self.events.append((first, sequence))
        self.num_allocations += sequence.num_allocations
        return first

    def trace(self) -> AllocationTrace:
        """The trace so far."""
        return AllocationTrace(sequence=EventSequence.of(self.events), caller_numbers=frozenset(self.caller_numbers))


class _SavedBuffers:
    """Buffers that a forward program leaves for its backward program, by slot. The offload treats them as one buffer."""

    __slots__ = ("_sizes", "by_slot")

    def __init__(self, by_slot: dict[int, SimulatedBuffer]) -> None:
        self.by_slot = by_slot
        self._sizes = {slot: buffer.num_bytes for slot, buffer in by_slot.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self.by_slot.values())

    @property
    def root(self) -> _SavedBuffers:
        """Owner of the memory."""
        return self

    def resize(self, num_bytes: int) -> None:
        """Free every buffer (0), or allocate all again."""
        for slot, buffer in self.by_slot.items():
            buffer.resize(self._sizes[slot] if num_bytes else 0)


@dataclass(slots=True)
class _RecordedStripLoader:
    """Loader of strips of an input, in buffers that are allocated and freed as by the loader of tensors (`SourceStripLoader`).

    Attributes:
        loader: the simulated loader, with the buffers that exist at the beginning.
        memory: counter of the device's bytes.
        strip_bytes: bytes of a buffer.
        num_left: strips that have no buffer yet.
    """

    loader: Any
    memory: MemoryCounter
    strip_bytes: int
    num_left: int

    def take(self, rows: Interval) -> SimulatedBuffer:
        """The next strip, which takes its buffer along. The next but one is allocated when the strip before is dropped."""
        buffers = self.loader.buffers
        if not rows:
            return SimulatedBuffer(self.memory, 0)
        if len(buffers) < 2 and self.num_left:
            self.num_left -= 1
            buffers.append(SimulatedBuffer(self.memory, self.strip_bytes))
        self.loader.pixels = None
        strip: SimulatedBuffer = buffers.pop(0)
        return strip

    def close(self) -> None:
        """Free the buffers."""
        self.loader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramEvents:
    """Allocations and frees of a run of a program, which are those of each of its runs.

    Attributes:
        program: the program; the reference keeps its id unique.
        sequence: the events.
        results: the ports of the results, each with its number and its bytes, or with the port whose memory it is a view of.
    """

    program: Program
    sequence: EventSequence
    results: tuple[tuple[Port, int | None, int, Port | None], ...]

    @classmethod
    def of(cls, program: Program, sequence: EventSequence, first: int, results: Mapping[Port, Buffer]) -> _ProgramEvents:
        """Events of a run.

        Args:
            program: the program.
            sequence: events of the run.
            first: allocations before the run.
            results: its results.
        """
        owners: dict[int, Port] = {}
        ports: list[tuple[Port, int | None, int, Port | None]] = []
        for port, buffer in results.items():
            assert isinstance(buffer, SimulatedBuffer)
            ports.append((port, None if buffer.address is None else buffer.address - first, buffer.num_bytes, owners.get(id(buffer.root))))
            owners.setdefault(id(buffer.root), port)
        return cls(program=program, sequence=sequence, results=tuple(ports))

    def repeat(self, recorder: _TraceRecorder) -> dict[Port, Buffer]:
        """Record another run; its results."""
        first = recorder.repeat(self.sequence)
        buffers: dict[Port, SimulatedBuffer] = {}
        for port, number, num_bytes, owner in self.results:
            if owner is not None:
                buffers[port] = buffers[owner].view()
            else:
                buffers[port] = SimulatedBuffer.counted(recorder, num_bytes, None if number is None else first + number)
        return dict(buffers)


@dataclass(slots=True)
class _RecordingMachine(SimulatedMachine):
    """Simulated machine that runs every instruction of its programs.

    Attributes:
        workspaces: workspace bytes of a program's instructions.
        scratch_first: true if instructions allocate their scratch before their results, false if after them.
    """

    workspaces: Workspaces = _no_workspaces
    scratch_first: bool = False
    recorder: _TraceRecorder = field(default_factory=_TraceRecorder)
    _known: dict[int, _ProgramEvents] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.recorder

    @contextmanager
    def caller(self) -> Iterator[None]:
        self.recorder.is_caller = True
        try:
            yield
        finally:
            self.recorder.is_caller = False

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        self.memory.flops += program.flops
        if saved is not None or program.residuals:
            return self._run_instructions(program, saved)
        # Strips run a program many times.
        known = self._known.get(id(program))
        if known is not None:
            return known.repeat(self.recorder), SimulatedResiduals(_SavedBuffers({}))
        start, first = len(self.recorder.events), self.recorder.num_allocations
        results, residuals = self._run_instructions(program, None)
        sequence = self.recorder.close_sequence(start, first)
        self._known[id(program)] = _ProgramEvents.of(program, sequence, first, results)
        return results, residuals

    def _run_instructions(self, program: Program, saved: Residuals | None) -> tuple[dict[Port, Buffer], Residuals]:
        workspaces = self.workspaces(program, producer_program(saved))
        buffers: dict[int, SimulatedBuffer] = {}
        if saved is not None:
            buffers.update(saved.values.by_slot)
            if not saved.is_retained:
                saved.values = None
        for position, instruction in enumerate(program.instructions):
            self._run_instruction(instruction, buffers, workspaces.get(position, 0))
        results: dict[Port, Buffer] = {}
        owners: dict[int, SimulatedBuffer] = {}
        for port, slot in program.results.items():
            owner = owners.get(slot.root) or buffers.pop(slot.root, None)
            if owner is None:  # a view of a port
                results[port] = SimulatedBuffer(self.memory, 0)
                continue
            results[port] = owner if slot.root not in owners else owner.view()
            owners[slot.root] = owner
        residuals = _SavedBuffers(buffers if program.residuals else {})
        return results, SimulatedResiduals(residuals, first=program if program.residuals else None)

    def _run_instruction(self, instruction: Instruction, buffers: dict[int, SimulatedBuffer], workspace_bytes: int) -> None:
        """Allocate the results of an instruction, its scratch and its workspace; free what the program frees after it."""
        roots = [out for out in instruction.outputs if out is not None and out.root == out.number]
        opaque_bytes = instruction.num_bytes - sum(root.num_bytes for root in roots)
        scratch = SimulatedBuffer(self.memory, instruction.scratch_bytes) if self.scratch_first else None
        for root in roots:
            extra_bytes, opaque_bytes = (opaque_bytes, 0) if opaque_bytes > 0 else (0, opaque_bytes)  # several tensors in one slot
            buffers[root.number] = SimulatedBuffer(self.memory, root.num_bytes + extra_bytes)
        scratch = scratch or SimulatedBuffer(self.memory, instruction.scratch_bytes)
        if workspace_bytes:
            self.memory.record_peak(workspace_bytes)
        del scratch
        for number in instruction.frees:
            buffers.pop(number, None)

    def open_input(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int, dtype: Any) -> Any:
        loader = super(_RecordingMachine, self).open_input(source, batch, order, row_bytes, dtype)
        if self.on_host:
            return loader
        num_buffers, strip_bytes, _ = reader_bytes(order, row_bytes)
        return _RecordedStripLoader(loader, self.memory, strip_bytes, sum(map(bool, order)) - num_buffers)

    def residual_buffers(self, saved: Residuals, slots: Sequence[int]) -> list[Any]:
        return [saved.values]


class _RecordedSweeps(TiledSegment):
    """Tiled segment that runs one sweep of each kind. The events of an equal sweep are recorded again, if it leaves no allocation."""

    @cached_property
    def _sequences(self) -> dict[tuple[str, int, int], EventSequence]:
        """Events by direction, number of batch elements and kind of panel."""
        return {}

    def _sweep_forward(
        self, machine: Machine, values: ValueBindings, sweep: Sweep, partial: Mapping[str, Buffer] | None, kept: frozenset[int]
    ) -> CarryCache:
        run = functools.partial(TiledSegment._sweep_forward, self, machine, values, sweep, partial, kept)
        if kept or len(self.sweeps) == 1:
            return run()
        self._record(machine, "forward", sweep, run)
        return CarryCache()

    def _sweep_backward(self, machine: Machine, values: ValueBindings, cache: CarryCache | None, grads: Gradients, sweep: Sweep) -> None:
        run = functools.partial(TiledSegment._sweep_backward, self, machine, values, cache, grads, sweep)
        if cache is None:
            self._record(machine, "backward", sweep, run)
        else:
            run()

    def _record(self, machine: Machine, direction: str, sweep: Sweep, run: Callable[[], object]) -> None:
        assert isinstance(machine, _RecordingMachine)
        recorder, key = machine.recorder, (direction, len(sweep.chunk), self.panel_kinds[sweep.panel])
        if key in self._sequences:
            recorder.repeat(self._sequences[key])
            return
        start, first = len(recorder.events), recorder.num_allocations
        run()
        self._sequences[key] = recorder.close_sequence(start, first)
        assert not self._sequences[key].live


def _with_recorded_sweeps(region: Region) -> Region:
    """The region with tiled segments that run one sweep of each kind."""
    segments = [
        _RecordedSweeps(**{each.name: getattr(segment, each.name) for each in fields(segment) if each.init})
        if type(segment) is TiledSegment
        else segment
        for segment in region.segments
    ]
    return replace(region, segments=segments)


def record_step(
    problem: PlanningProblem,
    region: Region,
    workspaces: Workspaces = _no_workspaces,
    *,
    num_known_rows: int = 0,
    scratch_first: bool = False,
) -> AllocationTrace:
    """Record one step of a plan.

    Args:
        problem: the planning problem.
        region: the plan's region.
        workspaces: workspace bytes of each program's instructions; none by default.
        num_known_rows: leading rows of outputs on the host that are not computed: those of an interrupted prediction that is resumed.
        scratch_first: true if instructions allocate their scratch before their results: copies of operands in another type, say.
    """
    on_host = problem.resources.on_host
    machine = _RecordingMachine(on_host=on_host, workspaces=workspaces, num_known_rows=num_known_rows, scratch_first=scratch_first)
    run_step(problem, _with_recorded_sweeps(region), machine)
    return machine.recorder.trace()


def record_program(program: Program, workspaces: Mapping[int, int]) -> AllocationTrace:
    """Record one run of a program without residuals, with the workspaces of its instructions."""
    machine = _RecordingMachine(workspaces=lambda _program, _first: workspaces)
    machine.run(program, {})
    return machine.recorder.trace()
