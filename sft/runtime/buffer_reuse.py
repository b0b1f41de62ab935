"""Buffer reuse in passes without a backward pass: an output of a tiled segment takes the buffer of a source that is read for the last time.

A norm or a gate is applied pixel by pixel in the sweep after its statistics are known::

    y (cut)  ->  y * scale + shift  ->  relu  ->  z (cut)

Each strip of ``z`` is written after the strip of ``y`` in the same rows has been read, so ``z`` may overwrite ``y``: two full tensors less
one. That holds if all readers of the source read pixel by pixel, come before the output, and never lag it in rows or columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.tiling.strips import StripSchedule
from sft.runtime.strip_policy import RUN_ALL_STRIPS
from sft.runtime.tiled_layout import TiledLayout

__all__ = ["PIXEL_OPS", "reusable_sources"]

#: Families of operators that read each pixel once, and whose result never is a view of it.
PIXEL_OPS = frozenset({"affine", "binary", "pointwise"})


def reusable_sources(segment: TiledLayout) -> Mapping[str, tuple[str, ...]]:
    """For outputs of a segment the sources whose buffers they may take if no later operator reads these."""
    scope = segment.scope
    if segment.strip_policy is not RUN_ALL_STRIPS or not isinstance(segment.schedule, StripSchedule):
        return {}  # skipped strips are found by comparing rows of sources; tiles read their halos again
    sources = [name for name in scope.sources if name not in segment.from_source and _is_read_by_pixel(segment, name)]
    reusable = {}
    for output in (name for name in scope.outputs if name in scope.streamed and name not in segment.to_host):
        if taken := tuple(source for source in sources if _may_overwrite(segment, segment.schedule, output, source)):
            reusable[output] = taken
    return reusable


def _readers(segment: TiledLayout, source: str) -> list[str]:
    inside = set(segment.scope.names)
    return [name for name in segment.scope.graph.users[source] if name in inside]


def _is_read_by_pixel(segment: TiledLayout, source: str) -> bool:
    scope = segment.scope
    readers = [(scope.graph[name], scope.specs[name]) for name in _readers(segment, source)]
    return all(spec.name in PIXEL_OPS and all(spec.access(node, axis).is_identity for axis in (ROWS, COLUMNS)) for node, spec in readers)


def _may_overwrite(segment: TiledLayout, schedule: StripSchedule, output: str, source: str) -> bool:
    """True if no row or column of a source is read after an output of the same size was written there."""
    scope, position = segment.scope, {name: index for index, name in enumerate(segment.scope.names)}
    if scope.shapes[output] != scope.shapes[source] or scope.dtype_of(output) != scope.dtype_of(source):
        return False
    if any(panel[output].owned != panel[source].new for panel in segment.panels):
        return False  # a panel's halo would be read again
    written = schedule.frontier[output]
    readers = _readers(segment, source)
    return all(position[name] <= position[output] and bool((written <= schedule.frontier[name]).all()) for name in readers)
