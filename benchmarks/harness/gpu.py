"""Common settings, environment and memory readings of device benchmarks, which also run on a CPU for a trial.

It imports neither matplotlib nor pytest: a machine with a GPU may have torch, Triton and little more.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

import sft
from harness.provenance import bare_arguments, commit
from sft.common.byte_units import format_bytes
from sft.common.installation import installed_version

__all__ = [
    "Deadline",
    "DeviceMemory",
    "convolution_settings",
    "device_environment",
    "measure_step_memory",
    "memory_problem",
    "reserved_bytes",
]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time limit of a benchmark: no case begins after it, and results are saved after each case.

    Attributes:
        minutes: minutes from ``started``; ``None`` for no limit.
        started: seconds of the monotonic clock.
    """

    minutes: float | None
    started: float

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        """A limit that starts now."""
        return cls(minutes, time.monotonic())

    @property
    def is_over(self) -> bool:
        """True if no further case may begin."""
        return time.monotonic() - self.started > (math.inf if self.minutes is None else 60 * self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peaks of a step; of tensors above its start.

    Attributes:
        allocated_bytes: bytes of the allocator's blocks; on the CPU of the tensors' storages.
        requested_bytes: bytes of the tensors' storages.
        reserved_bytes: bytes that the allocator has from the driver, above a base that the caller names; ``None`` on the CPU.
        segments: mebibytes of the allocator's segments after the step, largest first, by memory pool; empty on the CPU.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int | None
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict)


@contextlib.contextmanager
def convolution_settings(*, search: bool = False, tf32: bool = False) -> Iterator[None]:
    """Settings of cuDNN and cuBLAS for both sides of a comparison: cuDNN is on, and products of fp32 are exact unless ``tf32``.

    Args:
        search: let cuDNN time its algorithms for each shape (``cudnn.benchmark``). The search uses all free memory.
        tf32: round operands of fp32 products to ten bits.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32 = before


def reserved_bytes(device: torch.device) -> int:
    """Bytes that the allocator has from the driver, without unused segments; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()  # memory pools of earlier models
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def measure_step_memory(step: Callable[[], object], device: torch.device, reserved_before: int) -> DeviceMemory:
    """Peaks of one run of a step.

    Args:
        step: the step; it has run before, so that libraries have their workspaces.
        device: its device.
        reserved_before: :func:`reserved_bytes` before the model and its input were made: a plan counts these, too.
    """
    reserved_bytes(device)
    highest_bytes, segments = None, dict[str, list[int]]()
    with sft.measure_peak(device) as peak:  # it resets the peak of reserved bytes as well
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            highest_bytes = max(0, torch.cuda.max_memory_reserved(device) - reserved_before)
            segments = segments_by_pool(torch.cuda.memory_snapshot() if torch.cuda.is_available() else ())
    return DeviceMemory(
        allocated_bytes=peak.num_bytes, requested_bytes=peak.requested_bytes, reserved_bytes=highest_bytes, segments=segments
    )


def segments_by_pool(snapshot: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Mebibytes of the segments of a snapshot of the allocator, largest first, by memory pool and stream."""
    pools: dict[str, list[int]] = {}
    for segment in snapshot:
        pool = f"pool {segment.get('segment_pool_id', (0, 0))}, stream {segment['stream']}"
        pools.setdefault(pool, []).append(segment["total_size"] >> 20)
    return {pool: sorted(sizes, reverse=True) for pool, sizes in pools.items()}


def _counted(sizes: Sequence[int]) -> str:
    """Sizes in order, equal ones once with their number."""
    counts = [(size, len([*equal])) for size, equal in groupby(sizes)]
    return " ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in counts)


def memory_problem(memory: DeviceMemory, plan: sft.Plan) -> str:
    """A sentence if a step took more than its plan projects; otherwise empty."""
    problems = []
    if memory.allocated_bytes > plan.projected_peak_bytes:
        problems.append(f"allocated {format_bytes(memory.allocated_bytes)}, projected {format_bytes(plan.projected_peak_bytes)}")
    if memory.reserved_bytes is not None and memory.reserved_bytes > plan.projected_reserved_bytes:
        projected = format_bytes(plan.projected_reserved_bytes)
        segments = "; ".join(f"{pool}: {_counted(sizes)} MiB" for pool, sizes in memory.segments.items())
        noted = f" ({segments})" if segments else ""
        problems.append(f"reserved {format_bytes(memory.reserved_bytes)}, projected {projected} with all that is resident{noted}")
    return "; ".join(problems)


def device_environment(device: torch.device) -> dict[str, str]:
    """Environment of a result: command, commit, device, versions, and the settings that select kernels."""
    facts = {
        "command": shlex.join(["benchmarks/gpu.sh", *bare_arguments()]),
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "not installed",
        "numpy": installed_version("numpy") or "not installed",
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "default settings",
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "tf32": str(torch.backends.cudnn.allow_tf32),
    }
    if device.type != "cuda":
        return facts
    from sft.backends.autotune.benchmark import compiler_version

    major, minor = torch.cuda.get_device_capability(device)
    facts |= {"device": f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})", "cudnn": str(torch.backends.cudnn.version())}
    facts |= {"memory": format_bytes(torch.cuda.get_device_properties(device).total_memory), "cuda": str(torch.version.cuda)}
    return facts | ({} if facts["triton"] == "not installed" else {"triton": compiler_version(device)})
