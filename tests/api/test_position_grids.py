"""`sft.position_grids`: the centre of every output position, compared with the gradient of the plain network."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.wsi.model.backbones import cut_before_pooling

_HEIGHT_PX, _WIDTH_PX = 96, 104


def _conv(kernel: int, *, stride: int = 1, padding: int = 0, dilation: int = 1, channels: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, 1, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)


class _Residual(nn.Module):
    """A strided block of a ResNet: two padded convolutions next to a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _conv(3, stride=2, padding=1), _conv(3, padding=1)
        self.shortcut = _conv(1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) + self.shortcut(x)
        return y


class _UNet(nn.Module):
    """Pooling, a convolution, and an upsampling to the size of the skip connection."""

    def __init__(self, upsample: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.down, self.merge, self.upsample = _conv(3, padding=1), _conv(3, padding=1), upsample

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(F.avg_pool2d(x, 2))
        y: Tensor = self.merge(x + self.upsample(low, x))
        return y


class _Patches(nn.Module):
    """Space to depth by slices, as Swin merges its patches."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :, 0::2, 0::2] + x[:, :, 1::2, 0::2]) + (x[:, :, 0::2, 1::2] + x[:, :, 1::2, 1::2])


class _Gated(nn.Module):
    """A squeeze-and-excitation gate: a value of the whole image multiplies each position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y * y.mean((2, 3), keepdim=True).detach()


class _Cropped(nn.Module):
    """An unpadded convolution, and a border that is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(5)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.conv(x), (-3, -1, -2, -2))


class _Classifier(nn.Module):
    """A pooled classifier, to be cut before its pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.pool, self.fc = (
            _conv(7, stride=2, padding=3, channels=3),
            _Residual(),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(1, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.pool(self.block(self.stem(x))).flatten(1))
        return scores


def _bilinear(low: Tensor, x: Tensor) -> Tensor:
    return F.interpolate(low, (x.shape[2], x.shape[3]), mode="bilinear", align_corners=False)


def _nearest(low: Tensor, x: Tensor) -> Tensor:
    return F.interpolate(low, scale_factor=2, mode="nearest")


#: Linear networks, with the number of adjacent positions after which the pattern of the rows that they read repeats.
_NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "padded": (lambda: nn.Sequential(_conv(3, padding=1), _conv(5, padding=2)), 1),
    "unpadded": (lambda: nn.Sequential(_conv(3), _conv(5)), 1),
    "strided stem": (lambda: nn.Sequential(_conv(7, stride=2, padding=3), nn.AvgPool2d(3, 2, 1), _conv(3, stride=2, padding=1)), 1),
    "unpadded strides": (lambda: nn.Sequential(_conv(7, stride=2), _conv(3, stride=3), _conv(3, stride=2)), 1),
    "dilated": (lambda: nn.Sequential(_conv(3, dilation=4, padding=4), _conv(3, dilation=3, stride=2)), 1),
    "patches": (lambda: nn.Sequential(_conv(4, stride=4), _conv(7, padding=3), _conv(2, stride=2)), 1),
    "even kernels": (lambda: nn.Sequential(_conv(4, padding=1), _conv(2, stride=2), _conv(6, stride=2, padding=1)), 1),
    "same padding": (lambda: nn.Sequential(nn.Conv2d(1, 1, 4, padding="same", bias=False), _conv(3, stride=2, padding=1)), 1),
    "asymmetric padding": (lambda: nn.Sequential(nn.ZeroPad2d((0, 3, 1, 0)), _conv(3, stride=2)), 1),
    "reflecting padding": (lambda: nn.Sequential(nn.ReflectionPad2d((3, 1, 0, 4)), _conv(5, stride=2)), 1),
    "circular padding": (lambda: nn.Sequential(nn.CircularPad2d((2, 1, 0, 3)), _conv(3, stride=2)), 1),
    "replicating padding": (lambda: nn.Sequential(nn.ReplicationPad2d((4, 0, 2, 1)), _conv(3, stride=3)), 1),
    "pooled": (lambda: nn.Sequential(_conv(3, padding=1), nn.AvgPool2d(2), nn.AvgPool2d(3, 2), nn.AvgPool2d(2, ceil_mode=True)), 1),
    "ceil mode": (lambda: nn.Sequential(_conv(3, padding=1), nn.AvgPool2d(5, 3, 1, ceil_mode=True, count_include_pad=False)), 1),
    "residual": (_Residual, 1),
    "transposed": (lambda: nn.Sequential(_conv(6, stride=4, padding=1), nn.ConvTranspose2d(1, 1, 4, 2, 1, bias=False)), 2),
    "transposed without overlap": (lambda: nn.Sequential(_conv(3, stride=2, padding=1), nn.ConvTranspose2d(1, 1, 2, 2, bias=False)), 2),
    "transposed by three": (lambda: nn.Sequential(_conv(2, stride=2), nn.ConvTranspose2d(1, 1, 5, 3, 1, bias=False)), 3),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False), nn.PixelShuffle(2)), 2),
    "pixel unshuffle": (lambda: nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(16, 1, 3, padding=1, bias=False)), 1),
    "upsampled": (lambda: nn.Sequential(_conv(4, stride=4), nn.Upsample(scale_factor=2, mode="bilinear")), 2),
    "upsampled, nearest": (lambda: nn.Sequential(_conv(5, stride=4), nn.Upsample(scale_factor=4, mode="nearest")), 4),
    "upsampled, nearest exact": (lambda: nn.Sequential(_conv(3, stride=2), nn.Upsample(scale_factor=2, mode="nearest-exact")), 2),
    "reduced, bilinear": (lambda: nn.Sequential(_conv(3, padding=1), nn.Upsample(scale_factor=0.25, mode="bilinear")), 1),
    "U-Net, bilinear": (lambda: _UNet(_bilinear), 2),
    "U-Net, nearest": (lambda: _UNet(_nearest), 2),
    "merged patches": (lambda: nn.Sequential(_Patches(), _conv(3, padding=1)), 1),
    "gated": (_Gated, 1),
    "cropped": (_Cropped, 1),
    "cut classifier": (lambda: nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), cut_before_pooling(_Classifier(), "classifier")), 1),
}


