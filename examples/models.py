"""Standard convolutional networks, small enough to read, shared by the examples, the tests and the benchmarks.

Every builder returns a module with a `.features` body (an image in, a feature map out), so that the body can be
compiled alone. The classifiers pool the map globally and end in one linear layer: they take images of any size.

Sources: ResNet (He et al., 2016), VGG (Simonyan and Zisserman, 2015), Darknet-19 (Redmon and Farhadi, 2017), U-Net
(Ronneberger et al., 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BasicBlock",
    "BottleneckBlock",
    "PooledClassifier",
    "UNet",
    "darknet19",
    "freeze_norm",
    "resnet18",
    "resnet50",
    "unet",
    "vgg16",
    "vgg19",
]

_Model = TypeVar("_Model", bound=nn.Module)


class PooledClassifier(nn.Module):
    """A body, the average over all positions of its feature map, and one linear layer.

    The class-activation map of class c is the feature map weighted by row c of `classifier.weight`: its mean, plus
    the bias, is exactly the logit.
    """

    def __init__(self, features: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.features = features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map images ``[batch, 3, height, width]`` to logits ``[batch, num_classes]``."""
        logits: Tensor = self.classifier(torch.flatten(self.pool(self.features(image)), 1))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(num_inputs, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3),
        )
        self.shortcut = _shortcut(num_inputs, width * self.expansion, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, num_inputs, h, w]`` to ``[batch, width, h / stride, w / stride]``."""
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


class BottleneckBlock(nn.Module):
    """A 3x3 convolution between two 1x1 ones, around an identity (ResNet-50 and deeper); the stride is on the 3x3."""

    expansion = 4

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(num_inputs, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width * self.expansion, 1),
        )
        self.shortcut = _shortcut(num_inputs, width * self.expansion, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, num_inputs, h, w]`` to ``[batch, 4 * width, h / stride, w / stride]``."""
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


class UNet(nn.Module):
    """Blocks of two conv-ReLU (or conv-BatchNorm-ReLU) on each level, max-pooling down, nearest upsampling up, skips by concatenation.

    `features` gives the full-resolution feature map, `head` (1x1) one logit for each class and pixel.
    """

    def __init__(self, num_classes: int, levels: int, width: int, batch_norm: bool = False) -> None:
        super().__init__()
        self.features = _UNetBody(levels, width, batch_norm)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[batch, 3, height, width]`` to ``[batch, num_classes, height, width]``."""
        logits: Tensor = self.head(self.features(image))
        return logits


class _UNetBody(nn.Module):
    def __init__(self, levels: int, width: int, batch_norm: bool) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        pair = _conv_norm_relu_pair if batch_norm else _conv_relu_pair
        self.down = nn.ModuleList(pair(before, after) for before, after in pairwise([3, *widths]))
        self.up = nn.ModuleList(pair(skip + below, skip) for skip, below in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, image: Tensor) -> Tensor:
        x = self.down[0](image)
        skips: list[Tensor] = []
        for block in list(self.down)[1:]:
            skips.append(x)
            x = block(self.pool(x))
        for block in reversed(list(self.up)):
            x = block(torch.cat([skips.pop(), self.upsample(x)], dim=1))
        features: Tensor = x
        return features


def resnet18(num_classes: int, width: int = 64) -> PooledClassifier:
    """ResNet-18: a 7x7 stem and four stages of two basic blocks."""
    return _resnet(BasicBlock, (2, 2, 2, 2), num_classes, width)


def resnet50(num_classes: int, width: int = 64) -> PooledClassifier:
    """ResNet-50: a 7x7 stem and four stages of 3, 4, 6 and 3 bottleneck blocks."""
    return _resnet(BottleneckBlock, (3, 4, 6, 3), num_classes, width)


def vgg16(num_classes: int, batch_norm: bool = False, width: int = 64) -> PooledClassifier:
    """The thirteen convolutions of VGG-16 in five pooled stages; one linear layer instead of its three."""
    return _vgg((2, 2, 3, 3, 3), num_classes, batch_norm, width)


def vgg19(num_classes: int, batch_norm: bool = False, width: int = 64) -> PooledClassifier:
    """VGG-19: a fourth convolution in each of the last three stages of VGG-16."""
    return _vgg((2, 2, 4, 4, 4), num_classes, batch_norm, width)


def _vgg(depths: Sequence[int], num_classes: int, batch_norm: bool, width: int) -> PooledClassifier:
    layers: list[nn.Module] = []
    num_inputs = 3
    for depth, factor in zip(depths, (1, 2, 4, 8, 8), strict=True):
        stage_width = factor * width
        for _ in range(depth):
            layers.append(nn.Conv2d(num_inputs, stage_width, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(stage_width))
            layers.append(nn.ReLU(inplace=True))
            num_inputs = stage_width
        layers.append(nn.MaxPool2d(2))
    return _initialised(PooledClassifier(nn.Sequential(*layers), num_inputs, num_classes))


def darknet19(num_classes: int, width: int = 32) -> PooledClassifier:
    """Darknet-19, the classifier of YOLO9000: conv-BatchNorm-leaky-ReLU, 3x3 and 1x1 in turn, five max-pools.

    Its nineteenth convolution (1x1 to the classes, then averaged) is the linear layer here: averaging first is the
    same sum.
    """
    layers: list[nn.Module] = []
    num_inputs = 3
    for stage, depth in enumerate((1, 1, 3, 3, 5, 5)):
        if stage > 0:
            layers.append(nn.MaxPool2d(2))
        stage_width = width * 2**stage
        for index in range(depth):
            narrow = index % 2 == 1  # every second convolution squeezes to half the width with a 1x1 kernel
            num_outputs, kernel = (stage_width // 2, 1) if narrow else (stage_width, 3)
            layers += [*_conv_norm(num_inputs, num_outputs, kernel), nn.LeakyReLU(0.1, inplace=True)]
            num_inputs = num_outputs
    return _initialised(PooledClassifier(nn.Sequential(*layers), num_inputs, num_classes))


def unet(num_classes: int, levels: int = 5, width: int = 64, batch_norm: bool = False) -> UNet:
    """A U-Net with same-padding and nearest upsampling; height and width are multiples of ``2 ** (levels - 1)``."""
    return _initialised(UNet(num_classes, levels, width, batch_norm))


class _FrozenMixin(nn.Module):
    """BatchNorm that always uses its running statistics: ``train()`` of any parent leaves it in eval mode."""

    def train(self: _Model, mode: bool = True) -> _Model:
        return super().train(False)


class FrozenBatchNorm1d(_FrozenMixin, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with frozen statistics and trainable weight and bias."""


