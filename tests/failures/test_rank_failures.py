"""A rank that raises, is killed or hangs stops all ranks, with an error that names it and the cause, and nothing is updated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sft
from sft.distributed.band_segments import BandSegment
from tests.helpers.band_checks import mesh_of
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.ranks import RankFailedError, Ranks, ranks_of

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")

_SHAPE = (1, 3, 24, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x).mean((2, 3))
        return y


class Slide:
    """A source of ones that may fail."""

    dtype = torch.float64
    shape = _SHAPE

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.fails = fails
        self.num_reads = 0

    def rows(self, interval: Any, out: Tensor) -> None:
        self.num_reads += 1
        if self.fails(self.num_reads):
            raise OSError("the disk is gone")
        out.fill_(1.0)


def _net(timeout_seconds: float = 240.0) -> Any:
    options = sft.Options(tile=(4, None), mesh_timeout_seconds=timeout_seconds)
    mesh = mesh_of(1, dist.get_world_size())
    return sft.compile(seeded(Net).train(), _SHAPE, mesh=mesh, options=options)


def _state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ranks_of(3, tmp_path) as rank_pool:
        yield rank_pool


def _raises_in_forward(rank: int) -> str:
    net = _net()
    before = _state(net)
    with pytest.raises(sft.SftError) as caught:
        net(Slide(lambda count: rank == 2 and count == 2))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    # All ranks are alive: the next call works.
    net(image(*_SHAPE)).sum().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


def _raises_in_backward(rank: int) -> str:
    net = _net()
    num_forward = 0
    slide = Slide(lambda count: rank == 1 and 0 < num_forward < count)
    y = net(slide)
    num_forward = slide.num_reads
    with pytest.raises(sft.SftError) as caught:
        y.sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    return f"{type(caught.value).__name__}: {caught.value}"


def _raises_with_pending_messages(rank: int, method: str) -> str:
    """Case in which rank 1 fails between strips, with messages under way; then the step is repeated."""
    net, x = _net(), image(*_SHAPE)
    net(x).sum().backward()
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    before, transport, num_under_way = _state(net), net._sft_engine.rank_context.transport, 0
    original = getattr(BandSegment, method)

    def failing(segment: BandSegment, *arguments: Any) -> Any:
        nonlocal num_under_way
        result = original(segment, *arguments)
        if rank == 1 and transport._pending_works:
            num_under_way = len(transport._pending_works)
            raise OSError("the disk is gone")
        return result

    with patch.object(BandSegment, method, failing), pytest.raises((sft.SftError, OSError)) as caught:
        net(x).sum().backward()
    assert (num_under_way > 0) == (rank == 1)
    assert not transport._pending_works, "a failed step leaves messages"
    assert all(parameter.grad is None for parameter in net.parameters())
    if method == "_run_forward":
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net(x).sum().backward()
    for name, parameter in net.named_parameters():
        expected = grads[name]
        assert expected is not None and parameter.grad is not None
        assert torch.equal(parameter.grad, expected), name
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_raises_between_strips(ranks: Ranks) -> None:
    for method in ("_run_forward", "_run_joint"):
        for rank, message in enumerate(ranks.run(_raises_with_pending_messages, method)):
            assert message.startswith("OSError: the disk" if rank == 1 else "RankError: rank 1 failed: OSError: the disk"), message


def test_a_rank_that_raises(ranks: Ranks) -> None:
    for case, culprit in ((_raises_in_forward, 2), (_raises_in_backward, 1)):
        for rank, message in enumerate(ranks.run(case)):
            assert "the disk is gone" in message, message
            assert message.startswith("SourceError" if rank == culprit else f"RankError: rank {culprit} failed: SourceError"), message


def _dies(rank: int, victim: int) -> str:
    net = _net()
    y = net(image(*_SHAPE))
    if rank == victim:
        os._exit(1)
    with pytest.raises(sft.RankError) as caught:
        y.sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    return str(caught.value)


def test_a_rank_that_dies(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError) as caught:
        ranks.run(_dies, 1)
    assert str(caught.value) == "rank 1: the process ended"


def _hangs(rank: int, idle: int) -> str:
    net = _net(timeout_seconds=5.0)
    net.plan_for(image(*_SHAPE))
    dist.barrier()
    net(image(*_SHAPE))
    store = dist.distributed_c10d._get_default_store()
    if rank == idle:
        store.wait([f"through/{other}" for other in range(idle)])
        return ""
    with pytest.raises(sft.RankError) as caught:
        net(image(*_SHAPE))
    store.set(f"through/{rank}", "1")
    return str(caught.value)


def test_a_rank_that_hangs_is_named_within_the_timeout(ranks: Ranks) -> None:
    # Two ranks wait for each other and name the rank that they wait for; one of them waits for the hanging one.
    answers = ranks.run(_hangs, 2)
    assert all(f"does not answer (it died, hangs, or lost its connection; limit {timedelta(seconds=5)})" in m for m in answers[:2]), answers
    assert any("rank 2 does not answer" in message for message in answers[:2]), answers


def _leaves_out_a_backward_pass(rank: int) -> str:
    """Case in which one rank's loss raises, and its loop continues with the next step."""
    net = _net(timeout_seconds=5.0)
    y = net(image(*_SHAPE))
    with pytest.raises(sft.RankError) as caught:
        net(image(*_SHAPE)) if rank == 1 else y.sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    return str(caught.value)


def test_a_rank_that_begins_the_next_step_too_early(ranks: Ranks) -> None:
    """Regression: it used rows of the others' backward pass as a reply, and the process aborted."""
    messages = ranks.run(_leaves_out_a_backward_pass)
    assert all("does not answer" in message for message in messages), messages


def _disagrees(rank: int) -> None:
    net = _net()
    with pytest.raises(sft.InputError, match="call all ranks of one image with the same inputs"):
        net(image(1, 3, 24 + 4 * (rank == 1), 8))


def _chain() -> nn.Module:
    return nn.Sequential(*(layer for i in range(5) for layer in (nn.Conv2d(4 if i else 3, 4, 3, padding=1), nn.ReLU())))


def _plans_otherwise(rank: int) -> str:
    shape = (1, 3, 48, 32)
    least = least_budget(seeded(_chain), shape, mesh=(1, 3))
    budget = least * 3 if rank == 1 else least
    assert len(sft.plan(seeded(_chain), shape, mesh=(1, 3), budget=budget).segments) == (5 if rank == 1 else 1)
    net = sft.compile(seeded(_chain), shape, mesh=mesh_of(1, 3), budget=budget)
    with pytest.raises(sft.SftError) as refused:
        net(image(*shape))
    return str(refused.value)


def test_different_calls_on_ranks_are_refused(ranks: Ranks) -> None:
    ranks.run(_disagrees)
    messages = ranks.run(_plans_otherwise)
    assert all("compile with the same budget and options on all ranks" in message for message in messages), messages
