"""In-place updates of single parameters against ``torch.optim``, bit for bit, and their state dicts in both directions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sft
from sft.optim import SGD, AdamW, FusedOptimizer

_SGD: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.05, "maximize": True},
]
_ADAMW: list[dict[str, Any]] = [
    {},
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.0},
    {"amsgrad": True, "maximize": True},
]
_CASES = [("SGD", settings) for settings in _SGD] + [("AdamW", settings) for settings in _ADAMW]

_all = pytest.mark.parametrize(("kind", "settings"), _CASES, ids=[f"{kind}-{'-'.join(s) or 'plain'}" for kind, s in _CASES])

_Make = Callable[..., torch.optim.Optimizer]


def _theirs(kind: str) -> _Make:
    made: _Make = getattr(torch.optim, kind)
    return lambda params, **settings: made(params, foreach=False, fused=False, **settings)


def _ours(kind: str) -> _Make:
    return SGD if kind == "SGD" else AdamW


def _params(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in ((5, 3), (7,), (), (2, 3, 4))]


def _groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.2}]


def _train(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.99
        for place, param in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + place)
            # One parameter has no gradient in some of the steps.
            skipped = place == 1 and step % 3 == 1
            param.grad = None if skipped else torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()


def _assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)


@_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128], ids=["fp64", "fp32", "complex"])
def test_the_same_bits_as_torch(kind: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    mine, reference = _params(dtype), _params(dtype)
    ours = _ours(kind)(_groups(mine), lr=0.1, **settings)
    theirs = _theirs(kind)(_groups(reference), lr=0.1, **settings)
    _train(ours, mine, range(25))
    assert all(param.grad is None for param in mine)
    _train(theirs, reference, range(25))
    _assert_same(mine, reference)


@_all
def test_state_dicts_load_in_both_directions(kind: str, settings: dict[str, Any]) -> None:
    makes = {"ours": _ours(kind), "theirs": _theirs(kind)}
    ends = []
    for first, second in itertools.product(makes, makes):
        params = _params(torch.float64)
        before = makes[first](_groups(params), lr=0.1, **settings)
        _train(before, params, range(4))
        after = makes[second](_groups(params), lr=0.7, **settings)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        _train(after, params, range(4, 9))
        ends.append(params)
    for other in ends[1:]:
        _assert_same(other, ends[0])


def test_schedulers_move_the_learning_rate() -> None:
    ends = []
    for make in (_ours("SGD"), _theirs("SGD")):
        params = _params(torch.float32)
        optimizer = make(params, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
        for step in range(5):
            for place, param in enumerate(params):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + place))
            optimizer.step()
            scheduler.step()
        ends.append(params)
    _assert_same(ends[0], ends[1])


def test_a_step_allocates_only_state() -> None:
    param = torch.zeros(1000, requires_grad=True)
    for update, slots in ((SGD, 1), (AdamW, 2)):
        settings = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True} if update is SGD else {}
        optimizer = update([param], **settings)
        param.grad = torch.ones(1000)
        with sft.measure_peak() as first:
            optimizer.step()
        assert first.num_bytes <= slots * 4000 + 64  # the state, and a count
        param.grad = torch.ones(1000)
        with sft.measure_peak() as second:
            optimizer.step()
        assert second.num_bytes <= 64


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (SGD, {"lr": -1.0}, "lr"),
        (SGD, {"nesterov": True}, "nesterov"),
        (SGD, {"betas": (0.9, 0.9)}, "betas"),
        (AdamW, {"betas": (0.9, 1.0)}, "beta"),
        (AdamW, {"eps": float("nan")}, "eps"),
        (AdamW, {"decoupled_weight_decay": False}, "Adam"),
    ],
)
def test_bad_settings_are_refused(make: type[FusedOptimizer], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(sft.InputError, match=words):
        make(_params(torch.float32), **settings)


def test_a_state_dict_that_cannot_be_followed_changes_nothing() -> None:
    params = _params(torch.float32)
    optimizer = AdamW(params, lr=0.1)
    foreign = torch.optim.AdamW(params, lr=0.2).state_dict()
    foreign["param_groups"][0]["betas"] = (0.5, 2.0)
    with pytest.raises(sft.InputError, match="beta"):
        optimizer.load_state_dict(foreign)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(sft.InputError, match="sparse"):
        SGD(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_may_be_a_tensor(kind: str, dtype: torch.dtype) -> None:
    """Its arithmetic has the bits of torch."""
    ours, theirs = _params(torch.float64), _params(torch.float64)
    for make, params in ((_ours(kind), ours), (_theirs(kind), theirs)):
        _train(make(params, lr=torch.tensor(0.07, dtype=dtype)), params, range(4))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_setting_that_is_switched_on_keeps_the_averages() -> None:
    (param,) = _params(torch.float64)[:1]
    optimizer = AdamW([param], lr=0.1)
    _train(optimizer, [param], range(3))
    average = optimizer.state[param]["exp_avg"].clone()
    optimizer.param_groups[0]["amsgrad"] = True
    param.grad = torch.zeros_like(param)
    optimizer.step()
    state = optimizer.state[param]
    assert torch.equal(state["exp_avg"], 0.9 * average) and state["step"] == 4
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


def test_deep_copies_make_the_same_step() -> None:
    model = torch.nn.Linear(3, 2)
    copies = copy.deepcopy((model, AdamW(model.parameters(), lr=0.1)))
    for module, optimizer in ((model, AdamW(model.parameters(), lr=0.1)), copies):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert all(torch.equal(parameter, other) for parameter, other in zip(model.parameters(), copies[0].parameters(), strict=True))
