"""Loss scaling: gradients are unscaled and checked with one wait for the device in a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sft
from sft.optim.loss_scale import LossScale, all_true, gradient_norms
from tests.helpers.exactness import assert_within_budget
from tests.helpers.fake_cuda import fake_cuda, observed
from tests.helpers.fake_cuda_steps import gpu_steps
from tests.helpers.models import image, seeded
from tests.helpers.streamed_weights import STREAM, Vgg


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float16, torch.float64, torch.float32], [torch.bfloat16, torch.float16]])
@pytest.mark.parametrize("wrong", [None, math.inf, math.nan])
def test_gradients_are_unscaled_and_checked(dtypes: list[torch.dtype], wrong: float | None) -> None:
    scale = LossScale(4.0)
    grads = [torch.linspace(-1, 1, 7).to(dtypes[i % len(dtypes)]) for i in range(5)]
    expected = [grad.clone().mul_(0.25) for grad in grads]
    if torch.float64 in dtypes:
        grads[1].fill_(1e300)  # finite, though not in float32
        expected[1].fill_(1e300).mul_(0.25)
    if wrong is not None:
        grads[3][2] = expected[3][2] = wrong
    flag = scale.unscale([grads[0], *grads, None, torch.empty(0)])  # tied: one tensor twice
    assert all(torch.equal(ours, theirs) or wrong is not None for ours, theirs in zip(grads, expected, strict=True))
    assert torch.equal(grads[0], expected[0])
    assert all_true([None, flag]) == (wrong is None)
    assert LossScale(None).unscale(grads) is None and all_true([None])


def test_a_check_waits_once_for_the_device() -> None:
    with fake_cuda() as gpu:
        grads = [gpu.adopt(torch.full((3,), 2.0)) for _ in range(40)]
        with observed(gpu):
            flags = [LossScale(2.0).unscale(grads[start : start + 10]) for start in range(0, 40, 10)]
            assert not gpu.scalar_reads
            assert all_true(flags) and len(gpu.scalar_reads) == 1
            assert gradient_norms(grads) == [math.sqrt(3)] * 40 and len(gpu.scalar_reads) == 2


@pytest.mark.parametrize("settings", [{}, {"two_phase": True}, {"max_norm": 0.1}])
def test_streamed_updates_wait_once_for_the_device(settings: dict[str, Any]) -> None:
    """The flags of all parameters' gradients are read by ``step``, not one by one in the backward pass."""
    net: Any = sft.compile(seeded(Vgg), (2, 3, 20, 16), options=STREAM)
    optimizer = sft.StreamedOptimizer(net, "sgd", lr=0.1, loss_scale="dynamic", **settings)
    x = image(2, 3, 20, 16)
    net.plan_for(x)
    for number, factor in enumerate((1.0, math.inf, 1.0)):
        before = [param.detach().clone() for param in net.parameters()]
        with gpu_steps() as gpu:
            (optimizer.scale(net(x).sum()) * factor).backward()
            assert not gpu.scalar_reads
            with observed(gpu):
                optimizer.step()
            assert len(gpu.scalar_reads) <= 2 and not gpu.checker.races
        assert optimizer.last_step_skipped == (number == 1)
        assert any(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True)) == (number == 1)


def test_checks_are_in_the_projected_bytes() -> None:
    net: Any = sft.compile(seeded(Vgg), (2, 3, 20, 16), options=STREAM)
    optimizer = sft.StreamedOptimizer(net, "adamw", lr=0.1, loss_scale="dynamic")
    for _ in range(2):
        assert_within_budget(net, image(2, 3, 20, 16), budget="11GiB")
        optimizer.step()
