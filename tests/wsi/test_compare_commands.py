"""Cross-validation in one command, and tables over runs."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.wsi import compare_commands
from sft.wsi.eval.comparison import MetricRow, markdown_table
from sft.wsi.eval.metrics import Prediction
from sft.wsi.eval.prediction_table import read_predictions, write_predictions
from sft.wsi.model.tasks import Task
from tests.helpers.wsi import read_rows, write_config, write_table, write_task
from tests.helpers.wsi import run_wsi as main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folds of two patients each."""
    folder = tmp_path_factory.mktemp("folds")
    table = write_task(folder, num_slides=6, size_px=96)
    write_table(table, [{name: cell for name, cell in row.items() if name != "split"} for row in read_rows(table)])
    config = write_config(folder / "c.yaml", table, folder / "cv", train={"epochs": 1})
    assert main(["folds", "--config", str(config), "--folds", "3", "--bootstrap", "20"]) == 0
    return folder


def test_folds_are_runs_with_one_table_over_them(trained: Path) -> None:
    run = trained / "cv"
    tested = [row["slide"] for number in range(3) for row in read_rows(run / f"fold-{number}" / "test" / "predictions.csv")]
    assert sorted(tested) == [f"s{number}" for number in range(6)], "each slide is tested once"
    pooled = read_rows(run / "pooled" / "predictions.csv")
    assert sorted(row["slide"] for row in pooled) == sorted(tested)
    by_slide = {row["slide"]: row for row in pooled}
    for number in range(3):
        for row in read_rows(run / f"fold-{number}" / "test" / "predictions.csv"):
            assert by_slide[row["slide"]] == row
    table = {(row["split"], row["level"], row["metric"]): row for row in read_rows(run / "folds.csv")}
    losses = []
    for number in range(3):
        metrics = json.loads((run / f"fold-{number}" / "test" / "metrics.json").read_text())
        losses.append(metrics["slides"]["loss"]["value"])
    row = table["test", "slides", "loss"]
    assert [float(row[f"fold-{number}"]) for number in range(3)] == losses
    assert float(row["mean"]) == pytest.approx(statistics.mean(losses)) and float(row["sd"]) == pytest.approx(statistics.stdev(losses))
    assert float(row["pooled"]) == pytest.approx(statistics.mean(losses)), "all folds have two slides"
    page = (run / "summary.md").read_text()
    assert "## test" in page and "| metric | of | mean | sd | fold-0 | fold-1 | fold-2 | pooled |" in page and "fold-2/summary.md" in page
    weights = json.loads((run / "pooled" / "metrics.json").read_text())["weights"]
    assert {name: each["epoch"] for name, each in weights.items()} == {"fold-0": 1, "fold-1": 1, "fold-2": 1}


