"""Copies to the host are put into a list of operations that keeps everything on the device.

Given which values leave, the no-wait order of Beaumont, Eyraud-Dubois and Shilova (Euro-Par 2020, Proposition 1) is kept as closely as
whole tensors and an order of issue allow: each value's copy starts as soon as the value is made; its bytes are given back only before the
first operation that would not fit otherwise, oldest first, since waiting longer for a copy costs nothing; it comes back in the order of its
use, from the earliest place at which it fits beside everything until then. A value that never had to be given back is not copied at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sft.solvers.chain import StageChain
from sft.solvers.schedule import Operation, OperationCost, activation_name, offload_op, operation_cost, prefetch_op, release_op

__all__ = ["OffloadPlacement", "operation_costs", "place_offloads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlacement:
    """A list with its copies.

    Attributes:
        operations: the list.
        peak_bytes: what it holds at its worst place, weights that stay on the device included.
        host_bytes: the sum of what is copied.
    """

    operations: tuple[Operation, ...]
    peak_bytes: int
    host_bytes: int


@dataclass(slots=True)
class _Lifetime:
    """The first life of a value that may leave: until it is freed."""

    num_bytes: int
    made: int
    reads: list[int] = field(default_factory=list)
    released: int = -1
    back: int = -1

    def next_read(self, place: int) -> int:
        return next((read for read in self.reads if read >= place), -1)


def operation_costs(
    chain: StageChain, operations: Iterable[Operation], streamed_weights: Collection[int] = ()
) -> tuple[OperationCost | None, ...]:
    """The work of each operation of a list; a free has none."""
    return tuple(None if operation.kind == "free" else operation_cost(chain, operation, streamed_weights) for operation in operations)


def place_offloads(
    chain: StageChain,
    operations: tuple[Operation, ...],
    away: Iterable[str],
    budget_bytes: int,
    *,
    streamed_cuts: Collection[int] = (),
    streamed_weights: Collection[int] = (),
    works: Sequence[OperationCost | None] | None = None,
) -> OffloadPlacement:
    """Put offloads, releases and prefetches into a list, so that it fits if the values ``away`` suffice for it.

    Args:
        chain: the chain.
        operations: a valid list without copies.
        away: activations and saved values that may go to the host; what else stays.
        budget_bytes: the budget; the result's peak says whether it was met.
        streamed_cuts: the list's streamed cuts.
        streamed_weights: the stages whose weights are streamed.
        works: :func:`operation_costs` the list, where it is known.
    """
    if works is None:
        works = operation_costs(chain, operations, streamed_weights)
    hosted = {name for cut in streamed_cuts for name in (f"x{cut}", f"y{cut}")}
    lives = _lifetimes(chain, operations, works, set(away) - hosted)
    during = _place_releases(chain, operations, works, lives, budget_bytes, hosted, frozenset(streamed_weights))
    left = [(name, life) for name, life in lives.items() if life.released >= 0]
    fetches = _place_prefetches(left, during, budget_bytes)
    before: dict[int, list[Operation]] = {}
    for name, life in sorted(left, key=lambda item: item[1].made):
        before.setdefault(life.made + 1, []).append(offload_op(name))
    for name, life in sorted(left, key=lambda item: item[1].released):
        before.setdefault(life.released, []).append(release_op(name))
    for place, name in fetches:
        before.setdefault(place, []).append(prefetch_op(name))
    placed: list[Operation] = []
    for place, operation in enumerate(operations):
        placed += before.get(place, ())
        placed.append(operation)
    return OffloadPlacement(operations=tuple(placed), peak_bytes=max(during), host_bytes=sum(life.num_bytes for _, life in left))


def _lifetimes(
    chain: StageChain, operations: Sequence[Operation], works: Sequence[OperationCost | None], away: set[str]
) -> dict[str, _Lifetime]:
    lives: dict[str, _Lifetime] = {}
    if activation_name(0) in away:
        lives[activation_name(0)] = _Lifetime(num_bytes=chain.input_bytes, made=-1)
    ended: set[str] = set()
    for place, (operation, work) in enumerate(zip(operations, works, strict=True)):
        if work is None:
            ended.add(operation.value)
            continue
        for name in work.reads:
            if name in lives and name not in ended:
                lives[name].reads.append(place)
        for name, size in work.makes:
            if name in away and name not in lives:
                lives[name] = _Lifetime(num_bytes=size, made=place)
    return lives


def _place_releases(
    chain: StageChain,
    operations: Sequence[Operation],
    works: Sequence[OperationCost | None],
    lives: dict[str, _Lifetime],
    budget_bytes: int,
    hosted: set[str],
    streamed_weights: frozenset[int],
) -> list[int]:
    """Decide where each value is given back; returns what is held during each operation if it comes back just in time."""
    held = chain.resident_bytes - 2 * sum(chain.stage(i).weight_bytes for i in streamed_weights)
    sizes = {} if activation_name(0) in hosted else {activation_name(0): chain.input_bytes}
    held += sum(sizes.values())
    # In the order in which they were made.
    waiting = dict.fromkeys(name for name in lives if name == activation_name(0))
    out: set[str] = set()
    during: list[int] = []
    for place, (operation, work) in enumerate(zip(operations, works, strict=True)):
        if work is None:
            during.append(held)
            if operation.value in sizes:
                size = sizes.pop(operation.value)
                held -= 0 if operation.value in out else size
                out.discard(operation.value)
                waiting.pop(operation.value, None)
            continue
        for name in work.reads:
            if name in out:  # from here on it stays
                out.discard(name)
                lives[name].back = place
                held += sizes[name]
        made = {name: size for name, size in work.makes if name not in hosted}
        extra = sum(made.values()) + work.workspace_bytes
        for name in [name for name in waiting if name not in work.reads] if held + extra > budget_bytes else ():
            if held + extra <= budget_bytes:
                break
            if lives[name].next_read(place) < 0:
                continue
            del waiting[name]
            out.add(name)
            lives[name].released = place
            held -= sizes[name]
        during.append(held + extra)
        held += sum(made.values())
        sizes.update(made)
        waiting.update(dict.fromkeys(name for name in made if name in lives and lives[name].made == place))
    return during


def _place_prefetches(left: list[tuple[str, _Lifetime]], during: list[int], budget_bytes: int) -> list[tuple[int, str]]:
    """From the just-in-time places backwards, each value as early as it fits; never before a copy to the host is issued."""
    earliest = max((life.made + 1 for _, life in left), default=0)
    places = []
    for name, life in sorted(left, key=lambda item: item[1].back):
        place = life.back
        while place - 1 > max(earliest - 1, life.released) and during[place - 1] + life.num_bytes <= budget_bytes:
            place -= 1
        for k in range(place, life.back):
            during[k] += life.num_bytes
        earliest = max(earliest, place)
        places.append((place, name))
    return places