def _uniform(name: str) -> nn.Module:
    """A network with all weights 1: the gradient of a position is symmetric about the centre of its receptive field."""
    torch.manual_seed(0)
    model = _NETWORKS[name][0]().double().eval()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def _centroids(model: nn.Module, position: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Mean (row, column) of the pixels that an output position reads, weighted by its gradient; a pixel's centre is at + 1/2."""
    x = torch.zeros(1, 1, _HEIGHT_PX, _WIDTH_PX, dtype=torch.float64).add_(1).requires_grad_()
    model(x)[0, :, position[0], position[1]].sum().backward()
    assert x.grad is not None
    weight = x.grad[0, 0].numpy()
    rows, columns = np.arange(_HEIGHT_PX) + 0.5, np.arange(_WIDTH_PX) + 0.5
    means: npt.NDArray[np.float64] = np.array([(weight.sum(1) * rows).sum(), (weight.sum(0) * columns).sum()]) / weight.sum()
    return means


@pytest.mark.parametrize("name", _NETWORKS)
def test_centres_are_those_of_the_gradient(name: str) -> None:
    model, period = _uniform(name), _NETWORKS[name][1]
    with torch.no_grad():
        rows, columns = model(torch.zeros(1, 1, _HEIGHT_PX, _WIDTH_PX, dtype=torch.float64)).shape[2:]
    (grids,) = sft.position_grids(model, (1, 1, _HEIGHT_PX, _WIDTH_PX))
    assert grids is not None and len(grids) == 2
    # In the middle of the map, where no border is read; upsampled rows read pixels on alternating sides.
    places = [(rows // 2 + shift, columns // 2 + shift) for shift in range(period)]
    measured = np.mean([_centroids(model, place) for place in places], axis=0)
    drawn = np.mean([[float(grid.centre_px(index)) for grid, index in zip(grids, place, strict=True)] for place in places], axis=0)
    assert measured == pytest.approx(drawn, abs=1e-9)


@pytest.mark.parametrize("name", _NETWORKS)
@pytest.mark.parametrize("dot", [(41, 50), (48, 47), (52, 60)])
def test_a_dot_is_in_the_cell_that_responds_most(name: str, dot: tuple[int, int]) -> None:
    model = _uniform(name)
    shape = (1, 1, _HEIGHT_PX, _WIDTH_PX)
    image = torch.zeros(shape, dtype=torch.float64)
    image[0, 0, dot[0], dot[1]] = 1
    net = sft.compile(model, shape, budget="1MiB")
    response = net(image).detach()[0].sum(0).numpy()
    if name == "gated":  # the gate is the mean
        response = np.abs(response)
    (grids,) = sft.position_grids(net, image)
    assert grids is not None
    for axis, grid in enumerate(grids):
        profile = response.sum(axis=1 - axis)
        centroid = float((profile * np.arange(len(profile))).sum() / profile.sum())
        cell = grid.centre_px(0) + Fraction(centroid) * grid.stride_px
        # Half a cell; upsampled positions repeat the larger cells of the layer before.
        assert abs(float(cell) - (dot[axis] + 0.5)) <= max(1.0, float(grid.stride_px * _NETWORKS[name][1])) / 2 + 1e-9, (axis, centroid)


def test_max_pooling_has_the_grid_of_average_pooling() -> None:
    shape = (1, 1, 65, 64)
    for kernel, stride, padding, ceil in ((2, 2, 0, False), (3, 2, 1, False), (3, 2, 0, True)):
        largest, average = (pool(kernel, stride, padding, ceil_mode=ceil) for pool in (nn.MaxPool2d, nn.AvgPool2d))
        assert sft.position_grids(largest, shape) == sft.position_grids(average, shape)


def test_outputs_without_positions_have_no_grid() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.avg_pool2d(x, 4), x.mean((2, 3))

    grids = sft.position_grids(Both(), (1, 3, 32, 48))
    assert grids == ((sft.PositionGrid(stride_px=Fraction(4), first_centre_px=Fraction(2)),) * 2, None)


def test_attention_over_all_positions_keeps_the_grid_of_its_patches() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 16, stride=16)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.token = nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            patches = self.patches(x)
            tokens = torch.cat([self.token, patches.flatten(2).transpose(1, 2)], 1)
            image: Tensor = self.block(tokens)[:, 1:].transpose(1, 2).reshape(patches.shape)
            return image

    (grids,) = sft.position_grids(Tokens(), (1, 3, 64, 96))
    assert grids == (sft.PositionGrid(stride_px=Fraction(16), first_centre_px=Fraction(8)),) * 2


def test_pooling_to_a_fixed_size_divides_the_image_into_equal_cells() -> None:
    (grids,) = sft.position_grids(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3)), (1, 3, 60, 100))
    assert grids == (sft.PositionGrid.equal_cells(60, 3), sft.PositionGrid.equal_cells(100, 3))


