"""cuDNN's search for algorithms is off while strips run, by an option, and the caller's setting is restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.pass_settings import _SWITCH
from tests.helpers.models import ConvNet, image, seeded

_SHAPE = (2, 3, 48, 40)


@pytest.fixture
def search() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


def _flags_in_step(options: sft.Options, monkeypatch: pytest.MonkeyPatch, *, training: bool = True) -> set[bool]:
    """The setting in all programs of a step."""
    flags: set[bool] = set()
    run = TorchMachine.run

    def noted(machine: TorchMachine, *arguments: Any) -> Any:
        flags.add(torch.backends.cudnn.benchmark)
        return run(machine, *arguments)

    monkeypatch.setattr(TorchMachine, "run", noted)
    net: nn.Module = sft.compile(seeded(ConvNet), _SHAPE, budget="64MiB", options=options)
    with torch.set_grad_enabled(training):
        y = net(image(*_SHAPE))
    if training:
        y.sum().backward()
    return flags


@pytest.mark.parametrize("training", [True, False])
def test_strips_run_without_the_search(search: None, monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    assert _flags_in_step(sft.Options(tile=(8, None)), monkeypatch, training=training) == {False}
    assert torch.backends.cudnn.benchmark


def test_untiled_plans_and_the_option_keep_the_setting(search: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flags_in_step(sft.Options(strategy="none"), monkeypatch) == {True}
    assert _flags_in_step(sft.Options(tile=(8, None), cudnn_benchmark=True), monkeypatch) == {True}
    with pytest.raises(sft.InputError, match="cudnn_benchmark"):
        sft.Options(cudnn_benchmark="yes")  # type: ignore[arg-type]  # of an untyped caller


def test_a_failing_pass_restores_the_setting(search: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net: nn.Module = sft.compile(seeded(ConvNet), _SHAPE, budget="64MiB", options=sft.Options(tile=(8, None)))

    def fail(*_: Any) -> Any:
        assert not torch.backends.cudnn.benchmark
        raise RuntimeError("stop")

    monkeypatch.setattr(TorchMachine, "run", fail)
    with pytest.raises(RuntimeError, match="stop"):
        net(image(*_SHAPE))
    assert torch.backends.cudnn.benchmark


def test_overlapping_passes_restore_the_setting_together(search: None) -> None:
    """The pass that began first ends first: the second one still runs without the search."""
    begun, ended = threading.Event(), threading.Event()
    inside: list[bool] = []

    def second() -> None:
        with _SWITCH.off():
            begun.set()
            ended.wait(10)
            inside.append(torch.backends.cudnn.benchmark)

    thread = threading.Thread(target=second)
    with _SWITCH.off():
        thread.start()
        assert begun.wait(10)
    ended.set()
    thread.join()
    assert inside == [False] and torch.backends.cudnn.benchmark
