"""Pass pipeline: all rewrites of a captured graph in order, from the exporter's operators to those of the operator table."""

from __future__ import annotations

from sft.analysis.ir.grad_reachability import clone_updated_buffers
from sft.analysis.ir.graph import Graph
from sft.analysis.passes.canonicalize import canonicalize
from sft.analysis.passes.decompose_norms import decompose_norms
from sft.analysis.passes.decompose_pads import decompose_circular_pads
from sft.analysis.passes.decompose_products import expand_attention_dropout
from sft.analysis.passes.decompose_windows import decompose_transposed_convolutions
from sft.analysis.passes.fold_norms import fold_frozen_norms
from sft.analysis.passes.infer_attributes import infer_attributes
from sft.analysis.passes.positional_rng import make_rng_positional
from sft.analysis.passes.prefix_tokens import include_prefix_tokens

__all__ = ["run_passes"]


def run_passes(graph: Graph, *, folds_norms: bool = True) -> Graph:
    """Rewrite the graph to operators of the operator table, without dead operators.

    Args:
        graph: the captured graph.
        folds_norms: fold frozen norms into convolutions.

    Raises:
        UnsupportedError: a random mask with a shape that depends on the image's size but on none of its values.
    """
    for graph_pass in (
        expand_attention_dropout,
        canonicalize,
        infer_attributes,
        decompose_norms,
        fold_frozen_norms if folds_norms else _unchanged,
        decompose_transposed_convolutions,
        decompose_circular_pads,
        make_rng_positional,
        include_prefix_tokens,
    ):
        graph = graph_pass(graph)
    return clone_updated_buffers(graph.without_dead_operators())


def _unchanged(graph: Graph) -> Graph:
    return graph
