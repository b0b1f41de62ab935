"""Streamed weights of a compiled model: the same values in the planned bytes, for every plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.runtime.moves import parse_schedule
from sft.runtime.weight_prefetch import (
    GradientTransfer,
    StreamedWeights,
    WeightPrefetcher,
    weights_completed_per_segment,
    weights_read_per_op,
)
from sft.torch_runtime.streamed_parameters import StreamedParameters
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.stage_chains import Normed
from tests.helpers.streamed_weights import (
    MODELS,
    SHAPE,
    STREAM,
    Mlp,
    TwoHeads,
    Vgg,
    x_of,
)

captures = one_capture_a_model("options")


@pytest.mark.parametrize("name", MODELS)
def test_streamed_weights_are_exact_to_the_byte(name: str) -> None:
    report = assert_exact(seeded(MODELS[name]), x_of(name), options=STREAM, to_the_byte=name != "unet")
    plan = report.plan
    assert plan.streamed_weights == sum(1 for _ in seeded(MODELS[name]).parameters())
    assert 0 < plan.weights_peak_bytes <= plan.projected_peak_bytes
    assert "streamed" in plan.explain()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg", {"tile": (4, None)}),
        ("norms", {"tile": (3, 7)}),
        ("unet", {"tile": (4, None), "state_every": 2}),
        ("shared", {"strategy": "revolve"}),
        ("shared", {"strategy": "optimal"}),
        ("residual", {"strategy": "offload-dp", "host_budget": "1GiB"}),
        ("mlp", {"strategy": "revolve"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_streamed_weights_with_recomputation_and_copies(name: str, options: dict[str, Any]) -> None:
    model, asked = seeded(MODELS[name]), sft.Options(weights="stream", **options)
    budget = "4GiB" if "tile" in options else least_budget(copy.deepcopy(model), tuple(x_of(name).shape), asked)
    report = assert_exact(model, x_of(name), budget=budget, options=asked, input_grad="tile" in options)
    if "strategy" in options:
        assert report.plan.order, "something runs again, or leaves"
        assert report.plan.total_bytes == budget


def test_the_smallest_budget_is_a_share_of_the_resident_one_and_auto_selects_a_plan_that_fits() -> None:
    model, shape = seeded(Mlp), (4, 16)
    resident, streamed = least_budget(copy.deepcopy(model), shape, sft.Options()), least_budget(copy.deepcopy(model), shape, STREAM)
    assert streamed < resident / 2
    auto = sft.Options(weights="auto")
    assert least_budget(copy.deepcopy(model), shape, auto) == streamed
    assert sft.plan(copy.deepcopy(model), shape, budget=resident, options=auto).streamed_weights == 0
    report = assert_exact(model, image(*shape), budget=resident - 1, options=auto)
    assert report.plan.streamed_weights == 12
    assert_exact(model, image(*shape), budget=streamed, options=auto)
    with pytest.raises(sft.BudgetError, match="weights='stream'"):
        sft.plan(copy.deepcopy(model), shape, budget=resident - 1)


def test_planning_moves_nothing_and_plans_are_data() -> None:
    model = seeded(Vgg)
    places = [param.data_ptr() for param in model.parameters()]
    plan = sft.plan(model, SHAPE, options=STREAM)
    assert places == [param.data_ptr() for param in model.parameters()]
    assert StreamedParameters.known(model) is None
    assert sft.Plan.from_json(plan.to_json()) == plan
    assert plan.resident_bytes == 0
    assert max(len(segment.nodes) for segment in plan.segments) < sum(len(segment.nodes) for segment in plan.segments)
    net: Any = sft.compile(model, SHAPE, plan=sft.Plan.from_json(plan.to_json()))  # the plan states it
    x = image(*SHAPE)
    torch.testing.assert_close(net(x), seeded(Vgg)(x))
    assert net.plan == plan
    counted = sum(entry.weight_bytes for entry in plan.timeline.entries)
    gradients = sum(param.numel() * 8 for param in model.parameters())
    assert net.weight_counters.copied_bytes <= counted - gradients


def test_other_sizes_eval_no_grad_and_several_backward_passes() -> None:
    model, plain = seeded(Normed), seeded(Normed)
    net: Any = sft.compile(model, (None, 3, None, None), options=STREAM)
    for module in (net, plain):
        module.drop.p = 0.0
        module.down[3].p = 0.0
    for size in (16, 21):
        x = image(2, 3, size, size)
        for mode in (True, False):
            net.train(mode)
            plain.train(mode)
            ours, theirs = net(x), plain(x)
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
            for out in (ours, theirs):
                out.sum().backward(retain_graph=True)
                out.square().sum().backward()
            with torch.no_grad():
                torch.testing.assert_close(net(x), plain(x), rtol=1e-10, atol=1e-12)
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-9, msg=name)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_parameters_without_gradients() -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    for module in (model, plain):
        module.tied.bias.data = module.second.bias.data  # tied by their memory
    net: Any = sft.compile(model, (4, 8), options=STREAM)
    x = image(4, 8)
    with torch.inference_mode():
        net(x)  # the first call moves the weights to the store
    for module in (net, plain):
        module(x)[0].sum().backward()
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    # A parameter with two names is resident, all other parameters are streamed.
    taken = StreamedParameters.known(model)
    assert taken is not None
    tied = {"second.weight", "second.bias", "tied.bias"}
    assert set(taken.params) == {name for name, _ in model.named_parameters()} - tied
    assert net.plan.resident_bytes == 2 * (64 + 8 + 8) * 8
    assert net.plan.streamed_weights == 6  # and the two of `unused` are in the store
    with torch.no_grad():
        model.second.bias.add_(1)
    assert torch.equal(model.tied.bias, model.second.bias)


def test_a_model_and_its_compiled_modules_share_streamed_weights() -> None:
    model, plain = seeded(Vgg), seeded(Vgg)
    net, x = sft.compile(model, SHAPE, options=STREAM), image(*SHAPE)
    net(x).sum().backward()
    other = seeded(Vgg, seed=1)
    net.load_state_dict(other.state_dict())
    torch.testing.assert_close(net(x), other(x))
    assert torch.equal(model(x), other(x))  # the plain one shares them
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
    copied = copy.deepcopy(net)
    copied.load_state_dict(plain.state_dict())
    torch.testing.assert_close(copied(x), plain(x))
    torch.testing.assert_close(net(x), other(x))
    again: Any = sft.compile(model, SHAPE)  # another compiled module of the model streams the same weights
    assert torch.equal(again(x), net(x))
    assert again.plan.streamed_weights == 10
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # on the host, in place
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    plain(x).sum().backward()
    for param, gradient in zip(other.parameters(), plain.parameters(), strict=True):
        param.grad = gradient.grad
    theirs.step()
    torch.testing.assert_close(net(x), other(x))


def test_refusals_name_remedies(tmp_path: Path) -> None:
    with pytest.raises(sft.InputError, match=r"choose one of resident, stream, auto"):
        sft.Options(weights="disk")
    with pytest.raises(sft.InputError, match="drop one"):
        sft.Options(weights="stream", cuda_graphs=True)
    with pytest.raises(sft.InputError, match="make it first"):
        sft.WeightsFile(tmp_path / "nowhere" / "w")
    with pytest.raises(sft.UnsupportedError, match="leave out mesh"):
        sft.compile(seeded(Vgg), SHAPE, mesh=(1, 2), options=STREAM)
    with pytest.raises(sft.InputError, match="no parameters"):
        sft.compile(nn.Sequential(nn.ReLU()), (4, 16), options=STREAM)(image(4, 16))
    tied = nn.Linear(16, 16).double()
    with pytest.raises(sft.InputError, match="those with two names stay resident"):
        sft.compile(nn.Sequential(tied, tied), (4, 16), options=STREAM)(image(4, 16))
    blocks = sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), 3).double().stream("8KiB")
    with pytest.raises(sft.UnsupportedError, match="leave out weights"):
        sft.compile(nn.Sequential(nn.Linear(16, 16).double(), blocks), (None, 16), options=STREAM)(image(4, 16))
    net, x = sft.compile(seeded(Mlp), (4, 16), options=STREAM), image(4, 16)
    net(x)
    other = {name: param.detach() + 1 for name, param in net.named_parameters()}
    with pytest.raises(sft.InputError, match="functional_call"):
        torch.func.functional_call(net, other, (x,))
    with pytest.raises(sft.InputError, match="leave window out"):
        sft.StreamedOptimizer(net, "adamw", window="1MiB")
    optimizer = sft.StreamedOptimizer(net, "adamw")
    with pytest.raises(sft.InputError, match="optimizer"):
        sft.StreamedOptimizer(net, "adamw")
    optimizer.close()
    net.float()
    with pytest.raises(sft.InputError, match="convert the model before"):
        net(x.float())
    with pytest.raises(sft.InputError, match="stream"):
        sft.StreamedOptimizer(sft.compile(seeded(Mlp), (4, 16)), "adamw")
    filed = sft.compile(seeded(Mlp), (4, 16), options=sft.Options(weights=sft.WeightsFile(tmp_path / "w")))
    with pytest.raises(sft.InputError, match="state_dict"):
        copy.deepcopy(filed)


class Returned(nn.Module):
    """Model that returns one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, self.scale


