"""Schedules with copies to the host: exact, in the planned bytes on device and host, for every offloaded value and every prefetch."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sft
from sft.common.torch_internals import pytree
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.offload_moves import drop_idle_copies
from sft.planner.options import OFFLOAD_STRATEGIES
from sft.planner.projection import run_step
from sft.planner.search.published import smallest_schedule
from sft.planner.stages import StagedModel
from sft.runtime.moves import COPY_SIGNS, ScheduleOp, SegmentSchedule, parse_schedule
from sft.runtime.offload import OffloadedValue
from sft.runtime.simulated_machine import SimulatedMachine
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.simulate import simulate
from sft.torch_runtime.host.host_memory import HostSlabPool
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.deferred_copies import late_copies
from tests.helpers.exactness import assert_exact, assert_within_budget, gradient_errors
from tests.helpers.models import TinyUNet, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.problems import with_resources
from tests.helpers.stage_chains import MODELS, Normed, plain_plan, problem_of, staged_models, step

pytestmark = pytest.mark.usefixtures("without_proposals")

captures = one_capture_a_model("name", "strategy")

_SHAPE = (2, 3, 24, 20)


#: Each example plans and takes several steps.
_FEW = settings(max_examples=max(4, (settings.default or settings()).max_examples // 4))


@pytest.mark.parametrize(("name", "strategy"), [*((name, "offload-dp") for name in MODELS), ("normed", "vdnn"), ("unet", "offload-greedy")])
def test_published_placements_are_exact(name: str, strategy: str) -> None:
    model, options = seeded(MODELS[name]), sft.Options(strategy=strategy)
    least_bytes, plain = least_budget(model, _SHAPE, sft.Options(strategy=strategy)), plain_plan(model, _SHAPE)
    report = assert_exact(model, image(*_SHAPE), budget=least_bytes, options=options, input_grad=False, to_the_byte=True)
    assert report.plan.total_bytes == least_bytes <= 1.005 * plain.total_bytes
    assert report.plan.flops == plain.flops
    assert sft.Plan.from_json(report.plan.to_json()) == report.plan
    if name in ("unet", "normed"):
        assert least_bytes < plain.total_bytes
        assert report.plan.host_bytes >= plain.total_bytes - least_bytes


@pytest.mark.parametrize("strategy", OFFLOAD_STRATEGIES)
def test_budgets_of_the_errors_work_and_more_of_it_never_takes_longer(strategy: str) -> None:
    model = seeded(Normed)
    options = sft.Options(strategy=strategy, link_bandwidth=1e8)
    least_bytes, plain = least_budget(model, _SHAPE, sft.Options(strategy=strategy)), plain_plan(model, _SHAPE)
    with pytest.raises(sft.BudgetError, match=str(least_bytes)):
        sft.plan(model, _SHAPE, budget=least_bytes - 1, options=options)
    budgets = [least_bytes + (plain.total_bytes - least_bytes) * i // 2 for i in range(3)]
    plans = [sft.plan(model, _SHAPE, budget=budget, options=options) for budget in budgets]
    assert all(plan.total_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert plans[-1].host_bytes == 0 and not plans[-1].order
    assert all(plan.host_bytes > 0 for plan in plans[:2])


@pytest.fixture(scope="module")
def staged() -> dict[str, StagedModel]:
    return staged_models(MODELS, _SHAPE)


def _random_order(staged: StagedModel, seed: int, *, recomputes: bool) -> SegmentSchedule:
    """Random persistent schedule with random copies between the uses of values that may be offloaded."""
    rng = random.Random(seed)

    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return rng.choice([i, *range(i + 1, j)]), 0, 0

    moves = staged.segment_schedule(reversal(staged.chain, decide if recomputes else keep_all))
    region = staged.region
    lives = [
        (target, life) for target, lifetimes in region.liveness.value_lifetimes(moves).items() for life in lifetimes if life[0] < life[1]
    ]
    rng.shuffle(lives)
    copies: list[list[ScheduleOp]] = [[] for _ in range(len(moves) + 1)]

    def flat() -> SegmentSchedule:
        return tuple(each for place, group in enumerate(copies) for each in (*group, *moves[place : place + 1]))

    for target, (made, last) in lives[: rng.randint(1, 12)]:
        before = [list(group) for group in copies]
        places = sorted(rng.randint(made + 1, last) for _ in range(3))
        for place, kind in zip(places, COPY_SIGNS.values(), strict=True):
            is_value = not target.endswith("+")
            copies[place].append(ScheduleOp(kind, -1 if is_value else int(target[:-1]), value=target if is_value else ""))
        if replace(region, custom_schedule=flat()).liveness.copy_error() is not None:  # read in between
            copies[:] = before
    return flat()


@_FEW
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**20), recomputes=st.booleans())
def test_any_placement_is_exact(staged: dict[str, StagedModel], name: str, seed: int, recomputes: bool) -> None:
    """Also with every copy as late as permitted: no op reads a value before it has waited for it."""
    stages = staged[name]
    order = _random_order(stages, seed, recomputes=recomputes)
    model = seeded(MODELS[name])
    net: Any = sft.compile(model, _SHAPE, budget="4GiB", plan=_plan_with_order(model, order))
    assert net.plan.host_bytes > 0 or not any(move.is_copy for move in order)
    eager: Any = sft.compile(seeded(MODELS[name]), _SHAPE, budget="4GiB")  # plain, and with the same dropout
    x = image(*_SHAPE, seed=seed).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for again in range(2):
        with late_copies() if again else nullcontext():
            step(net, x, seed + again)
        step(eager, y, seed + again)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad) or not recomputes  # the same operations on the same numbers
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=key)
    for (key, buffer), other in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-10, atol=1e-10, msg=key)
    assert_within_budget(net, x.detach(), budget="4GiB", to_the_byte=True)
    with torch.random.fork_rng(devices=[]), late_copies():
        torch.manual_seed(seed)
        loss = sum(y.square().sum() for y in pytree.tree_leaves(net(x)))
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("forgotten", ["the copy back", "the copy to the host"])
def test_late_copies_detect_missing_waits(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, model = _offloading()
    x = image(*_SHAPE)
    with late_copies():
        step(net, x, 0)
        assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        if forgotten == "the copy back":
            monkeypatch.setattr("sft.runtime.offload.OffloadState.wait", lambda copies, machine, targets: None)
        else:  # its bytes are freed before they are on the host
            release = HostOffloader.release

            def hasty(copies: HostOffloader, copy: OffloadedValue) -> None:
                copy.offload_done = None
                release(copies, copy)

            monkeypatch.setattr(TorchMachine, "release", lambda machine, copy: hasty(machine.offloader, copy))
        step(net, x, 0)
        assert not all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def _plan_with_order(model: nn.Module, order: SegmentSchedule) -> sft.Plan:
    """Plan of the model's stages with that schedule."""
    plan = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="offload-dp"))
    assert not plan.order
    return sft.Plan.from_json(replace(plan, order=tuple(map(str, order))).to_json())


