"""A decoder as in GPT-2 (Radford et al., 2019), of any depth, over the characters of sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sft.nn import Repeat

__all__ = ["ALPHABET", "CONTEXT", "DecoderBlock", "Embedding", "deep_gpt", "sums"]

ALPHABET = "0123456789+=; "
#: Characters that the model sees at once.
CONTEXT = 32


class Embedding(nn.Module):
    """Characters and positions as vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        out: Tensor = self.characters(tokens) + self.positions(places)
        return out


class DecoderBlock(nn.Module):
    """Attention to earlier characters, then two layers, each around a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        out: Tensor = x + self.layers(x)
        return out


def deep_gpt(num_blocks: int, *, width: int = 64, heads: int = 4, budget: int | str | None = None) -> nn.Sequential:
    """Model that predicts the next character.

    Args:
        num_blocks: number of blocks.
        width: of the vectors.
        heads: of the attention.
        budget: bytes on the device for the blocks.
    """
    blocks = Repeat(lambda: DecoderBlock(width, heads), num_blocks, budget=budget)
    return nn.Sequential(Embedding(width), blocks, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))))


def sums(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Lines of sums such as ``7+5=12;``, and the same one character on: ``[N, CONTEXT]`` each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_samples):
        text = ""
        while len(text) <= CONTEXT:
            a, b = torch.randint(10, (2,), generator=generator).tolist()
            text += f"{a}+{b}={a + b}; "
        rows.append([ALPHABET.index(character) for character in text[: CONTEXT + 1]])
    tokens = torch.tensor(rows)
    return tokens[:, :-1], tokens[:, 1:]
