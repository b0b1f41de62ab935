"""Running reductions: initialization, update per strip, and finalization of a reduction over the image.

A sweep initialises the accumulator (fp64), each strip updates it, and a last program computes the global value from it.
"""

from __future__ import annotations

import torch

from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo
from sft.lower.program import Program
from sft.lower.rules import rule_of
from sft.lower.rules.base import AdditivePart, ReductionRule

__all__ = ["lower_finish", "partial_additive", "partial_shape", "partial_start"]


def _reduction_rule(scope: SegmentInfo, name: str) -> ReductionRule:
    rule = rule_of(scope, scope.graph[name], untiled=False)
    assert isinstance(rule, ReductionRule)
    return rule


def partial_shape(scope: SegmentInfo, name: str) -> tuple[int, ...]:
    """Shape of the accumulator (fp64) of a global value in one sweep."""
    return _reduction_rule(scope, name).partial_shape(scope, scope.graph[name])


def partial_start(scope: SegmentInfo, name: str) -> float:
    """Initial value of the accumulator of a global value."""
    return _reduction_rule(scope, name).start(scope.graph[name])


def partial_additive(scope: SegmentInfo, name: str) -> AdditivePart | None:
    """The entries of the accumulator that are sums over strips; ``None`` if a strip cannot be counted several times."""
    return _reduction_rule(scope, name).additive(scope.graph[name])


def lower_finish(scope: SegmentInfo, name: str) -> Program:
    """The program that computes the global value from its accumulator after the last strip."""
    builder = ProgramBuilder(dtype=scope.dtype_of(name))
    running = builder.port("partial", name, partial_shape(scope, name), torch.float64)
    out = builder.port("out", name, scope.global_shape(name), scope.dtype_of(name))
    _reduction_rule(scope, name).finish(scope, builder, scope.graph[name], running, out)
    return builder.finish()
