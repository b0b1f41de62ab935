"""Functionalization: rewriting gives the graph of the exporter's decomposition, and is not used where aliases overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sft.analysis.frontend.autocast import AutocastPolicy
from sft.analysis.frontend.functionalize import FunctionalProgram, functionalize, functionalize_by_rewriting
from sft.analysis.frontend.graph_builder import build_graph
from sft.analysis.ir.graph import Graph, map_refs
from tests.helpers.exactness import assert_exact

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # of the exporter, about itself


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.module_names = function, tuple(modules)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *(getattr(self, name) for name in self.module_names))


class _ResNetBlock(nn.Module):
    """In-place activations and additions of residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.drop, self.head = nn.ReLU(inplace=True), nn.Dropout(0.25, inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(self.relu(self.norm(self.conv(x)))))  # the norm twice: its statistics are written twice
        out += x
        out = self.relu(out)
        return cast(Tensor, self.head(F.adaptive_avg_pool2d(self.drop(out), 1).flatten(1)))


class _Casts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float16).to(torch.float64).to(x.dtype).to(x.device).contiguous()


def _keep_rate_mask(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8).div_(0.8)


_SIMPLE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "resnet": (_ResNetBlock(), (2, 4, 6, 7)),
    "casts": (_Casts(), (1, 4, 6, 7)),
    "activations": (
        nn.Sequential(*(f(inplace=True) for f in (nn.ReLU6, nn.ELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU))),
        (1, 4, 6, 7),
    ),
    "norms": (nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm2d(4, track_running_stats=False), nn.LayerNorm(7)), (2, 4, 6, 7)),
    "1-D": (nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2), nn.ConvTranspose1d(4, 4, 3), nn.AvgPool1d(2)), (1, 4, 19)),
    "2-D": (nn.Sequential(nn.Conv2d(4, 4, 3, padding="same"), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 3)), (1, 4, 9, 9)),
    "3-D": (nn.Sequential(nn.Conv3d(4, 4, 3), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 4, 3), nn.AdaptiveAvgPool3d(1)), (1, 4, 9, 9, 9)),
    "shuffle": (_Calls(lambda x: torch.cat([a.relu() for a in x.mul(2).chunk(2, 1)][::-1], 1).reshape(1, 2, 2, 6, 7)), (1, 4, 6, 7)),
    "stochastic depth": (_Calls(_keep_rate_mask), (2, 4, 6, 7)),
    "softmax": (_Calls(lambda x: F.selu(x).softmax(1) @ F.log_softmax(x, 1).square().transpose(2, 3)), (1, 4, 6, 7)),
}


def _resized(x: Tensor) -> tuple[Tensor, ...]:
    planes, signal, volume = x, x.mean(2), x[:, :, None].relu()
    ways: dict[str, Tensor] = {"nearest": planes, "nearest-exact": planes, "bilinear": planes, "bicubic": planes, "linear": signal}
    images = [F.interpolate(image, scale_factor=1.5, mode=mode) for mode, image in ways.items()]
    images += [F.interpolate(image, scale_factor=2, mode=mode) for image in (signal, volume) for mode in ("nearest", "nearest-exact")]
    images += [F.interpolate(planes, size=(5, 3), mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
    images += [F.interpolate(planes, size=(planes.shape[2] + 1, 8), mode="bilinear", align_corners=True).relu_()]
    return *images, F.interpolate(volume, scale_factor=2, mode="trilinear")


def _padded(x: Tensor) -> Tensor:
    x = F.pad(F.pad(x, (1, 2, 0, 1)), (1, 0), value=2.0)
    return F.pad(F.pad(x, (1, 1, 2, 0), mode="reflect"), (0, 1, -1, 2), mode="replicate").relu_()


def _spread(x: Tensor) -> tuple[Tensor, ...]:
    return x.var((2, 3)), *torch.var_mean(x, (2, 3), unbiased=False, keepdim=True), x.std((2, 3), keepdim=True)


def _like_another(x: Tensor) -> tuple[Tensor, ...]:
    last = x.movedim(1, -1).relu()
    return last.movedim(-1, 0), x.mean((2, 3), keepdim=True).expand_as(x) * x, x.flatten(2).view_as(x) * 2


def _losses_of_values(x: Tensor) -> tuple[Tensor, ...]:
    target, scores = x.flip(1), x.log_softmax(1)
    distances = [distance(x, target) for distance in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)]
    distances += [
        F.kl_div(scores, target.softmax(1), reduction="batchmean"),
        F.nll_loss(scores, x[:, 0].long().clamp(0, 3)),
        F.cosine_similarity(x, target),
    ]
    return *distances, F.logsigmoid(x), F.relu6(x), F.prelu(x, x.new_ones(4))


def _turned(x: Tensor) -> tuple[Tensor, ...]:
    return x.swapaxes(1, 2).relu().swapdims(0, 3), x.flatten(2).reshape_as(x).relu(), torch.broadcast_tensors(x, x[:, :1])[1].relu()


def _attended(x: Tensor) -> tuple[Tensor, ...]:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens), torch.einsum("bchw,bdhw->bcd", x, x), *torch.std_mean(x, (2, 3))


