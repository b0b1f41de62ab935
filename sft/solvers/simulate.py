"""Discrete-event simulation of a schedule: its time, its memory on device and host, and its events.

Three clocks run: the compute stream and the two directions of the link (one clock for both if the link is half duplex). A computation
starts when the compute stream is free and the prefetches of its inputs are done. A copy starts when its direction is free and, to the
host, when the value exists; to the device, when all earlier operations of the list have been computed (only then its bytes are free).
Operations on streamed cuts or weights occupy the link for as long as their bytes take.

Memory is counted along the list, not along the clocks (see `schedule`), so the peak holds for any real speed of the copies. The simulator
refuses a schedule that reads a missing value, creates or frees a value twice, or omits a backward.
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
    """One interval of activity of a stream.

    Attributes:
        stream: the compute stream, or the link to the host (``"down"``) or from it (``"up"``).
        label: the operation as text.
        start_seconds: start of the interval.
        end_seconds: end of the interval.
    """

    stream: StreamName
    label: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Time and memory of a schedule.

    Attributes:
        seconds: time until the last computation and the last copy are done.
        peak_bytes: most bytes on the device, including resident weights.
        host_peak_bytes: most bytes on the host: copies, streamed cuts and streamed weights.
        compute_seconds: sum of all computations.
        events: intervals of activity, in order of issue.
        memory: (seconds, bytes) after each change of the device's memory.
    """

    seconds: float
    peak_bytes: int
    host_peak_bytes: int
    compute_seconds: float
    events: tuple[SimulationEvent, ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def idle_seconds(self) -> float:
        """Time in which the compute stream is idle."""
        return max(0.0, self.seconds - self.compute_seconds)


def simulate(chain: StageChain, schedule: Schedule, *, link: HostLink | None = None) -> Simulation:
    """Simulate a schedule.

    Args:
        chain: times and bytes.
        schedule: the schedule.
        link: the link to the host. Default: `None`, a default :class:`HostLink`

    Raises:
        InputError: the schedule is invalid for this chain; the message has the operation and the problem.
    """
    return _ScheduleSimulator(chain, schedule, link or HostLink()).run()


class _ScheduleSimulator:
    """State of one simulation: clocks, and the values on device and host."""

    def __init__(self, chain: StageChain, schedule: Schedule, link: HostLink) -> None:
        n = chain.num_stages
        if not all(0 <= cut <= n for cut in schedule.streamed_cuts) or not all(1 <= i <= n for i in schedule.streamed_weights):
            raise InputError(f"{schedule.strategy}: streamed cuts or weights of a longer chain than this one of {n} stages")
        if (0 in schedule.streamed_cuts and not chain.input_may_stream) or (n in schedule.streamed_cuts and not chain.output_may_stream):
            raise InputError(f"{schedule.strategy}: it streams the chain's input or output, which this chain does not allow")
        self.chain, self.schedule, self.link = chain, schedule, link
        self.streamed_weights = frozenset(schedule.streamed_weights)
        self.streamed = frozenset(name for cut in schedule.streamed_cuts for name in (activation_name(cut), grad_name(cut)))
        streamed_bytes = 2 * sum(chain.stage(i).weight_bytes for i in self.streamed_weights)
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.created: set[str] = set()
        self.offloaded_at: dict[str, float] = {}
        self.fetched_at: dict[str, float] = {}
        self.ready_at: dict[str, float] = {}
        self.saved_by: dict[str, tuple[int, str]] = {}
        self.compute_clock, self.down_clock, self.up_clock, self.compute_seconds = 0.0, 0.0, 0.0, 0.0
        self.device_bytes = self.device_peak_bytes = chain.resident_bytes - streamed_bytes
        self.host_bytes = self.host_peak_bytes = streamed_bytes
        self.events: list[SimulationEvent] = []
        self.memory: list[tuple[float, int]] = []
        self.num_losses = 0
        self.position = ""

    def run(self) -> Simulation:
        """Run all operations."""
        self._create(activation_name(0), self.chain.input_bytes)
        self.memory.append((0.0, self.device_bytes))
        for index, operation in enumerate(self.schedule.operations):
            self.position = f"{self.schedule.strategy}: operation {index} ({operation})"
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
        if grad_name(0) not in self.created:
            missing = [i for i in range(self.chain.num_stages) if grad_name(i) not in self.created]
            raise InputError(f"{self.schedule.strategy}: the backward of stage {missing[-1] + 1} is missing")
        return Simulation(
            seconds=max(self.compute_clock, self.down_clock, self.up_clock),
            peak_bytes=self.device_peak_bytes,
            host_peak_bytes=self.host_peak_bytes,
            compute_seconds=self.compute_seconds,
            events=tuple(self.events),
            memory=tuple(self.memory),
        )

    def _create(self, value: str, size: int) -> None:
        if value in self.device or value in self.host:
            self._refuse(f"{value} exists already")
        if value in self.created and value[0] == "y":
            self._refuse(f"{value} was made before; each backward runs once")
        self.created.add(value)
        if value in self.streamed:
            self.host[value] = size
            self._add_host_bytes(size)
        else:
            self.device[value] = size
            self._add_device_bytes(size)

    def _add_device_bytes(self, change: int) -> None:
        self.device_bytes += change
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)

    def _add_host_bytes(self, change: int) -> None:
        self.host_bytes += change
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _refuse(self, problem: str) -> None:
        raise InputError(f"{self.position}: {problem}. The schedule is not one for this chain")

    def _cost(self, operation: Operation) -> OperationCost:
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
        cost = self._cost(operation)
        start = self.compute_clock
        down_bytes, up_bytes = cost.down_bytes, cost.up_bytes
        for value in cost.reads:
            if value in self.streamed and value in self.host:
                up_bytes += self.host[value] if operation.kind != "loss" else 0
            elif value in self.device:
                start = max(start, self.fetched_at.get(value, 0.0))
            else:
                self._refuse(f"it reads {value}, which is not on the device")
            if value[0] == "s" and self.saved_by[value] != (operation.first, operation.mode):
                self._refuse(f"{value} was saved by another form of the stages")
        for value, size in cost.makes:
            if value[0] == "s":
                self.saved_by[value] = (operation.first, operation.mode)
            self._create(value, size)
            down_bytes += size if value in self.streamed and operation.kind != "loss" else 0
        values = (*cost.reads, *(value for value, _ in cost.makes))
        if not cost.streamable and any(value in self.streamed for value in values):
            self._refuse("it needs its input or output complete, but the cut is streamed")
        self._add_device_bytes(cost.workspace_bytes)
        seconds = cost.seconds
        if down_bytes or up_bytes:
            seconds = max(seconds, self.link.streamed_seconds(down_bytes, up_bytes))
            start = max(start, self.down_clock if down_bytes else 0.0, self.up_clock if up_bytes else 0.0)
            if not self.link.full_duplex:
                start = max(start, self.down_clock, self.up_clock)
        end = start + seconds
        self.compute_seconds += cost.seconds
        self.compute_clock = end
        self.events.append(SimulationEvent(stream="compute", label=str(operation), start_seconds=start, end_seconds=end))
        self._stream_bytes(operation, start, down_bytes, up_bytes)
        for value, _ in cost.makes:
            self.ready_at[value] = end
        self.memory.append((start, self.device_bytes))
        self._add_device_bytes(-cost.workspace_bytes)
        self.memory.append((end, self.device_bytes))

    def _stream_bytes(self, operation: Operation, start: float, down_bytes: int, up_bytes: int) -> None:
        """Occupy the link with the bytes that an operation streams while it runs."""
        for stream, num_bytes, seconds in (
            ("up", up_bytes, self.link.up_seconds(up_bytes)),
            ("down", down_bytes, self.link.down_seconds(down_bytes)),
        ):
            if num_bytes:
                begin = start if self.link.full_duplex else max(start, self.down_clock, self.up_clock)
                self._occupy_link("up" if stream == "up" else "down", f"{operation} streams", begin, begin + seconds)

    def _occupy_link(self, stream: StreamName, label: str, start: float, end: float) -> None:
        if stream == "down" or not self.link.full_duplex:
            self.down_clock = end
        if stream == "up" or not self.link.full_duplex:
            self.up_clock = end
        self.events.append(SimulationEvent(stream=stream, label=label, start_seconds=start, end_seconds=end))

    def _drop_device(self, value: str) -> None:
        self._add_device_bytes(-self.device.pop(value))
        self.memory.append((self.compute_clock, self.device_bytes))

    def _free(self, value: str) -> None:
        if value not in self.device and value not in self.host:
            self._refuse(f"no {value} to free")
        if value in self.device:  # copies that still read or write these bytes must end first
            self.compute_clock = max(self.compute_clock, self.offloaded_at.get(value, 0.0), self.fetched_at.get(value, 0.0))
            self._drop_device(value)
        if value in self.host:
            self._add_host_bytes(-self.host.pop(value))
        for times in (self.offloaded_at, self.fetched_at, self.ready_at):
            times.pop(value, None)

    def _offload(self, operation: Operation) -> None:
        value = operation.value
        if value not in self.device or value in self.host:
            self._refuse(f"{value} is not on the device, or on the host already")
        self.host[value] = self.device[value]
        self._add_host_bytes(self.device[value])
        start = max(self.down_clock, self.ready_at.get(value, 0.0))
        end = start + self.link.down_seconds(self.device[value])
        self.offloaded_at[value] = end
        self._occupy_link("down", str(operation), start, end)

    def _release(self, value: str) -> None:
        if value not in self.device or value not in self.offloaded_at:
            self._refuse(f"{value} is not on the device, or was not offloaded")
        self.compute_clock = max(self.compute_clock, self.offloaded_at[value], self.fetched_at.pop(value, 0.0))
        self._drop_device(value)

    def _prefetch(self, operation: Operation) -> None:
        value = operation.value
        if value in self.device or value not in self.offloaded_at:
            self._refuse(f"{value} is on the device, or has no copy on the host")
        self.device[value] = self.host[value]
        self._add_device_bytes(self.device[value])
        self.memory.append((self.compute_clock, self.device_bytes))
        start = max(self.up_clock, self.compute_clock)
        end = start + self.link.up_seconds(self.device[value])
        self.fetched_at[value] = end
        self._occupy_link("up", str(operation), start, end)
