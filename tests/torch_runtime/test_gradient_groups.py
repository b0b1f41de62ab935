"""Gradients that are copied out of recordings group by group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.torch_internals import apply_function, copy_tensors, unwrapped
from sft.torch_runtime.device_pool import PoolLayout
from sft.torch_runtime.gradient_groups import GradientGroups, group_gradients
from sft.torch_runtime.pass_graphs import CudaPassRecorder, _Recording
from tests.helpers.models import Residual, seeded
from tests.torch_runtime.test_pass_graphs import _assert_close, _input, _pair, _recorded, _step


@given(st.lists(st.integers(1, 1000), max_size=30))
def test_groups_are_small_and_in_order(sizes: list[int]) -> None:
    by_name = {str(number): num_bytes for number, num_bytes in enumerate(sizes)}
    groups = group_gradients(by_name)
    assert [name for group in groups for name in group] == [*by_name]
    most_bytes = max([*sizes, -(-sum(sizes) // 8)], default=0)
    totals = [sum(by_name[name] for name in group) for group in groups]
    assert max(totals, default=0) <= most_bytes
    assert all(size + other > most_bytes - max(sizes) for size, other in zip(totals[::2], totals[1::2], strict=False))


def _warmed_up(make: Callable[[], nn.Module] = Residual) -> tuple[Any, Any, Any]:
    """A network with recorded passes, one without, and the recordings."""
    net, plain = _pair(make)
    graphs, _ = _recorded(net, _input(0))
    for module in (net, plain):
        for seed in range(2):
            _step(module, _input(seed))
    return net, plain, graphs


def test_a_group_is_accumulated_before_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _, graphs = _warmed_up()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    events: list[str] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: events.append(names[id(each)]))

    def note(copies: list[Tensor], grads: list[Tensor]) -> None:
        events.append(f"copy {len(copies)}")
        copy_tensors(copies, grads)

    monkeypatch.setattr("sft.torch_runtime.gradient_groups.copy_tensors", note)
    net(_input(2)).square().sum().backward()  # gradients accumulate
    assert graphs.num_replays == 2
    num_copies = sum(event.startswith("copy") for event in events)
    assert num_copies > 2
    left = 0
    for event in events:
        if event.startswith("copy"):
            assert not left
            left = int(event.split()[1])
        else:
            left -= 1
    assert not left and len(events) == num_copies + len(names)


def test_gradients_of_some_parameters_outlive_the_next_replay() -> None:
    net, plain, graphs = _warmed_up()
    results = []
    for module in (net, plain):
        chosen = [*module.parameters()][1:3]
        grads = torch.autograd.grad(module(_input(2)).square().sum(), chosen)
        _step(module, _input(3))
        results.append([*grads])
    _assert_close(*results)
    assert graphs.is_enabled and graphs.num_replays == 3


def test_a_call_while_gradients_are_copied_leaves_them_as_they_are() -> None:
    """A hook of a parameter may compute other gradients before the other groups are copied."""
    net, plain, _ = _warmed_up()
    results = []
    for module in (net, plain):
        module.zero_grad(set_to_none=True)

        def call(parameter: Tensor, module: Any = module) -> None:
            with torch.enable_grad():
                torch.autograd.grad(module(_input(4)).sum(), [parameter])

        handles = [parameter.register_post_accumulate_grad_hook(call) for parameter in module.parameters()]
        module(_input(2)).square().sum().backward()
        for handle in handles:
            handle.remove()
        results.append([parameter.grad for parameter in module.parameters()])
    _assert_close(*results)


def test_a_weight_that_is_changed_before_the_backward_pass_is_noticed() -> None:
    net, _, _ = _warmed_up()
    y = net(_input(2))
    with torch.no_grad():
        next(iter(net.parameters())).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused() -> None:
    net, _, graphs = _warmed_up()
    x = _input(2)
    (grad,) = torch.autograd.grad(net(x).square().sum(), [next(iter(net.parameters()))], create_graph=True)
    assert graphs.num_replays == 2
    with pytest.raises(sft.UnsupportedError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_gradients_in_memory_of_their_own_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a plan runs without recordings."""
    net, _ = _pair(Residual)
    _recorded(net, _input(0))
    monkeypatch.setattr("sft.torch_runtime.gradient_groups.copy_tensors", lambda copies, grads: pytest.fail("copied"))
    _step(net, _input(0))


