"""Allocator overhead: bytes that a GPU takes in addition to the tensors of a plan's programs.

The projection counts tensors. A GPU takes more for three reasons, and no formula gives the amount:

- PyTorch's allocator uses *blocks*: sizes are rounded up, and a large free block is not split for a request that nearly fills it;
- an operator may take a *workspace* while it runs, as most of cuDNN's convolutions do, of a size that the library chooses;
- cuBLAS has a workspace for each thread and stream that has multiplied matrices, and keeps it.

So each distinct program of a plan is run for a moment on the device, on numbers of its own, and the allocator's peak shows the bytes in
excess of its tensors: on this thread, and on the thread that runs backward passes, as libraries select algorithms per thread. The result is
cached in the file of measured times (`sft.torch_runtime.profiling`). The step is then simulated once more, with every buffer as large as
its block and every program with its workspace. The overhead is the difference of this peak from the plan's projection. On a CPU it is zero:
budgets refer to the bytes that PyTorch's dispatcher shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError
from sft.common.memory import measure_peak
from sft.common.torch_internals import TorchDispatchMode
from sft.lower.program import Port, Program
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.caching_allocator import AllocatorSettings
from sft.runtime.machine import Buffer, Residuals
from sft.runtime.region import Region
from sft.runtime.simulated_machine import MemoryCounter, SimulatedMachine
from sft.torch_runtime.profiling import (
    ProgramBenchmark,
    SimulatedResiduals,
    TimingCache,
    producer_program,
    run_on_autograd_thread,
    timing_key,
)

__all__ = ["AllocatorMachine", "AllocatorRounding", "OverheadEstimator", "blas_workspace_bytes", "simulate_allocator"]

#: Operators that cuBLAS computes; other matrix products are decomposed into these.
_MATMUL_OPS = frozenset({"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"})
_KIB = 2**10
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class AllocatorRounding:
    """Rounding rules of PyTorch's CUDA allocator.

    Attributes:
        splits_finely: true if the remainder of a block is always split off, as with expandable segments; otherwise up to a mebibyte is not.
    """

    splits_finely: bool = False

    @classmethod
    def of_settings(cls) -> AllocatorRounding:
        """Rules for the allocator settings of the environment."""
        return cls(AllocatorSettings.of_environment().expandable_segments)

    def size(self, num_bytes: int) -> int:
        """Largest block size for a request."""
        size = -(-num_bytes // 512) * 512
        return size if size <= _MIB or self.splits_finely else size + _MIB


@dataclass(frozen=True, slots=True)
class _AllocatorMemory:
    """Bytes of a program with blocks for storages.

    Attributes:
        peak_bytes: peak bytes above the start.
        end_rounding_bytes: rounding of the blocks that are alive at the end.
    """

    peak_bytes: int
    end_rounding_bytes: int


def simulate_allocator(program: Program, blocks: AllocatorRounding) -> _AllocatorMemory:
    """Simulate a program's allocations and frees with blocks in place of storages."""
    slack: dict[int, int] = {}
    now = slack_now = peak = 0
    for instruction in program.instructions:
        opaque_bytes = instruction.num_bytes
        for out in instruction.outputs:
            if out is not None and out.root == out.number:
                slack[out.number] = blocks.size(out.num_bytes) - out.num_bytes
                slack_now += slack[out.number]
                opaque_bytes -= out.num_bytes
        if opaque_bytes > 0:  # several tensors in one slot
            slack_now += blocks.size(opaque_bytes) - opaque_bytes
        now += instruction.num_bytes
        peak = max(peak, now + slack_now + blocks.size(instruction.scratch_bytes))
        now -= instruction.freed_bytes
        slack_now -= sum(slack.pop(number, 0) for number in instruction.frees)
    return _AllocatorMemory(peak, slack_now)


