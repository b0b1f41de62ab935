"""Optimizers of streamed weights of a compiled model: the same bits as torch, and no change by a failing pass."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sft
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.weight_streaming import WeightPass
from sft.weights import DiskStore
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_within_budget
from tests.helpers.fork_server import fork_context
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.streamed_weights import (
    MODELS,
    SHAPE,
    STREAM,
    BatchNormed,
    Mlp,
    TwoHeads,
    Vgg,
    assert_same,
    pair_of,
    same_state,
    streamed_optimizer,
    take_step,
    torch_optimizer,
    x_of,
)

captures = one_capture_a_model("options", "kind", "two_phase", "where")


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_same_bits_as_torch(kind: str, two_phase: bool, where: str, tmp_path: Path) -> None:
    for name in ("norms", "vgg"):
        net, resident = pair_of(name, tmp_path / name if where == "disk" else None)
        ours, theirs = streamed_optimizer(kind, net, two_phase=two_phase), torch_optimizer(kind, resident)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) for optimizer in (ours, theirs)]
        for number in range(3):
            take_step(net, ours, number, name)
            take_step(resident, theirs, number, name)
            for schedule in schedules:
                schedule.step()
            assert all(param.grad is None for param in net.parameters())
        assert_same(net, resident)
        # State dicts load in both directions, and equal torch's.
        assert same_state(ours.state_dict(), theirs.state_dict())
        saved = copy.deepcopy(theirs.state_dict())
        take_step(net, ours, 3, name)
        net.load_state_dict(resident.state_dict())
        ours.load_state_dict(saved)
        take_step(net, ours, 4, name)
        take_step(resident, theirs, 4, name)
        assert_same(net, resident)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_a_step_with_updates_has_the_projected_bytes(name: str, where: str, tmp_path: Path) -> None:
    net, _ = pair_of(name, tmp_path / "w" if where == "disk" else None)
    x = x_of(name)
    without = net.plan_for(x)
    if where == "disk":
        # the weights of the next move are being copied
        assert without.weights_peak_bytes > pair_of(name)[0].plan_for(x).weights_peak_bytes
    for two_phase in (False, True):
        optimizer = streamed_optimizer("adamw", net, two_phase=two_phase)
        for _ in range(2):
            assert_within_budget(net, x, budget="11GiB", to_the_byte=True)
            optimizer.step()
        if not two_phase:
            passing = [sum(entry.weight_bytes for entry in plan.timeline.entries) for plan in (net.plan, without)]
            assert passing[0] > passing[1]  # state is read and written
        optimizer.close()
    assert net.plan_for(x) == without


def test_updates_run_with_recomputation_and_strips() -> None:
    for options in ({"tile": (4, None)}, {"strategy": "revolve"}):
        name = "norms" if "tile" in options else "shared"
        least = None if "tile" in options else least_budget(seeded(MODELS[name]), SHAPE, sft.Options(weights="stream", **options))
        model = seeded(MODELS[name])
        net = sft.compile(model, SHAPE, budget=least, options=sft.Options(weights="stream", **options))
        resident = sft.compile(seeded(MODELS[name]), SHAPE, plan=None, options=sft.Options(**options))
        ours, theirs = streamed_optimizer("sgd", net), torch_optimizer("sgd", resident)
        for number in range(2):
            torch.manual_seed(number)
            take_step(net, ours, number, name)
            torch.manual_seed(number)
            take_step(resident, theirs, number, name)
        for value, other in zip(net.parameters(), resident.parameters(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


def test_parameters_that_the_optimizer_does_not_have_keep_their_gradients() -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    net, x = sft.compile(model, (4, 8), options=STREAM), image(4, 8)
    optimizer = sft.StreamedOptimizer(net, "sgd", params=[net.shared.weight, net.first.weight, net.second.weight], lr=0.1, momentum=0.5)
    theirs = torch.optim.SGD([plain.shared.weight, plain.first.weight, plain.second.weight], lr=0.1, momentum=0.5, foreach=False)
    for number in range(3):
        for module in (net, plain):
            module.zero_grad()
            module(x)[number % 2].sum().backward()  # the head that is not used is not updated, momentum or not
        torch.testing.assert_close(net.shared.bias.grad, plain.shared.bias.grad, rtol=1e-12, atol=1e-12)
        assert net.shared.weight.grad is None
        optimizer.step()
        theirs.step()
    for (name, ours), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_are_added_up_and_clipped_in_two_phases() -> None:
    net, resident = pair_of("vgg")
    ours, theirs = streamed_optimizer("sgd", net, max_norm=0.05), torch_optimizer("sgd", resident)
    for number in range(2):
        for micro_step in range(2):
            for model in (net, resident):
                model(x_of("vgg") + micro_step + number).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(resident.parameters(), 0.05, foreach=False) > 0.05
        ours.step()
        theirs.step()
        theirs.zero_grad()
    for value, other in zip(net.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)
    with pytest.raises(sft.BudgetError, match="two-phase"):
        tight = sft.compile(seeded(Mlp), (None, 16), budget="2KiB", options=STREAM)
        streamed_optimizer("sgd", tight, two_phase=True)
        tight(image(1, 16))


def test_half_precision_has_full_copies_in_the_state() -> None:
    net: Any = sft.compile(seeded(Mlp).bfloat16(), (4, 16), options=STREAM)
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


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_failing_pass_changes_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    net, resident = pair_of("norms", tmp_path / "w" if where == "disk" else None)
    ours, theirs = streamed_optimizer("adamw", net), torch_optimizer("adamw", resident)
    take_step(net, ours, 0)
    take_step(resident, theirs, 0)
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(ours.state_dict())
    moves = [entry.move for entry in net.plan.timeline.entries]
    for place in (moves[3], moves[-2]):
        out = None if place.startswith("F") else net(x_of("norms")).sum()
        if out is not None:
            weights = copy.deepcopy(net.state_dict())  # running statistics are those of the forward pass
        with monkeypatch.context() as patched:
            patched.setattr(TorchMachine, "start_op", _stopping_at(place))
            with pytest.raises(_Stop):
                net(x_of("norms")) if out is None else out.backward()
        assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
        assert same_state(ours.state_dict(), state)
    resident(x_of("norms"))
    take_step(net, ours, 1)
    take_step(resident, theirs, 1)
    assert_same(net, resident)
    assert threading.active_count() == threads
    assert where == "host" or [path.name for path in tmp_path.iterdir()] == ["w"]


def _stopping_at(place: str) -> Callable[[TorchMachine, Any], None]:
    def begin(machine: TorchMachine, move: Any) -> None:
        if str(move) == place:
            raise _Stop

    return begin


def test_a_backward_pass_needs_the_weights_of_its_forward_pass() -> None:
    net, _ = pair_of("mlp")
    x = x_of("mlp")
    optimizer = streamed_optimizer("sgd", net)
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


def test_a_file_resumes_with_another_plan(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    net, resident = pair_of("vgg", path)
    ours, theirs = streamed_optimizer("adamw", net), torch_optimizer("adamw", resident)
    for number in range(2):
        take_step(net, ours, number, "vgg")
        take_step(resident, theirs, number, "vgg")
    net(x_of("vgg")).sum().backward()  # a step that is never committed
    del net, ours
    fresh = seeded(Vgg, seed=7)
    with pytest.raises(sft.InputError, match="resume"):
        sft.compile(fresh, SHAPE, options=sft.Options(weights=sft.WeightsFile(path)))(x_of("vgg"))
    wrong = (sft.WeightsFile(tmp_path / "none", resume=True), "there is no file"), (sft.WeightsFile(path, resume=True), "another model")
    for file, message in wrong:
        with pytest.raises(sft.InputError, match=message):
            sft.compile(seeded(Vgg).float(), SHAPE, options=sft.Options(weights=file))(x_of("vgg").float())
    # In strips and of another size: records follow the model alone.
    options = sft.Options(weights=sft.WeightsFile(path, resume=True), tile=(4, None))
    again = sft.compile(fresh, (None, 3, None, None), options=options)
    optimizer = streamed_optimizer("adamw", again)
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [2] * 10
    take_step(again, optimizer, 3, "vgg")
    take_step(resident, theirs, 3, "vgg")
    for value, other in zip(again.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)
    stored = DiskStore.open(path)
    assert [layout.fields[0].spec.name for layout in stored.layouts] == [name for name, _ in fresh.named_parameters()]
    with pytest.raises(sft.InputError, match="another model"):
        sft.compile(seeded(Mlp), (4, 16), options=options)(x_of("mlp"))


def test_prefetched_weights_are_hits(tmp_path: Path) -> None:
    net: Any = sft.compile(seeded(Mlp), (4, 16), options=sft.Options(weights=sft.WeightsFile(tmp_path / "w")))
    x = x_of("mlp")
    net(x).sum().backward()
    counters = net.weight_counters
    assert counters.misses == 2 * 2, "the first weight and bias of either pass"
    assert counters.hits + counters.waits == counters.reads - counters.misses
    assert counters.num_copies == 2 * 12
    assert counters.copied_bytes == 2 * sum(param.numel() * 8 for param in net.parameters())


def _killed_in_the_second_step(path: str, num_writes: int) -> None:
    """Two steps in a separate process, which is killed when a weight is written for the second time."""
    torch.set_num_threads(1)
    net = sft.compile(seeded(Vgg), SHAPE, options=sft.Options(weights=sft.WeightsFile(path, durable=False)))
    optimizer = streamed_optimizer("adamw", net)
    take_step(net, optimizer, 0, "vgg")
    write, written = DiskStore.write, 0

    def counted(*arguments: Any) -> None:
        nonlocal written
        if written == num_writes:
            os.kill(os.getpid(), signal.SIGKILL)
        written += 1
        write(*arguments)

    DiskStore.write = counted  # type: ignore[method-assign, assignment]  # of this process alone
    take_step(net, optimizer, 1, "vgg")


@pytest.mark.parametrize("num_writes", [0, 7, 19])
def test_a_killed_process_loses_the_step_that_it_was_in(num_writes: int, tmp_path: Path) -> None:
    process = fork_context().Process(target=_killed_in_the_second_step, args=(str(tmp_path / "w"), num_writes))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resident = sft.compile(seeded(Vgg), SHAPE)
    theirs = torch_optimizer("adamw", resident)
    take_step(resident, theirs, 0, "vgg")
    net = sft.compile(seeded(Vgg, seed=7), SHAPE, options=sft.Options(weights=sft.WeightsFile(tmp_path / "w", resume=True)))
    ours = streamed_optimizer("adamw", net)
    for number in (1, 2):
        assert_same(net, resident)
        assert same_state(ours.state_dict(), theirs.state_dict())
        take_step(net, ours, number, "vgg")
        take_step(resident, theirs, number, "vgg")
    assert_same(net, resident)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["host", "disk"])
def test_on_a_cuda_device(where: str, tmp_path: Path) -> None:
    weights: Any = "stream" if where == "host" else sft.WeightsFile(tmp_path / "w")
    net = sft.compile(seeded(BatchNormed), SHAPE, device="cuda", options=sft.Options(weights=weights))
    resident = sft.compile(seeded(BatchNormed), SHAPE, device="cuda")
    assert all(param.device.type == "cpu" for param in net.parameters())
    assert all(buffer.device.type == "cuda" for buffer in net.buffers())
    ours, theirs = streamed_optimizer("adamw", net), torch_optimizer("adamw", resident)
    x = image(*SHAPE).cuda()
    for _ in range(3):
        for model, optimizer in ((net, ours), (resident, theirs)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for value, other in zip(net.state_dict().values(), resident.state_dict().values(), strict=True):
        torch.testing.assert_close(value.cpu(), other.cpu(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
@pytest.mark.parametrize("ask", ["grad", "inputs"])
@pytest.mark.parametrize("name", ["norms", "mlp"])
def test_a_gradient_of_the_input_alone_trains_nothing(name: str, ask: str, two_phase: bool) -> None:
    """Adversarial training and saliency maps request the input's gradient only, and make no step."""
    net, resident = pair_of(name)
    ours, theirs = streamed_optimizer("sgd", net, two_phase=two_phase), torch_optimizer("sgd", resident)
    for number in range(2):
        for model, optimizer in ((net, ours), (resident, theirs)):
            before = {key: value.clone() for key, value in model.state_dict().items()}
            x = (x_of(name) + number).requires_grad_()
            loss = model(x).square().mean()
            if ask == "grad":
                (x_grad,) = torch.autograd.grad(loss, x)
            else:
                loss.backward(inputs=[x])
                assert x.grad is not None
                x_grad = x.grad
            assert all(param.grad is None for param in model.parameters())
            model.load_state_dict(before)  # statistics of norms have changed
            model((x + 0.1 * x_grad.sign()).detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, resident)


