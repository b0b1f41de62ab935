"""Rewrites of loads of carried rows to the row-copy kernel, two copies per launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.backends.kernel_call import KernelCall, kernel_instruction, replayable
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.common.interval import Interval
from sft.kernels.geometry import is_channels_last
from sft.lower.program import load_rows

__all__ = ["LoadRowsCall", "match_row_loads"]

#: moves that the kernel makes in one launch
_MOVES_PER_LAUNCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRowsCall(KernelCall):
    """Copies of row blocks to their offsets in a buffer."""

    @replayable
    def run(self, destination: Tensor, dim: int, pieces: list[tuple[int, Interval, Tensor]]) -> None:
        """Copy ``rows`` of each block to ``offset``, for each ``(offset, rows, block)``; ``dim`` is the dimension of rows."""
        if not self.begin_launch(destination):
            return
        from sft.kernels.rows.rows_triton import launch_move_rows  # not above: it imports Triton

        moves = [
            (block.narrow(dim, rows.start, len(rows)), destination.narrow(dim, offset, len(rows)), False)
            for offset, rows, block in pieces
            if len(rows)
        ]
        if not all(is_channels_last(source) for source, _, _ in moves):
            load_rows(destination, dim, pieces)
            return
        for first in range(0, len(moves), _MOVES_PER_LAUNCH):
            launch_move_rows(moves[first : first + _MOVES_PER_LAUNCH])


def match_row_loads(context: MatchContext) -> Iterator[Rewrite]:
    """Loads of carried rows of images ``[N, C, h, w]``."""
    loads: Callable[..., Any] = load_rows
    for at, call in list(context.unclaimed_calls(loads)):
        destination, dim, pieces = call.arguments
        numbers = context.selector.number_format_of(destination.dtype)
        if numbers is None or len(destination.shape) != 4 or dim != 2 + ROWS or not all(destination.shape):
            continue
        shape_class = ShapeClass(
            operator="carried rows",
            numbers=numbers,
            channels=(destination.shape[1], destination.shape[1]),
            pixels=pixel_class(math.prod(destination.shape) // destination.shape[1]),
        )
        if destination.number in context.channels_last and context.selector.selects_kernel(shape_class):
            launch = kernel_instruction(LoadRowsCall().run, destination, dim, pieces, writes=(destination,), owner=call.owner)
            yield Rewrite(removed=frozenset({at}), inserted={at: (launch,)})
