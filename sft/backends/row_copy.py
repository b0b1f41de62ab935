"""Carried rows brought into their buffer by the kernel that moves rows: two blocks to a launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sft.backends.kernel_call import KernelCall, kernel_instruction
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.common.interval import Interval
from sft.kernels.geometry import is_channels_last
from sft.lower.program import load_rows

__all__ = ["LoadRowsCall", "match_row_loads"]

#: rows of an image ``[N, C, h, w]``
_LOADS_PER_LAUNCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRowsCall(KernelCall):
    """Pieces of blocks, each copied to its offset."""

    def run(self, destination: Tensor, dim: int, pieces: list[tuple[int, Interval, Tensor]]) -> None:
        """Copy the pieces; ``dim`` is that of rows."""
        if not self.begins(destination):
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
        for first in range(0, len(moves), 2):
            launch_move_rows(moves[first : first + 2])


def match_row_loads(question: MatchContext) -> Iterator[Rewrite]:
    """Loads of carried rows of images."""
    loads: Callable[..., Any] = load_rows
    for at, call in list(question.free(loads)):
        destination, dim, pieces = call.arguments
        numbers = question.selector.number_format_of(destination.dtype)
        if numbers is None or len(destination.shape) != 4 or dim != _LOADS_PER_LAUNCH or not all(destination.shape):
            continue
        wanted = ShapeClass(
            operator="carried rows",
            numbers=numbers,
            channels=(destination.shape[1], destination.shape[1]),
            pixels=pixel_class(math.prod(destination.shape) // destination.shape[1]),
        )
        if destination.number in question.last and question.selector.selects_kernel(wanted):
            launch = kernel_instruction(LoadRowsCall().run, destination, dim, pieces, writes=(destination,), owner=call.owner)
            yield Rewrite(gone=frozenset({at}), inserted={at: (launch,)})