_SIMPLE |= {
    "losses": (_Calls(_losses_of_values), (2, 4, 6, 7)),
    "turned": (_Calls(_turned), (2, 4, 6, 7)),
    "attended": (_Calls(_attended), (2, 4, 6, 7)),
    "resized": (_Calls(_resized), (1, 4, 6, 7)),
    "padded": (_Calls(_padded), (1, 4, 6, 7)),
    "spread": (_Calls(_spread), (2, 4, 6, 7)),
    "channel dropout": (nn.Sequential(nn.Dropout2d(0.3), nn.ReLU(inplace=True), nn.InstanceNorm2d(4, affine=True)), (2, 4, 6, 7)),
    "tracking": (nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(inplace=True)), (2, 4, 6, 7)),
    "like another": (_Calls(_like_another), (2, 4, 6, 7)),
    "channel dropout in place": (nn.Sequential(nn.ReLU(), *(nn.Dropout2d(p, inplace=True) for p in (0.3, 0.0)), nn.ReLU()), (2, 4, 6, 7)),
    "volume dropout": (nn.Sequential(nn.Dropout3d(0.3), nn.Dropout3d(0.0)), (2, 4, 3, 6, 7)),
}


def _view_read_after_base(x: Tensor) -> Tensor:
    base = x * 2
    view = base[:, 1:2]
    return base.relu_() * 0 + view


def _base_read_after_view(x: Tensor) -> Tensor:
    base = x * 2
    base[:, 1:].relu_()
    return base


def _base_read_after_view_of_a_view(x: Tensor) -> Tensor:
    base = x * 2
    base.transpose(2, 3)[:, 1:].mul_(3)
    return base


_OVERLAPPING = [_view_read_after_base, _base_read_after_view, _base_read_after_view_of_a_view]


def _exported(model: nn.Module, shape: tuple[int, ...], *, symbolic: bool = False) -> ExportedProgram:
    axes = tuple(Dim.AUTO if symbolic and axis >= 2 else Dim.STATIC for axis in range(len(shape)))
    return torch.export.export(model, (torch.rand(shape),), dynamic_shapes=(axes,), strict=False)


def _decomposed(exported: ExportedProgram) -> FunctionalProgram:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.analysis.frontend.functionalize.functionalize_by_rewriting", lambda *_: None)
        return functionalize(exported)


