"""``DistributedDataParallel`` around a compiled model: each rank has its own images, and averaged gradients equal plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sft
from tests.helpers.exactness import gradient_errors
from tests.helpers.models import image, seeded
from tests.helpers.ranks import ranks_of

_NUM_RANKS = 2
_SHAPE = (1, 3, 12, 8)

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")


class SometimesFar(nn.Module):
    """A norm over the image, a frozen layer, and a head that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)
        self.near, self.far = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.uses_far = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.frozen(self.norm(self.stem(x))))
        y: Tensor = self.near(x)
        return y + self.far(x) if self.uses_far else y


Habit = Callable[[Any, Any, int], None]


def _step(module: Any, rank: int, seed: int) -> None:
    module(image(*_SHAPE, seed=10 * seed + rank)).square().sum().backward()


def _plain(wrap: Callable[..., Any], module: nn.Module, rank: int) -> None:
    parallel = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    for seed in range(2):
        optimizer.zero_grad()
        _step(parallel, rank, seed)
        optimizer.step()


def _no_sync(wrap: Callable[..., Any], module: nn.Module, rank: int) -> None:
    parallel = wrap(module, gradient_as_bucket_view=True)
    for seed in range(3):
        with parallel.no_sync() if seed < 2 else nullcontext():
            _step(parallel, rank, seed)


def _unused(wrap: Callable[..., Any], module: Any, rank: int) -> None:
    parallel = wrap(module, find_unused_parameters=True)
    for seed in range(3):
        module.uses_far = seed == 1
        _step(parallel, rank, seed)


def _static(wrap: Callable[..., Any], module: nn.Module, rank: int) -> None:
    parallel = wrap(module, static_graph=True)
    for seed in range(3):
        module.zero_grad()
        _step(parallel, rank, seed)


_HABITS: dict[str, Habit] = {"plain": _plain, "no_sync": _no_sync, "unused": _unused, "static": _static}


def _check_habits(rank: int) -> None:
    for name, habit in _HABITS.items():
        model = seeded(SometimesFar)
        net: Any = sft.compile(copy.deepcopy(model), _SHAPE, options=sft.Options(tile=(4, 8)))
        for module in (model, net):
            habit(DistributedDataParallel, module, rank)
        ours, eager = ({key: p.grad for key, p in module.named_parameters()} for module in (net, model))
        worst = max(gradient_errors(ours, eager).items(), key=lambda item: item[1])
        assert worst[1] <= 1e-10, f"{name}: {worst}"
        for key, value in model.state_dict().items():
            torch.testing.assert_close(net.state_dict()[key], value, msg=f"{name}: {key}")
        gathered = [torch.zeros_like(net.stem.weight.grad) for _ in range(_NUM_RANKS)]
        dist.all_gather(gathered, net.stem.weight.grad.contiguous())
        assert torch.equal(*gathered), f"{name}: the ranks disagree"


def test_gradients_are_averaged(tmp_path: Path) -> None:
    with ranks_of(_NUM_RANKS, tmp_path) as ranks:
        ranks.run(_check_habits)
