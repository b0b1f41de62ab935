"""How each row of the operator table runs on a strip and is differentiated: forward and backward as ATen calls."""

from __future__ import annotations

from sft.analysis.graph import Node
from sft.analysis.operators import CASTS
from sft.analysis.repeated import NEXT, REPEAT
from sft.lower.context import Scope
from sft.lower.rules.adaptive import AdaptiveMax
from sft.lower.rules.base import Rule
from sft.lower.rules.beside import Beside
from sft.lower.rules.borders import Pad, Slice
from sft.lower.rules.casts import Cast, Detached
from sft.lower.rules.channelwise import FrozenNorm, ResultActivation
from sft.lower.rules.extremes import Extremes, Peak
from sft.lower.rules.im2col import Col2im, Im2col
from sft.lower.rules.joins import Binary, Cat
from sft.lower.rules.masks import Dropout, Mask, Noise
from sft.lower.rules.maxpool import MaxPool
from sft.lower.rules.norms import Affine, Moments, WholeMoments
from sft.lower.rules.places import MaxPoolPlaces, MaxUnpool
from sft.lower.rules.products import Contracted
from sft.lower.rules.reductions import LogSumExp, Mean, Sum, WholeMean
from sft.lower.rules.repeated import NextValue, RepeatedBlocks
from sft.lower.rules.resample import Grid, Nearest, Resampling
from sft.lower.rules.running import RunningStatistic
from sft.lower.rules.traced import TracedPointwise, TracedWhole
from sft.lower.rules.transposed import OverlapAdd, TransposedConvolution
from sft.lower.rules.windowed import AvgPool, Convolution
from sft.lower.rules.wrapped import BorderRows, Wrapped

__all__ = ["Rule", "rule_of"]

_RULES: dict[str, Rule] = {
    "convolution": Convolution(),
    "transposed_convolution": TransposedConvolution(),
    "overlap_add": OverlapAdd(),
    "im2col": Im2col(),
    "col2im": Col2im(),
    "max_pool": MaxPool(),
    "max_pool_places": MaxPoolPlaces(),
    "max_unpool": MaxUnpool(),
    "avg_pool": AvgPool(),
    "nearest": Nearest(),
    "grid": Grid(),
    "adaptive_max": AdaptiveMax(),
    "resampling": Resampling(),
    "pad": Pad(),
    "slice": Slice(),
    "border_rows": BorderRows(),
    "wrapped": Wrapped(),
    "binary": Binary(),
    "cat": Cat(),
    "frozen_norm": FrozenNorm(),
    "affine": Affine(),
    "cast": Cast(),
    "beside": Beside(),
    "detached": Detached(),
    "sum": Sum(),
    "mean": Mean(),
    "extremes": Extremes(),
    "peak": Peak(),
    "logsumexp": LogSumExp(),
    "contracted": Contracted(),
    "moments": Moments(),
}
_ACTIVATION, _TRACED, _WHOLE = ResultActivation(), TracedPointwise(), TracedWhole()
#: Where a whole image is at hand, a reduction is not a running one; those that are not here are torch's own.
_WHOLE_REDUCTIONS: dict[str, Rule] = {"mean": WholeMean(), "moments": WholeMoments()}
#: The same on strips and on whole tensors: what draws does so by position; repeated blocks are never on strips.
_EVERYWHERE: dict[str, Rule] = {
    "sft.dropout": Dropout(),
    "sft.mask": Mask(),
    "sft.noise": Noise(),
    "sft.running_mean": RunningStatistic(),
    "sft.running_var": RunningStatistic(),
    REPEAT: RepeatedBlocks(),
    NEXT: NextValue(),
}


def rule_of(scope: Scope, node: Node, *, whole: bool) -> Rule:
    """The rule that lowers a node."""
    row = scope.rows[node.name]
    if node.target in _EVERYWHERE:
        return _EVERYWHERE[node.target]
    if node.target in CASTS:
        return _RULES["cast"]
    if row.role == "whole" or row.name == "rowwise" or not any(name in scope.streamed for name in node.operands):
        return _WHOLE
    if row.name == "pointwise":
        if node.target == "aten.relu.default":
            return _ACTIVATION
        if node.target == "aten.leaky_relu.default" and node.argument("negative_slope") > 0:
            return _ACTIVATION
        return _TRACED
    if whole and row.name == "resampling" and scope.deterministic:
        return _RULES["resampling"]  # torch's own derivative adds in any order
    if whole and row.name in ("resampling", "adaptive_max", "wrapped", "beside"):
        return _WHOLE
    if whole and row.role == "reduce":
        return _WHOLE_REDUCTIONS.get(row.name, _WHOLE)
    return _RULES[row.name]
