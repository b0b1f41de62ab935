"""Integers inside of a model: labels that a loss changes, images of bytes, bins. They have no gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.models import image, seeded

_Function = Callable[[Tensor, Tensor], Tensor]
#: Of a value with four channels and labels of -1 to 3.
_FUNCTIONS: dict[str, _Function] = {
    "ignored by hand": lambda y, t: (F.cross_entropy(y, t.clamp(min=0), reduction="none") * (t >= 0)).sum() / (t >= 0).sum(),
    "one of four": lambda y, t: (F.one_hot(t.clamp(0, 3), 4).movedim(-1, 1) * y.softmax(1)).mean(),
    "absolute": lambda y, t: y * t.abs()[:, None],
    "negated": lambda y, t: y * (-t)[:, None],
    "squared": lambda y, t: y + t.pow(2)[:, None],
    "subtracted": lambda y, t: y + (3 - t)[:, None],
    "sign": lambda y, t: y * t.sign()[:, None],
    "bytes": lambda y, t: y * (255 - t.clamp(min=0).to(torch.uint8)).clamp(10, 200)[:, None],
    "bins": lambda y, t: y * (y * 3).long().clamp(0, 5),
    "cut off bins": lambda y, t: y * (y.detach() * 3).int().abs(),
    "weights of labels": lambda y, t: y * torch.tensor([0.5, 1, 2, 3], dtype=y.dtype)[t.clamp(min=0)][:, None],
}


class _Labelled(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.function(self.conv(x), labels)


@pytest.mark.parametrize("tile", [None, (5, None), (5, 8)])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_integers_in_models(name: str, tile: tuple[int, int | None] | None) -> None:
    model = seeded(lambda: _Labelled(_FUNCTIONS[name]))
    x, labels = image(2, 3, 18, 14), (image(2, 18, 14) * 2).long().clamp(-1, 3)
    net: Any = sft.compile(model, [x, labels], options=sft.Options(tile=tile))
    results = []
    for call in (net, model):
        x_ours = x.clone().requires_grad_()
        with sft.measure_peak("cpu") as peak:
            out = call(x_ours, labels)
            grads = torch.autograd.grad(out, [x_ours, *model.parameters()], torch.ones_like(out))
        results.append((out, *grads))
        assert call is model or peak.num_bytes <= net.plan_for(x_ours, labels).projected_peak_bytes
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
