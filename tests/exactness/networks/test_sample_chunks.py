"""Runs that take some samples at a time equal plain PyTorch, at the bytes and FLOPs of their plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.bags import AttentionBag, VisionTransformer, take_samples
from tests.helpers.exactness import assert_exact


class _Pools(nn.Module):
    """Values over all samples: mean, maximum and top-k."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vectors = self.encoder(x)
        return self.head(vectors.mean(0, keepdim=True)), vectors.amax(0), vectors.topk(2, 0)[0]


class _Transformer(nn.Module):
    """PyTorch's encoder layer; with ``tokens_first`` the samples are the second dimension, and rows of samples are not contiguous."""

    def __init__(self, tokens_first: bool) -> None:
        super().__init__()
        self.tokens_first = tokens_first
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=not tokens_first)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2)
        if self.tokens_first:
            return self.layer(tokens.permute(2, 0, 1)).mean(0)  # type: ignore[no-any-return]
        return self.layer(tokens.transpose(1, 2)).mean(1)  # type: ignore[no-any-return]


class _Rows(nn.Module):
    """Samples merged with tokens to rows, dropout on rows, and a BatchNorm over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.norm = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.LayerNorm(8)
        self.dropout, self.batch_norm = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        num, length, width = tokens.shape
        rows = self.dropout(F.gelu(self.norm(self.linear(tokens.reshape(num * length, width)))))
        return self.batch_norm(torch.einsum("ntc,ntd->nd", rows.reshape(num, length, width).softmax(1), tokens))  # type: ignore[no-any-return]


class _Tiles(nn.Module):
    """Several tiles of each sample, as samples of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.conv(x.reshape(-1, 3, 4, 8)).relu().mean((2, 3))
        tiles = self.linear(tiles).reshape(x.shape[0], 2, 8)
        return (tiles @ tiles.transpose(1, 2) @ tiles).amax(1)  # type: ignore[no-any-return]


class _Convolutions(nn.Sequential):
    def __init__(self, norm: nn.Module) -> None:
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), *pooled)


class _Frozen(nn.Module):
    """A frozen encoder with a trained low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = VisionTransformer(8, 2, 1, 4, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.encoder(x)
        return vectors + self.up(self.down(vectors))  # type: ignore[no-any-return]


_ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "vision_transformer": lambda: VisionTransformer(8, 2, 1, 4, 8, dropout=0.2),
    "transformer": lambda: _Transformer(tokens_first=False),
    "tokens_first": lambda: _Transformer(tokens_first=True),
    "rows": _Rows,
    "tiles": _Tiles,
    "batch_norm": lambda: _Convolutions(nn.BatchNorm2d(8)),
    "group_norm": lambda: _Convolutions(nn.GroupNorm(2, 8)),
    "instance_norm": lambda: _Convolutions(nn.InstanceNorm2d(8, affine=True)),
    "frozen": _Frozen,
}


@pytest.mark.parametrize("name", _ENCODERS)
def test_chunks_equal_the_full_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five samples in chunks of two: outputs, gradients, buffers, bytes and FLOPs."""
    torch.manual_seed(0)
    take_samples(monkeypatch, 2)
    report = assert_exact(_Pools(_ENCODERS[name]()), torch.randn(5, 3, 8, 8), to_the_byte=True, steps=1 if name != "batch_norm" else 2)
    chunked = [segment for segment in report.plan.segments if segment.mode == "whole" and segment.num_steps == 3]
    assert len(chunked) == (2 if name == "batch_norm" else 1)  # a BatchNorm in training exchanges samples
    assert report.plan.redundancy < (2.0 if name == "frozen" else 4 / 3)


@pytest.mark.parametrize(("name", "num_checkpoints"), [("vision_transformer", 1), ("tokens_first", 1), ("frozen", 3), ("group_norm", 2)])
def test_checkpoints_within_a_chunk(name: str, num_checkpoints: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a run are recomputed one by one from checkpoints: the same gradients, bytes and FLOPs as planned."""
    torch.manual_seed(0)
    take_samples(monkeypatch, 2, num_checkpoints)
    report = assert_exact(_Pools(_ENCODERS[name]()), torch.randn(5, 3, 8, 8), to_the_byte=True, steps=1)
    run = next(segment for segment in report.plan.segments if segment.takes_samples)
    assert run.state_slots == num_checkpoints
    assert 1.3 < report.plan.redundancy < (2.5 if name == "frozen" else 5 / 3)


@given(num_samples=st.integers(2, 7), taken=st.integers(1, 6), dropout=st.booleans(), training=st.booleans())
def test_any_chunk_of_any_bag(num_samples: int, taken: int, dropout: bool, training: bool) -> None:
    torch.manual_seed(0)
    model = AttentionBag(VisionTransformer(8, 2, 1, 4, 8, dropout=0.2 * dropout), 8).train(training)
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_samples(monkeypatch, min(taken, num_samples - 1))
        assert_exact(model, torch.randn(num_samples, 3, 8, 8), steps=1, to_the_byte=True)