class _Noting(SimulatedMachine):
    """Simulated machine that records its copies and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.away: dict[str, int] = {}

    def offload(self, target: str, handles: Any) -> OffloadedValue:
        self.log.append(f">{target}")
        return super().offload(target, handles)

    def release(self, copy: OffloadedValue) -> None:
        before = self.memory.live_bytes
        super().release(copy)
        assert before - self.memory.live_bytes == copy.num_bytes > 0
        self.log.append(f"~{copy.target}")
        self.away[copy.target] = copy.num_bytes

    def prefetch(self, copy: OffloadedValue) -> None:
        before = self.memory.live_bytes
        super().prefetch(copy)
        assert self.memory.live_bytes - before == copy.num_bytes == self.away.pop(copy.target)
        self.log.append(f"<{copy.target}")


@_FEW
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**20))
def test_copies_and_their_positions_follow_the_order(staged: dict[str, StagedModel], name: str, seed: int) -> None:
    stages = staged[name]
    region = replace(stages.region, custom_schedule=_random_order(stages, seed, recomputes=True))
    machine = _Noting()

    class Watching:
        def __init__(self, index: int, segment: Any) -> None:
            self.index, self.segment = index, segment

        def __getattr__(self, key: str) -> Any:
            return getattr(self.segment, key)

        def forward(self, machine: Any, values: Any, *, keep: bool) -> Any:
            machine.log.append(f"F{self.index}")
            assert machine.away.keys().isdisjoint(set(region.reads[self.index]) - set(region.writes[self.index]))
            return self.segment.forward(machine, values, keep=keep)

        def backward(self, machine: Any, values: Any, saved: Any, grads: Any, *, consume: bool = True) -> None:
            machine.log.append(f"B{self.index}")
            assert machine.away.keys().isdisjoint({*self.segment.backward_reads(region.reads[self.index]), f"{self.index}+"})
            self.segment.backward(machine, values, saved, grads, consume=consume)

    watching = [Watching(i, segment) for i, segment in enumerate(region.segments)]
    run_step(stages.problem, replace(region, segments=watching), machine)
    idle = {f"B{i}" for i, choice in enumerate(stages.choices) if stages.problem.sized.requires_grad.isdisjoint(choice.nodes)}
    expected = [str(move).removesuffix("+") if not move.is_copy else str(move) for move in region.schedule if move.kind != "loss"]
    assert machine.log == [entry for entry in expected if entry not in idle]
    assert not machine.away
    assert machine.host_arena.allocate(1) == 0  # all of the slab is free again


def _offloading(name: str = "normed", *, training: bool = True) -> tuple[Any, nn.Module]:
    model = seeded(MODELS[name]).train(training)
    options = sft.Options(strategy="offload-dp")
    return sft.compile(model, _SHAPE, budget=least_budget(model, _SHAPE, options), options=options), model


def _slabs(net: Any) -> HostSlabPool:
    ready = next(reversed(net._sft_engine.plan_cache.prepared.values()))
    pool: HostSlabPool | None = ready.resources.slab_pool
    assert pool is not None
    return pool


@pytest.mark.usefixtures("frozen_objects")
def test_a_graph_may_be_retained_and_two_steps_interleaved() -> None:
    model = seeded(Normed).eval()
    options = sft.Options(strategy="offload-dp")
    tight = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options(strategy="offload-dp")), options=options)
    net: Any = sft.compile(model, _SHAPE, budget="4GiB", options=options, plan=tight)  # a graph that is retained needs more
    assert net.plan.host_bytes == tight.host_bytes > 0
    plain = seeded(MODELS["normed"]).eval()
    x, z = (image(*_SHAPE, seed=seed).requires_grad_() for seed in (1, 2))
    y, w = net(x).square().sum(), net(z).square().sum()
    y.backward(retain_graph=True)
    w.backward()
    expected = torch.autograd.grad(plain(z).square().sum(), z)[0]
    assert z.grad is not None
    torch.testing.assert_close(z.grad, expected, rtol=1e-10, atol=1e-12)
    y.backward(retain_graph=True)
    y.backward()
    expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * expected, rtol=1e-10, atol=1e-12)
    del y, w
    gc.collect()
    assert len(_slabs(net)._free) == 2  # both are back
    net(x).square().sum().backward()
    assert len(_slabs(net)._free) == 2


@pytest.mark.usefixtures("frozen_objects")
def test_a_slab_is_returned_after_every_end_of_a_step() -> None:
    net, _ = _offloading()
    x = image(*_SHAPE)
    y = net(x)
    assert len(_slabs(net)._free) == 0
    del y  # no backward pass
    gc.collect()
    assert len(_slabs(net)._free) == 1
    before = {key: buffer.clone() for key, buffer in net.named_buffers()}
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.torch_runtime.host.offload.HostOffloader.release", _raise)
        with pytest.raises(OSError, match="torn"):
            net(x)
    gc.collect()
    assert len(_slabs(net)._free) == 1
    assert all(torch.equal(before[key], buffer) for key, buffer in net.named_buffers())
    with pytest.MonkeyPatch.context() as patches:
        y = net(x).sum()
        before = {key: buffer.clone() for key, buffer in net.named_buffers()}
        assert len(_slabs(net)._free) == 0
        patches.setattr("sft.torch_runtime.host.offload.HostOffloader.prefetch", _raise)
        with pytest.raises(OSError, match="torn"):
            y.backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[key], buffer) for key, buffer in net.named_buffers())
    gc.collect()  # the traceback referred to the frames of the pass
    assert len(_slabs(net)._free) == 1
    y = net(x).sum()  # the same slab
    assert len(_slabs(net)._free) == 0
    y.backward()
    assert len(_slabs(net)._free) == 1


def _raise(*arguments: Any) -> None:
    raise OSError("torn")


def test_two_models_take_turns() -> None:
    nets, plain = (
        [_offloading(name, training=False)[0] for name in ("unet", "normed")],
        [seeded(MODELS[name]) for name in ("unet", "normed")],
    )
    x = image(*_SHAPE)
    losses = [sum(y.square().sum() for y in pytree.tree_leaves(net(x))) for net in nets]  # both forward passes, then both backward passes
    for loss in losses:
        loss.backward()
    for net, model in zip(nets, plain, strict=True):
        assert net.plan.host_bytes
        sum(y.square().sum() for y in pytree.tree_leaves(model.eval()(x))).backward()
        grads = [{key: parameter.grad for key, parameter in each.named_parameters()} for each in (net, model)]
        assert max(gradient_errors(*grads).values()) <= 1e-10


def test_copies_are_hidden_where_the_link_is_fast_enough() -> None:
    model = seeded(TinyUNet)
    budget = least_budget(model, _SHAPE, sft.Options(strategy="offload-dp"))
    fast, slow = (
        sft.plan(model, _SHAPE, budget=budget, options=sft.Options(strategy="offload-dp", link_bandwidth=rate)) for rate in ("1TB", "1MB")
    )
    computing = sum(entry.estimated_seconds for entry in slow.timeline.entries if not entry.copied_bytes)
    assert fast.estimated_seconds < 1.01 * computing
    assert fast.timeline.idle_seconds <= 0.01 * computing
    assert slow.timeline.idle_seconds == pytest.approx(slow.estimated_seconds - computing)
    copied = [entry for entry in slow.timeline.entries if entry.copied_bytes]
    assert slow.estimated_seconds >= sum(entry.copied_bytes for entry in copied if entry.move[0] == ">") / 1e6
    assert {entry.move[0] for entry in copied} == {">", "<"}
    assert all(entry.estimated_seconds == pytest.approx(entry.copied_bytes / 1e6) for entry in copied)
    waited = [name for entry in slow.timeline.entries for name in entry.waits_for]
    assert sorted(waited) == sorted(entry.move[1:] for entry in copied if entry.move[0] == "<")
    assert "host" in slow.explain()


def test_the_timeline_of_a_plan_is_the_simulation_of_its_chain(staged: dict[str, StagedModel]) -> None:
    """With every value of the chain one of the model, both clocks give a step the same time."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Sigmoid()) for _ in range(5)))
    options = sft.Options(strategy="offload-dp", link_bandwidth=1e8)
    with pytest.MonkeyPatch.context() as patch:
        problem = with_resources(problem_of(model, _SHAPE, patch), link=DeviceRates("cpu").link(1e8))
    chained = StagedModel(problem, DeviceRates("cpu"))
    smallest = smallest_schedule(chained, "offload-dp")
    assert smallest.projection.host_bytes
    simulated = simulate(chained.chain, smallest.schedule, link=problem.resources.link)
    plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options(strategy="offload-dp")), options=options)
    assert plan.order == tuple(map(str, smallest.order))
    assert plan.estimated_seconds == pytest.approx(simulated.seconds, rel=0.02)


