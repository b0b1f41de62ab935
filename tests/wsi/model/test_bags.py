"""Heads over tiles: any shares of the tiles give the scores and gradients of all of them, and contributions sum to the score."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.errors import InputError
from sft.wsi.model.bags import BagEvidence, BagModel, build_bag_model
from sft.wsi.model.tile_encoders import add_adapters, load_tile_encoder, num_tile_features
from tests.helpers.bags import VisionTransformer
from tests.helpers.wsi import TileNet

_HEADS: tuple[Any, ...] = ("gap", "max", "attention")


def _model(head: Any, encoder: nn.Module | None = None, num_features: int = 8) -> BagModel:
    torch.manual_seed(0)
    return build_bag_model(encoder or TileNet(), num_features, 3, head=head, attention_dim=4, dropout=0.0).double()


def _plain_scores(model: BagModel, vectors: Tensor, head: str) -> Tensor:
    """The pooling as in its publication."""
    layers: Any = model.head
    if head == "gap":
        pooled = vectors.mean(0, keepdim=True)
    elif head == "max":
        pooled = vectors.amax(0, keepdim=True)
    else:
        shares = layers.score(torch.tanh(layers.value(vectors)) * torch.sigmoid(layers.gate(vectors))).softmax(0)
        pooled = (shares * vectors).sum(0, keepdim=True)
    scores: Tensor = layers.classifier(pooled)
    return scores


@pytest.mark.parametrize("head", _HEADS)
@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), levels=st.integers(2, 9))
def test_shares_of_tiles_merge_exactly(head: Any, sizes: list[int], levels: int) -> None:
    """Values of few levels: several tiles have the maximum."""
    model = _model(head)
    vectors = torch.randint(0, levels, (sum(sizes), 8)).double().requires_grad_()
    expected = _plain_scores(model, vectors, head)
    (reference,) = torch.autograd.grad(expected.square().sum(), vectors)
    summaries = torch.cat([model.head.summary(share) for share in vectors.split(sizes)])
    scores = model.head.classify(model.head.merge(summaries))
    (gradient,) = torch.autograd.grad(scores.square().sum(), vectors)
    assert torch.allclose(scores, expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(gradient, reference, rtol=1e-11, atol=1e-13)
    assert torch.allclose(model.head(vectors), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("head", _HEADS)
def test_contributions_of_tiles_are_the_score(head: Any) -> None:
    model = _model(head).eval()
    evidence = BagEvidence(model)
    for num_tiles in (1, 5):
        tiles = torch.randn(num_tiles, 3, 16, 16, dtype=torch.float64)
        net = sft.compile(evidence, (None, 3, 16, 16), budget="1MiB")
        scores, contributions, weights = net(tiles)
        assert contributions.shape == (num_tiles, 3) and weights.shape == (num_tiles, 1)
        assert torch.allclose(scores, model(tiles), rtol=1e-12) and torch.allclose(weights.sum(), torch.ones((), dtype=torch.float64))
        assert torch.allclose(contributions.sum(0) + model.head.classifier.bias, scores[0], rtol=1e-12)


def test_feature_maps_are_averaged() -> None:
    model = _model("gap", nn.Conv2d(3, 8, 4, stride=4))
    tiles = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(model.vectors(tiles), model.backbone(tiles).mean((2, 3)))


def test_encoders_by_name() -> None:
    encoder = load_tile_encoder("tests.helpers.wsi:tile_net", {"width": 5}, tile_px=16, trust="tests")
    assert num_tile_features(encoder, "n", 16) == 5 and encoder.training
    with pytest.raises(InputError, match=r"'n' gives \(2, 8, 4\) for 2 tiles of 16 px instead of vectors"):
        num_tile_features(nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2)), "n", 16)
    with pytest.raises(InputError, match=r"'n' does not take tiles of 24 x 24 px with 3 channels \(RuntimeError: .*Change model.tile_px"):
        num_tile_features(VisionTransformer(8, 2, 1, 4, 16), "n", 24)


@pytest.mark.skipif(find_spec("timm") is None or find_spec("torchvision") is None, reason="needs timm and torchvision")
def test_encoders_of_libraries() -> None:
    """timm's transformers are resized to the tiles; networks of torchvision lose their classifiers."""
    encoder = load_tile_encoder("timm:vit_tiny_patch16_224", {"depth": 1}, tile_px=64)
    assert num_tile_features(encoder, "n", 64) == 192
    with pytest.raises(InputError, match=r"with model.tile_px 70: patches of 16 px do not divide a tile. Give a multiple, such as 64."):
        load_tile_encoder("timm:vit_tiny_patch16_224", {"depth": 1}, tile_px=70)
    assert num_tile_features(load_tile_encoder("timm:resnet10t", {}, tile_px=64), "n", 64) == 512
    assert num_tile_features(load_tile_encoder("timm:resnet10t", {}, tile_px=64, num_channels=5), "n", 64, 5) == 512
    for name, width in (("resnet18", 512), ("vit_b_32", 768), ("mobilenet_v3_small", 576)):
        options = {"image_size": 64} if name == "vit_b_32" else {}
        assert num_tile_features(load_tile_encoder(f"torchvision:{name}", options, tile_px=64), name, 64) == width


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"model.lora_rank 4 needs peft .*pip install .*peft"):
        add_adapters(TileNet(), 4)


def test_adapters_of_linear_layers() -> None:
    pytest.importorskip("peft")
    encoder = TileNet()
    assert add_adapters(encoder, 2) == ("mlp.0", "mlp.3")
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trained == {f"mlp.{layer}.lora_{side}.default.weight" for layer in (0, 3) for side in "AB"}
    assert add_adapters(TileNet(), 2, ["mlp.*3"]) == ("mlp.3",) and add_adapters(TileNet(), 2, ["stem"]) == ("stem",)
    with pytest.raises(InputError, match=r"model.lora_layers 'qkv' fits no layer of the backbone. Its layers are: stem, norm, mlp.0"):
        add_adapters(TileNet(), 2, ["qkv"])
    with pytest.raises(InputError, match=r"model.lora_layers \[norm\]: .* Name linear layers"):
        add_adapters(TileNet(), 2, ["norm"])
    with pytest.raises(InputError, match=r"the backbone \(Conv2d\) has no linear layer"):
        add_adapters(nn.Conv2d(3, 8, 3), 2)
