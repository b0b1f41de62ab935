"""All rewritings of a captured graph, in order: from what the exporter wrote to what the operator table speaks of."""

from __future__ import annotations

from sft.analysis.annotate import infer_attributes
from sft.analysis.canonical import canonicalize
from sft.analysis.gradients import clone_updated_buffers
from sft.analysis.graph import Graph
from sft.analysis.masks import make_rng_positional
from sft.analysis.norms import decompose_norms
from sft.analysis.transposed import decompose_transposed_convolutions
from sft.analysis.wrapped import decompose_circular_pads

__all__ = ["run_passes"]


def run_passes(graph: Graph) -> Graph:
    """The graph in the terms of the operator table, without what nobody reads.

    Raises:
        UnsupportedError: a mask whose shape follows the image without following one of its values.
    """
    for rewrite in (
        canonicalize,
        infer_attributes,
        decompose_norms,
        decompose_transposed_convolutions,
        decompose_circular_pads,
        make_rng_positional,
    ):
        graph = rewrite(graph)
    return clone_updated_buffers(graph.without_dead_operators())