@dataclass(slots=True)
class AllocatorMachine(SimulatedMachine):
    """Simulated machine with blocks for buffers, and workspaces for programs.

    Attributes:
        blocks: rounding rules.
        workspace: workspace bytes of a program, given its first half if it has one.
    """

    blocks: AllocatorRounding = field(default_factory=AllocatorRounding)
    workspace: Callable[[Program, Program | None], int] = lambda _program, _first: 0
    _known: dict[int, tuple[Program, _AllocatorMemory]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = MemoryCounter(self.blocks.size)

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        memory = self._in_blocks(program)
        workspace_bytes = self.workspace(program, producer_program(saved))
        self.memory.record_peak(memory.peak_bytes + self.blocks.size(workspace_bytes))
        results, left = SimulatedMachine.run(self, program, bindings, saved)
        if program.residuals:
            left.values.resize(left.values.num_bytes + memory.end_rounding_bytes)
        return results, SimulatedResiduals(left.values, left.inputs, first=program if program.residuals else None)

    def _in_blocks(self, program: Program) -> _AllocatorMemory:
        if id(program) not in self._known:
            self._known[id(program)] = (program, simulate_allocator(program, self.blocks))  # the reference keeps the id unique
        return self._known[id(program)][1]


class _MatmulDetector(TorchDispatchMode):
    """Detects matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.detected = False

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.detected = self.detected or func.__name__.partition(".")[0] in _MATMUL_OPS
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class OverheadEstimator:
    """Measures the overhead of plans on one device.

    Attributes:
        device: the GPU.
        costs: cached measurements of programs.
        weights: the model's weights, by the names of the graph.
        num_streams: streams on which programs run.
        is_training: true if backward passes follow, which run on a thread of their own.
        blocks: rounding rules of the allocator.
    """

    device: torch.device
    costs: TimingCache
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_streams: int = 1
    is_training: bool = False
    blocks: AllocatorRounding = field(default_factory=AllocatorRounding.of_settings)
    _keys: dict[int, tuple[Program, str, bool]] = field(default_factory=dict)
    _multiplies: bool = False

    def overhead_bytes(self, problem: PlanningProblem, region: Region, projected_bytes: int) -> int:
        """Bytes of a step in excess of its projection.

        Args:
            problem: the planning problem.
            region: the plan's region.
            projected_bytes: the plan's peak.

        Raises:
            BudgetError: a program does not fit into the free memory of the device.
        """
        self._multiplies = False
        machine = AllocatorMachine(on_host=problem.resources.on_host, blocks=self.blocks, workspace=self._workspace_bytes)
        run_step(problem, region, machine)
        peak_bytes = machine.memory.peak_bytes
        if self._multiplies:
            num_threads = 2 if self.is_training else 1
            peak_bytes += num_threads * self.num_streams * self.blocks.size(blas_workspace_bytes(self.device))
        return max(0, peak_bytes - projected_bytes)

    def working_bytes(self, program: Program) -> int:
        """Bytes of a program above its bindings, including results."""
        return simulate_allocator(program, self.blocks).peak_bytes + self.blocks.size(self._workspace_bytes(program, None))

    def _workspace_bytes(self, program: Program, first: Program | None) -> int:
        if id(program) not in self._keys:
            name, is_lasting = timing_key(program, first)
            # With cudnn.benchmark each process searches for the fastest algorithm anew, and uses the memory that is free at that moment.
            is_lasting = is_lasting and not torch.backends.cudnn.benchmark
            threads = "two threads" if self.is_training else "one thread"
            self._keys[id(program)] = (program, f"{self.blocks} {threads} {name}", is_lasting)  # the reference keeps the id unique
        _, key, is_lasting = self._keys[id(program)]
        known, multiplies = self.costs.get(f"workspace {key}"), self.costs.get(f"products {key}")
        if known is None or multiplies is None:
            known, multiplies = self._measure(program, first)
            self.costs.add(f"workspace {key}", known, lasting=is_lasting)
            self.costs.add(f"products {key}", multiplies, lasting=is_lasting)
        self._multiplies = self._multiplies or multiplies > 0
        return int(known)

    def _measure(self, program: Program, first: Program | None) -> tuple[float, float]:
        """Workspace bytes, and 1.0 if matrices are multiplied, over all threads that run the program: libraries select per thread."""
        try:
            trial = ProgramBenchmark(program, first, self.device, self.weights)
            measurements = [self._measure_here(trial)] if first is None else []
            if self.is_training:
                run_on_autograd_thread(self.device, lambda: measurements.append(self._measure_here(trial)))
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the plan fits the budget, and {self.device} has less free: a program of it that takes {format_bytes(program.peak_bytes)} "
                f"for what it computes ran out of memory ({error}). Give what else is there back, or lower the budget to what is free.",
                needed_bytes=program.peak_bytes,
            ) from error
        workspaces, products = zip(*measurements, strict=True)
        return float(max(workspaces)), float(any(products))

    def _measure_here(self, trial: ProgramBenchmark) -> tuple[int, bool]:
        """Measure on this thread. The first run allocates lasting workspaces, and selects algorithms."""
        with _MatmulDetector() as products:
            trial.run()
        with measure_peak(self.device) as peak:
            trial.run(is_last=True)
        in_blocks = simulate_allocator(trial.program, self.blocks).peak_bytes
        return max(0, peak.requested_bytes - trial.program.peak_bytes, peak.num_bytes - in_blocks), products.detected


def blas_workspace_bytes(device: torch.device) -> int:
    """Workspace bytes that PyTorch gives cuBLAS for each thread on each stream, by PyTorch's own rule."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(size) * int(count) for size, count in sizes) * _KIB
    is_hopper = torch.cuda.get_device_capability(device)[0] >= 9
    return 32 * _MIB if is_hopper else 8 * _MIB + 128 * _KIB