def test_a_budget_on_the_host_is_kept() -> None:
    model = seeded(Normed)
    least_bytes = least_budget(model, _SHAPE, sft.Options(strategy="offload-dp"))
    needed = sft.plan(model, _SHAPE, budget=least_bytes, options=sft.Options(strategy="offload-dp")).host_bytes
    options = sft.Options(strategy="offload-dp", host_budget=needed - 1)
    with pytest.raises(sft.BudgetError, match=rf"host_budget.*{needed} bytes"):
        sft.plan(model, _SHAPE, budget=least_bytes, options=options)
    middle = (least_bytes + plain_plan(model, _SHAPE).total_bytes) // 2
    assert 0 < sft.plan(model, _SHAPE, budget=middle, options=options).host_bytes < needed
    made = sft.plan(model, _SHAPE, budget=least_bytes, options=sft.Options(strategy="offload-dp", host_budget=needed))
    with pytest.raises(sft.BudgetError, match="host_budget"):
        sft.compile(model, _SHAPE, budget=least_bytes, plan=made, options=sft.Options(host_budget=1))


@pytest.mark.parametrize(
    "options",
    [{"host_budget": "much"}, {"link_bandwidth": 0}, {"link_bandwidth": "fast"}, {"host_budget": -1}, {"link_bandwidth": True}],
    ids=str,
)
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(sft.InputError, match=next(iter(options))):
        sft.Options(**options)


