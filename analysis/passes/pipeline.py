"""All rewritings of a captured graph, in order: from what the exporter wrote to what the operator table speaks of."""

from __future__ import annotations

from sft.analysis.ir.grad_reachability import clone_updated_buffers
from sft.analysis.ir.graph import Graph
from sft.analysis.passes.canonicalize import canonicalize
from sft.analysis.passes.decompose_norms import decompose_norms
from sft.analysis.passes.decompose_windows import decompose_circular_pads, decompose_transposed_convolutions
from sft.analysis.passes.infer_attributes import infer_attributes
from sft.analysis.passes.positional_rng import make_rng_positional

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
