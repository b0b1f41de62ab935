"""Files written by version 0.1.0 before its modules moved still load: pickles, plans, state dicts, weights files, a run folder.

``data/make.py.txt`` wrote the files in ``data`` at commit 47028ac. They are never regenerated: a failing test means that a user's file can
no longer be read. Only public names are imported, so the tests do not depend on modules of definitions.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import pickle
import pickletools
import runpy
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
import sft.nn
import sft.optim
import sft.sources
import sft.tissue
import sft.weights

DATA = Path(__file__).parent / "data"
SLIDE = Path("examples/data/CMU-1-Small-Region.svs")

# ---------------------------------------------------------------------------------------------------------------------------------------
# Models of the files. Module paths inside of a model are in the names of operators, and so in plans: do not change them.


class Residual(nn.Module):
    """Two branches that are added, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.left = nn.Conv2d(6, 6, 3, padding=1)
        self.right = nn.Conv2d(6, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.out = nn.Conv2d(6, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        y: Tensor = self.out(torch.relu(self.norm(self.left(x) + self.right(x))))
        return y


def classifier() -> nn.Module:
    """Convolutions, and a linear layer after a global pool."""
    layers = (nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(6, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def stages() -> nn.Module:
    """A sequence of equal convolutions."""
    layers = (layer for number in range(4) for layer in (nn.Conv2d(3 if number == 0 else 4, 4, 3, padding=1), nn.Tanh()))
    return nn.Sequential(*layers)


def small() -> nn.Module:
    """A model with few weights."""
    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3))


def normed() -> nn.Module:
    """Norms with statistics of the whole image."""
    layers = (layer for number in range(3) for layer in (nn.Conv2d(3 if number == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 3, stride=2))


def repeated() -> nn.Module:
    """Repeated blocks between two convolutions."""
    blocks = sft.nn.Repeat(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()), 4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), blocks, nn.Conv2d(4, 2, 3, padding=1))


def mlp() -> nn.Module:
    """A model with most of its weights in linear layers."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 12), nn.ReLU(),
                         nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))  # fmt: skip


def volumes() -> nn.Module:
    """Convolutions of volumes."""
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1))


class Around(nn.Module):
    """Composite operators with names of their own in plans (a norm, a softmax, a product of pixels), between convolutions."""

    def __init__(self, part: Callable[[Tensor], Tensor], *, width: int = 4, dims: int = 2, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.before, self.after, self.part = conv(3, 4, 3, padding=1), conv(width, 2, 1), part
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        output: Tensor = self.after(self.part(y) if not self.layers else self.part(self.layers[0](y)))
        return output


class Ends(nn.Module):
    """A convolution, and a reduction of its image to a number or to vectors."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.part = nn.Conv2d(3, 4, 3, padding=1), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.before(x))


class Labelled(nn.Module):
    """A loss of labels for each pixel."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.loss = nn.Conv2d(3, 4, 3, padding=1), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.before(x), labels).reshape(1, 1)


def _same(y: Tensor) -> Tensor:
    return y


def _layer(layer: nn.Module, *, width: int = 4) -> nn.Module:
    return Around(_same, width=width, layers=(layer,))


def _attention(y: Tensor) -> Tensor:
    tokens = y.flatten(2)
    weights = torch.softmax(torch.einsum("ncp,ndp->ncd", tokens, tokens) / 64, -1)
    return (weights @ tokens).reshape(y.shape)


def _channels_last(y: Tensor) -> Tensor:
    return F.layer_norm(y.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)


def _masked(y: Tensor) -> Tensor:
    rows = torch.arange(y.shape[2], dtype=y.dtype).view(1, 1, -1, 1) / 32
    columns = torch.ones(y.shape[3], dtype=y.dtype)
    return y * rows + columns * 0.25


def _assigned(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[:, 1] = y[:, 0] * 2
    out[:, 2:] = y[:, 2:]
    return out


def _grown(y: Tensor) -> Tensor:
    n, _, h, w = y.shape
    return y.view(n, 2, 2, h, w).permute(0, 3, 1, 4, 2).reshape(n, 1, 2 * h, 2 * w)


def _shrunk(y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    return y.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)


def _shuffled(y: Tensor) -> Tensor:
    n, _, h, w = y.shape
    return y.view(n, 2, 2, h, w).transpose(1, 2).reshape(n, 4, h, w)


def _weights_of_classes(y: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0, 1.0, 0.5], dtype=y.dtype)


def _loss(loss: Callable[..., Tensor]) -> nn.Module:
    return Ends(lambda y: loss(y, torch.full_like(y, 0.25)).reshape(1, 1))


#: Models with operators that have names of our own in plans; these names must stay.
NAMED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: _layer(nn.BatchNorm2d(4)),
    "batch norm without statistics": lambda: _layer(nn.BatchNorm2d(4, track_running_stats=False)),
    "cumulative batch norm": lambda: _layer(nn.BatchNorm2d(4, momentum=None)),
    "group norm": lambda: _layer(nn.GroupNorm(2, 4)),
    "instance norm": lambda: _layer(nn.InstanceNorm2d(4, affine=True)),
    "tracked instance norm": lambda: _layer(nn.InstanceNorm2d(4, track_running_stats=True)),
    "layer norm": lambda: Around(_channels_last),
    "layer norm of all": lambda: Around(lambda y: F.layer_norm(y, tuple(y.shape[1:]))),
    "rms norm": lambda: Around(lambda y: F.rms_norm(y.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)),
    "local response norm": lambda: _layer(nn.LocalResponseNorm(3)),
    "normalize": lambda: Around(lambda y: F.normalize(y, dim=1)),
    "spectral norm": lambda: _layer(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1))),
    "transposed convolution": lambda: _layer(nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)),
    "circular padding": lambda: _layer(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "reflected padding": lambda: _layer(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "unfold": lambda: Around(lambda y: F.unfold(y, 3, padding=1).view(y.shape[0], 36, *y.shape[2:]), width=36),
    "fold": lambda: Around(lambda y: F.fold(F.unfold(y, 3, padding=1), tuple(y.shape[2:]), 3, padding=1)),
    "linear": lambda: Around(lambda y: F.gelu(y.permute(0, 2, 3, 1) @ torch.ones(4, 4, dtype=y.dtype)).permute(0, 3, 1, 2)),
    "linear layer": lambda: Around(lambda y: y.permute(0, 3, 1, 2), layers=(_Permuted(nn.Linear(4, 4)),)),
    "einsum": lambda: Around(lambda y: torch.einsum("nchw,dc->ndhw", y, torch.ones(4, 4, dtype=y.dtype) / 4)),
    "attention": lambda: Around(_attention),
    "gram": lambda: Ends(lambda y: y.flatten(2) @ y.flatten(2).mT),
    "masks of rows and columns": lambda: Around(_masked),
    "assigned channels": lambda: Around(_assigned),
    "pixel shuffle": lambda: Around(lambda y: F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2)),
    "channel shuffle": lambda: Around(lambda y: F.channel_shuffle(y, 2)),
    "split and reshaped": lambda: Around(lambda y: torch.cat([half.flatten(2).view(half.shape) for half in y.chunk(2, 1)], 1)),
    "groups of channels": lambda: Around(lambda y: y.unflatten(1, (2, 2)).sum(1).repeat(1, 2, 1, 1)),
    "grown by hand": lambda: Around(_grown, width=1),
    "shrunk by hand": lambda: Around(_shrunk, width=16),
    "shuffled by hand": lambda: Around(_shuffled),
    "covariance": lambda: Ends(lambda y: torch.einsum("nchw,ndhw->ndc", y, y.tanh())),
    "vector beside pixels": lambda: Around(lambda y: (y.permute(0, 2, 3, 1) * torch.arange(4.0, dtype=y.dtype)).permute(0, 3, 1, 2)),
    "coordinate attention": lambda: Around(lambda y: y * torch.sigmoid(F.adaptive_avg_pool2d(y, (1, None)))),
    "row beside an image": lambda: Around(lambda y: y + y[:, :, :1]),
    "row of a parameter": lambda: Around(lambda y: y * torch.linspace(0, 1, 12, dtype=y.dtype) + torch.ones(4, 1, 1, dtype=y.dtype)),
    "variance and mean": lambda: Ends(lambda y: torch.cat(torch.var_mean(y, (2, 3)), 1)),
    "turned sums": lambda: Ends(lambda y: y.permute(1, 0, 2, 3).sum((2, 3))),
    "sorted": lambda: Ends(lambda y: y.flatten(2).sort(2).values[..., :3]),
    "expanded": lambda: Around(lambda y: torch.cat([y, y.mean((2, 3), keepdim=True).expand(-1, -1, *y.shape[2:])], 1), width=8),
    "resized": lambda: Around(lambda y: F.interpolate(y, scale_factor=2, mode="bicubic")),
    "adaptive pool": lambda: Ends(lambda y: F.adaptive_max_pool2d(y, 3)),
    "squeeze and excite": lambda: Around(lambda y: y * torch.sigmoid(y.mean((2, 3), keepdim=True))),
    "softmax of pixels": lambda: Ends(lambda y: (y.flatten(2).softmax(-1) * y.flatten(2)).sum(-1)),
    "log softmax": lambda: Around(lambda y: F.log_softmax(y, 1)),
    "log softmax of pixels": lambda: Around(lambda y: F.log_softmax(y.flatten(2), -1).view(y.shape)),
    "mean": lambda: Ends(lambda y: y.mean((0, 2, 3), keepdim=True)),
    "variance": lambda: Ends(lambda y: torch.cat([y.var((2, 3)), y.std((2, 3)), y.flatten(2).var(2, correction=0)], 1)),
    "variance of all": lambda: Ends(lambda y: torch.stack([y.var(), y.std()]).view(1, 2)),
    "norms": lambda: Ends(
        lambda y: torch.cat([y.norm(dim=(2, 3)), y.flatten(2).norm(p=3, dim=2), y.flatten(2).norm(p=float("inf"), dim=2)], 1)
    ),
    "logsumexp": lambda: Ends(lambda y: y.logsumexp((2, 3))),
    "extremes": lambda: Ends(lambda y: torch.cat([y.amax((2, 3)), y.amin((2, 3)), y.flatten(2).max(2).values], 1)),
    "count": lambda: Ends(lambda y: y.sum((2, 3)) * (y > 0).double().sum((2, 3)) / 64),
    "cosine similarity": lambda: Ends(lambda y: F.cosine_similarity(y, y.flip(1), dim=1).mean((1, 2)).view(-1, 1)),
    "cross entropy": lambda: Labelled(lambda y, labels: F.cross_entropy(y, labels, weight=_weights_of_classes(y))),
    "smoothed cross entropy": lambda: Labelled(lambda y, labels: F.cross_entropy(y, labels, label_smoothing=0.1)),
    "cross entropy of each": lambda: Labelled(lambda y, labels: F.cross_entropy(y, labels, reduction="none").square().mean()),
    "cross entropy of shares": lambda: _loss(F.cross_entropy),
    "nll": lambda: Labelled(lambda y, labels: F.nll_loss(F.log_softmax(y, 1), labels, ignore_index=3, reduction="sum")),
    "one hot": lambda: Labelled(lambda y, labels: (y * F.one_hot(labels, 4).movedim(-1, 1).to(y.dtype)).mean()),
    "scattered": lambda: Labelled(lambda y, labels: (y * torch.zeros(2, 4, 16, 12, dtype=y.dtype).scatter(1, labels[:, None], 1.0)).mean()),
    "gathered": lambda: Labelled(lambda y, labels: y.gather(1, labels[:, None]).mean()),
    "dice": lambda: Labelled(sft.nn.DiceLoss()),
    "mask of labels": lambda: Labelled(lambda y, labels: (y * (labels != 3).to(y.dtype)[:, None]).mean()),
    "mse": lambda: _loss(F.mse_loss),
    "l1": lambda: _loss(F.l1_loss),
    "smooth l1": lambda: _loss(F.smooth_l1_loss),
    "huber": lambda: _loss(F.huber_loss),
    "binary cross entropy": lambda: _loss(F.binary_cross_entropy_with_logits),
    "kl": lambda: _loss(lambda y, t: F.kl_div(F.log_softmax(y, 1), t, reduction="batchmean")),
    "poisson": lambda: _loss(F.poisson_nll_loss),
    "soft margin": lambda: _loss(F.soft_margin_loss),
    "dropout": lambda: _layer(nn.Dropout(0.5)),
    "dropout of channels": lambda: _layer(nn.Dropout2d(0.5)),
    "noise": lambda: Around(lambda y: y + 0.5 * torch.rand_like(y)),
    "alpha dropout": lambda: _layer(nn.AlphaDropout(0.3)),
}

#: Models with more operators in half precision.
HALVES = (
    *("batch norm", "softmax of pixels", "variance", "variance and mean", "norms", "extremes", "logsumexp", "mean", "cross entropy"),
    *("nll", "mse", "transposed convolution", "layer norm of all", "attention", "gram"),
)


class _Permuted(nn.Module):
    """A layer on channels in the last dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, y: Tensor) -> Tensor:
        output: Tensor = self.layer(y.permute(0, 2, 3, 1))
        return output


