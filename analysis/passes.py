"""All rewritings of a captured graph, in order: from what the exporter wrote to what the operator table speaks of."""

from __future__ import annotations

from sft.analysis.annotate import annotated
from sft.analysis.canonical import canonical
from sft.analysis.gradients import with_buffers_kept
from sft.analysis.graph import Graph
from sft.analysis.masks import with_positional_masks
from sft.analysis.norms import with_norms_apart
from sft.analysis.transposed import with_overlaps_apart
from sft.analysis.wrapped import with_wraps_apart

__all__ = ["in_terms_of_the_table"]


def in_terms_of_the_table(graph: Graph) -> Graph:
    """The graph in the terms of the operator table, without what nobody reads.

    Raises:
        UnsupportedError: a mask whose shape follows the image without following one of its values.
    """
    for rewrite in (canonical, annotated, with_norms_apart, with_overlaps_apart, with_wraps_apart, with_positional_masks):
        graph = rewrite(graph)
    return with_buffers_kept(graph.without_dead_operators())
