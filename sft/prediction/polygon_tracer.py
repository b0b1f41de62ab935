"""Polygons of a map of classes, traced strip by strip: outlines of connected pixels of one class, with holes, joined exactly across strips.

*Definition.* Two pixels are connected if they have the same class and share an edge (4-connectivity, as ``rasterio.features.shapes``). A
polygon is one component: the outer ring along the edges of its pixels, and a ring for each hole. Corners have integer coordinates.

*Corners.* A ring alternates between horizontal and vertical runs of pixel edges, so a ring is determined by its corners. The four pixels
around a grid point decide which corners exist there. For a pixel, with its two neighbours at that grid point and the pixel diagonal to it:

=========================================  ===================================================================
neighbours of another class, both          convex corner
neighbours of the same class, diagonal not  concave corner; its two edges belong to the neighbours
otherwise                                  no corner
=========================================  ===================================================================

*Links.* Along one grid line, corners with an edge on the same side are the ends of runs, start and end in turn. Sorting links them; no edge
is followed pixel by pixel. Horizontal runs end in their own line. Vertical runs may continue below the strip: their upper corner is an open
end, and the chain of corners between two open ends is kept for the next strip. A chain is a ring if its ends meet.

*Holes.* Two rings at the ends of one run of pixels in a row belong to the same component. The run is looked up at the upper corner of every
right edge. The leftmost right edge of a hole has a ring that reaches further left on the other end of its run, and so on to the outer ring.
Therefore these links join each hole to its outer ring. A component is complete when its outer ring is.

Memory is proportional to the width of the map and the corners of incomplete components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["LabelPolygon", "PolygonTracer"]

IntArray: TypeAlias = npt.NDArray[np.int64]
#: Corners of a chain, in pieces ``[n, 2]`` of (x, y).
_Chain: TypeAlias = list[IntArray]

#: Sides of a run. Horizontal: interior above or below the line. Vertical: interior left or right of it.
_ABOVE, _BELOW = 0, 1
_LEFT, _RIGHT = 0, 1
#: Ends of a run, in the order in which they are sorted at one grid point.
_END, _START = 0, 1

#: For each pixel around a grid point (top left, top right, bottom left, bottom right): its side and end for the horizontal and the vertical
#: run of a convex corner, and the same of a concave corner.
_CONVEX = ((_ABOVE, _END, _LEFT, _END), (_ABOVE, _START, _RIGHT, _END), (_BELOW, _END, _LEFT, _START), (_BELOW, _START, _RIGHT, _START))
_CONCAVE = ((_ABOVE, _START, _LEFT, _START), (_ABOVE, _END, _RIGHT, _START), (_BELOW, _START, _LEFT, _END), (_BELOW, _END, _RIGHT, _END))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPolygon:
    """A connected component of a map of classes.

    Attributes:
        label: class of its pixels.
        rings: outer ring, then holes, each ``[n, 2]`` corners (x, y) of pixel edges; the first corner is not repeated.
        area_px: pixels of the component.
    """

    label: int
    rings: tuple[IntArray, ...]
    area_px: int


@dataclass(slots=True)
class _Component:
    """An incomplete component: closed rings, and the component that it was merged into."""

    label: int
    rings: list[tuple[int, IntArray]] = field(default_factory=list)  #: twice the signed area, corners
    parent: _Component | None = None

    def root(self) -> _Component:
        """The component that this one is part of by now."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node


@dataclass(slots=True)
class _OpenChain:
    """A chain of corners between two vertical runs that continue below."""

    corners: _Chain
    component: _Component


@dataclass(frozen=True, slots=True)
class _Corners:
    """Corners of a strip, one entry each: position, class, and side and end of both runs."""

    x: IntArray
    y: IntArray
    label: IntArray
    horizontal: IntArray
    horizontal_end: IntArray
    vertical: IntArray
    vertical_end: IntArray