def test_an_interrupted_wait_for_a_weight_continues_at_its_release() -> None:
    """Otherwise its bytes would be reused during the copy."""
    net, _ = pair_of("mlp")
    owner = net._sft_engine.stream_weights()
    weights = WeightPass(device=torch.device("cpu"), store=owner.store, records={"w": 0}, paths={"w": "w"}, counters=owner.counters)
    asked = []

    class Copy:
        def result(self) -> None:
            asked.append(handle.untyped_storage().nbytes())
            if len(asked) == 1:
                raise KeyboardInterrupt

        def done(self) -> bool:
            return False

    handle = weights.load("w", 64, (16,), torch.float32, None, ahead=True)
    weights._arriving["w"] = Copy()  # type: ignore[assignment]  # all that is asked of a future
    with pytest.raises(KeyboardInterrupt):
        weights.wait(["w"])
    weights.free("w", handle)
    assert asked == [64, 64] and handle.untyped_storage().nbytes() == 0
    weights.close()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_step_interrupted_after_its_commit_is_complete(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, resident = pair_of("mlp", tmp_path / "weights" if where == "disk" else None)
    ours, theirs = streamed_optimizer("adamw", net), torch_optimizer("adamw", resident)
    store = net._sft_engine.streamed_weights.store
    commit = type(store).commit

    def interrupted(self: Any, *arguments: Any) -> None:
        commit(self, *arguments)
        raise KeyboardInterrupt

    for number in range(3):
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setattr(type(store), "commit", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    take_step(net, ours, number, "mlp")
                ours.zero_grad()
            else:
                take_step(net, ours, number, "mlp")
        take_step(resident, theirs, number, "mlp")
    assert_same(net, resident)
    assert same_state(ours.state_dict(), theirs.state_dict())
