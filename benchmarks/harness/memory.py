"""Memory of a step by two meters, which complement each other.

- *Metered peak* (`sft.measure_peak`): live tensor storages above the start of the step, gradients included. Exact and repeatable, without
the temporary tensors inside of operators.
- *Process peak*: the process's high-water mark above its size after model and input were built. It contains operator scratch, allocator
slack and, for `ours`, the planning. It is read from `VmHWM` of a fresh process. `ru_maxrss` of a spawned child starts at its parent's
high-water mark on Linux, so it is used only without `/proc`.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import sft
from harness.cases import Case, PlanNumbers, build, prepare
from sft.common.byte_units import format_bytes

__all__ = [
    "MemoryReading",
    "PlainNeed",
    "available_bytes",
    "measure_memory",
    "misfit",
    "peak_rss_bytes",
    "predict_plain",
    "probe_case",
    "rss_bytes",
]

#: Side of the probe from which plain's memory is predicted: large enough that activations dominate.
PROBE_PX = 256

#: Three float32 channels.
INPUT_BYTES_PER_PX = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainNeed:
    """Bytes of a step of plain PyTorch."""

    activation_bytes: int
    resident_bytes: int
    gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything, operator scratch apart."""
        return self.activation_bytes + self.resident_bytes

    def budget_bytes(self, fraction: float) -> int:
        """The budget that grants `fraction` of the activation peak on top of what is resident anyway.

        The parameters' gradients count twice: a plan reserves bytes for an old `.grad` and for the step's new gradients.
        """
        return self.resident_bytes + self.gradient_bytes + round(fraction * self.activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One method's memory and work for one step."""

    metered_bytes: int
    """Peak of live storages above the step's start, parameter gradients included."""
    gradient_bytes: int
    """The parameters' gradients, which every method keeps."""
    resident_bytes: int
    """Parameters, gradients, buffers and input."""
    process_bytes: int
    """High-water mark of the process after its first step, above its size with model and input built."""
    flops: int
    """Counted by torch's FlopCounterMode over one step."""
    prepare_seconds: float
    """Capture and planning; 0 for methods without them."""
    plan: PlanNumbers | None

    @property
    def activation_bytes(self) -> int:
        """The metered peak without the parameters' gradients."""
        return self.metered_bytes - self.gradient_bytes

    @property
    def need(self) -> PlainNeed:
        """Bytes that plain PyTorch needs by this reading."""
        return PlainNeed(activation_bytes=self.activation_bytes, resident_bytes=self.resident_bytes, gradient_bytes=self.gradient_bytes)


def predict_plain(case: Case, probe_reading: MemoryReading) -> PlainNeed:
    """Scale plain's memory from the probe's image to the case's: activations and input grow with the area."""
    probe = probe_case(case)
    new_px = case.height * case.width
    old_px = probe.height * probe.width
    return PlainNeed(
        activation_bytes=probe_reading.activation_bytes * new_px // old_px,
        resident_bytes=probe_reading.resident_bytes + INPUT_BYTES_PER_PX * (new_px - old_px),
        gradient_bytes=probe_reading.gradient_bytes,
    )


def probe_case(case: Case) -> Case:
    """The plain case on the probe's image."""
    return replace(case, method="plain", height=PROBE_PX, width=PROBE_PX)


def _status_bytes(path: str, key: str) -> int | None:
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_rss_bytes() -> int:
    """High-water mark of this process's memory."""
    peak = _status_bytes("/proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int:
    """Resident memory of this process."""
    rss = _status_bytes("/proc/self/status", "VmRSS")
    return peak_rss_bytes() if rss is None else rss


def available_bytes() -> int | None:
    """Available memory of the machine, or None if the system does not report it."""
    return _status_bytes("/proc/meminfo", "MemAvailable")


def misfit(need: PlainNeed, max_plain_gib: float | None) -> str | None:
    """Reason for which plain does not fit, or None: the caller's limit, or nine tenths of the machine's free memory."""
    free = available_bytes()
    limits = [] if free is None else [free * 9 // 10]
    if max_plain_gib is not None:
        limits.append(round(max_plain_gib * 2**30))
    if not limits or need.total_bytes <= min(limits):
        return None
    return f"predicted {format_bytes(need.total_bytes)}, limit {format_bytes(min(limits))}"


def measure_memory(case: Case) -> MemoryReading:
    """Measure one case; call it in a fresh process.

    Three steps: one bare for the process peak, one under the byte meter, one under the FLOP counter. None is timed.
    """
    torch.set_num_threads(case.threads)
    built = build(case)
    start_bytes = rss_bytes()
    started = time.perf_counter()
    step, plan = prepare(case, built)
    prepare_seconds = time.perf_counter() - started
    step()
    process_bytes = peak_rss_bytes() - start_bytes
    built.body.zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as peak:
        step()
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return MemoryReading(
        metered_bytes=peak.num_bytes,
        gradient_bytes=built.gradient_bytes,
        resident_bytes=built.resident_bytes,
        process_bytes=process_bytes,
        flops=counter.get_total_flops(),
        prepare_seconds=0.0 if plan is None else prepare_seconds,
        plan=plan,
    )
