"""The table of operators: what each one means for streaming.

A row of the table answers, for one family of operators: which of its operands are streamed, which input rows and columns an
output row and column reads (the access map), what lies beyond the true image border, what extent comes out, which
dimensions survive (for fused-tileable dimensions), and why a given use of it has no exact rule. Execution is elsewhere:
``sft.lower`` holds, under the same names, how a row of the table runs and is differentiated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sft.analysis.access import AxisMap
from sft.analysis.graph import Graph, Node, refs_in
from sft.analysis.masks import MASK_TARGETS

__all__ = ["AXES", "CASTS", "Border", "Operator", "Role", "Window", "is_differentiable", "operator_of", "pool_window", "window_of"]

#: The spatial axes of an ``[N, C, H, W]`` value by name; the index is the axis' place after batch and channel.
AXES = ("height", "width")

Role = Literal["window", "resample", "pointwise", "join", "reduce", "whole"]
Border = Literal["none", "zeros", "-inf", "counted zeros", "not counted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window along one axis; paddings may differ at the two ends (``padding="same"`` with even kernels)."""

    kernel: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def span(self) -> int:
        """Input rows from the first to the last one read, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def access(self) -> AxisMap:
        """The access map."""
        return AxisMap(scale=self.stride, first=-self.pad_low, last=self.span - 1 - self.pad_low)

    def extent(self, extent: int) -> int:
        """Output rows for ``extent`` input rows; not positive when the window does not fit."""
        free = extent + self.pad_low + self.pad_high - self.span
        out = free // self.stride + 1
        # In ceil mode a last partial window counts if it starts inside the image or its lower padding.
        if self.ceil and free % self.stride and out * self.stride < extent + self.pad_low:
            out += 1
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row of the table.

    Attributes:
        name: the family, also the key of its lowering rule.
        role: how rows flow through it. ``window`` and ``resample`` have access maps of their own, ``pointwise`` and ``join``
            read row ``o`` for row ``o``, ``reduce`` reads every row once and gives a global value, ``whole`` runs on whole
            tensors only.
    """

    name: str
    role: Role

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        """The operands that come in strips; the others (parameters, global values) are whole."""
        return tuple(name for name in node.operands if name in streamed)

    def access(self, node: Node, axis: int) -> AxisMap:
        """The access map along ``AXES[axis]`` of every streamed operand."""
        window = window_of(node, axis)
        if window is not None:
            return window.access
        if self.role == "resample":
            return AxisMap(divisor=_upsample_factors(node)[axis])
        return AxisMap()

    def extent(self, node: Node, axis: int, extent: int) -> int:
        """The output's extent along ``AXES[axis]``."""
        window = window_of(node, axis)
        if window is not None:
            return window.extent(extent)
        return extent * _upsample_factors(node)[axis] if self.role == "resample" else extent

    def border(self, node: Node) -> Border:
        """What the operator reads beyond the true image border."""
        windows = [window_of(node, axis) for axis in range(len(AXES))]
        padded = any(w is not None and (w.pad_low or w.pad_high or w.ceil) for w in windows)
        if not padded:
            return "none"
        if self.name == "max_pool":
            return "-inf"
        if self.name == "avg_pool":
            return "counted zeros" if node.argument("count_include_pad") else "not counted"
        return "zeros"

    def keeps(self, node: Node) -> tuple[bool, bool]:
        """Whether the derivative reads the streamed operands, and whether it reads the result."""
        if self.name == "pointwise":
            return (False, True) if node.target in ("aten.relu.default", "aten.leaky_relu.default") else (True, True)
        if self.name == "cast":
            return (False, False)
        if self.name == "binary":
            return (node.target in ("aten.mul.Tensor", "aten.div.Tensor"), False)
        return (self.name in ("convolution", "max_pool", "avg_pool", "frozen_norm", "affine"), False)

    def dimension_map(self, node: Node) -> tuple[int | None, ...]:
        """For each dimension of a streamed ``[N, C, H, W]`` operand the output dimension that it becomes, if any.

        The fused-tileable relation of Xu et al. (CC'22), section 4.1.1: a slice of the output along the dimension needs only
        a slice of the input along it.
        """
        if self.role == "whole":
            return (None, None, None, None)
        if self.role == "reduce":
            return (0, 1, None, None) if self.name == "mean" or node.argument("per_sample") else (None, 1, None, None)
        if self.name == "convolution":
            # One output channel of one group reads every input channel: there is no slice of it to read.
            depthwise = node.argument("groups") == node.shape[1] != 1
            return (0, 1 if depthwise else None, 2, 3)
        return (0, None if self.name == "cat" else 1, 2, 3)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        """Why this use of the operator has no exact rule; empty when it has."""
        return _PROBLEMS[self.name](node, graph, streamed) if self.name in _PROBLEMS else []


