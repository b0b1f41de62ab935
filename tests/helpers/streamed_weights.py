"""Models with streamed weights, and the same models with resident ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sft
from tests.helpers.models import Residual, TinyUNet, image, seeded
from tests.helpers.stage_chains import Normed

__all__ = [
    "MODELS",
    "SETTINGS",
    "SHAPE",
    "STREAM",
    "BatchNormed",
    "Mlp",
    "TwoHeads",
    "Vgg",
    "assert_same",
    "pair_of",
    "same_state",
    "streamed_optimizer",
    "take_step",
    "torch_optimizer",
    "x_of",
]

STREAM = sft.Options(weights="stream")
SHAPE = (2, 3, 20, 16)


class Vgg(nn.Sequential):
    """Convolutions first, then linear layers with most of the weights."""

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
    """Layers on vectors, without strips."""

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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg": Vgg,
    "norms": BatchNormed,
    "residual": Residual,
    "unet": TinyUNet,
    "shared": Normed,
    "mlp": Mlp,
}


def x_of(name: str) -> Tensor:
    return image(4, 16) if name == "mlp" else image(*SHAPE)


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adamw": {"lr": 0.01, "amsgrad": True},
}


def torch_optimizer(kind: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    return make(model.parameters(), foreach=False, **{**SETTINGS[kind], **settings})


def streamed_optimizer(kind: Any, net: nn.Module, **settings: Any) -> sft.StreamedOptimizer:
    return sft.StreamedOptimizer(net, kind, **{**SETTINGS[kind], **settings})


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, name: str = "norms") -> None:
    x = x_of(name) + number
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def pair_of(name: str, where: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """A compiled model with streamed weights, and one with resident ones of the same plan."""
    weights: Any = "stream" if where is None else sft.WeightsFile(where, durable=False)
    shape = tuple(x_of(name).shape)
    net = sft.compile(seeded(MODELS[name]), shape, options=sft.Options(weights=weights, **options))
    return net, sft.compile(seeded(MODELS[name]), shape, options=sft.Options(**options))


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, value), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def same_state(first: dict[str, Any], second: dict[str, Any]) -> bool:
    pairs = [(first["state"][key][name], value) for key, state in second["state"].items() for name, value in state.items()]
    return bool(pairs) and all(torch.equal(ours, theirs) for ours, theirs in pairs)
