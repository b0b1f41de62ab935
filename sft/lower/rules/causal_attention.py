"""Causal attention of some queries: the mask is made where it is read, from the position of the first query.

The mask of all queries and keys would be a matrix of both. A chunk of queries (:mod:`sft.runtime.sample_segment`) has the rows of its
queries alone: 0 up to the query's own position, minus infinity after it. The position is bound when the program runs (the ``origin`` port),
so chunks of as many queries share their program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sft.analysis.ir.graph import Ref, refs_in
from sft.analysis.ir.targets import ATTENTION
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.traced import TracedWholeRule

__all__ = ["CausalAttentionRule"]

#: Index in an origin of the first four dimensions of a value that is no image: samples, channels, rows, columns with all further ones.
_PLACES = (0, 3, 1, 2)


class CausalAttentionRule(TracedWholeRule):
    """Causal attention of consecutive queries, as torch's operator with their rows of the mask."""

    is_foreign = True

    def forward(self, ctx: NodeContext) -> Slot:
        (query,), (key,) = (tuple(refs_in(ctx.node.argument(name))) for name in ("query", "key"))
        operands = self.operand_slots(ctx)
        dtype = ctx.scope.dtype_of(query)
        mask = ctx.builder.empty((operands[query].shape[-2], operands[key].shape[-2]), dtype)
        shape = ctx.scope.shapes[ctx.node.name]
        dim = len(shape) - 2
        unit = math.prod(shape[4:]) if dim == 3 else 1
        ctx.builder.call(_write_mask, mask, ctx.builder.port("origin", ctx.node.name, ()), _PLACES[dim], unit, writes=mask)
        name = f"{ctx.node.name}.mask"
        arguments = {**dict(ctx.node.arguments), "attn_mask": Ref(name), "is_causal": False}
        return self.replay_forward(ctx, ATTENTION, tuple(arguments.items()), {**operands, name: mask})


def _write_mask(mask: Tensor, origin: Sequence[int], place: int, unit: int) -> None:
    """Write the rows of a causal mask from the query at the origin on."""
    first = (*origin, 0)[place] // unit
    mask.fill_(-math.inf).triu_(first + 1)