def streamed_chain() -> tuple[nn.Sequential, Any]:
    """A linear layer before repeated ones, for streaming."""
    repeat = sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 5)
    return nn.Sequential(nn.Linear(3, 4), repeat), repeat


def seeded(make: Callable[[], nn.Module], *, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(dtype)


def image(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class PlanCase:
    """A plan in a file.

    Attributes:
        make: the model.
        shape: of the input.
        compile_arguments: further arguments of `sft.compile` for the plan.
        says: values of its fields.
        asked: arguments of `sft.plan`; "least" is the smallest budget that works.
        source: True if the input is an array that is read in strips.
        input_grad: True if the input requires grad in the test; plans were made for inputs without.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    asked: dict[str, Any]
    compile_arguments: dict[str, Any] = field(default_factory=dict)
    says: Callable[[sft.Plan], bool] = lambda plan: True
    source: bool = False
    input_grad: bool = True


_IMAGE = (2, 3, 37, 29)
PLANS: dict[str, PlanCase] = {
    "strips": PlanCase(
        classifier,
        _IMAGE,
        {"options": sft.Options(tile=(8, None))},
        says=lambda p: any(s.mode == "tiled" and s.num_steps > 1 for s in p.segments),
    ),
    "panels": PlanCase(Residual, _IMAGE, {"options": sft.Options(tile=(12, 10))}, says=lambda p: any(s.num_panels > 1 for s in p.segments)),
    "tiles": PlanCase(
        stages,
        _IMAGE,
        {"options": sft.Options(halo="recompute", tile=(8, 12))},
        says=lambda p: any(s.halo == "recompute" for s in p.segments),
    ),
    "states": PlanCase(
        stages, _IMAGE, {"options": sft.Options(tile=(3, None), state_slots=2)}, says=lambda p: any(s.state_slots == 2 for s in p.segments)
    ),
    "samples": PlanCase(
        stages, _IMAGE, {"options": sft.Options(tile=(8, None), batch_tile=1)}, says=lambda p: any(s.batch_tile == 1 for s in p.segments)
    ),
    "staged": PlanCase(stages, _IMAGE, {"options": sft.Options(strategy="optimal"), "budget": "least"}, says=lambda p: "L" in p.order),
    "offload": PlanCase(
        stages,
        _IMAGE,
        {"options": sft.Options(strategy="offload-greedy"), "budget": "least"},
        says=lambda p: any(move[0] == ">" for move in p.order) and p.host_bytes > 0,
    ),
    "host cuts": PlanCase(
        normed,
        (1, 3, 96, 29),
        {"options": sft.Options(host_budget="1GiB"), "budget": "least"},
        says=lambda p: any(s.streamed for s in p.segments) and p.host_bytes > 0,
        input_grad=False,
    ),
    "repeat": PlanCase(repeated, (1, 3, 24, 20), {"budget": "least"}, says=lambda p: len(p.repeat_budgets) == 1),
    "weights": PlanCase(mlp, (2, 3, 20, 16), {"options": sft.Options(weights="stream")}, says=lambda p: p.streamed_weights == 8),
    "skips": PlanCase(
        stages,
        _IMAGE,
        {"options": sft.Options(tile=(8, None), skip_repeats=True)},
        {"options": sft.Options(skip_repeats=True)},
        says=lambda p: p.skips_repeats,
    ),
    "source": PlanCase(
        stages, (1, 3, 37, 29), {"options": sft.Options(tile=(8, None))}, says=lambda p: p.input_placements == ("source",), source=True
    ),
    "host output": PlanCase(
        stages,
        _IMAGE,
        {"options": sft.Options(tile=(8, None)), "output": "host"},
        {"output": "host"},
        says=lambda p: p.output_placements == ("host",),
    ),
    "measured": PlanCase(
        Residual,
        (1, 3, 40, 24),
        {"options": sft.Options(tile=(16, None), profile="measure")},
        says=lambda p: p.timeline.is_measured and p.projected_seconds is not None,
    ),
    "volume": PlanCase(volumes, (1, 2, 9, 8, 7), {"options": sft.Options(tile=(3, None))}, says=lambda p: p.segments[0].num_steps > 2),
    "mesh": PlanCase(
        classifier,
        (1, 3, 64, 29),
        {"mesh": (2, 3), "options": sft.Options(tile=(8, None))},
        says=lambda p: p.mesh is not None and (p.mesh.num_replicas, p.mesh.num_bands, p.mesh.outputs_in_bands) == (2, 3, False),
    ),
    "mesh bands": PlanCase(
        stages,
        (1, 3, 64, 29),
        {"mesh": (1, 2), "output": "band"},
        says=lambda p: p.mesh is not None and (p.mesh.num_replicas, p.mesh.num_bands, p.mesh.outputs_in_bands) == (1, 2, True),
    ),
}

#: Current names of fields of plans, by their earlier names.
FIELDS = {"sent_beside_bytes": "overlapped_sent_bytes", "received_beside_bytes": "overlapped_received_bytes"}

#: Names of public packages; each class and function that they export was pickled by name.
PACKAGES = ("sft", "sft.nn", "sft.optim", "sft.sources", "sft.tissue", "sft.weights", "sft.wsi")


# ---------------------------------------------------------------------------------------------------------------------------------------
# Plans


def _text(name: str) -> str:
    return (DATA / "plans" / f"{name.replace(' ', '_')}.json").read_text(encoding="utf-8")


def _plain(model: nn.Module) -> nn.Module:
    """The model with its repeated blocks in sequence."""
    model = copy.deepcopy(model)
    for name, child in list(model.named_children()):
        if isinstance(child, sft.nn.Repeat):
            setattr(model, name, child.unstacked())
    return model


def assert_trains(
    net: Any, model: nn.Module, x: Tensor, *more: Tensor, net_input: Any = None, input_grad: bool = True, num_steps: int = 3
) -> None:
    """Assert that the compiled net equals the model in float64, with gradients, for some steps of SGD.

    Args:
        net: the compiled module, with ``model``'s weights.
        model: plain.
        x: the input.
        more: further inputs.
        net_input: the input in the form that the net gets. Default: `None` (the tensor)
        input_grad: True if the input requires grad.
        num_steps: of SGD.
    """
    assert x.dtype == torch.float64
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (net, model)]
    for step in range(num_steps):
        own, theirs = x.clone().requires_grad_(input_grad), x.clone().requires_grad_()
        y, expected = net(own if net_input is None else net_input, *more), model(theirs, *more)
        torch.testing.assert_close(y.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
        direction = image(*expected.shape, seed=step + 1)
        (y * direction).sum().backward()
        (expected * direction).sum().backward()
        if net_input is None and input_grad:
            torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-9, atol=1e-11)
        _assert_same_gradients(net, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _assert_same_gradients(net: nn.Module, model: nn.Module) -> None:
    expected = {name: param.grad for name, param in model.named_parameters()}
    for name, param in net.named_parameters():
        grad = param.grad
        assert grad is not None, name
        before, is_stacked, after = name.partition(".block.")
        if is_stacked:  # a repetition: block after block
            gradients = [expected.pop(f"{before}.{number}.{after}") for number in range(len(grad))]
            assert all(gradient is not None for gradient in gradients)
            torch.testing.assert_close(
                grad, torch.stack([gradient for gradient in gradients if gradient is not None]), rtol=1e-9, atol=1e-11
            )
        else:
            torch.testing.assert_close(grad, expected.pop(name), rtol=1e-9, atol=1e-11)
    assert not expected


@pytest.mark.parametrize("name", PLANS)
def test_plans_in_json_have_their_fields(name: str) -> None:
    text, case = _text(name), PLANS[name]
    plan = sft.Plan.from_json(text)
    assert plan.to_json() == _with_current_fields(text), "the same text, field by field and in the same order"
    assert json.loads(text).pop("format") == 10
    assert case.says(plan)
    assert plan.input_shapes == (case.shape,) and plan.dtype == "float64" and plan.training
    assert plan.explain() and plan.explain(costs=True) and plan.timeline.peak_bytes == plan.projected_peak_bytes - plan.overhead_bytes
    assert plan == pickle.loads(pickle.dumps(plan)) == _pickled(f"plan {name}")


@pytest.mark.parametrize("name", ["mesh", "mesh bands"])
def test_earlier_names_of_fields(name: str) -> None:
    text = _text(name)
    (mesh,) = {plan.mesh for plan in map(sft.Plan.from_json, (text, _with_current_fields(text)))}
    assert mesh is not None
    recorded = [(rank["sent_beside_bytes"], rank["received_beside_bytes"]) for rank in json.loads(text)["mesh"]["ranks"]]
    assert [(rank.overlapped_sent_bytes, rank.overlapped_received_bytes) for rank in mesh.ranks] == recorded
    assert any(sent for sent, _ in recorded)


def _with_current_fields(text: str) -> str:
    """Text of a plan with renamed fields."""
    for former, name in FIELDS.items():
        text = text.replace(f'"{former}"', f'"{name}"')
    return text


@pytest.mark.parametrize("name", [name for name, case in PLANS.items() if "mesh" not in case.asked])
def test_a_plan_in_json_trains_exactly(name: str) -> None:
    plan, case = sft.Plan.from_json(_text(name)), PLANS[name]
    model, x = seeded(case.make), image(*case.shape)
    plain = _plain(model)
    net: Any = sft.compile(model, x.numpy() if case.source else case.shape, plan=plan, **case.compile_arguments)
    net_plan = net.plan
    if plan.timeline.is_measured:  # nothing is measured for a supplied plan
        net_plan = replace(net_plan, projected_seconds=plan.projected_seconds, timeline=plan.timeline)
    assert _without_estimates(net_plan) == _without_estimates(plan)
    assert_trains(net, plain, x, net_input=x.numpy() if case.source else None, input_grad=case.input_grad)
    # Above, the input had a gradient, too.
    assert _decisions(net.plan) == _decisions(plan)


def _without_estimates(plan: sft.Plan) -> sft.Plan:
    """Without texts, and without estimated seconds, which depend on the number of calls in a segment."""
    plan = _without_texts(plan)
    entries = tuple(replace(entry, estimated_seconds=0.0) for entry in plan.timeline.entries)
    return replace(plan, timeline=replace(plan.timeline, entries=entries))


def _without_texts(plan: sft.Plan) -> sft.Plan:
    """Without descriptive fields: labels of layers, formulas, notes."""
    segments = tuple(replace(segment, layers=("", ""), formulas=()) for segment in plan.segments)
    return replace(plan, segments=segments, notes=())


@cache
def _named_plans() -> dict[str, str]:
    plans: dict[str, str] = json.loads(gzip.decompress((DATA / "plans" / "named.json.gz").read_bytes()))
    return plans


_LABELS = torch.arange(384).reshape(2, 16, 12) % 4


#: Networks with operators that are now captured in another form; their plans are refused with a remedy.
RENAMED = {"cosine similarity"}


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_plans_of_operators_in_another_form_are_refused(name: str) -> None:
    plan = sft.Plan.from_json(_named_plans()[name])
    with pytest.raises(sft.InputError, match=r"names other operators than the model has; make a new one with sft\.plan"):
        sft.compile(seeded(NAMED[name]), (2, 3, 16, 12), plan=plan)


@pytest.mark.parametrize("name", [name for name in NAMED if name not in RENAMED])
def test_operator_names_of_plans_exist(name: str) -> None:
    plan = sft.Plan.from_json(_named_plans()[name])
    model, x = seeded(NAMED[name]), image(2, 3, 16, 12)
    more = (_LABELS,) if isinstance(model, Labelled) else ()
    plain = copy.deepcopy(model)
    net: Any = sft.compile(model, [tuple(x.shape), *more], plan=plan)
    assert _decisions(net.plan) == _decisions(plan)
    if any(isinstance(module, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)) for module in model.modules()) or name == "noise":
        net(x).sum().backward()  # other numbers than torch's
        return
    assert_trains(net, plain, x, *more, num_steps=1)


@pytest.mark.parametrize("name", HALVES)
def test_operator_names_of_half_precision_plans_exist(name: str) -> None:
    plan = sft.Plan.from_json(_named_plans()[f"{name} in bfloat16"])
    model = seeded(NAMED[name], dtype=torch.bfloat16)
    net: Any = sft.compile(model, [(2, 3, 16, 12), *((_LABELS,) if isinstance(model, Labelled) else ())], plan=plan)
    assert _decisions(net.plan) == _decisions(plan)


def _decisions(plan: sft.Plan) -> list[Any]:
    return [plan.order, *((s.nodes, s.mode, s.strip_rows, s.panel_cols, s.halo, s.state_slots, s.streamed) for s in plan.segments)]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Pickles


@cache
def _pickles() -> dict[str, bytes]:
    pickles: dict[str, bytes] = pickle.loads(gzip.decompress((DATA / "pickles.pkl.gz").read_bytes()))
    return pickles


def _pickled(name: str) -> Any:
    return pickle.loads(_pickles()[name])


@pytest.fixture
def in_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources in pickles have paths relative to this folder."""
    monkeypatch.chdir(DATA)


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the slide is relative to the repository."""
    roots = (Path.cwd(), *Path(__file__).resolve().parents, *Path(sft.__file__).resolve().parents)
    root = next((folder for folder in roots if (folder / SLIDE).exists()), None)
    if root is None:
        pytest.skip("the example slide is not here")
    monkeypatch.chdir(root)
    return root


def _unless(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


def test_names_in_pickles_exist() -> None:
    missing = []
    names = {name for content in (*_pickles().values(), *_saved_pickles()) for name in globals_of(content)}
    assert len(names) > 100
    for module, name in sorted(names):
        try:
            pickle.loads(f"c{module}\n{name}\n.".encode())
        except (AttributeError, ImportError) as error:
            missing.append(f"{module}.{name}: {error}")
    assert not missing, "\n".join(missing)


def globals_of(content: bytes) -> set[tuple[str, str]]:
    """Modules and names that a pickle refers to."""
    names: set[tuple[str, str]] = set()
    texts: list[str] = []
    memo: dict[int, Any] = {}
    last: Any = None
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("GLOBAL", "INST"):
            module, name = str(argument).split(" ")
            names.add((module, name))
        elif opcode.name == "STACK_GLOBAL":
            names.add((texts[-2], texts[-1]))
        if "UNICODE" in opcode.name:
            last = argument
            texts.append(argument)
        elif opcode.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = last
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            last = memo.get(argument)
            if isinstance(last, str):
                texts.append(last)
        else:
            last = None
    return names


def _saved_pickles() -> Iterator[bytes]:
    """The pickles inside of files of ``torch.save``."""
    for path in sorted((*DATA.rglob("*.pt.gz"), *DATA.rglob("*.pt"))):
        yield pickle_inside(path)


def saved_file(path: Path) -> io.BytesIO:
    """File of ``torch.save``, possibly compressed: it aligns each tensor, so small ones take many times their bytes."""
    content = path.read_bytes()
    return io.BytesIO(gzip.decompress(content) if path.suffix == ".gz" else content)


def pickle_inside(path: Path) -> bytes:
    """The pickle of a file of ``torch.save``."""
    with zipfile.ZipFile(saved_file(path)) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/data.pkl"))
        return file.read(name)


@pytest.mark.parametrize("package", PACKAGES)
def test_old_names_of_public_classes_and_functions_exist(package: str) -> None:
    if package == "sft.wsi":
        _unless("yaml", "jsonargparse", "sklearn", "safetensors")
    members = _pickled(f"names of {package}")
    module = sys.modules[package]
    assert members
    for name, member in members.items():
        if package != "sft.weights":  # its names are not documented, and some have changed
            assert getattr(module, name) is member, name
        again = pickle.loads(pickle.dumps(member))  # under its present name
        assert again is member, name


def test_old_names_do_not_hide_public_functions() -> None:
    for name in ("plan", "compile", "check"):
        assert callable(getattr(sft, name)) and getattr(sft, name) is _pickled("names of sft")[name]
    _ = _pickled("plan strips"), _pickled("tradeoff")
    assert callable(sft.plan) and callable(sft.compile) and callable(sft.check)


def test_pickles_are_read_by_a_process_that_has_imported_nothing() -> None:
    """A worker that unpickles its task has not imported the task's modules."""
    code = (
        "import pickle, sys\n"
        "for content in pickle.loads(sys.stdin.buffer.read()): pickle.loads(content)\n"
        "import sft\n"
        "assert all(callable(found) for found in (sft.plan, sft.compile, sft.check))\n"
    )
    names = ("plan strips", "plan mesh", "options", "interval", "input error", "tradeoff", "timeline")
    path = os.pathsep.join([str(Path(sft.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    content = pickle.dumps([_pickles()[name] for name in names])
    subprocess.run([sys.executable, "-P", "-c", code], input=content, env={**os.environ, "PYTHONPATH": path}, check=True)


def test_options() -> None:
    by_name = _pickled("options")
    expected = {
        "default": sft.Options(),
        "strips": sft.Options(tile=(8, None), state_every=2, halo="carry", batch_tile=1),
        "published": sft.Options(strategy="offload-dp", host_budget="2GiB", link_bandwidth="24GB", profile="measure"),
        "file": sft.Options(weights=sft.WeightsFile("weights.safetensors", resume=True, durable=False), mesh_timeout_seconds=60.0),
        "others": sft.Options(backend="aten", skip_repeats=True, progress=True),
    }
    expected = {name: replace(options, cuda_graphs=False) for name, options in expected.items()}  # the default then
    assert by_name == expected
    for name, options in expected.items():
        assert {f.name: getattr(by_name[name], f.name) for f in fields(options)} == {
            f.name: getattr(options, f.name) for f in fields(options)
        }
    assert by_name["published"].host_budget_bytes == 2 * 2**30 and by_name["published"].link_bytes_per_second == 24e9


def test_timelines_and_their_costs() -> None:
    plan, timeline = sft.Plan.from_json(_text("measured")), _pickled("timeline")
    assert isinstance(timeline, sft.Timeline) and timeline == plan.timeline
    assert _pickled("segment costs") == timeline.costs()
    assert all(isinstance(entry, sft.TimelineEntry) for entry in timeline.entries)


def test_reports() -> None:
    rows = _pickled("tradeoff")
    assert rows and all(isinstance(row, sft.TradeoffRow) and row.total_bytes <= row.budget_bytes for row in rows)
    report = _pickled("check report")
    assert report == sft.CheckReport(ok=True, num_streamed=8, num_phases=1)
    refused = _pickled("check report refused")
    assert not refused.ok and len(refused.problems) == 1 and "cannot be compiled" in str(refused)
    reading, skipping = _pickled("reading"), _pickled("skipping")
    assert isinstance(reading, sft.Reading) and isinstance(reading.forward, sft.PassReading) and reading.backward.num_rows_read == 32
    assert isinstance(skipping, sft.Skipping) and isinstance(skipping.forward, sft.PassSkipping)
    assert skipping.forward.num_skipped > 0 and skipping.backward.num_strips > 0
    counters = _pickled("weight counters")
    assert counters.copied_bytes > 0 and counters == pickle.loads(pickle.dumps(counters))


def test_errors() -> None:
    for name, cls in (
        ("sft error", sft.SftError),
        ("input error", sft.InputError),
        ("source error", sft.SourceError),
        ("skip error", sft.SkipSlideError),
        ("internal error", sft.InternalError),
        ("tiff error", sft.sources.NotTiledError),
    ):
        error = _pickled(name)
        assert type(error) is cls and str(error) == "what, how many, what to do"
    error = _pickled("rank error")
    assert type(error) is sft.RankError and str(error) == "rank 1 failed; start again" and error.cause == "rank 1 failed"
    refusal = _pickled("unsupported error")
    assert type(refusal) is sft.UnsupportedError and refusal.problems == ("a.b: fft: no", "c: sort: no")


def test_the_error_about_a_budget() -> None:
    error = _pickled("budget error")
    assert type(error) is sft.BudgetError and error.needed_bytes == 1234 and str(error) == "too small; raise the budget"


def test_the_message_of_an_error_about_operators() -> None:
    error = _pickled("unsupported error")
    assert str(error) == "this model cannot be compiled exactly:\n  - a.b: fft: no\n  - c: sort: no"


def test_intervals_and_layouts_of_records() -> None:
    interval = _pickled("interval")
    assert (interval.start, interval.stop, len(interval)) == (3, 10, 7)
    layout = _pickled("layout")
    specs = [
        sft.weights.TensorSpec(name="a", shape=(2, 3), dtype=torch.float32),
        sft.weights.TensorSpec(name="b", shape=(5,), dtype=torch.int64),
    ]
    assert layout == type(layout).of(specs)


def test_schedules_of_repeated_blocks() -> None:
    plan = _pickled("deep plan")
    net = sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 12, budget=1300)
    assert plan == net.plan_for(torch.zeros(2, 4)) and type(plan) is type(net.plan_for(torch.zeros(2, 4)))
    assert plan.num_forwards > 12 and plan.operations[plan.turn].kind == "loss"


def test_chains_schedules_and_simulations() -> None:
    assert _pickled("chain").stages
    simulation, schedule = _pickled("simulation"), _pickled("schedule")
    assert simulation.peak_bytes > 0 and simulation.seconds > 0 and schedule.count("forward") > 6
    assert _pickled("link").down_seconds(12.2e9) == 1.0


def test_tables_of_kernels() -> None:
    """The class has no public name; the pickle has it."""
    table, text = _pickled("kernel table"), (DATA / "kernels" / "nvidia-test-triton-3.9.0.json").read_text(encoding="utf-8")
    assert type(table).from_json(text) == table and table.to_json() == text
    assert [entry.fastest for entry in table.entries] == ["triton", "aten"]
    assert table.entries[0].shape_class.label == "conv2d + bias + relu, bfloat16, 64 -> 64 channels, 3x3, about 1048576 pixels"


# ---------------------------------------------------------------------------------------------------------------------------------------
# Sources: all of them have the same pixels


@cache
def _pixels() -> Any:
    return np.load(DATA / "image.npy")


_IMAGES: dict[str, Callable[[Any], Any]] = {
    "array image": lambda pixels: pixels,
    "array image of a file": lambda pixels: pixels,
    "tiff": lambda pixels: pixels,
    "tiff unopened": lambda pixels: pixels,
    "zarr": lambda pixels: pixels,
    "with mpp": lambda pixels: pixels,
    "tolerant": lambda pixels: pixels,
    "cached": lambda pixels: pixels,
    "level": lambda pixels: pixels[::2, ::2],
    "cropped": lambda pixels: pixels[5:45, 3:30],
    "resampled": lambda pixels: _halved(pixels),
    "masked": lambda pixels: np.where(_mask_of(pixels)[..., None], pixels, np.uint8(255)),
    "masked by regions": lambda pixels: np.where(_square_of(pixels)[..., None], pixels, np.uint8(7)),
    "cropped to tissue": lambda pixels: np.where(_mask_of(pixels)[..., None], pixels, np.uint8(255))[_box_of(pixels)],
    "opened": lambda pixels: _halved(pixels),
    "turned": lambda pixels: np.rot90(pixels[:, ::-1]),
}


def _halved(pixels: Any) -> Any:
    """Means of 2 x 2 px, half up."""
    rows, columns = pixels.shape[0] // 2, pixels.shape[1] // 2
    sums = pixels[: 2 * rows, : 2 * columns].reshape(rows, 2, columns, 2, 3).sum((1, 3), dtype=np.int64)
    return ((sums + 2) // 4).astype(np.uint8)


def mask_of(width_px: int, height_px: int) -> sft.tissue.TissueMask:
    """Tissue in two of four quarters."""
    return sft.tissue.TissueMask(pixels=np.array([[False, True], [False, False], [False, True]]), width_px=width_px, height_px=height_px)


def _mask_of(pixels: Any) -> Any:
    return mask_of(pixels.shape[1], pixels.shape[0]).region(0, 0, pixels.shape[1], pixels.shape[0])


def _box_of(pixels: Any) -> tuple[slice, slice]:
    rows, columns = np.flatnonzero(_mask_of(pixels).any(1)), np.flatnonzero(_mask_of(pixels).any(0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _square_of(pixels: Any) -> Any:
    mask = np.zeros(pixels.shape[:2], bool)
    mask[10:30, 8:20] = True
    return mask


@pytest.mark.usefixtures("in_data")
@pytest.mark.parametrize("name", _IMAGES)
def test_images_read_the_same_pixels(name: str) -> None:
    tiff = ("tifffile", "imagecodecs")
    _unless(*{"tiff": tiff, "level": tiff, "zarr": ("zarr",), "turned": ("yaml", "sklearn")}.get(name.split()[0], ()))
    reader, expected = _pickled(name), _IMAGES[name](_pixels())
    assert isinstance(reader, sft.sources.Image)
    assert (reader.height_px, reader.width_px, 3) == expected.shape
    assert np.array_equal(reader.read(0, 0, reader.width_px, reader.height_px), expected)
    assert np.array_equal(reader.read(2, 3, 9, 8), expected[3:11, 2:11])
    again = pickle.loads(pickle.dumps(reader))
    assert np.array_equal(again.read(2, 3, 9, 8), expected[3:11, 2:11]) and repr(again) == repr(reader)
    close = getattr(reader, "close", None)
    if close is not None:
        close()


@pytest.mark.usefixtures("in_data")
def test_metadata_of_pickled_images() -> None:
    assert _pickled("array image").mpp == (0.5, 0.25) and _pickled("array image").background == (1, 2, 3)
    assert _pickled("array image of a file").path == Path("image.npy")
    assert _pickled("with mpp").mpp == (0.25, 0.25)
    assert _pickled("resampled").scale == (2, 2)
    assert _pickled("cached").host_budget_bytes == 2**20
    _unless("tifffile", "imagecodecs")
    tiff = _pickled("tiff")
    assert isinstance(tiff, sft.sources.TiffImage) and tiff.path == Path("image.tif") and len(tiff.level_dimensions) == 2
    assert isinstance(tiff.facts, sft.sources.ImageFacts) and tiff.mpp == pytest.approx((0.5, 0.5))
    opened = _pickled("opened")
    assert isinstance(opened, sft.sources.Cached) and opened.mpp == pytest.approx((1.0, 1.0)) and opened.bad_tiles == ()
    filled = _pickled("filled")
    assert filled.bad_tiles == (sft.sources.BadTile(level=0, x=16, y=32, width_px=16, height_px=16, reason=filled.bad_tiles[0].reason),)
    assert (filled.read(16, 32, 16, 16) == 255).all()
    filled.close()


@pytest.mark.parametrize("name", ["slide", "slide unopened", "slide as tiff"])
def test_the_slide_reads_the_same_pixels(in_repository: Path, name: str) -> None:
    _unless("openslide", *(("tifffile", "imagecodecs", "simplejpeg") if "tiff" in name else ()))
    slide = _pickled(name)
    assert slide.path == SLIDE
    with sft.sources.Slide(SLIDE) as fresh:
        assert (slide.width_px, slide.height_px, slide.background) == (2220, 2967, fresh.background)
        assert np.array_equal(slide.read(1000, 1200, 300, 70), fresh.read(1000, 1200, 300, 70))
    slide.close()


def test_the_slide_as_a_source(in_repository: Path) -> None:
    _unless("openslide")
    source = _pickled("normalized slide")
    fresh: Any = sft.sources.Normalized(sft.sources.Slide(SLIDE), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), dtype=torch.float64)
    assert type(source) is sft.sources.Normalized and source.shape == fresh.shape and source.dtype == torch.float64
    assert torch.equal(_rows(source, 700, 703), _rows(fresh, 700, 703))
    for slide in (source.image, fresh.image):
        assert isinstance(slide, sft.sources.Slide)
        slide.close()


def _rows(source: Any, start: int, stop: int) -> Tensor:
    """Rows of a source."""
    out = torch.empty(*source.shape[:2], stop - start, source.shape[3], dtype=source.dtype)
    source.rows(type(_pickled("interval"))(start, stop), out)
    return out


@pytest.mark.usefixtures("in_data")
@pytest.mark.parametrize("name", ["array source", "array source of a file", "normalized", "tensor source", "batch", "samples of a batch"])
def test_sources_read_the_same_numbers(name: str) -> None:
    source, pixels = _pickled(name), _pixels().transpose(2, 0, 1).astype(np.float64)
    assert isinstance(source, sft.sources.Source)
    mean, std = np.array([0.5, 0.4, 0.3])[:, None, None], np.array([0.2, 0.25, 0.3])[:, None, None]
    expected = {
        "array source": pixels[None] / 255,
        "array source of a file": (pixels[None] / 255 - mean) / std,
        "normalized": (pixels[None] / 255 - mean) / std,
        "tensor source": pixels[None] / 256,
        "batch": np.stack([pixels, pixels[:, ::-1]]) / 255,
        "samples of a batch": pixels[None, :, ::-1] / 255,
    }[name]
    assert source.shape == expected.shape
    torch.testing.assert_close(_rows(source, 4, 21).double().numpy(), expected[:, :, 4:21], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("in_data")
def test_a_net_trains_on_sources_from_pickles() -> None:
    source, labels = _pickled("array source of a file"), _pickled("labels of a file")
    model = sft.nn.WithLoss(seeded(lambda: nn.Conv2d(3, 4, 3, padding=1)), nn.CrossEntropyLoss())
    plain = copy.deepcopy(model)
    net = sft.compile(model, [source, labels], options=sft.Options(tile=(8, None)))
    loss = net(source, labels)
    expected = plain(_rows(source, 0, source.shape[2]), _rows(labels, 0, source.shape[2]))
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    loss.backward()
    expected.backward()
    _assert_same_gradients(net, plain)


@pytest.mark.usefixtures("in_data")
@pytest.mark.parametrize("name", ["labels", "labels of a file"])
def test_labels_read_the_same_numbers(name: str) -> None:
    source, expected = _pickled(name), np.load(DATA / "labels.npy").astype(np.int64)
    assert isinstance(source, sft.sources.LabelSource) and source.shape == (1, 1, *expected.shape)
    assert np.array_equal(_rows(source, 3, 17)[0, 0].numpy(), expected[3:17])


@pytest.mark.usefixtures("in_data")
def test_a_volume_reads_the_same_voxels() -> None:
    _unless("nibabel")
    volume = _pickled("volume")
    assert isinstance(volume, sft.sources.NiftiVolume) and volume.shape == (1, 5, 4, 3) and volume.spacing_mm == (2.0, 0.75, 0.5)
    assert np.array_equal(volume.load_tensor()[0, 0].numpy(), np.arange(60, dtype=np.float32).reshape(5, 4, 3) * 0.5 - 10)
    volume.close()


def test_masks_and_regions() -> None:
    mask, regions = _pickled("tissue mask"), _pickled("regions")
    expected = mask_of(8, 9)
    assert isinstance(mask, sft.tissue.TissueMask) and (mask.width_px, mask.height_px) == (8, 9)
    assert np.array_equal(mask.pixels, expected.pixels) and np.array_equal(mask.region(0, 0, 8, 9), expected.region(0, 0, 8, 9))
    assert _pickled("box") == expected.bounding_box()
    assert isinstance(regions, sft.tissue.Regions) and regions.area_px == 240.0 and regions.bounding_box() == (8.0, 10.0, 20.0, 30.0)
    assert np.array_equal(regions.region(0, 0, 40, 50), _square_of(np.zeros((50, 40, 3))))


def test_masks_and_regions_in_files() -> None:
    _unless("PIL", "shapely")
    mask, regions = sft.tissue.TissueMask.load_png(DATA / "mask.png"), sft.tissue.read_geojson(DATA / "regions.geojson")
    assert np.array_equal(mask.pixels, mask_of(8, 9).pixels) and (mask.width_px, mask.height_px) == (8, 9)
    assert regions.area_px == 240.0 and regions.bounding_box() == (8.0, 10.0, 20.0, 30.0)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Modules that were saved completely, and state


def _loaded(name: str) -> Any:
    return torch.load(saved_file(DATA / f"{name}.pt.gz"), weights_only=False)


def test_losses_saved_whole() -> None:
    saved = _loaded("losses")
    prediction, labels = image(2, 4, 6, 5), torch.arange(60).reshape(2, 6, 5) % 4
    for name, loss, target in (
        ("dice", sft.nn.DiceLoss(smooth=0.5, ignore_index=3), labels),
        ("squared dice", sft.nn.DiceLoss("sigmoid", squared=True, batch=True, include_background=False), labels),
    ):
        assert type(saved[name]) is sft.nn.DiceLoss and repr(saved[name]) == repr(loss)
        assert torch.equal(saved[name](prediction, target), loss(prediction, target))
    training = saved["with loss"]
    assert type(training) is sft.nn.WithLoss and type(training.loss) is sft.nn.DiceLoss
    x, labels = image(2, 3, 21, 18), torch.arange(756).reshape(2, 21, 18) % 4
    plain = copy.deepcopy(training)
    net = sft.compile(training, [tuple(x.shape), labels], options=sft.Options(tile=(8, None)))
    net_loss, expected = net(x, labels), sft.nn.DiceLoss()(plain.model(x), labels)
    torch.testing.assert_close(net_loss, expected, rtol=1e-10, atol=1e-12)
    net_loss.backward()
    expected.backward()
    _assert_same_gradients(net, plain)


def test_repeated_blocks_saved_whole() -> None:
    saved, model = _loaded("repeat"), seeded(repeated)
    assert type(saved[1]) is sft.nn.Repeat and saved[1].num_blocks == 4
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())
    assert_trains(saved, _plain(saved), image(1, 3, 12, 10))
    alone = _pickled("repeat")
    assert (alone.budget_bytes, alone.strategy, alone.num_blocks) == (3072, "revolve", 12)
    x = image(2, 4, dtype=torch.float32)
    torch.testing.assert_close(alone(x), alone.unstacked()(x))
    assert alone.plan_for(x).num_forwards > 12


@pytest.mark.parametrize("name", ["compiled", "compiled with plan", "compiled to host", "compiled for mesh"])
def test_compiled_modules_saved_whole(name: str) -> None:
    net: Any = _loaded("compiled")[name]
    model, is_model = seeded(classifier), isinstance(net, nn.Sequential)
    assert is_model and hasattr(net, "plan_for")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in net.state_dict().items())
    plan = net.plan_for(_IMAGE)
    if name == "compiled for mesh":
        assert plan.mesh is not None and (plan.mesh.num_replicas, plan.mesh.num_bands) == (2, 3)
        return
    assert_trains(net, model, image(*_IMAGE))
    assert any(segment.mode == "tiled" and segment.strip_rows == 8 for segment in net.plan.segments)
    if name == "compiled with plan":
        assert _decisions(net.plan) == _decisions(sft.Plan.from_json(_text("strips")))
    assert net.plan.output_placements == ("host" if name == "compiled to host" else "device",)
    assert net.plan.budget_bytes == (11 * 2**30 if name == "compiled with plan" else 64 * 2**20)


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    """Weights and states of optimizers, before and after a step: numbers, texts and tensors only."""
    objects: dict[str, Any] = torch.load(saved_file(DATA / "states.pt.gz"), weights_only=True)
    return objects


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_states_of_optimizers(states: dict[str, Any], kind: Literal["SGD", "AdamW"]) -> None:
    for library in (sft.optim, torch.optim):
        saved = copy.deepcopy(states[kind])  # load_state_dict takes tensors over, and steps change them
        model = small().double()
        model.load_state_dict(saved["model"])
        made = getattr(library, kind)
        optimizer = (
            made(model.parameters(), lr=9.0) if library is sft.optim else made(model.parameters(), lr=9.0, foreach=False, fused=False)
        )
        optimizer.load_state_dict(saved["optimizer"])
        model(image(1, 3, 9, 8)).square().sum().backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, saved["after"][name], rtol=1e-9, atol=1e-11)


def test_states_of_compiled_and_repeated_models(states: dict[str, Any]) -> None:
    net = sft.compile(classifier().double(), _IMAGE, options=sft.Options(tile=(8, None)))
    net.load_state_dict(states["compiled"])
    assert_trains(net, copy.deepcopy(seeded(classifier)), image(*_IMAGE), num_steps=1)
    model = repeated().double()
    model.load_state_dict(states["repeated"])
    assert all(torch.equal(value, seeded(repeated).state_dict()[name]) for name, value in model.state_dict().items())


def test_states_of_streamed_optimizers(states: dict[str, Any]) -> None:
    saved = states["streamed"]
    model, repeat = streamed_chain()
    model.load_state_dict(saved["model"])
    repeat.stream("1KiB")
    optimizer = sft.StreamedOptimizer(model, "adamw", lr=9.0, loss_scale="dynamic")
    optimizer.load_state_dict(saved["optimizer"])
    _step(model, optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-5, atol=1e-7)
    assert optimizer.state_dict()["loss_scale"] == saved["loss_scale"]
    repeat.close()


def _step(model: Any, optimizer: Any, *, shape: tuple[int, ...] = (2, 3)) -> None:
    loss = model(image(*shape, dtype=torch.float32)).square().sum()
    (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["pickled SGD", "pickled AdamW"])
def test_optimizers_pickled_whole(name: str) -> None:
    """Their state is present; pickles of 0.1.0 lack the functions of updates, so that none of them can make a step."""
    optimizer = _pickled(name)
    assert type(optimizer) is getattr(sft.optim, name.split()[1])
    assert optimizer.param_groups[0]["lr"] == 0.125 and len(optimizer.state) == 2
    fresh = type(optimizer)(optimizer.param_groups[0]["params"], lr=1.0, **({"momentum": 0.5} if "SGD" in name else {}))
    fresh.load_state_dict(optimizer.state_dict())
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    fresh.step()
    assert fresh.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("name", ["pickled SGD", "pickled AdamW"])
def test_optimizers_pickled_whole_make_a_step(name: str) -> None:
    optimizer = _pickled(name)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_updates() -> None:
    updates = _pickled("updates")
    assert [type(update) for update in updates] == [sft.optim.SGDUpdate, sft.optim.AdamWUpdate]


def test_a_file_of_streamed_blocks_is_resumed(states: dict[str, Any], tmp_path: Path) -> None:
    saved, path = states["streamed file"], tmp_path / "blocks.safetensors"
    shutil.copy(DATA / "blocks.safetensors", path)
    model, repeat = streamed_chain()
    model[0].load_state_dict(saved["front"])
    repeat.stream("1KiB", path=path, resume=True)
    for name, value in repeat.state_dict().items():
        assert torch.equal(value, saved["blocks"][name]), name
    optimizer = sft.StreamedOptimizer(model, "adamw", lr=0.01)
    _step(model, optimizer)
    for name, value in repeat.state_dict().items():
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-5, atol=1e-7)
    repeat.close()


def test_a_file_of_a_streamed_model_is_resumed(states: dict[str, Any], tmp_path: Path) -> None:
    saved, path = states["model file"], tmp_path / "model.safetensors"
    shutil.copy(DATA / "model.safetensors", path)
    model = mlp()
    net = sft.compile(model, (2, 3, 20, 16), options=sft.Options(weights=sft.WeightsFile(path, resume=True)))
    optimizer = sft.StreamedOptimizer(net, "sgd", lr=0.01, momentum=0.9)
    for name, value in net.state_dict().items():
        assert torch.equal(value, saved["before"][name]), name
    _step(net, optimizer, shape=(2, 3, 20, 16))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-5, atol=1e-6)


def test_a_store_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "store.safetensors"
    shutil.copy(DATA / "store.safetensors", path)
    store = sft.weights.DiskStore.open(path)
    views = [layout.views(store.record(block)) for block, layout in enumerate(store.layouts)]
    assert [view["a"].tolist() for view in views] == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]] and store.metadata == {"note": "kept"}
    store.close()


# ---------------------------------------------------------------------------------------------------------------------------------------
# sft.wsi


@pytest.fixture
def wsi() -> Any:
    _unless("yaml", "jsonargparse", "sklearn", "safetensors")
    import sft.wsi

    return sft.wsi


def _groups(config: Any, model: Any) -> dict[str, Any]:
    """Settings of a configuration with other ones of the model: a configuration completes its mean and its deviation."""
    names = ("data", "task", "augment", "train", "ranks", "run")
    return {**{name: getattr(config, name) for name in names}, "model": model}


def test_configurations_and_tables(wsi: Any) -> None:
    config = _pickled("config")
    assert isinstance(config, wsi.Config) and config.data == wsi.DataConfig(csv=Path("slides.csv"), num_folds=5, fold=2)
    assert (
        config.model
        == wsi.Config(**_groups(config, wsi.ModelConfig(backbone="torchvision:resnet50", head="attention", tile=[256, 2048]))).model
    )
    assert config.task == wsi.TaskConfig(kind="hazard", num_intervals=6) and config.augment == wsi.AugmentConfig(hed=0.05)
    assert config.train == wsi.TrainConfig(epochs=3, monitor="c_index") and config.ranks == wsi.RanksConfig(bands=2)
    assert config.run == Path("runs/first")
    table = _pickled("table")
    assert isinstance(table, wsi.SlideTable) and [record.name for record in table.records] == [f"s{number}" for number in range(5)]
    assert table.records[0] == _pickled("record") and isinstance(table.records[0], wsi.SlideRecord)
    assert table.classes == ("plain", "swapped") and table.digest() == _pickled("digest")


def test_results(wsi: Any) -> None:
    prediction = _pickled("prediction")
    expected = wsi.Prediction(name="s1", patient="p1", split="val", target=(1.0,), output=(0.25, 0.75), loss=0.5)
    assert prediction == expected and _pickled("estimate") == wsi.Estimate(value=0.5, low=0.25, high=0.75)
    estimates = wsi.evaluate_predictions(_pickled("task"), [prediction], num_draws=0)
    assert estimates["loss"] == wsi.Estimate(value=0.5)
    saved, drawn = _pickled("augmentation"), wsi.draw_augmentation(wsi.AugmentConfig(brightness=0.1, hed=0.05), 3, 4, "s1")
    assert replace(saved, density=drawn.density) == drawn
    for name in ("matrix", "offset"):  # matrix products with last digits that depend on the processor
        np.testing.assert_allclose(getattr(saved.density, name), getattr(drawn.density, name), rtol=1e-12)


def test_errors_of_runs(wsi: Any) -> None:
    error = _pickled("dataset error")
    assert type(error) is wsi.DatasetError and error.problems == ("row 3: no slide", "row 4: no label")
    assert str(error) == "slides.csv: 2 problems\n  - row 3: no slide\n  - row 4: no label"
    for name in ("RunFolderError", "RunInterrupted", "TrainingError"):
        assert type(_pickled(name)) is getattr(wsi, name) and str(_pickled(name)) == "what, how many, what to do"


@pytest.mark.usefixtures("in_data")
def test_recoloured_images(wsi: Any) -> None:
    recoloured = _pickled("recoloured")
    fresh = _pickled("augmentation").apply(sft.sources.ArrayImage(_pixels()))
    assert type(recoloured) is type(fresh) and np.array_equal(
        recoloured.read(0, 0, recoloured.width_px, recoloured.height_px), fresh.read(0, 0, recoloured.width_px, recoloured.height_px)
    )
    unturned = recoloured.image if isinstance(recoloured, wsi.Turned) else recoloured
    assert isinstance(unturned, wsi.Recoloured)


@pytest.mark.parametrize("head", ["gap", "max", "attention", "segmentation"])
def test_networks_for_slides_saved_whole(wsi: Any, head: str) -> None:
    saved = _loaded("slide_models")[head]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = wsi.build_model(nn.Conv2d(3, 4, 5, stride=4), 4, 2, head=head, attention_dim=3).double()
    assert type(saved) is wsi.SlideModel and type(saved.head) is type(fresh.head)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in saved.state_dict().items())
    assert_trains(sft.compile(copy.deepcopy(saved), (1, 3, 29, 21), options=sft.Options(tile=(8, None))), saved, image(1, 3, 29, 21))
    if head != "segmentation":
        evidence = _loaded("slide_models")[f"evidence of {head}"]
        x = image(1, 3, 29, 21)
        assert type(evidence) is wsi.Evidence
        assert torch.equal(evidence(x)[0] if isinstance(evidence(x), tuple) else evidence(x), _first(wsi.Evidence(fresh)(x)))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


