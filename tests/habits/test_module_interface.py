"""A compiled model is a module: the user's loop does not change."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact, gradient_errors, plan_of, relative_error
from tests.helpers.models import Around, ConvNet, Residual, TinyUNet, chain, image, seeded

_SHAPE = (2, 3, 20, 12)
_OPTIONS = sft.Options(tile=(6, 12))


def _pair() -> tuple[ConvNet, nn.Module]:
    """A model, and its compiled form."""
    model = seeded(ConvNet)
    return model, sft.compile(model, _SHAPE, options=_OPTIONS)


def _grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def test_is_an_instance_of_the_model_s_class() -> None:
    model, net = _pair()
    assert isinstance(net, ConvNet) and type(net) is not ConvNet
    assert type(model) is ConvNet, "the caller's model is left as it was"
    assert [name for name, _ in net.named_modules()] == [name for name, _ in model.named_modules()]


def test_modules_that_it_makes_of_its_class_are_plain() -> None:
    """Slices and sums of a Sequential are new modules of its class, which are not compiled."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)))
    net: Any = sft.compile(model, _SHAPE, options=_OPTIONS)
    x = image(*_SHAPE)
    makes: list[Callable[[Any], Any]] = [lambda m: m[:2], lambda m: m + nn.Sequential(nn.ReLU()), lambda m: type(m)(*m)]
    for make in makes:
        assert torch.equal(make(net)(x), make(model)(x))
    assert type(net[-1:]) is nn.Sequential and net[-1:][0] is model[2]
    assert type(net) is not nn.Sequential and torch.allclose(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_state_dict_and_shared_tensors() -> None:
    model, net = _pair()
    assert list(net.state_dict()) == list(model.state_dict())
    for (name, p), (other_name, q) in zip(net.named_parameters(), model.named_parameters(), strict=True):
        assert name == other_name and p is q
    for (name, b), (other_name, c) in zip(net.named_buffers(), model.named_buffers(), strict=True):
        assert name == other_name and b is c


def test_state_dict_loads_in_both_directions() -> None:
    model, net = _pair()
    other = seeded(ConvNet, seed=1)
    x = image(*_SHAPE)
    net.load_state_dict(other.state_dict())
    assert relative_error(net(x), other(x)) <= 1e-12
    other.load_state_dict(seeded(ConvNet, seed=2).state_dict())
    model.load_state_dict(other.state_dict())
    assert relative_error(net(x), other(x)) <= 1e-12
    stream = io.BytesIO()
    torch.save(net.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream))


def test_train_and_eval_stay_in_step() -> None:
    model, net = _pair()
    for mode in (False, True, False):
        net.train(mode)
        assert {module.training for module in (*net.modules(), *model.modules())} == {mode}
    for mode in (True, False):
        model.train(mode)
        assert {module.training for module in (*net.modules(), *model.modules())} == {mode}


def test_optimizer_and_gradients_are_shared() -> None:
    model, net = _pair()
    reference = copy.deepcopy(model)
    for module, parameters in ((reference, reference.parameters()), (net, model.parameters())):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            module(image(*_SHAPE, seed=step)).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_error(p, q) <= 1e-9


def test_gradient_accumulation() -> None:
    model, net = _pair()
    reference = copy.deepcopy(model)
    for module in (reference, net):
        for seed in range(3):
            module(image(*_SHAPE, seed=seed)).square().sum().backward()
    assert max(gradient_errors(_grads(net), _grads(reference)).values()) <= 1e-11


def test_two_forwards_before_their_backwards() -> None:
    model, net = _pair()
    reference = copy.deepcopy(model)
    for module in (reference, net):
        first, second = (module(image(*_SHAPE, seed=seed)) for seed in (0, 1))
        (first * second).sum().backward()
    assert max(gradient_errors(_grads(net), _grads(reference)).values()) <= 1e-11


def test_hooks_on_parameters() -> None:
    _, net = _pair()
    calls: list[str] = []
    parameter = next(net.parameters())

    def halve(gradient: Tensor) -> Tensor:
        calls.append("gradient")
        return gradient / 2

    net(image(*_SHAPE)).sum().backward()
    assert parameter.grad is not None
    whole = parameter.grad.clone()
    net.zero_grad(set_to_none=True)
    parameter.register_hook(halve)
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    net(image(*_SHAPE)).sum().backward()
    assert calls == ["gradient", "accumulated"]
    torch.testing.assert_close(parameter.grad, whole / 2)


def test_only_the_requested_gradients() -> None:
    """``torch.autograd.grad`` for some inputs touches no ``.grad``."""
    model, net = _pair()
    x = image(*_SHAPE).requires_grad_()
    weight = model.body[3].weight
    assert isinstance(weight, Tensor)
    wanted = (x, weight)
    ours = torch.autograd.grad(net(x).square().sum(), wanted)
    eager = torch.autograd.grad(model(x).square().sum(), wanted)
    assert all(relative_error(a, b) <= 1e-11 for a, b in zip(ours, eager, strict=True))
    assert x.grad is None and all(p.grad is None for p in net.parameters())


def test_frozen_after_compile() -> None:
    model, net = _pair()
    net(image(*_SHAPE)).sum().backward()
    net.zero_grad(set_to_none=True)
    model.body[0].requires_grad_(False)
    model.body[3].requires_grad_(False)
    reference = copy.deepcopy(model)
    for module in (reference, net):
        module(image(*_SHAPE)).sum().backward()
    assert max(gradient_errors(_grads(net), _grads(reference)).values()) <= 1e-11


