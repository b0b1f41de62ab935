"""``torch.func.functional_call`` on a compiled model: parameters and buffers of the caller for one call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sft
from tests.helpers.exactness import relative_error
from tests.helpers.models import chain, image, seeded

_SHAPE = (2, 3, 14, 12)
_OPTIONS = sft.Options(tile=(5, None))


def _net() -> nn.Module:
    return chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))


def _pair() -> tuple[nn.Module, nn.Module]:
    model = seeded(_net)
    return model, sft.compile(copy.deepcopy(model), (*_SHAPE[:2], None, None), options=_OPTIONS)


def _assert_close(ours: list[Tensor], eager: list[Tensor]) -> None:
    assert len(ours) == len(eager)
    assert max(relative_error(a, b, scale=max(1.0, float(b.detach().abs().max()))) for a, b in zip(ours, eager, strict=True)) <= 1e-10


def test_gradients_are_those_of_the_supplied_parameters() -> None:
    """Also at the first call, which captures, and through the computation of the supplied tensors."""
    results = []
    for module in _pair():
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        roots = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in own.items()}
        for scale in (1.5, 0.5):
            parameters = {name: root * scale for name, root in roots.items()}
            y = functional_call(module, {**parameters, **buffers}, (image(*_SHAPE),))
            y.square().sum().backward()
        assert all(p.grad is None for p in module.parameters())
        assert all(isinstance(p, nn.Parameter) for p in module.parameters()), "the module has its own again"
        assert all(torch.equal(buffer, own[name]) for name, buffer in module.named_buffers()), "its buffers are as they were"
        grads = [root.grad for root in roots.values() if root.grad is not None]
        assert len(grads) == len(roots)
        results.append([y, *grads, *buffers.values()])
        assert not torch.equal(buffers["1.running_mean"], own["1.running_mean"]), "those given are updated"
    _assert_close(results[1], results[0])


def test_supplied_parameters_that_are_frozen() -> None:
    gradients = []
    for module in _pair():
        parameters = {name: p.detach().clone().requires_grad_(name.startswith("3")) for name, p in module.named_parameters()}
        functional_call(module, parameters, (image(*_SHAPE),)).square().sum().backward()
        assert [name for name, p in parameters.items() if p.grad is not None] == ["3.weight", "3.bias"]
        gradients.append([p.grad for p in parameters.values() if p.grad is not None])
    _assert_close(gradients[1], gradients[0])


def test_evaluation_with_averaged_weights() -> None:
    """A moving average, evaluated in place of the model's weights; training continues with the weights."""
    results = []
    for module in _pair():
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        for seed in range(2):
            optimizer.zero_grad()
            module.train()(image(*_SHAPE, seed=seed)).square().mean().backward()
            optimizer.step()
            average.update_parameters(module)
            averaged = {**dict(average.module.named_parameters()), **dict(average.module.named_buffers())}
            with torch.no_grad():
                evaluated = functional_call(module.eval(), averaged, (image(*_SHAPE, seed=9),))
                plain = module(image(*_SHAPE, seed=9))
        assert not torch.equal(evaluated, plain)
        results.append([evaluated, plain, *module.parameters()])
    _assert_close(results[1], results[0])


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Compiled model that the tests do not change."""
    return _pair()[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode uses it
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev"])
def test_transforms_are_refused(transform: str, net: nn.Module) -> None:
    """They see operators one by one, and would get a constant."""
    x = image(*_SHAPE)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    with pytest.raises(sft.UnsupportedError, match=r"a transform of torch\.func.*Use torch\.autograd\.grad"):
        if transform == "grad":
            torch.func.grad(lambda values: functional_call(net, values, (x,)).sum())(parameters)
        elif transform == "vmap":
            torch.func.vmap(net)(x[:, None])
        elif transform == "jvp":
            torch.func.jvp(net, (x,), (x,))
        else:
            torch.func.jacrev(lambda value: net(value).sum())(x)
    assert relative_error(net(x), net(x)) == 0, "and the model is as it was"
