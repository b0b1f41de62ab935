"""Messages of wrong command lines and configurations: settings and values as written by the user, without names of Python."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from sft.wsi.cli import main

_TABLE = "slide,label\ns.tif,a\n"


def _error(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == code, capsys.readouterr().err
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "class '" not in error and "Traceback" not in error, error
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.epochs", "abc"], "train.epochs 'abc': give an integer"),
        (["--data.mpp", "0.5um"], "data.mpp '0.5um': give a number or null"),
        (["--model.tile", "256x256"], "model.tile '256x256': give integers in brackets, such as [256, 2048], or null"),
        (["--task.classes", "a,b"], "task.classes 'a,b': give texts in brackets"),
        (["--task.classes", "[1, 2]"], "numbers as texts: ['1', '2']"),
        (["--data.mask_values", "{0: 0.5}"], "give pairs in braces, such as {0: 0, 255: 1}, or null"),
        (["--train.optimizer", "sdg"], "train.optimizer 'sdg': give sgd, adam or adamw"),
        (["--augment.flips", "maybe"], "augment.flips 'maybe': give true or false"),
        (["--model.options", "width=4"], "model.options 'width=4': give settings in braces, such as {pretrained: true}"),
        (["--bootstrap", "-1"], "bootstrap '-1': give an integer of at least 0"),
        (["--trian.epochs", "3"], "did you mean --train.epochs?"),
        (["--train.epoch", "3"], "did you mean --train.epochs?"),
        (["--train", "{epoch: 3}"], "train.epoch is not a setting of train; did you mean train.epochs?"),
        (["--conf", "c.yaml"], "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_one_message(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _error(["train", "--data.csv", "t.csv", *options], 2, capsys)


@pytest.mark.parametrize("command", ["plan", "predict", "heatmap", "compare", "tissue"])
def test_help_has_plain_names_of_types(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "type: path" in text and "<class" not in text


def test_missing_arguments_name_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train needs data.csv (--data.csv, or in the file of --config)" in _error(["train"], 2, capsys)
    assert "tissue needs out" in _error(["tissue", "s.tif"], 2, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n\tcsv: t.csv\n", "c.yaml, line 2, column 1: invalid YAML"),
        ("data: {csv: t.csv}\n---\n{}\n", "c.yaml, line 2, column 1: invalid YAML"),
        ("- a\n", "c.yaml is a list; a configuration has settings by name"),
        ("hello", "c.yaml is a single value"),
        ("", "c.yaml is empty"),
        ("1: 2\n", "c.yaml, line 1: '1' is not a name of a setting"),
        ('data: {csv: "t\\0.csv"}\n', "data.csv 't\\x00.csv': it has a zero byte"),
        ('data: {csv: t.csv}\nrun: "a\\0"\n', "run 'a\\x00': it has a zero byte"),
        ("data: {csv: t.csv}\nmodel: {mean: [.nan, 0, 0]}\n", "give three finite numbers each"),
        ("data: {csv: t.csv}\ntask: {classes: [a, ' ']}\n", "a name is empty"),
        ("data: {csv: t.csv}\ntrain: {epochs: 9999999999}\n", "train.epochs 9999999999: give at least 1, and 1000000000 at most"),
        ("data: {csv: t.csv}\nmodel: {weights: none.pt, backbone: 'torch.nn:Flatten'}\n", "no slides"),
    ],
)
def test_a_wrong_configuration_is_reported_with_its_place(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    Path("t.csv").write_text("slide,label\n")
    assert main(["train", "--config", "c.yaml", "--dry-run"]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--config", "pipe"], ["--data.csv", "pipe"]])
def test_a_pipe_is_refused_and_not_waited_for(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert main(["train", *arguments, "--model.backbone", "torch.nn:Conv2d"]) == 1
    assert "it is a pipe or a device, not a file" in capsys.readouterr().err


def test_names_in_a_table_are_escaped_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"slide,label\n\x1b[2J\u202es.tif,a\n{'x' * 5000},b\nc.tif\n")
    assert main(["train", "--data.csv", str(table), "--model.backbone", "torch.nn:Conv2d"]) == 1
    error = capsys.readouterr().err
    assert "\\x1b[2J\\u202es.tif is missing" in error and "\x1b" not in error and max(map(len, error.splitlines())) < 400
    assert "1 cells under 2 columns; add the cells that are missing" in error


def test_a_missing_extra_is_named_in_place_of_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.common.installation.missing_modules", lambda names: [name for name in names if name == "yaml"])
    with pytest.raises(SystemExit, match=r"error: python -m sft.wsi needs its extra, of which yaml cannot be imported: pip install .*wsi"):
        runpy.run_module("sft.wsi", run_name="__main__")
