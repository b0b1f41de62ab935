"""Runs that take some tokens of a sequence at a time equal plain PyTorch, at the bytes and FLOPs of their plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.bags import AttentionBag, Copies, take_samples, take_windows
from tests.helpers.exactness import assert_exact
from tests.helpers.transformers import AttentionForm, ImageTransformer


class _PixelAttention(nn.Module):
    """Attention of every pixel to every pixel of a channels-first image, between convolutions (a non-local block)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.query, self.key, self.value = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 8, 1)
        self.out, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        y = (q.transpose(1, 2) @ k).softmax(-1) @ v.transpose(1, 2)
        return self.head(x + self.out(y.transpose(1, 2).reshape(x.shape)))  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    """``nn.TransformerEncoder`` on the patches of an image, with the tokens in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
        self.embed, self.encoder, self.head = (
            nn.Conv2d(3, 8, 4, 4),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x).flatten(2).permute(2, 0, 1)).mean(0))  # type: ignore[no-any-return]


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "pixels": (_PixelAttention, (24, 20)),
    "encoder": (_Encoder, (24, 16)),
    "rows": (lambda: ImageTransformer(8, 2, 2, 4, (6, 5), token=False, dropout=0.2), (24, 20)),
    **{form: (partial(ImageTransformer, 8, 2, 2, 4, (6, 5), form, dropout=0.2), (24, 20)) for form in get_args(AttentionForm)},
}


@pytest.mark.parametrize("name", _MODELS)
def test_chunks_of_tokens_equal_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients, bytes and FLOPs of queries in chunks, with keys and values in full."""
    torch.manual_seed(0)
    make, size = _MODELS[name]
    take_windows(monkeypatch, 4, height=1)
    report = assert_exact(make(), torch.randn(1, 3, *size), to_the_byte=True, steps=1)
    assert any(segment.takes_windows for segment in report.plan.segments)
    assert not any("all tokens" in note for note in report.plan.notes)
    assert report.plan.redundancy < 1.36


def test_queries_keys_and_values_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    take_windows(monkeypatch, 4, repeats=True)
    model = ImageTransformer(8, 2, 3, 4, (6, 5), dropout=0.2)
    report = assert_exact(model, torch.randn(1, 3, 24, 20), to_the_byte=True, steps=1)
    assert sum(segment.num_forwards == 2 for segment in report.plan.segments) >= 3


@pytest.mark.parametrize("copies", ["ahead", "tight"])
def test_keys_and_values_wait_on_the_host(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values and the residual stream are on the host between the forward and the backward pass of a block."""
    torch.manual_seed(0)
    take_windows(monkeypatch, 4, copies=copies)
    model = ImageTransformer(8, 2, 3, 4, (6, 5), dropout=0.2)
    options = sft.Options(host_budget="1MiB")
    report = assert_exact(model, torch.randn(1, 3, 24, 20), options=options, to_the_byte=True, steps=1)
    token_bytes = 31 * 8 * 8
    assert report.plan.host_bytes >= 3 * 4 * token_bytes and report.plan.redundancy < 1.36


@settings(max_examples=3)
@given(
    rows=st.integers(2, 5),
    columns=st.integers(2, 5),
    num_images=st.integers(1, 3),
    chunk=st.integers(1, 12),
    form=st.sampled_from(get_args(AttentionForm)),
    token=st.booleans(),
    repeats=st.booleans(),
    copies=st.sampled_from(get_args(Copies)),
)
def test_any_chunk_of_any_tokens(
    rows: int, columns: int, num_images: int, chunk: int, form: AttentionForm, token: bool, repeats: bool, copies: Copies
) -> None:
    torch.manual_seed(0)
    model = ImageTransformer(8, 2, 1, 2, (rows, columns), form, token=token, dropout=0.1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_windows(monkeypatch, chunk, repeats=repeats, copies=copies)
        assert_exact(model, torch.randn(num_images, 3, 2 * rows, 2 * columns), steps=1)


@pytest.mark.parametrize("form", get_args(AttentionForm))
def test_as_many_images_as_queries_keys_and_values(form: AttentionForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leading dimension of three for queries, keys and values is not that of the images."""
    torch.manual_seed(0)
    take_windows(monkeypatch, 4, height=1)
    model = ImageTransformer(8, 2, 2, 4, (6, 5), form, dropout=0.2)
    report = assert_exact(model, torch.randn(3, 3, 24, 20), to_the_byte=True, steps=1)
    assert any(segment.takes_windows for segment in report.plan.segments)


def test_attention_over_the_tiles_of_a_bag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of tiles that attend to each other: keys and values of all tiles, queries of some."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8), _BagAttention())
    take_samples(monkeypatch, 3)
    report = assert_exact(AttentionBag(encoder, 8), torch.randn(7, 3, 8, 8), to_the_byte=True, steps=1)
    assert sum(segment.takes_samples for segment in report.plan.segments) > 1


class _BagAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