@pytest.mark.parametrize(
    ("copies", "problem"),
    [
        ({1: [">{0}"], 2: ["~{0}"]}, "which is on the host"),
        ({1: ["~{0}"]}, "not copied"),
        ({1: [">{0}"], 3: ["<{0}"]}, "not away"),
        ({0: [">{0}"]}, "absent, not here"),
        ({1: [">x"], 2: ["~x"], 3: ["<x"]}, "can be offloaded"),
        ({1: [">7+"]}, "only 2 segments"),
        ({1: [">"]}, "not an op"),
        ({2: [">{1}"], 3: ["~{1}"], 4: ["<{1}"]}, "can be offloaded"),
    ],
)
def test_orders_whose_copies_cannot_run_are_refused(copies: dict[int, list[str]], problem: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    plan = sft.plan(model, (1, 3, 16, 16), budget="1GiB", options=sft.Options(strategy="sqrt"))
    assert len(plan.segments) == 2
    cuts = [segment.nodes[-1] for segment in plan.segments]
    base = ["F0+", "F1+", "L", "B1", "B0"]
    order = [entry for place, move in enumerate(base) for entry in (*(c.format(*cuts) for c in copies.get(place, ())), move)]
    with pytest.raises(sft.InputError, match=problem):
        sft.compile(model, (1, 3, 16, 16), plan=replace(plan, order=tuple(order)))


def test_copies_that_would_be_idle_are_left_out(staged: dict[str, StagedModel]) -> None:
    unet = staged["unet"]
    plain = unet.segment_schedule(reversal(unet.chain, keep_all))
    target, ((made, last),) = next(
        (t, lives) for t, lives in unet.region.liveness.value_lifetimes(plain).items() if lives[0][1] < len(plain) - 2
    )
    move = ScheduleOp("offload", -1 if not target.endswith("+") else int(target[:-1]), value="" if target.endswith("+") else target)
    late = (*plain[: last + 1], move, replace(move, kind="release"), *plain[last + 1 :])
    never = (*plain[: made + 1], move, *plain[made + 1 :])
    unread = (*plain[: made + 1], move, *plain[made + 1 : last + 1], replace(move, kind="release"), *plain[last + 1 :])
    assert drop_idle_copies(unet.region, late) == drop_idle_copies(unet.region, never) == plain
    assert drop_idle_copies(unet.region, unread) == plain


def test_tiled_segments_may_leave_too() -> None:
    """States of strips are buffers that can be offloaded."""
    model = seeded(Normed)
    plan = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(tile=(8, None)))
    numbers = range(len(plan.segments))
    first = next(i for i in numbers if plan.segments[i].state_bytes)
    order = [
        *(f"F{i}+" for i in range(first + 1)),
        f">{first}+",
        f"~{first}+",
        *(f"F{i}+" for i in numbers if i > first),
        "L",
        *(f"B{i}" for i in reversed(numbers) if i > first),
        f"<{first}+",
        *(f"B{i}" for i in reversed(range(first + 1))),
    ]
    made = replace(plan, order=tuple(order))
    net: Any = sft.compile(model, _SHAPE, budget="4GiB", plan=made)
    assert net.plan.host_bytes > 0
    other: Any = sft.compile(seeded(Normed), _SHAPE, budget="4GiB", options=sft.Options(tile=(8, None)))
    x, y = (image(*_SHAPE).requires_grad_() for _ in range(2))
    step(net, x, 0)
    step(other, y, 0)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
    assert_within_budget(net, x.detach(), budget="4GiB")


