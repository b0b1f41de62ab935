"""Transformers on one image: attention over all tokens in several spellings, and kinds of windows other than Swin's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.positional_rng import DropPath

__all__ = ["Attention", "AttentionForm", "ChannelsLast", "CosineWindows", "GridAndBlocks", "ImageTransformer", "PaddedWindows"]

#: Spellings of attention: torch's operator, a softmax of products (with a mask), index notation, ``nn.MultiheadAttention``, and torch's
#: operator with separate layers and a learned bias, with a causal mask, and with rotary positions of all tokens but a class token (of
#: neighbouring channels, as in EVA-02, or of halves, as in DINOv3).
AttentionForm = Literal["fused", "softmax", "einsum", "multihead", "biased", "causal", "rotary", "rotary_halves"]


class ChannelsLast(nn.Module):
    """A module of ``[N, H, W, C]`` on ``[N, C, H, W]``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention over the tokens of ``[N, tokens, width]``.

    Args:
        width: channels.
        heads: number of heads.
        form: spelling.
        num_tokens: tokens, for a bias or a mask of pairs of them, and for their positions.
        num_prefix: tokens without a position, which come first.
    """

    def __init__(self, width: int, heads: int, form: AttentionForm = "fused", num_tokens: int = 0, num_prefix: int = 0) -> None:
        super().__init__()
        self.heads, self.form, self.num_prefix = heads, form, num_prefix
        if form == "multihead":
            self.inner = nn.MultiheadAttention(width, heads, batch_first=True)
        elif form == "biased":
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.bias = nn.Parameter(0.1 * torch.randn(1, heads, num_tokens, num_tokens))
        else:
            self.qkv = nn.Linear(width, 3 * width)
        if form == "softmax":
            self.register_buffer("mask", torch.rand(num_tokens, num_tokens) < 0.2)
        if form in ("rotary", "rotary_halves"):
            angles = torch.rand(num_tokens - num_prefix, width // heads)
            self.register_buffer("cosine", angles.cos())
            self.register_buffer("sine", angles.sin())
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        num, tokens, width = x.shape
        if self.form == "multihead":
            return self.project(self.inner(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]
        if self.form == "biased":
            q, k, v = (layer(x).view(num, tokens, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        else:
            q, k, v = self.qkv(x).reshape(num, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            y = self._attend(q, k, v)
        return self.project(y.transpose(1, 2).reshape(num, tokens, width))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.form in ("rotary", "rotary_halves"):
            q, k = self._rotate(q), self._rotate(k)
        if self.form in ("fused", "causal", "rotary", "rotary_halves"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.form == "causal")
        scale = q.shape[-1] ** -0.5
        if self.form == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q * scale, k).softmax(-1), v)
        mask: Tensor = self.get_buffer("mask")
        scores: Tensor = (q @ k.transpose(-2, -1)) * scale
        return scores.masked_fill(mask, -20.0).softmax(-1) @ v

    def _rotate(self, x: Tensor) -> Tensor:
        prefix, x = x.split((self.num_prefix, x.shape[2] - self.num_prefix), 2)
        if self.form == "rotary":
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        x = x * self.get_buffer("cosine") + turned * self.get_buffer("sine")
        return torch.cat((prefix, x), 2) if self.num_prefix else x


class _Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), attention
        self.drop1, self.drop2 = DropPath(dropout), DropPath(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class ImageTransformer(nn.Module):
    """Vision transformer on the tokens of an image of one size.

    Args:
        width: channels.
        heads: number of heads.
        depth: number of blocks.
        patch_px: size of a patch.
        size: patches along the two axes.
        form: spelling of attention.
        token: True for a class token, which the classifier reads; otherwise it reads the mean of all tokens.
        dropout: probability of dropout and of stochastic depth.
    """

    def __init__(
        self,
        width: int = 64,
        heads: int = 4,
        depth: int = 4,
        patch_px: int = 4,
        size: tuple[int, int] = (64, 64),
        form: AttentionForm = "fused",
        *,
        token: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        num_tokens = size[0] * size[1] + token
        self.embed = nn.Conv2d(3, width, patch_px, patch_px)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if token else None
        self.position = nn.Parameter(0.02 * torch.randn(1, num_tokens, width))
        self.blocks = nn.Sequential(*(_Block(width, Attention(width, heads, form, num_tokens, int(token)), dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.norm(self.blocks(x + self.position))
        return self.head(x.mean(1) if self.token is None else x[:, 0])  # type: ignore[no-any-return]


class CosineWindows(nn.Module):
    """Block of a Swin transformer V2 on ``[N, H, W, C]``: cosine attention, and a position bias by a small network (Liu et al. 2022)."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.full((heads, 1, 1), 2.0))
        self.bias = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, heads, bias=False))
        offsets = torch.stack(torch.meshgrid(*(torch.arange(1 - window, window, dtype=torch.float32),) * 2, indexing="ij"), -1)
        self.register_buffer("offsets", offsets.sign() * torch.log2(1 + offsets.abs()))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        distance = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", (distance[..., 0] * (2 * window - 1) + distance[..., 1]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self._attention(x))
        return x + self.norm2(self.mlp(x))  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        (num, height, width, channels), size = x.shape, self.window
        x = F.pad(x, (0, 0, 0, (size - width % size) % size, 0, (size - height % size) % size))
        rows, columns, pixels = x.shape[1] // size, x.shape[2] // size, size * size
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = x.view(num, rows, size, columns, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, pixels, channels)
        q, k, v = self.qkv(x).view(-1, pixels, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * self.scale.clamp(max=4.6).exp()
        assert isinstance(self.offsets, Tensor) and isinstance(self.index, Tensor)
        bias = self.bias(self.offsets.to(x.dtype)).view(-1, self.heads)[self.index].view(pixels, pixels, -1).permute(2, 0, 1)
        scores = scores + 16 * bias.sigmoid().unsqueeze(0)
        x = self.project((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, pixels, channels))
        x = x.view(num, rows, columns, size, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(num, rows * size, columns * size, channels)
        x = torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x
        return x[:, :height, :width].contiguous()


class PaddedWindows(nn.Module):
    """Blocks of a detector's transformer on ``[N, H, W, C]``: windows with padding to a multiple, and attention over the image (ViTDet)."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.windowed, self.full = (_Block(width, Attention(width, heads), 0.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        (num, height, width, channels), size = x.shape, self.window
        pad_h, pad_w = (size - height % size) % size, (size - width % size) % size
        y = F.pad(x, (0, 0, 0, pad_w, 0, pad_h))
        rows, columns = (height + pad_h) // size, (width + pad_w) // size
        y = y.view(num, rows, size, columns, size, channels).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, channels)
        y = self.windowed(y).view(num, rows, columns, size, size, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(num, height + pad_h, width + pad_w, channels)
        x = x + y[:, :height, :width]
        return self.full(x.reshape(num, height * width, channels)).view(num, height, width, channels)  # type: ignore[no-any-return]


class GridAndBlocks(nn.Module):
    """Attention in blocks, then in a grid of strided windows, of ``[N, H, W, C]`` (MaxViT)."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.block, self.grid = (_Block(width, Attention(width, heads), 0.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        (num, height, width, channels), size = x.shape, self.size
        rows, columns = height // size, width // size
        y = x.view(num, rows, size, columns, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)
        y = self.block(y).view(num, rows, columns, size, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        y = y.view(num, size, rows, size, columns, channels).permute(0, 2, 4, 1, 3, 5).reshape(-1, size * size, channels)
        y = self.grid(y).view(num, rows, columns, size, size, channels)
        return y.permute(0, 3, 1, 4, 2, 5).reshape(num, height, width, channels)  # type: ignore[no-any-return]
