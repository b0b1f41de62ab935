"""Untrusted configurations and run folders: no command runs code from them, and refusals are fast."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from sft.common.errors import InputError
from sft.wsi.cli import main, read_config
from sft.wsi.config_file import check_config_file

_DATA = Path(__file__).resolve().parents[1] / "compatibility" / "data" / "wsi"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an untrusted run, and a module next to it that records its import."""
    folder = tmp_path / "wsi"
    shutil.copytree(_DATA, folder)
    (folder / "sft_test_foreign.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath(__file__).with_name('touched').touch()\n"
        "def net(): return nn.Conv2d(3, 6, 5, stride=2)\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def _rewrite(path: Path, backbone: str, **options: object) -> None:
    settings = yaml.safe_load(path.read_text())
    settings["model"]["backbone"], settings["model"]["options"] = backbone, options
    path.write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("command", ["evaluate", "heatmap", "train", "train --dry-run", "plan"])
@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("pathlib:Path.touch", "pathlib is of Python's standard library"),
        ("os:system", "os is of Python's standard library"),
        ("sft_test_foreign:net", "add --trust sft_test_foreign"),
        ("torch:load", "torch holds functions"),
    ],
)
def test_no_command_runs_code_of_a_configuration(
    run: Path, command: str, backbone: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"command": "touch touched"} if backbone == "os:system" else {"f": "x"} if backbone == "torch:load" else {"self": "touched"}
    _rewrite(run / "run" / "config.yaml", backbone, **options)
    name, *flags = command.split()
    config = ["run"] if name in ("evaluate", "heatmap") else ["--config", "run/config.yaml", "--run", "new"]
    assert main([name, *config, *flags]) == 1
    error = capsys.readouterr().err
    assert f"model.backbone '{backbone}'" in error and message in error and "Traceback" not in error
    assert not (run / "touched").exists() and not (run / "new").exists()


def test_a_trusted_module_is_run_and_a_configuration_cannot_trust(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _rewrite(run / "config.yaml", "sft_test_foreign:net")
    arguments = ["train", "--config", "config.yaml", "--run", "new", "--dry-run"]
    with (run / "config.yaml").open("a") as file:
        file.write("trust: [sft_test_foreign]\n")
    assert main(arguments) == 1
    assert "trust is not a setting of a configuration" in capsys.readouterr().err
    with pytest.raises(InputError, match="trust"):
        read_config(run / "config.yaml")
    _rewrite(run / "config.yaml", "sft_test_foreign:net")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    del settings["trust"]
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main([*arguments, "--config", "{trust: [sft_test_foreign]}"]) == 1
    assert not (run / "touched").exists()
    capsys.readouterr()
    assert main([*arguments, "--trust", "sft_test_foreign"]) == 0, capsys.readouterr().err
    assert (run / "touched").exists()
    for wrong, message in ((["--trust", "os"], "standard library"), (["--trust"], "give a module"), (["--trust="], "give a module")):
        assert main([*arguments, *wrong]) == 1
        assert message in capsys.readouterr().err
    assert main(["doctor", "--trust", "sft_test_foreign"]) == 1
    assert "--trust is for plan, train" in capsys.readouterr().err


def _laughs(levels: int, width: int) -> str:
    """A document with a last list that expands to ``width ** levels`` values."""
    lines = ["a0: &a0 x"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]" for level in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_laughs(9, 9), "more than 2000 values"),
        ("model:\n  options:\n" + "".join(f"    {line}\n" for line in _laughs(9, 9).splitlines()), "more than 2000 values"),
        (
            "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}' if n else '*a'] * 9)}]}}\n" for n in range(9)),
            "more than",
        ),
        ("a: [" + "x, " * 3_000 + "]\n", "more than 2000 values"),
        ("a: " + "[" * 5000, "more than 32 levels"),
        ("a: " + "{a: " * 5000, "more than 32 levels"),
        ("- " * 5000, "more than 32 levels"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: " + "1:" * 10_000 + "1\n", "a value of 20001 characters"),
        ("a: !!int x\n", "cannot be read"),
        ("a: !!timestamp 2020-99-99\n", "cannot be read"),
        ("# " + "x" * 2**20, "more than 1048576 bytes"),
    ],
)
def test_bombs_are_refused_before_any_value_is_built(tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(text)
    if message != "cannot be read":
        monkeypatch.setattr(yaml, "compose", lambda *_, **__: pytest.fail("values were built"))
    with pytest.raises(InputError, match=message):
        check_config_file(tmp_path / "c.yaml", ("data",))
    with pytest.raises(InputError, match=message):
        read_config(tmp_path / "c.yaml")


def test_the_parser_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parsed events is that of the limit, for a file of any length."""
    (tmp_path / "c.yaml").write_text("a: [" + "x, " * 100_000 + "]\n")
    count, parse = 0, yaml.parse

    def counted(*arguments: object, **options: object) -> object:
        nonlocal count
        for event in parse(*arguments, **options):
            count += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counted)
    with pytest.raises(InputError, match="more than 2000 values"):
        check_config_file(tmp_path / "c.yaml", ())
    assert count < 2_100


def test_a_device_is_refused_and_a_long_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a pipe or a device"):
        check_config_file(Path("/dev/zero"), ())
    (tmp_path / "c.yaml").write_bytes(bytes(2**20 + 1))
    with pytest.raises(InputError, match="more than 1048576 bytes"):
        check_config_file(tmp_path / "c.yaml", ())


def test_aliases_in_reasonable_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {csv: t.csv}\nmodel:\n  mean: &m [0.5, 0.5, 0.5]\n  std: *m\nrun: r\n")
    assert read_config(tmp_path / "c.yaml").model.std == [0.5, 0.5, 0.5]
