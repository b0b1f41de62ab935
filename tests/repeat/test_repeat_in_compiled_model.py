"""Repeated blocks inside a compiled model: equal to the unrolled model, within the planned bytes and schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.nn import Repeat
from sft.repeat.calls import site_seed
from tests.helpers.exactness import assert_exact, assert_within_budget, gradient_errors, relative_error
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

pytestmark = pytest.mark.usefixtures("without_proposals")

_SHAPE = (1, 3, 65, 61)
#: Each example captures a model.
_FEW = settings(max_examples=max(6, (settings.default or settings()).max_examples // 4))


class Residual(nn.Module):
    """A pre-activation block with running statistics."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(torch.relu(self.norm(x)))
        return out


def _tanh() -> nn.Module:
    """A block with a backward that reads its output."""
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())


def _model(num_blocks: int = 12, budget: int | str | None = None, block: Callable[[], nn.Module] = Residual, strategy: Any = "auto") -> Any:
    """A stem at full size, blocks at an eighth of it, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 5, stride=4, padding=2),
        Repeat(block, num_blocks, budget=budget, strategy=strategy),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    ).double()


def _unrolled(model: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(child.unstacked() if isinstance(child, Repeat) else copy.deepcopy(child) for child in model.children()))


def _stacked_grads(unrolled: nn.Module, path: str, name: str) -> Tensor:
    return torch.stack([block.get_parameter(name).grad for block in unrolled.get_submodule(path).children()])  # type: ignore[misc]  # they have one


@pytest.mark.parametrize("block", [Residual, _tanh])
def test_results_are_those_of_the_unrolled_model(block: Callable[[], nn.Module]) -> None:
    model = seeded(lambda: _model(12, "160KiB", block))
    eager = _unrolled(model)
    net = sft.compile(model, _SHAPE, budget=least_budget(model, image(*_SHAPE).requires_grad_()) + 50_000)
    for seed in range(2):
        x, y = (image(*_SHAPE, seed=seed).requires_grad_() for _ in range(2))
        net.zero_grad()
        eager.zero_grad()
        ours, theirs = net(x), eager(y)
        direction = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(seed))
        ours.backward(direction)
        theirs.backward(direction)
        assert relative_error(ours, theirs) <= 1e-11
        assert x.grad is not None
        assert y.grad is not None
        assert relative_error(x.grad, y.grad) <= 1e-10
        expected = {
            name: _stacked_grads(eager, "4", name.removeprefix("4.block.")) if name.startswith("4.") else eager.get_parameter(name).grad
            for name, _ in model.named_parameters()
        }
        errors = gradient_errors({name: parameter.grad for name, parameter in net.named_parameters()}, expected)
        assert max(errors.values()) <= 1e-10, errors
        for name, buffer in net[4].block.named_buffers():
            torch.testing.assert_close(
                buffer, torch.stack([child.get_buffer(name) for child in eager[4].children()]), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_model_fits_its_budget_with_blocks_that_have_their_own(share: float) -> None:
    model = seeded(lambda: _model(12, "160KiB"))
    least, plain = least_budget(model, _SHAPE), sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="none")).total_bytes
    report = assert_exact(model, image(*_SHAPE), budget=int(least + share * (plain - least)), input_grad=False)
    assert any("12 blocks" in note and "recomputations" in note for note in report.plan.notes)
    if share < 1:
        assert report.plan.segments[-1].mode == "whole" or "tiled" in {segment.mode for segment in report.plan.segments}
    assert report.plan.repeat_budgets == ()


def test_blocks_without_a_budget_follow_that_of_the_model() -> None:
    shape = (1, 3, 33, 33)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), Repeat(Residual, 40), nn.AdaptiveAvgPool2d(1)).double())
    plain = sft.plan(model, shape, budget="4GiB", options=sft.Options(strategy="none"))
    assert plain.repeat_budgets == ()
    least = least_budget(model, shape)
    assert least < 0.4 * plain.total_bytes
    flops = []
    for budget in (least, (least + plain.total_bytes) // 2):
        report = assert_exact(model, image(*shape), budget=budget, input_grad=False)
        assert len(report.plan.repeat_budgets) == 1
        flops.append(report.plan.redundancy)
        again = sft.Plan.from_json(report.plan.to_json())
        assert sft.plan(copy.deepcopy(model), shape, budget=budget, plan=again).segments == report.plan.segments
    assert flops[0] > flops[1] > 1.0


@_FEW
@given(
    num_blocks=st.integers(1, 14),
    strategy=st.sampled_from(["auto", "none", "revolve", "bisect", "optimal"]),
    block=st.sampled_from([Residual, _tanh]),
    size=st.tuples(st.integers(1, 2), st.integers(17, 40), st.integers(17, 40)),
    rows=st.one_of(st.none(), st.integers(3, 20)),
    spare=st.floats(0, 1),
    training=st.booleans(),
)
def test_any_schedule_is_exact(
    num_blocks: int,
    strategy: str,
    block: Callable[[], nn.Module],
    size: tuple[int, int, int],
    rows: int | None,
    spare: float,
    training: bool,
) -> None:
    make = seeded(lambda: Repeat(block, num_blocks, strategy=strategy)).double().train(training)  # type: ignore[arg-type]  # one of them
    x = torch.zeros(size[0], 4, (size[1] + 3) // 4, (size[2] + 3) // 4, dtype=torch.float64, requires_grad=True)
    most = make.plan_for(x).projected_peak_bytes
    try:
        least = Repeat(block, num_blocks, budget=1, strategy=strategy).double().plan_for(x).projected_peak_bytes  # type: ignore[arg-type]
    except sft.BudgetError as error:
        least = error.needed_bytes
    model = seeded(lambda: _model(num_blocks, int(least + spare * max(0, most - least)), block, strategy)).train(training)
    options = sft.Options() if rows is None else sft.Options(tile=(rows, None))
    assert_exact(model, image(size[0], 3, *size[1:]), options=options)


def test_blocks_run_by_their_schedule_and_a_stage_of_them_may_run_again() -> None:
    model = seeded(lambda: _model(12, "160KiB"))
    executed: list[str] = []
    model[4].trace = executed.append
    net = sft.compile(model, _SHAPE, budget="4GiB")
    x = image(*_SHAPE).requires_grad_()
    plan = model[4].plan_for(model[:4](x))
    executed.clear()
    net(x).sum().backward()
    assert executed == [str(operation) for operation in plan.operations if operation.kind != "loss"]
    assert plan.num_forwards > 12
    made = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="optimal"))
    (own,) = [i for i, segment in enumerate(made.segments) if any(name.startswith("sft_repeat") for name in segment.nodes)]
    count = len(made.segments)
    forward = [f"F{i}" if i == own else f"F{i}+" for i in range(count)]
    back = [move for i in reversed(range(count)) for move in ([f"F{i}+", f"B{i}"] if i == own else [f"B{i}"])]
    again = replace(made, order=(*forward, "L", *back))
    net = sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=again)
    assert net.plan.order == again.order
    _same_step(net, model)
    assert_within_budget(net, image(*_SHAPE), budget="4GiB")


def test_states_of_blocks_wait_on_the_host_between_the_passes() -> None:
    model = seeded(lambda: _model(12, "160KiB"))
    made = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="optimal"))
    (own,) = [i for i, segment in enumerate(made.segments) if any(name.startswith("sft_repeat") for name in segment.nodes)]
    count = len(made.segments)
    forward = [move for i in range(count) for move in ([f"F{i}+", f">{i}+", f"~{i}+"] if i == own else [f"F{i}+"])]
    back = [move for i in reversed(range(count)) for move in ([f"<{i}+", f"B{i}"] if i == own else [f"B{i}"])]
    net = sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=replace(made, order=(*forward, "L", *back)))
    assert net.plan.host_bytes > 0
    _same_step(net, model)
    assert_within_budget(net, image(*_SHAPE), budget="4GiB")
    x = image(*_SHAPE).requires_grad_()
    loss = net(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def _same_step(net: Any, eager: Any) -> None:
    """Compare a step of both models, from equal parameters."""
    x, y = (image(*_SHAPE).requires_grad_() for _ in range(2))
    net.zero_grad()
    eager.zero_grad()
    ours, theirs = net(x), eager(y)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    assert relative_error(ours, theirs) <= 1e-11
    grads = ({name: p.grad for name, p in each.named_parameters()} for each in (net, eager))
    assert max(gradient_errors(*grads).values()) <= 1e-10
    for buffer, other in zip(net.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-12, atol=1e-12)


def test_several_repetitions_and_one_that_is_called_twice() -> None:
    def make() -> nn.Module:
        blocks = Repeat(Residual, 4, budget="96KiB")
        modules = (nn.Conv2d(3, 4, 3, stride=4), blocks, nn.ReLU(), blocks, Repeat(_tanh, 3), nn.AdaptiveAvgPool2d(2))
        return nn.Sequential(*modules)

    model = seeded(make)
    assert_exact(model, image(*_SHAPE))
    assert_exact(model, image(*_SHAPE), budget=least_budget(model.double(), _SHAPE), input_grad=False)


class Tokens(nn.Module):
    """Attention over all tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        out: Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return out


