"""Frozen norms become part of their convolutions: the same function, the same gradients, fewer bytes."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.frontend.capture import capture
from sft.analysis.passes import fold_norms
from sft.analysis.passes.pipeline import run_passes
from sft.cli.tune import STANDARD_NETWORKS
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.plans import least_budget

_FROZEN = "aten._native_batch_norm_legit_no_training.default"


def _norm(kind: type[nn.Module], channels: int, **options: Any) -> nn.Module:
    """A norm with random statistics, weight and bias, in evaluation mode."""
    norm: Any = kind(channels, **options)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        for parameter in norm.parameters():
            parameter.normal_()
    return norm.eval()  # type: ignore[no-any-return]


class _Frozen(nn.Module):
    """A convolution and a frozen norm, in every mode."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


def _network() -> nn.Module:
    """All geometries: a bias, groups, strides, dilation, padding by name, and a norm without a weight."""
    blocks = [
        _Frozen(nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False), _norm(nn.BatchNorm2d, 8)),
        nn.ReLU(),
        _Frozen(nn.Conv2d(8, 8, 3, padding="same", dilation=2), _norm(nn.BatchNorm2d, 8)),
        nn.SiLU(),
        _Frozen(nn.Conv2d(8, 8, 3, padding=1, groups=4), _norm(nn.BatchNorm2d, 8, affine=False)),
        nn.MaxPool2d(2),
        _Frozen(nn.Conv2d(8, 6, 1), _norm(nn.BatchNorm2d, 6, eps=0.1)),
    ]
    return nn.Sequential(*blocks)


