"""Weights of a compiled model that are streamed: the same numbers, in the bytes that were planned, whatever the plan."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.deep.parameters import StreamedParameters
from sft.execute.machine import TorchMachine
from sft.walk.order import parse_order
from sft.walk.weights import Passage, StreamedWeights, Taking, completed_by, read_by
from sft.weights import DiskStore

from .helpers.captured import one_capture_a_model
from .helpers.exactness import assert_exact, assert_within_budget
from .helpers.models import Residual, TinyUNet, image, seeded
from .helpers.staged import Normed

captures = one_capture_a_model("options", "kind", "two_phase", "where")

_STREAM = sft.Options(weights="stream")
_SHAPE = (2, 3, 20, 16)


class Vgg(nn.Sequential):
    """Convolutions in front, most of the weights behind."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5)),
        )


class BatchNormed(nn.Sequential):
    """Train-mode norms: barriers, and buffers that change."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        )


class Mlp(nn.Sequential):
    """Vectors: nothing comes in strips."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))


class TwoHeads(nn.Module):
    """Two outputs, a frozen layer, a layer that is used twice, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8).requires_grad_(False)
        self.shared = nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.shared(torch.relu(self.shared(self.stem(x)))))
        return self.first(y), self.tied(torch.sigmoid(self.second(y)))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg": Vgg,
    "norms": BatchNormed,
    "residual": Residual,
    "unet": TinyUNet,
    "shared": Normed,
    "mlp": Mlp,
}


def _x(name: str) -> Tensor:
    return image(4, 16) if name == "mlp" else image(*_SHAPE)


def _least(model: nn.Module, shape: tuple[int, ...], options: sft.Options) -> int:
    """The smallest budget, by the error."""
    with pytest.raises(sft.BudgetError) as refused:
        sft.plan(copy.deepcopy(model), shape, budget=1, options=options)
    return refused.value.needed_bytes


# -- without an optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _MODELS)
def test_streamed_weights_are_exact_to_the_byte(name: str) -> None:
    report = assert_exact(seeded(_MODELS[name]), _x(name), options=_STREAM, to_the_byte=name != "unet")
    plan = report.plan
    assert plan.streamed_weights == sum(1 for _ in seeded(_MODELS[name]).parameters())
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
def test_streamed_weights_in_strips_run_again_and_beside_copies(name: str, options: dict[str, Any]) -> None:
    model, asked = seeded(_MODELS[name]), sft.Options(weights="stream", **options)
    budget = "4GiB" if "tile" in options else _least(model, tuple(_x(name).shape), asked)
    report = assert_exact(model, _x(name), budget=budget, options=asked, input_grad="tile" in options)
    if "strategy" in options:
        assert report.plan.order, "something runs again, or leaves"
        assert report.plan.total_bytes == budget


def test_the_smallest_budget_is_a_share_of_the_resident_one_and_auto_takes_what_fits() -> None:
    model, shape = seeded(Mlp), (4, 16)
    resident, streamed = _least(model, shape, sft.Options()), _least(model, shape, _STREAM)
    assert streamed < resident / 2
    auto = sft.Options(weights="auto")
    assert _least(model, shape, auto) == streamed
    assert sft.plan(copy.deepcopy(model), shape, budget=resident, options=auto).streamed_weights == 0
    report = assert_exact(model, image(*shape), budget=resident - 1, options=auto)
    assert report.plan.streamed_weights == 12
    assert_exact(model, image(*shape), budget=streamed, options=auto)
    with pytest.raises(sft.BudgetError, match="weights='stream'"):
        sft.plan(copy.deepcopy(model), shape, budget=resident - 1)


def test_planning_moves_nothing_and_plans_are_data() -> None:
    model = seeded(Vgg)
    places = [param.data_ptr() for param in model.parameters()]
    plan = sft.plan(model, _SHAPE, options=_STREAM)
    assert places == [param.data_ptr() for param in model.parameters()]
    assert StreamedParameters.known(model) is None
    assert sft.Plan.from_json(plan.to_json()) == plan
    assert plan.resident_bytes == 0
    assert max(len(segment.nodes) for segment in plan.segments) < sum(len(segment.nodes) for segment in plan.segments)
    net = sft.compile(model, _SHAPE, plan=sft.Plan.from_json(plan.to_json()))  # the plan says it
    x = image(*_SHAPE)
    torch.testing.assert_close(net(x), seeded(Vgg)(x))
    assert net.plan == plan
    counted = sum(entry.weight_bytes for entry in plan.timeline.entries)
    gradients = sum(param.numel() * 8 for param in model.parameters())
    assert net.weight_counters.copied_bytes <= counted - gradients


def test_other_sizes_eval_no_grad_and_several_backward_passes() -> None:
    model, plain = seeded(Normed), seeded(Normed)
    net = sft.compile(model, (None, 3, None, None), options=_STREAM)
    for part in (net, plain):
        part.drop.p = 0.0
        part.down[3].p = 0.0
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


def test_what_no_gradient_reaches_has_none() -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    for part in (model, plain):
        part.tied.bias.data = part.second.bias.data  # tied by their memory
    net = sft.compile(model, (4, 8), options=_STREAM)
    x = image(4, 8)
    with torch.inference_mode():
        net(x)  # whoever calls first takes the weights
    for part in (net, plain):
        part(x)[0].sum().backward()
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    # A parameter with two names is resident, the others are not.
    taken = StreamedParameters.known(model)
    assert taken is not None
    tied = {"second.weight", "second.bias", "tied.bias"}
    assert set(taken.params) == {name for name, _ in model.named_parameters()} - tied
    assert net.plan.resident_bytes == 2 * (64 + 8 + 8) * 8
    assert net.plan.streamed_weights == 6  # and the two of `unused` are in the store
    with torch.no_grad():
        model.second.bias.add_(1)
    assert torch.equal(model.tied.bias, model.second.bias)


def test_the_model_stays_the_users() -> None:
    model, plain = seeded(Vgg), seeded(Vgg)
    net, x = sft.compile(model, _SHAPE, options=_STREAM), image(*_SHAPE)
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
    again = sft.compile(model, _SHAPE)  # another compiled module of the model streams the same weights
    assert torch.equal(again(x), net(x))
    assert again.plan.streamed_weights == 10
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # on the host, in place
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    plain(x).sum().backward()
    for param, gradient in zip(other.parameters(), plain.parameters(), strict=True):
        param.grad = gradient.grad
    theirs.step()
    torch.testing.assert_close(net(x), other(x))


# -- with an optimizer ----------------------------------------------------------------------------------------------------

_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adamw": {"lr": 0.01, "amsgrad": True},
}


def _torchs(kind: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    return make(model.parameters(), foreach=False, **{**_SETTINGS[kind], **settings})


def _ours(kind: Any, net: nn.Module, **settings: Any) -> sft.StreamedOptimizer:
    return sft.StreamedOptimizer(net, kind, **{**_SETTINGS[kind], **settings})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, name: str = "norms") -> None:
    x = _x(name) + number
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _pair(name: str, where: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """A compiled model with streamed weights, and one with resident ones of the same plan."""
    weights: Any = "stream" if where is None else sft.WeightsFile(where, durable=False)
    shape = tuple(_x(name).shape)
    net = sft.compile(seeded(_MODELS[name]), shape, options=sft.Options(weights=weights, **options))
    return net, sft.compile(seeded(_MODELS[name]), shape, options=sft.Options(**options))


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, value), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_same_bits_as_torch(kind: str, two_phase: bool, where: str, tmp_path: Path) -> None:
    for name in ("norms", "vgg"):
        net, resident = _pair(name, tmp_path / name if where == "disk" else None)
        ours, theirs = _ours(kind, net, two_phase=two_phase), _torchs(kind, resident)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) for optimizer in (ours, theirs)]
        for number in range(3):
            _step(net, ours, number, name)
            _step(resident, theirs, number, name)
            for schedule in schedules:
                schedule.step()
            assert all(param.grad is None for param in net.parameters())
        _assert_same(net, resident)
        # The state goes both ways, and is torch's.
        assert _same_state(ours.state_dict(), theirs.state_dict())
        saved = copy.deepcopy(theirs.state_dict())
        _step(net, ours, 3, name)
        net.load_state_dict(resident.state_dict())
        ours.load_state_dict(saved)
        _step(net, ours, 4, name)
        _step(resident, theirs, 4, name)
        _assert_same(net, resident)


def _same_state(first: dict[str, Any], second: dict[str, Any]) -> bool:
    pairs = [(first["state"][key][name], value) for key, state in second["state"].items() for name, value in state.items()]
    return bool(pairs) and all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_a_step_with_updates_holds_what_was_projected(name: str, where: str, tmp_path: Path) -> None:
    net, _ = _pair(name, tmp_path / "w" if where == "disk" else None)
    x = _x(name)
    without = net.plan_for(x)
    if where == "disk":
        # what the next move reads is on its way
        assert without.weights_peak_bytes > _pair(name)[0].plan_for(x).weights_peak_bytes
    for two_phase in (False, True):
        optimizer = _ours("adamw", net, two_phase=two_phase)
        for _ in range(2):
            assert_within_budget(net, x, budget="11GiB", to_the_byte=True)
            optimizer.step()
        if not two_phase:
            passing = [sum(entry.weight_bytes for entry in plan.timeline.entries) for plan in (net.plan, without)]
            assert passing[0] > passing[1]  # state is read and written
        optimizer.close()
    assert net.plan_for(x) == without


def test_updates_run_again_beside_recomputation_and_strips() -> None:
    for options in ({"tile": (4, None)}, {"strategy": "revolve"}):
        name = "norms" if "tile" in options else "shared"
        least = None if "tile" in options else _least(seeded(_MODELS[name]), _SHAPE, sft.Options(weights="stream", **options))
        model = seeded(_MODELS[name])
        net = sft.compile(model, _SHAPE, budget=least, options=sft.Options(weights="stream", **options))
        resident = sft.compile(seeded(_MODELS[name]), _SHAPE, plan=None, options=sft.Options(**options))
        ours, theirs = _ours("sgd", net), _torchs("sgd", resident)
        for number in range(2):
            torch.manual_seed(number)
            _step(net, ours, number, name)
            torch.manual_seed(number)
            _step(resident, theirs, number, name)
        for value, other in zip(net.parameters(), resident.parameters(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


def test_parameters_that_the_optimizer_does_not_have_keep_their_gradients() -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    net, x = sft.compile(model, (4, 8), options=_STREAM), image(4, 8)
    optimizer = sft.StreamedOptimizer(net, "sgd", params=[net.shared.weight, net.first.weight, net.second.weight], lr=0.1, momentum=0.5)
    theirs = torch.optim.SGD([plain.shared.weight, plain.first.weight, plain.second.weight], lr=0.1, momentum=0.5, foreach=False)
    for number in range(3):
        for part in (net, plain):
            part.zero_grad()
            part(x)[number % 2].sum().backward()  # the head that is not used is not updated, momentum or not
        torch.testing.assert_close(net.shared.bias.grad, plain.shared.bias.grad, rtol=1e-12, atol=1e-12)
        assert net.shared.weight.grad is None
        optimizer.step()
        theirs.step()
    for (name, ours), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_are_added_up_and_clipped_in_two_phases() -> None:
    net, resident = _pair("vgg")
    ours, theirs = _ours("sgd", net, max_norm=0.05), _torchs("sgd", resident)
    for number in range(2):
        for part in range(2):
            for model in (net, resident):
                model(_x("vgg") + part + number).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(resident.parameters(), 0.05, foreach=False) > 0.05
        ours.step()
        theirs.step()
        theirs.zero_grad()
    for value, other in zip(net.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)
    with pytest.raises(sft.BudgetError, match="two-phase"):
        tight = sft.compile(seeded(Mlp), (None, 16), budget="2KiB", options=_STREAM)
        _ours("sgd", tight, two_phase=True)
        tight(image(1, 16))


def test_half_precision_has_full_copies_in_the_state() -> None:
    net = sft.compile(seeded(Mlp).bfloat16(), (4, 16), options=_STREAM)
    optimizer = sft.StreamedOptimizer(net, "adamw", lr=1e-3)
    x = image(4, 16).bfloat16()
    before = [param.detach().clone() for param in net.parameters()]
    plan = net.plan_for(x.requires_grad_())
    with sft.measure_peak() as peak:
        out = net(x)
        out.backward(torch.ones_like(out))
    assert peak.num_bytes <= plan.projected_peak_bytes
    optimizer.step()
    states = [optimizer.state_dict()["state"][key] for key in range(12)]
    for param, old, state in zip(net.parameters(), before, states, strict=True):
        assert state["master"].dtype == torch.float32
        assert torch.equal(param, state["master"].bfloat16())
        assert not torch.equal(state["master"], old.float())


# -- failures -------------------------------------------------------------------------------------------------------------


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_failing_pass_changes_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    net, resident = _pair("norms", tmp_path / "w" if where == "disk" else None)
    ours, theirs = _ours("adamw", net), _torchs("adamw", resident)
    _step(net, ours, 0)
    _step(resident, theirs, 0)
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(ours.state_dict())
    moves = [entry.move for entry in net.plan.timeline.entries]
    for place in (moves[3], moves[-2]):
        out = None if place.startswith("F") else net(_x("norms")).sum()
        if out is not None:
            weights = copy.deepcopy(net.state_dict())  # running statistics are those of the forward pass
        with monkeypatch.context() as patched:
            patched.setattr(TorchMachine, "begin", _stopping_at(place))
            with pytest.raises(_Stop):
                net(_x("norms")) if out is None else out.backward()
        assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
        assert _same_state(ours.state_dict(), state)
    resident(_x("norms"))
    _step(net, ours, 1)
    _step(resident, theirs, 1)
    _assert_same(net, resident)
    assert threading.active_count() == threads
    assert where == "host" or [path.name for path in tmp_path.iterdir()] == ["w"]


def _stopping_at(place: str) -> Callable[[TorchMachine, Any], None]:
    def begin(machine: TorchMachine, move: Any) -> None:
        if str(move) == place:
            raise _Stop

    return begin


def test_a_backward_pass_wants_the_weights_of_its_forward_pass() -> None:
    net, _ = _pair("mlp")
    x = _x("mlp")
    optimizer = _ours("sgd", net)
    first, second, late = net(x).sum(), net(x).sum(), net(x).sum()
    first.backward()
    with pytest.raises(sft.InputError, match="two_phase"):
        second.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="before step"):
        late.backward()
    third = net(x).sum()
    with torch.no_grad():
        next(net.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        third.backward()


def test_a_file_goes_on_with_another_plan_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    net, resident = _pair("vgg", path)
    ours, theirs = _ours("adamw", net), _torchs("adamw", resident)
    for number in range(2):
        _step(net, ours, number, "vgg")
        _step(resident, theirs, number, "vgg")
    net(_x("vgg")).sum().backward()  # a step that is never committed
    del net, ours
    fresh = seeded(Vgg, seed=7)
    with pytest.raises(sft.InputError, match="resume"):
        sft.compile(fresh, _SHAPE, options=sft.Options(weights=sft.WeightsFile(path)))(_x("vgg"))
    # In strips and of another size: records follow the model alone.
    options = sft.Options(weights=sft.WeightsFile(path, resume=True), tile=(4, None))
    again = sft.compile(fresh, (None, 3, None, None), options=options)
    optimizer = _ours("adamw", again)
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [2] * 10
    _step(again, optimizer, 3, "vgg")
    _step(resident, theirs, 3, "vgg")
    for value, other in zip(again.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)
    stored = DiskStore.open(path)
    assert [layout.fields[0].spec.name for layout in stored.layouts] == [name for name, _ in fresh.named_parameters()]
    with pytest.raises(sft.InputError, match="another model"):
        sft.compile(seeded(Mlp), (4, 16), options=options)(_x("mlp"))


def test_reading_ahead_finds_weights_there(tmp_path: Path) -> None:
    net = sft.compile(seeded(Mlp), (4, 16), options=sft.Options(weights=sft.WeightsFile(tmp_path / "w")))
    x = _x("mlp")
    net(x).sum().backward()
    counters = net.weight_counters
    assert counters.misses == 2 * 2, "the first weight and bias of either pass"
    assert counters.hits + counters.waits == counters.reads - counters.misses
    assert counters.num_copies == 2 * 12
    assert counters.copied_bytes == 2 * sum(param.numel() * 8 for param in net.parameters())


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_what_is_refused_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(sft.InputError, match=r"choose one of resident, stream, auto"):
        sft.Options(weights="disk")
    with pytest.raises(sft.InputError, match="drop one"):
        sft.Options(weights="stream", cuda_graphs=True)
    with pytest.raises(sft.InputError, match="make it first"):
        sft.WeightsFile(tmp_path / "nowhere" / "w")
    with pytest.raises(sft.UnsupportedError, match="leave out mesh"):
        sft.compile(seeded(Vgg), _SHAPE, mesh=(1, 2), options=_STREAM)
    with pytest.raises(sft.InputError, match="no parameters"):
        sft.compile(nn.Sequential(nn.ReLU()), (4, 16), options=_STREAM)(image(4, 16))
    blocks = sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), 3).double().stream("8KiB")
    with pytest.raises(sft.UnsupportedError, match="leave out weights"):
        sft.compile(nn.Sequential(nn.Linear(16, 16).double(), blocks), (None, 16), options=_STREAM)(image(4, 16))
    net, x = sft.compile(seeded(Mlp), (4, 16), options=_STREAM), image(4, 16)
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
    """Returns one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, self.scale


