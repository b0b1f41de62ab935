"""The table of operators, by target.

Whatever reads a streamed value and has no row, or whose row says that this use of it cannot stream, runs on whole tensors where they
fit, as in plain PyTorch. Refused is only what would not be the same there: random numbers, and what writes into its operands.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy as sp

from sft.analysis.graph import Graph, Node, refs_in
from sft.analysis.losses import ELEMENT_LOSSES
from sft.analysis.masks import DRAWN_TARGETS
from sft.analysis.operators.base import NextValue, Operator
from sft.analysis.operators.borders import BorderRows, ChannelPad, Pad, Slice, Wrapped
from sft.analysis.operators.im2col import Col2im, Im2col
from sft.analysis.operators.pixelwise import (
    Affine,
    AlongChannels,
    AssignedChannels,
    Beside,
    Binary,
    Cast,
    Cat,
    Detached,
    Drawn,
    FrozenNorm,
    LookUp,
    OverPixels,
    Pointwise,
    RepeatedChannels,
    Rowwise,
)
from sft.analysis.operators.places import UNPOOLINGS, MaxPoolPlaces, MaxUnpool
from sft.analysis.operators.reductions import Contracted, Extremes, LogSumExp, Mean, Moments, Peak, Sum
from sft.analysis.operators.remedies import NO_STRIPS, no_rule
from sft.analysis.operators.resampling import AdaptiveAverage, AdaptiveMax, Antialiased, Grid, Interpolation, Nearest
from sft.analysis.operators.shuffles import Folded, Unfolded
from sft.analysis.operators.transposed import OverlapAdd, TransposedConvolution
from sft.analysis.operators.windows import AvgPool, ChannelWindow, Convolution, MaxPool, Window, Windowed
from sft.analysis.repeated import NEXT

__all__ = [
    "ALONG",
    "CASTS",
    "ELEMENTWISE",
    "WHOLE",
    "Along",
    "differentiable_operands",
    "operator_of",
    "refusal",
    "rows_of_table",
    "window_of",
]

#: What sees whole tensors.
WHOLE = Operator(name="whole", role="whole")

#: Unary functions of one element: any of them streams, and torch's own derivative is traced for it.
_UNARY = (
    "relu",
    "relu6",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "elu",
    "celu",
    "selu",
    "softplus",
    "mish",
    "log_sigmoid",
    "neg",
    "abs",
    "exp",
    "sqrt",
    "rsqrt",
    "square",
    "sin",
    "cos",
    "erf",
    "clamp",
    "clamp_min",
    "clamp_max",
    "reciprocal",
    "softshrink",
    "hardshrink",
    "threshold",
    "log",
    "log1p",
    "expm1",
    "softsign",
    "tanhshrink",
    "sign",
    "floor",
    "ceil",
    "round",
    "exp2",
    "log2",
    "log10",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "atan",
    "asin",
    "acos",
    "tan",
    "erfc",
    "logit",
    "sinc",
    "nan_to_num",
    "frac",
    "trunc",
    "deg2rad",
    "rad2deg",
    "angle",
    "digamma",
    "lgamma",
    "erfinv",
    "i0",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_entr",
    "special_erfcx",
    "special_log_ndtr",
    "special_ndtri",
    "zero",
)
_UNARY_OVERLOADS = (
    "fill.Scalar",
    "pow.Tensor_Scalar",
    "rsub.Scalar",
    "div.Scalar",
    "mul.Scalar",
    "add.Scalar",
    "sub.Scalar",
    "round.decimals",
)
#: Functions of several values, pixel by pixel, or of all channels of a pixel.
_ROWWISE = (
    "aten.where.self",
    "aten.where.ScalarSelf",
    "aten.where.ScalarOther",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.pow.Tensor_Tensor",
    "aten.pow.Scalar",
    "aten.addcmul.default",
    "aten.addcdiv.default",
    "aten.lerp.Scalar",
    "aten.lerp.Tensor",
    "aten.atan2.default",
    "aten.masked_fill.Scalar",
    "aten.div.Tensor_mode",
    "aten.rsub.Tensor",
    *(f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")),
    "aten.logical_and.default",
    "aten.logical_or.default",
    "aten.logical_not.default",
    "aten.logical_xor.default",
    *(f"aten.bitwise_{name}.{kind}" for name in ("and", "or", "xor") for kind in ("Scalar", "Tensor")),
    *(f"aten.__{name}__.{kind}" for name in ("and", "or", "xor") for kind in ("Scalar", "Tensor")),
    "aten.bitwise_not.default",
    *(f"aten.{name}.default" for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit")),
    *(f"aten.{name}.Tensor" for name in ("clamp", "clamp_min", "clamp_max")),
    *(f"aten.{name}.{kind}" for name in ("remainder", "fmod", "copysign") for kind in ("Scalar", "Tensor")),
    "aten.remainder.Scalar_Tensor",
    "aten.div.Scalar_mode",
    *(f"aten.floor_divide.{kind}" for kind in ("default", "Scalar")),
    *(f"aten.{name}.default" for name in ("fmax", "fmin", "hypot", "heaviside", "logaddexp", "logaddexp2")),
    "aten.max.other",
    "aten.min.other",
    *(f"aten.xlogy.{kind}" for kind in ("Tensor", "Scalar_Other", "Scalar_Self")),
    *(f"aten.special_xlog1py.{kind}" for kind in ("default", "other_scalar", "self_scalar")),
    "aten.fill.Tensor",
)

#: Reductions of channels, pixel by pixel.
_CHANNEL_REDUCTIONS = (
    "sum.dim_IntList",
    "amax.default",
    "amin.default",
    "max.dim",
    "min.dim",
    "argmax.default",
    "argmin.default",
    "prod.dim_int",
    "var.correction",
    "std.correction",
    "var.dim",
    "std.dim",
    "logsumexp.default",
    "mean.dim",
    "all.dim",
    "any.dim",
    "kthvalue.default",
    "median.dim",
    "nanmedian.dim",
    "mode.default",
)
#: Functions of channels that leave their number as it is, or say what it becomes, pixel by pixel.
_CHANNEL_FUNCTIONS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "glu", "index_select", "sort", "argsort", "topk")

_CONVOLUTION, _MAX_POOL, _AVG_POOL = Convolution(), MaxPool(), AvgPool()
_INTERPOLATION = Interpolation()
_POINTWISE, _ROW, _CHANNELS, _BINARY, _MEAN = Pointwise(), Rowwise(), Rowwise(broadcasts=False), Binary(), Mean()
#: Conversions to another element type; where they are between floating-point types they have a gradient.
CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout"})

#: Several rows are for different uses: the first that knows a use is for it.
_TABLE: dict[str, Operator | tuple[Operator, ...]] = {
    **{f"aten.conv{n}d.{kind}": _CONVOLUTION for n in (1, 2, 3) for kind in ("default", "padding")},
    **dict.fromkeys(
        ("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), TransposedConvolution()
    ),
    "sft.overlap_add": OverlapAdd(),
    "sft.im2col": Im2col(),
    "sft.col2im": Col2im(),
    "aten.pixel_shuffle.default": Unfolded(argument="upscale_factor"),
    "aten.pixel_unshuffle.default": Folded(argument="downscale_factor"),
    "sft.unfolded": Unfolded(),
    "sft.folded": Folded(),
    **{f"aten.max_pool{n}d.default": _MAX_POOL for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": MaxPoolPlaces() for n in (1, 2, 3)},
    **dict.fromkeys(UNPOOLINGS, MaxUnpool()),
    **{f"aten.avg_pool{n}d.default": (_AVG_POOL, ChannelWindow()) for n in (1, 2, 3)},
    **{f"aten.{name}{n}d.vec": (Nearest(), _INTERPOLATION) for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)},
    **{f"aten.upsample_{name}.vec": _INTERPOLATION for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")},
    **{f"aten._upsample_{name}2d_aa.vec": Antialiased() for name in ("bilinear", "bicubic")},
    **{f"aten.{name}.Tensor": _BINARY for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.default": _POINTWISE for name in _UNARY},
    **{f"aten.{name}": _POINTWISE for name in _UNARY_OVERLOADS},
    **dict.fromkeys(_ROWWISE, _ROW),
    **dict.fromkeys(CASTS, Cast()),
    "aten.detach.default": Detached(),
    "aten.cat.default": Cat(),
    "aten._native_batch_norm_legit_no_training.default": FrozenNorm(),
    "sft.moments": Moments(),
    "sft.extremes": Extremes(),
    "sft.peak": Peak(),
    "sft.logsumexp": LogSumExp(),
    "sft.contracted": Contracted(),
    "sft.mixed": _CHANNELS,
    "sft.affine": Affine(),
    "sft.beside": Beside(),
    "sft.dropout": Drawn(name="dropout"),
    "sft.mask": Drawn(name="mask"),
    "sft.noise": Drawn(name="noise"),
    **dict.fromkeys(sorted(ELEMENT_LOSSES), _ROW),
    **dict.fromkeys(("sft.one_hot", "sft.filled", "sft.cross_entropy", "sft.nll", "sft.label_weight"), _CHANNELS),
    **{f"aten.{name}_like.default": _CHANNELS for name in ("zeros", "ones", "full")},
    **dict.fromkeys(("aten.gather.default", "aten.scatter.value", "aten.scatter.src"), LookUp()),
    "aten.prelu.default": _CHANNELS,
    "sft.rearrange": _CHANNELS,
    "sft.channel_norm": _CHANNELS,
    "sft.channel_rms_norm": _CHANNELS,
    **dict.fromkeys(("aten.layer_norm.default", "aten.rms_norm.default"), OverPixels()),
    **{f"aten.{name}": AlongChannels() for name in _CHANNEL_REDUCTIONS},
    **{f"aten.{name}.int": AlongChannels() for name in ("softmax", "log_softmax", "select")},
    **{f"aten.{name}.default": AlongChannels() for name in (*_CHANNEL_FUNCTIONS, "linalg_vector_norm")},
    "sft.assigned": AssignedChannels(),
    "aten.stack.default": AlongChannels(adds=True),
    "aten.slice.Tensor": (AlongChannels(), Slice()),
    "aten.pad.default": (Pad(), ChannelPad()),
    "sft.border_rows": BorderRows(),
    "sft.wrapped": Wrapped(),
    "sft.expanded": _CHANNELS,
    "aten.repeat.default": RepeatedChannels(),
    **{f"aten.{name}.default": AlongChannels(argument="dims") for name in ("flip", "roll")},
    **{f"aten.adaptive_avg_pool{n}d.default": (_MEAN, Grid(), AdaptiveAverage()) for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": AdaptiveMax() for n in (1, 2, 3)},
    "aten.mean.dim": (_MEAN, AlongChannels()),
    "aten.sum.dim_IntList": (Sum(), AlongChannels()),
    NEXT: NextValue(),
}

#: Recurrent layers drop values between layers.
_RECURRENT = frozenset({"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"})
_NO_ORDER = (
    "draw masks with nn.Dropout or torch.empty_like(x).bernoulli_(p), noise with rand_like or randn_like, and other numbers outside the "
    "compiled model"
)
_RANDOM = {
    **dict.fromkeys(
        (target.split(".")[1] for target in _RECURRENT), "its masks are its own; set its dropout to 0, with nn.Dropout between layers"
    ),
    "native_dropout": "use the dropped values, not the mask that it returns",
    "bernoulli": "its probabilities vary; draw with one probability, torch.empty_like(x).bernoulli_(p)",
}


def operator_of(node: Node, graph: Graph, streamed: Collection[str]) -> tuple[Operator, list[str]]:
    """The table's row for a node, given the streamed values, and why it runs whole although it reads one of them."""
    rows = _rows(node.target)
    if any(row.follows for row in rows):
        return rows[0], []
    if not any(name in streamed for name in node.operands):
        return WHOLE, []
    problems: list[str] = [] if rows else [no_rule(node, graph)]
    if any(row.name != "pointwise" for row in rows) and any(graph[name].is_complex for name in (node.name, *node.operands)):
        # Their derivatives are conjugated, and only real where an operand is.
        return WHOLE, [f"{node.label}: computes with complex numbers of several pixels or operands, which has {NO_STRIPS[4:]}"]
    for row in rows:
        why = row.problems(node, graph, streamed)
        if not why:
            return row, []
        problems += why
    return WHOLE, problems


