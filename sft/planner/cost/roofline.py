"""How long programs take where nobody has timed them: a roofline in FLOPs.

Costs are counted in FLOPs. Two things that are not FLOPs are turned into them by a rate of exchange: calling an instruction, and on the
CPU the first touch of a large fresh buffer, whose pages the kernel has to clear. Both only break ties between plans of equal FLOPs. A third
is reading inputs that are not resident, which matters for small networks (`sft.planner.cost.roofline`).

How many bytes of inputs that are not resident the passes over a segment read.

A thread decodes and normalises them beside the computation, in full width whatever the panels are: each panel's walk reads all columns
again. On the CPU that thread takes its time from the computation; elsewhere a pass lasts at least as long as its reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.lower.concat import add_slices
from sft.lower.program import Instruction, Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.runtime.strip_checkpoints import Checkpoints
from sft.solvers.chain import HostLink

__all__ = ["LARGE_BUFFER_BYTES", "DeviceRates", "input_pass_bytes", "num_calls", "source_bytes"]

Floats = npt.NDArray[np.float64]

#: FLOPs that the device could do while one instruction is issued.
_CALL_FLOPS = {"cpu": 5e5}
_CALL_FLOPS_DEFAULT = 1e8
#: FLOPs that the CPU could do while it first touches one byte of a buffer too large for the allocator to recycle, and that size.
_FRESH_BYTE_FLOPS = 15.0
LARGE_BUFFER_BYTES = 32 * 2**20
#: FLOPs a second, to the nearest power of ten: what times are compared with is the link to the host alone.
_FLOPS_PER_SECOND = {"cpu": 1e11}
_FLOPS_PER_SECOND_DEFAULT = 1e13
#: Bytes a second to the host and from it, to the nearest power of ten, of whatever kind the device is.
_LINK_BYTES_PER_SECOND = 1e10
#: Bytes a second of an input that is decoded and normalised, as the network gets it, by one core, to the nearest power of ten.
_READ_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a kind of device.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``.
    """

    device_type: str

    def overhead(self, instruction: Instruction) -> float:
        """What an instruction costs besides its FLOPs, in FLOPs."""
        cost = num_calls(instruction) * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu" and instruction.num_bytes > LARGE_BUFFER_BYTES:
            cost += _FRESH_BYTE_FLOPS * instruction.num_bytes
        return cost

    def overheads(self, calls: Floats, num_bytes: Floats) -> Floats:
        """The same of many instructions: calls of each, and bytes that it allocates."""
        costs = calls * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu":
            costs = costs + _FRESH_BYTE_FLOPS * np.where(num_bytes > LARGE_BUFFER_BYTES, num_bytes, 0.0)
        return costs

    @property
    def flops_per_second(self) -> float:
        """FLOPs a second, to the nearest power of ten."""
        return _FLOPS_PER_SECOND.get(self.device_type, _FLOPS_PER_SECOND_DEFAULT)

    def with_reading(self, seconds: float, read_bytes: float) -> float:
        """What a pass takes that computes for so long and reads so many bytes of inputs meanwhile: on the CPU both want the same cores."""
        reading = self.reading_seconds(read_bytes)
        return seconds + reading if self.reads_on_device else max(seconds, reading)

    @property
    def reads_on_device(self) -> bool:
        """Whether inputs are read by the cores that compute."""
        return self.device_type == "cpu"

    def reading_seconds(self, num_bytes: float) -> float:
        """What it takes to decode and normalise so many bytes, as the network gets them."""
        return num_bytes / _READ_BYTES_PER_SECOND

    def link(self, bytes_per_second: float | None = None) -> HostLink:
        """The link to the host, of a known bandwidth or of one to the nearest power of ten."""
        rate = bytes_per_second or _LINK_BYTES_PER_SECOND
        return HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate)

    def seconds(self, program: Program) -> float:
        """What a program takes, roughly."""
        overhead = sum(map(num_calls, program.instructions)) * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu":
            sizes = (instruction.num_bytes for instruction in program.instructions)
            overhead += _FRESH_BYTE_FLOPS * sum(num_bytes for num_bytes in sizes if num_bytes > LARGE_BUFFER_BYTES)
        return (program.flops + overhead) / self.flops_per_second


def num_calls(instruction: Instruction) -> int:
    """How many operators an instruction calls."""
    return len(instruction.arguments[1]) if instruction.function is add_slices else 1


def source_bytes(problem: PlanningProblem, nodes: Iterable[str]) -> int:
    """Bytes of the inputs, as the network gets them, that operators read of sources."""
    if not problem.from_source:
        return 0
    operands = {operand for name in nodes for operand in problem.graph[name].operands}
    return sum(map(problem.value_bytes, problem.from_source & operands))


def input_pass_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[tuple[float, float], ...]:
    """For each segment the bytes that its pass forward reads, and its pass back."""
    return tuple(_passes(problem, choice) for choice in choices)


def _passes(problem: PlanningProblem, choice: SegmentChoice) -> tuple[float, float]:
    num_bytes = source_bytes(problem, choice.nodes)
    if not num_bytes or choice.mode != "tiled":
        return float(num_bytes), float(num_bytes)
    num_panels = problem.num_panels(choice.nodes, choice.panel_cols)
    num_walks = num_panels * -(-problem.num_batch // choice.batch_tile)
    num_strips = -(-problem.run_height(choice.nodes) // choice.strip_rows)
    again = 1 - 1 / num_walks if choice.restart else 0.0  # the last walk's states are there
    restored = 0.0
    if choice.halo == "carry":
        restored = Checkpoints(choice.state_every, choice.state_slots).num_restored(num_strips) / num_strips
    return float(num_panels * num_bytes), num_panels * num_bytes * (1 + again + restored)
