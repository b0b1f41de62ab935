"""Classes of equal stages."""

from __future__ import annotations

from sft.solvers.chain import Stage, StageChain, stage_classes


def test_equal_stages_have_equal_numbers() -> None:
    stages = (Stage(forward_seconds=ord(letter), backward_seconds=1, output_bytes=1, grad_bytes=1) for letter in "abacb")
    assert stage_classes(StageChain(input_bytes=1, stages=tuple(stages), input_grad_bytes=1)) == (0, 1, 0, 2, 1)
