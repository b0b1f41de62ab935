"""The backward pass that autograd runs at the moment: what it was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["engine_will_execute", "retains_graph", "unneeded_grads"]


def retains_graph() -> bool:
    """Whether it was asked to retain the graph."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(query()) if query is not None else True


def engine_will_execute(node: Any) -> bool:
    """Whether it computes what flows into a node of the graph (``None``: into nothing).

    It does not where ``torch.autograd.grad(y, x)`` or ``backward(inputs=[x])`` leaves the node out. Whoever hands a gradient on is not
    asked; whoever uses it by himself has to be.
    """
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf of torch.autograd.grad: there is no answer for those that are asked for
        return True


def unneeded_grads(context: Any, names: Iterable[str], first: int = 0) -> frozenset[str]:
    """Of the tensors that a function was given those whose gradients nobody asks for.

    Args:
        context: of the function, in its backward pass.
        names: of its tensors in order.
        first: the place of the first of them.
    """
    nodes = [node for node, _ in context.next_functions[first:]]
    return frozenset(name for name, node in zip(names, nodes, strict=False) if not engine_will_execute(node))
