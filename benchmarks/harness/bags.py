"""Bags of tiles: vision transformers, pooling by attention, low-rank adapters, and the methods that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["AttentionBag", "LowRankLinear", "TransformerBlock", "VisionTransformer", "adapted_bag", "checkpoint_modules"]


class TransformerBlock(nn.Module):
    """Attention within a tile, and a perceptron, with norms before both."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        num, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(num, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(num, tokens, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Vision transformer with a class token, for tiles of one size."""

    def __init__(
        self, width: int = 192, heads: int = 3, depth: int = 4, patch_px: int = 16, tile_px: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch_px, patch_px)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (tile_px // patch_px) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.norm(self.blocks(x))[:, 0]  # type: ignore[no-any-return]


class AttentionBag(nn.Module):
    """Attention pooling of the vectors that an encoder makes of each tile (Ilse et al. 2018)."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.score = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))
        self.head = nn.Linear(width, 2)

    def forward(self, tiles: Tensor) -> Tensor:
        vectors = self.encoder(tiles)
        return self.head((self.score(vectors).softmax(0) * vectors).sum(0, keepdim=True))  # type: ignore[no-any-return]


class LowRankLinear(nn.Module):
    """Frozen linear layer with a trained low-rank addition, ``W x + B A x`` (LoRA, Hu et al. 2022)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def add_adapters(encoder: VisionTransformer, rank: int) -> VisionTransformer:
    """The encoder with frozen weights, and adapters of the two linear layers of each attention."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block, TransformerBlock)
        for name in ("qkv", "project"):
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            block.add_module(name, LowRankLinear(layer, rank))
    return encoder


def adapted_bag() -> AttentionBag:
    """ViT-S/14 (shape of DINOv2) for tiles of 224 px with adapters of rank 8, and pooling by attention."""
    encoder = add_adapters(VisionTransformer(width=384, heads=6, depth=12, patch_px=14, tile_px=224), rank=8)
    for name, parameter in encoder.named_parameters():
        if name.endswith("up.weight"):
            nn.init.normal_(parameter, std=0.02)  # LoRA begins with zeros, for which the gradient of the other matrix is zero
    return AttentionBag(encoder, 384)


def checkpoint_modules(modules: Iterable[nn.Module]) -> None:
    """Let each of these modules keep its input alone, and run forward again in the backward pass."""
    for module in modules:
        forward: Callable[..., Tensor] = module.forward
        module.forward = partial(checkpoint, forward, use_reentrant=False)