def rows_of_table() -> dict[str, tuple[Operator, ...]]:
    """The whole table, by target."""
    return {target: _rows(target) for target in _TABLE}


def _rows(target: str) -> tuple[Operator, ...]:
    found = _TABLE.get(target, ())
    return found if isinstance(found, tuple) else (found,)


def refusal(node: Node, graph: Graph) -> str | None:
    """Why an operator cannot run at all, whole tensors or not, and what to do; ``None`` if it can."""
    if node.target == "aten.instance_norm.default" and node.argument("use_input_stats") and node.argument("running_mean") is not None:
        return f"{node.label} has no exact rule; its running statistics are read elsewhere too, where the exporter loses their update"
    if node.target == "aten.bincount.default" and node.shape != (node.argument("minlength", 0),):
        return f"{node.label}: its size depends on the numbers; give minlength, above the largest of them"
    if node.target == "aten.as_strided_scatter.default":
        return f"{node.label}: `forward` writes in place through as_strided; write into a slice of the tensor"
    if node.target == "aten.unfold_backward.default" and not _covers(node):
        return f"{node.label}: `forward` writes in place into windows (unfold) that may leave out pixels; write into a slice of the tensor"
    if any(isinstance(row, Convolution) for row in _rows(node.target)):
        kernel = [name for value in (node.argument("weight"), node.argument("bias")) for name in refs_in(value)]
        if any(graph[name].target in DRAWN_TARGETS for name in graph.ancestors(kernel)):
            return f"{node.label}: dropout on the kernel itself has no positions in the image; drop its input or its output"
    if node.effect == "draws" and _draws(node):
        name = node.target.removeprefix("aten.").split(".")[0]
        return f"{node.label} has no exact rule; {_RANDOM.get(name, _NO_ORDER)}"
    if node.effect == "writes":
        return f"{node.label} writes into its operands; use the form that returns a new tensor"
    return None


