"""Streamed weights on several ranks: updates by the mean of their gradients, sharded state, and steps of all ranks or of none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sft
from sft.nn import Repeat
from sft.optim import SGDUpdate
from tests.helpers.ranks import Ranks, ranks_of

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")

_NUM_RANKS, _NUM_BLOCKS = 3, 4
_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adamw": {"lr": 0.01, "amsgrad": True},
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder: Path = tmp_path_factory.mktemp("three")
    with ranks_of(_NUM_RANKS, folder) as ranks:
        yield ranks


class Block(nn.Module):
    """Odd sizes, a scalar, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.gain = nn.Parameter(torch.full((1,), 0.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gain * torch.tanh(self.conv(x))
        return out


class Net(nn.Module):
    """Streamed blocks between a stem and heads; a call uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.blocks: nn.Module = Repeat(Block, _NUM_BLOCKS, strategy="revolve")
        self.heads = nn.ModuleList([nn.Linear(48, 2) for _ in range(_NUM_RANKS)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        out: Tensor = self.heads[head](self.blocks(self.stem(x)).flatten(1))
        return out


def _models(*, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """A model with streamed blocks, and the same in plain PyTorch."""
    torch.manual_seed(seed)
    model = Net().to(dtype)
    plain = copy.deepcopy(model)
    plain.blocks = _repeat(model).unstacked()
    _repeat(model).stream("3KiB", **options)
    return model, plain


def _repeat(model: Any) -> Repeat:
    repeat = model.blocks
    assert isinstance(repeat, Repeat)
    return repeat


def _batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(100 * step + rank))


def _optimizer(kind: Any, model: nn.Module, **options: Any) -> sft.StreamedOptimizer:
    settings = {"group": dist.group.WORLD, "group_timeout_seconds": 60.0, **_SETTINGS[kind], **options}
    return sft.StreamedOptimizer(model, kind, **settings)


def _plain_optimizer(kind: str, plain: nn.Module) -> torch.optim.Optimizer:
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    return make(plain.parameters(), foreach=False, **_SETTINGS[kind])


def _backward(model: Any, step: int, ranks: range | list[int], share: float, *, scale: Callable[[Tensor], Tensor] | None = None) -> None:
    """A backward pass in which each rank uses another head."""
    dtype = model.stem.weight.dtype
    for rank in ranks:
        loss = model(_batch(step, rank, dtype), rank).square().mean() * share
        (loss if scale is None else scale(loss)).backward()


def _assert_close(model: Any, plain: Any, tolerance: float = 1e-12) -> None:
    values = {name: value for name, value in model.named_parameters() if not name.startswith("blocks.")}
    for name, stack in _repeat(model).block.named_parameters():
        values |= {f"blocks.{number}.{name}": value for number, value in enumerate(stack)}
    others = dict(plain.named_parameters())
    assert values.keys() == others.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, others[name], rtol=tolerance, atol=tolerance, msg=name)


def _equal_torch(rank: int, kind: str, two_phase: bool) -> None:
    model, plain = _models()
    ours, theirs = _optimizer(kind, model, two_phase=two_phase), _plain_optimizer(kind, plain)
    for step in range(3):
        for micro in range(2 if two_phase else 1):
            _backward(model, 10 * step + micro, [rank], 1.0)
            _backward(plain, 10 * step + micro, range(_NUM_RANKS), 1 / _NUM_RANKS)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        _assert_close(model, plain)
    everything = [value.detach().reshape(-1) for value in model.parameters()]
    assert len({tuple(each.tolist()) for each in ours.group.all_gather(torch.cat(everything))}) == 1, "the ranks' weights differ"
    state = ours.state_dict()
    names = [name for name, _ in model.named_parameters()]
    reference = {name: theirs.state.get(p, {}) for name, p in plain.named_parameters()}
    for index, name in enumerate(names):
        records = [reference[name.replace("blocks.block.", f"blocks.{number}.")] for number in range(_NUM_BLOCKS)]
        for slot, value in state["state"].get(index, {}).items():
            if slot == "step":
                continue
            whole = torch.stack([record[slot] for record in records]) if "blocks." in name else records[0][slot]
            torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-12, msg=f"{name}: {slot}")
    fields = _repeat(model).streamed.store.layouts[0].fields  # type: ignore[union-attr]  # it streams
    num_own = 27 + 1 + (1, 0, 0)[rank] + (1, 1, 0)[rank]  # of 81, 3, 1 and 2 elements
    assert sum(field.spec.num_bytes for field in fields if field.spec.is_state) == {"sgd": 1, "adamw": 3}[kind] * 8 * num_own


@pytest.mark.parametrize("two_phase", [False, True], ids=["fused", "two-phase"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_updates_by_the_mean_of_gradients(three: Ranks, kind: str, two_phase: bool) -> None:
    three.run(_equal_torch, kind, two_phase)


def _clips(rank: int) -> None:
    model, plain = _models()
    ours, theirs = _optimizer("sgd", model, max_norm=0.05), _plain_optimizer("sgd", plain)
    for step in range(2):
        _backward(model, step, [rank], 1.0)
        _backward(plain, step, range(_NUM_RANKS), 1 / _NUM_RANKS)
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, foreach=False) > 0.05
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    _assert_close(model, plain)


def _skips_together(rank: int) -> None:
    model, plain = _models(dtype=torch.float32)
    ours, theirs = _optimizer("sgd", model, loss_scale="dynamic"), _plain_optimizer("sgd", plain)
    _backward(model, 0, [rank], float("inf") if rank == 1 else 1.0, scale=ours.scale)
    ours.step()
    skipped = [ours.last_step_skipped]
    assert ours.loss_scale.value == 2.0**15
    _assert_close(model, plain)
    _backward(model, 1, [rank], 1.0, scale=ours.scale)
    _backward(plain, 1, range(_NUM_RANKS), 1 / _NUM_RANKS)
    for optimizer in (ours, theirs):
        optimizer.step()
    assert [*skipped, ours.last_step_skipped] == [True, False]
    _assert_close(model, plain, 1e-5)


def _halves(rank: int) -> None:
    """Half-precision weights have shares of fp32 copies."""
    model, _ = _models(dtype=torch.bfloat16)
    ours = _optimizer("adamw", model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        _backward(model, step, [rank], 1.0)
        ours.step()
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    state = ours.state_dict()["state"]
    index = [name for name, _ in model.named_parameters()].index("blocks.block.conv.weight")
    assert torch.equal(state[index]["master"].bfloat16(), dict(model.named_parameters())["blocks.block.conv.weight"])


def _holds_what_was_projected(rank: int) -> None:
    model, _ = _models()
    repeat, x = _repeat(model), _batch(0, rank).requires_grad_()
    for two_phase in (False, True):
        optimizer = _optimizer("adamw", model, two_phase=two_phase)
        plan = repeat.plan_for(x)
        with sft.measure_peak() as peak:
            out = repeat(x)
            out.backward(torch.ones_like(out))
        slack = sum(p[0].numel() * p.element_size() for p in repeat.parameters()) + 4096
        assert peak.num_bytes <= plan.projected_peak_bytes <= peak.num_bytes + slack, (peak, plan.projected_peak_bytes)
        optimizer.close()


def _fails_on_all_or_none(rank: int) -> None:
    model, plain = _models()
    ours, theirs = _optimizer("adamw", model), _plain_optimizer("adamw", plain)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def unchanged() -> bool:
        return all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    record_optimizer: Any = ours._record_optimizers[0]
    put = record_optimizer.put

    def broken(block: int, *arguments: Any) -> bool:
        if rank == 1 and block == 2:
            raise OSError("the disk is gone")
        return bool(put(block, *arguments))

    record_optimizer.put = broken
    with pytest.raises(OSError if rank == 1 else sft.RankError, match="the disk is gone"):
        _backward(model, 0, [rank], 1.0)
    record_optimizer.put = put
    ours.zero_grad()
    assert unchanged()
    with pytest.raises(ValueError if rank == 1 else sft.RankError, match="no such slide"), ours.together():
        if rank == 1:
            raise ValueError("no such slide")
        _backward(model, 0, [rank], 1.0)
    ours.zero_grad()
    _backward(model, 0, [rank], 1.0)
    if rank == 1:
        model.stem.weight.grad = model.stem.weight.grad.to_sparse()
    with pytest.raises(sft.InputError if rank == 1 else sft.RankError, match="sparse"):
        ours.step()
    ours.zero_grad()
    assert unchanged() and record_optimizer.blocks.store.generation == 0
    _backward(model, 0, [rank], 1.0)  # all ranks are alive
    _backward(plain, 0, range(_NUM_RANKS), 1 / _NUM_RANKS)
    for optimizer in (ours, theirs):
        optimizer.step()
    _assert_close(model, plain)


def _begin_alike(rank: int) -> None:
    model, _ = _models(seed=rank)
    with pytest.raises(sft.InputError, match="seed all ranks alike"):
        _optimizer("sgd", model)
    model, _ = _models()
    with pytest.raises(sft.InputError, match="the same settings"):
        _optimizer("sgd", model, lr=0.1 + rank)
    other: Any = Other()
    with pytest.raises(sft.InputError, match="updates a share of each parameter's elements"):
        sft.StreamedOptimizer(model, other, group=dist.group.WORLD)


class Other:
    """An update without the property of being elementwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(SGDUpdate(), name)


@pytest.mark.parametrize("case", [_clips, _skips_together, _halves, _holds_what_was_projected, _fails_on_all_or_none, _begin_alike])
def test_habits(three: Ranks, case: Callable[..., None]) -> None:
    three.run(case)


def _resumed(rank: int, folder: str) -> None:
    """Files contain the rank's share of the state, and state dicts all of it."""
    model, plain = _models(path=f"{folder}/{rank}", durable=False)
    for module in (model.stem, model.heads, plain.stem, plain.heads):
        module.requires_grad_(False)
    ours, theirs = _optimizer("adamw", model), _plain_optimizer("adamw", plain)

    def step_all(number: int, net: Any, optimizer: torch.optim.Optimizer, ranks: range | list[int]) -> None:
        _backward(net, number, ranks, 1 / len(ranks))
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step_all(number, model, ours, [rank])
        step_all(number, plain, theirs, range(_NUM_RANKS))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(ours.state_dict())
    step_all(2, plain, theirs, range(_NUM_RANKS))
    ours.close()
    _repeat(model).close()
    dist.barrier()
    for group in (None, dist.group.WORLD):
        other, _ = _models(seed=7)
        other.load_state_dict(weights)
        for module in (other.stem, other.heads):
            module.requires_grad_(False)
        optimizer = _optimizer("adamw", other, group=group, two_phase=True)
        optimizer.load_state_dict(state)
        step_all(2, other, optimizer, range(_NUM_RANKS) if group is None else [rank])
        _assert_close(other, plain)
    other_rank = (rank + 1) % _NUM_RANKS
    swapped, _ = _models(seed=7, path=f"{folder}/{other_rank}", resume=True, durable=False)
    with pytest.raises(sft.InputError, match=f"optimizer state of rank {other_rank}/3, and this is rank {rank}/3"):
        _optimizer("adamw", swapped)
    _repeat(swapped).close()
    dist.barrier()
    again, _ = _models(seed=7, path=f"{folder}/{rank}", resume=True, durable=False)
    again.load_state_dict({name: value for name, value in weights.items() if "blocks" not in name}, strict=False)
    for module in (again.stem, again.heads):
        module.requires_grad_(False)
    step_all(2, again, _optimizer("adamw", again), [rank])
    _assert_close(again, plain)


def test_files_and_state_dicts(three: Ranks, tmp_path: Path) -> None:
    three.run(_resumed, str(tmp_path))
