"""Python state of a model: attributes that `forward` changes, and unregistered tensors."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_SHAPE = (1, 3, 24, 20)


class _Model(nn.Module):
    """A convolution, some attributes, and a function of both."""

    def __init__(self, then: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self, self.conv(x))
        return out


# --- attributes that forward sets -----------------------------------------------------------------------------------


def _count(model: Any, y: Tensor) -> Any:
    model.calls += 1
    return y * model.calls


def _begin(model: Any, y: Tensor) -> Tensor:
    if not model.has_begun:
        model.has_begun = True
        return y * 2
    return y


def _append(model: Any, y: Tensor) -> Any:
    model.calls.append(1)
    return y * len(model.calls)


def _count_by_name(model: Any, y: Tensor) -> Any:
    model.calls["forward"] = model.calls.get("forward", 0) + 1
    return y + model.calls["forward"]


@pytest.mark.parametrize(
    ("then", "attributes", "name"),
    [
        (_count, {"calls": 0}, "calls"),
        (_begin, {"has_begun": False}, "has_begun"),
        (_append, {"calls": []}, "calls"),
        (_count_by_name, {"calls": {}}, "calls"),
    ],
)
def test_state_that_changes_the_next_call_is_refused(then: Any, attributes: Any, name: str) -> None:
    """A capture would repeat the first call in each step: all steps but the first would be wrong."""
    model = seeded(lambda: _Model(then, **copy.deepcopy(attributes)))
    with pytest.raises(sft.UnsupportedError, match=rf"`forward` sets {name}, .*Set it outside of `forward`"):
        sft.compile(model, _SHAPE)
    assert {key: getattr(model, key) for key in attributes} == attributes


def _count_alone(model: Any, y: Tensor) -> Tensor:
    model.calls += 1
    return y.relu()


def _keep_sizes(model: Any, y: Tensor) -> Any:
    model.shape, model.height = y.shape, y.shape[2]
    return y / model.height


def _keep_features(model: Any, y: Tensor) -> Tensor:
    model.features = y.detach()
    model.history.append(y)
    return y.relu()


@pytest.mark.parametrize(
    ("then", "attributes"),
    [(_count_alone, {"calls": 0}), (_keep_sizes, {"shape": None}), (_keep_features, {"features": None, "history": []})],
)
def test_state_that_no_call_reads_is_restored(then: Any, attributes: Any) -> None:
    """With fake tensors and symbols of the exporter in it, the model could be neither called again, nor copied, nor pickled."""
    model = seeded(lambda: _Model(then, **copy.deepcopy(attributes)))
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    net = sft.compile(copy.deepcopy(model), _SHAPE)
    for size in (_SHAPE, _SHAPE, (1, 3, 20, 16)):
        net(image(*size)).sum().backward()
    assert {key: getattr(net, key) for key in attributes} == attributes
    copy.deepcopy(net)
    pickle.dumps(net)
    assert_exact(model, image(*_SHAPE), options=sft.Options(tile=(5, 20)))
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")}.keys() == before.keys()


# --- numbers that forward reads from tensors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "then",
    [
        lambda model, y: y * (model.conv.bias[0] + y.detach().mean()).item(),
        lambda model, y: y / y.detach().abs().max().item(),
        lambda model, y: y + model.number.add_(1).item(),
        lambda model, y: nn.functional.leaky_relu(y, (model.conv.bias[0] * y.detach().mean()).item()),
        lambda model, y: y.masked_fill(y > 0, y.detach()[0, 0, 0, 0].item()),
    ],
)
def test_a_number_read_from_a_tensor_is_refused(then: Any) -> None:
    """In the graph it has no value: results would be NaN, without an error."""
    model = _Model(then)
    model.register_buffer("number", torch.tensor(2))
    with pytest.raises(sft.UnsupportedError, match=r"item: it computes with a Python number read from a tensor; use the tensor itself"):
        sft.compile(model, _SHAPE)
    assert not sft.check(model, _SHAPE).ok


def test_a_missing_input_is_the_reason_of_the_refusal() -> None:
    class Open(_Model):
        def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
            return super().forward(x)

    with pytest.raises(sft.UnsupportedError, match=r"item: it computes with a Python number read from a tensor"):
        sft.compile(Open(lambda model, y: y * y.mean().item()), _SHAPE)


def test_item_of_a_constant_is_a_python_number() -> None:
    model = seeded(lambda: _Model(lambda model, y: y * torch.tensor(2.5).item()))
    assert_exact(model, image(*_SHAPE), options=sft.Options(tile=(5, 20)))


# --- tensors that are neither parameters nor buffers ----------------------------------------------------------------


def _all_loose(model: Any, y: Tensor) -> Tensor:
    scores: Tensor = model.heads[0](y) * model.scales["a"][0] * model.own
    return scores


def _loose(*, requires_grad: bool) -> Any:
    model: Any = seeded(lambda: _Model(_all_loose))
    scale, own = (torch.full((1,), 2.0, dtype=torch.float64, requires_grad=requires_grad) for _ in range(2))
    model.heads = [nn.Conv2d(4, 2, 1).double().requires_grad_(requires_grad)]
    model.scales, model.own = {"a": [scale]}, own
    return model


def test_differentiable_tensors_that_are_no_parameters_are_refused() -> None:
    """Without a gradient, layers in a plain list would never be trained."""
    model = _loose(requires_grad=True)
    with pytest.raises(sft.UnsupportedError) as refused:
        sft.compile(model, _SHAPE)
    for name in ("heads[0].weight", "heads[0].bias", "scales['a'][0]", "own"):
        assert f"{name}: a tensor that requires a gradient and is not a parameter" in str(refused.value)
    with torch.no_grad():
        x = image(*_SHAPE)
        torch.testing.assert_close(sft.compile(model, _SHAPE)(x), model(x))


def test_unregistered_tensors_are_read_at_each_call() -> None:
    model = _loose(requires_grad=False)
    net, x = sft.compile(model, _SHAPE), image(*_SHAPE)

    def check() -> None:
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-10)

    check()
    model.heads[0].weight.mul_(2)
    model.scales["a"][0].add_(1)
    check()
    model.scales["a"][0] = torch.full((1,), 5.0, dtype=torch.float64)
    check()
    model.scales = {"a": [torch.full((1,), 6.0, dtype=torch.float64)]}
    check()
    model.own = torch.full((1,), 7.0, dtype=torch.float64)
    check()
    model.heads[0] = nn.Conv2d(4, 2, 1).double().requires_grad_(False)
    check()
    model.heads[0].weight = nn.Parameter(torch.ones(2, 4, 1, 1, dtype=torch.float64), requires_grad=False)
    check()
    model.heads[0].stride = (2, 2)
    check()


class _Box:
    """An object of the user."""


_scale = nn.Parameter(torch.full((4, 1, 1), 2.0, dtype=torch.float64))


def _boxed(then: Callable[[Any, Tensor], Any]) -> Any:
    model: Any = seeded(lambda: _Model(then, box=_Box()))
    model.box.scale, model.box.layer = nn.Parameter(_scale.detach().clone()), nn.Conv2d(4, 2, 1).double()
    model.scaled = lambda y, scale=model.box.scale: y * scale
    return model


@pytest.mark.parametrize(
    ("then", "shapes"),
    [
        (lambda model, y: y * model.box.scale, ["(4, 1, 1)"]),
        (lambda model, y: y * (_scale * 2).view(1, 4, 1, 1), ["(4, 1, 1)"]),
        (lambda model, y: model.box.layer(y), ["(2, 4, 1, 1)", "(2,)"]),
        (lambda model, y: model.scaled(y), ["(4, 1, 1)"]),
    ],
    ids=["object", "global", "module", "closure"],
)
def test_differentiable_tensors_of_other_objects_are_refused(then: Any, shapes: list[str]) -> None:
    """They are not reachable from a module, so they would have no gradient, without an error."""
    model = _boxed(then)
    with pytest.raises(sft.UnsupportedError) as refused:
        sft.compile(model, _SHAPE)
    for shape in shapes:
        said = rf"_Model at frontend/test_module_state\.py:\d+, of shape {re.escape(shape)}: a tensor that requires a gradient and"
        said += " is not a parameter"
        assert re.search(said, str(refused.value))
    with torch.no_grad():
        x = image(*_SHAPE)
        torch.testing.assert_close(sft.compile(model, _SHAPE)(x), model(x))


def _frozen_teacher(model: Any, y: Tensor) -> Any:
    with torch.no_grad():
        target = model.box.layer(y)
    return y[:, :2] * target * _scale.detach()[:2]


def test_tensors_of_other_objects_without_gradients_are_constants() -> None:
    model = _boxed(_frozen_teacher)
    net, x = sft.compile(model, _SHAPE), image(*_SHAPE)
    for _ in range(2):
        outputs = net(x), model(x)
        ours, expected = (
            torch.autograd.grad(out.sum(), tuple(module.conv.parameters())) for out, module in zip(outputs, (net, model), strict=True)
        )
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            model.box.layer.weight.mul_(2)


# --- values that leave torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (lambda _, y: y * float(y.detach().numpy().mean()), "numbers leave torch there; compute with tensors"),
        (lambda _, y: y * float(torch.equal(y, y + 1)), "aten.equal.default.*; this operator looks at values"),
        (lambda _, y: torch.linalg.lstsq(y.flatten(2)[0].T, y.flatten(2)[0].T[:, :1])[0], "the size of what this operator makes"),
        (lambda _, y: y if y.mean() > 0 else -y, "control flow that depends on tensor values must move out"),
        (lambda _, y: torch.distributions.Normal(y, y.exp()).log_prob(y), "make them with validate_args=False"),
    ],
    ids=["numpy", "decides", "sizes", "control flow", "distributions"],
)
def test_operators_that_read_values_are_refused_with_a_remedy(
    then: Callable[[Any, Tensor], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches the checks off for good
    with pytest.raises(sft.UnsupportedError, match=rf"cannot follow the model at frontend/test_module_state\.py:\d+ .*{words}"):
        sft.compile(_Model(then), _SHAPE)


def test_a_generator_is_refused() -> None:
    own = torch.Generator().manual_seed(1)
    for then in (
        lambda _, y: y + torch.randn(4, 1, 1, generator=torch.Generator().manual_seed(1)),
        lambda _, y: y + torch.randn(4, 1, 1, generator=own),
    ):
        said = r"randn reads an object that is not a tensor, such as a torch\.Generator|argument of type: <class 'torch\._C\.Generator'>"
        with pytest.raises(sft.UnsupportedError, match=said):
            sft.compile(_Model(then), _SHAPE)


# --- modes and gradients that forward sets -------------------------------------------------------------------------


def _turned(model: Any, y: Tensor) -> Tensor:
    y2: Tensor = model.norm(y)
    model.norm.train(not model.norm.training)
    return y2


def _kept_frozen(model: Any, y: Tensor) -> Tensor:
    model.norm.eval()
    output: Tensor = model.norm(y)
    return output


def test_a_submodule_that_changes_its_mode_each_time_is_refused() -> None:
    model: Any = _Model(_turned, norm=nn.BatchNorm2d(4))
    with pytest.raises(sft.UnsupportedError, match="norm: `forward` sets training, to False, so the next call computes other values"):
        sft.compile(model, _SHAPE)
    assert model.norm.training


def test_a_submodule_that_is_put_into_one_mode_is_exact() -> None:
    assert_exact(seeded(lambda: _Model(_kept_frozen, norm=nn.BatchNorm2d(4))).train(), image(*_SHAPE), options=sft.Options(tile=(5, None)))


def test_parameters_that_forward_freezes_are_refused() -> None:
    def then(model: Any, y: Tensor) -> Tensor:
        model.last.weight.requires_grad_(False)
        output: Tensor = model.last(y)
        return output

    model: Any = _Model(then, last=nn.Conv2d(4, 2, 3))
    with pytest.raises(sft.UnsupportedError, match="weight: `forward` sets requires_grad of this parameter; set it outside"):
        sft.compile(model, _SHAPE)
    assert model.last.weight.requires_grad
