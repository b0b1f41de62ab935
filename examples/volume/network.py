"""SegResNet (Myronenko, "3D MRI brain tumor segmentation using autoencoder regularization", 2018): residual blocks of group norm, ReLU and
3 x 3 x 3 convolutions, down by strides, up by interpolation, skips added.

Group norms take their statistics from the whole volume; on a patch they are another function.

Branches that are added to a skip start at zero: blocks (Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1) and upsampled
features. The network starts as stem and head and first learns from the brightness of a voxel, then from its neighbourhood.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["SegResNet"]


class SegResNet(nn.Module):
    """A volume to a score for each class and voxel.

    Args:
        num_classes: of the output.
        width: channels at full resolution, doubled at each level below.
        num_blocks: residual blocks of each level on the way down; on the way up there is one each.
        num_groups: of the norms; each level's channels are a multiple of it.
    """

    def __init__(self, num_classes: int, *, width: int = 8, num_blocks: tuple[int, ...] = (1, 2, 2, 4), num_groups: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(len(num_blocks))]
        self.stem = _convolution(1, width)
        self.down = nn.ModuleList([nn.Sequential(*(_Residual(width, num_groups) for _ in range(num_blocks[0])))])
        for channels, count in zip(widths[1:], num_blocks[1:], strict=True):
            blocks = (_Residual(channels, num_groups) for _ in range(count))
            self.down.append(nn.Sequential(_convolution(channels // 2, channels, stride=2), *blocks))
        self.narrow = nn.ModuleList(_zero(nn.Conv3d(2 * channels, channels, 1, bias=False)) for channels in widths[:-1])
        self.up = nn.ModuleList(_Residual(channels, num_groups) for channels in widths[:-1])
        self.head = nn.Sequential(nn.GroupNorm(num_groups, width), nn.ReLU(inplace=True), nn.Conv3d(width, num_classes, 1))

    def forward(self, volume: Tensor) -> Tensor:
        """Map ``[N, 1, depth, height, width]`` to ``[N, num_classes, depth, height, width]``; any size."""
        x = self.stem(volume)
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
        skips.pop()
        for narrow, block in zip(reversed(self.narrow), reversed(self.up), strict=True):
            skip = skips.pop()
            x = nn.functional.interpolate(narrow(x), size=skip.shape[2:], mode="nearest")
            x = block(x + skip)
        scores: Tensor = self.head(x)
        return scores


class _Residual(nn.Module):
    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(num_groups, channels), nn.ReLU(inplace=True), _convolution(channels, channels),
            nn.GroupNorm(num_groups, channels), nn.ReLU(inplace=True), _zero(_convolution(channels, channels)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


def _convolution(num_inputs: int, num_outputs: int, *, stride: int = 1) -> nn.Conv3d:
    return nn.Conv3d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False)


def _zero(convolution: nn.Conv3d) -> nn.Conv3d:
    nn.init.zeros_(convolution.weight)
    return convolution
