"""Bags of tiles: small vision transformers, poolings over tiles, and plans that take some tiles at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sft.planner.cost.roofline import DeviceRates
from sft.planner.materialize import ProjectedPlan
from sft.planner.options import Options
from sft.planner.problem import PlanningProblem
from sft.planner.search import auto
from sft.planner.search.samples import SamplePlans
from sft.planner.search.window_plans import WindowPlans, has_window_runs

__all__ = ["AttentionBag", "VisionTransformer", "take_samples", "take_windows"]


class _Block(nn.Module):
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
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(depth)))
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


def take_samples(monkeypatch: pytest.MonkeyPatch, num_samples: int, num_checkpoints: int = 0) -> None:
    """Let every search return the plan that takes so many samples at a time, with so many checkpoints within them."""

    def fastest(search: auto.AutoSearch, room_bytes: int) -> ProjectedPlan:
        problem: PlanningProblem = search._problem
        return SamplePlans(problem, Options(), DeviceRates("cpu")).plan(num_samples, num_checkpoints)

    monkeypatch.setattr(auto.AutoSearch, "fastest", fastest)


def take_windows(monkeypatch: pytest.MonkeyPatch, num_windows: int, height: int = 0, num_checkpoints: int = 0) -> None:
    """Let every search return the plan of so many windows at a time, with this strip height of the grid and checkpoints within a chunk."""

    def fastest(search: auto.AutoSearch, room_bytes: int) -> ProjectedPlan:
        assert has_window_runs(search._problem), "the model has no windows"
        grid = next(auto.candidate_grids(search._problem, Options(), DeviceRates("cpu")))
        return WindowPlans(grid, DeviceRates("cpu")).plan(num_windows, min(height, len(grid.axes.strip_rows) - 1), 0, num_checkpoints)

    monkeypatch.setattr(auto.AutoSearch, "fastest", fastest)
