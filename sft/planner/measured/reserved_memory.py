"""Reserved memory of a plan: its allocations and frees, replayed through the simulated caching allocator of a GPU.

The projection of a plan counts the bytes of its tensors. A GPU runs out of the bytes that its allocator has *reserved*, and these depend on
the order of allocations (:mod:`sft.runtime.caching_allocator`). The replay runs the plan's own schedule. Every instruction of every program
allocates its results and frees what the program frees after it, so the requested bytes equal the projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.lower.program import Port, Program
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.caching_allocator import AllocatorSettings, Block, CachingAllocator
from sft.runtime.machine import Buffer, Residuals
from sft.runtime.region import Region
from sft.runtime.simulated_machine import MemoryCounter, SimulatedBuffer, SimulatedMachine

__all__ = ["ReplayMachine", "ReservedMemory", "simulate_reserved_memory"]

#: The second step finds the segments of the first one, as all later steps do.
_NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """Peaks of a plan in the simulated allocator.

    Attributes:
        requested_bytes: bytes of live tensors; the plan's projection.
        allocated_bytes: bytes of their blocks.
        reserved_bytes: bytes of all segments.
        num_failures: requests that did not fit the limit.
        num_released: segments that were returned to the driver because of the limit, in a step that repeats.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    num_failures: int
    num_released: int


class _BlockMemory(MemoryCounter):
    """Counter of requested bytes that gives every buffer a block of the simulated allocator."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator

    def allocate(self, num_bytes: int) -> Block | None:
        super().allocate(num_bytes)
        return self.allocator.allocate(num_bytes)

    def free(self, num_bytes: int, address: Block | None) -> None:
        super().free(num_bytes, address)
        self.allocator.free(address)

    def record_peak(self, num_bytes: int) -> None:
        super().record_peak(num_bytes)
        self.allocator.free(self.allocator.allocate(num_bytes))


class _SavedBuffers:
    """Buffers that a forward program leaves for its backward program, by slot. The offload treats them as one buffer."""

    __slots__ = ("_sizes", "by_slot")

    def __init__(self, by_slot: dict[int, SimulatedBuffer]) -> None:
        self.by_slot = by_slot
        self._sizes = {slot: buffer.num_bytes for slot, buffer in by_slot.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self.by_slot.values())

    @property
    def root(self) -> _SavedBuffers:
        """Owner of the memory."""
        return self

    def resize(self, num_bytes: int) -> None:
        """Free every buffer (0), or allocate all again."""
        for slot, buffer in self.by_slot.items():
            buffer.resize(self._sizes[slot] if num_bytes else 0)


@dataclass(slots=True)
class ReplayMachine(SimulatedMachine):
    """Simulated machine that replays every instruction's allocations.

    Attributes:
        allocator: the simulated allocator.
    """

    allocator: CachingAllocator = field(default_factory=CachingAllocator)

    def __post_init__(self) -> None:
        self.memory = _BlockMemory(self.allocator)

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        self.memory.flops += program.flops
        buffers: dict[int, SimulatedBuffer] = {}
        if saved is not None:
            buffers.update(saved.values.by_slot)
            if not saved.is_retained:
                saved.values = None
        for instruction in program.instructions:
            roots = [out for out in instruction.outputs if out is not None and out.root == out.number]
            opaque_bytes = instruction.num_bytes - sum(root.num_bytes for root in roots)
            for root in roots:
                extra_bytes, opaque_bytes = (opaque_bytes, 0) if opaque_bytes > 0 else (0, opaque_bytes)  # several tensors in one slot
                buffers[root.number] = SimulatedBuffer(self.memory, root.num_bytes + extra_bytes)
            if instruction.scratch_bytes:
                self.memory.record_peak(instruction.scratch_bytes)
            for number in instruction.frees:
                buffers.pop(number, None)
        results: dict[Port, Buffer] = {}
        owners: dict[int, SimulatedBuffer] = {}
        for port, slot in program.results.items():
            owner = owners.get(slot.root) or buffers.pop(slot.root, None)
            if owner is None:  # a view of a port
                results[port] = SimulatedBuffer(self.memory, 0)
                continue
            results[port] = owner if slot.root not in owners else owner.view()
            owners[slot.root] = owner
        return results, Residuals(_SavedBuffers(buffers if program.residuals else {}))

    def residual_buffers(self, saved: Residuals, slots: Sequence[int]) -> list[Any]:
        return [saved.values]


def simulate_reserved_memory(
    problem: PlanningProblem, region: Region, settings: AllocatorSettings | None = None, *, limit_bytes: int | None = None
) -> ReservedMemory:
    """Replay two steps of a plan through the simulated allocator.

    Args:
        problem: the planning problem.
        region: the plan's region.
        settings: the allocator's settings; those of the environment by default.
        limit_bytes: bytes of the device that the step may reserve.
    """
    allocator = CachingAllocator(settings=settings or AllocatorSettings.of_environment(), limit_bytes=limit_bytes)
    machine = ReplayMachine(on_host=problem.resources.on_host, allocator=allocator)
    num_released = 0
    for _ in range(_NUM_STEPS):
        num_released = allocator.num_released
        run_step(problem, region, machine)
    return ReservedMemory(
        requested_bytes=allocator.peak_requested_bytes,
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        num_failures=allocator.num_failures,
        num_released=allocator.num_released - num_released,
    )