def _covers(node: Node) -> bool:
    """Whether the windows of an ``unfold`` that is written through lie side by side and have all pixels: else torch forgets the others."""
    extent, size = node.argument("input_sizes")[node.argument("dim")], node.argument("size")
    return bool(node.argument("step") == size and sp.simplify(sp.floor(sp.sympify(extent) / size) * size - extent) == 0)


def _draws(node: Node) -> bool:
    """Whether an operator that may draw random numbers does; some only do if they are given a probability."""
    if node.target == "aten.scaled_dot_product_attention.default":
        return bool(node.argument("dropout_p", 0.0))
    if node.target in _RECURRENT:
        return bool(node.argument("train") and node.argument("dropout") and node.argument("num_layers") > 1)
    return True


_POLYNOMIALS = ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w")
#: Operators that PyTorch gives no gradient, and that do not complain.
_UNDIFFERENTIATED = (
    "histc",
    "special_airy_ai",
    "special_spherical_bessel_j0",
    *(f"special_bessel_{name}" for name in ("j0", "j1", "y0", "y1")),
    *(f"special_{scaled}modified_bessel_{name}" for scaled in ("", "scaled_") for name in ("i0", "i1", "k0", "k1")),
    *(f"special_{shifted}{name}" for shifted in ("", "shifted_") for name in _POLYNOMIALS),
    *(f"special_{name}" for name in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")),
)
#: What comes out of these depends on no value that they read, or is not to.
_CONSTANT = frozenset(
    {
        "sft.mask",
        "sft.noise",
        "sft.label_weight",
        "sft.filled",
        NEXT,
        "sft.running_mean",  # buffers, which eager PyTorch updates without recording it
        "sft.running_var",
        "aten.detach.default",
        *(f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty")),
        *(f"aten.new_{name}.default" for name in ("zeros", "ones", "full", "empty")),
        *(f"aten.{name}.{overload}" for name in _UNDIFFERENTIATED for overload in ("default", "n_scalar")),
    }
)


def differentiable_operands(node: Node) -> tuple[str, ...]:
    """The operands that a gradient may pass to: it passes to none through a drawn mask, whole numbers, or ``detach``."""
    if node.target in _CONSTANT or not (node.is_floating or node.is_complex):
        return ()
    return node.operands[:1] if node.target == "sft.beside" else node.operands


def window_of(node: Node, axis: int) -> Window | None:
    """The sliding window of a convolution or pooling along one of its axes."""
    row = next(iter(_rows(node.target)), None)
    return row.window(node, axis) if isinstance(row, Windowed) and axis < row.num_axes(node) else None


@dataclass(frozen=True, slots=True)
class Along:
    """An operator along dimensions of its operand.

    Attributes:
        argument: the argument that names them.
        default: what it is where it is not given.
        drops: whether they are gone afterwards, unless ``keepdim`` is given.
        adds: whether the dimension named is new.
    """

    argument: str = "dim"
    default: Any = None
    drops: bool = False
    adds: bool = False


#: Operators along dimensions, by target.
ALONG: dict[str, Along] = {
    "aten.cat.default": Along(default=0),
    "aten.stack.default": Along(default=0, adds=True),
    **{f"aten.{name}.int": Along() for name in ("softmax", "log_softmax")},
    **{f"aten.{name}.default": Along(default=-1) for name in _CHANNEL_FUNCTIONS},
    **{f"aten.{name}": Along(drops=True) for name in _CHANNEL_REDUCTIONS},
    "aten.linalg_vector_norm.default": Along(drops=True),
    **{f"aten.{name}.default": Along(argument="dims") for name in ("flip", "roll")},
    "aten.slice.Tensor": Along(default=0),
    "aten.select.int": Along(drops=True),
    **dict.fromkeys(("aten.gather.default", "aten.scatter.value", "aten.scatter.src"), Along()),
}
#: Operators of single elements of their operands, which broadcast.
ELEMENTWISE = frozenset(target for target, row in _TABLE.items() if row in (_POINTWISE, _BINARY, _ROW, Detached()) or target in CASTS)
