"""Benchmark of page faults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page_faults
import pytest


def test_each_case_runs_with_both_heaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str | None] = []

    def call(function: Callable[[Any], Any], case: Any) -> Any:
        settings.append(os.environ.get("MALLOC_MMAP_MAX_"))
        return function(case)

    monkeypatch.setattr(page_faults, "call_in_process", call)
    monkeypatch.setattr("sys.argv", ["benchmarks/page_faults.py"])
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    arguments = ["--networks", "VGG-like", "--size", "64", "--steps", "2", "--budgets", "64MiB", "--threads", "1", "--out", str(tmp_path)]
    assert page_faults.main(arguments) == 0
    assert settings == [None, "0", None, "0"]
    (written,) = tmp_path.glob("*-page-faults.json")
    plain, _, plan, _ = json.loads(written.read_text())["results"]
    assert plain["steps"]["case"]["budget_bytes"] is None and plan["steps"]["case"]["budget_bytes"] == 64 * 2**20
    assert plain["projected_bytes"] is None and 0 < plan["projected_bytes"] < 64 * 2**20
    assert all(result["seconds"] > 0 for result in (plain, plan))
