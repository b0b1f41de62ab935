"""Runs that take some windows of an image at a time equal plain PyTorch, at the bytes and FLOPs of their plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer, take_windows
from tests.helpers.exactness import assert_exact
from tests.helpers.transformers import ChannelsLast, CosineWindows, GridAndBlocks, ImageTransformer, PaddedWindows
from tests.helpers.windows import SwinBlock, SwinTransformer, TiledEncoder


class _Regions(nn.Module):
    """A second level: vectors of tiles as an image, to which a convolution applies (HIPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = TiledEncoder(VisionTransformer(8, 2, 1, 4, 8), 8)
        self.conv, self.head = nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.tiles(x)
        num, _, height, width = x.shape
        image = vectors.reshape(num, height // 8, width // 8, 8).permute(0, 3, 1, 2)
        return self.head(self.conv(image).relu().mean((2, 3)))  # type: ignore[no-any-return]


class _BlockAttention(nn.Module):
    """Attention in blocks of a channels-first feature map, between convolutions (MaxViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.conv = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 24), nn.Conv2d(8, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        num, width, h, w = x.shape
        blocks = x.view(num, width, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, width)
        q, k, v = self.qkv(blocks).chunk(3, -1)
        blocks = F.scaled_dot_product_attention(q, k, v)
        blocks = blocks.view(num, h // 4, w // 4, 4, 4, width).permute(0, 5, 1, 3, 2, 4).reshape(num, width, h, w)
        return self.conv(x + blocks)  # type: ignore[no-any-return]


def _residual_encoder(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _bag(encoder: nn.Module, partition: str = "view") -> nn.Module:
    return AttentionBag(TiledEncoder(encoder, 8, partition), 8)


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "view": (lambda: _bag(VisionTransformer(8, 2, 1, 4, 8, dropout=0.2)), (24, 40)),
    "fold": (lambda: _bag(VisionTransformer(8, 2, 1, 4, 8), "fold"), (24, 16)),
    "unfold": (lambda: _bag(VisionTransformer(8, 2, 1, 4, 8), "unfold"), (16, 24)),
    "convolutions": (lambda: _bag(_residual_encoder(nn.GroupNorm(2, 8))), (24, 16)),
    "batch_norm": (lambda: _bag(_residual_encoder(nn.BatchNorm2d(8))), (24, 16)),
    "regions": (_Regions, (32, 40)),
    "max_vit": (_BlockAttention, (24, 32)),
    "swin": (lambda: SwinTransformer(8, (2,), (2,), window=3), (40, 44)),
    "swin_divisible": (lambda: SwinTransformer(8, (1, 1), (2, 2), window=4), (64, 32)),
}


@pytest.mark.parametrize(("name", "num_windows"), [("view", 2), *((name, 7) for name in _MODELS), ("swin", 20)])
def test_chunks_of_windows_equal_plain(name: str, num_windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some windows of a row, and some rows of windows: outputs, gradients, buffers, bytes and FLOPs."""
    torch.manual_seed(0)
    make, size = _MODELS[name]
    take_windows(monkeypatch, num_windows, height=1)
    report = assert_exact(make(), torch.randn(1, 3, *size), to_the_byte=True, steps=1 if name != "batch_norm" else 2)
    assert any(segment.takes_windows for segment in report.plan.segments)
    assert report.plan.redundancy < 1.36


@pytest.mark.parametrize("name", ["view", "max_vit"])
def test_checkpoints_within_a_chunk_of_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, size = _MODELS[name]
    take_windows(monkeypatch, 2, height=1, num_checkpoints=1)
    report = assert_exact(make(), torch.randn(1, 3, *size), to_the_byte=True, steps=1)
    assert any(segment.takes_windows and segment.state_slots == 1 for segment in report.plan.segments)


def _between_convolutions(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 2, 2), ChannelsLast(inner), nn.Conv2d(8, 2, 1))


_KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "swin_v2": (lambda: _between_convolutions(CosineWindows(8, 2, 3, 1)), (22, 26)),
    "vit_det": (lambda: _between_convolutions(PaddedWindows(8, 2, 4)), (28, 20)),
    "grid": (lambda: _between_convolutions(GridAndBlocks(8, 2, 4)), (32, 24)),
    "view": _MODELS["view"],
    "swin": _MODELS["swin"],
}