@pytest.fixture
def run_folder(wsi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed in its second of three epochs, with its slides."""
    folder = tmp_path / "wsi"
    shutil.copytree(DATA / "wsi", folder)
    monkeypatch.chdir(folder)
    return folder


def _command(*arguments: str) -> int:
    """``python -m sft.wsi``; returns the exit code."""
    before = sys.argv
    sys.argv = ["sft.wsi", *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it was started on another machine
            runpy.run_module("sft.wsi", run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def test_checkpoints_are_numbers_texts_and_tensors(run_folder: Path, wsi: Any) -> None:
    states = sorted(run_folder.rglob("state.pt"))
    assert [path.parent.name for path in states] == ["best-00000001", "last-00000005"]
    for path in states:
        assert not any(module.startswith("sft") for module, _ in globals_of(pickle_inside(path)))
    checkpoint = wsi.CheckpointFolder(run_folder / "run" / "checkpoints").load("last")
    assert checkpoint is not None and checkpoint.state["format"] == 1 and checkpoint.state["progress"]["step"] == 3
    assert set(checkpoint.weights) == {"backbone.weight", "backbone.bias", "head.classifier.weight", "head.classifier.bias"}


def test_a_killed_run_continues_to_the_same_result(run_folder: Path, wsi: Any, capfd: pytest.CaptureFixture[str]) -> None:
    expected = torch.load(run_folder / "finished.pt", weights_only=True)
    assert _command("train", "--config", "config.yaml", "--bootstrap", "20") == 0
    told = capfd.readouterr()
    assert "resuming from step 3, epoch 2, slide 3" in told.out + told.err
    checkpoint = wsi.CheckpointFolder(run_folder / "run" / "checkpoints").load("last")
    assert checkpoint is not None and checkpoint.state["progress"]["epoch"] == 3
    for name, value in expected.items():
        torch.testing.assert_close(checkpoint.weights[name], value, rtol=1e-4, atol=1e-6)
    plan = sft.Plan.from_json((run_folder / "run" / "plan.json").read_text())
    assert plan == sft.Plan.from_json((DATA / "wsi" / "run" / "plan.json").read_text())


def test_the_best_model_of_a_run_is_evaluated(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _command("evaluate", "run", "--split", "val", "--out", "found", "--bootstrap", "20") == 0
    assert (run_folder / "found" / "predictions.csv").exists()
    assert "best model (epoch 1)" in "".join(capfd.readouterr())


# ---------------------------------------------------------------------------------------------------------------------------------------


def test_every_pickle_is_tested() -> None:
    """The name of each pickle occurs in this file."""
    text = Path(__file__).read_text(encoding="utf-8")
    names = {name for name in _pickles() if not name.startswith(("plan ", "names of "))}
    assert not [name for name in names if f'"{name}"' not in text]


def test_pickles_of_today_are_read_back() -> None:
    """An object of an old pickle survives a new pickle."""
    for name, content in _pickles().items():
        if name in ("budget error", "unsupported error") or "file" in name:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(DATA)
            if "slide" in name:
                continue
            value = pickle.loads(content)
            stream = io.BytesIO()
            pickle.dump(value, stream)
            again = pickle.loads(stream.getvalue())
        assert type(again) is type(value), name
        if is_dataclass(value) and not isinstance(value, type) and not _holds_arrays(value):
            assert again == value and asdict(again) == asdict(value), name


def _holds_arrays(record: Any) -> bool:
    return any(isinstance(getattr(record, item.name), np.ndarray) for item in fields(record))