class PolygonTracer:
    """Tracer of polygons over strips of a map.

    >>> tracer = PolygonTracer(width_px=3)
    >>> polygons = [*tracer.add(np.array([[1, 1, 0]])), *tracer.add(np.array([[1, 0, 0]])), *tracer.finish()]
    >>> [(polygon.label, polygon.area_px) for polygon in polygons]
    [(1, 3)]
    >>> polygons[0].rings[0].tolist()
    [[0, 0], [2, 0], [2, 1], [1, 1], [1, 2], [0, 2]]

    Args:
        width_px: of the map.
        ignored: classes without polygons. Default: class 0
    """

    def __init__(self, *, width_px: int, ignored: Sequence[int] = (0,)) -> None:
        self._width_px = width_px
        self._ignored = np.array([*ignored, -1], np.int64)
        self._last_row: npt.NDArray[Any] = np.full(width_px, -1, np.int16)
        self._num_rows = 0
        #: open vertical runs, sorted by (side, x), and the chain that begins or ends at each
        self._open_keys: IntArray = np.empty(0, np.int64)
        self._open: list[_OpenChain] = []

    def add(self, rows: npt.NDArray[Any]) -> list[LabelPolygon]:
        """Add the next rows ``[h, width_px]`` of integers that are at least 0; the polygons that are complete by now."""
        if not len(rows):
            return []
        dtype = np.int16 if rows.dtype.itemsize == 1 and self._last_row.dtype != np.int32 else np.int32
        strip = np.empty((len(rows) + 1, self._width_px + 2), dtype)
        strip[:, 0] = strip[:, -1] = -1
        strip[0, 1:-1], strip[1:, 1:-1] = self._last_row, rows
        self._last_row = strip[-1, 1:-1].copy()
        polygons = self._advance(strip)
        self._num_rows += len(rows)
        return polygons

    def finish(self) -> list[LabelPolygon]:
        """The remaining polygons: those with pixels in the last row."""
        strip = np.full((2, self._width_px + 2), -1, np.int32)
        strip[0, 1:-1] = self._last_row
        polygons = self._advance(strip)
        assert not self._open, "a ring is open below the last row"
        return polygons

    def _advance(self, strip: npt.NDArray[np.signedinteger[Any]]) -> list[LabelPolygon]:
        """Process the grid lines between the rows of a padded strip; its first row is the last one of the strip before."""
        corners = _find_corners(strip, self._num_rows, self._ignored)
        if not self._open and not len(corners.x):
            return []
        keys = np.concatenate([self._open_keys, corners.vertical * (self._width_px + 1) + corners.x])
        successors = np.full(len(keys), -1, np.int64)
        _link_horizontal(corners, successors[len(self._open) :], len(self._open))
        open_nodes = self._link_vertical(keys, corners, successors)
        chains = _follow(corners, self._open, self._open_keys > self._width_px, successors)
        self._join_components(strip, corners, chains)
        complete = chains.complete()
        kept = {number: _OpenChain(chains.corners[number], chains.components[number].root()) for number in set(chains.of_node[open_nodes])}
        self._open_keys, self._open = keys[open_nodes], [kept[number] for number in chains.of_node[open_nodes]]
        return complete

    def _link_vertical(self, keys: IntArray, corners: _Corners, successors: IntArray) -> IntArray:
        """Link corners along grid columns, open runs of the strip before included; the nodes of runs that stay open."""
        num_open = len(self._open)
        y = np.concatenate([np.full(num_open, -1, np.int64), corners.y])
        ends = np.concatenate([np.full(num_open, _START, np.int64), corners.vertical_end])
        order = np.lexsort((ends, y, keys))
        is_start = ends[order] == _START
        first = np.flatnonzero(is_start[:-1] & ~is_start[1:])
        upper, lower = order[first], order[first + 1]
        has_left_interior = keys[upper] <= self._width_px
        successors[upper[has_left_interior]] = lower[has_left_interior]
        successors[lower[~has_left_interior]] = upper[~has_left_interior]
        is_open = np.ones(len(order), np.bool_)
        is_open[first] = is_open[first + 1] = False
        open_nodes: IntArray = order[is_open]
        return open_nodes

    def _join_components(self, strip: npt.NDArray[np.signedinteger[Any]], corners: _Corners, chains: _Chains) -> None:
        """Merge the components of the two rings at the ends of a run of pixels, at the upper corner of every right edge."""
        num_open, width = len(self._open), strip.shape[1]
        rights = np.flatnonzero((corners.vertical == _LEFT) & (corners.vertical_end == _START))
        if not len(rights):
            return
        flat = strip.ravel()
        changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        row_start = (corners.y[rights] - self._num_rows + 1) * width  # the row below the corner, in the padded strip
        run_start = changes[np.searchsorted(changes, row_start + corners.x[rights], side="right") - 1]
        left_x = run_start - row_start - 1
        # Among the left edges in that grid column, the last one that begins at or above the row.
        open_lefts = np.flatnonzero(self._open_keys > self._width_px)
        lefts = np.flatnonzero((corners.vertical == _RIGHT) & (corners.vertical_end == _START))
        span = self._num_rows + len(strip) + 2
        known = np.concatenate([(self._open_keys[open_lefts] - self._width_px - 1) * span, corners.x[lefts] * span + corners.y[lefts] + 1])
        order = np.argsort(known)
        nodes = np.concatenate([open_lefts, lefts + num_open])[order]
        left_nodes = nodes[np.searchsorted(known[order], left_x * span + corners.y[rights] + 1, side="right") - 1]
        pairs = np.stack([chains.of_node[left_nodes], chains.of_node[rights + num_open]], axis=1)
        for left, right in np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).tolist():
            chains.merge(left, right)


