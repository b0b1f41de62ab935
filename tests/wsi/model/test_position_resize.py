"""Segmentation heads: scores of a position are at the pixels of its centre, for padded and unpadded networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.wsi.model.backbones import feature_resizes
from sft.wsi.model.heads import SegmentationHead, SlideModel


def _conv(kernel: int, stride: int, padding: int, channels: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A convolution of equal weights, with a centred response to a dot."""
    layer = nn.Conv2d(channels, 1, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)
    nn.init.constant_(layer.weight, 1 / kernel**2)
    return layer


class _UNet(nn.Module):
    """Down, up to the odd size of the input, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.last = _conv(3, 1, 1, channels=3), _conv(3, 2, 1), _conv(3, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.stem(image)
        up = F.interpolate(self.down(skip), scale_factor=2.0)[:, :, : image.shape[2], : image.shape[3]]
        features: Tensor = self.last(skip + 0 * up)
        return features


_BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "padded": lambda: nn.Sequential(_conv(7, 2, 3, 3), _conv(3, 2, 1), _conv(3, 2, 1)),
    "unpadded": lambda: nn.Sequential(_conv(7, 2, 0, 3), _conv(3, 2, 0), _conv(5, 2, 0), _conv(5, 1, 0)),
    "padded too much": lambda: nn.Sequential(_conv(3, 2, 4, 3), _conv(3, 2, 5)),
    "patches": lambda: nn.Sequential(_conv(4, 4, 0, 3), _conv(7, 1, 3), _conv(2, 2, 0)),
    "unpadded without stride": lambda: nn.Sequential(_conv(5, 1, 0, 3), _conv(3, 1, 0, dilation=3)),
    "even kernels": lambda: nn.Sequential(_conv(2, 1, 0, 3), _conv(4, 3, 0)),
    "odd strides": lambda: nn.Sequential(_conv(3, 3, 1, 3), _conv(3, 3, 0)),
    "upsampled": lambda: nn.Sequential(_conv(7, 4, 3, 3), nn.Upsample(scale_factor=2.0), _conv(3, 1, 1)),
    "more rows than columns": lambda: nn.Sequential(_conv(3, 2, 1, 3), nn.AvgPool2d((1, 3), (1, 3))),
    "skip": _UNet,
}


def _model(kind: str) -> Any:
    backbone = _BACKBONES[kind]()
    head = SegmentationHead(1, 1, axes=feature_resizes(backbone))
    model: Any = SlideModel(backbone, head).double()
    nn.init.ones_(model.head.classifier.weight)
    nn.init.zeros_(model.head.classifier.bias)
    return model


def _displacement(model: nn.Module, axis: int) -> float:
    """Mean distance from a dot to the centre of its response along one axis, over all positions in a common multiple of the strides."""
    num_places, size = 72, [80, 80]
    size[axis] = 264
    dots = torch.arange(num_places) + 96
    images = torch.zeros(num_places, 3, *size)
    images.movedim(2 + axis, 1)[torch.arange(num_places), dots] = 1
    with torch.no_grad():
        profile = model.float()(images)[:, 0].double().select(2 - axis, 40)
    pixels = torch.arange(size[axis], dtype=torch.float64)
    # The sum of all responses, since a single one depends on the offset of the dot between positions.
    return float((profile * (pixels - dots[:, None])).sum() / profile.sum())


@pytest.mark.parametrize("kind", _BACKBONES)
def test_a_dot_responds_where_it_is(kind: str) -> None:
    model = _model(kind)
    assert model.head._axes is not None
    for axis in (0, 1):
        assert abs(_displacement(model, axis)) < 1e-4, (kind, axis)


def test_equal_cells_displace_padded_networks_by_half_a_stride() -> None:
    model = _model("padded")
    model.head._axes = None
    assert _displacement(model, 0) > 2


@pytest.mark.parametrize("kind", ["padded", "unpadded", "even kernels", "odd strides"])
@pytest.mark.parametrize("size", [(96, 80), (101, 83)])
def test_scores_are_linear_between_centres(kind: str, size: tuple[int, int]) -> None:
    """The formula, for every pixel; a blend of positions is exact with stride 1 and of the first order otherwise."""
    model = _model(kind)
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        scores, resized = model.backbone(image), model(image)
    for axis, grid in enumerate(sft.position_grids(model.backbone, image)[0] or ()):
        places = (torch.arange(size[axis], dtype=torch.float64) + 0.5 - float(grid.first_centre_px)) / float(grid.stride_px)
        places = places.clamp(0, scores.shape[2 + axis] - 1)
        low = places.floor().long().clamp(max=scores.shape[2 + axis] - 2)
        share = (places - low).reshape(-1, 1) if axis == 0 else places - low
        scores = scores.index_select(2 + axis, low) * (1 - share) + scores.index_select(2 + axis, low + 1) * share
    assert resized.shape == scores.shape
    assert (resized - scores).abs().max() < (0.1 if kind == "even kernels" else 1e-12)


@pytest.mark.parametrize("kind", ["padded", "unpadded", "even kernels", "skip"])
def test_resized_scores_stream_exactly(kind: str) -> None:
    model = _model(kind)
    x = torch.randn(1, 3, 101, 83, dtype=torch.float64, requires_grad=True)
    net: Any = sft.compile(model, x.shape, budget="64MiB", options=sft.Options(tile=(16, None)))
    plain, streamed = model(x), net(x)
    assert any(segment.mode == "tiled" and segment.num_steps > 2 for segment in net.plan.segments)
    assert torch.allclose(plain, streamed, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(plain)
    inputs = [x, *model.parameters()]
    pairs = zip(torch.autograd.grad(plain, inputs, weights), torch.autograd.grad(streamed, inputs, weights), strict=True)
    assert all((a - b).norm() <= 1e-11 * a.norm() for a, b in pairs)


def test_weights_of_earlier_versions_compute_equal_cells_also_after_a_compilation() -> None:
    model, image = _model("padded"), torch.rand(1, 3, 64, 72, dtype=torch.float64)
    net: Any = sft.compile(model, (1, 3, None, None), budget="16MiB")
    aligned, state = net(image), copy.deepcopy(model.state_dict())
    legacy = {name: tensor for name, tensor in state.items() if name != "head.resizes"}
    model.load_state_dict(legacy)
    cells = F.interpolate(model.backbone(image), (64, 72), mode="bilinear")
    assert torch.equal(model(image), cells) and torch.allclose(net(image), cells) and not torch.allclose(aligned, cells)
    continued = _model("padded")
    continued.load_state_dict(model.state_dict())  # a checkpoint that a continued run saves
    assert torch.equal(continued(image), cells)
    continued.load_state_dict(state)
    assert torch.allclose(continued(image), aligned)
    continued.load_state_dict({"backbone.0.weight": state["backbone.0.weight"]}, strict=False)
    assert torch.allclose(continued(image), aligned)


def test_a_model_pickled_by_an_earlier_version_computes_equal_cells() -> None:
    model, image = _model("padded"), torch.rand(1, 3, 64, 72, dtype=torch.float64)
    old = copy.deepcopy(model)
    del old.head._axes, old.head._buffers["resizes"]
    assert torch.equal(old(image), F.interpolate(model.backbone(image), (64, 72), mode="bilinear"))
    model.load_state_dict(old.state_dict())
    assert torch.equal(model(image), old(image))


def test_resizes_survive_a_change_of_precision() -> None:
    model = _model("odd strides")
    head = SegmentationHead(1, 1).to(torch.bfloat16)
    head.load_state_dict(copy.deepcopy(model.head).to(torch.bfloat16).state_dict())
    assert head._axes == model.head._axes


def test_positions_without_a_grid_are_equal_cells() -> None:
    assert feature_resizes(nn.Sequential(nn.Conv2d(3, 1, 3), nn.AdaptiveAvgPool2d(5))) is None
    assert feature_resizes(nn.Sequential(nn.Conv2d(3, 1, 1), nn.Upsample(scale_factor=2.0))) is None
