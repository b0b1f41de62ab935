"""Autograd habits of ``forward``: regions under ``torch.no_grad`` (spectral norms among them), writes past autograd, hooks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

import sft
from sft.common.torch_internals import is_under_functorch_transform
from sft.torch_runtime.autograd import run_region
from tests.helpers.exactness import assert_exact, relative_error
from tests.helpers.models import chain, image, seeded

_SHAPE = (2, 3, 14, 11)


class Parts(nn.Module):
    """Two convolutions, a parameter and a buffer; subclasses use them in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.average: Tensor
        self.register_buffer("average", torch.ones(4, 1, 1))


# -- spectral norms ----------------------------------------------------------------------------------------------------


def _spectral(normed: Callable[..., nn.Module]) -> nn.Module:
    conv, transposed = normed(nn.Conv2d(3, 4, 3)), normed(nn.ConvTranspose2d(4, 3, 3, stride=2), n_power_iterations=2)
    return chain(conv, nn.LeakyReLU(0.2), transposed)


@pytest.mark.parametrize(
    ("normed", "tile"), [(parametrizations.spectral_norm, (5, 6)), (spectral_norm, (4, None))], ids=["parametrization", "hook"]
)
def test_spectral_norm(normed: Callable[..., nn.Module], tile: tuple[int, int | None]) -> None:
    torch.manual_seed(0)
    report = assert_exact(_spectral(normed), image(*_SHAPE), options=sft.Options(tile=tile), steps=3)
    assert [segment.mode for segment in report.plan.segments] == ["whole", "tiled"], "the weights first, then one run of strips"


def test_spectral_norm_updates_once_a_step_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)).double()
    net = sft.compile(copy.deepcopy(model), (*_SHAPE[:2], None, None), options=sft.Options(tile=(4, None)))
    x = image(*_SHAPE)

    def failing(*arguments: Any) -> Any:
        run_region(*arguments)
        raise KeyboardInterrupt

    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sft.api.engine.run_region", failing)
        net(x)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers()), "a failed call changes nothing"
    for module in (model, net):
        module(x)
    moved = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert all(relative_error(moved[name], buffer) <= 1e-12 for name, buffer in model.named_buffers())
    assert not any(torch.equal(moved[name], before) for name, before in buffers.items())
    assert relative_error(net.eval()(x), model.eval()(x)) <= 1e-12
    assert all(torch.equal(buffer, moved[name]) for name, buffer in net.named_buffers())


def test_spectral_norm_by_a_hook_of_the_root_is_refused() -> None:
    """Its hook runs around every call, and would update a second time inside of the call."""
    with pytest.raises(sft.UnsupportedError, match=r"Conv2d: a hook of the model itself.*parametrizations\.spectral_norm"):
        sft.compile(spectral_norm(nn.Conv2d(3, 4, 3)), _SHAPE)


# -- torch.no_grad inside ----------------------------------------------------------------------------------------------


class Gated(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        with torch.no_grad():
            gate: Tensor = self.norm(self.second(y)).sigmoid()
        return y * gate


class FrozenEncoder(Parts):
    @torch.no_grad()
    def encoded(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu_()).relu_()
        return out

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoded(x)) * self.scale


class Nested(Parts):
    """Gradients on again inside; the same under autocast, where the exporter loses the switch."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        with torch.no_grad():
            hidden = self.second(y)
            with torch.enable_grad():
                seen = self.second(y)
            doubled = seen * 2
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            cast = self.second(y)
        with torch.inference_mode():
            inferred = self.second(y)
        return hidden, seen, doubled, y * cast, y + inferred.clone()


class StraightThrough(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            same = y.contiguous()  # no conversion: y itself, with its gradient
            steps = torch.round(y * 4) / 4
        out: Tensor = self.second(same + (steps - y.data))
        return out


class Averaged(Parts):
    """A buffer that is changed in place, from parameters and from the image, and read before and after."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        before = y * self.average.clone()
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.scale, alpha=0.1)
            self.average += 0.1 * y.abs().mean((0, 2, 3))[:, None, None]
        return torch.tanh(before) + y * self.average