def _targets(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    captured = capture(model, [shape], [torch.float32], torch.device("cpu"))
    return [node.target for node in run_passes(captured.graph).operators]


@at_most(8)
@given(height=st.integers(24, 60), width=st.integers(16, 40), rows=st.integers(3, 16), batch=st.integers(1, 3), seed=st.integers(0, 9))
def test_folded_networks_are_exact(height: int, width: int, rows: int, batch: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = _network()
    assert_exact(model, torch.randn(batch, 3, height, width), options=sft.Options(tile=(rows, None)), seed=seed)


def test_every_norm_after_a_convolution_is_folded() -> None:
    targets = _targets(_network(), (1, 3, 48, 32))
    assert _FROZEN not in targets and targets.count("sft.folded_weight") == targets.count("sft.folded_bias") == 4


@pytest.mark.parametrize(("dim", "conv", "norm"), [(1, nn.Conv1d, nn.BatchNorm1d), (3, nn.Conv3d, nn.BatchNorm3d)])
def test_signals_and_volumes(dim: int, conv: type[nn.Module], norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Frozen(conv(2, 4, 3, padding=1), _norm(norm, 4)), nn.ReLU())
    shape = (2, 2, *(16, 8, 6)[:dim])
    assert "sft.folded_weight" in _targets(model, shape)
    assert_exact(model, torch.randn(shape), options=sft.Options(tile=(5, None)) if dim > 1 else None)


class _Shared(nn.Module):
    """Convolutions with another reader of the result, with a weight that depends on the input, or with a norm in training mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv, self.norm = kind, nn.Conv2d(3, 4, 3, padding=1), _norm(nn.BatchNorm2d, 4)
        self.weight_of = nn.Linear(3, 4)

    def train(self, mode: bool = True) -> _Shared:
        super().train(mode)
        self.norm.train(self.kind == "training")
        return self

    def forward(self, x: Tensor) -> Any:
        if self.kind == "input":
            weight = self.conv.weight * self.weight_of(x.mean((2, 3))).mean(0)[:, None, None, None]
            return self.norm(nn.functional.conv2d(x, weight, padding=1))
        value = self.conv(x)
        if self.kind == "result":
            return self.norm(value), value
        return self.norm(value) + (value if self.kind == "reader" else 0)


@pytest.mark.parametrize("kind", ["reader", "result", "input", "training"])
def test_other_norms_stay(kind: str) -> None:
    torch.manual_seed(0)
    model = _Shared(kind).train()
    if kind != "training":  # a capture for training needs buffers that it can change
        assert not any(target.startswith("sft.folded") for target in _targets(model, (1, 3, 24, 16)))
    assert_exact(model, torch.randn(1, 3, 24, 16), options=sft.Options(tile=(6, None)))


def test_instance_norms_with_running_statistics_are_folded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        _Frozen(nn.Conv2d(3, 4, 3, padding=1), _norm(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True)), nn.ReLU()
    )
    assert "sft.folded_weight" in _targets(model, (1, 3, 24, 16))
    assert_exact(model, torch.randn(1, 3, 24, 16), options=sft.Options(tile=(6, None)))


def test_trained_norms_of_frozen_weights_stay() -> None:
    """The gradient of a folded norm's weight needs that of the convolution's weight, which eager PyTorch does not compute."""
    torch.manual_seed(0)
    model, shape = _network().double(), (1, 3, 48, 32)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.requires_grad_(False)
    plan = sft.plan(model, shape, budget="1GiB", options=sft.Options(strategy="none"))
    assert not _folds(plan) and plan.flops == plan.plain_flops
    assert_exact(model, torch.randn(shape), options=sft.Options(tile=(8, None)))
    with torch.no_grad():
        assert _folds(sft.plan(model, shape, budget="1GiB"))
    for module in model.modules():
        module.requires_grad_(isinstance(module, nn.Conv2d))
    assert _folds(sft.plan(model, shape, budget="1GiB"))


def test_half_precision_with_five_bits_of_exponent_stays() -> None:
    """Statistics of raw 16-bit pixels would make weights of float16 subnormal."""
    for dtype, folds in ((torch.float16, False), (torch.bfloat16, True)):
        model = _network().to(dtype)
        assert _folds(sft.plan(model, (1, 3, 48, 32), budget="1GiB")) == folds
        with torch.autocast("cpu", dtype):
            assert _folds(sft.plan(_network(), (1, 3, 48, 32), budget="1GiB")) == folds


def test_large_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _network()
    monkeypatch.setattr(fold_norms, "MAX_FOLDED_ELEMENTS", 8 * 3 * 25 - 1)
    assert _targets(model, (1, 3, 48, 32)).count(_FROZEN) == 1


def test_the_result_of_the_convolution_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks = [_Frozen(nn.Conv2d(8, 8, 3, padding=1), _norm(nn.BatchNorm2d, 8)) for _ in range(4)]
    model = nn.Sequential(*(module for block in blocks for module in (block, nn.ReLU())))
    shape, options = (1, 8, 256, 256), sft.Options(strategy="none")
    folded = sft.plan(copy.deepcopy(model), shape, budget="1GiB", options=options)
    monkeypatch.setattr(fold_norms, "MAX_FOLDED_ELEMENTS", 0)
    separate = sft.plan(copy.deepcopy(model), shape, budget="1GiB", options=options)
    assert folded.projected_peak_bytes < 0.7 * separate.projected_peak_bytes
    assert folded.flops == separate.flops == folded.plain_flops


def _folds(plan: sft.Plan) -> bool:
    return any("__weight" in name for segment in plan.segments for name in segment.nodes)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_small_budgets_have_no_folded_weights(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest budget is that of separate norms, and its plan is exact; a larger one folds."""
    torch.manual_seed(0)
    blocks = [_Frozen(nn.Conv2d(i, 96, 3, padding=1), _norm(nn.BatchNorm2d, 96)) for i in (3, 96, 96)]
    model = nn.Sequential(*(module for block in blocks for module in (block, nn.ReLU()))).double()
    shape = (1, 3, 40, 12)
    with torch.set_grad_enabled(training):
        least = least_budget(model, shape)
        assert not _folds(sft.plan(model, shape, budget=least)) and _folds(sft.plan(model, shape, budget="64MiB"))
        saved = sft.Plan.from_json(sft.plan(model, shape, budget=least).to_json())
        net: Any = sft.compile(copy.deepcopy(model), shape, budget=least, plan=saved)
        assert net.plan.segments == saved.segments
        monkeypatch.setattr(fold_norms, "MAX_FOLDED_ELEMENTS", 0)
        assert least == least_budget(model, shape)
    if training:
        monkeypatch.undo()
        assert_exact(model, torch.randn(shape), budget=least + 12 * 40 * 3 * 8)  # the input has a gradient


def _chain(width: int = 96) -> nn.Module:
    torch.manual_seed(0)
    blocks = [_Frozen(nn.Conv2d(i, width, 3, padding=1), _norm(nn.BatchNorm2d, width)) for i in (3, width, width)]
    return nn.Sequential(*(module for block in blocks for module in (block, nn.ReLU()))).double()


def test_the_changelog_has_the_bytes_of_resnet18(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = STANDARD_NETWORKS["resnet18"]()
    sizes = []
    for limit in (fold_norms.MAX_FOLDED_ELEMENTS, 0):
        monkeypatch.setattr(fold_norms, "MAX_FOLDED_ELEMENTS", limit)
        plan = sft.plan(model, (1, 3, 2048, 2048), budget="1TiB", device="cpu", options=sft.Options(strategy="none"))
        sizes.append(f"{plan.projected_peak_bytes / 2**30:.1f}")
    text = (Path(__file__).parents[3] / "CHANGELOG.md").read_text()
    assert f"an untiled step of ResNet-18 at 2048 px takes {sizes[0]} GiB in place of {sizes[1]}." in text


def test_a_larger_budget_is_not_slower() -> None:
    """Just above the least budget of folded norms a plan with separate norms may compute less again."""
    model, shape = _chain(), (1, 3, 96, 48)
    least = least_budget(model, shape)
    plans = [sft.plan(model, shape, budget=int(least * factor)) for factor in (1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4)]
    assert all(later.estimated_seconds <= 1.06 * earlier.estimated_seconds for earlier, later in pairwise(plans))
    assert not _folds(plans[0]) and _folds(plans[-1])


def test_weights_stay_resident_where_separate_norms_fit() -> None:
    model, shape = _chain(), (1, 3, 40, 12)
    plan = sft.plan(model, shape, budget=least_budget(model, shape), options=sft.Options(weights="auto"))
    assert plan.streamed_weights == 0 and not _folds(plan)


def test_a_plan_for_one_size_does_not_decide_for_another() -> None:
    model, small, large = _chain(), (1, 3, 40, 12), (1, 3, 80, 24)
    least = least_budget(model, large)
    folded = sft.plan(model, small, budget="64MiB")
    net: Any = sft.compile(copy.deepcopy(model), small, budget=max(least, folded.total_bytes), plan=folded)
    assert not _folds(net.plan_for(torch.rand(large, dtype=torch.float64)))
    separate = sft.plan(model, small, budget=least_budget(model, small))
    net = sft.compile(copy.deepcopy(model), small, budget="64MiB", plan=separate)
    assert _folds(net.plan_for(torch.rand(large, dtype=torch.float64))) and not _folds(net.plan_for(torch.rand(small, dtype=torch.float64)))
    other = sft.plan(nn.Sequential(nn.Conv2d(3, 4, 3)).double(), small, budget="64MiB")
    with pytest.raises(sft.InputError, match="other operators than the model has"):
        sft.compile(copy.deepcopy(model), small, budget="64MiB", plan=other)


@pytest.mark.parametrize("trained", [True, False], ids=["trained weights", "fixed weights"])
def test_remedies_name_bytes_of_the_form_that_runs(trained: bool) -> None:
    model, shape, options = _chain(32), (1, 3, 400, 40), sft.Options(tile=(200, None))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.requires_grad_(trained)
    with pytest.raises(sft.BudgetError) as refusal:
        sft.plan(model, shape, budget=1, options=options)
    (named,) = [remedy.needed_bytes for remedy in refusal.value.remedies if remedy.settings == ("output",)]
    assert named == least_budget(model, shape, options, output="host")
