"""Well-known networks are exact at random sizes, strip heights, state intervals, batch tiles and budgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sft
from examples.models import darknet19, freeze_norm, resnet18, resnet50, unet, vgg16
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact, plan_of
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

captures = one_capture_a_model("share")

_MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # name: builder, smallest extent, extents are multiples of
    "vgg16": (lambda: vgg16(3, width=2), 40, 1),
    "vgg16_bn": (lambda: freeze_norm(vgg16(3, width=2, batch_norm=True)), 40, 1),
    "darknet19": (lambda: freeze_norm(darknet19(3, width=2)), 40, 1),
    "resnet18": (lambda: freeze_norm(resnet18(3, width=2)), 33, 1),
    "resnet50": (lambda: freeze_norm(resnet50(3, width=2)), 33, 1),
    "unet": (lambda: freeze_norm(unet(2, levels=5, width=2)), 16, 16),
}


@st.composite
def _tilings(draw: st.DrawFn, multiple: int, smallest: int) -> tuple[tuple[int, int, int, int], sft.Options]:
    def extent() -> int:
        return multiple * draw(st.integers(-(-smallest // multiple), -(-96 // multiple)))

    shape = (draw(st.integers(1, 2)), 3, extent(), extent())
    halo = draw(st.sampled_from(["carry", "carry", "recompute"]))
    rows = draw(st.one_of(st.just(1), st.integers(1, shape[2]))) if halo == "carry" else draw(st.integers(-(-shape[2] // 2), shape[2]))
    options = sft.Options(
        tile=(rows, draw(st.one_of(st.none(), st.integers(-(-shape[3] // 3), shape[3])))),
        halo=halo,
        state_every=draw(st.one_of(st.none(), st.integers(1, 7))),
        batch_tile=draw(st.one_of(st.none(), st.integers(1, 2))),
    )
    return shape, options


@pytest.mark.parametrize("name", _MODELS)
def test_any_tiling_is_exact(name: str) -> None:
    build, smallest, multiple = _MODELS[name]
    model = seeded(build)

    @settings(max_examples=max(2, settings().max_examples // 50))
    @given(case=_tilings(multiple, smallest), train_input=st.booleans())
    def check(case: tuple[tuple[int, int, int, int], sft.Options], train_input: bool) -> None:
        shape, options = case
        assert_exact(model, image(*shape), options=options, input_grad=train_input)

    check()


#: Shares between the smallest budget and plain PyTorch's; one for each network, since searches take long.
_SHARES = {"vgg16": 0.0, "vgg16_bn": 0.3, "darknet19": 0.3, "resnet18": 0.0, "resnet50": 0.1, "unet": 0.0}


@pytest.mark.parametrize(("name", "share"), _SHARES.items())
def test_any_budget_is_exact_and_kept(name: str, share: float) -> None:
    """From the smallest budget to plain PyTorch's memory: the plan fits, and is exact."""
    build, _, _ = _MODELS[name]
    model = seeded(build)
    shape = (1, 3, 160, 96)
    smallest = least_budget(model, shape)
    plain = sft.plan(model, shape, budget="8GiB", options=sft.Options(strategy="none")).total_bytes
    assert smallest < plain
    budget = int(smallest + share * (plain - smallest))
    report = assert_exact(model, image(*shape), budget=budget, input_grad=False)
    assert report.plan.total_bytes <= budget
    assert any(segment.mode == "tiled" for segment in report.plan.segments)


@pytest.mark.parametrize("name", _MODELS)
def test_all_states_kept_costs_one_forward_pass(name: str) -> None:
    build, _, _ = _MODELS[name]
    model = seeded(build)
    net = sft.compile(model, (1, 3, 96, 64), options=sft.Options(tile=(32, None), state_every=1))
    plan = plan_of(net, image(1, 3, 96, 64))
    with torch.no_grad():
        forward_flops = plan_of(net, image(1, 3, 96, 64)).flops
    assert plan.plain_flops < plan.flops <= plan.plain_flops + forward_flops
