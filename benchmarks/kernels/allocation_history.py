"""Allocation history: the allocations of a step on a GPU next to those that its plan was simulated with.

A step that reserves more than projected has made allocations that the simulation does not know, or in another order. The caching
allocator's history has every one of them with its stack, the simulation every one with its instruction. :func:`differences` aligns the two
sequences by their sizes.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sft.lower.program import Instruction
from sft.planner.materialize import ProjectedPlan
from sft.planner.measured import allocation_trace
from sft.planner.measured.allocator_overhead import OverheadEstimator
from sft.planner.problem import PlanningProblem

__all__ = [
    "Allocation",
    "PlanRecorder",
    "differences",
    "real_allocations",
    "recorded_history",
    "simulated_allocations",
    "write_allocations",
]

#: Entries of the history: some steps of a hundred thousand allocations.
_MAX_ENTRIES = 1_000_000
#: Frames of a stack that are shown.
_NUM_FRAMES = 6
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation, or its free.

    Attributes:
        num_bytes: bytes of the block; negative for a free.
        label: what made it.
    """

    num_bytes: int
    label: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.num_bytes / 2**20:+12.3f} MiB  {self.label}"


@contextmanager
def recorded_history(device: torch.device) -> Iterator[None]:
    """Record the allocator's history; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def real_allocations(snapshot: Mapping[str, Any]) -> dict[int, list[Allocation]]:
    """Allocations and frees of a snapshot of the allocator in order, by stream."""
    streams: dict[int, list[Allocation]] = {}
    for trace in snapshot["device_traces"]:
        live: dict[int, int] = {}
        for entry in trace:
            made = streams.setdefault(entry["stream"], [])
            if entry["action"] == "alloc":
                live[entry["addr"]] = _block_bytes(entry["size"])
                made.append(Allocation(live[entry["addr"]], _stack(entry)))
            elif entry["action"] == "free_completed" and entry["addr"] in live:
                made.append(Allocation(-live.pop(entry["addr"]), _stack(entry)))
    return streams


@dataclass(slots=True)
class PlanRecorder:
    """Recorder of the plans whose overhead is estimated.

    Attributes:
        plans: estimator, problem and plan with its overhead, in order.
    """

    plans: list[tuple[OverheadEstimator, PlanningProblem, ProjectedPlan]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record plans while the context is active."""
        original = OverheadEstimator.with_overhead

        def recorded(estimator: OverheadEstimator, problem: PlanningProblem, projected: ProjectedPlan) -> ProjectedPlan:
            result = original(estimator, problem, projected)
            self.plans.append((estimator, problem, result))
            return result

        with patch.object(OverheadEstimator, "with_overhead", recorded):
            yield

    def simulated(self, peak_bytes: int) -> list[Allocation]:
        """Allocations of a step in the pool of the last plan with this projected peak; empty if there is none."""
        for estimator, problem, plan in reversed(self.plans):
            if plan.projection.peak_bytes + plan.projection.overhead_bytes == peak_bytes:
                return simulated_allocations(problem, plan, estimator)
        return []


def simulated_allocations(problem: PlanningProblem, plan: ProjectedPlan, estimator: OverheadEstimator) -> list[Allocation]:
    """Allocations of a step in the plan's pool, in order, each with its instruction."""
    starts, labels = [0], ["before the first instruction"]
    machine = allocation_trace._RecordingMachine

    def run_instruction(self: Any, instruction: Instruction, *arguments: Any) -> None:
        starts.append(len(self.recorder.events))
        shapes = ", ".join("x".join(map(str, out.shape)) for out in instruction.outputs if out is not None)
        labels.append(f"{str(instruction.function)[:120]} -> {shapes}")
        original(self, instruction, *arguments)

    def run(self: Any, program: Any, bindings: Any, saved: Any = None) -> Any:
        return self._run_instructions(program, saved)  # each run, as those that are recorded once have no labels

    original = machine._run_instruction
    with ExitStack() as patches:
        patches.enter_context(patch.object(machine, "_run_instruction", run_instruction))
        patches.enter_context(patch.object(machine, "run", run))
        patches.enter_context(patch.object(allocation_trace._RecordedSweeps, "_record", lambda *arguments: arguments[-1]()))
        trace = allocation_trace.record_step(problem, plan.region, estimator._workspaces)
    sizes: dict[int, int] = {}
    made = []
    for position, (number, num_bytes) in enumerate(trace.events):
        if num_bytes:
            sizes[number] = _block_bytes(num_bytes)
        if number not in trace.caller_numbers:
            label = labels[bisect_right(starts, position) - 1]
            made.append(Allocation(sizes[number] if num_bytes else -sizes[number], label))
    return made


def differences(real: Sequence[Allocation], simulated: Sequence[Allocation]) -> str:
    """Differences of two sequences in order; ``-`` for an allocation that was not simulated, ``+`` for one that was not made."""
    matcher = difflib.SequenceMatcher(None, [each.num_bytes for each in real], [each.num_bytes for each in simulated], autojunk=False)
    lines = []
    for kind, start, stop, other_start, other_stop in matcher.get_opcodes():
        if kind != "equal":
            lines += [f"- {start:6} {each}" for each in real[start:stop]]
            lines += [f"+ {other_start:6} {each}" for each in simulated[other_start:other_stop]]
    return "\n".join(lines)


def write_allocations(stem: Path, simulated: Sequence[Allocation]) -> None:
    """Write to ``<stem>.allocations.txt`` how the allocations so far, of each stream, differ from the simulated ones."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    sections = [
        f"stream {stream}: {len(real)} allocations and frees, {len(simulated)} simulated\n{differences(real, simulated)}\n"
        for stream, real in real_allocations(torch.cuda.memory._snapshot()).items()
    ]
    Path(f"{stem}.allocations.txt").write_text("\n".join(sections), encoding="utf-8")


def _block_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _stack(entry: Mapping[str, Any]) -> str:
    """The innermost frames of our code."""
    names = [
        f"{frame['filename'].rsplit('/sft/', 1)[-1]}:{frame['line']}" for frame in entry.get("frames", ()) if "/sft/" in frame["filename"]
    ]
    return " < ".join(names[:_NUM_FRAMES])
