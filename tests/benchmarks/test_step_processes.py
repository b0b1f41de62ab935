"""Cases of the benchmark of steps in processes: a turn has a time limit."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


def _endless(turns: Any) -> str:
    with turns.timed:
        time.sleep(1000)
    return "endless"


def _short(turns: Any) -> str:
    with turns.timed:
        return "short"


def test_a_turn_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_FOLDER))  # processes inherit it
    states: list[tuple[int, str]] = []
    run = importlib.import_module("step_processes").run_in_processes
    records = [*run([_endless, _short], None, lambda number, state, _: states.append((number, state)), turn_seconds=0.5)]
    assert records == ["short"]
    assert states[-4:] == [(0, "timed"), (0, "stopped"), (1, "timed"), (1, "ended")]
