"""``python -m sft.wsi plan --size``: no slide, no pretrained weights and no GPU are needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sft.common.errors import InputError
from sft.wsi.train.size_plan import parse_size
from tests.helpers.wsi import run_wsi


def _config(path: Path, **groups: dict[str, object]) -> Path:
    settings: dict[str, dict[str, object]] = {
        "data": {"csv": str(path.parent / "no_such_table.csv")},
        "task": {"kind": "classification", "classes": ["a", "b", "c"]},
        "model": {"backbone": "tests.helpers.wsi:tiny_net", "budget": "64MiB"},
        "train": {"device": "cuda"},
    }
    for name, group in groups.items():
        settings[name] = {**settings[name], **group}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("size", [["4096x2048"], ["2048", "4096"]])
def test_a_login_node_plans_for_a_gpu(size: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path / "c.yaml")
    assert run_wsi(["plan", "--config", str(config), "--size", *size, "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert plan["input_shapes"] == [[1, 3, 2048, 4096]] and plan["device_type"] == "cuda" and plan["training"]
    assert "Slide of 4096 x 2048 px (width x height), on cuda" in captured.err
    assert plan["input_placements"] == ["source"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize("size", [["--size", "1024x512"], ["--size=1024x512"]])
def test_a_size_needs_no_table(
    size: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model.backbone", "tests.helpers.wsi:tiny_net", "--model.budget", "64MiB", "--train.device", "cpu"]
    assert run_wsi(["plan", *size, *model]) == 0
    assert "Slide of 1024 x 512 px (width x height), on cpu" in capsys.readouterr().out
    assert run_wsi(["plan", *model]) == 2
    assert "plan needs data.csv" in capsys.readouterr().err


def test_weights_of_a_file_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path / "c.yaml", model={"weights": str(tmp_path / "no_such_weights.pt")}, train={"device": "cpu"})
    assert run_wsi(["plan", "--config", str(config), "--size", "1024x512"]) == 0
    assert "on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["regression", "hazard", "cox", "multilabel"])
def test_every_task_is_planned(kind: str, tmp_path: Path) -> None:
    task: dict[str, object] = {"kind": kind, "classes": ["a", "b"] if kind == "multilabel" else None}
    config = _config(tmp_path / "c.yaml", task=task, train={"accumulate": 8})
    assert run_wsi(["plan", "--config", str(config), "--size", "1024x512"]) == 0


@pytest.mark.usefixtures("without_proposals")
def test_a_budget_that_does_not_suffice_is_an_error_in_words_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path / "c.yaml", model={"budget": "50KiB"}, train={"device": "cpu"})
    assert run_wsi(["plan", "--config", str(config), "--size", "4096x4096"]) == 1
    message = capsys.readouterr().err
    assert "--model.budget " in message and "--data.mpp" in message and "Options(" not in message


@pytest.mark.parametrize("texts", [["1024"], ["0x5"], ["5", "6", "7"], ["5xx6"], ["-5x6"], ["1e3x5"], ["a", "b"]])
def test_other_sizes_are_refused(texts: list[str]) -> None:
    with pytest.raises(InputError, match="width and the height in px, such as 80000x60000"):
        parse_size(texts)


def test_a_segmentation_is_planned_with_its_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task: dict[str, object] = {"kind": "segmentation", "classes": ["back", "tumour"]}
    config = _config(tmp_path / "c.yaml", task=task, model={"head": "segmentation"}, train={"device": "cpu"})
    assert run_wsi(["plan", "--config", str(config), "--size", "512x384"]) == 0
    assert "1x3x384x512, 1x1x384x512" in capsys.readouterr().out
