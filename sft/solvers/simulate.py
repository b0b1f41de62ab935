"""The judge of every solver: what a schedule takes and holds, event by event.

Three clocks run: the compute stream, and the two directions of the link (one clock for both when it is half duplex). A computation starts
when the compute stream is free and the copies back of what it reads are done. A copy starts when its direction is free and, down, when its
value has been made, up, when everything before it in the list has been computed (that is when its bytes are there). Operations on streamed
cuts or weights hold the link for as long as their bytes need it.

Memory is counted along the list, not along the clock (see `schedule`), so the peak holds whatever the copies' real speed. The simulator
refuses a schedule that reads what is not there, makes or frees a value twice, or leaves a backward out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft.common.errors import InputError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.schedule import Operation, OperationCost, Schedule, activation_name, grad_name, operation_cost

__all__ = ["Simulation", "SimulationEvent", "StreamName", "simulate"]

StreamName = Literal["compute", "down", "up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationEvent:
    """One stretch of work.

    Attributes:
        stream: who works: the compute stream, or the link to the host (``"down"``) or from it (``"up"``).
        label: the operation as text.
        start_seconds: when it starts.
        end_seconds: when it ends.
    """

    stream: StreamName
    label: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule takes and holds.

    Attributes:
        seconds: until the last computation and the last copy are done.
        peak_bytes: most bytes on the device, resident weights included.
        host_peak_bytes: most bytes on the host: copies, streamed cuts and streamed weights.
        compute_seconds: the sum of all computations.
        events: what ran when, in order of issue.
        memory: (seconds, bytes) after each change of what the device holds.
    """

    seconds: float
    peak_bytes: int
    host_peak_bytes: int
    compute_seconds: float
    events: tuple[SimulationEvent, ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def idle_seconds(self) -> float:
        """Time in which nothing is computed."""
        return max(0.0, self.seconds - self.compute_seconds)


def simulate(chain: StageChain, schedule: Schedule, *, link: HostLink | None = None) -> Simulation:
    """Play a schedule.

    Args:
        chain: times and bytes.
        schedule: what to play.
        link: the link to the host; the default of :class:`HostLink` if none is given.

    Raises:
        InputError: the schedule is not one for this chain: the message names the operation and what is wrong with it.
    """
    return _ScheduleSimulator(chain, schedule, link or HostLink()).play()


class _ScheduleSimulator:
    def __init__(self, chain: StageChain, schedule: Schedule, link: HostLink) -> None:
        n = chain.num_stages
        if not all(0 <= cut <= n for cut in schedule.streamed_cuts) or not all(1 <= i <= n for i in schedule.streamed_weights):
            raise InputError(f"{schedule.strategy}: streamed cuts or weights of a longer chain than this one of {n} stages")
        if (0 in schedule.streamed_cuts and not chain.input_may_stream) or (n in schedule.streamed_cuts and not chain.output_may_stream):
            raise InputError(f"{schedule.strategy}: it streams the chain's input or output, which this chain does not allow")
        self.chain, self.schedule, self.link = chain, schedule, link
        self.streamed_weights = frozenset(schedule.streamed_weights)
        self.streamed = frozenset(name for cut in schedule.streamed_cuts for name in (activation_name(cut), grad_name(cut)))
        away = 2 * sum(chain.stage(i).weight_bytes for i in self.streamed_weights)
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.made: set[str] = set()
        self.offloaded_at: dict[str, float] = {}
        self.fetched_at: dict[str, float] = {}
        self.ready_at: dict[str, float] = {}
        self.saved_by: dict[str, tuple[int, str]] = {}
        self.compute, self.down, self.up, self.computed = 0.0, 0.0, 0.0, 0.0
        self.held = self.peak = chain.resident_bytes - away
        self.host_held = self.host_peak = away
        self.events: list[SimulationEvent] = []
        self.memory: list[tuple[float, int]] = []
        self.num_losses = 0
        self.where = ""

    def play(self) -> Simulation:
        self._make(activation_name(0), self.chain.input_bytes)
        self.memory.append((0.0, self.held))
        for place, operation in enumerate(self.schedule.operations):
            self.where = f"{self.schedule.strategy}: operation {place} ({operation})"
            match operation.kind:
                case "forward" | "backward" | "loss":
                    self._compute(operation)
                case "free":
                    self._free(operation.value)
                case "offload":
                    self._offload(operation)
                case "release":
                    self._release(operation.value)
                case "prefetch":
                    self._prefetch(operation)
        if grad_name(0) not in self.made:
            todo = [i for i in range(self.chain.num_stages) if grad_name(i) not in self.made]
            raise InputError(f"{self.schedule.strategy}: the backward of stage {todo[-1] + 1} is missing")
        return Simulation(
            seconds=max(self.compute, self.down, self.up),
            peak_bytes=self.peak,
            host_peak_bytes=self.host_peak,
            compute_seconds=self.computed,
            events=tuple(self.events),
            memory=tuple(self.memory),
        )

    def _make(self, value: str, size: int) -> None:
        if value in self.device or value in self.host:
            self._refuse(f"{value} is there already")
        if value in self.made and value[0] == "y":
            self._refuse(f"{value} was made before; each backward runs once")
        self.made.add(value)
        if value in self.streamed:
            self.host[value] = size
            self._host_hold(size)
        else:
            self.device[value] = size
            self._hold(size)

    def _hold(self, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)

    def _host_hold(self, change: int) -> None:
        self.host_held += change
        self.host_peak = max(self.host_peak, self.host_held)

    def _refuse(self, problem: str) -> None:
        raise InputError(f"{self.where}: {problem}. The schedule is not one for this chain")

    def _work(self, operation: Operation) -> OperationCost:
        if operation.kind == "loss":
            self.num_losses += 1
            if self.num_losses > 1:
                self._refuse("the loss runs once")
        try:
            return operation_cost(self.chain, operation, self.streamed_weights)
        except InputError as error:
            self._refuse(str(error))
            raise

    def _compute(self, operation: Operation) -> None:
        work = self._work(operation)
        start = self.compute
        down, up = work.down_bytes, work.up_bytes
        for value in work.reads:
            if value in self.streamed and value in self.host:
                up += self.host[value] if operation.kind != "loss" else 0
            elif value in self.device:
                start = max(start, self.fetched_at.get(value, 0.0))
            else:
                self._refuse(f"it reads {value}, which is not on the device")
            if value[0] == "s" and self.saved_by[value] != (operation.first, operation.mode):
                self._refuse(f"{value} was saved by another form of the stages")
        for value, size in work.makes:
            if value[0] == "s":
                self.saved_by[value] = (operation.first, operation.mode)
            self._make(value, size)
            down += size if value in self.streamed and operation.kind != "loss" else 0
        used = (*work.reads, *(value for value, _ in work.makes))
        if not work.streamable and any(value in self.streamed for value in used):
            self._refuse("it takes its input or output whole, but the cut is streamed")
        self._hold(work.workspace_bytes)
        seconds = work.seconds
        if down or up:
            seconds = max(seconds, self.link.streamed_seconds(down, up))
            start = max(start, self.down if down else 0.0, self.up if up else 0.0)
            if not self.link.full_duplex:
                start = max(start, self.down, self.up)
        end = start + seconds
        self.computed += work.seconds
        self.compute = end
        self.events.append(SimulationEvent(stream="compute", label=str(operation), start_seconds=start, end_seconds=end))
        self._stream(operation, start, down, up)
        for value, _ in work.makes:
            self.ready_at[value] = end
        self.memory.append((start, self.held))
        self._hold(-work.workspace_bytes)
        self.memory.append((end, self.held))

    def _stream(self, operation: Operation, start: float, down: int, up: int) -> None:
        """Let the link carry what passes through while an operation runs."""
        for stream, num_bytes, seconds in (("up", up, self.link.up_seconds(up)), ("down", down, self.link.down_seconds(down))):
            if num_bytes:
                begin = start if self.link.full_duplex else max(start, self.down, self.up)
                self._occupy("up" if stream == "up" else "down", f"{operation} streams", begin, begin + seconds)

    def _occupy(self, stream: StreamName, label: str, start: float, end: float) -> None:
        if stream == "down" or not self.link.full_duplex:
            self.down = end
        if stream == "up" or not self.link.full_duplex:
            self.up = end
        self.events.append(SimulationEvent(stream=stream, label=label, start_seconds=start, end_seconds=end))

    def _drop_device(self, value: str) -> None:
        self._hold(-self.device.pop(value))
        self.memory.append((self.compute, self.held))

    def _free(self, value: str) -> None:
        if value not in self.device and value not in self.host:
            self._refuse(f"there is no {value} to free")
        if value in self.device:  # a copy that still reads or writes these bytes has to end first
            self.compute = max(self.compute, self.offloaded_at.get(value, 0.0), self.fetched_at.get(value, 0.0))
            self._drop_device(value)
        if value in self.host:
            self._host_hold(-self.host.pop(value))
        for times in (self.offloaded_at, self.fetched_at, self.ready_at):
            times.pop(value, None)

    def _offload(self, operation: Operation) -> None:
        value = operation.value
        if value not in self.device or value in self.host:
            self._refuse(f"{value} is not on the device, or on the host already")
        self.host[value] = self.device[value]
        self._host_hold(self.device[value])
        start = max(self.down, self.ready_at.get(value, 0.0))
        end = start + self.link.down_seconds(self.device[value])
        self.offloaded_at[value] = end
        self._occupy("down", str(operation), start, end)

    def _release(self, value: str) -> None:
        if value not in self.device or value not in self.offloaded_at:
            self._refuse(f"{value} is not on the device, or was not offloaded")
        self.compute = max(self.compute, self.offloaded_at[value], self.fetched_at.pop(value, 0.0))
        self._drop_device(value)

    def _prefetch(self, operation: Operation) -> None:
        value = operation.value
        if value in self.device or value not in self.offloaded_at:
            self._refuse(f"{value} is on the device, or has no copy on the host")
        self.device[value] = self.host[value]
        self._hold(self.device[value])
        self.memory.append((self.compute, self.held))
        start = max(self.up, self.compute)
        end = start + self.link.up_seconds(self.device[value])
        self.fetched_at[value] = end
        self._occupy("up", str(operation), start, end)
