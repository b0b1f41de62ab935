"""Time model of a GPU: seconds of a program, as the larger of what its host and what the device takes.

The host issues instructions one after the other while the device works, so a program takes

    max(sum of host seconds, sum of kernel seconds),

and a kernel the largest of its floating-point operations over the rate of its type and width, its bytes over the memory's bandwidth, and a
floor. Convolutions and matrix products run in tiles of 128 x 128 results, one for each multiprocessor at a time; the last wave of tiles
may leave multiprocessors idle.

The rates of :data:`H100` are assumptions. Nothing of them was measured. They rank plans of one model; the seconds are not a forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sft.backends.kernel_call import kernel_call_of
from sft.lower.program import Instruction, Program, Slot, slots_of

__all__ = ["H100", "GpuModel"]

#: Edge of a tile of a convolution or matrix product.
_TILE = 128
#: Least share of the rate that a kernel reaches, however few tiles it has: small problems are divided along the sum, too.
_MIN_OCCUPANCY = 0.15
#: Rates of the two backward convolutions relative to the forward one.
_GRADIENT_SHARES = (0.85, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """Rates of a kind of GPU and of its host.

    Attributes:
        name: name in reports.
        half_flops_per_second: pairs of a number of channels, and FLOPs per second of half-precision convolutions that have at most so many;
            the last entry has no limit.
        single_share: rate in single precision, relative to half precision.
        double_share: rate in double precision.
        bytes_per_second: bandwidth of the memory.
        link_bytes_per_second: bandwidth to the host, in each direction.
        num_multiprocessors: number of multiprocessors.
        min_kernel_seconds: floor of a kernel.
        call_seconds: host seconds of an operator.
        product_seconds: host seconds of a convolution or matrix product.
        kernel_call_seconds: host seconds of a Triton kernel.
        view_seconds: host seconds of an operator without a kernel.
        program_seconds: host seconds to bind a program.
    """

    name: str
    half_flops_per_second: tuple[tuple[float, float], ...]
    single_share: float
    double_share: float
    bytes_per_second: float
    link_bytes_per_second: float
    num_multiprocessors: int
    min_kernel_seconds: float
    call_seconds: float
    product_seconds: float
    kernel_call_seconds: float
    view_seconds: float
    program_seconds: float

    def seconds(self, program: Program, *, replays: bool = False) -> float:
        """Seconds of a program; without those of the host where a CUDA graph ``replays`` it."""
        host_seconds, device_seconds = self.program_seconds, 0.0
        for instruction in program.instructions:
            host, device = self._instruction_seconds(instruction)
            host_seconds += host
            device_seconds += device
        return device_seconds if replays else max(host_seconds, device_seconds)

    def flops_per_second(self, dtype: torch.dtype, num_channels: float = math.inf) -> float:
        """FLOPs per second of products of a type, for so many channels."""
        rate = next(rate for limit, rate in self.half_flops_per_second if num_channels <= limit)
        return rate * {2: 1.0, 4: self.single_share, 8: self.double_share}.get(dtype.itemsize, 1.0)

    def _instruction_seconds(self, instruction: Instruction) -> tuple[float, float]:
        """Seconds of the host and of the device."""
        outputs = [out for out in instruction.outputs if out is not None]
        is_new = any(out.root == out.number for out in outputs)
        if not instruction.writes and not is_new:
            return self.view_seconds, 0.0
        if instruction.function is torch.empty:
            return self.view_seconds, 0.0
        call = kernel_call_of(instruction.function)
        host = self.product_seconds if instruction.flops else self.call_seconds if call is None else self.kernel_call_seconds
        reads = slots_of(instruction)
        written = {slot.root: slot for slot in (*outputs, *instruction.writes)}
        num_bytes = sum(slot.num_bytes for slot in (*{slot.number: slot for slot in reads}.values(), *written.values()))
        if not instruction.flops:
            return host, num_bytes / self.bytes_per_second + self.min_kernel_seconds
        return self._product_seconds(instruction, outputs, reads, num_bytes)

    def _product_seconds(self, instruction: Instruction, outputs: list[Slot], reads: list[Slot], num_bytes: int) -> tuple[float, float]:
        """Seconds of a convolution or matrix product, or of the products that compute its gradients."""
        products = [out for out in outputs if len(out.shape) > 1] or outputs
        main = max(reads + outputs, key=lambda slot: slot.num_bytes)
        channels = [slot.shape[1] for slot in (*products, *reads) if len(slot.shape) > 1]
        num_channels = min(channels, default=1)
        share = 1.0 if len(products) == 1 else sum(_GRADIENT_SHARES) / 2
        rate = share * self.flops_per_second(main.dtype, num_channels) * self._occupancy(products[0])
        seconds = max(num_bytes / self.bytes_per_second, instruction.flops / rate)
        return len(products) * self.product_seconds, seconds + len(products) * self.min_kernel_seconds

    def _occupancy(self, product: Slot) -> float:
        """Share of the multiprocessors that work, on average over the waves of tiles."""
        width = product.shape[1] if len(product.shape) > 1 else 1
        height = math.prod(product.shape) // max(1, width)
        num_waves = math.ceil(height / _TILE) * math.ceil(width / _TILE) / self.num_multiprocessors
        return max(_MIN_OCCUPANCY, num_waves / math.ceil(num_waves)) if num_waves else 1.0


#: NVIDIA H100 SXM: half precision on tensor cores, single precision in TF32.
H100 = GpuModel(
    name="H100",
    half_flops_per_second=((64, 240e12), (128, 450e12), (256, 550e12), (math.inf, 600e12)),
    single_share=0.5,
    double_share=0.1,
    bytes_per_second=2.7e12,
    link_bytes_per_second=25e9,
    num_multiprocessors=132,
    min_kernel_seconds=2e-6,
    call_seconds=6e-6,
    product_seconds=18e-6,
    kernel_call_seconds=25e-6,
    view_seconds=2e-6,
    program_seconds=25e-6,
)