def test_a_parameter_that_is_returned_is_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match="scale"):
        sft.compile(Returned(), (4, 16), options=STREAM)
    assert sft.plan(Returned(), (4, 16), options=sft.Options(weights="auto")).streamed_weights == 0


class _RecordingMachine:
    """Machine that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load_weight(self, name: str, num_bytes: int, shape: object, dtype: object, handle: object, *, ahead: bool) -> str:
        self.calls.append(f"{'<' if handle is None else '«'}{name}{'...' if ahead else ''}")
        return name

    def wait_weights(self, names: Sequence[str]) -> None:
        self.calls.append("=" + "".join(names))

    def free_weight(self, name: str, handle: object) -> None:
        self.calls.append("~" + name)

    def send_weight_grad(self, name: str, gradient: object, weight: object, taking: GradientTransfer) -> None:
        self.calls.append("!" + name)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pass_has_the_weights_of_a_move_and_of_the_next(ahead: bool) -> None:
    machine: Any = _RecordingMachine()
    names = "abc"
    weights = StreamedWeights(num_bytes=dict.fromkeys(names, 8), grad_transfers=dict.fromkeys(names, GradientTransfer()), reads_ahead=ahead)
    moves = parse_schedule(["F0", "F1+", "L", "B1", "F0+", "B0"], 2)
    # Segment 0 reads `a`, and `c` without a gradient; segment 1 reads `b` and `c`.
    reads = weights_read_per_op(moves[3:], [("a", "c"), ("b", "c")], [("a",), ("b", "c")], names)
    assert reads == (("b", "c"), ("a", "c"), ("a",))
    assert weights_completed_per_segment([("a", "c"), ("b", "c")], [True, True], ("a", "b")) == (("a",), ("b",))
    handles: dict[str, Any] = {}
    prefetcher = WeightPrefetcher(
        machine=machine, weights=weights, shapes=dict.fromkeys(names, (1,)), dtypes=dict.fromkeys(names), buffers=handles, reads=reads
    )
    values: dict[str, Any] = {}
    for place, taken in enumerate(("bc", "", "a")):
        prefetcher.before_op(place, values)
        for name in taken:
            prefetcher.send_gradient(name, None)
        machine.calls.append("|")
        prefetcher.after_op(place)
    prefetcher.free_all()
    assert set(values) == set(names)
    # `c` may have been updated, so it is read again although the next move reads it; `a` stays for the last one.
    expected = "<b <c =bc <a... !b !c | ~b ~c «c =ac | ~c =a !a | ~a" if ahead else "<b <c =bc !b !c | ~b ~c <a «c =ac | ~c =a !a | ~a"
    assert " ".join(machine.calls) == expected


def _other_head(model: Any) -> None:
    model[-1] = nn.Linear(96, 7).double()


def _assigned(model: Any) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [_other_head, _assigned])
def test_replaced_parameters_are_streamed(change: Any) -> None:
    model, x = seeded(MODELS["vgg"]), x_of("vgg")
    net = sft.compile(model, SHAPE, options=STREAM)
    net(x).sum().backward()
    change(model)
    model.zero_grad()
    eager = copy.deepcopy(model)
    for _ in range(2):
        y, expected = net(x), eager(x)
        torch.testing.assert_close(y, expected)
        (y.sum() + expected.sum()).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_an_optimizer_keeps_its_state_when_parameters_are_exchanged() -> None:
    model, x = seeded(MODELS["vgg"]), x_of("vgg")
    net = sft.compile(model, SHAPE, options=STREAM)
    optimizer = sft.StreamedOptimizer(net, "sgd", lr=0.1, momentum=0.9)
    net(x).sum().backward()
    optimizer.step()
    _assigned(model)
    with pytest.raises(sft.InputError, match=r"no longer those in the host's memory .* close\(\) the optimizer, and make a new one"):
        net(x)
    optimizer.close()
    optimizer = sft.StreamedOptimizer(net, "sgd", lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    net(x).sum().backward()
    optimizer.step()
    assert all(not torch.equal(old, param) for old, param in zip(before, model.parameters(), strict=True))


def test_a_class_is_no_update() -> None:
    net = sft.compile(seeded(MODELS["vgg"]), SHAPE, options=STREAM)
    with pytest.raises(sft.InputError, match=r"update=SGD: that is a class; choose one of sgd, adamw"):
        sft.StreamedOptimizer(net, torch.optim.SGD, lr=0.1)  # type: ignore[arg-type]
