"""Models that partition an image into windows: tiles cut inside the model, and transformers with shifted windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SwinBlock", "SwinTransformer", "TiledEncoder"]


class TiledEncoder(nn.Module):
    """An encoder on the tiles of one image, cut inside the model (HIPT, xT).

    Args:
        encoder: network of a batch of tiles.
        tile_px: size of a tile.
        partition: ``view``, ``fold`` (``F.unfold``) or ``unfold`` (``Tensor.unfold``).
    """

    def __init__(self, encoder: nn.Module, tile_px: int, partition: str = "view") -> None:
        super().__init__()
        self.encoder, self.tile_px, self.partition = encoder, tile_px, partition

    def forward(self, x: Tensor) -> Tensor:
        (num, channels, height, width), px = x.shape, self.tile_px
        if self.partition == "view":
            tiles = x.view(num, channels, height // px, px, width // px, px).permute(0, 2, 4, 1, 3, 5)
        elif self.partition == "fold":
            tiles = F.unfold(x, px, stride=px).transpose(1, 2)
        else:
            tiles = x.unfold(2, px, px).unfold(3, px, px).permute(0, 2, 3, 1, 4, 5)
        return self.encoder(tiles.reshape(-1, channels, px, px))  # type: ignore[no-any-return]


class SwinBlock(nn.Module):
    """Block of a Swin transformer on ``[N, H, W, C]``: attention in windows, shifted cyclically (as in torchvision)."""

    index: Tensor

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        distance = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", (distance[..., 0] * (2 * window - 1) + distance[..., 1]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        (num, height, width, channels), size = x.shape, self.window
        x = F.pad(x, (0, 0, 0, (size - width % size) % size, 0, (size - height % size) % size))
        rows, columns = x.shape[1] // size, x.shape[2] // size
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(num, rows, size, columns, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)
        qkv = self.qkv(x).reshape(x.shape[0], size * size, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] * (channels // self.heads) ** -0.5) @ qkv[1].transpose(-2, -1)
        scores = scores + self.table[self.index].view(size * size, size * size, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.shift:
            mask = self._mask(scores, rows, columns).unsqueeze(1).unsqueeze(0)
            scores = (scores.view(num, rows * columns, self.heads, size * size, size * size) + mask).view_as(scores)
        x = self.project((scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(x.shape))
        x = x.view(num, rows, columns, size, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(num, rows * size, columns * size, channels)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, :height, :width].contiguous()

    def _mask(self, scores: Tensor, rows: int, columns: int) -> Tensor:
        """Scores of -100 between pixels that are not neighbours in the image before the shift."""
        size, count = self.window, 0
        regions = scores.new_zeros((rows * size, columns * size))
        slices = ((0, -size), (-size, -self.shift), (-self.shift, None))
        for vertical in slices:
            for horizontal in slices:
                regions[slice(*vertical), slice(*horizontal)] = count
                count += 1
        regions = regions.view(rows, size, columns, size).permute(0, 2, 1, 3).reshape(-1, size * size)
        distance = regions.unsqueeze(1) - regions.unsqueeze(2)
        return distance.masked_fill(distance != 0, -100.0).masked_fill(distance == 0, 0.0)


class _PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))  # type: ignore[no-any-return]


class SwinTransformer(nn.Module):
    """Swin transformer for classification; the defaults are those of Swin-T (28 million parameters)."""

    def __init__(
        self,
        width: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        window: int = 7,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        self.embed, self.embed_norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        layers: list[nn.Module] = []
        for stage, (depth, num_heads) in enumerate(zip(depths, heads, strict=True)):
            layers += [_PatchMerging(width << stage - 1)] if stage else []
            layers += [SwinBlock(width << stage, num_heads, window, window // 2 * (block % 2)) for block in range(depth)]
        self.layers, width = nn.Sequential(*layers), width << len(depths) - 1
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.embed_norm(self.embed(x).permute(0, 2, 3, 1)))
        x = self.norm(x).permute(0, 3, 1, 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]
