"""The table of operators, by target.

Whatever reads a streamed value and has no row, or whose row says that this use of it cannot stream, runs on whole tensors where they
fit, as in plain PyTorch. Refused is only what would not be the same there: random numbers, and what writes into its operands.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sft.analysis.graph import Graph, Node
from sft.analysis.operators.base import Operator
from sft.analysis.operators.borders import ChannelPad, Pad, Slice
from sft.analysis.operators.pixelwise import (
    FLOATING,
    Affine,
    AlongChannels,
    Binary,
    Cast,
    Cat,
    Drawn,
    FrozenNorm,
    OverPixels,
    Pointwise,
    Rowwise,
)
from sft.analysis.operators.reductions import Extremes, LogSumExp, Mean, Moments, Peak, Sum
from sft.analysis.operators.resampling import Nearest
from sft.analysis.operators.windows import AvgPool, ChannelWindow, Convolution, MaxPool, Window, Windowed

__all__ = ["ALONG", "CASTS", "ELEMENTWISE", "Along", "is_differentiable", "operator_of", "refusal", "window_of"]

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
)
_UNARY_OVERLOADS = ("pow.Tensor_Scalar", "rsub.Scalar", "div.Scalar", "mul.Scalar", "add.Scalar", "sub.Scalar")
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
    "aten.clamp.Tensor",
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
)

_CONVOLUTION, _MAX_POOL, _AVG_POOL = Convolution(), MaxPool(), AvgPool()
_POINTWISE, _ROW, _CHANNELS, _BINARY, _MEAN = Pointwise(), Rowwise(), Rowwise(broadcasts=False), Binary(), Mean()
#: Conversions to another element type; where they are between floating-point types they have a gradient.
CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout"})

#: Several rows are for different uses: the first that knows a use is for it.
_TABLE: dict[str, Operator | tuple[Operator, ...]] = {
    **{f"aten.conv{n}d.{kind}": _CONVOLUTION for n in (1, 2, 3) for kind in ("default", "padding")},
    **{f"aten.max_pool{n}d.default": _MAX_POOL for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": (_AVG_POOL, ChannelWindow()) for n in (1, 2, 3)},
    **{f"aten.upsample_nearest{n}d.vec": Nearest() for n in (1, 2, 3)},
    **{f"aten.{name}.Tensor": _BINARY for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.default": _POINTWISE for name in _UNARY},
    **{f"aten.{name}": _POINTWISE for name in _UNARY_OVERLOADS},
    **dict.fromkeys(_ROWWISE, _ROW),
    **dict.fromkeys(CASTS, Cast()),
    "aten.cat.default": Cat(),
    "aten._native_batch_norm_legit_no_training.default": FrozenNorm(),
    "sft.moments": Moments(),
    "sft.extremes": Extremes(),
    "sft.peak": Peak(),
    "sft.logsumexp": LogSumExp(),
    "sft.affine": Affine(),
    "sft.dropout": Drawn(name="dropout"),
    "sft.mask": Drawn(name="mask"),
    "aten.prelu.default": _CHANNELS,
    "sft.rearrange": _CHANNELS,
    "sft.channel_norm": _CHANNELS,
    "sft.channel_rms_norm": _CHANNELS,
    **dict.fromkeys(("aten.layer_norm.default", "aten.rms_norm.default"), OverPixels()),
    **{f"aten.{name}": AlongChannels() for name in _CHANNEL_REDUCTIONS},
    **{f"aten.{name}.int": AlongChannels() for name in ("softmax", "log_softmax", "select")},
    **{f"aten.{name}.default": AlongChannels() for name in ("cumsum", "cumprod", "glu", "linalg_vector_norm", "index_select")},
    "aten.stack.default": AlongChannels(adds=True),
    "aten.slice.Tensor": (AlongChannels(), Slice()),
    "aten.pad.default": (Pad(), ChannelPad()),
    "sft.expanded": _CHANNELS,
    "aten.flip.default": AlongChannels(argument="dims"),
    **{f"aten.adaptive_avg_pool{n}d.default": _MEAN for n in (1, 2, 3)},
    "aten.mean.dim": (_MEAN, AlongChannels()),
    "aten.sum.dim_IntList": (Sum(), AlongChannels()),
}

_NO_ORDER = "random numbers follow the tiling; draw masks with nn.Dropout or torch.empty_like(x).bernoulli_(p), noise outside the model"
_RANDOM = {
    "native_dropout": "use the dropped values, not the mask that it returns",
    "bernoulli": "its probabilities vary; draw with one probability, torch.empty_like(x).bernoulli_(p)",
}


def operator_of(node: Node, graph: Graph, streamed: Collection[str]) -> tuple[Operator, list[str]]:
    """The table's row for a node, given the streamed values, and why it runs whole although it reads one of them."""
    if not any(name in streamed for name in node.operands):
        return WHOLE, []
    found = _TABLE.get(node.target, ())
    rows = found if isinstance(found, tuple) else (found,)
    problems: list[str] = [] if rows else [f"{node.label}: has no rule for strips"]
    for row in rows:
        why = row.problems(node, graph, streamed)
        if not why:
            return row, []
        problems += why
    return WHOLE, problems


def refusal(node: Node) -> str | None:
    """Why an operator cannot run at all, whole tensors or not, and what to do; ``None`` if it can."""
    if node.target == "aten.instance_norm.default" and node.argument("use_input_stats") and node.argument("running_mean") is not None:
        return f"{node.label} has no exact rule; its running statistics are read elsewhere too, where the exporter loses their update"
    if node.effect == "draws":
        name = node.target.removeprefix("aten.").split(".")[0]
        return f"{node.label} has no exact rule; {_RANDOM.get(name, _NO_ORDER)}"
    if node.effect == "writes":
        return f"{node.label} writes into its operands; use the form that returns a new tensor"
    return None


def is_differentiable(node: Node) -> bool:
    """Whether a gradient passes through an operator at all: none passes through a drawn mask, nor through whole numbers."""
    return node.target != "sft.mask" and (node.dtype in FLOATING or node.dtype.startswith("complex"))


def window_of(node: Node, axis: int) -> Window | None:
    """The sliding window of a convolution or pooling along one of its axes."""
    found = _TABLE.get(node.target)
    row = found[0] if isinstance(found, tuple) else found
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
    "aten.glu.default": Along(default=-1),
    **{f"aten.{name}.int": Along() for name in ("softmax", "log_softmax")},
    **{f"aten.{name}.default": Along() for name in ("cumsum", "cumprod")},
    **{f"aten.{name}": Along(drops=True) for name in _CHANNEL_REDUCTIONS},
    "aten.linalg_vector_norm.default": Along(drops=True),
    "aten.flip.default": Along(argument="dims"),
    "aten.slice.Tensor": Along(default=0),
    "aten.select.int": Along(drops=True),
    "aten.index_select.default": Along(),
}
#: Operators of single elements of their operands, which broadcast.
ELEMENTWISE = frozenset(target for target, row in _TABLE.items() if row in (_POINTWISE, _BINARY, _ROW) or target in CASTS)
