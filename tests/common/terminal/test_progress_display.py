"""Progress displays: silent without a terminal and for short operations, one display for nested operations."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

import sft
from sft.api import plan_cache
from sft.common.terminal import progress_display


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal in place of standard error, and displays without a delay."""
    screen = io.StringIO()
    monkeypatch.setattr(progress_display, "Console", lambda **options: Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(progress_display, "_DELAY_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    return screen


def _wait_for(screen: io.StringIO, text: str) -> None:
    """Wait until the display's thread has drawn a text."""
    end = time.monotonic() + 10
    while text not in screen.getvalue():
        assert time.monotonic() < end, screen.getvalue()
        time.sleep(0.01)


def test_stages_of_nested_operations_share_a_display(terminal: io.StringIO) -> None:
    with progress_display.stages("capture") as show:
        _wait_for(terminal, "capture")
        show("search for a [plan]")
        _wait_for(terminal, "search for a [plan]")
        with progress_display.steps("timing programs", 3) as advance:
            advance()
            _wait_for(terminal, "timing programs: 1 of 3")


def test_steps_are_counted(terminal: io.StringIO) -> None:
    with progress_display.steps("strategies", 4) as advance:
        advance()
        _wait_for(terminal, "1/4")


@pytest.mark.parametrize("reason", ["no terminal", "short", "another rank", "another display"])
def test_no_display(reason: str, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no terminal":
        monkeypatch.setattr(progress_display, "Console", lambda **options: Console(file=terminal, force_terminal=False))
    if reason == "short":
        monkeypatch.setattr(progress_display, "_DELAY_SECONDS", 2.0)
    if reason == "another rank":
        monkeypatch.setenv("RANK", "1")

    def run() -> None:
        with progress_display.stages("capture") as show, progress_display.steps("strategies", 2) as advance:
            show("search")
            advance()
            time.sleep(0.05)

    if reason == "another display":
        with progress_display.hidden():
            run()
    else:
        run()
    assert terminal.getvalue() == ""


def test_planning_has_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def record(stage: str) -> Iterator[Callable[[str], None]]:
        shown.append(stage)
        yield shown.append

    monkeypatch.setattr(plan_cache, "stages", record)
    sft.plan(torch.nn.Conv2d(3, 4, 3), (1, 3, 32, 32), budget="1MiB")
    assert shown == ["capture of Conv2d", "search for a plan within 1.00 MiB"]
