"""Estimates of a run, from the plan before the start and from its slides later; log lines, and progress within a slide."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sft.wsi.run import progress
from sft.wsi.run.estimate import RunEstimate, RunWork, duration_text
from sft.wsi.run.progress import Reporter
from tests.helpers.wsi import run_wsi as main
from tests.helpers.wsi import write_config, write_task


def _work(**changes: Any) -> RunWork:
    values: dict[str, Any] = {"num_epochs": 3, "num_slides": 4, "epoch_work": 100.0, "final_work": 20.0, "num_replicas": 1}
    return RunWork(**{**values, "planned_seconds": 2.0, "host_bytes": 0, **changes})


def test_the_measurement_replaces_the_plan() -> None:
    now = [0.0]
    estimate = RunEstimate(_work(), clock=lambda: now[0])
    estimate.start()
    assert estimate.work.seconds == 640.0 == estimate.seconds_left()
    states = [estimate.is_measured]
    now[0] = 50.0  # the first slide also compiles the network
    estimate.note(10.0)
    assert [*states, estimate.is_measured] == [False, True] and estimate.seconds_left() == pytest.approx(310 * 5.0)
    for _ in range(3):
        now[0] += 10.0
        estimate.note(10.0)
    assert estimate.seconds_left() == pytest.approx(280.0), "1 s for each unit, without the first slide"
    assert estimate.seconds_left(5.0) == pytest.approx(275.0)


def test_replicas_share_the_work_and_a_resumed_run_begins_where_it_is() -> None:
    now = [0.0]
    estimate = RunEstimate(_work(num_replicas=2), done=120.0, clock=lambda: now[0])
    estimate.start()
    assert estimate.work.seconds == 320.0 and estimate.seconds_left() == 200.0
    for _ in range(2):
        now[0] += 30.0
        estimate.note(10.0, 10.0)
    assert estimate.seconds_left() == pytest.approx((320 - 160) / 2 * 3.0)


def test_durations_have_two_units() -> None:
    assert [duration_text(seconds) for seconds in (0.4, 59.7, 3599.9, 259_200.0, 266_400.0)] == [
        "less than 1 s",
        "1 min",
        "1 h",
        "3 d",
        "3 d 2 h",
    ]


def test_a_run_logs_its_duration_before_and_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    table = write_task(tmp_path, num_slides=8, size_px=96)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", data={"host_budget": "1MiB"})
    assert main(["train", "--config", str(config), "--dry-run", "--json"]) == 0
    output, said = capsys.readouterr()
    estimate = json.loads(output)["estimate"]
    assert estimate["seconds"] > 0 and estimate["source"] == "plan" and (estimate["epochs"], estimate["slides"]) == (2, 4)
    assert estimate["host_bytes"] > 2**20
    told = (
        r"2 epochs x 4 slides: (about|less than) .* \(from the plan, at the rates of a typical cpu device; "
        r"measured after the first slides\); .* of host memory"
    )
    assert re.search(told, said)
    assert main(["plan", "--config", str(config), "--size", "128", "128"]) == 0
    told_step = r"a training step on such a slide: (about|less than) .* \(from the plan, .* cpu device\); .* of host memory"
    assert re.search(told_step, capsys.readouterr().out)
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    said = capsys.readouterr().out
    assert re.search(told, said)
    assert re.search(r"epoch 2 of 2, slide 3 of 4: .* elapsed, (about|less than) .* left \(measured\), loss 0\.\d{4}", said)
    assert "opening slides, slide 8 of 8:" in said and "validation of epoch 2 of 2, slide 2 of 2:" in said
    assert main(["evaluate", str(tmp_path / "run"), "--bootstrap", "0"]) == 0
    assert re.search(r"evaluation, slide 1 of 2: .* elapsed, (about|less than) .* left \(measured\)", capsys.readouterr().out)


def test_a_short_run_has_no_lines_between_its_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"epochs": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    assert "elapsed" not in capsys.readouterr().out


def test_progress_within_a_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.0)
    stream = io.StringIO()
    with Reporter(Console(file=stream, force_terminal=True, width=160), 3) as reporter:
        reporter.start_epoch(0, 4, 1)
        reporter.start_run(RunEstimate(_work()))
        reporter.start_slide(10.0, 1000)
        shown = []
        for _ in range(4):
            reporter._note_flops(250)
            (task,) = reporter._bars.tasks
            shown.append((task.completed, task.fields["status"].strip()))
        assert [value for value, _ in shown] == [1.25, 1.5, 1.75, 2.0]
        assert [told for _, told in shown] == ["slide 25 %", "slide 50 %", "slide 75 %", "slide 100 %"]
        reporter.advance()
        (task,) = reporter._bars.tasks
        assert task.completed == 2 and "slide" not in task.fields["status"] and "left" in task.fields["status"]
        reporter._note_flops(250)  # between slides, such as of a plan that is timed
        assert task.completed == 2
    stream.close()


def test_lines_of_a_log_have_the_share_of_a_long_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    stream = io.StringIO()
    with Reporter(Console(file=stream, width=200), 3) as reporter:
        reporter.start_epoch(0, 4, 1)
        reporter.start_run(RunEstimate(_work()))
        reporter.start_slide(10.0, 1000)
        reporter._note_flops(250)
        reporter._note_flops(500)
    lines = stream.getvalue().splitlines()
    assert "epoch 1 of 3, slide 2 of 4 (25 % of it done): less than 1 s elapsed, about 10 min 35 s left (estimated from the plan)" in lines
    assert "(75 % of it done)" in lines[-1]
