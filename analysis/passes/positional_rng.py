"""Counter-based (positional) random numbers: random operators become functions of a seed and positions.

A mask from a generator depends on all draws before it. Here each random operator becomes a function of a *seed*, drawn once a call, of its
*site*, the number of the random operator in the model, and of positions in the full value. Strips, recomputation and ranks then compute
slices of the same mask::

    y = dropout(x, p)                             y = sft.dropout(x, seed, site=0, p=p)
    m = bernoulli(empty_like(x), q)       ->      m = sft.mask(x, seed, site=1, p=1 - q)
    n = randn_like(x)                             n = sft.noise(x, seed, site=2, distribution="normal")

* ``sft.dropout``: elementwise dropout, the operator of ``nn.Dropout``;
* ``sft.mask``: ones where kept, zeros where dropped. ``nn.Dropout2d``, alpha dropout and stochastic depth draw one (``bernoulli``) of
  the value's shape, or of a small one, and use it in plain operators, which stay unchanged. ``floor(keep + rand(shape))``, as written in
  EfficientNets and ConvNeXts, is a mask, too;
* ``sft.noise``: uniform, normal or exponential numbers, scaled and shifted: ``rand_like``, ``randn_like``, and `uniform_`, `normal_`
  and `exponential_` into a value of the image's shape.

The seed is a leaf of the graph, one integer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.repeat_op import with_rng_arguments
from sft.common.errors import UnsupportedError

__all__ = ["SEED_NAME", "make_rng_positional"]

#: Name of the seed's leaf.
SEED_NAME = "sft_seed"

_DROPOUT_OPS = frozenset({"aten.native_dropout.default", "aten.dropout.default"})
#: Operators of which the draw uses only the shape, and the operand if they have one.
_SHAPE_ONLY_FACTORIES = frozenset(
    {
        "aten.empty_like.default",
        "aten.zeros_like.default",
        "aten.ones_like.default",
        "aten.new_empty.default",
        "aten.new_zeros.default",
        "aten.new_ones.default",
        "aten.empty.memory_format",
        "aten.zeros.default",
        "aten.ones.default",
    }
)
#: Noise with the shape of another value, and with an explicit shape.
_RANDOM_LIKE_OPS = {"aten.rand_like.default": "uniform", "aten.randn_like.default": "normal"}
_RANDOM_SHAPE_OPS = {"aten.rand.default": "uniform", "aten.randn.default": "normal"}
_FLOOR_OP = "aten.floor.default"
_LIKE_FACTORIES = frozenset({"aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default"})


def make_rng_positional(graph: Graph) -> Graph:
    """Replace every random operator; a graph without any is returned unchanged.

    Raises:
        UnsupportedError: a random mask with a shape that depends on the image's size but on none of its values.
    """
    sites = 0
    nodes: list[Node] = []
    floored = {
        match[0].name for node in graph.nodes if node.target == _FLOOR_OP and (match := _match_floor_bernoulli(node, graph)) is not None
    }
    for node in graph.nodes:
        noise = None if node.name in floored else _positional_noise(node, graph, sites)
        replacement = (
            _positional_dropout(node, sites)
            or _positional_mask(node, graph, sites)
            or noise
            or with_rng_arguments(node, Ref(SEED_NAME), sites)
        )
        nodes.append(replacement or node)
        sites += replacement is not None
    if not sites:
        return graph
    first = next(i for i, node in enumerate(nodes) if node.kind == "operator")
    nodes.insert(first, Node(name=SEED_NAME, kind="seed", target="seed", shape=(1,), dtype="int64", itemsize_bytes=8))
    return replace(graph, nodes=tuple(nodes)).without_dead_operators()


def _positional_dropout(node: Node, site: int) -> Node | None:
    if node.target not in _DROPOUT_OPS or node.argument("train") is False:
        return None
    return _random_node(node, "sft.dropout", node.argument("input"), site, p=node.argument("p"))


def _positional_mask(node: Node, graph: Graph, site: int) -> Node | None:
    if node.target == "aten.bernoulli.p":
        blank, keep = graph[node.argument("self").name], node.argument("p")
    elif node.target == "aten.bernoulli.default" and graph[node.argument("self").name].target == "aten.full.default":
        blank = graph[node.argument("self").name]
        keep = blank.argument("fill_value")
    elif node.target == _FLOOR_OP and (match := _match_floor_bernoulli(node, graph)) is not None:
        blank, keep = match
    else:
        return None
    return _random_node(node, "sft.mask", _shape_source(node, blank, "torch.empty_like(image).bernoulli_(p)"), site, p=1 - keep)


def _positional_noise(node: Node, graph: Graph, site: int) -> Node | None:
    """Noise: numbers of a distribution, times a scale and plus a shift."""
    scale, shift = 1.0, 0.0
    if node.target in _RANDOM_LIKE_OPS:
        distribution, remedy = _RANDOM_LIKE_OPS[node.target], ""
    elif node.target in _RANDOM_SHAPE_OPS:
        distribution = _RANDOM_SHAPE_OPS[node.target]
        remedy = "torch.rand_like(image)" if distribution == "uniform" else "torch.randn_like(image)"
    elif node.target == "aten.uniform.default":
        distribution, remedy, shift = "uniform", "torch.rand_like(image)", float(node.argument("from", 0.0))
        scale = float(node.argument("to", 1.0)) - shift
    elif node.target == "aten.normal_functional.default":
        distribution, remedy = "normal", "torch.randn_like(image)"
        scale, shift = float(node.argument("std", 1.0)), float(node.argument("mean", 0.0))
    elif node.target == "aten.exponential.default":
        distribution, remedy, scale = "exponential", "torch.empty_like(image).exponential_()", 1 / float(node.argument("lambd", 1.0))
    else:
        return None
    if not node.is_floating:
        return None
    blank = graph[node.argument("self").name] if node.operands else node
    like = _shape_source(node, blank, remedy) if node.target not in _RANDOM_LIKE_OPS else node.argument("self")
    return _random_node(node, "sft.noise", like, site, distribution=distribution, scale=scale, shift=shift)


def _shape_source(node: Node, blank: Node, remedy: str) -> Ref | None:
    """The value with the shape of the random numbers; ``None`` if the shape is constant.

    Raises:
        UnsupportedError: the shape depends on the image's size but on none of its values.
    """
    like = blank.argument("self") if blank.target in _LIKE_FACTORIES else None if _is_shape_only(blank) else Ref(blank.name)
    if like is None and not all(isinstance(extent, int) for extent in node.shape):
        kind = "a mask" if "bernoulli" in remedy else "noise"
        raise UnsupportedError([f"{node.label}: {kind} of shape {node.shape} follows the image's size; draw it with {remedy}"])
    return like


def _match_floor_bernoulli(node: Node, graph: Graph) -> tuple[Node, float] | None:
    """The draw in ``floor(keep + rand(shape))``, and the probability ``keep``; ``None`` for other nodes."""
    total = graph[node.operands[0]]
    addends = [value for _, value in total.arguments[:2]]
    if total.target not in ("aten.add.Tensor", "aten.add.Scalar") or total.argument("alpha", 1) != 1 or len(total.operands) != 1:
        return None
    draw, keep = graph[total.operands[0]], next(value for value in addends if not isinstance(value, Ref))
    is_only = graph.users[draw.name] == (total.name,) and graph.users[total.name] == (node.name,)
    return (draw, float(keep)) if is_only and draw.target == "aten.rand.default" and 0 <= keep <= 1 else None


def _is_shape_only(node: Node) -> bool:
    return node.target in _SHAPE_ONLY_FACTORIES or node.target in _RANDOM_SHAPE_OPS or node.target == "aten.full.default"


def _random_node(node: Node, target: str, operand: Ref | None, site: int, **parameters: Any) -> Node:
    arguments: tuple[tuple[str, Any], ...] = (("self", operand), ("seed", Ref(SEED_NAME)), ("site", site), *parameters.items())
    return replace(node, target=target, arguments=arguments, effect="")
