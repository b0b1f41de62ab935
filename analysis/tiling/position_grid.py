"""Position grids: where the positions of an output lie in the image.

Composing the placements of all operators from an input to an output (:class:`sft.analysis.ir.access.AxisPlacement`) gives the pixels that
position ``i`` of the output reads: ``stride * i + first`` to ``stride * i + last``, borders ignored. Their middle is the *centre* of the
position, an exact fraction::

    conv 3x3, stride 2, padding 1    centre of position i: pixel 2 i              i.e. 2 i + 1/2 on an axis where pixel p is [p, p + 1)
    conv 3x3, stride 2, padding 0                          pixel 2 i + 1
    patches of 4 px (ConvNeXt)                             between pixels 4 i + 1 and 4 i + 2
    max pooling of 2, upsampling by 2                      pixel i

Where branches meet, the hull of both ranges counts. Branches of different strides (a skip connection next to an upsampling to its odd size)
follow the branch that reads fewer pixels. Reductions have no positions, and an operator that reads one next to an image follows the image.

An operator without an access map runs on full tensors: attention over all positions, a rotation by ``roll``, a model's own reshaping. Its
result keeps the grid of the latest image of the same extents that it depends on. Without such an image its positions divide the latest
image into equal cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from sft.analysis.ir.access import AxisPlacement
from sft.analysis.ir.graph import Node
from sft.analysis.tiling.phases import PhasedGraph

__all__ = ["PositionGrid", "output_grids"]

#: Operator that gives an image back in the model's own order of dimensions.
_RESTORE_DIMS = "sft.restore_dims"


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionGrid:
    """The positions of an output along one axis, in pixels of the input, where pixel ``p`` covers ``[p, p + 1)``.

    >>> grid = PositionGrid(stride_px=Fraction(32), first_centre_px=Fraction(1, 2))
    >>> grid.centre_px(2), grid.cell_px(2), grid.position_at(80), grid.position_at(79)
    (Fraction(129, 2), (Fraction(97, 2), Fraction(161, 2)), 3, 2)

    Attributes:
        stride_px: pixels from one position to the next.
        first_centre_px: centre of position 0.
    """

    stride_px: Fraction
    first_centre_px: Fraction

    def __post_init__(self) -> None:
        if self.stride_px <= 0:
            raise ValueError(f"not a grid: {self}")

    @classmethod
    def equal_cells(cls, extent_px: int, num_positions: int) -> PositionGrid:
        """The grid of positions that divide an axis into equal cells.

        >>> PositionGrid.equal_cells(100, 4)
        PositionGrid(stride_px=Fraction(25, 1), first_centre_px=Fraction(25, 2))
        """
        stride_px = Fraction(extent_px, num_positions)
        return cls(stride_px=stride_px, first_centre_px=stride_px / 2)

    @property
    def start_px(self) -> Fraction:
        """Start of the cell of position 0; negative for a padded network."""
        return self.first_centre_px - self.stride_px / 2

    def centre_px(self, position: int) -> Fraction:
        """Centre of a position."""
        return self.first_centre_px + position * self.stride_px

    def cell_px(self, position: int) -> tuple[Fraction, Fraction]:
        """Cell of a position: half a stride on either side of its centre. Adjacent cells meet."""
        start = self.start_px + position * self.stride_px
        return start, start + self.stride_px

    def position_at(self, pixel: int) -> int:
        """The position in whose cell a pixel's centre lies; below 0, or past the last position, for a pixel that no cell covers."""
        return math.floor((pixel + Fraction(1, 2) - self.start_px) / self.stride_px)

    def reversed(self, num_positions: int, extent_px: int) -> PositionGrid:
        """The grid of the same positions in reverse order, on the reversed axis: of a mirrored image.

        >>> PositionGrid(stride_px=Fraction(4), first_centre_px=Fraction(1, 2)).reversed(num_positions=3, extent_px=10)
        PositionGrid(stride_px=Fraction(4, 1), first_centre_px=Fraction(3, 2))
        """
        return PositionGrid(stride_px=self.stride_px, first_centre_px=extent_px - self.centre_px(num_positions - 1))


