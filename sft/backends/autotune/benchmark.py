"""Benchmarkers of tuning cases: verification against fp64, and timing, of kernels and of ATen's calls."""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sft.backends.autotune.cases import TuningCase
from sft.backends.selector import ShapeClass
from sft.common.errors import InputError
from sft.common.installation import install_command
from sft.kernels.common import has_triton

__all__ = ["Benchmarker", "CudaBenchmarker", "RelativeErrors", "TuningReference", "compiler_version", "relative_error", "verify_on"]

#: a buffer larger than any cache of a GPU
_FLUSH_BYTES = 512 * 2**20
_FLUSH_RUNS = 4
_WARMUP_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """Largest relative L2 errors of the results against fp64.

    Attributes:
        kernels: error of the kernels.
        aten: error of ATen's calls.
    """

    kernels: float
    aten: float


class Benchmarker(Protocol):
    """Verifies and times tuning cases on a device."""

    @property
    def device(self) -> torch.device: ...
    @property
    def device_name(self) -> str: ...
    @property
    def triton_version(self) -> str: ...
    @property
    def torch_version(self) -> str: ...
    def verify(self, case: TuningCase) -> RelativeErrors:
        """Errors of the kernels and of ATen's calls."""

    def time(self, case: TuningCase) -> tuple[float, float]:
        """Median seconds of the kernels and of ATen's calls."""


def compiler_version(device: torch.device) -> str:
    """Version of the compiler of kernels: of Triton and, on NVIDIA's GPUs, of the assembler."""
    version = importlib.metadata.version("triton")
    if torch.version.hip is not None:
        return version
    from sft.kernels.common_triton import assembler_version  # not above: it imports Triton

    major, minor = torch.cuda.get_device_capability(device)
    return f"{version}-ptxas-{assembler_version(10 * major + minor)}"


def relative_error(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative L2 error; infinite if a result is not finite or has another shape."""
    errors = [0.0]
    for ours, exact in zip(results, truth, strict=True):
        if ours.shape != exact.shape or not bool(ours.isfinite().all()):
            return float("inf")
        errors.append(float((ours.double() - exact.double()).norm()) / max(float(exact.double().norm()), 1e-30))
    return max(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReference:
    """Results of a class that all its launch variants are compared with.

    Attributes:
        truth: results of ATen's calls in fp64.
        aten_error: error of ATen's calls in the dtype of the case.
    """

    truth: list[Tensor]
    aten_error: float

    @classmethod
    def on(cls, case: TuningCase, device: torch.device) -> TuningReference:
        """Run ATen's calls in fp64 and in the dtype of the case, each on fresh operands."""
        with torch.no_grad():
            truth = case.run_float64(device)
            return cls(truth=truth, aten_error=relative_error(case.run_aten(case.draw(device)), truth))

    def verify(self, case: TuningCase, device: torch.device) -> RelativeErrors:
        """Run the kernels of a case of this class."""
        with torch.no_grad():
            return RelativeErrors(kernels=relative_error(case.run_kernels(case.draw(device)), self.truth), aten=self.aten_error)


def verify_on(case: TuningCase, device: torch.device) -> RelativeErrors:
    """Run the kernels and ATen's calls of a case, each on fresh operands, and compare them with ATen's calls in fp64."""
    return TuningReference.on(case, device).verify(case, device)


@dataclass(slots=True)
class CudaBenchmarker:
    """Benchmarker on a GPU of this machine.

    Attributes:
        device: the GPU.
        num_rounds: timed rounds. Kernels and ATen's calls take turns, and the cache is overwritten before each.
    """

    device: torch.device
    num_rounds: int = 15
    _reference: tuple[ShapeClass, TuningReference] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise InputError(f"kernels are timed on a CUDA device, {self.device} is none that is here; run this on a machine with a GPU")
        if not has_triton():
            raise InputError(f"Triton is not installed, so there are no kernels to time; {install_command('triton')}")

    @property
    def device_name(self) -> str:
        """Name of the GPU."""
        return torch.cuda.get_device_name(self.device)

    @property
    def triton_version(self) -> str:
        """Version of the installed Triton and its assembler."""
        return compiler_version(self.device)

    @property
    def torch_version(self) -> str:
        """Version of the installed PyTorch."""
        return torch.__version__

    def verify(self, case: TuningCase) -> RelativeErrors:
        """Errors of the kernels and of ATen's calls. The exact results of a class are computed once, for all its variants."""
        if self._reference is None or self._reference[0] != case.shape_class:
            self._reference = None  # frees the results of the previous class first
            self._reference = (case.shape_class, TuningReference.on(case, self.device))
        errors = self._reference[1].verify(case, self.device)
        torch.cuda.empty_cache()
        return errors

    def time(self, case: TuningCase) -> tuple[float, float]:
        """Median seconds of the kernels and of ATen's calls."""
        self._reference = None  # the exact results take eight bytes an element
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        calls = [functools.partial(run, case.draw(self.device)) for run in (case.run_kernels, case.run_aten)]
        times: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad():
            for number in range(self.num_rounds + _WARMUP_RUNS):
                for call, call_times in zip(calls, times, strict=True):
                    seconds = self._seconds(call, flush)
                    if number >= _WARMUP_RUNS:
                        call_times.append(seconds)
        torch.cuda.empty_cache()
        return statistics.median(times[0]), statistics.median(times[1])

    def _seconds(self, call: Callable[[], object], flush: Tensor) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        for _ in range(_FLUSH_RUNS):  # while the GPU is busy, the host launches the timed call, so the launch time is not counted
            flush.zero_()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000
