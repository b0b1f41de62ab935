"""Device rates: seconds and costs of programs that have not been timed.

Costs are counted in FLOPs. Two further costs are converted to FLOPs at fixed rates: calling an instruction, and on the CPU the first touch
of a large fresh buffer: the kernel has to clear its pages. Both only break ties between plans of equal FLOPs.

The third is reading inputs that are not resident, which matters for small networks. A thread decodes and normalises them during the
computation, in full width for every panel: each panel's sweep reads all columns again. On the CPU that thread takes its time from the
computation; on other devices a pass lasts at least as long as its reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from sft.common.array_types import FloatArray
from sft.lower.concat import add_slices
from sft.lower.program import Instruction, Program
from sft.planner.cost.gpu_models import H100
from sft.planner.cost.gpu_time import GpuModel
from sft.solvers.chain import HostLink

__all__ = ["LARGE_BUFFER_BYTES", "DeviceRates", "num_calls"]


#: FLOPs that the device could compute while one instruction is issued.
_CALL_FLOPS = {"cpu": 5e5}
_CALL_FLOPS_DEFAULT = 1e8
#: FLOPs that the CPU could compute while it first touches one byte of a buffer too large for the allocator to recycle, and that size.
#: Steps on one machine gave 9 to 75 FLOPs, by the load of its memory. Smaller buffers are fresh, too, where the heap was trimmed, which
#: depends on the order of all frees of the process. So a few per cent of cost between two plans are below the error of the estimate.
_FRESH_BYTE_FLOPS = 15.0
LARGE_BUFFER_BYTES = 32 * 2**20
#: FLOPs per second, to the nearest power of ten: they only compete with the link to the host.
_FLOPS_PER_SECOND = {"cpu": 1e11, "cuda": 2e14}
_FLOPS_PER_SECOND_DEFAULT = 1e13
#: The rates of a GPU's two searches: copies compete with half-precision products, or with unfused ones that wait for the memory.
_GPU_FLOPS_PER_SECOND = (1e13, 2e14)
#: Bytes per second to the host and from it, to the nearest power of ten, for other kinds of device than a GPU.
_LINK_BYTES_PER_SECOND = 1e10
#: Seconds of a GPU's copy of a strip in addition to its bytes. On an H200 copies of 2 and 4 MiB take 49 and 89 microseconds
#: (benchmarks/results/2026-11-27-h200-gpu-kernels.md), of which the bytes take 38 and 76 at the 55 GB/s of large copies. Rounded up for
#: gaps between copies.
_COPY_SECONDS = 1.5e-5
#: Seconds of a step on a GPU in which the device waits for the host: until the first kernels of both passes, and after the last. Steps of
#: seven plans take 1.0 to 2.0 ms longer one by one than queued (benchmarks/results/2026-11-28-h200-gpu-steps.md). They are the same for all
#: plans of a model, but count in ratios of steps of some milliseconds.
_STEP_SECONDS = 1.4e-3
#: Bytes per second, as the network gets them, of an input that one core decodes and normalises, to the nearest power of ten.
_READ_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a device.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``.
        search_flops_per_second: rate of a search that converts seconds to FLOPs; ``None`` for that of the kind of device.
        replays: true if CUDA graphs replay the passes, so that the host issues no instruction.
        gpu: time model of the GPU, for a device of type ``"cuda"``.
    """

    device_type: str = "cpu"
    search_flops_per_second: float | None = None
    replays: bool = False
    gpu: GpuModel = field(default=H100, hash=False)

    def search_variants(self) -> tuple[DeviceRates, ...]:
        """Rates for searches of which the fastest plan is taken.

        A search adds up costs of operators. On a GPU the host issues instructions while the device computes, and the larger of two sums
        counts (:mod:`sft.planner.cost.gpu_time`), which only a complete plan has.
        """
        if self.device_type != "cuda" or self.search_flops_per_second is not None:
            return (self,)
        return tuple(replace(self, search_flops_per_second=rate) for rate in _GPU_FLOPS_PER_SECOND)

    @property
    def ranks_by_time(self) -> bool:
        """True if estimated seconds rank plans on the device better than FLOPs and calls."""
        return self.device_type == "cuda"

    def overhead(self, instruction: Instruction) -> float:
        """Cost of an instruction in addition to its FLOPs, in FLOPs."""
        cost = num_calls(instruction) * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu" and instruction.num_bytes > LARGE_BUFFER_BYTES:
            cost += _FRESH_BYTE_FLOPS * instruction.num_bytes
        return cost

    def overheads(self, calls: FloatArray, num_bytes: FloatArray) -> FloatArray:
        """Overheads of many instructions, given the calls and the allocated bytes of each."""
        costs = calls * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu":
            costs = costs + _FRESH_BYTE_FLOPS * np.where(num_bytes > LARGE_BUFFER_BYTES, num_bytes, 0.0)
        return costs

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second, to the nearest power of ten."""
        return self.search_flops_per_second or _FLOPS_PER_SECOND.get(self.device_type, _FLOPS_PER_SECOND_DEFAULT)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step besides its schedule ops."""
        return _STEP_SECONDS if self.device_type == "cuda" else 0.0

    def with_reading(self, seconds: float, read_bytes: float) -> float:
        """Seconds of a pass that computes for ``seconds`` and reads inputs at the same time: on the CPU both share the cores."""
        reading = self.reading_seconds(read_bytes)
        return seconds + reading if self.reads_on_device else max(seconds, reading)

    @property
    def reads_on_device(self) -> bool:
        """True if inputs are read by the cores that compute."""
        return self.device_type == "cpu"

    def reading_seconds(self, num_bytes: float) -> float:
        """Seconds to decode and normalise so many bytes, as the network gets them."""
        return num_bytes / _READ_BYTES_PER_SECOND

    def link(self, bytes_per_second: float | None = None) -> HostLink:
        """Link to the host with this bandwidth; ``None`` takes the nearest power of ten."""
        rate = bytes_per_second or (self.gpu.link_bytes_per_second if self.device_type == "cuda" else _LINK_BYTES_PER_SECOND)
        copy_seconds = _COPY_SECONDS if self.device_type == "cuda" else 0.0
        return HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate, copy_seconds=copy_seconds)

    def seconds(self, program: Program) -> float:
        """Estimated seconds of a program."""
        if self.device_type == "cuda":
            return self.gpu.seconds(program, replays=self.replays)
        overhead = sum(map(num_calls, program.instructions)) * _CALL_FLOPS.get(self.device_type, _CALL_FLOPS_DEFAULT)
        if self.device_type == "cpu":
            sizes = (instruction.num_bytes for instruction in program.instructions)
            overhead += _FRESH_BYTE_FLOPS * sum(num_bytes for num_bytes in sizes if num_bytes > LARGE_BUFFER_BYTES)
        return (program.flops + overhead) / self.flops_per_second


def num_calls(instruction: Instruction) -> int:
    """Number of operator calls of an instruction."""
    return len(instruction.arguments[1]) if instruction.function is add_slices else 1
