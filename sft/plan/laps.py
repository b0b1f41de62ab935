"""What a step does between one move of its order and the next, noted by the machine that projects it.

A lap is a move with all that belongs to it: making room for what the segment hands on, running it, and dropping what nobody reads again.
The laps of a projection are the projection, taken apart: the highest of their peaks is the step's peak, and their FLOPs sum to the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.lower.program import Port, Program
from sft.walk.copies import OffloadedValue
from sft.walk.machine import Buffer, SimulatedBuffer, SimulatedMachine, Residuals
from sft.walk.order import ScheduleOp
from sft.walk.profile import ProgramRuns
from sft.walk.weights import GradientTransfer

__all__ = ["ScheduleOpRecord", "TracingMachine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOpRecord:
    """One move of a step.

    Attributes:
        move: what is done.
        begin_bytes: held when it begins.
        peak_bytes: most that is held while it lasts.
        end_bytes: held when it is through.
        flops: what it computes.
        runs: the programs that it runs, and how often.
        copied_bytes: what it begins to copy to the host, or back.
        waits_for: what is on its way back and has to be there, as targets of moves.
        up_bytes: of streamed weights, and of what their updates read, what it brings to the device.
        down_bytes: of their gradients and updates what leaves it.
    """

    move: ScheduleOp
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    flops: int
    runs: ProgramRuns = field(compare=False, repr=False)
    copied_bytes: int = 0
    waits_for: tuple[str, ...] = ()
    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(slots=True)
class TracingMachine(SimulatedMachine):
    """A machine of byte counts that takes down laps.

    Attributes:
        laps: those that are through.
        peak_bytes: most bytes so far, as of the end of the last lap.
        weights_peak_bytes: most bytes of streamed weights at once.
    """

    laps: list[ScheduleOpRecord] = field(default_factory=list)
    peak_bytes: int = 0
    weights_peak_bytes: int = 0
    _weights_bytes: int = 0
    _up_bytes: int = 0
    _down_bytes: int = 0
    _move: ScheduleOp | None = None
    _begin_bytes: int = 0
    _begin_flops: int = 0
    _runs: dict[int, tuple[Program, int]] = field(default_factory=dict)
    _copied_bytes: int = 0
    _waits_for: list[str] = field(default_factory=list)

    def begin(self, move: ScheduleOp) -> None:
        self.end()
        self._move, self._begin_bytes, self._begin_flops = move, self.meter.now_bytes, self.meter.flops

    def end(self) -> None:
        """Close the lap that is open; what was held before the first one counts as its own."""
        meter = self.meter
        self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)
        if self._move is not None:
            lap = ScheduleOpRecord(
                move=self._move,
                begin_bytes=self._begin_bytes,
                peak_bytes=meter.peak_bytes,
                end_bytes=meter.now_bytes,
                flops=meter.flops - self._begin_flops,
                runs=tuple(self._runs.values()),
                copied_bytes=self._copied_bytes,
                waits_for=tuple(self._waits_for),
                up_bytes=self._up_bytes,
                down_bytes=self._down_bytes,
            )
            self.laps.append(lap)
            self._move = None
            meter.peak_bytes = meter.now_bytes
        self._runs, self._copied_bytes, self._waits_for = {}, 0, []
        self._up_bytes = self._down_bytes = 0

    def note(self, runs: ProgramRuns) -> None:
        """Take down programs that ran, as often as they did."""
        for program, count in runs:
            self._runs[id(program)] = (program, count + self._runs.get(id(program), (program, 0))[1])

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        self.note(((program, 1),))
        return SimulatedMachine.run(self, program, bindings, saved)

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        copy = SimulatedMachine.offload(self, target, handles)
        self._copied_bytes += copy.num_bytes
        return copy

    def prefetch(self, copy: OffloadedValue) -> None:
        self._copied_bytes += copy.num_bytes
        SimulatedMachine.prefetch(self, copy)

    def settle(self, copy: OffloadedValue) -> None:
        self._waits_for.append(copy.target)
        SimulatedMachine.settle(self, copy)

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, handle: SimulatedBuffer | None, *, ahead: bool
    ) -> SimulatedBuffer:
        self._up_bytes += num_bytes
        self._weights_bytes += num_bytes
        self.weights_peak_bytes = max(self.weights_peak_bytes, self._weights_bytes)
        return SimulatedMachine.load_weight(self, name, num_bytes, shape, dtype, handle, ahead=ahead)

    def release_weight(self, name: str, handle: SimulatedBuffer) -> None:
        self._weights_bytes -= handle.num_bytes
        SimulatedMachine.release_weight(self, name, handle)

    def take_gradient(self, name: str, gradient: Buffer, weight: Buffer, taking: GradientTransfer) -> None:
        self._up_bytes += taking.up_bytes
        self._down_bytes += taking.down_bytes
        SimulatedMachine.take_gradient(self, name, gradient, weight, taking)