_CONVOLUTION = Operator(name="convolution", role="window")
_MAX_POOL = Operator(name="max_pool", role="window")
_AVG_POOL = Operator(name="avg_pool", role="window")
_NEAREST = Operator(name="nearest", role="resample")
_POINTWISE = Operator(name="pointwise", role="pointwise")
_BINARY = Operator(name="binary", role="join")
_CAT = Operator(name="cat", role="join")
_NORM = Operator(name="frozen_norm", role="pointwise")
_AFFINE = Operator(name="affine", role="pointwise")
_CAST = Operator(name="cast", role="pointwise")
_DROPOUT = Operator(name="dropout", role="pointwise")
_MASK = Operator(name="mask", role="pointwise")
_MEAN = Operator(name="mean", role="reduce")
_MOMENTS = Operator(name="moments", role="reduce")
_WHOLE = Operator(name="whole", role="whole")

_TABLE: dict[str, Operator] = {
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv2d.padding": _CONVOLUTION,
    "aten.max_pool2d.default": _MAX_POOL,
    "aten.avg_pool2d.default": _AVG_POOL,
    "aten.upsample_nearest2d.vec": _NEAREST,
    "aten.add.Tensor": _BINARY,
    "aten.sub.Tensor": _BINARY,
    "aten.mul.Tensor": _BINARY,
    "aten.cat.default": _CAT,
    "aten._native_batch_norm_legit_no_training.default": _NORM,
    "aten.adaptive_avg_pool2d.default": _MEAN,
    "aten.mean.dim": _MEAN,
    "sft.moments": _MOMENTS,
    "sft.affine": _AFFINE,
    "sft.dropout": _DROPOUT,
    "sft.mask": _MASK,
}
#: Unary functions of one element: any of them streams, and torch's own derivative is traced for it.
_UNARY = [
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
]
_TABLE.update({f"aten.{name}.default": _POINTWISE for name in _UNARY})
_TABLE.update({f"aten.{name}": _POINTWISE for name in ("pow.Tensor_Scalar", "rsub.Scalar", "div.Scalar", "mul.Scalar", "add.Scalar")})
_TABLE["aten.div.Tensor"] = _BINARY
_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
#: Conversions to another element type; where they are between floating-point types they have a gradient.
CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout"})
_TABLE.update(dict.fromkeys(CASTS, _CAST))
#: What may stand in the tail, behind the last streamed value, and runs whole.
_TAIL = frozenset(
    [
        "aten.view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.squeeze.default",
        "aten.unsqueeze.default",
        "aten.permute.default",
        "aten.transpose.int",
        "aten.t.default",
        "aten.linear.default",
        "aten.matmul.default",
        "aten.mm.default",
        "aten.bmm.default",
        "aten.addmm.default",
        "aten.softmax.int",
        "aten.log_softmax.int",
        "aten.layer_norm.default",
        "aten.expand.default",
        "aten.sum.dim_IntList",
        "aten.sum.default",
        "aten.mean.default",
        "aten.stack.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.amax.default",
        "aten.prelu.default",
        "aten.linalg_vector_norm.default",
        "aten.where.self",
        "aten.glu.default",
        "aten.unflatten.int",
        "aten.cumsum.default",
        "aten.logsumexp.default",
        "aten.pow.Tensor_Tensor",
        "aten.maximum.default",
        "sft.scale_shift",
        "sft.running_mean",
        "sft.running_var",
    ]
)

_REMEDIES = {
    "native_dropout": "use the dropped values, not the mask that it returns",
    "bernoulli": "its probabilities vary; draw with one probability, torch.empty_like(x).bernoulli_(p)",
    "rand": "random numbers follow the tiling; draw masks with nn.Dropout or torch.empty_like(x).bernoulli_(p)",
    "rand_like": "random numbers follow the tiling; draw masks with nn.Dropout or torch.empty_like(x).bernoulli_(p)",
    "randn": "random numbers follow the tiling; add noise outside the compiled model",
    "randn_like": "random numbers follow the tiling; add noise outside the compiled model",
    "instance_norm": "drop track_running_stats: the exporter loses the update of an InstanceNorm's buffers",
    "upsample_bilinear2d": "use nearest upsampling by an integer factor",
    "upsample_bicubic2d": "use nearest upsampling by an integer factor",
    "pad": "use the zero padding of the convolution itself",
    "conv_transpose2d": "use nearest upsampling followed by a convolution",
}


def operator_of(node: Node, streamed: Collection[str]) -> Operator | None:
    """The table's row for a node, given the names of the streamed values; ``None`` when the table has none."""
    if not any(name in streamed for name in node.operands):
        row = _TABLE.get(node.target)
        return _WHOLE if node.target in _TAIL or row is not None else None
    row = _TABLE.get(node.target)
    if row is None and node.target in _TAIL:
        return _WHOLE
    return row


def is_differentiable(node: Node) -> bool:
    """Whether a gradient passes through an operator at all: none passes through a drawn mask."""
    return node.target != "sft.mask"


def remedy(node: Node) -> str:
    """What a user can do about an operator without a rule."""
    name = node.target.removeprefix("aten.").split(".")[0]
    return _REMEDIES.get(name, "replace it, or keep it outside the compiled model")