def test_signals_and_volumes_have_as_many_grids_as_axes() -> None:
    (signal,) = sft.position_grids(nn.Conv1d(2, 2, 5, stride=3), (1, 2, 50))
    (volume,) = sft.position_grids(nn.Conv3d(1, 1, (3, 1, 2), stride=(2, 1, 2), padding=(1, 0, 0)), (1, 1, 12, 10, 8))
    assert signal == (sft.PositionGrid(stride_px=Fraction(3), first_centre_px=Fraction(5, 2)),)
    assert volume is not None
    assert [(float(grid.stride_px), float(grid.first_centre_px)) for grid in volume] == [(2.0, 0.5), (1.0, 0.5), (2.0, 1.0)]


def test_a_flattened_map_has_the_grids_of_its_image() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Flatten(2))
    assert sft.position_grids(model, (1, 3, 32, 33)) == sft.position_grids(model[0], (1, 3, 32, 33))


def test_the_padding_of_an_odd_size_counts() -> None:
    class Padded(nn.Module):
        """Padding to a multiple of 8, as SAME padding does for some sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 8, stride=8)

        def forward(self, x: Tensor) -> Tensor:
            missing = -x.shape[2] % 8
            y: Tensor = self.conv(F.pad(x, (0, 0, missing // 2, missing - missing // 2)))
            return y

    for height_px, first in ((64, 4), (60, 2), (57, 1)):
        (grids,) = sft.position_grids(Padded(), (1, 1, height_px, 64))
        assert grids is not None and grids[0].first_centre_px == first


def test_a_mirrored_image_has_the_reversed_grid() -> None:
    model = _uniform("unpadded strides")
    image = torch.rand(1, 1, 61, 77, dtype=torch.float64)
    (grids,) = sft.position_grids(model, image)
    assert grids is not None
    reversed_grid = grids[1].reversed(model(image).shape[3], 77)
    for position in range(3):
        assert reversed_grid.centre_px(position) == 77 - grids[1].centre_px(model(image).shape[3] - 1 - position)


def test_missing_extents_are_refused() -> None:
    with pytest.raises(sft.InputError, match="needs every extent"):
        sft.position_grids(nn.Conv2d(3, 3, 3), (1, 3, None, 32))