class Patches(nn.Module):
    """A vision transformer: patches of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 8, stride=8))
        self.blocks, self.head = Repeat(Tokens, 7), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.blocks(self.stem(x).flatten(2).transpose(1, 2))
        out: Tensor = self.head(tokens.mean(1))
        return out


def test_tokens_of_an_image_whose_stem_runs_in_strips() -> None:
    model = seeded(Patches).double()
    shape = (2, 3, 64, 56)
    plain = sft.plan(model, shape, budget="4GiB", options=sft.Options(strategy="none")).total_bytes
    report = assert_exact(model, image(*shape), budget=plain // 2)
    assert report.plan.segments[0].mode == "tiled"


@pytest.mark.parametrize("axes", [1, 3])
def test_signals_and_volumes(axes: int) -> None:
    conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1]

    def block() -> nn.Module:
        return nn.Sequential(conv(4, 4, 3, padding=1), norm(4), nn.ReLU())

    model = seeded(lambda: nn.Sequential(conv(2, 4, 3, stride=2), Repeat(block, 9, budget="600KiB"), conv(4, 2, 3)))
    assert_exact(model, image(2, 2, *((999,), (), (19, 15, 11))[axes - 1]))


def test_masks_in_blocks_follow_the_seed_of_the_call() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3))

    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Repeat(block, 6, budget="1400KiB"), nn.Conv2d(4, 1, 1)).double())
    eager: Any = copy.deepcopy(model)
    net: Any = sft.compile(model, _SHAPE, budget="3MiB")
    assert net.plan.redundancy > 1  # a recomputation draws the same masks
    with pytest.MonkeyPatch.context() as patches:
        drawn: list[int] = []

        def seed() -> int:
            drawn.append(7)
            return 7

        patches.setattr("sft.api.engine.draw_seed", seed)
        patches.setattr("sft.nn.repeat.draw_seed", lambda: site_seed(7, 0))
        _same_step(net, eager)
        assert drawn == [7]
    net.zero_grad()
    assert_within_budget(net, image(*_SHAPE), budget="3MiB")


def test_the_projection_of_repeated_blocks_counts_the_random_numbers_of_masks() -> None:
    for drop in (nn.Dropout(0.3), nn.Dropout2d(0.3)):

        def block(drop: nn.Module = drop) -> nn.Module:
            return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), copy.deepcopy(drop))

        blocks = Repeat(block, 5).double()
        x = image(1, 4, 40, 30).requires_grad_()
        with sft.measure_peak("cpu") as peak:
            y = blocks(x)
            y.backward(torch.ones_like(y))
        assert blocks.plan_for(x).projected_peak_bytes == peak.num_bytes


def test_modes_sizes_and_copies() -> None:
    model = seeded(lambda: _model(5)).float()
    net = sft.compile(model, (1, 3, None, None), budget="8MiB")
    x = torch.randn(_SHAPE)
    captured = net._sft_engine.plan_cache.captures
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(net.eval()(x), model(x), rtol=0.02, atol=0.02)  # the stem's norm is folded
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))
        torch.testing.assert_close(net(x[..., :40]), model(x[..., :40]))
    count = len(captured)
    model(x)  # earlier calls of the blocks alone do not affect the model
    net(x)
    assert len(captured) == count
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    frozen = seeded(lambda: _model(5))
    frozen[4].block.conv.requires_grad_(False)
    assert_exact(frozen, image(*_SHAPE))
    frozen[:4].requires_grad_(False)
    assert_exact(frozen, image(*_SHAPE), input_grad=False)
    with torch.device("meta"):
        on_meta = _model(5)
    assert sft.plan(on_meta, _SHAPE, budget="8MiB").segments == sft.plan(frozen.requires_grad_(True), _SHAPE, budget="8MiB").segments


def test_a_pass_that_fails_changes_nothing() -> None:
    model = seeded(lambda: _model(6))
    net = sft.compile(model, _SHAPE, budget="4GiB")
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    calls = 0

    def failing(operation: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError("torn")

    model[4].trace = failing
    net = sft.compile(model, _SHAPE, budget="4GiB")
    with pytest.raises(OSError, match="torn"):
        net(image(*_SHAPE))
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
    calls = -100
    y = net(image(*_SHAPE)).sum()
    calls = 0
    with pytest.raises(OSError, match="torn"):
        y.backward()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_refusals_name_the_blocks_and_a_remedy() -> None:
    with pytest.raises(sft.UnsupportedError, match=r"4: repeat: .*must return the shape and dtype of its input"):
        sft.compile(_model(2, block=lambda: nn.Conv2d(4, 5, 1)), _SHAPE)
    with pytest.raises(sft.BudgetError, match=r"4: repeat: 12 repeated blocks need .* Raise the budget to [\d.]+ \w+ \(\d+ bytes\)"):
        sft.compile(_model(12, "1KiB"), _SHAPE)
    with pytest.raises(sft.BudgetError, match="leave out the budget of repeated blocks"):
        sft.compile(_model(12, "160KiB"), _SHAPE, budget="50KiB")
    streamed = _model(3)
    net = sft.compile(streamed, _SHAPE)
    streamed[4].stream("1MiB")
    calls: list[Callable[[], Any]] = [lambda: sft.compile(streamed, _SHAPE), lambda: net(image(*_SHAPE))]
    for call in calls:
        with pytest.raises(sft.UnsupportedError, match=r"4: repeat: it streams its blocks.*compile the parts before and after it"):
            call()
    streamed[4].close()
    net(image(*_SHAPE))
    report = sft.check(_model(3), _SHAPE)
    assert report.ok
    assert any(line.startswith("4: repeat: runs its blocks") for line in report.whole_reasons)
    with pytest.raises(sft.UnsupportedError, match=r"torch\.export"):
        torch.export.export(_model(3), (image(*_SHAPE),))
