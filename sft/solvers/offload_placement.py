"""Placement of copies to the host in a schedule that keeps all values on the device.

Given the set of values to offload, the placement follows the no-wait order of Beaumont, Eyraud-Dubois and Shilova (Euro-Par 2020,
Proposition 1) as closely as complete tensors and an order of issue allow:

- each value's copy starts as soon as the value exists;
- its device bytes are released just before the first operation that would not fit otherwise, oldest value first (a later wait for a copy
  is free);
- it returns in the order of use, from the earliest position at which it fits next to all later values.

A value that never had to be released is not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sft.solvers.chain import StageChain
from sft.solvers.schedule import Operation, OperationCost, activation_name, offload_op, operation_cost, prefetch_op, release_op

__all__ = ["OffloadPlacement", "operation_costs", "place_offloads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlacement:
    """A schedule with its copies.

    Attributes:
        operations: the operations.
        peak_bytes: most bytes on the device, including resident weights.
    """

    operations: tuple[Operation, ...]
    peak_bytes: int


@dataclass(slots=True)
class _Lifetime:
    """Lifetime of an offloadable value, from its creation to its free, as positions in the list.

    Attributes:
        num_bytes: its size.
        made: the operation that creates it; -1 for the chain's input.
        reads: the operations that read it.
        released: the operation before which its device bytes are released; -1 if never.
        back: the operation before which it must be back.
    """

    num_bytes: int
    made: int
    reads: list[int] = field(default_factory=list)
    released: int = -1
    back: int = -1

    def next_read(self, index: int) -> int:
        """The first read at a position or later; -1 if none."""
        return next((read for read in self.reads if read >= index), -1)


def operation_costs(
    chain: StageChain, operations: Iterable[Operation], streamed_weights: Collection[int] = ()
) -> tuple[OperationCost | None, ...]:
    """Cost of each operation of a list; None for frees."""
    return tuple(None if operation.kind == "free" else operation_cost(chain, operation, streamed_weights) for operation in operations)


def place_offloads(
    chain: StageChain,
    operations: tuple[Operation, ...],
    away: Iterable[str],
    budget_bytes: int,
    *,
    streamed_cuts: Collection[int] = (),
    streamed_weights: Collection[int] = (),
    costs: Sequence[OperationCost | None] | None = None,
) -> OffloadPlacement:
    """Insert offloads, releases and prefetches, so that the schedule fits if offloading the values ``away`` suffices.

    Args:
        chain: the chain.
        operations: a valid list without copies.
        away: activations and saved values that may be offloaded; other values stay.
        budget_bytes: the budget; the peak of the result shows if it was met.
        streamed_cuts: the schedule's streamed cuts.
        streamed_weights: the stages with streamed weights.
        costs: :func:`operation_costs` of the list, if known.
    """
    if costs is None:
        costs = operation_costs(chain, operations, streamed_weights)
    streamed = {name for cut in streamed_cuts for name in (f"x{cut}", f"y{cut}")}
    lifetimes = _lifetimes(chain, operations, costs, set(away) - streamed)
    device_bytes = _place_releases(chain, operations, costs, lifetimes, budget_bytes, streamed, frozenset(streamed_weights))
    offloaded = [(name, lifetime) for name, lifetime in lifetimes.items() if lifetime.released >= 0]
    prefetches = _place_prefetches(offloaded, device_bytes, budget_bytes)
    before: dict[int, list[Operation]] = {}
    for name, lifetime in sorted(offloaded, key=lambda item: item[1].made):
        before.setdefault(lifetime.made + 1, []).append(offload_op(name))
    for name, lifetime in sorted(offloaded, key=lambda item: item[1].released):
        before.setdefault(lifetime.released, []).append(release_op(name))
    for index, name in prefetches:
        before.setdefault(index, []).append(prefetch_op(name))
    result: list[Operation] = []
    for index, operation in enumerate(operations):
        result += before.get(index, ())
        result.append(operation)
    return OffloadPlacement(operations=tuple(result), peak_bytes=max(device_bytes))


def _lifetimes(
    chain: StageChain, operations: Sequence[Operation], costs: Sequence[OperationCost | None], away: set[str]
) -> dict[str, _Lifetime]:
    """Lifetimes of the values ``away``."""
    lifetimes: dict[str, _Lifetime] = {}
    if activation_name(0) in away:
        lifetimes[activation_name(0)] = _Lifetime(num_bytes=chain.input_bytes, made=-1)
    ended: set[str] = set()
    for index, (operation, cost) in enumerate(zip(operations, costs, strict=True)):
        if cost is None:
            ended.add(operation.value)
            continue
        for name in cost.reads:
            if name in lifetimes and name not in ended:
                lifetimes[name].reads.append(index)
        for name, size in cost.makes:
            if name in away and name not in lifetimes:
                lifetimes[name] = _Lifetime(num_bytes=size, made=index)
    return lifetimes


def _place_releases(
    chain: StageChain,
    operations: Sequence[Operation],
    costs: Sequence[OperationCost | None],
    lifetimes: dict[str, _Lifetime],
    budget_bytes: int,
    streamed: set[str],
    streamed_weights: frozenset[int],
) -> list[int]:
    """Choose the position of each release. Returns the device bytes during each operation if values return just in time."""
    current_bytes = chain.resident_bytes - 2 * sum(chain.stage(i).weight_bytes for i in streamed_weights)
    sizes = {} if activation_name(0) in streamed else {activation_name(0): chain.input_bytes}
    current_bytes += sum(sizes.values())
    # In the order in which they were made.
    waiting = dict.fromkeys(name for name in lifetimes if name == activation_name(0))
    out: set[str] = set()
    device_bytes: list[int] = []
    for index, (operation, cost) in enumerate(zip(operations, costs, strict=True)):
        if cost is None:
            device_bytes.append(current_bytes)
            if operation.value in sizes:
                size = sizes.pop(operation.value)
                current_bytes -= 0 if operation.value in out else size
                out.discard(operation.value)
                waiting.pop(operation.value, None)
            continue
        for name in cost.reads:
            if name in out:  # from here on it stays on the device
                out.discard(name)
                lifetimes[name].back = index
                current_bytes += sizes[name]
        created = {name: size for name, size in cost.makes if name not in streamed}
        extra = sum(created.values()) + cost.workspace_bytes
        for name in [name for name in waiting if name not in cost.reads] if current_bytes + extra > budget_bytes else ():
            if current_bytes + extra <= budget_bytes:
                break
            if lifetimes[name].next_read(index) < 0:
                continue
            del waiting[name]
            out.add(name)
            lifetimes[name].released = index
            current_bytes -= sizes[name]
        device_bytes.append(current_bytes + extra)
        current_bytes += sum(created.values())
        sizes.update(created)
        waiting.update(dict.fromkeys(name for name in created if name in lifetimes and lifetimes[name].made == index))
    return device_bytes


def _place_prefetches(offloaded: list[tuple[str, _Lifetime]], device_bytes: list[int], budget_bytes: int) -> list[tuple[int, str]]:
    """Choose the position of each prefetch: as early as it fits, and after all offloads are issued. Values are taken by their next read."""
    earliest = max((lifetime.made + 1 for _, lifetime in offloaded), default=0)
    positions = []
    for name, lifetime in sorted(offloaded, key=lambda item: item[1].back):
        index = lifetime.back
        while index - 1 > max(earliest - 1, lifetime.released) and device_bytes[index - 1] + lifetime.num_bytes <= budget_bytes:
            index -= 1
        for k in range(index, lifetime.back):
            device_bytes[k] += lifetime.num_bytes
        earliest = max(earliest, index)
        positions.append((index, name))
    return positions