@pytest.mark.parametrize(("name", "num_images"), [("swin_v2", 1), ("vit_det", 2), ("grid", 2), ("view", 2), ("swin", 2)])
def test_kinds_of_windows_and_several_images(name: str, num_images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes windows of one image: Swin V2, ViTDet, the grid of MaxViT, and batches of images."""
    torch.manual_seed(0)
    make, size = _KINDS[name]
    take_windows(monkeypatch, 2, height=1)
    report = assert_exact(make(), torch.randn(num_images, 3, *size), to_the_byte=True, steps=1)
    assert any(segment.takes_windows for segment in report.plan.segments)
    assert report.plan.redundancy < 1.36


class _Reversed(nn.Module):
    """Attention in blocks, followed by a reversal of their order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.after = nn.Linear(3, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        num, channels, h, w = x.shape
        blocks = x.view(num, channels, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, channels)
        q, k, v = self.qkv(blocks).chunk(3, -1)
        return self.after(F.scaled_dot_product_attention(q, k, v).flip(0)).mean((0, 1))  # type: ignore[no-any-return]


class _RunningSum(nn.Module):
    """Sum of each token and all tokens before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def _with_running_sums() -> nn.Module:
    model = ImageTransformer(8, 2, 1, 4, (8, 8))
    model.blocks.append(_RunningSum())
    return model


@pytest.mark.parametrize(
    ("make", "line", "remedy"),
    [
        (
            lambda: _between_convolutions(GridAndBlocks(8, 2, 4)),
            "1.inner: view: reads all window rows at once, so 3 operators",
            "compute it",
        ),
        (_Reversed, "(the model itself): flip: reads all window rows at once, so", "move the image as [N, C, H, W]"),
        (
            _with_running_sums,
            "blocks.1: cumsum: reads all tokens at once, so",
            "compute it within each of them",
        ),
    ],
)
def test_the_plan_names_operators_that_end_runs(
    make: Callable[[], nn.Module], line: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_windows(monkeypatch, 2)
    plan = sft.plan(make(), (1, 3, 32, 32))
    assert any(note.startswith(line) and remedy in note for note in plan.notes), plan.notes
    assert remedy in " ".join(plan.explain().split())


@settings(max_examples=3)
@given(
    rows=st.integers(2, 5),
    columns=st.integers(2, 5),
    window=st.integers(2, 4),
    num_windows=st.integers(1, 12),
    shift=st.integers(0, 2),
    num_images=st.integers(1, 2),
    is_cosine=st.booleans(),
    dropout=st.booleans(),
)
def test_any_chunk_of_any_windows(
    rows: int, columns: int, window: int, num_windows: int, shift: int, num_images: int, is_cosine: bool, dropout: bool
) -> None:
    """Windows that do not divide the image, any shift, any number of windows at a time, dropout by position."""
    torch.manual_seed(0)
    width = 4
    pointwise = nn.Conv2d(3, width, 2, 2)
    block = (CosineWindows if is_cosine else SwinBlock)(width, 2, window, min(shift, window - 1))
    block.mlp.insert(2, nn.Dropout(0.2 * dropout))
    model = nn.Sequential(pointwise, ChannelsLast(block), nn.AdaptiveAvgPool2d(1))
    size = (2 * (rows * window - 1), 2 * (columns * window - shift % 2))
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_windows(monkeypatch, num_windows)
        assert_exact(model, torch.randn(num_images, 3, *size), steps=1, to_the_byte=not dropout)
