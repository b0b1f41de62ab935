"""Memory of bags of tiles: constant in the number of tiles, except for the pooled vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer, take_samples, take_windows
from tests.helpers.plans import least_budget
from tests.helpers.transformers import AttentionForm, ImageTransformer
from tests.helpers.windows import SwinTransformer, TiledEncoder


def _least_plan(num_tiles: int, width: int, depth: int) -> sft.Plan:
    """The smallest plan for a bag that is read from an array."""
    return _least_plan_of(AttentionBag(VisionTransformer(width, 3, depth), width), np.zeros((num_tiles, 3, 64, 64), np.float32))


def _least_plan_of(model: nn.Module, array: NDArray[np.float32]) -> sft.Plan:
    """The smallest plan for an input that is read from an array."""
    torch.manual_seed(0)
    plan: sft.Plan = sft.compile(model, [array], budget=least_budget(model, [array])).plan_for(array)  # type: ignore[operator]
    return plan


def test_tiles_of_a_bag_add_their_pooled_vectors_alone() -> None:
    small, large = _least_plan(16, 48, 1), _least_plan(64, 48, 1)
    for plan in (small, large):
        run = next(segment for segment in plan.segments if segment.takes_samples)
        assert (run.batch_tile, run.num_steps) == (1, plan.input_shapes[0][0])
        assert f"{run.num_steps} x 1 samples" in plan.explain(full=False)
        assert plan.redundancy < 1.8  # up to two forward passes more; the input needs no gradient
    added = (large.projected_peak_bytes - small.projected_peak_bytes) / 48
    assert added <= 4 * 4 * (48 + 64 + 4)  # the vector, its score, their gradients, and temporary values of the pooling


def test_tiles_of_one_image_take_the_memory_of_a_bag() -> None:
    """Tiles that the model cuts from its image, and those of a bag, in at most 1.3 times the bytes."""
    bag = _least_plan(64, 48, 1)
    plan = _least_plan_of(AttentionBag(TiledEncoder(VisionTransformer(48, 3, 1), 64), 48), np.zeros((1, 3, 512, 512), np.float32))
    run = next(segment for segment in plan.segments if segment.takes_windows)
    assert (run.strip_rows, run.num_steps, run.panel_cols, run.num_panels) == (1, 8, 1, 8)
    assert "8 x 1 windows" in plan.explain(full=False)
    assert not plan.notes
    row_bytes = 3 * 64 * 512 * 4
    assert plan.projected_peak_bytes <= 1.3 * bag.projected_peak_bytes + row_bytes
    assert plan.redundancy < 1.5


@pytest.mark.parametrize("is_frozen", [False, True])
def test_bias_gradients_of_convolutions_allocate_no_weight_gradient(is_frozen: bool) -> None:
    """In float32, where oneDNN computes both: for patches, with a weight gradient that is added in place, and for a frozen weight."""
    torch.manual_seed(0)
    model: nn.Module = AttentionBag(VisionTransformer(48, 3, 1), 48)
    if is_frozen:
        model = nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.get_parameter("0.weight").requires_grad_(False)
    array = np.ones((8, 3, 64, 64), np.float32)
    net: Any = sft.compile(model, [array], budget=least_budget(model, [array]))
    with sft.measure_peak() as peak:
        net(array).sum().backward()
    assert net.plan.projected_peak_bytes - 2**13 <= peak.num_bytes <= net.plan.projected_peak_bytes


@pytest.mark.slow
def test_tiles_of_one_image_of_a_thousand_pixels() -> None:
    """The least peak has a second recomputation of each tile; a tenth more of the budget needs none."""
    model, array = AttentionBag(TiledEncoder(VisionTransformer(192, 3, 4), 64), 192), np.zeros((1, 3, 1024, 1024), np.float32)
    least = _least_plan_of(model, array)
    assert least.projected_peak_bytes <= 1.3 * _least_plan(256, 192, 4).projected_peak_bytes
    plan = sft.compile(model, [array], budget=least.budget_bytes * 11 // 10).plan_for(array)  # type: ignore[operator]
    assert plan.redundancy < 1.35 < least.redundancy


@pytest.mark.slow
def test_swin_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swin-T on 1,024 pixels: less than a quarter of plain's bytes at 1.25 times its FLOPs."""
    model, shape = SwinTransformer(), (1, 3, 1024, 1024)
    plain = sft.plan(model, shape, options=sft.Options(strategy="none"))
    take_windows(monkeypatch, 1, height=3)
    plan = sft.plan(model, shape, budget="1 GiB")
    assert plan.projected_peak_bytes <= 497 * 2**20 <= 0.2235 * plain.projected_peak_bytes
    assert plan.redundancy < 1.25


