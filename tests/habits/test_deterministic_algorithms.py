"""``torch.use_deterministic_algorithms``: plans stay in strips on GPUs, and every sum has an order. The CPU stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.analysis.frontend.switched_settings import needs_deterministic_sums
from sft.analysis.frontend.torch_patches import apply_patches
from tests.helpers.exactness import assert_exact
from tests.helpers.models import seeded


def _flat() -> nn.Module:
    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), up, nn.ReplicationPad2d(1), nn.Conv2d(4, 2, 3))


def _deep() -> nn.Module:
    up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False)
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.MaxPool3d(3, 2, 1), nn.ReLU(), up, nn.Conv3d(3, 2, 3))


#: Operators with derivatives that add in any order on GPUs, by a substring of their name.
_UNORDERED = ("upsample_bilinear2d_backward", "upsample_trilinear3d_backward", "max_pool3d_with_indices_backward")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _functions(net: object) -> set[str]:
    ready = next(iter(net._sft_engine.plan_cache.prepared.values()))  # type: ignore[attr-defined]
    return {
        str(each.function) for segment in ready.region.segments for program in segment.lowered_programs for each in program.instructions
    }


@pytest.mark.parametrize(("make", "shape"), [(_flat, (1, 3, 1024, 256)), (_deep, (1, 1, 128, 32, 32))])
@pytest.mark.usefixtures("deterministic")
def test_operators_are_captured_and_not_their_substitutes_on_gpus(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = make()
    plan = sft.plan(model, shape, budget="1GiB", options=sft.Options(tile=(8, None)))
    names = [name for segment in plan.segments if segment.mode == "tiled" for name in segment.nodes]
    assert len(names) == len(list(model.children()))
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(("make", "shape"), [(_flat, (2, 3, 20, 14)), (_deep, (2, 1, 21, 10, 12))])
@pytest.mark.parametrize("tile", [None, (4, None), (5, 6)])
@pytest.mark.usefixtures("deterministic")
def test_sums_have_an_order(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tile: tuple[int, int | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.api.call_signature.needs_deterministic_sums", lambda _device: torch.are_deterministic_algorithms_enabled())
    options = sft.Options(strategy="none") if tile is None else sft.Options(tile=tile)
    model, x = seeded(make), torch.randn(shape, dtype=torch.float64)
    for layout in (torch.contiguous_format, torch.channels_last if x.dim() == 4 else torch.channels_last_3d):
        assert_exact(model, x.to(memory_format=layout), budget="1GiB", options=options, steps=1)
    net = sft.compile(model, shape, budget="1GiB", options=options)
    net(x.clone().requires_grad_()).sum().backward()
    functions = _functions(net)
    assert functions and not any(name in function for name in _UNORDERED for function in functions)
    # Without the setting PyTorch's derivatives run, in another plan.
    torch.use_deterministic_algorithms(False)
    net = sft.compile(model, shape, budget="1GiB", options=options)
    net(x.clone().requires_grad_()).sum().backward()
    assert tile == (5, 6) or any(name in function for name in _UNORDERED for function in _functions(net))


def test_a_change_of_the_wish_plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.call_signature.needs_deterministic_sums", lambda _device: torch.are_deterministic_algorithms_enabled())
    net: Any = sft.compile(seeded(_flat), (1, 3, 16, 12), budget="1GiB")
    x = torch.randn(1, 3, 16, 12, dtype=torch.float64)
    net(x)
    count = len(net._sft_engine.plan_cache.prepared)
    with torch.no_grad():
        torch.use_deterministic_algorithms(True)
        try:
            with torch.enable_grad():
                net(x)
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(net._sft_engine.plan_cache.prepared) == count + 1


def test_only_other_devices_than_the_cpu_need_it() -> None:
    assert not needs_deterministic_sums(torch.device("meta"))
    torch.use_deterministic_algorithms(True)
    try:
        assert needs_deterministic_sums(torch.device("meta")) and not needs_deterministic_sums(torch.device("cpu"))
        with apply_patches("deterministic_algorithms"):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