class FrozenBatchNorm2d(_FrozenMixin, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with frozen statistics and trainable weight and bias."""


class FrozenBatchNorm3d(_FrozenMixin, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with frozen statistics and trainable weight and bias."""


_FROZEN: dict[type[_BatchNorm], type[_BatchNorm]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
}


def freeze_norm(model: _Model) -> _Model:
    """Freeze the statistics of every BatchNorm in `model`, in place and for good; weights and biases stay trainable.

    This is usual in slide training, where a batch is one image. The class of each module is swapped (parameters,
    buffers, hooks and ``state_dict`` keys stay), because the next ``model.train()`` would undo a plain ``eval()``.

    Returns:
        The same `model`.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, _FrozenMixin):
            if type(module) not in _FROZEN:
                raise TypeError(f"cannot freeze {type(module).__name__}: known are BatchNorm1d, 2d and 3d. Convert it first.")
            module.__class__ = _FROZEN[type(module)]
            module.eval()
    return model


def _resnet(block: type[BasicBlock] | type[BottleneckBlock], depths: Sequence[int], num_classes: int, width: int) -> PooledClassifier:
    layers: list[nn.Module] = [
        *_conv_norm(3, width, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    num_inputs = width
    for stage, depth in enumerate(depths):
        stage_width = width * 2**stage
        for index in range(depth):
            layers.append(block(num_inputs, stage_width, stride=2 if stage > 0 and index == 0 else 1))
            num_inputs = stage_width * block.expansion
    return _initialised(PooledClassifier(nn.Sequential(*layers), num_inputs, num_classes))


def _conv_norm(num_inputs: int, num_outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    # No bias: the norm that follows would subtract it again.
    conv = nn.Conv2d(num_inputs, num_outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(num_outputs)]


def _conv_relu_pair(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(num_outputs, num_outputs, 3, padding=1),
        nn.ReLU(inplace=True),
    )


def _conv_norm_relu_pair(num_inputs: int, num_outputs: int) -> nn.Sequential:
    first, second = _conv_norm(num_inputs, num_outputs, 3), _conv_norm(num_outputs, num_outputs, 3)
    return nn.Sequential(*first, nn.ReLU(inplace=True), *second, nn.ReLU(inplace=True))


def _shortcut(num_inputs: int, num_outputs: int, stride: int) -> nn.Module:
    if stride == 1 and num_inputs == num_outputs:
        return nn.Identity()
    return nn.Sequential(*_conv_norm(num_inputs, num_outputs, 1, stride))


def _initialised(model: _Model) -> _Model:
    """Scale convolutions so that a signal keeps its variance through the ReLUs (He et al., 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
