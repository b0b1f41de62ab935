"""Random chains and exhaustive searches: references of the solvers."""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Iterator
from functools import cache

from sft.solvers.chain import Stage, StageChain
from sft.solvers.schedule import Operation, activation_name, backward_op, forward_op, free_op, grad_name, loss_op, saved_name

__all__ = ["every_persistent_schedule", "fastest_of_all_states", "instances", "random_chain", "uniform_chain"]


def instances(num: int) -> range:
    """Numbers of random instances: ``num``, or ``SFT_ORACLE_FACTOR`` times as many (`make test-oracles`)."""
    return range(num * int(os.environ.get("SFT_ORACLE_FACTOR", "1")))


def uniform_chain(num_stages: int, *, light: bool = False, forward_seconds: float = 1.0, backward_seconds: float = 0.0) -> StageChain:
    """Chain of equal stages of one byte each."""
    stage = Stage(
        forward_seconds=forward_seconds, backward_seconds=backward_seconds, output_bytes=1, grad_bytes=1, saved_bytes=0 if light else 1
    )
    return StageChain(input_bytes=1, input_grad_bytes=1, stages=(stage,) * num_stages)


def random_chain(rng: random.Random, num_stages: int, *, light: bool = False, largest: int = 6, weights: bool = False) -> StageChain:
    """A chain of small integers, so that sums of times are exact."""
    stages = []
    for _ in range(num_stages):
        heavy = not light and rng.random() < 0.6
        stages.append(
            Stage(
                forward_seconds=rng.randint(0, 9),
                backward_seconds=rng.randint(0, 9),
                output_bytes=rng.randint(1, largest),
                grad_bytes=rng.randint(0, largest),
                saved_bytes=rng.randint(0, largest) if heavy else 0,
                reads_output=heavy and rng.random() < 0.5,
                forward_workspace_bytes=rng.choice([0, 0, rng.randint(0, largest)]),
                backward_workspace_bytes=rng.choice([0, 0, rng.randint(0, largest)]),
                weight_bytes=rng.randint(0, 3) if weights else 0,
            )
        )
    return StageChain(input_bytes=rng.randint(1, largest), input_grad_bytes=rng.randint(0, largest), stages=tuple(stages))


def every_persistent_schedule(chain: StageChain) -> Iterator[tuple[Operation, ...]]:
    """All persistent schedules, enumerated without the solvers' tables or emitter."""

    def returning(i: int) -> tuple[Operation, ...]:
        stage, x = chain.stage(i), tuple(free_op(activation_name(i)))
        saved = () if stage.is_light else tuple(free_op(saved_name(i)))
        before, after = ((), x) if stage.reads_output else (x, ())
        return (*before, backward_op(i), *after, *saved, *free_op(grad_name(i)))

    @cache
    def sequences_of(i: int, j: int, pending: bool) -> tuple[tuple[Operation, ...], ...]:
        if pending and i == j:
            return ((loss_op(),),)
        first = chain.stage(i + 1)
        if j == i + 1 and not pending:
            if first.is_light:
                return ((backward_op(j), *free_op(grad_name(j))),)
            return ((forward_op(j, save=True), *returning(j)),)
        sequences = [(forward_op(i + 1, save=not first.is_light), *rest, *returning(i + 1)) for rest in sequences_of(i + 1, j, pending)]
        forwards: tuple[Operation, ...] = ()
        for k in range(i + 1, j + 1 if pending else j):
            forwards = (*forwards, forward_op(k), *(free_op(activation_name(k - 1)) if k > i + 1 else ()))
            sequences += [
                (*forwards, *right, *free_op(activation_name(k)), *left)
                for right in sequences_of(k, j, pending)
                for left in sequences_of(i, k, False)
            ]
        return tuple(sequences)

    yield from sequences_of(0, chain.num_stages, True)


def fastest_of_all_states(chain: StageChain, budget_bytes: int) -> float | None:
    """Least time over *all* schedules of a light chain, checkpoints dropped and made again at will; None if nothing fits.

    Dijkstra over (stored activations, stored gradient): a move runs one operation, or drops one activation. The loss needs ``x_n``.
    """
    assert all(stage.is_light for stage in chain.stages)
    n = chain.num_stages
    room = budget_bytes - chain.resident_bytes
    start = (frozenset([0]), n + 1)
    best: dict[tuple[frozenset[int], int], float] = {start: 0.0}
    queue: list[tuple[float, int, tuple[frozenset[int], int]]] = [(0.0, 0, start)]
    ticket = 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        activations, position = state
        if position == 0:
            return seconds
        base = sum(chain.activation_bytes(i) for i in activations) + (chain.grad_bytes(position) if position <= n else 0)
        moves: list[tuple[float, int, tuple[frozenset[int], int]]] = [(0.0, 0, (activations - {i}, position)) for i in activations if i]
        for i in range(1, n + 1):
            if i - 1 in activations and i not in activations:
                stage = chain.stage(i)
                moves.append((stage.forward_seconds, stage.output_bytes + stage.forward_workspace_bytes, (activations | {i}, position)))
        if position == n + 1 and n in activations:
            moves.append((0.0, chain.grad_bytes(n), (activations, n)))
        if position <= n and position - 1 in activations:
            stage = chain.stage(position)
            moves.append(
                (stage.backward_seconds, chain.grad_bytes(position - 1) + stage.backward_workspace_bytes, (activations, position - 1))
            )
        for cost, extra, target in moves:
            if base + extra <= room and seconds + cost < best.get(target, float("inf")):
                best[target] = seconds + cost
                ticket += 1
                heapq.heappush(queue, (seconds + cost, ticket, target))
    return None
