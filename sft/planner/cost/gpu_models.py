"""Time models of some GPUs (:class:`sft.planner.cost.gpu_time.GpuModel`), and the choice of one for a device.

The rates of :data:`H100` and :data:`H200` are rounded measurements (``benchmarks/gpu_rates.py``, ``benchmarks/results/*-gpu-rates.md``). A
test compares them with the newest results. Other constants have other origins: the interpretation of an instruction and of a program are
from profiles of whole steps; elements of pools, interpolation and copies from traces of steps of a U-Net and of ResNet-18
(``benchmarks/results/*-gpu-kernels.md``); convolutions of 32 channels on an H100 from an H200; the share of double precision and the number
of multiprocessors from data sheets.

Other GPUs have the rates of :data:`H100`, scaled by the peaks of their data sheets, or by those that follow from the properties of the
device (:func:`model_of_device`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from sft.planner.cost.gpu_time import ConvolutionRates, GpuModel

__all__ = ["H100", "H200", "SHIPPED_MODELS", "GpuPeaks", "model_of_device", "model_of_peaks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPeaks:
    """Peaks of a GPU by its data sheet.

    Attributes:
        half_flops_per_second: dense products in half precision that are accumulated in single precision.
        double_flops_per_second: products in double precision.
        bytes_per_second: bandwidth of the memory.
        link_bytes_per_second: bandwidth to the host, in each direction.
        num_multiprocessors: number of multiprocessors.
        clock_hertz: boost clock.
    """

    half_flops_per_second: float
    double_flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float
    num_multiprocessors: int
    clock_hertz: float


#: NVIDIA H100 SXM with PyTorch 2.11 and cuDNN: half precision on tensor cores, single precision in TF32.
H100 = GpuModel(
    name="an H100",
    convolutions=(
        ConvolutionRates(channels=3, forward=20e12, data=15e12, weight=25e12),
        ConvolutionRates(channels=32, forward=190e12, data=190e12, weight=60e12),
        ConvolutionRates(channels=64, forward=423e12, data=385e12, weight=457e12),
        ConvolutionRates(channels=128, forward=694e12, data=662e12, weight=646e12),
        ConvolutionRates(channels=256, forward=771e12, data=733e12, weight=667e12),
        ConvolutionRates(channels=512, forward=803e12, data=678e12, weight=426e12),
    ),
    single_share=0.5,
    double_share=0.1,
    bytes_per_second=2.9e12,
    biases_per_second=3.3e11,
    reduced_elements_per_second=4.7e11,
    pooled_elements_per_second=3.5e11,
    gathered_elements_per_second=1.1e11,
    copied_elements_per_second=4.3e11,
    link_bytes_per_second=54e9,
    num_multiprocessors=132,
    min_kernel_seconds=2e-6,
    min_replayed_seconds=1e-6,
    min_product_seconds=8e-6,
    call_seconds=9e-6,
    product_seconds=22e-6,
    kernel_call_seconds=19e-6,
    view_seconds=3e-6,
    instruction_seconds=8e-6,
    program_seconds=250e-6,
)
_H100_PEAKS = GpuPeaks(
    half_flops_per_second=989e12,
    double_flops_per_second=67e12,
    bytes_per_second=3.35e12,
    link_bytes_per_second=64e9,
    num_multiprocessors=132,
    clock_hertz=1.83e9,
)
#: NVIDIA H200 with PyTorch 2.11 and cuDNN.
H200 = replace(
    H100,
    name="an H200",
    convolutions=(
        ConvolutionRates(channels=3, forward=20e12, data=17e12, weight=23e12),
        ConvolutionRates(channels=32, forward=192e12, data=190e12, weight=61e12),
        ConvolutionRates(channels=64, forward=458e12, data=412e12, weight=436e12),
        ConvolutionRates(channels=128, forward=688e12, data=663e12, weight=640e12),
        ConvolutionRates(channels=256, forward=753e12, data=757e12, weight=721e12),
        ConvolutionRates(channels=512, forward=786e12, data=725e12, weight=449e12),
    ),
    bytes_per_second=4.2e12,
    biases_per_second=3.5e11,
    reduced_elements_per_second=5.2e11,
    link_bytes_per_second=55e9,
    min_replayed_seconds=0.85e-6,
    call_seconds=10.5e-6,
    product_seconds=21e-6,
    kernel_call_seconds=14.5e-6,
    view_seconds=3.5e-6,
)
_A100_PEAKS = GpuPeaks(
    half_flops_per_second=312e12,
    double_flops_per_second=19.5e12,
    bytes_per_second=2.04e12,
    link_bytes_per_second=32e9,
    num_multiprocessors=108,
    clock_hertz=1.41e9,
)
_RTX_4090_PEAKS = GpuPeaks(
    half_flops_per_second=165e12,
    double_flops_per_second=1.3e12,
    bytes_per_second=1.01e12,
    link_bytes_per_second=32e9,
    num_multiprocessors=128,
    clock_hertz=2.52e9,
)

#: Bytes that a pass over an image in half precision reads and writes for an element.
_PASS_BYTES = 4


def model_of_peaks(name: str, peaks: GpuPeaks) -> GpuModel:
    """The time model of a GPU that was not measured: the H100's, scaled by the ratios of their peaks.

    Element-wise rates scale with multiprocessors and clock, and are at most those of the memory.
    """
    products = peaks.half_flops_per_second / _H100_PEAKS.half_flops_per_second
    threads = peaks.num_multiprocessors * peaks.clock_hertz / (_H100_PEAKS.num_multiprocessors * _H100_PEAKS.clock_hertz)
    bytes_per_second = H100.bytes_per_second * peaks.bytes_per_second / _H100_PEAKS.bytes_per_second

    def elements(rate: float) -> float:
        return min(threads * rate, bytes_per_second / _PASS_BYTES)

    return replace(
        H100,
        name=name,
        convolutions=tuple(
            replace(rates, forward=products * rates.forward, data=products * rates.data, weight=products * rates.weight)
            for rates in H100.convolutions
        ),
        double_share=min(1.0, peaks.double_flops_per_second / peaks.half_flops_per_second),
        bytes_per_second=bytes_per_second,
        biases_per_second=elements(H100.biases_per_second),
        reduced_elements_per_second=min(threads * H100.reduced_elements_per_second, 2 * bytes_per_second / _PASS_BYTES),
        pooled_elements_per_second=threads * H100.pooled_elements_per_second,
        gathered_elements_per_second=threads * H100.gathered_elements_per_second,
        copied_elements_per_second=elements(H100.copied_elements_per_second),
        link_bytes_per_second=H100.link_bytes_per_second * peaks.link_bytes_per_second / _H100_PEAKS.link_bytes_per_second,
        num_multiprocessors=peaks.num_multiprocessors,
    )


#: Models by the words of a device's name, in the order in which they are compared.
SHIPPED_MODELS: tuple[tuple[str, GpuModel], ...] = (
    ("H200", H200),
    ("H100", H100),
    ("A100", model_of_peaks("an A100 (data sheet)", _A100_PEAKS)),
    ("RTX 4090", model_of_peaks("an RTX 4090 (data sheet)", _RTX_4090_PEAKS)),
)

#: Dense half-precision FLOPs of a multiprocessor in a clock, by compute capability, and of the GeForce cards of it.
_FLOPS_PER_CLOCK = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
_GEFORCE_SHARE = 0.5
#: Single-precision multiply-adds of a multiprocessor in a clock, for GPUs without tensor cores for half precision.
_FLOPS_PER_CLOCK_DEFAULT = 256
#: Double-precision FLOPs of a multiprocessor in a clock: of compute accelerators, and of other GPUs.
_DOUBLE_FLOPS_PER_CLOCK = {(7, 0): 64, (8, 0): 128, (9, 0): 256, (10, 0): 128}
_DOUBLE_FLOPS_PER_CLOCK_DEFAULT = 4
#: Clock and bandwidth where the device does not tell them.
_CLOCK_HERTZ, _BYTES_PER_SECOND, _LINK_BYTES_PER_SECOND = 1.5e9, 0.5e12, 32e9


def model_of_device(device: torch.device) -> GpuModel:
    """The time model of a GPU: a shipped one by its name, or one of the peaks that follow from its properties."""
    return model_of_properties(torch.cuda.get_device_properties(device))


def model_of_properties(properties: Any) -> GpuModel:
    """As :func:`model_of_device`, for the result of ``torch.cuda.get_device_properties``."""
    name = re.sub(r"[^A-Za-z0-9]+", " ", properties.name)
    for words, model in SHIPPED_MODELS:
        if re.search(rf"{words}\b", name):  # no RTX A1000 for an A100
            return model
    capability = (properties.major, properties.minor)
    clock_hertz = 1e3 * getattr(properties, "clock_rate", 0) or _CLOCK_HERTZ
    clocks = properties.multi_processor_count * clock_hertz
    half = clocks * _FLOPS_PER_CLOCK.get(capability, _FLOPS_PER_CLOCK_DEFAULT) * (_GEFORCE_SHARE if "GeForce" in name else 1.0)
    memory_clock_hertz = 1e3 * getattr(properties, "memory_clock_rate", 0)
    peaks = GpuPeaks(
        half_flops_per_second=half,
        double_flops_per_second=clocks * _DOUBLE_FLOPS_PER_CLOCK.get(capability, _DOUBLE_FLOPS_PER_CLOCK_DEFAULT),
        # Both edges of the clock transfer a bit of the bus.
        bytes_per_second=2 * memory_clock_hertz * getattr(properties, "memory_bus_width", 0) / 8 or _BYTES_PER_SECOND,
        link_bytes_per_second=_LINK_BYTES_PER_SECOND,
        num_multiprocessors=properties.multi_processor_count,
        clock_hertz=clock_hertz,
    )
    return model_of_peaks(f"the {properties.name} (its properties)", peaks)
