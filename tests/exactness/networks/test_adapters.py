"""Adapters of frozen encoders (LoRA, DoRA, IA3 as in peft): exact, without gradients or kept activations of frozen weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer, take_samples
from tests.helpers.exactness import assert_exact


class _LowRank(nn.Module):
    """LoRA: ``W x + scale B A dropout(x)``; with ``decomposed`` the columns of the sum have trained norms (DoRA)."""

    def __init__(self, base: nn.Linear, *, decomposed: bool) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.0 if decomposed else 0.1)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1)) if decomposed else None

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = 2.0 * self.up(self.down(self.dropout(x)))
        if self.magnitude is None:
            return self.base(x) + added  # type: ignore[no-any-return]
        weight = self.base.weight + 2.0 * self.up.weight @ self.down.weight
        scale = self.magnitude / weight.norm(dim=1).detach()
        out: Tensor = F.linear(x, self.base.weight) * scale + scale * added + self.base.bias
        return out


class _Rescaled(nn.Module):
    """IA3: the results of a frozen layer times a trained vector."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale  # type: ignore[no-any-return]


_ADAPTERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "lora": lambda base: _LowRank(base, decomposed=False),
    "dora": lambda base: _LowRank(base, decomposed=True),
    "ia3": _Rescaled,
}


def _adapted(name: str) -> nn.Module:
    encoder = VisionTransformer(8, 2, 1, 4, 8).requires_grad_(False)
    for block in encoder.blocks:
        block.qkv, block.project = (_ADAPTERS[name](layer) for layer in (block.qkv, block.project))  # type: ignore[arg-type]
    return AttentionBag(encoder, 8)


@pytest.mark.parametrize("name", _ADAPTERS)
def test_adapters_in_chunks_of_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    take_samples(monkeypatch, 2)
    model = _adapted(name)
    report = assert_exact(model, torch.randn(5, 3, 8, 8), steps=1, to_the_byte=True)
    assert any(segment.takes_samples for segment in report.plan.segments)
    frozen = 8 * sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)  # in double precision
    assert report.plan.frozen_bytes == frozen > 0
    assert "of the weights: no gradient" in report.plan.explain(full=False)


def test_frozen_layers_keep_no_activation() -> None:
    """Six linear layers of [4096, 64]: trained, each keeps its input; frozen, none, and the step keeps the input and the last one."""

    def plan(is_frozen: bool) -> sft.Plan:
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        layers[1:7].requires_grad_(not is_frozen)
        return sft.plan(layers, (4096, 64), options=sft.Options(strategy="none"))

    trained, frozen = plan(False), plan(True)
    layer_bytes, weight_bytes = 4096 * 64 * 4, 64 * 65 * 4
    assert trained.projected_peak_bytes - frozen.projected_peak_bytes >= 6 * layer_bytes - 2 * weight_bytes
    assert trained.resident_bytes - frozen.resident_bytes == 6 * weight_bytes
    assert (trained.frozen_bytes, frozen.frozen_bytes) == (0, 6 * weight_bytes)
    assert frozen.flops < 0.75 * trained.flops
