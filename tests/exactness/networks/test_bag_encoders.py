"""Bags of tiles with encoders and heads of computational pathology, for any number of tiles and any chunk.

EVA-02 and DINOv2 with registers are small copies of their blocks; encoders of timm run where it is installed (`make test-zoo`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.bags import LowRankLinear, TransformerBlock, VisionTransformer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sft.common.model_zoo import import_library
from tests.helpers.bags import take_samples, take_windows
from tests.helpers.exactness import assert_exact
from tests.helpers.positional_rng import DropPath

_WIDTH = 8


class _GatedAttention(nn.Module):
    """Gated attention as in CLAM: scores are transposed, and vectors are summed by a product of matrices (Ilse et al. 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.content, self.gate, self.score = nn.Linear(width, 4), nn.Linear(width, 4), nn.Linear(4, 1)
        self.dropout, self.head = nn.Dropout(0.25), nn.Linear(width, 2)

    def forward(self, vectors: Tensor) -> Tensor:
        scores = self.score(self.dropout(torch.tanh(self.content(vectors))) * torch.sigmoid(self.gate(vectors)))
        weights = torch.softmax(torch.transpose(scores, 1, 0), dim=1)
        return self.head(torch.mm(weights, vectors))  # type: ignore[no-any-return]


class _TopTiles(nn.Module):
    """Mean over the tiles of largest score (Campanella et al. 2019), which are gathered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(width, 1), nn.Linear(width, 2)

    def forward(self, vectors: Tensor) -> Tensor:
        scores, places = self.score(vectors).squeeze(1).topk(2)
        return self.head((vectors[places] * scores.unsqueeze(1)).mean(0, keepdim=True))  # type: ignore[no-any-return]


class _EvaBlock(nn.Module):
    """Block of EVA-02: rotary positions of all tokens but the first, a norm after attention, SwiGLU with a norm inside."""

    sine: Tensor
    cosine: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.inner_norm, self.mlp_norm = (nn.LayerNorm(n) for n in (_WIDTH, _WIDTH, _WIDTH, 12))
        self.q, self.k, self.v = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH)
        self.project, self.gate, self.value, self.out = (nn.Linear(*sizes) for sizes in ((8, 8), (8, 12), (8, 12), (12, 8)))
        angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.1]).repeat_interleave(2)
        self.register_buffer("sine", angles.sin())
        self.register_buffer("cosine", angles.cos())

    def _turned(self, x: Tensor) -> Tensor:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return x * self.cosine + rotated * self.sine

    def forward(self, x: Tensor) -> Tensor:
        num, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(num, tokens, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (torch.cat([each[:, :, :1], self._turned(each[:, :, 1:])], dim=2).type_as(v) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(num, tokens, width)
        x = x + self.project(self.inner_norm(attended))
        y = self.norm2(x)
        return x + self.out(self.mlp_norm(F.silu(self.gate(y)) * self.value(y)))  # type: ignore[no-any-return]


class _Eva(VisionTransformer):
    def __init__(self) -> None:
        super().__init__(_WIDTH, 2, 1, 4, 8)
        self.blocks = nn.Sequential(_EvaBlock(4), _EvaBlock(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.norm(self.blocks(x)[:, 1:].mean(1))  # type: ignore[no-any-return]


class _ScaledBlock(nn.Module):
    """Block of DINOv2: a scale of each branch, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TransformerBlock(_WIDTH, 2, 0.0)
        self.scale, self.drop = nn.Parameter(torch.full((_WIDTH,), 0.1)), DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.scale * (self.block(x) - x))  # type: ignore[no-any-return]


class _Registers(VisionTransformer):
    """DINOv2 with registers: tokens after the class token without readers of their outputs, and positions of the patches alone."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, 2, 1, 4, 8)
        self.position = nn.Parameter(0.02 * torch.randn(1, 4, _WIDTH))
        self.registers, self.blocks = nn.Parameter(0.02 * torch.randn(1, 4, _WIDTH)), nn.Sequential(_ScaledBlock(), _ScaledBlock())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.token, self.registers)]
        x = self.norm(self.blocks(torch.cat([*prefix, x], dim=1)))
        return torch.cat([x[:, 0], x[:, 5:].mean(1)], dim=1)[:, ::2]


class _ConvNeXtBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(_WIDTH, _WIDTH, 7, padding=3, groups=_WIDTH), nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 16), nn.GELU(), nn.Linear(16, _WIDTH))
        self.scale, self.drop = nn.Parameter(torch.full((_WIDTH,), 0.1)), DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        return x + self.drop(y.permute(0, 3, 1, 2))  # type: ignore[no-any-return]


def _convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, _WIDTH, 4, 4), _ConvNeXtBlock(), _ConvNeXtBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _adapted() -> nn.Module:
    encoder = VisionTransformer(_WIDTH, 2, 1, 4, 8, dropout=0.2).requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block, TransformerBlock)
        block.add_module("qkv", LowRankLinear(block.qkv, 2))
    return encoder


_SMALL_VIT: dict[str, Any] = {"embed_dim": _WIDTH, "depth": 2, "num_heads": 2}
_SMALL_SWIN: dict[str, Any] = {"embed_dim": _WIDTH, "depths": (2, 1), "num_heads": (2, 2)}
#: Small encoders of timm: side of a tile, and arguments.
_OF_TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, {"img_size": 32, **_SMALL_VIT, "proj_drop_rate": 0.1}),
    "vit_small_patch14_reg4_dinov2": (28, {"img_size": 28, **_SMALL_VIT}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, **_SMALL_VIT}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, **_SMALL_SWIN}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, **_SMALL_SWIN}),
    "maxvit_rmlp_pico_rw_256": (
        64,
        {"img_size": 64, "embed_dim": (8, 16), "depths": (1, 1), "stem_width": 8, "transformer_dim_head": 4},
    ),
    "resnet18": (32, {}),
    "convnext_atto": (32, {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}),
}


def _of_timm(name: str, **arguments: Any) -> tuple[nn.Module, int]:
    """A small encoder, and the length of its vectors."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    model: Any = import_library("timm").create_model(name, num_classes=0, drop_path_rate=0.2, **{**_OF_TIMM[name][1], **arguments})
    for parameter in model.parameters():
        if len(parameter.unique()) == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)  # a layer scale, a bias of a norm: constants hide errors
    return model, int(model.num_features)


_ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "eva02": _Eva,
    "registers": _Registers,
    "convnext": _convnext,
    "lora": _adapted,
}
_HEADS: dict[str, Callable[[int], nn.Module]] = {"gated": _GatedAttention, "top": _TopTiles}


def _assert_exact_in_chunks(encoder: nn.Module, head: str, num_tiles: int, taken: int, tile_px: int = 8, width: int = _WIDTH) -> None:
    """Compare a bag in chunks of tiles with eager PyTorch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_samples(monkeypatch, min(taken, num_tiles - 1))
        report = assert_exact(
            nn.Sequential(encoder, _HEADS[head](width)), torch.randn(num_tiles, 3, tile_px, tile_px), steps=1, to_the_byte=True
        )
    assert any(segment.takes_samples for segment in report.plan.segments)


@pytest.mark.parametrize(("encoder", "head"), [("eva02", "gated"), ("registers", "top"), ("convnext", "gated")])
def test_chunks_of_an_encoder(encoder: str, head: str) -> None:
    torch.manual_seed(0)
    _assert_exact_in_chunks(_ENCODERS[encoder](), head, 5, 2)


@pytest.mark.slow
@settings(max_examples=20)
@given(num_tiles=st.integers(2, 6), taken=st.integers(1, 5), head=st.sampled_from(sorted(_HEADS)))
def test_any_chunk_of_a_bag_with_adapters(num_tiles: int, taken: int, head: str) -> None:
    torch.manual_seed(0)
    _assert_exact_in_chunks(_adapted(), head, num_tiles, taken)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", _ENCODERS)
@given(num_tiles=st.integers(2, 9), taken=st.integers(1, 8), head=st.sampled_from(sorted(_HEADS)), seed=st.integers(0, 9))
def test_any_chunk_of_any_encoder(encoder: str, num_tiles: int, taken: int, head: str, seed: int) -> None:
    torch.manual_seed(seed)
    _assert_exact_in_chunks(_ENCODERS[encoder](), head, num_tiles, taken)


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_TIMM)
@settings(max_examples=3)
@given(num_tiles=st.integers(2, 7), taken=st.integers(1, 6), head=st.sampled_from(sorted(_HEADS)))
def test_any_chunk_of_an_encoder_of_timm(name: str, num_tiles: int, taken: int, head: str) -> None:
    torch.manual_seed(0)
    encoder, width = _of_timm(name)
    _assert_exact_in_chunks(encoder, head, num_tiles, taken, _OF_TIMM[name][0], width)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in _OF_TIMM if name not in ("resnet18", "convnext_atto")])
def test_one_image_through_an_encoder_of_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows or tokens of one image, some at a time, in training mode."""
    torch.manual_seed(0)
    tile_px = _OF_TIMM[name][0]
    size = tile_px if "win" in name else 2 * tile_px
    encoder, _ = _of_timm(name, img_size=size)
    take_windows(monkeypatch, 2, height=1)
    report = assert_exact(encoder, torch.randn(1, 3, size, size), to_the_byte=True, steps=1)
    assert any(segment.takes_windows for segment in report.plan.segments)


@pytest.mark.slow
def test_adapters_of_peft_in_a_transformer_of_timm() -> None:
    """Low-rank adapters with dropout of all linear layers of attention; the weights of timm are frozen."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    torch.manual_seed(0)
    encoder, width = _of_timm("vit_small_patch14_reg4_dinov2")
    peft: Any = import_library("peft")
    config = peft.LoraConfig(r=2, target_modules=["qkv", "proj"], lora_dropout=0.1, init_lora_weights=False)
    _assert_exact_in_chunks(peft.get_peft_model(encoder, config), "gated", 5, 2, 28, width)