class Filled(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        with torch.no_grad():
            mask = torch.zeros_like(y)
            mask[:, 1:] = y[:, 1:].abs()
        return y * mask


@pytest.mark.parametrize("make", [Gated, FrozenEncoder, Nested, StraightThrough, Averaged])
def test_parts_without_gradients(make: Callable[[], nn.Module]) -> None:
    report = assert_exact(seeded(make), image(*_SHAPE), options=sft.Options(tile=(5, 6)), steps=3)
    assert not report.plan.notes, "nothing runs whole for it"


def test_a_mask_filled_in_place() -> None:
    assert_exact(seeded(Filled), image(*_SHAPE), options=sft.Options(tile=(4, None)))


def test_an_encoder_without_gradients_keeps_no_residuals() -> None:
    """Its strips run only forward, a second time in the backward pass; its parameters have no gradient, not zeros."""
    model = seeded(FrozenEncoder)
    net: Any = sft.compile(model, _SHAPE, options=sft.Options(tile=(4, None)))
    training = net.plan_for(_SHAPE)
    with torch.no_grad():
        assert training.flops == 2 * net.plan_for(_SHAPE).flops
    net(image(*_SHAPE)).sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is not None] == ["scale"]


def test_a_model_all_without_gradients() -> None:
    class Whole(Parts):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    assert_exact(seeded(Whole), image(*_SHAPE), options=sft.Options(tile=(4, None)))


def test_a_checkpoint_inside() -> None:
    class Checkpointed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.first, x, use_reentrant=False)
            out: Tensor = checkpoint(self.second, y, use_reentrant=True)
            return out

    assert_exact(seeded(Checkpointed), image(*_SHAPE), options=sft.Options(tile=(4, None)))


# -- refused -----------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """A gradient reversal: its derivative is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


#: As in PyTorch's tutorials.
_bound: Any = Reversed.apply


def _reversed(y: Tensor) -> Tensor:
    out: Tensor = Reversed.apply(y)  # type: ignore[no-untyped-call]  # torch's own
    return out


