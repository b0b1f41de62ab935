"""The operator table: rows by target, and the lookup of a node's row.

An operator that reads a streamed value runs on untiled tensors, as in plain PyTorch, if it has no row, or if its row rejects this use.
It is refused only if the result would differ even then: random numbers that do not follow positions, and writes into operands.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sympy as sp

from sft.analysis.ir.graph import Graph, Node, refs_in
from sft.analysis.ir.ops.base import NextValueSpec, Operator
from sft.analysis.ir.ops.padding import AssignSliceSpec, BorderRowsSpec, ChannelPadSpec, CircularPadSpec, PadSpec, SliceSpec
from sft.analysis.ir.ops.pointwise import (
    AffineSpec,
    AssignChannelsSpec,
    BinarySpec,
    CastSpec,
    CatSpec,
    ChannelwiseSpec,
    DetachSpec,
    FrozenNormSpec,
    GatherChannelsSpec,
    IndexChannelsSpec,
    PerPixelSpec,
    PointwiseSpec,
    RandomOpSpec,
    RepeatChannelsSpec,
    SpatialSideInputSpec,
    UndecomposedLayerNormSpec,
)
from sft.analysis.ir.ops.pool_indices import UNPOOLINGS, MaxPoolIndicesSpec, MaxUnpoolSpec
from sft.analysis.ir.ops.rearrange import Col2imSpec, Im2colSpec, PixelShuffleSpec, PixelUnshuffleSpec
from sft.analysis.ir.ops.reductions import (
    ArgMaxSpec,
    AxisMinMaxSpec,
    AxisSumSpec,
    LogSumExpSpec,
    MeanSpec,
    MinMaxSpec,
    MomentsSpec,
    SpatialContractionSpec,
    SumSpec,
)
from sft.analysis.ir.ops.resampling import (
    AdaptiveAvgPoolSpec,
    AdaptiveMaxPoolSpec,
    AntialiasedInterpolationSpec,
    FixedSizeAvgPoolSpec,
    InterpolationSpec,
    NearestSpec,
)
from sft.analysis.ir.ops.target_lists import (
    CHANNEL_FUNCTIONS,
    CHANNEL_REDUCTIONS,
    INDEX_OPS,
    NONDIFFERENTIABLE_OPS,
    PER_PIXEL_OPS,
    UNARY_OPS,
    UNARY_OVERLOAD_OPS,
)
from sft.analysis.ir.ops.transposed import OverlapAddSpec, TransposedConvolutionSpec
from sft.analysis.ir.ops.unsupported import NO_STRIP_RULE, unsupported_reason
from sft.analysis.ir.ops.windows import AvgPoolSpec, ChannelWindowSpec, ConvolutionSpec, MaxPoolSpec, Window, WindowedSpec
from sft.analysis.ir.repeat_op import REPEAT_NEXT
from sft.analysis.ir.targets import ATTENTION, ELEMENTWISE_LOSSES, RANDOM_TARGETS

__all__ = [
    "CASTS",
    "DIMENSION_ARGUMENTS",
    "ELEMENTWISE",
    "WHOLE",
    "DimensionArgument",
    "differentiable_operands",
    "operator_of",
    "operator_table",
    "refusal_reason",
    "window_of",
]

#: The row of an operator on untiled tensors.
WHOLE = Operator(name="whole", role="whole")


_CONVOLUTION, _MAX_POOL, _AVG_POOL = ConvolutionSpec(), MaxPoolSpec(), AvgPoolSpec()
_INTERPOLATION = InterpolationSpec()
_POINTWISE, _ROW, _CHANNELS, _BINARY, _MEAN = PointwiseSpec(), PerPixelSpec(), PerPixelSpec(broadcasts=False), BinarySpec(), MeanSpec()
#: Conversions to another element type; differentiable between floating-point types.
CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout"})

#: Rows by target. With several rows, the first one without problems applies.
_TABLE: dict[str, Operator | tuple[Operator, ...]] = {
    **{f"aten.conv{n}d.{kind}": _CONVOLUTION for n in (1, 2, 3) for kind in ("default", "padding")},
    **dict.fromkeys(
        ("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), TransposedConvolutionSpec()
    ),
    "sft.overlap_add": OverlapAddSpec(),
    "sft.im2col": Im2colSpec(),
    "sft.col2im": Col2imSpec(),
    "aten.pixel_shuffle.default": PixelShuffleSpec(argument="upscale_factor"),
    "aten.pixel_unshuffle.default": PixelUnshuffleSpec(argument="downscale_factor"),
    "sft.pixel_shuffle": PixelShuffleSpec(),
    "sft.pixel_unshuffle": PixelUnshuffleSpec(),
    **{f"aten.max_pool{n}d.default": _MAX_POOL for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": MaxPoolIndicesSpec() for n in (1, 2, 3)},
    **dict.fromkeys(UNPOOLINGS, MaxUnpoolSpec()),
    **{f"aten.avg_pool{n}d.default": (_AVG_POOL, ChannelWindowSpec()) for n in (1, 2, 3)},
    **{
        f"aten.{name}{n}d.vec": (NearestSpec(), _INTERPOLATION)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{f"aten.upsample_{name}.vec": _INTERPOLATION for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")},
    **{f"aten._upsample_{name}2d_aa.vec": AntialiasedInterpolationSpec() for name in ("bilinear", "bicubic")},
    **{f"aten.{name}.Tensor": _BINARY for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.default": _POINTWISE for name in UNARY_OPS},
    **{f"aten.{name}": _POINTWISE for name in UNARY_OVERLOAD_OPS},
    **dict.fromkeys(PER_PIXEL_OPS, _ROW),
    **dict.fromkeys(CASTS, CastSpec()),
    "aten.detach.default": DetachSpec(),
    "aten.cat.default": CatSpec(),
    "aten._native_batch_norm_legit_no_training.default": FrozenNormSpec(),
    "sft.moments": MomentsSpec(),
    "sft.minmax": MinMaxSpec(),
    "sft.axis_sum": AxisSumSpec(),
    "sft.axis_minmax": AxisMinMaxSpec(),
    "sft.argmax": ArgMaxSpec(),
    "sft.logsumexp": LogSumExpSpec(),
    "sft.contract_pixels": SpatialContractionSpec(),
    "sft.mix_channels": _CHANNELS,
    "sft.affine": AffineSpec(),
    "sft.spatial_side_input": SpatialSideInputSpec(),
    "sft.dropout": RandomOpSpec(name="dropout"),
    "sft.mask": RandomOpSpec(name="mask"),
    "sft.noise": RandomOpSpec(name="noise"),
    **dict.fromkeys(sorted(ELEMENTWISE_LOSSES), _ROW),
    **dict.fromkeys(("sft.one_hot", "sft.constant_image", "sft.cross_entropy", "sft.nll", "sft.label_weight"), _CHANNELS),
    **{f"aten.{name}_like.default": _CHANNELS for name in ("zeros", "ones", "full")},
    **dict.fromkeys(("aten.gather.default", "aten.scatter.value", "aten.scatter.src"), GatherChannelsSpec()),
    "aten.prelu.default": _CHANNELS,
    "sft.rearrange": _CHANNELS,
    "sft.channel_norm": _CHANNELS,
    "sft.channel_rms_norm": _CHANNELS,
    **dict.fromkeys(("aten.layer_norm.default", "aten.rms_norm.default"), UndecomposedLayerNormSpec()),
    **{f"aten.{name}": ChannelwiseSpec() for name in CHANNEL_REDUCTIONS},
    **{f"aten.{name}.int": ChannelwiseSpec() for name in ("softmax", "log_softmax", "select")},
    **{f"aten.{name}.default": ChannelwiseSpec() for name in (*CHANNEL_FUNCTIONS, "linalg_vector_norm")},
    "sft.assign_channels": AssignChannelsSpec(),
    "sft.pad_channels": _CHANNELS,
    "sft.assign_slice": AssignSliceSpec(),
    **dict.fromkeys(INDEX_OPS, IndexChannelsSpec()),
    "aten.stack.default": ChannelwiseSpec(adds=True),
    "aten.slice.Tensor": (ChannelwiseSpec(), SliceSpec()),
    "aten.pad.default": (PadSpec(), ChannelPadSpec()),
    "sft.border_rows": BorderRowsSpec(),
    "sft.circular_pad": CircularPadSpec(),
    "sft.expand_channels": _CHANNELS,
    "aten.repeat.default": RepeatChannelsSpec(),
    **{f"aten.{name}.default": ChannelwiseSpec(argument="dims") for name in ("flip", "roll")},
    **{f"aten.adaptive_avg_pool{n}d.default": (_MEAN, FixedSizeAvgPoolSpec(), AdaptiveAvgPoolSpec()) for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": AdaptiveMaxPoolSpec() for n in (1, 2, 3)},
    "aten.mean.dim": (_MEAN, ChannelwiseSpec()),
    "aten.sum.dim_IntList": (SumSpec(), ChannelwiseSpec()),
    REPEAT_NEXT: NextValueSpec(),
}

#: Recurrent layers, which apply dropout between layers.
_RECURRENT_OPS = frozenset({"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"})
_RANDOM_REMEDY = (
    "draw masks with nn.Dropout or torch.empty_like(x).bernoulli_(p), noise with rand_like or randn_like, and other numbers outside the "
    "compiled model"
)
_RANDOM_OP_REMEDIES = {
    **dict.fromkeys(
        (target.split(".")[1] for target in _RECURRENT_OPS), "its masks are its own; set its dropout to 0, with nn.Dropout between layers"
    ),
    "scaled_dot_product_attention": "its scale follows the image's size; give scale= as a number",
    "native_dropout": "use the dropped values, not the mask that it returns",
    "bernoulli": "its probabilities vary; draw with one probability, torch.empty_like(x).bernoulli_(p)",
}


def operator_of(node: Node, graph: Graph, streamed: Collection[str]) -> tuple[Operator, list[str]]:
    """The table's row for a node, given the streamed values, and the reasons why it runs untiled although it reads one of them."""
    rows = _candidate_rows(node.target)
    if any(row.is_extra_result for row in rows):
        return rows[0], []
    if not any(name in streamed for name in node.operands):
        return WHOLE, []
    problems: list[str] = [] if rows else [unsupported_reason(node, graph)]
    if any(row.name != "pointwise" for row in rows) and any(graph[name].is_complex for name in (node.name, *node.operands)):
        # Their derivatives are conjugated, and real only if an operand is.
        return WHOLE, [f"{node.label}: computes with complex numbers of several pixels or operands, which has {NO_STRIP_RULE[4:]}"]
    for row in rows:
        why = row.problems(node, graph, streamed)
        if not why:
            return row, []
        problems += why
    return WHOLE, problems