def _renamed(graph: Graph) -> Graph:
    """Values by position: rewriting and decomposition number operators of one kind differently."""
    names = {node.name: f"{node.kind}{place}" if node.kind == "operator" else node.name for place, node in enumerate(graph.nodes)}
    return replace(
        graph,
        nodes=tuple(
            replace(
                node, name=names[node.name], arguments=tuple((key, map_refs(value, names.__getitem__)) for key, value in node.arguments)
            )
            for node in graph.nodes
        ),
        outputs=tuple(names[name] for name in graph.outputs),
        updates=tuple((names[name], buffer) for name, buffer in graph.updates),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", _SIMPLE)
def test_the_graph_is_that_of_decomposition(name: str, training: bool) -> None:
    model, shape = _SIMPLE[name]
    exported = _exported(_Wrapped(model).train(training), shape)
    direct = functionalize_by_rewriting(exported)
    assert direct is not None, "this network went the long way"
    assert _renamed(build_graph(direct)) == _renamed(build_graph(_decomposed(exported)))


def _attention(x: Tensor, conv: nn.Module) -> Tensor:
    q, k, v = conv(x).flatten(2).transpose(1, 2).chunk(3, -1)
    return cast(Tensor, torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v)


def _joined(x: Tensor, conv: nn.Module) -> Tensor:
    return torch.cat([conv(x), x, conv(x).double()], 1)


def _summed(x: Tensor, conv: nn.Module) -> Tensor:
    y = conv(x)
    return cast(Tensor, y.norm() + y.var((2, 3)).sum() + y.cumsum(2).sum() + y.pow(2).prod())


def _losses(x: Tensor, conv: nn.Module) -> Tensor:
    y, labels = conv(x), x[:, 0].long().clamp(0, 2)
    loss = F.binary_cross_entropy_with_logits(y, y.sigmoid()) + F.cross_entropy(y, labels)
    return (
        loss
        + F.mse_loss(y, y.flip(1))
        + F.kl_div(y.log_softmax(1), y.softmax(1), reduction="sum")
        + F.cosine_similarity(y, y.flip(1)).sum()
    )


_CAST: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "resnet": (nn.Sequential(nn.Conv2d(4, 4, 1), _ResNetBlock()), (2, 4, 6, 7)),
    "one tensor twice": (_Calls(lambda x: x @ x.softmax(1) + F.conv2d(x, x[:, :, :1, :1])), (4, 4, 6, 6)),
    "attention": (_Calls(_attention, conv=nn.Conv2d(4, 6, 1)), (2, 4, 3, 5)),
    "joined": (_Calls(_joined, conv=nn.Conv2d(4, 3, 1)), (1, 4, 6, 7)),
    "summed": (_Calls(_summed, conv=nn.Conv2d(4, 3, 1)), (1, 4, 6, 7)),
    "losses": (_Calls(_losses, conv=nn.Conv2d(4, 3, 1)), (2, 4, 6, 7)),
    "activations with weights": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.PReLU(4), nn.ReLU6(), nn.LogSigmoid()), (2, 4, 6, 7)),
    **{name: _SIMPLE[name] for name in ("1-D", "2-D", "3-D", "softmax")},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", _CAST)
def test_casts_of_autocast_are_those_of_decomposition(name: str, dtype: torch.dtype) -> None:
    model, shape = _CAST[name]
    with torch.autocast("cpu", dtype, cache_enabled=False):
        exported = _exported(_Wrapped(model).train(), shape)
        direct = functionalize_by_rewriting(exported, AutocastPolicy("cpu"))
        long_way = build_graph(_decomposed(exported))
    assert direct is not None, "this network went the long way"
    converted = build_graph(direct)
    assert any(node.target == "aten._to_copy.default" for node in converted.operators)
    assert _renamed(converted) == _renamed(long_way)


class _Wrapped(nn.Module):
    """Model that starts with a new value, since its input must not be written."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x * 1.5)


def test_sizes_may_be_symbols() -> None:
    model, shape = _SIMPLE["resnet"]
    exported = _exported(_Wrapped(model).eval(), shape, symbolic=True)
    direct = functionalize_by_rewriting(exported)
    assert direct is not None
    converted = build_graph(direct)
    assert any(not isinstance(size, int) for node in converted.nodes for size in node.shape)
    assert _renamed(converted) == _renamed(build_graph(_decomposed(exported)))


@pytest.mark.parametrize("function", _OVERLAPPING)
def test_overlapping_aliases_are_decomposed(function: Callable[[Tensor], Tensor]) -> None:
    model = _Calls(function)
    assert functionalize_by_rewriting(_exported(model, (1, 3, 6, 7))) is None
    assert_exact(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), model), torch.rand(1, 3, 10, 9))


def test_type_as_is_a_cast() -> None:
    direct = functionalize_by_rewriting(_exported(_Calls(lambda x: x.half().type_as(x)), (1, 3, 6, 7)))
    assert direct is not None
    assert [node.target for node in build_graph(direct).operators] == ["aten._to_copy.default"] * 2


def test_a_written_input_is_decomposed() -> None:
    assert functionalize_by_rewriting(_exported(_Calls(lambda x: x.mul_(2)), (1, 3, 6, 7))) is None


def test_a_write_in_another_dtype_is_decomposed() -> None:
    """In-place operators keep the dtype of the written tensor."""
    exported = _exported(_Calls(lambda x: x.half().add_(x)), (1, 3, 6, 7))
    assert functionalize_by_rewriting(exported) is None
    assert build_graph(functionalize(exported)).nodes[-1].dtype == "float16"


def test_an_inner_graph_is_decomposed() -> None:
    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(x, x)

    assert functionalize_by_rewriting(_exported(_Calls(region), (1, 3, 6, 7))) is None
