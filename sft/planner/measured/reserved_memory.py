"""Reserved memory of a plan: the bytes that the caching allocator of a GPU takes for a step.

The projection of a plan counts the bytes of its tensors. A GPU runs out of the bytes that its allocator has *reserved*, and these depend on
the order of allocations (:mod:`sft.runtime.caching_allocator`). Here the allocations and frees of a step
(:mod:`sft.planner.measured.allocation_trace`) are replayed through a simulation of the allocator.

A step allocates from a memory pool of its own (``torch.cuda.MemPool``), whose segments are reserved before the first step
(:mod:`sft.planner.measured.segment_search`). Inputs, gradients of outputs, and everything resident are allocated by the caller, outside of
the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sft.planner.measured.event_sequence import AllocationTrace
from sft.planner.measured.step_replay import NUM_STEPS, RecordedTensors, StepReplay
from sft.planner.problem import PlanningProblem
from sft.runtime.caching_allocator import AllocatorSettings, Block, CachingAllocator
from sft.torch_runtime.gradient_groups import group_gradients

__all__ = [
    "ReservedMemory",
    "recorded_tensors",
    "reserved_bytes",
    "resident_sizes",
    "simulate_reserved_memory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedMemory:
    """Peaks of a step in the simulated allocator.

    Attributes:
        requested_bytes: bytes of live tensors; the plan's projection, and the resident bytes.
        allocated_bytes: bytes of their blocks.
        reserved_bytes: bytes of all segments.
        num_failures: requests that did not fit the limit.
        num_released: segments that were returned to the driver because of the limit, in a step that repeats.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    num_failures: int = 0
    num_released: int = 0


def simulate_reserved_memory(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    *,
    segments: Sequence[int] | None = None,
    resident: Iterable[int] = (),
    limit_bytes: int | None = None,
) -> ReservedMemory:
    """Replay two steps through the simulated allocator.

    Args:
        trace: allocations of a step.
        settings: the allocator's settings.
        segments: bytes of the segments of the step's pool; ``None`` for a step without a pool.
        resident: bytes of each tensor that exists before the step.
        limit_bytes: bytes of the device.
    """
    outside = CachingAllocator(settings=settings, limit_bytes=limit_bytes)
    for num_bytes in resident:
        outside.allocate(num_bytes)
    pool = outside
    if segments is not None:
        pool = CachingAllocator(settings=settings, limit_bytes=None if limit_bytes is None else limit_bytes - outside.reserved_bytes)
        pool.reserve(segments)
    num_released = 0
    for _ in range(NUM_STEPS):
        num_released = pool.num_released
        _replay(trace, pool, outside)
    both = (pool,) if pool is outside else (pool, outside)
    return ReservedMemory(
        requested_bytes=sum(each.peak_requested_bytes for each in both),
        allocated_bytes=sum(each.peak_allocated_bytes for each in both),
        reserved_bytes=sum(each.peak_reserved_bytes for each in both),
        num_failures=sum(each.num_failures for each in both),
        num_released=pool.num_released - num_released,
    )


def reserved_bytes(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    *,
    segments: tuple[int, ...] | None,
    resident: Sequence[int],
    recorded: RecordedTensors | None = None,
) -> int:
    """The reserved bytes of :func:`simulate_reserved_memory` without a limit, in less time.

    Args:
        trace: as there.
        settings: as there.
        segments: as there.
        resident: as there.
        recorded: tensors of recorded passes, which have a pool; ``None`` for passes that are not recorded.
    """
    replay = StepReplay.of(trace, settings)
    if segments is None:
        return replay.bytes_without_pool([*resident, *(() if recorded is None else recorded.sizes)])
    return replay.outside_bytes(resident, recorded) + replay.pool_bytes(segments)[0]


def _replay(trace: AllocationTrace, pool: CachingAllocator, outside: CachingAllocator) -> None:
    blocks: dict[int, tuple[CachingAllocator, Block | None]] = {}
    for number, num_bytes in trace.events:
        if num_bytes:
            allocator = outside if number in trace.caller_numbers else pool
            blocks[number] = (allocator, allocator.allocate(num_bytes))
        else:
            allocator, block = blocks.pop(number)
            allocator.free(block)


def resident_sizes(problem: PlanningProblem) -> list[int]:
    """Bytes of the resident tensors: parameters and buffers, and copies of the trained parameters (gradients, optimizer state) up to the
    total.
    """
    graph, sized = problem.sized.graph, problem.sized
    streamed = frozenset() if problem.resources.weights is None else frozenset(problem.resources.weights.num_bytes)
    leaves = [node for node in graph.nodes if node.kind in ("parameter", "buffer") and node.name not in streamed]
    sizes = [sized.value_bytes(node.name) for node in leaves]
    parameters = [node.name for node in leaves if node.kind == "parameter"]
    trained = [name for name in parameters if name in sized.requires_grad] or parameters
    left_bytes = problem.resources.resident_bytes - sum(sizes)
    while left_bytes > 0 and sum(map(sized.value_bytes, trained)) > 0:
        for num_bytes in map(sized.value_bytes, trained):
            sizes.append(min(num_bytes, left_bytes))
            left_bytes -= sizes[-1]
            if left_bytes <= 0:
                break
    return [*sizes, left_bytes] if left_bytes > 0 else sizes


def recorded_tensors(problem: PlanningProblem) -> RecordedTensors:
    """The tensors that exist in addition if both passes are recorded as CUDA graphs."""
    sized = problem.sized
    results = [*sized.graph.seeds, *sized.graph.results]
    copied: tuple[tuple[int, ...], ...] = ()
    if sized.training:
        leaves = [node.name for node in sized.graph.nodes if node.kind == "input"]
        results += [name for name in (*sized.graph.results, *leaves) if name in sized.requires_grad]
        trained = [node.name for node in sized.graph.nodes if node.kind == "parameter" and node.name in sized.requires_grad]
        groups = group_gradients({name: sized.value_bytes(name) for name in trained})
        copied = tuple(tuple(map(sized.value_bytes, group)) for group in reversed(groups))
    inputs = sorted(map(sized.value_bytes, sized.graph.inputs), reverse=True)
    return RecordedTensors(inputs=tuple(inputs), others=tuple(map(sized.value_bytes, results)), copied=copied)