@dataclass(slots=True)
class _Chains:
    """Chains of corners in a strip.

    Attributes:
        of_node: chain of each node.
        corners: corners of each chain.
        components: component of each chain.
        rings: chains that are closed.
    """

    of_node: IntArray
    corners: list[_Chain] = field(default_factory=list)
    components: list[_Component] = field(default_factory=list)
    rings: list[int] = field(default_factory=list)

    def merge(self, first: int, second: int) -> None:
        """Merge the components of two chains."""
        _merge(self.components[first], self.components[second])

    def complete(self) -> list[LabelPolygon]:
        """The components with a closed outer ring; closed holes of the remaining ones are kept in the component."""
        touched: dict[int, _Component] = {}
        closed = [self.corners[number] for number in self.rings]
        rings = _normalized_rings([pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in closed])
        for number, entries in zip(self.rings, rings, strict=True):
            component = self.components[number].root()
            component.rings += entries
            touched[id(component)] = component
        return [_polygon(component) for component in touched.values() if any(area > 0 for area, _ in component.rings)]


def _merge(first: _Component, second: _Component) -> None:
    target, source = first.root(), second.root()
    if target is not source:
        target.rings += source.rings
        source.rings, source.parent = [], target


def _polygon(component: _Component) -> LabelPolygon:
    """A complete component: the outer ring has a positive area, holes a negative one."""
    rings = component.rings
    if len(rings) > 1:
        rings = sorted(rings, key=lambda entry: -entry[0])
    return LabelPolygon(label=component.label, rings=tuple(ring for _, ring in rings), area_px=sum(area for area, _ in rings) // 2)


def _normalized_rings(rings: list[IntArray]) -> list[list[tuple[int, IntArray]]]:
    """Twice the signed area and the corners of rings: beginning at the topmost left corner, and split where a ring touches itself."""
    if not rings:
        return []
    lengths = np.array([len(ring) for ring in rings])
    starts = np.cumsum(lengths) - lengths
    points = np.concatenate(rings)
    ring_of = np.repeat(np.arange(len(rings)), lengths)
    order = np.lexsort((points[:, 0], points[:, 1], ring_of))
    sorted_points, sorted_ring = points[order], ring_of[order]
    repeated = (sorted_points[1:] == sorted_points[:-1]).all(axis=1) & (sorted_ring[1:] == sorted_ring[:-1])
    shift = np.repeat(order[starts] - starts, lengths)
    first, length = np.repeat(starts, lengths), np.repeat(lengths, lengths)
    points = points[first + (np.arange(len(points)) - first + shift) % length]
    areas = _double_areas(points, starts).tolist()
    result = [[(area, ring)] for area, ring in zip(areas, np.split(points, starts[1:]), strict=True)]
    for number in np.unique(sorted_ring[1:][repeated]).tolist():
        pieces = _split(result[number][0][1])
        result[number] = [(int(_double_areas(piece, np.zeros(1, np.int64))[0]), piece) for piece in pieces]
    return result


def _double_areas(points: IntArray, starts: IntArray) -> IntArray:
    """Twice the signed area of rings that follow each other in an array (shoelace formula)."""
    following = np.arange(1, len(points) + 1)
    following[np.append(starts[1:], len(points)) - 1] = starts
    areas: IntArray = np.add.reduceat(points[:, 0] * points[following, 1] - points[:, 1] * points[following, 0], starts)
    return areas


def _split(ring: IntArray) -> list[IntArray]:
    """Rings without repeated corners: a ring that touches itself encloses a hole that touches the outer ring (OGC simple features)."""
    keys = ring[:, 1] << 32 | ring[:, 0]
    rings: list[IntArray] = []
    path: list[int] = []
    place: dict[int, int] = {}
    for index, key in enumerate(keys.tolist()):
        first = place.get(key)
        if first is not None:
            loop = path[first:]
            rings.append(ring[loop])
            for each in loop:
                del place[int(keys[each])]
            del path[first:]
        place[key] = len(path)
        path.append(index)
    return [*rings, ring[path]]


def _find_corners(strip: npt.NDArray[np.signedinteger[Any]], first_line: int, ignored: IntArray) -> _Corners:
    """Corners at all grid points between the rows of a padded strip."""
    across, down = strip[:, :-1] != strip[:, 1:], strip[:-1] != strip[1:]
    above, below, left, right = across[:-1], across[1:], down[:, :-1], down[:, 1:]
    line, column = np.nonzero((above ^ below) | (left ^ right) | (above & below & left & right))
    pixels = [strip[line + row, column + side].astype(np.int64) for row in (0, 1) for side in (0, 1)]
    blocks = []
    for number, label in enumerate(pixels):
        beside, beyond, diagonal = pixels[number ^ 1], pixels[number ^ 2], pixels[3 - number]
        is_counted = ~np.isin(label, ignored)
        convex = is_counted & (beside != label) & (beyond != label)
        concave = is_counted & (beside == label) & (beyond == label) & (diagonal != label)
        for chosen, sides in ((np.flatnonzero(convex), _CONVEX[number]), (np.flatnonzero(concave), _CONCAVE[number])):
            blocks.append([column[chosen], line[chosen] + first_line, label[chosen], *(np.full(len(chosen), side) for side in sides)])
    return _Corners(*(np.concatenate(values).astype(np.int64) for values in zip(*blocks, strict=True)))


def _link_horizontal(corners: _Corners, successors: IntArray, num_open: int) -> None:
    """Link corners along grid lines: along a top edge to the right, along a bottom edge to the left."""
    order = np.lexsort((corners.horizontal_end, corners.x, corners.horizontal, corners.y))
    start, end = order[0::2], order[1::2]
    is_top_edge = corners.horizontal[start] == _BELOW
    successors[start[is_top_edge]] = end[is_top_edge] + num_open
    successors[end[~is_top_edge]] = start[~is_top_edge] + num_open


def _follow(corners: _Corners, open_chains: Sequence[_OpenChain], is_head: npt.NDArray[np.bool_], successors: IntArray) -> _Chains:
    """Follow the links of a strip.

    Args:
        corners: new corners; their nodes come after those of the open chains.
        open_chains: chain of each open run of the strip before.
        is_head: True for open runs at the first corner of a chain, False for those at its last.
        successors: next node of each node; -1 for none.
    """
    num_open = len(open_chains)
    points = np.stack([corners.x, corners.y], axis=1)
    tails = {id(chain): node for node, (chain, head) in enumerate(zip(open_chains, is_head.tolist(), strict=True)) if not head}
    heads = np.flatnonzero(is_head)
    successors[heads] = [tails[id(open_chains[node])] for node in heads.tolist()]
    has_predecessor = np.zeros(len(successors), np.bool_)
    has_predecessor[successors[successors >= 0]] = True
    links, of_node = successors.tolist(), [-1] * len(successors)
    chains = _Chains(successors)
    starts = np.flatnonzero(~has_predecessor)
    for start in (*starts.tolist(), *range(len(links))):
        if of_node[start] >= 0:
            continue
        number, node = len(chains.corners), start
        pieces: _Chain = []
        run: list[int] = []
        crossed: list[_Component] = []
        label = -1
        while node >= 0 and of_node[node] < 0:
            of_node[node] = number
            if node >= num_open:
                run.append(node - num_open)
            elif is_head[node]:
                if run:
                    pieces.append(points[run])
                    run = []
                pieces += open_chains[node].corners
                crossed.append(open_chains[node].component)
            node = links[node]
        if run:
            label = int(corners.label[run[0]])
            pieces.append(points[run])
        chains.corners.append(pieces)
        chains.components.append(crossed[0] if crossed else _Component(label))
        for component in crossed[1:]:
            _merge(chains.components[number], component)
        if node >= 0:
            chains.rings.append(number)
    chains.of_node = np.array(of_node, np.int64)
    return chains