def output_grids(phases: PhasedGraph) -> tuple[tuple[PositionGrid, ...] | None, ...]:
    """The grids of every output of a graph at one input size, one for each axis.

    Args:
        phases: the graph, with its sizes as numbers.

    Returns:
        For each output its grids, in order of the image's axes (wherever the output has them), in pixels of the first image; ``None`` for
        an output without positions.
    """
    graph = phases.graph
    placed = _place_values(phases)
    grids = []
    for name in graph.outputs:
        node = graph[name]
        # An output in the model's own order of dimensions has the positions of the image that it was.
        image = node.operands[0] if node.target == _RESTORE_DIMS and node.operands[0] in placed else name
        grids.append(tuple(map(_grid_of, placed[image])) if image in placed else None)
    return tuple(grids)


def _grid_of(placement: AxisPlacement) -> PositionGrid:
    return PositionGrid(stride_px=placement.stride, first_centre_px=placement.centre + Fraction(1, 2))


Placements = tuple[AxisPlacement, ...]


def _place_values(phases: PhasedGraph) -> dict[str, Placements]:
    """The placement of every value with positions, along each axis, in pixels of the first image."""
    graph, axes = phases.graph, phases.graph.axes
    images = [name for name in graph.inputs if name in phases.streamed]
    placed: dict[str, Placements] = {}
    #: of each value without positions: the placed values that it depends on through such values
    reached: dict[str, frozenset[str]] = {}
    for name in images:
        extents = zip(_extents(phases, images[0]), _extents(phases, name), strict=True)
        placed[name] = tuple(AxisPlacement.equal_cells(first, extent) for first, extent in extents)
    for node in graph.operators:
        row = phases.rows[node.name]
        origins = _origins(node, placed, reached)
        streamed = [name for name in row.streamed_operands(node, phases.streamed) if name in placed]
        if row.role == "stream" and streamed:
            placed[node.name] = tuple(
                reduce(AxisPlacement.join, (placed[name][axis].then(row.placement(node, axis)) for name in streamed))
                for axis in range(axes.count)
            )
        elif origins and (node.name in phases.streamed or (node.name in graph.outputs and _has_positions(phases, node, images[0]))):
            placed[node.name] = _place_untiled(phases, node, origins, placed)
        else:
            reached[node.name] = origins
    return placed


def _origins(node: Node, placed: Mapping[str, Placements], reached: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The nearest placed values that an operator depends on."""
    return frozenset().union(*({name} if name in placed else reached.get(name, frozenset()) for name in node.operands))


def _place_untiled(phases: PhasedGraph, node: Node, origins: frozenset[str], placed: Mapping[str, Placements]) -> Placements:
    """The placement of an operator without an access map: see the module's docstring."""
    latest: Sequence[str] = sorted(origins, key=phases.graph.position, reverse=True)
    node_extents = _extents(phases, node.name)
    for name in latest:
        if _extents(phases, name) == node_extents:
            return placed[name]
    extents = _extents(phases, latest[0])
    cells = (AxisPlacement.equal_cells(extent, length) for extent, length in zip(extents, node_extents, strict=True))
    return tuple(placement.then(cell) for placement, cell in zip(placed[latest[0]], cells, strict=True))


def _has_positions(phases: PhasedGraph, node: Node, image: str) -> bool:
    """True if the last dimensions of an untiled output may be those of the image: several positions, at most one for each pixel."""
    node_extents = _extents(phases, node.name)
    fits = all(length <= extent for length, extent in zip(node_extents, _extents(phases, image), strict=False))
    return len(node.shape) >= phases.graph.axes.rank and any(length != 1 for length in node_extents) and fits


def _extents(phases: PhasedGraph, name: str) -> tuple[int, ...]:
    graph = phases.graph
    return tuple(int(extent) for extent in graph.axes.of(graph[name].shape))
