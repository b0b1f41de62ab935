"""Persistent checkpointing schedules: from a tree of decisions to a list of operations.

To *reverse* the stages ``i+1..j`` means: with ``x_i`` and ``y_j`` on the device, compute ``y_i`` and free ``y_j``. The first decision is
one of two (Beaumont, Herrmann, Eyraud-Dubois, Joly and Shilova, RR-9302, 2019, Theorem 1; for light stages Griewank and Walther 2000, and
Butt's thesis, equation 3.1):

- *keep* stage ``i+1``: run its forward and keep all of its values, reverse ``i+2..j``, run the backward of ``i+1``;
- *advance* to ``k``: run the forwards ``i+1..k`` and keep only ``x_k``, reverse ``k+1..j``, free ``x_k``, reverse ``i+1..k``.

Kept values stay until their backward, hence *persistent*. Every recomputing solver here is a rule for these decisions. The first pass is
the reversal of the whole chain before ``y_n`` exists: the loss creates it when the forwards have reached ``x_n``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sft.solvers.chain import StageChain
from sft.solvers.schedule import Operation, activation_name, backward_op, forward_op, free_op, grad_name, loss_op, saved_name

__all__ = ["DecisionFunction", "keep_all", "one_level", "reversal", "segment_reversal"]

#: ``decide(i, j, pending, state)`` for the stages ``i+1..j``; ``pending`` is True before the loss, ``state`` is the solver's. Returns ``k``
#: and the states for the stages after ``k`` and up to ``k``. ``k == i`` means keep, a larger ``k`` means advance to ``k``.
DecisionFunction = Callable[[int, int, bool, int], tuple[int, int, int]]


def reversal(chain: StageChain, decide: DecisionFunction, state: int = 0, *, first: int = 0) -> tuple[Operation, ...]:
    """Schedule of a step including the loss, from ``x_first`` on."""
    return tuple(_emit(chain, first, chain.num_stages, True, decide, state))


def segment_reversal(chain: StageChain, i: int, j: int, decide: DecisionFunction, state: int = 0) -> tuple[Operation, ...]:
    """Operations that reverse the stages ``i+1..j``, given ``x_i`` and ``y_j``."""
    return tuple(_emit(chain, i, j, False, decide, state))


def keep_all(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
    """Decisions of plain training."""
    return i, 0, 0


def one_level(checkpoints: Iterable[int]) -> DecisionFunction:
    """Decisions that keep the activations ``checkpoints`` in the first pass, and recompute each segment between them once with all values
    kept.
    """
    ordered = sorted(set(checkpoints))

    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return next((k for k in ordered if i < k < j), i), 0, 0

    return decide


def _emit(chain: StageChain, i: int, j: int, pending: bool, decide: DecisionFunction, state: int) -> Iterator[Operation]:
    """Emit operations in order. The stack is explicit, because kept stages nest as deep as the chain is long."""
    stack: list[Operation | tuple[int, int, bool, int]] = [(i, j, pending, state)]
    while stack:
        task = stack.pop()
        if isinstance(task, Operation):
            yield task
            continue
        i, j, pending, state = task
        if pending and i == j:
            yield loss_op()
            continue
        if not pending and j == i + 1:
            yield from _reverse_from_input(chain, j)
            continue
        k, after_state, before_state = decide(i, j, pending, state)
        if k == i:
            yield forward_op(i + 1, save=not chain.stage(i + 1).is_light)
            stack.extend(reversed([*_reverse_kept(chain, i + 1)]))
            stack.append((i + 1, j, pending, after_state))
        else:
            for stage in range(i + 1, k + 1):
                yield forward_op(stage)
                if stage > i + 1:
                    yield from free_op(activation_name(stage - 1))
            stack.append((i, k, False, before_state))
            stack.extend(free_op(activation_name(k)))
            stack.append((k, j, pending, after_state))


def _reverse_from_input(chain: StageChain, i: int) -> Iterator[Operation]:
    """Operations that reverse one stage, given its input."""
    if chain.stage(i).is_light:
        yield backward_op(i)
        yield from free_op(grad_name(i))
    else:
        yield forward_op(i, save=True)
        yield from _reverse_kept(chain, i)


def _reverse_kept(chain: StageChain, i: int) -> Iterator[Operation]:
    """Backward of a stage that was kept."""
    stage = chain.stage(i)
    if not stage.reads_output:
        yield from free_op(activation_name(i))
    yield backward_op(i)
    if stage.reads_output:
        yield from free_op(activation_name(i))
    if not stage.is_light:
        yield from free_op(saved_name(i))
    yield from free_op(grad_name(i))
