"""Next values of buffers in untiled segments: running statistics and counters, of all norms in one call.

Each operator that computes the next value of a buffer would be a call of its own on a few numbers, and another call copies the result into
the output of the segment. A network with 50 norms has 150 such buffers. On the CPU a call takes microseconds, on a GPU a launch does. The
calls are emitted together at the end of the forward program instead, and write into the outputs:

.. code-block:: text

    mean, var = running_mean(moments, mean), ...   copy_(out, ...), ...       update_running_statistics(outs, moments, statistics, momentum)
    count = num_batches + 1, ...                   copy_(out, ...), ...       update_counters(outs, counters, 1)

On a GPU, a norm that is one call (:mod:`sft.lower.untiled.whole_norms`) updates copies of its statistics itself. These copies are made in
one call at the start of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from sft.analysis.ir.graph import Node
from sft.common.torch_internals import copy_tensors
from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo
from sft.lower.custom_ops.statistics import update_counters, update_running_statistics
from sft.lower.program import Slot

__all__ = ["UpdateGroup", "copy_buffers", "emit_updates", "find_updates"]

#: Vectors of all channels that exist at a time while running statistics are updated: statistics three times, and intermediate results.
_NUM_VECTORS = 8
#: Least number of buffers that are updated together: of more than one norm.
_LEAST_UPDATES = 3
_STATISTICS = ("sft.running_mean", "sft.running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """Operators that compute next values of buffers and are emitted as one call.

    Attributes:
        operators: their names, in order.
        amount: number added to each counter, or momentum of each running statistic.
    """

    operators: tuple[str, ...]
    amount: int | float


def find_updates(scope: SegmentInfo, absorbed: Collection[str]) -> tuple[UpdateGroup, ...]:
    """Groups of updates in a segment.

    An update belongs to a group if it is an output of the segment, no operator of the segment reads it, and its buffer does not depend on
    the segment. Groups have three updates at least.

    Args:
        scope: the segment.
        absorbed: operators that other calls compute.
    """
    inside, groups = frozenset(scope.names), dict[tuple[object, ...], list[Node]]()
    for name in scope.names:
        node = scope.graph[name]
        is_last = name in scope.outputs and inside.isdisjoint(scope.graph.users[name])
        if is_last and name not in absorbed and _is_update(scope, node):
            key = (node.target in _STATISTICS, *(scope.dtype_of(operand) for operand in node.operands), scope.dtype_of(name), _amount(node))
            groups.setdefault(key, []).append(node)
    large = (nodes for nodes in groups.values() if len(nodes) >= _LEAST_UPDATES)
    return tuple(UpdateGroup(operators=tuple(node.name for node in nodes), amount=_amount(nodes[0])) for nodes in large)


def _is_update(scope: SegmentInfo, node: Node) -> bool:
    """True for a running statistic with a constant momentum, and for a counter; of a buffer from outside of the segment."""
    if node.target not in (*_STATISTICS, "aten.add.Tensor"):
        return False
    buffer = _buffer(node)
    if buffer is None or buffer in scope.streamed or buffer in scope.names or scope.dtype_of(buffer) != scope.dtype_of(node.name):
        return False
    shape, amount = scope.global_shape(buffer), _amount(node)
    if node.target not in _STATISTICS:
        return shape == () and type(amount) is int and node.argument("alpha", 1) == 1 and scope.dtype_of(node.name) == torch.int64
    moments = scope.global_shape(node.argument("moments").name)
    return moments == (1, *shape, 3) and node.argument("num_batches") is None and isinstance(amount, float)


def _buffer(node: Node) -> str | None:
    """The buffer that an update reads; ``None`` for a sum of numbers."""
    name: str | None = getattr(node.argument("running" if node.target in _STATISTICS else "self"), "name", None)
    return name


def _amount(node: Node) -> int | float:
    amount: int | float = node.argument("momentum" if node.target in _STATISTICS else "other")
    return amount


def copy_buffers(builder: ProgramBuilder, nodes: Sequence[Node], slot_of: Callable[[str], Slot]) -> dict[str, Slot]:
    """Emit one call that copies the buffers of updates into the outputs of the updates; returns the outputs by name.

    Args:
        builder: takes the call.
        nodes: updates that are outputs of the segment.
        slot_of: slot of a global value.
    """
    targets, buffers = _targets(builder, nodes, slot_of)
    if targets:
        builder.call_measured(copy_tensors, (targets, buffers), (), writes=targets, peak_bytes=0, flops=0)
    return {node.name: target for node, target in zip(nodes, targets, strict=True)}


def emit_updates(scope: SegmentInfo, builder: ProgramBuilder, groups: Iterable[UpdateGroup], slot_of: Callable[[str], Slot]) -> None:
    """Emit a call for each group of updates.

    Args:
        scope: the segment.
        builder: takes the calls.
        groups: groups of updates.
        slot_of: slot of a global value.
    """
    for group in groups:
        # Means first.
        nodes = sorted((scope.graph[name] for name in group.operators), key=lambda node: node.target)
        targets, buffers = _targets(builder, nodes, slot_of)
        builder.owner = nodes[-1].name
        if nodes[0].target not in _STATISTICS:
            builder.call_measured(update_counters, (targets, buffers, group.amount), (), writes=targets, peak_bytes=0, flops=0)
            continue
        means, variances = (
            tuple(slot_of(node.argument("moments").name) for node in nodes if node.target == target) for target in _STATISTICS
        )
        scratch_bytes = _NUM_VECTORS * sum(moments.num_bytes for moments in (*means, *variances)) // 3
        arguments = (targets, means, variances, buffers, group.amount)
        builder.call_measured(update_running_statistics, arguments, (), writes=targets, peak_bytes=scratch_bytes, flops=0)


def _targets(builder: ProgramBuilder, nodes: Iterable[Node], slot_of: Callable[[str], Slot]) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """The outputs of updates, and the buffers that these read."""
    pairs = [(node.name, slot_of(name)) for node in nodes if (name := _buffer(node)) is not None]
    targets = tuple(builder.port("out", name, buffer.shape, buffer.dtype) for name, buffer in pairs)
    return targets, tuple(buffer for _, buffer in pairs)
