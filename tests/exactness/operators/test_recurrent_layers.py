"""Recurrent layers after a CNN: full tensors, exact, with exact bytes; their own dropout is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact, assert_within_budget
from tests.helpers.models import image, seeded


class Reader(nn.Module):
    """A text recogniser: a recurrent layer over the columns of a convolution's result."""

    def __init__(self, layer: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.layer = layer(4, 5, batch_first=True, **options)
        self.out = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        columns, state = self.layer(self.stem(x).mean(2).transpose(1, 2))
        return self.out(columns), state


class Head(nn.Module):
    """A recurrent layer over the positions of a pooled image; only its last output is used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3))
        self.layer, self.out = nn.GRU(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.layer(self.stem(x).flatten(2).permute(2, 0, 1))[0][-1])
        return output


@pytest.mark.parametrize(
    ("layer", "options", "panel_cols"),
    [
        (nn.LSTM, {}, None),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 4),
        (nn.GRU, {"bias": False}, 4),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}, None),
    ],
    ids=["lstm", "lstm both ways", "gru", "rnn"],
)
def test_a_recurrent_layer_is_exact(layer: Callable[..., nn.RNNBase], options: dict[str, Any], panel_cols: int | None) -> None:
    model = seeded(lambda: Reader(layer, **options)).train()
    report = assert_exact(model, image(2, 1, 16, 8), options=sft.Options(tile=(4, panel_cols)), steps=1)
    assert any(segment.mode == "tiled" for segment in report.plan.segments)


def test_single_precision() -> None:
    """oneDNN's LSTM makes the workspace of its derivative only in grad mode, so training does not use its forward call."""
    model = seeded(lambda: Reader(nn.LSTM, num_layers=2)).train().float()
    x = image(2, 1, 16, 8).float().requires_grad_()
    expected = torch.autograd.grad(model(x)[0].sum(), [x, *model.parameters()])
    net = sft.compile(model, [x], options=sft.Options(tile=(4, None)))
    torch.testing.assert_close(torch.autograd.grad(net(x)[0].sum(), [x, *net.parameters()]), expected, rtol=1e-4, atol=1e-5)
    assert_within_budget(net, x, budget="1GiB", to_the_byte=True)


def test_after_a_pooled_image() -> None:
    """At any size: the number of steps is that of positions."""
    net = sft.compile(seeded(Head), (1, 3, None, None), budget="1MiB")
    assert [tuple(net(image(1, 3, side, 24)).shape) for side in (20, 32)] == [(1, 2), (1, 2)]
    assert_exact(seeded(Head).train(), image(2, 3, 20, 24), options=sft.Options(tile=(4, None)), steps=1)


def test_dropout_between_its_layers() -> None:
    """The order of its masks is not that of strips and recomputation; in eval mode there are none."""
    model = Reader(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(sft.UnsupportedError, match=r"layer: lstm has no exact rule; .* set its dropout to 0") as refused:
        sft.compile(model.train(), (1, 1, 16, 12))
    assert len(refused.value.problems) == 1, "three results of one operator"
    assert_exact(
        seeded(lambda: Reader(nn.LSTM, num_layers=2, dropout=0.5)).eval(), image(1, 1, 16, 12), options=sft.Options(tile=(4, None))
    )