def test_auto_selects_the_fastest_of_keeping_recomputing_and_copying() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.Sigmoid()) for i in range(6))).double()
    model.append(nn.Flatten())
    shape = (1, 3, 14, 12)
    budget = least_budget(model, shape, sft.Options(strategy="offload-dp"))
    fast, slow, none = (
        sft.plan(model, shape, budget=budget, options=sft.Options(host_budget=host, link_bandwidth=rate))
        for host, rate in (("1GiB", "1TB"), ("1GiB", 1.0), (0, None))
    )
    assert fast.host_bytes > 0 and fast.redundancy < none.redundancy
    assert slow.host_bytes == none.host_bytes == 0 and slow.redundancy == none.redundancy > 1
    net = sft.compile(model, shape, budget=budget, options=sft.Options(host_budget="1GiB", link_bandwidth="1TB"))
    assert net.plan == fast
    assert_within_budget(net, image(*shape), budget=budget, input_grad=False)


def test_inference_copies_nothing() -> None:
    net, model = _offloading("residual")
    with torch.no_grad():
        x = image(*_SHAPE)
        assert net.plan_for(x).host_bytes == 0
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_a_dry_run_copies_nothing_and_counts_the_same() -> None:
    model, options = seeded(Normed).to("meta"), sft.Options(strategy="offload-dp")
    net: Any = sft.compile(model, _SHAPE, budget=least_budget(model, _SHAPE, options), options=options)
    x = torch.empty(_SHAPE, dtype=torch.float64, device="meta")
    with sft.measure_peak("meta") as peak:
        y = net(x.clone())
        y.backward(torch.ones_like(y))
    assert net.plan.host_bytes > 0
    assert 0.99 * net.plan.projected_peak_bytes - 2**16 <= peak.num_bytes <= net.plan.projected_peak_bytes


def test_orders_as_text() -> None:
    text = ("F0+", ">conv", "F1+", "~conv", "L", "B1", "<conv", "B0")
    assert tuple(map(str, parse_schedule(text, 2))) == text