def test_attention_over_all_tokens_of_an_image() -> None:
    """Peak of four blocks on 1,024 tokens: cuts of each block, and of one block queries, keys, values and their gradients."""
    model, shape = ImageTransformer(32, 2, 4, 4, (32, 32)), (1, 3, 128, 128)
    plain = sft.plan(model, shape, options=sft.Options(strategy="none"))
    plan = sft.plan(model, shape, budget=least_budget(model, shape))
    token_bytes = 1025 * 32 * 4
    assert plan.projected_peak_bytes <= 18 * token_bytes < plain.projected_peak_bytes / 3.5
    assert plan.redundancy < 1.34
    assert "tokens" in plan.explain(full=False)


def test_tokens_of_idle_blocks_on_the_host() -> None:
    """Device memory of a transformer with idle values on the host: equal for any depth but for the gradients of parameters."""
    token_bytes, options = 577 * 16 * 4, sft.Options(host_budget="1GiB")
    above_gradients = []
    for depth in (2, 4):
        model, shape = ImageTransformer(16, 2, depth, 4, (24, 24)), (1, 3, 96, 96)
        plan = sft.plan(model, shape, budget=least_budget(model, shape, options=options), options=options)
        assert plan.host_bytes >= 2 * token_bytes and plan.redundancy < 1.4
        above_gradients.append(plan.projected_peak_bytes - sum(4 * parameter.numel() for parameter in model.parameters()))
    assert above_gradients[1] == above_gradients[0] <= 13 * token_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("form", "least_mib", "plain_mib"), [("fused", 16.0, 75.1), ("softmax", 26.0, 1593.0)])
def test_attention_over_4096_tokens(form: AttentionForm, least_mib: float, plain_mib: float) -> None:
    """The table of docs/samples.md: width 64, 4 blocks, 256 x 256 px in patches of 4 px."""
    model, shape = ImageTransformer(64, 4, 4, 4, (64, 64), form), (1, 3, 256, 256)
    plain = sft.plan(model, shape, options=sft.Options(strategy="none"))
    plan = sft.plan(model, shape, budget=least_budget(model, shape))
    assert plan.projected_peak_bytes <= least_mib * 2**20
    assert plain.projected_peak_bytes >= plain_mib * 2**20 * 0.99
    assert plan.redundancy < 1.34


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tiles", "plain_mib", "least_mib"), [(16, 16.7, 7.85), (64, 64.9, 7.9), (256, 257.8, 7.95), (4096, 4115.1, 10.85)]
)
def test_vision_transformer_on_a_bag(num_tiles: int, plain_mib: float, least_mib: float) -> None:
    """The table of docs/samples.md."""
    plan = _least_plan(num_tiles, 192, 4)
    assert plan.projected_peak_bytes <= least_mib * 2**20
    assert plan.redundancy == pytest.approx(1.53, abs=0.005)
    plain = sft.plan(AttentionBag(VisionTransformer(192, 3, 4), 192), (num_tiles, 3, 64, 64), options=sft.Options(strategy="none"))
    assert plain.projected_peak_bytes / 2**20 == pytest.approx(plain_mib, abs=0.06)


class _Perceptron(nn.Module):
    """Linear layers of pixels with channels last (ConvNeXt, Swin), and the mean of each tile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 4096), nn.Linear(4096, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).permute(0, 2, 3, 1)
        return self.down(torch.relu(self.up(y))).mean((1, 2))  # type: ignore[no-any-return]


def test_weights_of_linear_layers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one pixel are views of weights inside of a run, and copies outside of it."""
    torch.manual_seed(0)
    model = AttentionBag(_Perceptron(), 32)
    take_samples(monkeypatch, 1)
    plan = sft.plan(model, (6, 3, 8, 8))
    gradient_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert plan.projected_peak_bytes < 2.0 * gradient_bytes  # all gradients, one more gradient of a weight, and a tile