def test_parameter_replaced_after_compile() -> None:
    model, net = _pair()
    net(image(*_SHAPE))
    conv = model.body[0]
    assert isinstance(conv, nn.Conv2d)
    conv.weight = nn.Parameter(torch.randn_like(conv.weight))
    assert relative_error(net(image(*_SHAPE)), model(image(*_SHAPE))) <= 1e-12


def test_deepcopy_is_independent() -> None:
    _, net = _pair()
    x = image(*_SHAPE)
    before = net(x).detach().clone()
    twin = copy.deepcopy(net)
    assert type(twin) is type(net)
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in net.parameters())
    assert torch.equal(twin(x), before)
    twin(x).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(net(x), before)


def test_a_copy_counts_the_same_bytes_of_an_optimizer() -> None:
    model = seeded(ConvNet)
    nets = [sft.compile(model, _SHAPE, options=_OPTIONS, optimizer=state_bytes) for state_bytes in (0, 12_345)]
    plain, counted = (sft.of(net).plan.resident_bytes for net in nets)
    assert counted == plain + 12_345
    assert sft.of(copy.deepcopy(nets[1])).plan_for(_SHAPE).resident_bytes == counted


def test_pickle() -> None:
    _, net = _pair()
    x = image(*_SHAPE)
    twin = pickle.loads(pickle.dumps(net))
    assert isinstance(twin, ConvNet) and type(twin) is type(net)
    assert torch.equal(twin(x), net(x))
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_pickle_after_a_step() -> None:
    """Cached programs, and states of an unfinished step, are not pickled."""
    _, net = _pair()
    y = net(image(*_SHAPE))
    twin = pickle.loads(pickle.dumps(net))
    y.sum().backward()
    assert torch.equal(twin(image(*_SHAPE)), net(image(*_SHAPE)))


def test_to_float64() -> None:
    model = seeded(ConvNet).float()
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    assert net(image(*_SHAPE).float()).dtype == torch.float32
    assert net.to(torch.float64) is net
    x = image(*_SHAPE)
    assert relative_error(net(x), copy.deepcopy(model).double()(x)) <= 1e-12
    net(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in net.parameters())


def test_a_new_size_plans_anew() -> None:
    model, net = _pair()
    for shape in ((2, 3, 20, 12), (1, 3, 33, 11), (3, 3, 9, 12), (2, 3, 20, 12)):
        assert relative_error(net(image(*shape)), model(image(*shape))) <= 1e-12


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_is_eager_s_and_needs_less(context: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    model = seeded(lambda: Around(chain(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))))
    shape = (1, 3, 128, 32)
    net = sft.compile(model, shape, options=sft.Options(tile=(8, 32)))

    def peak_of_inference(module: nn.Module) -> tuple[Tensor, int]:
        with context(), sft.measure_peak("cpu") as peak:
            y = module(image(*shape))
        return y, peak.num_bytes

    (ours, ours_bytes), (eager, eager_bytes) = peak_of_inference(net), peak_of_inference(model)
    assert not ours.requires_grad
    assert relative_error(ours.clone(), eager.clone()) <= 1e-12
    assert ours_bytes < eager_bytes
    net.zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as training:
        x = image(*shape).requires_grad_()
        y = net(x)
        y.backward(torch.ones_like(y))
    assert ours_bytes < training.num_bytes
    with torch.no_grad():
        plan = plan_of(net, image(*shape))
    assert ours_bytes <= plan.projected_peak_bytes


def test_streaming_needs_less_than_eager() -> None:
    model = seeded(TinyUNet)
    shape = (1, 3, 256, 16)
    net = sft.compile(copy.deepcopy(model), shape, options=sft.Options(tile=(16, 16)))
    peaks = []
    for module in (net, model):
        with sft.measure_peak("cpu") as peak:
            x = image(*shape).requires_grad_()
            y = module(x)
            y.backward(torch.ones_like(y))
        peaks.append(peak.num_bytes)
    assert peaks[0] < peaks[1]


def test_two_runs_give_the_same_bits() -> None:
    _, net = _pair()
    results = []
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        x = image(*_SHAPE).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(g for g in _grads(net).values() if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_input_that_is_not_contiguous() -> None:
    model, net = _pair()
    x = image(2, 3, 12, 20).transpose(2, 3)
    assert relative_error(net(x), model(x)) <= 1e-12
    x = image(*_SHAPE).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = x.detach().clone().requires_grad_()
    net(x).sum().backward()
    model(y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert relative_error(x.grad, y.grad) <= 1e-11


def test_output_gradient_that_is_expanded() -> None:
    """``y.sum()`` has the gradient of one number expanded to the output's shape; a transposed one is accepted, too."""
    model, net = _pair_of_residuals()
    for module in (model, net):
        module(image(*_SHAPE)).transpose(2, 3).sum().backward()
    assert max(gradient_errors(_grads(net), _grads(model)).values()) <= 1e-11


def _pair_of_residuals() -> tuple[Residual, nn.Module]:
    model = seeded(Residual)
    return model, sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)


def test_a_parameter_shared_by_two_layers() -> None:
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    second.weight = first.weight
    model = seeded(lambda: chain(first, nn.ReLU(), second, first))
    assert_exact(model, image(*_SHAPE), options=_OPTIONS)


def test_printing() -> None:
    _, net = _pair()
    assert "Conv2d" in repr(net)
    assert str(plan_of(net, image(*_SHAPE)))
