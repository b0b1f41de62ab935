"""Streamed weights with streamed updates: bitwise equal to plain PyTorch, and consistent after failures."""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.nn import Repeat
from sft.weights import DiskStore
from tests.helpers.streamed_weights import same_state

_BLOCKS = 5


class Block(nn.Module):
    """Convolution, running statistics, dropout, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(torch.relu(self.norm(x)))
        return out


def _models(*, dtype: torch.dtype = torch.float64, window: str | int = "3KiB", **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A model that streams its blocks, and the same in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Repeat(Block, _BLOCKS, strategy="revolve"), nn.Flatten(), nn.Linear(48, 2)).to(dtype)
    repeat = _repeat(model)
    plain = copy.deepcopy(nn.Sequential(model[0], repeat.unstacked(), model[2], model[3]))
    repeat.stream(window, **options)
    return model, plain


def _repeat(model: nn.Sequential) -> Repeat:
    repeat = model[1]
    assert isinstance(repeat, Repeat)
    return repeat


def _batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(step))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    loss: Tensor = model(_batch(step, dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _assert_same(model: nn.Sequential, plain: nn.Sequential, *, exactly: bool = True) -> None:
    repeat = _repeat(model)
    blocks = plain[1]
    assert isinstance(blocks, nn.Sequential)
    pairs: list[tuple[Tensor, Tensor]] = []
    pairs += [(param, other) for place in (0, 3) for param, other in zip(model[place].parameters(), plain[place].parameters(), strict=True)]
    for number, block in enumerate(blocks):
        stacks = {**dict(repeat.block.named_parameters()), **dict(repeat.block.named_buffers())}
        others = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        pairs += [(stacks[name][number], value) for name, value in others.items()]
    for ours, theirs in pairs:
        if exactly:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adamw": {"lr": 0.01, "amsgrad": True},
}


def _plain_optimizer(kind: str, plain: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    return make(plain.parameters(), foreach=False, **{**_SETTINGS[kind], **settings})


def _optimizer(kind: Any, model: nn.Module, **options: Any) -> sft.StreamedOptimizer:
    return sft.StreamedOptimizer(model, kind, **{**_SETTINGS[kind], **options})


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_same_bits_as_torch(kind: str, two_phase: bool, where: str, tmp_path: Path) -> None:
    model, plain = _models(path=tmp_path / "w" if where == "disk" else None, durable=False)
    ours, theirs = _optimizer(kind, model, two_phase=two_phase), _plain_optimizer(kind, plain)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) for optimizer in (ours, theirs)]
    for step in range(4):
        assert torch.equal(_step(model, ours, step), _step(plain, theirs, step))
        for schedule in schedules:
            schedule.step()
        assert not two_phase or all(param.grad is None for param in model.parameters())
    _assert_same(model, plain)


def test_measured_bytes_of_a_step_are_the_projected_ones() -> None:
    model, _ = _models()
    repeat = _repeat(model)
    x = _batch(0).requires_grad_()
    for two_phase in (False, True):
        optimizer = _optimizer("adamw", model, two_phase=two_phase)
        for _ in range(2):
            plan = repeat.plan_for(x)
            with sft.measure_peak() as peak:
                out = repeat(x)
                gradient = torch.ones_like(out)
                out.backward(gradient)
            assert peak.num_bytes == plan.projected_peak_bytes
            del out, gradient
            optimizer.step()
        optimizer.close()
    all_grads = sum(param.numel() * 8 for param in repeat.parameters())
    with sft.measure_peak() as peak:
        repeat(x).sum().backward()
    assert peak.num_bytes < plan.projected_peak_bytes + all_grads  # gradients on the host are not on the device


def test_without_an_optimizer_gradients_are_gathered_on_the_host() -> None:
    model, plain = _models()
    for _ in range(2):
        model(_batch(0)).square().mean().backward()
        plain(_batch(0)).square().mean().backward()
    grads = {name: param.grad for name, param in _repeat(model).block.named_parameters()}
    assert grads["unused"] is None
    blocks = plain[1]
    assert isinstance(blocks, nn.Sequential)
    for number, block in enumerate(blocks):
        for name, param in block.named_parameters():
            grad = grads[name]
            assert (grad is None) is (param.grad is None)
            assert grad is None or param.grad is None or torch.equal(grad[number], param.grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # on the host, in place
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    _assert_same(model, plain)
    assert torch.equal(model(_batch(1)), plain(_batch(1)))


def test_gradients_are_added_up_and_clipped_in_two_phases() -> None:
    model, plain = _models()
    ours = _optimizer("sgd", model, max_norm=0.05)
    theirs = _plain_optimizer("sgd", plain)
    for step in range(3):
        for micro_step in range(2):
            model(_batch(10 * step + micro_step)).square().mean().backward()
            plain(_batch(10 * step + micro_step)).square().mean().backward()
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, foreach=False)
        assert total > 0.05
        ours.step()
        theirs.step()
        theirs.zero_grad()
    _assert_same(model, plain, exactly=False)


def test_two_backward_passes_without_a_step_are_refused_when_fused() -> None:
    model, plain = _models()
    ours, theirs = _optimizer("sgd", model), _plain_optimizer("sgd", plain)
    model(_batch(0)).sum().backward()
    with pytest.raises(sft.InputError, match="two_phase"):
        model(_batch(1)).sum().backward()
    ours.zero_grad()  # drops the update that was under way
    plain(_batch(0))
    plain(_batch(1))  # running statistics follow forward passes, as in plain PyTorch
    assert torch.equal(_step(model, ours, 2), _step(plain, theirs, 2))
    _assert_same(model, plain)


@pytest.mark.parametrize("two_phase", [False, True])
def test_state_dicts_load_in_both_directions(two_phase: bool) -> None:
    for kind in ("sgd", "adamw"):
        model, _ = _models()
        first = _optimizer(kind, model, two_phase=two_phase)
        for step in range(3):
            _step(model, first, step)
        saved = copy.deepcopy(first.state_dict())
        weights = copy.deepcopy(model.state_dict())
        _step(model, first, 3)
        expected = copy.deepcopy(model.state_dict())

        other, _ = _models()
        other.load_state_dict(weights)
        second = _optimizer(kind, other, two_phase=two_phase, lr=0.5)
        second.load_state_dict(saved)
        _step(other, second, 3)
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())

        resident = nn.Sequential(nn.Conv2d(3, 3, 1), Repeat(Block, _BLOCKS), nn.Flatten(), nn.Linear(48, 2)).double()
        resident.load_state_dict(weights)
        theirs = _plain_optimizer(kind, resident, lr=0.5)
        theirs.load_state_dict(copy.deepcopy(saved))
        for number in range(2):
            if number:  # and back again
                theirs_saved = theirs.state_dict()
                second.load_state_dict(theirs_saved)
                assert same_state(second.state_dict(), theirs_saved)
            else:
                _step(resident, theirs, 3)
                assert all(torch.equal(value, expected[name]) for name, value in resident.state_dict().items())


def test_a_state_dict_of_other_shapes_changes_nothing() -> None:
    model, _ = _models()
    optimizer = _optimizer("adamw", model)
    _step(model, optimizer, 0)
    good = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(good)
    largest = max(bad["state"], key=lambda key: bad["state"][key]["exp_avg"].numel())
    bad["state"][largest]["exp_avg"] = torch.zeros(3)
    with pytest.raises(sft.InputError, match="exp_avg"):
        optimizer.load_state_dict(bad)
    assert same_state(optimizer.state_dict(), good)
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["amsgrad"] = False
    with pytest.raises(sft.InputError, match="max_exp_avg_sq"):
        optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["amsgrad"] is True


def test_training_continues_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w"
    model, plain = _models(path=path)
    ours, theirs = _optimizer("adamw", model), _plain_optimizer("adamw", plain)
    for step in range(2):
        _step(model, ours, step)
        _step(plain, theirs, step)
    model(_batch(2)).sum().backward()  # a step that is never committed
    rest = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("1.block") or "running" in name}
    state = ours.state_dict()
    del model, ours

    torch.manual_seed(7)
    fresh = nn.Sequential(nn.Conv2d(3, 3, 1), Repeat(Block, _BLOCKS, strategy="revolve"), nn.Flatten(), nn.Linear(48, 2)).double()
    with pytest.raises(sft.InputError, match="resume"):
        _repeat(fresh).stream("3KiB", path=path)
    _repeat(fresh).stream("3KiB", path=path, resume=True)
    again = _optimizer("adamw", fresh)
    fresh.load_state_dict(rest, strict=False)
    others = {key: value for key, value in state["state"].items() if key < 2 or key >= len(state["param_groups"][0]["params"]) - 2}
    for key, value in others.items():  # parameters that are in no file
        again.state[again.param_groups[0]["params"][key]] = value
    counted = fresh.state_dict()
    plain(_batch(2))
    for number in range(_BLOCKS):
        counted["1.block.norm.num_batches_tracked"][number] = 3
    assert torch.equal(_step(fresh, again, 3), _step(plain, theirs, 3))
    _assert_same(fresh, plain)
    with pytest.raises(sft.InputError, match=f"has {_BLOCKS} blocks, and {_BLOCKS + 1} are repeated here"):
        Repeat(Block, _BLOCKS + 1).double().stream("3KiB", path=path, resume=True)
    with pytest.raises(sft.InputError, match=r"other blocks .* float64 where the model has \S+ \[.*\] float32"):
        Repeat(Block, _BLOCKS).float().stream("3KiB", path=path, resume=True)
    with pytest.raises(sft.InputError, match="there is no file"):
        Repeat(Block, _BLOCKS).double().stream("3KiB", path=tmp_path / "none", resume=True)


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("two_phase", [False, True])
def test_a_failing_step_changes_nothing(two_phase: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    path = tmp_path / "w" if where == "disk" else None
    model, plain = _models(path=path, durable=False)
    ours, theirs = _optimizer("adamw", model, two_phase=two_phase), _plain_optimizer("adamw", plain)
    _step(model, ours, 0)
    _step(plain, theirs, 0)
    state = copy.deepcopy(model.state_dict())
    optimizer_state = copy.deepcopy(ours.state_dict())
    repeat = _repeat(model)

    def stop_at(word: str) -> Callable[[str], None]:
        def check(operation: str) -> None:
            if operation == word:
                raise _Stop

        return check

    repeat.trace = stop_at("F4")
    with pytest.raises(_Stop):
        model(_batch(1))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    repeat.trace = None
    repeat.trace = stop_at("B2")
    out = model(_batch(1)).square().mean()
    plain(_batch(1))
    with pytest.raises(_Stop):
        out.backward()
    repeat.trace = None
    ours.zero_grad()
    weights = {name: value for name, value in model.state_dict().items() if "running" not in name and "tracked" not in name}
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert same_state(ours.state_dict(), optimizer_state)

    # And when the weights cannot be committed, the step can be tried again.
    model(_batch(2)).square().mean().backward()
    plain(_batch(2)).square().mean().backward()
    store = repeat.streamed.store if repeat.streamed is not None else None
    assert store is not None

    def refuse(metadata: object = None) -> None:
        raise sft.SourceError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", refuse)
        with pytest.raises(sft.SourceError, match="full"):
            ours.step()
    assert same_state(ours.state_dict(), optimizer_state)
    if two_phase:
        ours.step()
        theirs.step()
        _assert_same(model, plain)
    assert threading.active_count() == threads
    assert path is None or sorted(p.name for p in tmp_path.iterdir()) == ["w"]


def test_losses_are_scaled_and_bad_steps_are_skipped() -> None:
    for two_phase in (False, True):
        model, plain = _models()
        ours = _optimizer("sgd", model, two_phase=two_phase, loss_scale="dynamic")
        theirs = _plain_optimizer("sgd", plain)
        before = ours.loss_scale.value
        loss = model(_batch(0)).square().mean()
        ours.scale(loss).backward()
        ours.step()
        plain(_batch(0)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
        _assert_same(model, plain)  # a power of two: the same bits
        state = {name: value.clone() for name, value in model.named_parameters()}
        ours.scale(model(_batch(1)).square().mean() * float("inf")).backward()
        ours.step()
        skipped = [ours.last_step_skipped]
        assert ours.loss_scale.value == before / 2
        assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())
        plain(_batch(1))
        loss = model(_batch(2)).square().mean()
        ours.scale(loss).backward()
        ours.step()
        assert [*skipped, ours.last_step_skipped] == [True, False]
        plain(_batch(2)).square().mean().backward()
        theirs.step()
        _assert_same(model, plain)


class HalfBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


@pytest.mark.parametrize("two_phase", [False, True])
def test_half_precision_has_fp32_copies(two_phase: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Repeat(HalfBlock, 4)).bfloat16()
    repeat = _repeat(model)
    plain = copy.deepcopy(nn.Sequential(model[0], repeat.unstacked()))
    repeat.stream("256B")
    ours = sft.StreamedOptimizer(model, "adamw", lr=1e-3, two_phase=two_phase)
    masters = [param.detach().float().requires_grad_() for param in plain.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-3, foreach=False)
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).square().mean().backward()
        ours.step()
        plain(x).square().mean().backward()
        for master, param in zip(masters, plain.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        theirs.step()
        with torch.no_grad():
            for master, param in zip(masters, plain.parameters(), strict=True):
                param.copy_(master)
    blocks = plain[1]
    assert isinstance(blocks, nn.Sequential)
    for number, block in enumerate(blocks):
        for name, param in block.named_parameters():
            assert torch.equal(repeat.block.get_parameter(name)[number], param)
    assert all(torch.equal(a, b) for a, b in zip(model[0].parameters(), plain[0].parameters(), strict=True))
    state = ours.state_dict()["state"]
    assert all(value.dtype == torch.float32 for entry in state.values() for value in entry.values())
    saved = copy.deepcopy(ours.state_dict())
    ours.load_state_dict(saved)
    assert same_state(ours.state_dict(), saved)


def test_weights_must_not_change_between_the_passes() -> None:
    model, _ = _models()
    optimizer = _optimizer("sgd", model)
    first = _repeat(model)(_batch(0).requires_grad_()).sum()
    _step(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="before step"):
        first.backward()


def test_groups_and_frozen_parameters() -> None:
    model, plain = _models()
    repeat = _repeat(model)
    repeat.block.get_parameter("conv.bias").requires_grad_(False)
    blocks = plain[1]
    assert isinstance(blocks, nn.Sequential)
    for block in blocks:
        block.get_parameter("conv.bias").requires_grad_(False)

    def groups(module: nn.Module, word: str) -> list[dict[str, Any]]:
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        chosen = [param for name, param in named if word in name]
        return [
            {"params": chosen, "weight_decay": 0.0, "lr": 0.3},
            {"params": [param for name, param in named if word not in name]},
        ]

    ours = sft.StreamedOptimizer(model, "sgd", params=groups(model, "norm"), lr=0.1, momentum=0.9, weight_decay=0.1)
    theirs = torch.optim.SGD(groups(plain, "norm"), lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)
    for step in range(3):
        _step(model, ours, step)
        _step(plain, theirs, step)
    _assert_same(model, plain)


def test_streamed_modules_are_loaded_moved_and_closed(tmp_path: Path) -> None:
    model, plain = _models(path=tmp_path / "w")
    repeat = _repeat(model)
    weights = {name: value + 1 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    expected = nn.Sequential(model[0], repeat.unstacked(), model[2], model[3])
    assert torch.equal(model.eval()(_batch(0)), expected.eval()(_batch(0)))
    model.double().to("cpu")
    with pytest.raises(sft.InputError, match="type"):
        model.float()
    model.double()
    with pytest.raises(sft.InputError, match="state_dict"):
        copy.deepcopy(repeat)
    with pytest.raises(sft.InputError, match="already"):
        repeat.stream("3KiB")
    streamed = repeat.streamed
    assert streamed is not None  # the loaded values are in the file with the next generation
    assert not torch.equal(DiskStore.open(tmp_path / "w").record(0), streamed.store.record(0))
    repeat.close()
    assert repeat.streamed is None
    copy.deepcopy(model)
    del plain


def test_misuse_is_refused() -> None:
    model, plain = _models()
    for kind, options, words in (
        ("rmsprop", {}, "update"),
        ("sgd", {"max_norm": -1.0}, "max_norm"),
        ("sgd", {"max_norm": 1.0, "two_phase": False}, "two_phase=True"),
        ("sgd", {"loss_scale": 0.0}, "loss_scale"),
        ("sgd", {"betas": (0.9, 0.9)}, "betas"),
    ):
        with pytest.raises(sft.InputError, match=words):
            sft.StreamedOptimizer(model, kind, **options)  # type: ignore[arg-type]  # the point
    with pytest.raises(sft.InputError, match="stream"):
        sft.StreamedOptimizer(plain, "sgd")
    optimizer = sft.StreamedOptimizer(model, "sgd")
    with pytest.raises(sft.InputError, match="close"):
        sft.StreamedOptimizer(model, "sgd")
    optimizer.close()
    sft.StreamedOptimizer(model, "sgd")
    with pytest.raises(sft.BudgetError):
        _models(window=64)
    with pytest.raises(sft.InputError, match="no parameters"):
        Repeat(nn.Identity, 3).stream("1KiB")
    assert json.dumps(optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
def test_a_gradient_of_the_input_alone_trains_no_blocks(two_phase: bool) -> None:
    model, plain = _models()
    ours, theirs = _optimizer("sgd", model, two_phase=two_phase), _plain_optimizer("sgd", plain)
    for number in range(2):
        for net, optimizer in ((model, ours), (plain, theirs)):
            x = _batch(number).requires_grad_()
            (x_grad,) = torch.autograd.grad(net(x).square().mean(), x)
            net((x + 0.1 * x_grad).detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(model, plain, exactly=False)


def test_a_dynamic_scale_continues() -> None:
    model, _ = _models()
    ours = _optimizer("sgd", model, loss_scale="dynamic")
    ours.scale(model(_batch(0)).square().mean() * float("inf")).backward()
    ours.step()
    state = copy.deepcopy(ours.state_dict())
    ours.close()
    again = _optimizer("sgd", model, loss_scale="dynamic")
    assert again.loss_scale.value == 2.0**16
    with pytest.raises(sft.InputError, match="loss_scale"):
        again.load_state_dict({**state, "loss_scale": {"value": -1.0, "num_good_steps": 0}})
    again.load_state_dict(state)
    assert again.loss_scale.value == 2.0**15
    torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()]).load_state_dict(
        {**state, "state": {}}
    )  # it does not change them


@pytest.mark.parametrize(("kind", "setting", "value"), [("sgd", "momentum", 0.9), ("adamw", "amsgrad", True)])
@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
def test_settings_that_keep_more_state_are_refused(kind: str, setting: str, value: Any, two_phase: bool) -> None:
    """The store has no space for the new state."""
    model, _ = _models()
    ours = sft.StreamedOptimizer(model, kind, lr=0.1, two_phase=two_phase)  # type: ignore[arg-type]
    before = {name: param.clone() for name, param in model.named_parameters()}
    for group in ours.param_groups:
        group[setting] = value
    with pytest.raises(sft.InputError, match=r"the present settings keep .*; make it with the same settings"):
        model(_batch(0)).square().mean().backward()
        ours.step()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("text", ["abc", "-1", "1,2,3", ""])
def test_damaged_counts_are_reported(text: str, tmp_path: Path) -> None:
    for resume in (False, True):
        torch.manual_seed(0)
        blocks = Repeat(HalfBlock, 3)
        model = nn.Sequential(nn.Identity(), blocks)
        blocks.stream("1KiB", path=tmp_path / "w.safetensors", resume=resume)
        assert blocks.streamed is not None
        if resume:
            blocks.streamed.store.metadata["updates"] = text
            with pytest.raises(sft.SourceError, match="is damaged"):
                _optimizer("sgd", model)
        else:
            ours = _optimizer("sgd", model)
            model(torch.ones(2, 4)).sum().backward()
            ours.step()
            ours.close()


@pytest.mark.usefixtures("frozen_objects")
@pytest.mark.parametrize("kind", ["repeat", "compiled"])
def test_the_second_model_of_a_file_is_refused_and_readers_are_not(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"

    def opened(*, frozen: bool = False, resume: bool = True) -> nn.Module:
        torch.manual_seed(0)
        if kind == "repeat":
            model: nn.Module = Repeat(Block, 3, strategy="revolve").double().requires_grad_(not frozen)
            _repeat(nn.Sequential(nn.Identity(), model)).stream("3KiB", path=path, resume=resume)
            return model
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).requires_grad_(not frozen)
        file = sft.WeightsFile(path, resume=resume)
        net: nn.Module = sft.compile(plain, (1, 3, 16, 16), options=sft.Options(weights=file))
        net(torch.ones(1, 3, 16, 16))
        return net

    first = opened(resume=False)
    with pytest.raises(sft.SourceError, match=r"w\.safetensors is in use: another model of this process writes to it"):
        opened()
    reader = opened(frozen=True)
    del first
    gc.collect()
    second = opened()
    with pytest.raises(sft.SourceError, match="in use"):
        opened()
    del reader, second