def test_complete_folds_are_not_computed_again_and_others_are(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_again: list[str] = []
    train: Any = vars(compare_commands)["train"]

    def watched(config: Any, *arguments: Any, **options: Any) -> Any:
        trained_again.append(config.run.name)
        return train(config, *arguments, **options)

    monkeypatch.setattr(compare_commands, "train", watched)
    arguments = ["folds", "--config", str(trained / "c.yaml"), "--folds", "3", "--bootstrap", "20"]
    before = (trained / "cv" / "folds.csv").read_bytes()
    assert main(arguments) == 0 and trained_again == []
    (trained / "cv" / "fold-1" / "test" / "weights.json").unlink()
    assert main(arguments) == 0 and trained_again == ["fold-1"]
    assert (trained / "cv" / "folds.csv").read_bytes() == before
    capsys.readouterr()
    assert main([*arguments, "--train.lr", "0.5"]) == 1, "other settings are another cross-validation"
    assert "train.lr (was 0.01, is 0.5)" in capsys.readouterr().err


def test_mistakes_of_folds_are_reported(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["folds", "--config", str(trained / "c.yaml"), "--run", str(tmp_path / "cv")]
    cases = [
        ([], 1, "the number of folds is not given: add --folds 5"),
        (["--folds", "2"], 1, "data.num_folds 2: give at least 3"),
        (["--folds", "9"], 1, "6 patients for 9 folds"),
        (["--folds", "0"], 2, "folds"),
        (["--data.num_folds", "3", "--data.fold", "1"], 1, "data.fold 1: folds trains all folds"),
        (["--folds", "3", "--run", str(trained / "cv" / "fold-0")], 1, "is the folder of a run"),
    ]
    for options, code, message in cases:
        assert main([*arguments, *options]) == code, options
        assert message in " ".join(capsys.readouterr().err.split()), options
    assert not (tmp_path / "cv").exists()


def test_runs_are_compared_in_one_table(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "cv")
    assert main(["compare", run, "--out", str(tmp_path / "t.csv"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["runs"]] == ["fold-0", "fold-1", "fold-2"] and told["settings"] == {"data.fold": [0, 1, 2]}
    of_folds = {(row["split"], row["level"], row["metric"]): row for row in read_rows(trained / "cv" / "folds.csv")}
    for row in read_rows(tmp_path / "t.csv"):
        assert row | {"pooled": ""} == of_folds[row["split"], row["level"], row["metric"]] | {"pooled": ""}
    assert main(["compare", f"{run}/fold-2", f"{run}/fold-0", "--split", "test"]) == 0
    shown = capsys.readouterr().out
    assert "| metric | of | mean | sd | fold-2 | fold-0 |" in shown and "data.fold: 2, 0" in shown and "## val" not in shown
    for runs, message in (
        ([str(tmp_path)], "is not a folder of a run, nor of folds"),
        ([f"{run}/fold-0", f"{run}/fold-0"], "some are the same run"),
        ([run, "--split", "train"], "no results of train"),
    ):
        assert main(["compare", *runs]) == 1
        assert message in capsys.readouterr().err


def test_runs_of_different_tasks_have_no_mean(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained / "cv" / "fold-0", tmp_path / name)
    state_file = next((tmp_path / "b" / "checkpoints").glob("best-*")) / "state.pt"
    state = torch.load(state_file)
    torch.save({**state, "settings": {**state["settings"], "task.kind": "regression"}}, state_file)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--split", "test"]) == 0
    shown = capsys.readouterr().out
    loss = next(line for line in shown.splitlines() if line.startswith("| loss"))
    assert loss.split(" | ")[2:4] == ["-", "-"] and "no mean and sd: the runs have different tasks" in shown


@pytest.mark.parametrize("content", ["[1]", "5", '{"slides": 5}', '{"slides": {"auc": "x"}}', '{"slides": {"loss": {"value": "high"}}}'])
def test_metrics_of_another_structure_are_left_out(content: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained / "cv" / "fold-0", tmp_path / "a")
    (tmp_path / "a" / "val" / "metrics.json").write_text(content)
    assert main(["report", str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), "--split", "val"]) == 1
    assert "no results of val" in capsys.readouterr().err


def test_folds_print_the_split_of_each_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["folds", "--config", str(trained / "c.yaml"), "--folds", "3", "--bootstrap", "20"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("## val") < shown.index("| metric") < shown.index("## test")


def test_a_metric_that_a_run_lacks_is_left_out_of_the_mean() -> None:
    row = MetricRow(split="test", level="slides", metric="a|b", values=(0.5, float("nan"), 0.7))
    assert row.mean == pytest.approx(0.6) and row.sd == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert row.as_dict(["x", "y", "z"]) == {
        "split": "test", "level": "slides", "metric": "a|b", "mean": row.mean, "sd": row.sd, "pooled": None, "x": 0.5, "y": None, "z": 0.7
    }  # fmt: skip
    assert markdown_table(["x", "y", "z"], [row], has_pooled=False)[2] == "| a\\|b | slides | 0.6000 | 0.1414 | 0.5000 | - | 0.7000 |"
    empty = MetricRow(split="test", level="slides", metric="auc", values=(float("nan"),))
    assert markdown_table(["x"], [empty], has_pooled=True)[2] == "| auc | slides | - | - | - | - |"


@pytest.mark.parametrize(
    ("task", "targets", "output"),
    [
        (Task(kind="classification", classes=("a;b", 'c"d'), num_outputs=2), [(0.0,), (1.0,), None], (0.25, 0.75)),
        (Task(kind="multilabel", classes=("a", "b"), num_outputs=2), [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), None], (0.25, 0.5)),
        (Task(kind="regression"), [(1.5,), (0.0,), None], (0.1,)),
        (Task(kind="cox"), [(3.0, 1.0), (2.0, 0.0), None], (0.1,)),
        (Task(kind="segmentation", classes=("a", "b"), num_outputs=2), [(), ()], (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
    ],
)
def test_written_predictions_are_read_back(task: Task, targets: Any, output: tuple[float, ...], tmp_path: Path) -> None:
    written = [
        Prediction(
            name=f"s,{number}", patient="p", split="test", target=target, output=output, loss=float("nan") if target is None else 1 / 3
        )
        for number, target in enumerate(targets)
    ]
    write_predictions(tmp_path / "p.csv", task, written)
    read = read_predictions(tmp_path / "p.csv", task)
    assert [repr(each) for each in read] == [repr(each) for each in written]