def operator_table() -> dict[str, tuple[Operator, ...]]:
    """The complete table, by target."""
    return {target: _candidate_rows(target) for target in _TABLE}


def _candidate_rows(target: str) -> tuple[Operator, ...]:
    rows = _TABLE.get(target, ())
    return rows if isinstance(rows, tuple) else (rows,)


#: ``torch.unique`` and its relatives: also a result of known size, such as the index of each element, comes with one whose size is unknown.
_UNIQUE_OPS = ("aten._unique2.default", "aten.unique_consecutive.default", "aten.unique_dim.default")


def refusal_reason(node: Node, graph: Graph) -> str | None:
    """Reason why an operator cannot run at all, tiled or not, with a remedy; ``None`` if it can."""
    if node.target == "aten.instance_norm.default" and node.argument("use_input_stats") and node.argument("running_mean") is not None:
        return (
            f"{node.label} has no exact rule; its running statistics are also read by another operator, and the exporter loses their update"
        )
    if node.target == "aten.bincount.default" and node.shape != (node.argument("minlength", 0),):
        return f"{node.label}: its size depends on the numbers; give minlength, above the largest of them"
    if node.target in _UNIQUE_OPS:
        return f"{node.label}: the number of its values depends on the numbers; compute it outside of the compiled model"
    if node.target == "aten.as_strided_scatter.default":
        return f"{node.label}: `forward` writes in place through as_strided; write into a slice of the tensor"
    if node.target == "aten.unfold_backward.default" and not _windows_cover_extent(node):
        return f"{node.label}: `forward` writes in place into windows (unfold) that may leave out pixels; write into a slice of the tensor"
    if any(isinstance(row, ConvolutionSpec) for row in _candidate_rows(node.target)):
        kernel = [name for value in (node.argument("weight"), node.argument("bias")) for name in refs_in(value)]
        if any(graph[name].target in RANDOM_TARGETS for name in graph.ancestors(kernel)):
            return f"{node.label}: dropout on the kernel itself has no positions in the image; drop its input or its output"
    if node.effect == "draws" and _is_random(node):
        name = node.target.removeprefix("aten.").split(".")[0]
        return f"{node.label} has no exact rule; {_RANDOM_OP_REMEDIES.get(name, _RANDOM_REMEDY)}"
    if node.effect == "writes":
        return f"{node.label} writes into its operands; use the form that returns a new tensor"
    return None


