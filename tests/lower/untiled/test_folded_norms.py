"""Frozen norms of an untiled segment are folded together: few launches, and the function and the gradients of eager PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.api.plan_search import PlanSearch
from sft.common.torch_internals import copy_tensors
from sft.lower import lower_whole
from sft.lower.program import Program
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.problem import PlanningProblem
from sft.runtime.whole_segment import WholeSegment
from tests.helpers.exactness import assert_exact

aten = torch.ops.aten
_VIEWS = {aten.slice.Tensor, aten.view.default}
_ALLOCATIONS = {torch.empty, torch.empty_like}


def _norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    """A norm with random statistics and parameters."""
    norm = nn.BatchNorm2d(channels, **options)
    with torch.no_grad():
        for tensor in (norm.running_mean, *norm.parameters()):
            assert tensor is not None
            tensor.normal_()
        assert norm.running_var is not None
        norm.running_var.uniform_(0.5, 2.0)
    return norm


class _Residual(nn.Module):
    """A small ResNet with frozen norms.

    Args:
        options: of the norms.
        bias: True if convolutions have a bias.
        shared: True if all blocks have the same norm.
    """

    def __init__(self, *, bias: bool = False, shared: bool = False, width: int = 6, num_blocks: int = 4, **options: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=bias) for _ in range(num_blocks)])
        first = _norm(width, **options)
        self.norms = nn.ModuleList([first if shared or not number else _norm(width, **options) for number in range(num_blocks + 1)])
        self.train()

    def train(self, mode: bool = True) -> _Residual:
        super().train(mode)
        self.norms.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x)).relu()
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = norm(conv(x)).relu() + x
        return x


def _launches(program: Program) -> Counter[Any]:
    """Calls of the operators that fold norms, without views and allocations."""
    calls = (i.function for i in program.instructions if "__weight" in i.owner or "__bias" in i.owner)
    return Counter(call for call in calls if call not in _VIEWS | _ALLOCATIONS)


def _programs(model: nn.Module, dtype: torch.dtype) -> list[Program]:
    """Programs of an untiled training step, planned for a GPU."""
    plans: list[FittedPlan] = []
    fit = PlanSearch.fit

    def recorded(search: PlanSearch, problem: PlanningProblem) -> FittedPlan:
        plans.append(fit(search, problem))
        return plans[-1]

    with patch.object(PlanSearch, "fit", recorded):
        sft.plan(model.to("meta", dtype), (1, 3, 16, 12), budget="1GiB", device="cuda", options=sft.Options(strategy="none"))
    (segment,) = plans[-1].projected.region.segments
    assert isinstance(segment, WholeSegment)
    return list(segment.lowered_programs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_takes_one_launch_forward_and_three_backward(dtype: torch.dtype) -> None:
    forward, backward = map(_launches, _programs(_Residual(num_blocks=19), dtype))
    assert forward[aten.mul.out] == 20
    assert forward[copy_tensors] == 1
    assert aten.copy_.default not in forward
    assert forward.total() <= 20 + 9
    assert backward[aten.mul.out] == backward[aten.sum.IntList_out] == 20
    assert aten.copy_.default not in backward
    assert backward.total() <= 3 * 20 + 6 + 20 * (dtype == torch.bfloat16)  # gradients of convolutions are widened


def test_norms_of_different_settings_are_folded_in_groups() -> None:
    model = _Residual(num_blocks=5)
    for number, norm in enumerate(model.norms):
        assert isinstance(norm, nn.BatchNorm2d)
        norm.eps = (1e-5, 0.1)[number % 2]
    model.norms[0].requires_grad_(False)
    forward = _launches(_programs(model, torch.float32)[0])
    assert forward[aten.rsqrt.default] == 3
    assert forward[aten.mul.out] == 6


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("shared", [False, True], ids=["norms", "one norm"])
@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (5, None)}], ids=["untiled", "strips"])
def test_outputs_and_gradients_are_those_of_the_model(options: dict[str, Any], shared: bool, affine: bool, bias: bool) -> None:
    torch.manual_seed(0)
    assert_exact(_Residual(bias=bias, shared=shared, affine=affine), torch.randn(1, 3, 17, 13), options=sft.Options(**options))


@pytest.mark.parametrize("trained", ["norm_weights", "norm_biases", "convolutions", "first"])
def test_some_parameters_are_trained(trained: str) -> None:
    torch.manual_seed(0)
    model = _Residual(bias=True)
    kinds = {"norm_weights": ("norms", "weight"), "norm_biases": ("norms", "bias"), "convolutions": ("conv", ""), "first": ("stem", "")}
    start, end = kinds[trained]
    for name, parameter in model.named_parameters():
        is_needed = trained == "norm_weights" and "conv" in name  # otherwise norms stay apart
        parameter.requires_grad_(is_needed or (name.startswith(start) and name.endswith(end)))
    assert_exact(model, torch.randn(1, 3, 17, 13), options=sft.Options(tile=(5, None)))


def test_shared_weights_of_two_norms_get_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    model = _Residual(bias=True)
    for conv in model.convs[1:]:
        assert isinstance(conv, nn.Conv2d)
        conv.weight, conv.bias = model.convs[0].weight, model.convs[0].bias  # type: ignore[assignment]  # parameters
    assert_exact(model, torch.randn(1, 3, 17, 13), options=sft.Options(strategy="none"))


def test_tiny_variances_are_exact() -> None:
    torch.manual_seed(0)
    model = _Residual(eps=1e-12)
    for norm in model.norms:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_var is not None
        norm.running_var.fill_(1e-12)
        nn.init.constant_(norm.weight, 1e-6)
    assert_exact(model, torch.randn(1, 3, 17, 13), options=sft.Options(tile=(5, None)))


def test_statistics_may_change_between_calls() -> None:
    torch.manual_seed(0)
    model, x = _Residual().double(), torch.randn(1, 3, 17, 13, dtype=torch.float64)
    net: Any = sft.compile(copy.deepcopy(model), x.shape, budget="64MiB", options=sft.Options(tile=(5, None)))
    for factor in (1.0, 3.0):
        for each in (model, net):
            for buffer in (b for b in each.buffers() if b.is_floating_point()):
                buffer.mul_(factor)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_gradients_in_half_precision_are_more_accurate_than_of_single_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is rounded once; operators round the gradients of folded weights and biases, and then those of the operands."""
    together = _gradient_error()
    monkeypatch.setattr(lower_whole, "find_folded_norms", lambda scope: ())
    assert together < 0.95 * _gradient_error()


def _gradient_error() -> float:
    """Sum of relative errors of all gradients in bfloat16, over several random networks."""
    total = 0.0
    for seed in range(6):
        torch.manual_seed(seed)
        model, x = _Residual(bias=True, num_blocks=2).bfloat16(), torch.randn(1, 3, 24, 16).bfloat16()
        exact = copy.deepcopy(model).double()
        net: Any = sft.compile(model, x.shape, budget="64MiB", options=sft.Options(tile=(8, None)))
        net(x).float().square().sum().backward()
        exact(x.double()).square().sum().backward()
        for own, other in zip(model.parameters(), exact.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            total += float((own.grad.double() - other.grad).norm() / other.grad.norm())
    return total
