"""Memory of bags of tiles: constant in the number of tiles, up to the vectors that are pooled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer


def _least_plan(num_tiles: int, width: int, depth: int) -> sft.Plan:
    """The smallest plan for a bag that is read from an array."""
    torch.manual_seed(0)
    model = AttentionBag(VisionTransformer(width, 3, depth), width)
    bag = np.zeros((num_tiles, 3, 64, 64), np.float32)
    with pytest.raises(sft.BudgetError) as refusal:
        sft.compile(model, [bag], budget=1)
    plan: sft.Plan = sft.compile(model, [bag], budget=refusal.value.needed_bytes).plan_for(bag)  # type: ignore[operator]
    return plan


def test_tiles_of_a_bag_add_their_pooled_vectors_alone() -> None:
    small, large = _least_plan(16, 48, 1), _least_plan(64, 48, 1)
    for plan in (small, large):
        run = next(segment for segment in plan.segments if segment.takes_samples)
        assert (run.batch_tile, run.num_steps) == (1, plan.input_shapes[0][0])
        assert f"{run.num_steps} x 1 samples" in plan.explain(full=False)
        assert plan.redundancy < 1.5  # one forward pass more; the input needs no gradient
    added = (large.projected_peak_bytes - small.projected_peak_bytes) / 48
    assert added <= 4 * 4 * (48 + 64 + 4)  # the vector, its score, their gradients, and temporary values of the pooling


@pytest.mark.slow
@pytest.mark.parametrize(("num_tiles", "plain_mib", "least_mib"), [(16, 16.9, 8.95), (64, 65.7, 9.0), (256, 261.0, 9.15)])
def test_vision_transformer_on_a_bag(num_tiles: int, plain_mib: float, least_mib: float) -> None:
    """The table of docs/planning.md."""
    plan = _least_plan(num_tiles, 192, 4)
    assert plan.projected_peak_bytes <= least_mib * 2**20
    assert plan.redundancy == pytest.approx(1.34, abs=0.005)
    plain = sft.plan(AttentionBag(VisionTransformer(192, 3, 4), 192), (num_tiles, 3, 64, 64), options=sft.Options(strategy="none"))
    assert plain.projected_peak_bytes / 2**20 == pytest.approx(plain_mib, abs=0.06)