def _windows_cover_extent(node: Node) -> bool:
    """True if the windows of an ``unfold`` written through are adjacent and cover all pixels; torch drops the remaining ones otherwise."""
    extent, size = node.argument("input_sizes")[node.argument("dim")], node.argument("size")
    return bool(node.argument("step") == size and sp.simplify(sp.floor(sp.sympify(extent) / size) * size - extent) == 0)


def _is_random(node: Node) -> bool:
    """True if the operator draws random numbers in this use; attention and recurrent layers do only with a dropout probability."""
    if node.target == ATTENTION:
        return bool(node.argument("dropout_p", 0.0))
    if node.target in _RECURRENT_OPS:
        return bool(node.argument("train") and node.argument("dropout") and node.argument("num_layers") > 1)
    return True


#: Operators whose result does not depend on the values they read, or is defined to have no gradient.
_NONDIFFERENTIABLE_TARGETS = frozenset(
    {
        "sft.mask",
        "sft.noise",
        "sft.label_weight",
        "sft.constant_image",
        REPEAT_NEXT,
        "sft.running_mean",  # buffers, which eager PyTorch updates without recording it
        "sft.running_var",
        "aten.detach.default",
        *(f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty")),
        *(f"aten.new_{name}.default" for name in ("zeros", "ones", "full", "empty")),
        *(f"aten.{name}.{overload}" for name in NONDIFFERENTIABLE_OPS for overload in ("default", "n_scalar")),
    }
)


def differentiable_operands(node: Node) -> tuple[str, ...]:
    """Operands that a gradient may flow to: none through a random mask, an integer result, or ``detach``."""
    if node.target in _NONDIFFERENTIABLE_TARGETS or not (node.is_floating or node.is_complex):
        return ()
    return node.operands[:1] if node.target == "sft.spatial_side_input" else node.operands


def window_of(node: Node, axis: int) -> Window | None:
    """The sliding window of a convolution or pooling along an axis; ``None`` for other operators and axes."""
    row = next(iter(_candidate_rows(node.target)), None)
    return row.window(node, axis) if isinstance(row, WindowedSpec) and axis < row.num_axes(node) else None


@dataclass(frozen=True, slots=True)
class DimensionArgument:
    """The argument of an operator that names dimensions of its operand.

    Attributes:
        argument: name of the argument.
        drops: True if the named dimensions disappear, unless ``keepdim`` is set.
        adds: True if the named dimension is new.
    """

    argument: str = "dim"
    drops: bool = False
    adds: bool = False


#: Arguments that name dimensions, by target.
DIMENSION_ARGUMENTS: dict[str, DimensionArgument] = {
    "aten.cat.default": DimensionArgument(),
    "aten.stack.default": DimensionArgument(adds=True),
    **{f"aten.{name}.int": DimensionArgument() for name in ("softmax", "log_softmax")},
    **{f"aten.{name}.default": DimensionArgument() for name in CHANNEL_FUNCTIONS},
    **{f"aten.{name}": DimensionArgument(drops=True) for name in CHANNEL_REDUCTIONS},
    "aten.linalg_vector_norm.default": DimensionArgument(drops=True),
    **{f"aten.{name}.default": DimensionArgument(argument="dims") for name in ("flip", "roll")},
    "aten.slice.Tensor": DimensionArgument(),
    "aten.select.int": DimensionArgument(drops=True),
    **dict.fromkeys(("aten.gather.default", "aten.scatter.value", "aten.scatter.src"), DimensionArgument()),
}
#: Elementwise operators; their operands broadcast.
ELEMENTWISE = frozenset(target for target, row in _TABLE.items() if row in (_POINTWISE, _BINARY, _ROW, DetachSpec()) or target in CASTS)
