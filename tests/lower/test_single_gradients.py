"""Gradients of half-precision parameters: a single contribution has no accumulator in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft

_SHAPE = (2, 3, 24, 16)


class _Network(nn.Module):
    """Two convolutions, of one weight if ``is_shared``, with a norm and a bias that is added by hand."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third = self.second if is_shared else nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.shift = nn.Parameter(torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(torch.relu(self.second(torch.relu(self.norm(self.first(x)))))) + self.shift
        return y


def _step(net: Any, x: Tensor) -> Tensor:
    net.zero_grad(set_to_none=True)
    y: Tensor = net(x)
    y.float().square().sum().backward()
    return y.detach()


def _region(net: Any, x: Tensor) -> Any:
    _step(net, x)
    return next(iter(net._sft_engine.plan_cache.prepared.values())).region


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_untiled_step_has_the_gradients_of_eager_pytorch(is_shared: bool) -> None:
    torch.manual_seed(0)
    model, x = _Network(is_shared=is_shared).bfloat16(), torch.randn(_SHAPE).bfloat16()
    expected = _step(model, x)
    reference = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = _step(sft.compile(model, _SHAPE, budget="1GiB", options=sft.Options(strategy="none")), x)
    pairs = {"output": (ours, expected)} | {name: (parameter.grad, reference[name]) for name, parameter in model.named_parameters()}
    for name, (mine, truth) in pairs.items():
        assert mine is not None and truth is not None and mine.dtype == torch.bfloat16
        assert float((mine.float() - truth.float()).norm()) <= 2e-2 * float(truth.float().norm()), name


@pytest.mark.parametrize(
    ("options", "is_shared", "sums"),
    [
        pytest.param({"strategy": "none"}, False, set(), id="untiled"),
        pytest.param({"strategy": "none"}, True, {"third.weight"}, id="untiled, shared weight"),
        # Scale and shift of the norm are computed once for all strips.
        pytest.param({"tile": (8, None)}, False, {"first.weight", "second.weight", "third.weight", "shift"}, id="strips"),
    ],
)
def test_only_sums_are_accumulated_in_fp32(options: dict[str, Any], is_shared: bool, sums: set[str]) -> None:
    model = _Network(is_shared=is_shared).bfloat16()
    net = sft.compile(model, _SHAPE, budget="1GiB", options=sft.Options(**options))
    region = _region(net, torch.randn(_SHAPE).bfloat16())
    dtypes = {node.target: region.grad_dtypes[node.name] for node in region.graph.nodes if node.kind == "parameter"}
    assert {target for target, dtype in dtypes.items() if dtype == torch.float32} == sums
