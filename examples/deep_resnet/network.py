"""A pre-activation ResNet (He, Zhang, Ren and Sun, "Identity mappings in deep residual networks", 2016) of any depth at one resolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sft
from sft.nn import Repeat

__all__ = ["Bottleneck", "deep_resnet", "num_blocks_of", "stripes"]


class Bottleneck(nn.Module):
    """Three times norm, ReLU and convolution, around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for kernel in (1, 3, 1):
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


def num_blocks_of(num_layers: int) -> int:
    """Number of blocks of so many layers, counted as in ResNet-1001: three for each block, the first convolution and the classifier.

    >>> num_blocks_of(10_001), num_blocks_of(100_001)
    (3333, 33333)

    Raises:
        sft.InputError: no number of blocks has so many layers.
    """
    if num_layers < 5 or (num_layers - 2) % 3:
        raise sft.InputError(f"a ResNet of {num_layers} layers; give 3 n + 2, for example {max(1, num_layers // 3) * 3 + 2}")
    return (num_layers - 2) // 3


def deep_resnet(
    num_layers: int,
    *,
    width: int = 4,
    channels: int = 1,
    classes: int = 2,
    budget: int | str | None = None,
    window: int | str | None = None,
) -> nn.Sequential:
    """A classifier of images.

    Args:
        num_layers: number of layers; 3 n + 2.
        width: channels inside.
        channels: of the images.
        classes: number of classes.
        budget: bytes on the device for the blocks.
        window: bytes for streamed weights; None keeps the weights on the device.
    """
    template = Bottleneck(width)
    blocks = Repeat(lambda: template, num_blocks_of(num_layers), budget=budget, strategy="revolve")
    for param in blocks.parameters():  # convolutions as torch draws them, but for all blocks at once: modules take longer than numbers
        if param.dim() == 5:
            nn.init.uniform_(param, -(param[0, 0].numel() ** -0.5), param[0, 0].numel() ** -0.5)
    if window is not None:
        blocks.stream(window)
    head = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), blocks, head)


def stripes(num_images: int, size_px: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images of stripes, ``[N, 1, size, size]``, and their class: 1 for upright stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_images,), generator=generator)
    phase = torch.randint(2, (num_images, 1), generator=generator)
    wave = ((torch.arange(size_px) + phase) % 2).float() * 2 - 1
    across, down = wave[:, None, :].expand(-1, size_px, -1), wave[:, :, None].expand(-1, -1, size_px)
    images = torch.where(labels[:, None, None] == 1, across, down)
    return (images + 0.3 * torch.randn(images.shape, generator=generator)).unsqueeze(1), labels
