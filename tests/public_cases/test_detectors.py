"""Detectors: heads that read Python numbers from tensors of strides and anchors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from tests.helpers.models import image, seeded


def _make_anchors(features: list[Tensor], strides: Tensor, offset: float = 0.5) -> tuple[Tensor, Tensor]:
    points, stride_tensors = [], []
    dtype, device = features[0].dtype, features[0].device
    for feature, stride in zip(features, strides, strict=True):
        height, width = feature.shape[2:]
        x = torch.arange(end=width, device=device, dtype=dtype) + offset
        y = torch.arange(end=height, device=device, dtype=dtype) + offset
        y, x = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack((x, y), -1).view(-1, 2))
        stride_tensors.append(torch.full((height * width, 1), stride, dtype=dtype, device=device))
    return torch.cat(points), torch.cat(stride_tensors)


class Detect(nn.Module):
    """A head like YOLOv8's: anchors of a size are made at its first use, from a tensor of strides."""

    dynamic = False
    shape: Any = None
    anchors = torch.empty(0)
    strides = torch.empty(0)

    def __init__(self, num_classes: int, channels: list[int]) -> None:
        super().__init__()
        self.num_classes, self.num_outputs = num_classes, num_classes + 4
        self.stride = torch.zeros(len(channels))
        self.heads = nn.ModuleList(nn.Conv2d(size, self.num_outputs, 1) for size in channels)

    def forward(self, features: list[Tensor]) -> Any:
        outputs = [head(feature) for head, feature in zip(self.heads, features, strict=True)]
        if self.training:
            return outputs
        shape = outputs[0].shape
        if self.dynamic or self.shape != shape:
            self.anchors, self.strides = (x.transpose(0, 1) for x in _make_anchors(outputs, self.stride))
            self.shape = shape
        joined = torch.cat([x.view(shape[0], self.num_outputs, -1) for x in outputs], 2)
        box, scores = joined.split((4, self.num_classes), 1)
        left_top, right_bottom = box.chunk(2, 1)
        corners = torch.cat((self.anchors - left_top, self.anchors + right_bottom), 1) * self.strides
        scale = float(self.stride[0]) / 8
        return torch.cat((corners * scale, scores.sigmoid()), 1)


class Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.SiLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.SiLU())
        self.detect = Detect(3, [6, 8])
        self.detect.stride = torch.tensor([8.0, 16.0])

    def forward(self, x: Tensor) -> Any:
        fine = self.stem(x)
        return self.detect([fine, self.down(fine)])


@pytest.mark.parametrize("runs_before", [False, True], ids=["new", "used"])
def test_ultralytics_ultralytics_15618_evaluation_reads_strides(runs_before: bool) -> None:
    model = seeded(Yolo).eval()
    if runs_before:
        with torch.no_grad():
            model(image(1, 3, 64, 32))
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(16, None)))
    for height, width in ((64, 48), (96, 64), (64, 48)):
        x = image(1, 3, height, width)
        expected = seeded(Yolo).eval()(x)
        torch.testing.assert_close(net(x), expected)


def test_ultralytics_ultralytics_15618_training_and_evaluation_in_turn() -> None:
    model = seeded(Yolo)
    net: Any = sft.compile(model, (1, 3, 64, 48), options=sft.Options(tile=(16, None)))
    x = image(1, 3, 64, 48)
    for _ in range(2):
        sum(y.square().mean() for y in net.train()(x)).backward()
        torch.testing.assert_close(net.eval()(x), model(x))


class SinePositions(nn.Module):
    """Position embeddings of DETR: sums of a mask of ones, and frequencies of a buffer."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(10000.0))

    def forward(self, y: Tensor) -> Tensor:
        mask = torch.ones((y.shape[0], *y.shape[2:]), device=y.device, dtype=torch.bool)
        rows, columns = mask.cumsum(1, dtype=y.dtype), mask.cumsum(2, dtype=y.dtype)
        frequencies = [float(self.temperature) ** (2 * number / y.shape[1]) for number in torch.arange(y.shape[1] // 2).tolist()]
        return torch.stack([position / number for number in frequencies for position in (rows, columns)], 1).sin()


def test_huggingface_transformers_detr_position_embeddings() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.positions = nn.Conv2d(3, 4, 3, padding=1), SinePositions()

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return F.relu(y + self.positions(y))

    model = seeded(Net)
    net = sft.compile(model, (1, 3, 24, 20), budget="1GiB")
    torch.testing.assert_close(net(image(1, 3, 24, 20)), model(image(1, 3, 24, 20)))


class Observer(nn.Module):
    """A fake quantizer with switches in buffers, as in quantization-aware training."""

    observer_enabled: Tensor
    fake_quant_enabled: Tensor
    scale: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor([0.05]))
        self.register_buffer("largest", torch.tensor([1.0]))

    def forward(self, y: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            with torch.no_grad():
                self.largest.copy_(0.9 * self.largest + 0.1 * y.detach().abs().amax())
                self.scale.copy_(self.largest / 127)
        if self.fake_quant_enabled[0] == 1:
            rounded = (y / self.scale).detach().round().clamp(-128, 127) * self.scale
            y = y + (rounded - y).detach()
        return y


@pytest.mark.parametrize(("observes", "quantizes"), [(1, 1), (0, 1), (0, 0)])
def test_switches_of_quantization_observers(observes: int, quantizes: int) -> None:
    models: list[Any] = [seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Observer(), nn.Conv2d(4, 2, 1))) for _ in range(2)]
    eager, model = models
    net = sft.compile(model, (1, 3, 16, 12), options=sft.Options(tile=(5, None)))
    for switch in (None, (observes, quantizes)):
        for module in models if switch else ():
            module[1].observer_enabled.fill_(observes)
            module[1].fake_quant_enabled.fill_(quantizes)
        for step in range(2):
            x = image(1, 3, 16, 12, seed=step)
            torch.testing.assert_close(net(x), eager(x))
            torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))


class _OwnLoss(nn.Module):
    """A detector with a ``forward`` that takes a batch with targets as well, and then calls itself with the images, as ultralytics' models
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return F.mse_loss(self.forward(x["img"]), x["target"])
        return self.layers(x)


def test_ultralytics_ultralytics_18612_a_model_that_calls_its_own_forward() -> None:
    """Ended in a StopIteration without a message."""
    plain = seeded(_OwnLoss)
    model = copy.deepcopy(plain)
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(16, None)))
    batch = {"img": image(1, 3, 48, 32), "target": image(1, 2, 48, 32)}
    for _ in range(2):
        for each in (net, plain):
            each.zero_grad()
            each(batch).backward()
    assert "forward" not in vars(model) and net.plan.segments
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(net(batch["img"]), plain(batch["img"]))
