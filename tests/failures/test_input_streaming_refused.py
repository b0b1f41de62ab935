"""Inputs that are read strip by strip: refusals, and failing reads, which change no state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources import ArraySink, ArraySource, Slide
from tests.helpers.models import Residual, chain, image, seeded
from tests.helpers.sources import Watched, reader_threads, write_tiled_tiff
from tests.torch_runtime.test_input_streaming import SkipFromInput, random_pixels

_SHAPE = (1, 3, 30, 20)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []


def _net(model: nn.Module | None = None, rows: int = 4, **options: Any) -> Any:
    return sft.compile(seeded(Residual) if model is None else model, _SHAPE, options=sft.Options(tile=(rows, None), **options))


class _Picture:
    """An image that is no slide, without a number of channels."""

    height_px, width_px = 30, 20

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Any:
        return np.zeros((h, w, 3), np.uint8)


def _source_of(shape: tuple[int, ...]) -> Watched:
    source = Watched(image(*_SHAPE))
    source.shape = shape  # type: ignore[assignment]  # wrong on purpose
    return source


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "words"),
    [
        pytest.param(np.zeros((30, 20), np.uint8), "2 axes", id="rank 2"),
        pytest.param(np.zeros((1, 1, 3, 30, 20), np.uint8), "5 axes", id="rank 5"),
        pytest.param(np.zeros((3, 20, 3), np.uint8), "layout=", id="ambiguous"),
        pytest.param(np.zeros((0, 20, 3), np.uint8), "at least 1", id="empty"),
        pytest.param(np.zeros((30, 20, 3), np.int64), "int64", id="int64"),
        pytest.param(np.zeros((30, 20, 3), np.complex64), "complex64", id="complex"),
        pytest.param(np.ma.masked_array(np.zeros((30, 20, 3))), "masked", id="masked"),
        pytest.param(ArraySource(np.zeros((30, 20, 3), np.uint8)), "float32", id="source of float32, model of float64"),
        pytest.param(_source_of((3, 30, 20)), "four positive extents", id="source of three axes"),
        pytest.param(_source_of((1, 3, 0, 20)), "four positive extents", id="source without rows"),
        pytest.param(_Picture(), "Normalized", id="image of unknown channels"),
        pytest.param([[1.0]], "list", id="list"),
        pytest.param("image.npy", "str", id="path"),
        pytest.param(np.zeros((30, 20, 4), np.uint8), None, id="channels"),
        pytest.param(np.zeros((1, 20, 3), np.uint8), None, id="too small"),
    ],
)
def test_wrong_input(x: Any, words: str | None) -> None:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 5), nn.MaxPool2d(2)))
    net = _net(model)
    with pytest.raises(sft.InputError, match=words):
        net(x)
    assert net(random_pixels(30, 20, 3)).shape == (1, 4, 13, 8), "a refused input spoils the next call"


def test_all_problems_are_reported_at_once() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    net = sft.compile(Two(), [_SHAPE, _SHAPE])
    with pytest.raises(sft.InputError, match=r"input 0.*input 1"):
        net(np.zeros((30, 20, 3), np.int32), np.zeros((2, 2)))


def _read_only() -> Any:
    array = np.zeros((30, 20, 3))
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param(np.zeros((30, 21, 3)), "expected", id="shape"),
        pytest.param(np.zeros((2, 3, 30, 20)), "expected", id="batch"),
        pytest.param(np.zeros((30, 20, 3), np.float32), "rounded", id="narrower"),
        pytest.param(np.zeros((30, 20, 3), np.int64), "int64|<i8", id="dtype"),
        pytest.param(_read_only(), "read-only", id="read-only"),
        pytest.param([np.zeros((30, 20, 3))] * 2, "2 entries for 1 inputs", id="too many"),
        pytest.param(ArraySink(np.zeros((3, 30, 21)), shape=(1, 3, 30, 21), dtype=torch.float64), "sink", id="sink's shape"),
        pytest.param("grad.npy", "str", id="path"),
    ],
)
def test_wrong_target(target: Any, words: str) -> None:
    net = _net()
    with pytest.raises(sft.InputError, match=words):
        net(random_pixels(30, 20, 3), input_grad=target)


def test_a_target_without_a_backward_pass() -> None:
    target = np.full((30, 20, 3), 7.0)
    net = _net()
    with torch.no_grad(), pytest.raises(sft.InputError, match="no_grad"):
        net(random_pixels(30, 20, 3), input_grad=target)
    assert (target == 7.0).all()


def test_a_target_that_is_the_input() -> None:
    x = image(*_SHAPE).numpy()
    with pytest.raises(sft.InputError, match="shares memory"):
        _net()(x, input_grad=x)


def test_a_target_for_a_tensor_that_requires_grad() -> None:
    x = image(*_SHAPE)
    with pytest.raises(sft.InputError, match="detach"):
        _net()(x.requires_grad_(), input_grad=np.zeros(_SHAPE))


def test_a_model_that_returns_its_input() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(x), x

    net = sft.compile(seeded(Both), _SHAPE)
    with pytest.raises(sft.InputError, match="returns it"):
        net(random_pixels(30, 20, 3))


class _Whole:
    """A source of two batch elements that cannot be split."""

    shape, dtype = (2, 3, 30, 20), torch.float64

    def rows(self, interval: Interval, out: Tensor) -> None:
        out.copy_(image(*self.shape)[:, :, interval.start : interval.stop])


def test_a_source_that_cannot_be_split() -> None:
    """Its batch runs as one; any other batch tile is refused before execution."""
    model = seeded(Residual)
    net: Any = sft.compile(copy.deepcopy(model), (2, *_SHAPE[1:]), options=sft.Options(tile=(4, None)))
    torch.testing.assert_close(net(_Whole()), model(image(2, *_SHAPE[1:])))
    assert all(segment.batch_tile == 2 for segment in net.plan.segments)
    net = sft.compile(copy.deepcopy(model), (2, *_SHAPE[1:]), options=sft.Options(tile=(4, None), batch_tile=1))
    with pytest.raises(sft.InputError, match="samples"):
        net(_Whole())


# --- failing reads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"tile": (4, None)}, {"strategy": "none"}], ids=["tiled", "whole"])
@pytest.mark.parametrize("row", [0, 17, 29])
def test_a_read_that_fails_in_the_forward_pass(row: int, options: dict[str, Any]) -> None:
    model = seeded(SkipFromInput).train()
    net = sft.compile(model, _SHAPE, options=sft.Options(**options))
    before = copy.deepcopy(model.state_dict())
    source = Watched(image(*_SHAPE))
    source.fails_at = row
    with pytest.raises(sft.SourceError, match="the disk is on fire"):
        net(source)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert reader_threads() == []
    source.fails_at = None
    net(source).sum().backward()


@pytest.mark.parametrize("options", [{"tile": (4, None), "state_every": 2}, {"strategy": "none"}], ids=["tiled", "whole"])
@pytest.mark.parametrize("row", [0, 17, 29])
def test_a_read_that_fails_in_the_backward_pass(row: int, options: dict[str, Any]) -> None:
    model = seeded(SkipFromInput).train()
    net: Any = sft.compile(model, _SHAPE, options=sft.Options(**options))
    source = Watched(image(*_SHAPE))
    target = np.zeros(_SHAPE)
    net(source, input_grad=target).sum().backward()
    gradients, complete = {name: p.grad for name, p in net.named_parameters()}, target.copy()
    for p in net.parameters():
        p.grad = torch.full_like(p, 7.0)
    loss = net(source, input_grad=target).sum()
    source.fails_at = row
    with pytest.raises(sft.SourceError, match="the disk is on fire"):
        loss.backward()
    assert all(p.grad is not None and bool((p.grad == 7.0).all()) for p in net.parameters())
    assert reader_threads() == []
    source.fails_at = None
    net.zero_grad(set_to_none=True)
    net(source, input_grad=target).sum().backward()
    # The running statistics have changed, the gradients in training mode do not depend on them.
    assert all(torch.equal(gradients[name], p.grad) for name, p in net.named_parameters())
    assert np.array_equal(complete, target)


def test_a_damaged_slide(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    write_tiled_tiff(tmp_path / "damaged.tiff", random_pixels(160, 48, 3), damaged_tile=28)
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())).train()
    net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(16, None)))
    before = copy.deepcopy(model.state_dict())
    with Slide(tmp_path / "damaged.tiff") as slide, pytest.raises(sft.SourceError, match=r"damaged\.tiff"):
        net(slide)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class _Full(ArraySink):
    """A sink with a full disk."""

    def finish(self) -> None:
        raise sft.SourceError("cannot write: the disk is full")


def test_a_sink_that_fails_leaves_the_gradients() -> None:
    net = _net()
    sink = _Full(np.zeros(_SHAPE), shape=_SHAPE, dtype=torch.float64)
    loss = net(random_pixels(30, 20, 3), input_grad=sink).sum()
    with pytest.raises(sft.SourceError, match="disk is full"):
        loss.backward()
    assert all(p.grad is None for p in net.parameters())


def test_an_operator_that_fails_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception during a sweep ends the reader."""
    net = _net()
    machine: Any = import_module("sft.torch_runtime.machine")
    run = machine.TorchMachine.run
    calls: list[None] = []

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("injected")
        return run(self, *arguments)

    monkeypatch.setattr(machine.TorchMachine, "run", failing)
    with pytest.raises(torch.OutOfMemoryError):
        net(random_pixels(30, 20, 3))
    assert reader_threads() == []
