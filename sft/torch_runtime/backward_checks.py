"""Checks before a backward pass, and queries of the running autograd engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sft.common.torch_internals import will_engine_execute
from sft.runtime.region import Tape
from sft.torch_runtime.failed_passes import refuse_after_failure

__all__ = ["check_before_backward", "check_unmodified", "engine_will_execute", "unneeded_grads"]


def check_before_backward(ctx: Any, *, consume: bool) -> None:
    """Checks before a backward pass; ``consume`` is false for a pass that retains the graph.

    Raises:
        RuntimeError: an earlier pass failed, an output was modified in place, or streamed weights were changed.
        BudgetError: a pass that retains the graph exceeds the budget.
    """
    tape: Tape | None = ctx.tape
    if ctx.recorded is None:
        refuse_after_failure(tape)
    if tape is not None:
        for name, version in ctx.versions.items():
            check_unmodified(tape.values.by_name[name], version, f"the output {name} of the compiled model")
    if ctx.inputs.weights is not None:
        ctx.inputs.weights.check()
    if not consume and ctx.recorded is None:
        ctx.inputs.check_retain_graph()


def check_unmodified(value: torch.Tensor, version: int, description: str) -> None:
    """Check that an output that the backward pass reads is still at the version that the forward pass recorded.

    Raises:
        RuntimeError: it was modified in place.
    """
    if value._version != version:
        raise RuntimeError(
            f"{description} was modified in place after the forward pass, and the backward pass needs it; modify a clone of it instead"
        )


def engine_will_execute(node: Any) -> bool:
    """True if the running backward pass computes the gradient that flows into a node of the graph; False for ``None``.

    ``torch.autograd.grad(y, x)`` and ``backward(inputs=[x])`` leave nodes out. Autograd drops gradients that are returned for them; code
    that uses a gradient itself must check.
    """
    if node is None:
        return False
    try:
        return will_engine_execute(node)
    except RuntimeError:  # torch does not tell for the leaves of torch.autograd.grad, which it computes
        return True


def unneeded_grads(context: Any, names: Iterable[str], first: int = 0) -> frozenset[str]:
    """Names of a function's tensors without a gradient in the running backward pass.

    Args:
        context: context of the function, in its backward.
        names: names of its tensors in order.
        first: position of the first of them among the function's arguments.
    """
    nodes = [node for node, _ in context.next_functions[first:]]
    return frozenset(name for name, node in zip(names, nodes, strict=False) if not engine_will_execute(node))
