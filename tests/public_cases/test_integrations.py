"""Models and trainers of other projects: Hugging Face's output capturing and ``Trainer``, tools of PyTorch around a compiled model."""

from __future__ import annotations

import copy
import inspect
import threading
from contextvars import ContextVar, Token
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import pytree
from tests.helpers.exactness import relative_error
from tests.helpers.models import chain, image, seeded

_SHAPE = (2, 3, 32, 24)
_OPTIONS = sft.Options(tile=(5, None))


# -- output capturing -------------------------------------------------------------------------------------------------


class _Collector:
    """A context variable with a mirror in an attribute, as the collector of transformers 5 has."""

    def __init__(self) -> None:
        self._variable: ContextVar[Any] = ContextVar("collector", default=None)
        self.mirror: Any = None

    def get(self) -> Any:
        return self._variable.get()

    def set(self, value: Any) -> Token[Any]:
        self.mirror = value
        return self._variable.set(value)

    def reset(self, token: Token[Any]) -> None:
        self.mirror = None
        self._variable.reset(token)


_COLLECTOR = _Collector()
_INSTALLATION = threading.Lock()


def _install(module: nn.Module, key: str) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        collected = _COLLECTOR.get()
        if collected is None or key not in collected:
            return
        if not collected[key]:
            collected[key].append(args[0])
        collected[key].append(output)

    module.register_forward_hook(hook)


class _Stage(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).relu()
        return y


class _Encoder(nn.Module):
    """Encoder that installs its hooks at the first request for hidden states, and marks itself with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([_Stage(3, 4), _Stage(4, 8)])

    def _install_once(self) -> None:
        if getattr(self, "_hooks_installed", False):
            return
        with _INSTALLATION:
            for stage in self.stages:
                _install(stage, "hidden_states")
            self._hooks_installed = True

    def forward(self, x: Tensor, output_hidden_states: bool = True) -> dict[str, Any]:
        collected: dict[str, list[Tensor]] = {"hidden_states": []} if output_hidden_states else {}
        if collected:
            self._install_once()
        token = _COLLECTOR.set(collected)
        try:
            for stage in self.stages:
                x = stage(x)
        finally:
            _COLLECTOR.reset(token)
        return {"last": x, **{key: tuple(values) for key, values in collected.items()}}


class _Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()
        self.head, self.middle = nn.Conv2d(8, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.encoder(pixel_values)
        logits = self.head(outputs["last"]) + nn.functional.avg_pool2d(self.middle(outputs["hidden_states"][1]), 2)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_that_capture_outputs_pytorch_184647() -> None:
    """Every way to the first call, later calls, other sizes and modes."""
    model = seeded(_Segmenter)
    plain = copy.deepcopy(model)
    assert sft.check(model, _SHAPE).ok
    sft.plan(model, _SHAPE)
    with pytest.raises(sft.BudgetError):
        sft.compile(model, _SHAPE, budget="1KiB")
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    assert _num_hooks(model) == 0 and not hasattr(model.encoder, "_hooks_installed")

    def check(*size: int) -> None:
        assert relative_error(net(image(*size))["logits"], plain(image(*size))["logits"]) <= 1e-12

    for size in (_SHAPE, _SHAPE, (1, 3, 48, 40)):
        check(*size)
    assert _num_hooks(model) == 0
    model(image(*_SHAPE))  # eager PyTorch installs them
    check(*_SHAPE)
    net.eval(), plain.eval()
    with torch.no_grad():
        check(*_SHAPE)
    net.train(), plain.train()
    for module in (net, plain):
        module(image(*_SHAPE))["logits"].square().sum().backward()
    for ours, eager in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and eager.grad is not None and relative_error(ours.grad, eager.grad) <= 1e-11


def test_flags_and_collected_outputs_by_keyword() -> None:
    """Transformers passes flags by name; each value has a capture of its own."""
    model = seeded(_Encoder)
    net, x = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS), image(*_SHAPE)
    for flag in (True, False, True):
        ours, eager = net(x, output_hidden_states=flag), model(x, output_hidden_states=flag)
        assert ours.keys() == eager.keys()
        for name in eager:
            for a, b in zip(pytree.tree_leaves(ours[name]), pytree.tree_leaves(eager[name]), strict=True):
                assert relative_error(a, b) <= 1e-12


# -- a trainer that reads the signature -------------------------------------------------------------------------------


def _columns(model: nn.Module) -> list[str]:
    """Columns that a trainer keeps: parameters of ``forward``, and names of labels."""
    return [*inspect.signature(model.forward).parameters, "label", "label_ids"]


def _label_names(model_class: type[nn.Module]) -> list[str]:
    return [name for name in inspect.signature(model_class.forward).parameters if "label" in name]


def _trained(model: nn.Module, module: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """Losses of a loop like ``transformers.Trainer``: batches lose the columns that ``forward`` does not name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        columns = {name: value for name, value in batch.items() if name in _columns(module)}
        if not columns:
            raise ValueError("The batch received was empty, your model won't be able to train on it.")
        loss = module(**columns)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_trainer_that_reads_the_signature_of_forward() -> None:
    """Transformers' ``Trainer`` drops unused columns by the signature; without it every batch was empty."""
    model = seeded(_Segmenter)
    plain = copy.deepcopy(model)
    net = sft.compile(model, {"pixel_values": _SHAPE, "labels": torch.empty(2, 8, 6, dtype=torch.long, device="meta")}, options=_OPTIONS)
    assert _columns(net)[:2] == _columns(model)[:2] == ["pixel_values", "labels"]
    assert _label_names(type(net)) == _label_names(_Segmenter) == ["labels"]
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"pixel_values": image(*_SHAPE, seed=step), "labels": torch.randint(2, (2, 8, 6), generator=generator), "idx": torch.arange(2)}
        for step in range(3)
    ]
    ours, eager = _trained(model, net, batches), _trained(plain, plain, batches)
    torch.testing.assert_close(ours, eager, rtol=1e-10, atol=0)


# -- tools around a compiled model ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("what", ["model", "parent", "function", "method"])
def test_torch_compile_without_graph_breaks_names_the_reason(what: str) -> None:
    """Dynamo's own error asked to report an issue to PyTorch."""
    net: Any = sft.compile(seeded(lambda: chain(nn.Conv2d(3, 4, 3), nn.SiLU())), _SHAPE, options=_OPTIONS)
    around: dict[str, Any] = {
        "model": net,
        "parent": nn.Sequential(net, nn.ReLU()),
        "function": lambda x: net(x * 2).sum(),
        "method": lambda x: net.forward(x * 2).sum(),
    }
    x = image(*_SHAPE)
    compiler: Any = torch.compiler
    compile_module: Any = torch.compile
    compiler.reset()
    with pytest.raises(Exception, match=r"sft computes a compiled model strip by strip.*leave out fullgraph=True"):
        compile_module(around[what], backend="eager", fullgraph=True)(x)
    compiler.reset()
    torch.testing.assert_close(compile_module(around[what], backend="eager")(x), around[what](x))
