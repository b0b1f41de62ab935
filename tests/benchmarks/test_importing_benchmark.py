"""The benchmark of imports: its numbers come from real processes."""

from __future__ import annotations

import importing
import pytest


def test_rows_compare_with_the_baseline_of_the_same_round() -> None:
    rows = importing.rows({importing.BASELINE: [1.0, 2.0, 9.0], "import sft": [1.25, 2.5, 9.125]})
    assert rows[0] == [importing.BASELINE, "2.000", "1.000", "9.000", "+0.000"]
    assert rows[1] == ["import sft", "2.500", "1.250", "9.125", "+0.250"]


def test_a_process_is_measured_and_a_failure_is_reported() -> None:
    busy = importing.processor_seconds(("-c", "sum(range(3_000_000))"), 1)
    assert busy > 0.02
    with pytest.raises(SystemExit, match="exit code 3"):
        importing.processor_seconds(("-c", "raise SystemExit(3)"), 1)


def test_commands_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    light = ("(nothing)", "import sft", "python -m sft --help")
    monkeypatch.setattr(importing, "COMMANDS", {name: importing.COMMANDS[name] for name in light})
    seconds = importing.measure(1, 1)
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())