def test_groups_of_frozen_parameters_and_of_inputs() -> None:
    model = seeded(Residual)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    net: Any = sft.compile(model, (2, 3, 48, 40), options=sft.Options(tile=(8, None)))
    _recorded(net, _input(0))
    for seed in range(3):
        grads = _step(net, _input(seed))
    assert frozen.grad is None and len(grads) == 1 + 1 + sum(p.requires_grad for p in net.parameters()) + len([*net.buffers()])
    assert not GradientGroups(()).names


def test_inputs_of_a_recording_are_made_in_a_segment_with_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    monkeypatch.setattr(torch, "empty", lambda num_bytes, **_: calls.append(f"allocate {num_bytes}"))

    def make() -> dict[str, Tensor]:
        calls.append("inputs")
        return {}

    for num_bytes, expected in ((0, ["inputs"]), (29, ["empty cache", "allocate 29", "inputs", "empty cache"])):
        calls.clear()
        CudaPassRecorder(torch.device("cuda"), PoolLayout(input_segment_bytes=num_bytes)).allocate_inputs(make)
        assert calls == expected


class _TwoInputs(nn.Module):
    """Network with a mask and a larger image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, mask: Tensor, image: Tensor) -> Tensor:
        return self.first(mask) + self.last(image)  # type: ignore[no-any-return]


def test_the_largest_input_of_a_recording_is_made_first() -> None:
    """As in the simulation of their memory."""
    shapes = ((1, 1, 48, 40), (1, 3, 48, 40))
    net: Any = sft.compile(seeded(_TwoInputs), shapes, options=sft.Options(tile=(8, None)))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    _, recorder = _recorded(net, inputs)
    for _ in range(3):
        net(*inputs).sum().backward()
    assert recorder.num_records == 2 and recorder.input_sizes == [8 * 3 * 48 * 40, 8 * 48 * 40]


def test_a_pass_is_replayed_before_autograd_gets_to_know_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _, graphs = _warmed_up()
    events: list[str] = []
    run = _Recording.run

    def replay(recording: _Recording, values: Mapping[str, Tensor]) -> None:
        events.append("replay")
        run(recording, values)

    def apply(function: Any, *args: Any) -> Any:
        events.append(function.__name__)
        return apply_function(function, *args)

    monkeypatch.setattr(_Recording, "run", replay)
    for module in ("autograd", "gradient_groups"):
        monkeypatch.setattr(f"sft.torch_runtime.{module}.apply_function", apply)
    net(_input(2))
    assert graphs.num_replays == 2
    assert events[0] == "replay" and set(events[1:-1]) == {"_GroupFunction"} and events[-1] == "_RegionFunction"


def test_tensors_that_a_finished_transform_has_left() -> None:
    """They have wrappers with gradients of the transform, which autograd functions do not look through."""
    net, _, graphs = _warmed_up()
    model, x, kept = seeded(Residual), _input(2, requires_grad=False), list[Tensor]()

    def keep(y: Tensor) -> Tensor:
        kept.append(y * y)
        return y.sum()

    torch.func.grad(keep)(x)
    assert type(kept[0]) is Tensor and kept[0] is not unwrapped(kept)[0]
    for module in (net, model):
        for _ in range(2):  # the first backward pass would free the graph of the transform
            module.zero_grad(set_to_none=True)
            module(kept[0]).square().sum().backward()
    _assert_close(*([p.grad for p in module.parameters() if p.grad is not None] for module in (net, model)))
    assert graphs.num_replays == 3
