"""``torch.set_default_device`` does not move values of the host. The meta device stands in for a GPU, since numbers there would be lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import sft
from sft.optim.optimizer import AdamW
from sft.sources.arrays import ArraySource
from tests.helpers.models import seeded


class _Classifier(nn.Module):
    """Dropout, an interpolation, paddings, and a constant that `forward` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.body = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(functional.adaptive_avg_pool2d(self.body(self.stem(x)), 2).mean((2, 3)))
        return output


def _steps(model: nn.Module, options: sft.Options) -> list[torch.Tensor]:
    net = sft.compile(model, (2, 3, 24, 16), budget="64MiB", options=options)
    x = torch.linspace(-1, 1, 2 * 3 * 24 * 16, dtype=torch.float64, device="cpu").view(2, 3, 24, 16).requires_grad_()
    torch.manual_seed(3)
    streams = options.weights == "stream"
    optimizer = sft.StreamedOptimizer(net, "adamw", lr=1e-2) if streams else AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), torch.tensor([0, 1], device="cpu")).backward()
        optimizer.step()
    assert x.grad is not None
    return [x.grad, *net.state_dict().values()]


@pytest.mark.parametrize(
    "options",
    [
        sft.Options(),
        sft.Options(tile=(8, None)),
        sft.Options(tile=(8, 8)),
        sft.Options(strategy="offload-greedy"),
        sft.Options(weights="stream"),
    ],
    ids=["auto", "strips", "panels", "offload", "streamed"],
)
def test_steps_do_not_depend_on_it(options: sft.Options) -> None:
    models = [seeded(_Classifier) for _ in range(2)]
    wanted = _steps(models[0], options)
    with torch.device("meta"):
        ours = _steps(models[1], options)
    for left, right in zip(ours, wanted, strict=True):
        assert left.device.type == "cpu" and torch.equal(left, right)


def test_strips_of_a_file(tmp_path: Path) -> None:
    """An image that is read strip by strip, ahead of the step."""
    image = np.random.default_rng(0).random((1, 3, 24, 16))
    np.save(tmp_path / "image.npy", image)
    x = ArraySource(tmp_path / "image.npy", layout="NCHW", dtype=torch.float64)
    net = sft.compile(seeded(_Classifier).eval(), [x], budget="64MiB", options=sft.Options(tile=(8, None)))
    with torch.device("meta"), torch.no_grad():
        output = net(x)
    with torch.no_grad():
        assert torch.equal(output, net(torch.from_numpy(image)))