def test_a_parameter_that_is_returned_is_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match="scale"):
        sft.compile(Returned(), (4, 16), options=_STREAM)
    assert sft.plan(Returned(), (4, 16), options=sft.Options(weights="auto")).streamed_weights == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["host", "disk"])
def test_on_a_cuda_device(where: str, tmp_path: Path) -> None:
    weights: Any = "stream" if where == "host" else sft.WeightsFile(tmp_path / "w")
    net = sft.compile(seeded(BatchNormed), _SHAPE, device="cuda", options=sft.Options(weights=weights))
    resident = sft.compile(seeded(BatchNormed), _SHAPE, device="cuda")
    assert all(param.device.type == "cpu" for param in net.parameters())
    assert all(buffer.device.type == "cuda" for buffer in net.buffers())
    ours, theirs = _ours("adamw", net), _torchs("adamw", resident)
    x = image(*_SHAPE).cuda()
    for _ in range(3):
        for model, optimizer in ((net, ours), (resident, theirs)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for value, other in zip(net.state_dict().values(), resident.state_dict().values(), strict=True):
        torch.testing.assert_close(value.cpu(), other.cpu(), rtol=1e-8, atol=1e-10)


# -- what a pass holds ----------------------------------------------------------------------------------------------------


class _Noting:
    """A machine that takes down what it is asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def load_weight(self, name: str, num_bytes: int, shape: object, dtype: object, handle: object, *, ahead: bool) -> str:
        self.said.append(f"{'<' if handle is None else '«'}{name}{'...' if ahead else ''}")
        return name

    def settle_weights(self, names: Sequence[str]) -> None:
        self.said.append("=" + "".join(names))

    def release_weight(self, name: str, handle: object) -> None:
        self.said.append("~" + name)

    def take_gradient(self, name: str, gradient: object, weight: object, taking: Taking) -> None:
        self.said.append("!" + name)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pass_holds_what_a_move_reads_and_the_next(ahead: bool) -> None:
    machine: Any = _Noting()
    names = "abc"
    weights = StreamedWeights(num_bytes=dict.fromkeys(names, 8), takings=dict.fromkeys(names, Taking()), reads_ahead=ahead)
    moves = parse_order(["F0", "F1+", "L", "B1", "F0+", "B0"], 2)
    # Segment 0 reads `a`, and `c` without a gradient; segment 1 reads `b` and `c`.
    reads = read_by(moves[3:], [("a", "c"), ("b", "c")], [("a",), ("b", "c")], names)
    assert reads == (("b", "c"), ("a", "c"), ("a",))
    assert completed_by([("a", "c"), ("b", "c")], [True, True], ("a", "b")) == (("a",), ("b",))
    handles: dict[str, Any] = {}
    passage = Passage(
        machine=machine, weights=weights, shapes=dict.fromkeys(names, (1,)), dtypes=dict.fromkeys(names), handles=handles, reads=reads
    )
    values: dict[str, Any] = {}
    for place, taken in enumerate(("bc", "", "a")):
        passage.enter(place, values)
        for name in taken:
            passage.take(name, None)
        machine.said.append("|")
        passage.leave(place)
    passage.end()
    assert set(values) == set(names)
    # `c` was updated, perhaps, so it is read anew although the next move wants it; `a` stays for the last one.
    expected = "<b <c =bc <a... !b !c | ~b ~c «c =ac | ~c =a !a | ~a" if ahead else "<b <c =bc !b !c | ~b ~c <a «c =ac | ~c =a !a | ~a"
    assert " ".join(machine.said) == expected
