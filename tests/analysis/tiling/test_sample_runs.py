"""Sample runs: operators that are independent along samples, and operators that exchange them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.analysis.passes.pipeline import run_passes
from tests.helpers.exactness import assert_exact
from tests.helpers.problems import problem_of

_NUM = 5


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(x.flatten(2).transpose(1, 2)[..., :4])  # [N, 6, 4]
        return self.linear(self.function(tokens, self.linear))  # type: ignore[no-any-return]


def _attend(y: Tensor, *, is_causal: bool) -> Tensor:
    query, key, value = (y[None, :, place] for place in range(3))
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)[0]


def _exchanges(function: Callable[[Tensor, nn.Linear], Tensor]) -> list[str]:
    """Targets of the operators that exchange samples."""
    sized = problem_of(_Function(function), (_NUM, 4, 2, 3), training=True, passes=run_passes).sized
    runs = sized.sample_runs
    assert runs is not None
    assert [name for stage in runs.stages for name in stage.names if sized.graph[name].kind == "operator"]
    prologue = set(sized.phases.prologue)
    return [sized.graph[name].target for stage in runs.stages if not stage.is_run for name in stage.names if name not in prologue]


@pytest.mark.parametrize(
    "function",
    [
        lambda y, _: y.softmax(1),
        lambda y, _: y.softmax(-1) @ y.transpose(1, 2) @ y,
        lambda y, _: torch.einsum("ntc,nsc->nts", y, y)[..., :4],
        lambda y, _: torch.bmm(y.transpose(1, 2), y),
        lambda y, _: y.permute(1, 0, 2).cumsum(0).permute(1, 0, 2),
        lambda y, _: y.reshape(_NUM * 6, 4).reshape(_NUM, 3, 8)[..., :4],
        lambda y, _: y.transpose(0, 1).reshape(6 * _NUM, 4).reshape(6, _NUM, 4).transpose(0, 1),
        lambda y, _: torch.cat([y, torch.zeros(_NUM, 1, 4)], 1),
        lambda y, _: torch.stack([y, y.flip(1)], 1).amax(2),
        lambda y, _: y[:, torch.tensor([2, 0, 1])],
        lambda y, _: y.gather(1, y.argsort(1)),
        lambda y, _: y.unsqueeze(1).repeat(1, 2, 1, 1).squeeze(1).mean(2),
        lambda y, linear: torch.layer_norm(y, (6, 4)) @ linear.weight,
        lambda y, _: y / y.norm(dim=(1, 2), keepdim=True),
        lambda y, _: y[:, 0] @ y[:, 1].t() @ y[:, 2],
        lambda y, linear: (linear.weight @ y[:, 1].t()).t(),
        lambda y, _: torch.einsum("ntc,msc->ntm", y, y + 1)[..., :4],
        lambda y, _: _attend(y, is_causal=False),
        lambda y, _: _attend(y, is_causal=True),
    ],
)
def test_operators_on_each_sample(function: Callable[[Tensor, nn.Linear], Tensor]) -> None:
    assert _exchanges(function) == []


@pytest.mark.parametrize("is_read_first", [False, True])
def test_an_expanded_parameter_that_operators_before_the_runs_read(is_read_first: bool) -> None:
    """It is computed for all samples there, so a run takes slices of it."""

    def attended(y: Tensor, linear: nn.Linear) -> Tensor:
        latents = linear.weight[None].expand(len(y), -1, -1)
        mixed = None if is_read_first else y[:, :4] + latents
        scores: Tensor = linear(latents.flip(0)) @ y.transpose(1, 2)
        return scores @ y + (y[:, :4] + latents if mixed is None else mixed)

    assert_exact(_Function(attended), torch.randn(_NUM, 4, 2, 3), options=sft.Options(batch_tile=2))


@pytest.mark.parametrize(
    ("function", "target"),
    [
        (lambda y, _: y.softmax(0), "aten.softmax.int"),
        (lambda y, _: y.cumsum(0), "aten.cumsum.default"),
        (lambda y, _: y.flip(0), "aten.flip.default"),
        (lambda y, _: y - y.mean(), "aten.mean.default"),
        (lambda y, _: torch.einsum("ntc,msc->ntm", y, y)[..., :4], "aten.einsum.default"),
        (lambda y, _: torch.einsum("ntc,nsc->ts", y, y + 1)[..., :4], "aten.einsum.default"),
        (lambda y, _: y[:, 1].t() @ y[:, 2], "aten.matmul.default"),
        (lambda y, _: F.scaled_dot_product_attention(*[y[None, :, 0]] * 3)[0], "aten.scaled_dot_product_attention"),
        (lambda y, _: torch.cat([y, y], 0), "aten.cat.default"),
        (lambda y, _: y[torch.tensor([1, 0, 2, 4, 3])], "aten.index.Tensor"),
        (lambda y, _: y.transpose(0, 1).reshape(_NUM, 6, 4), "aten.view.default"),
        (lambda y, _: torch.layer_norm(y.permute(1, 0, 2), (_NUM, 4)).permute(1, 0, 2), "aten.layer_norm.default"),
        (lambda y, _: y[:2], "aten.slice.Tensor"),
    ],
)
def test_operators_that_exchange_samples(function: Callable[[Tensor, nn.Linear], Tensor], target: str) -> None:
    assert any(each.split(".")[1] == target.split(".")[1] for each in _exchanges(function)), _exchanges(function)