def _hidden_write(model: Parts, y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y


def _clamped_parameter(model: Parts, y: Tensor) -> Tensor:
    with torch.no_grad():
        model.scale.clamp_(-0.1, 0.1)
    return y * model.scale


def _write_through(model: Parts, y: Tensor) -> Tensor:
    y.detach()[:, 1:].mul_(2)
    return y


def _activated_in_place(model: Parts, y: Tensor) -> Tensor:
    return y * nn.functional.silu(y.detach(), inplace=True)


def _filled_and_scaled(model: Parts, y: Tensor) -> Tensor:
    mask = torch.zeros_like(y)
    mask[:, 1:] = y[:, 1:]
    with torch.no_grad():
        mask.mul_(2)
    return mask


def _clamped_data(model: Parts, y: Tensor) -> Tensor:
    model.scale.data.clamp_(-0.1, 0.1)
    return y * model.scale


def _set_data(model: Parts, y: Tensor) -> Tensor:
    model.scale.data = model.scale.data * 2
    return y * model.scale


def _hooked(model: Parts, y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: -gradient)
    return y


def _differentiated(model: Parts, y: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.sum(), model.first.weight, create_graph=True)
    return y * gradient.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hidden_write, r"Changed: `forward` writes in place \(mul_\), under torch.no_grad"),
        (
            _clamped_parameter,
            r"under torch.no_grad, into the parameter scale, .* make it a buffer \(register_buffer\) if it is not trained",
        ),
        (_write_through, r"writes in place \(mul_\) through x.detach\(\)"),
        (_activated_in_place, r"writes in place \(silu\) through x.detach\(\)"),
        (_filled_and_scaled, r"writes in place \(mul_\), under torch.no_grad"),
        (_clamped_data, r"writes in place \(clamp_\) through x.detach\(\) or x.data"),
        (_set_data, r"sets x.data of a tensor of shape \(4, 1, 1\)"),
        (lambda model, y: torch.zeros_like(y).set_(y), r"calls set_ with a tensor of shape .* that may require a gradient"),
        (lambda model, y: torch.ops.aten.set_.source_Tensor(torch.empty(0), y), r"calls set_ with a tensor .* assign the tensor"),
        (lambda model, y: y.view_as(y).set_(y.detach()), r"calls set_ with a tensor .* or give it x.detach\(\)"),
        (lambda model, y: y.detach_(), r"detach_.*write x = x.detach\(\)"),
        (_hooked, r"calls register_hook on a tensor"),
        (lambda model, y: _reversed(y), r"Reversed: a torch.autograd.Function has a backward of its own"),
        (lambda model, y: _bound(y), r"Reversed: a torch.autograd.Function has a backward of its own"),
        (_differentiated, r"differentiates inside \(grad\)"),
        (lambda model, y: torch.func.grad(lambda x: (x * model.scale).sum())(y), r"differentiates inside \(torch.func\).* do it outside"),
        (lambda model, y: torch.func.vjp(torch.tanh, y)[1](y)[0], r"differentiates inside \(torch.func\).* do it outside"),
        (lambda model, y: torch.func.vmap(lambda x: x * model.scale)(y), r"calls torch.func.vmap.* in a loop and torch.stack the results"),
        (lambda model, y: y * 2 if random.random() < 0.5 else y, r"Changed: `forward` draws from `random`"),
        (lambda model, y: y * float(np.random.rand()), r"Changed: `forward` draws from `numpy.random`"),
    ],
)
def test_writes_past_autograd_are_refused(change: Callable[[Parts, Tensor], Tensor], message: str) -> None:
    class Changed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(change(self, self.first(x)))
            return out

    model = seeded(Changed)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sft.UnsupportedError, match=message):
        sft.compile(model, _SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert _reversed(torch.ones(1, requires_grad=True)).requires_grad, "elsewhere it works as before"
    assert not is_under_functorch_transform(), "a transform of torch.func ends with the refusal"


def _scaled_by_itself(y: Tensor) -> Tensor:
    y = y.clone()
    y.sub_(y.detach().mean((2, 3), keepdim=True))
    y += y.data
    return y * y.detach()


def _assigned_from_another_channel(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, :2] = y[:, 2:].detach()
    y[:, 2:].add_(y.detach()[:, :2], alpha=0.5)
    return y


@pytest.mark.parametrize("change", [_scaled_by_itself, _assigned_from_another_channel])
def test_a_write_that_reads_the_detached_value(change: Callable[[Tensor], Tensor]) -> None:
    """The detached view has the version counter of the tensor that is written to."""

    class Changed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(change(self.first(x)))
            return out

    assert_exact(seeded(Changed), image(*_SHAPE), options=sft.Options(tile=(4, None)))


def test_set_of_detached_tensors_runs_as_in_eager() -> None:
    """``set_`` has no derivative, and needs none for tensors without a gradient."""

    class Replaced(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            out: Tensor = self.second(y * torch.empty(0, dtype=y.dtype).set_(y.detach()))
            return out

    model = seeded(Replaced)
    net, x = sft.compile(copy.deepcopy(model), _SHAPE), image(*_SHAPE)
    parameters = (model.first.weight, model.second.weight)
    plain = torch.autograd.grad(model(x).square().sum(), parameters)
    ours = torch.autograd.grad(net(x).square().sum(), (net.first.weight, net.second.weight))
    assert all(relative_error(a, b) <= 1e-12 for a, b in zip(ours, plain, strict=True))


def test_hooks_of_the_root_run_once() -> None:
    model = chain(nn.Conv2d(3, 4, 3)).double()
    net = sft.compile(copy.deepcopy(model), _SHAPE)
    calls: list[str] = []
    steps = []
    for module in (model, net):
        module.register_forward_pre_hook(lambda _, inputs: calls.append("before") or (inputs[0] * 2,))  # type: ignore[func-returns-value]
        module.register_forward_hook(lambda _, inputs, output: calls.append("after") or output + 1)  # type: ignore[func-returns-value]
        x = image(*_SHAPE).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        assert x.grad is not None
        steps.append((y, x.grad))
    assert calls == ["before", "after"] * 2
    assert all(relative_error(ours, eager) <= 1e-12 for ours, eager in zip(steps[1], steps[0], strict=True))


def test_the_callers_hooks_and_anomaly_detection_are_not_on_while_a_model_is_traced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3))
    net = sft.compile(model, (1, 3, None, None))
    x = torch.randn(1, 3, 24, 20)
    checkpoint(net, x, use_reentrant=False).sum().backward()  # captures anew while its hooks are on
    gradients = [param.grad for param in net.parameters()]
    plain = torch.autograd.grad(model(x).sum(), tuple(model.parameters()))
    torch.testing.assert_close(gradients, list(plain))
    with torch.autograd.set_detect_anomaly(True):
        assert sft.compile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SELU()), (1, 3, 30, 20))(torch.randn(1, 3, 30, 20)).requires_grad
        assert torch.is_anomaly_enabled()
