"""Chains of equal blocks (scan over layers): one block traced once, run many times under a checkpointing schedule."""

from sft.analysis.ir.repeat_op import REPEAT, REPEAT_NEXT
from sft.lower.rules import register_rule
from sft.repeat.lowering_rule import NextValueRule, RepeatedBlocksRule

register_rule(REPEAT, RepeatedBlocksRule())
register_rule(REPEAT_NEXT, NextValueRule())