def window_of(node: Node, axis: int) -> Window | None:
    """The sliding window of a convolution or pooling along ``AXES[axis]``."""
    row = _TABLE.get(node.target)
    if row is _CONVOLUTION:
        kernel = int(node_weight_kernel(node)[axis])
        stride, dilation = _pair(node.argument("stride"))[axis], _pair(node.argument("dilation"))[axis]
        padding = node.argument("padding")
        if padding == "valid":
            low = high = 0
        elif padding == "same":
            total = dilation * (kernel - 1)
            low, high = total // 2, total - total // 2
        else:
            low = high = _pair(padding)[axis]
        return Window(kernel=kernel, stride=stride, pad_low=low, pad_high=high, dilation=dilation)
    if row is _MAX_POOL or row is _AVG_POOL:
        return pool_window(node, axis)
    return None


def pool_window(node: Node, axis: int) -> Window:
    """The window of a pooling along ``AXES[axis]``; an empty stride means the kernel's."""
    kernel = _pair(node.argument("kernel_size"))[axis]
    stride = _pair(node.argument("stride") or node.argument("kernel_size"))[axis]
    padding = _pair(node.argument("padding"))[axis]
    dilation = _pair(node.argument("dilation", 1))[axis]
    return Window(
        kernel=kernel,
        stride=stride,
        pad_low=padding,
        pad_high=padding,
        dilation=dilation,
        ceil=node.argument("ceil_mode"),
    )


def node_weight_kernel(node: Node) -> tuple[int, int]:
    """Height and width of a convolution's kernel, noted at capture."""
    kernel: tuple[int, int] = node.argument("kernel_size")
    return kernel


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _upsample_factors(node: Node) -> tuple[int, int]:
    factors: tuple[int, int] = node.argument("factors")
    return factors


def _nearest_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    factors = node.argument("factors")
    if factors is None:
        return [f"{node.label}: the factor is not a whole number; upsample by an integer factor (or to an integer multiple)"]
    for axis, factor in enumerate(factors):
        # ATen finds the source index in float32; beyond some size or for some factors that is not floor(i / factor).
        extent = node.shape[2 + axis]
        size = int(extent) if isinstance(extent, int) or extent.is_number else 2**17
        rows = np.arange(size, dtype=np.float32)
        if not np.array_equal(np.floor(rows * np.float32(1.0 / factor)), np.arange(size) // factor):
            return [f"{node.label}: ATen's float32 source index differs from i // {factor}; use a factor of 2 or 3"]
    return []


def _binary_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    for name in node.operands:
        shape = graph[name].shape
        if name not in streamed and any(extent != 1 for extent in shape[-2:]):
            return [f"{node.label}: operand {name} of shape {shape} varies along the image; make its height and width 1"]
    if node.argument("rounding_mode") is not None:
        return [f"{node.label}: rounded division has no gradient rule; divide without rounding_mode"]
    return []


def _cat_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    if node.argument("dim") not in (1, -3):
        return [f"{node.label}: cat along dimension {node.argument('dim')}; only channels (dim=1) can be joined in strips"]
    whole = [name for name in node.operands if name not in streamed]
    return [f"{node.label}: operand {whole[0]} is not an image of the same size; expand it first"] if whole else []


def _mean_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    if node.target == "aten.adaptive_avg_pool2d.default":
        if _pair(node.argument("output_size")) != (1, 1):
            size = node.argument("output_size")
            return [f"{node.label}: pools to {size}; only (1, 1) streams, use AdaptiveAvgPool2d(1)"]
        return []
    dims = sorted(dim % 4 for dim in node.argument("dim") or ())
    if dims != [2, 3]:
        return [f"{node.label}: mean over {node.argument('dim')}; only height and width together, dim=(2, 3), stream"]
    return []


def _cast_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    before = graph[node.argument("self").name].dtype
    if not {before, node.dtype} <= _FLOATING:
        return [f"{node.label}: a cast from {before} to {node.dtype} of a streamed value; only floating-point types stream"]
    return []


def _avg_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    if node.argument("divisor_override") == 0:
        return [f"{node.label}: divisor_override is 0; give a positive divisor"]
    return []


def _norm_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    if any(name in streamed for name in node.operands[1:]):
        return [f"{node.label}: a streamed value serves as the norm's parameter; only parameters and buffers may"]
    return []


def _convolution_problems(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    weight = node.argument("weight")
    names = [name for value in (weight, node.argument("bias")) for name in refs_in(value)]
    if any(name in streamed for name in names):
        return [f"{node.label}: the kernel is computed from the image; only parameters may be kernels"]
    if any(graph[name].target in MASK_TARGETS for name in graph.ancestors(names)):
        return [f"{node.label}: dropout on the kernel itself; drop its input or its output"]
    return []


_PROBLEMS = {
    "nearest": _nearest_problems,
    "binary": _binary_problems,
    "cat": _cat_problems,
    "mean": _mean_problems,
    "cast": _cast_problems,
    "avg_pool": _avg_problems,
    "frozen_norm": _norm_problems,
    "convolution": _convolution_problems,
}
