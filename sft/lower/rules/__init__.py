"""Lowering rules: the table from operators to their forward and backward ATen calls, on strips and on full tensors."""

from __future__ import annotations

from sft.analysis.ir.graph import Node
from sft.analysis.ir.ops import CASTS
from sft.analysis.ir.targets import ATTENTION, CAUSAL_ATTENTION
from sft.lower.context import SegmentInfo
from sft.lower.rules.attention import AttentionRule, CausalAttentionRule
from sft.lower.rules.axis_reductions import AxisMinMaxRule, AxisSumRule
from sft.lower.rules.base import Rule
from sft.lower.rules.convolution import AvgPoolRule, ConvolutionRule
from sft.lower.rules.joins import BinaryRule, CastRule, CatRule, DetachRule, SpatialSideInputRule
from sft.lower.rules.max_pool import AdaptiveMaxPoolRule, MaxPoolIndicesRule, MaxPoolRule, MaxUnpoolRule
from sft.lower.rules.minmax import ArgMaxRule, MinMaxRule
from sft.lower.rules.norms import AffineRule, FrozenNormRule, MomentsRule, ResultActivationRule, RunningStatisticRule, WholeMomentsRule
from sft.lower.rules.padding import BorderRowsRule, CircularPadRule, PadRule
from sft.lower.rules.random import DropoutRule, NoiseRule, RandomMaskRule
from sft.lower.rules.reductions import LogSumExpRule, MeanRule, SpatialContractionRule, SumRule, WholeMeanRule
from sft.lower.rules.resample import FixedSizeAvgPoolRule, NearestRule, ResamplingRule
from sft.lower.rules.slices import DIM_SLICES, AssignSliceRule, DimSliceRule, SliceRule
from sft.lower.rules.traced import TracedPointwiseRule, TracedWholeRule
from sft.lower.rules.transposed import OverlapAddRule, TransposedConvolutionRule
from sft.lower.rules.unfold import Col2imRule, Im2colRule

__all__ = ["Rule", "register_rule", "rule_of"]

_RULES: dict[str, Rule] = {
    "convolution": ConvolutionRule(),
    "transposed_convolution": TransposedConvolutionRule(),
    "overlap_add": OverlapAddRule(),
    "im2col": Im2colRule(),
    "col2im": Col2imRule(),
    "max_pool": MaxPoolRule(),
    "max_pool_indices": MaxPoolIndicesRule(),
    "max_unpool": MaxUnpoolRule(),
    "avg_pool": AvgPoolRule(),
    "nearest": NearestRule(),
    "fixed_size_avg_pool": FixedSizeAvgPoolRule(),
    "adaptive_max": AdaptiveMaxPoolRule(),
    "resampling": ResamplingRule(),
    "pad": PadRule(),
    "slice": SliceRule(),
    "assign_slice": AssignSliceRule(),
    "border_rows": BorderRowsRule(),
    "circular_pad": CircularPadRule(),
    "binary": BinaryRule(),
    "cat": CatRule(),
    "frozen_norm": FrozenNormRule(),
    "affine": AffineRule(),
    "cast": CastRule(),
    "spatial_side_input": SpatialSideInputRule(),
    "detach": DetachRule(),
    "sum": SumRule(),
    "mean": MeanRule(),
    "minmax": MinMaxRule(),
    "axis_sum": AxisSumRule(),
    "axis_minmax": AxisMinMaxRule(),
    "argmax": ArgMaxRule(),
    "logsumexp": LogSumExpRule(),
    "spatial_contraction": SpatialContractionRule(),
    "moments": MomentsRule(),
}
_ACTIVATION, _TRACED, _WHOLE, _DIM_SLICE = ResultActivationRule(), TracedPointwiseRule(), TracedWholeRule(), DimSliceRule()
#: Reductions of full images without an accumulator; all others run as torch's own operator.
_WHOLE_REDUCTIONS: dict[str, Rule] = {"mean": WholeMeanRule(), "moments": WholeMomentsRule()}
#: Rules for strips and full tensors alike, by target. Packages above this one add theirs with `register_rule`.
_STRIP_OR_WHOLE_RULES: dict[str, Rule] = {
    "sft.dropout": DropoutRule(),
    "sft.mask": RandomMaskRule(),
    "sft.noise": NoiseRule(),
    "sft.running_mean": RunningStatisticRule(),
    "sft.running_var": RunningStatisticRule(),
    ATTENTION: AttentionRule(),
    CAUSAL_ATTENTION: CausalAttentionRule(),
}


def register_rule(target: str, rule: Rule) -> None:
    """Add the rule of an operator that a higher layer defines (`sft.repeat`)."""
    _STRIP_OR_WHOLE_RULES[target] = rule


def rule_of(scope: SegmentInfo, node: Node, *, untiled: bool) -> Rule:
    """The rule that lowers a node."""
    row = scope.specs[node.name]
    if node.target in _STRIP_OR_WHOLE_RULES:
        return _STRIP_OR_WHOLE_RULES[node.target]
    if node.target in CASTS:
        return _RULES["cast"]
    if row.role == "whole" or row.name == "per_pixel" or not any(name in scope.streamed for name in node.operands):
        return _DIM_SLICE if node.target in DIM_SLICES else _WHOLE
    if row.name == "pointwise":
        if node.target == "aten.relu.default":
            return _ACTIVATION
        if node.target == "aten.leaky_relu.default" and node.argument("negative_slope") > 0:
            return _ACTIVATION
        return _TRACED
    if untiled and row.name == "resampling" and scope.deterministic:
        return _RULES["resampling"]  # torch's own derivative adds in no fixed order
    if untiled and row.name in ("resampling", "adaptive_max", "circular_pad", "spatial_side_input"):
        return _WHOLE
    if untiled and row.role == "reduce":
        return _WHOLE_REDUCTIONS.get(row.name, _WHOLE)
    return _RULES[row.name]
