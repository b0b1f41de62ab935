"""How long programs take where nobody has timed them: a roofline in FLOPs.

Costs are counted in FLOPs. Two things that are not FLOPs are turned into them by a rate of exchange: calling an instruction, and on the
CPU the first touch of a large fresh buffer, whose pages the kernel has to clear. Both only break ties between plans of equal FLOPs. A third
is reading inputs that are not resident, which matters for small networks (`sft.plan.reads`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.lower.pieces import add_slices
from sft.lower.program import Instruction, Program
from sft.plan.chain.link import HostLink

__all__ = ["LARGE_BUFFER_BYTES", "DeviceRates", "num_calls"]

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
