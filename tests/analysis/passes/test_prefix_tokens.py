"""Functions of all tokens but some, some of which become functions of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sft.analysis.passes.pipeline import run_passes
from tests.helpers.exactness import assert_exact
from tests.helpers.problems import problem_of

_Join = Callable[[Tensor, Tensor], Tensor]


class _Tokens(nn.Module):
    """Attention over 13 tokens, with queries that are joined from slices of them.

    Args:
        join: makes queries from ``[N, 2, 13, 4]`` and weights ``[10, 4]``.
    """

    def __init__(self, join: _Join) -> None:
        super().__init__()
        self.embed, self.join = nn.Conv2d(3, 8, 2, 2), join
        self.token, self.weights = nn.Parameter(torch.rand(1, 1, 8)), nn.Parameter(torch.rand(10, 4))
        self.positions = nn.Parameter(torch.rand(1, 13, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self._tokens(x)
        return F.scaled_dot_product_attention(self.join(tokens, self.weights), tokens, tokens).mean(2)

    def _tokens(self, x: Tensor) -> Tensor:
        tokens = torch.cat((self.token.expand(len(x), -1, -1), self.embed(x).flatten(2).transpose(1, 2)), 1)
        return (tokens + self.positions).unflatten(2, (2, 4)).transpose(1, 2)  # type: ignore[no-any-return]


class _Pooled(_Tokens):
    """The joined tokens, averaged."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self._tokens(x), self.weights).mean(2)


def _turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(3)


_REWRITTEN: dict[str, _Join] = {
    "prefix": lambda x, w: torch.cat((x[:, :, :3], _turned(x[:, :, 3:]) * w), 2),
    "suffix": lambda x, w: torch.cat((x[:, :, :-3] * w + _turned(x[:, :, :-3]), x[:, :, -3:]), 2),
    "around": lambda x, w: torch.cat((x[:, :, :1], w * x[:, :, 1:11] - w, x[:, :, 11:]), 2),
}
_KEPT: dict[str, _Join] = {
    "not linear": lambda x, w: torch.cat((x[:, :, :3], F.gelu(x[:, :, 3:] * w)), 2),
    "other tokens": lambda x, w: torch.cat((x[:, :, :3], x[:, :, 3:].roll(1, 2) * w), 2),
    "other order": lambda x, w: torch.cat((x[:, :, 3:] * w, x[:, :, :3]), 2),
    "other slice": lambda x, w: torch.cat((x[:, :, :3], x[:, :, 2:12] * w), 2),
    "read elsewhere": lambda x, w: torch.cat((x[:, :, :3], y := x[:, :, 3:] * w), 2) + y.mean(2, keepdim=True),
    "two values": lambda x, w: torch.cat(((x + 1)[:, :, :3], x[:, :, 3:] * w), 2),
    "no constant": lambda x, w: torch.cat((x[:, :, :3], x[:, :, 3:] * 2), 2),
}


def _targets(model: nn.Module) -> list[str]:
    sized = problem_of(model, (1, 3, 6, 8), training=True, passes=run_passes).sized
    return [node.target for node in sized.graph.operators]


@pytest.mark.parametrize("name", _REWRITTEN)
def test_functions_of_some_tokens_become_functions_of_all(name: str) -> None:
    torch.manual_seed(0)
    model = _Tokens(_REWRITTEN[name])
    targets = _targets(model)
    assert targets.count("aten.where.self") == 1 and targets.count("aten.cat.default") == 1
    assert_exact(model, torch.randn(2, 3, 6, 8), steps=1, to_the_byte=True)


@pytest.mark.parametrize("name", _KEPT)
def test_other_concatenations_stay(name: str) -> None:
    targets = _targets(_Tokens(_KEPT[name]))
    assert "aten.where.self" not in targets and targets.count("aten.cat.default") == 2


def test_values_that_no_attention_reads_stay() -> None:
    assert "aten.where.self" not in _targets(_Pooled(_REWRITTEN["prefix"]))
