"""The installation of the README, in a new environment: ``import sft`` works in every folder, the one that contains the clone included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

import sft

_ROOT = Path(__file__).resolve().parents[2]
#: Files of a clone that an installation reads.
_CLONED = ("sft", "src", "analysis", "kernels", "pyproject.toml", "LICENSE", "README.md", "constraints.txt")

_REPORT = """
import importlib.util, json, sft
print(json.dumps({
    "file": sft.__file__,
    "version": sft.__version__,
    "analysis": importlib.util.find_spec("sft.analysis.ir").origin,
    "kernels": importlib.util.find_spec("sft.kernels.rng").origin,
}))
"""
_STEP = """
import sft, torch
net = sft.compile(torch.nn.Conv2d(3, 4, 3), (1, 3, 16, 16), budget="1MiB")
print(tuple(net(torch.zeros(1, 3, 16, 16)).shape))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Installation:
    """A clone and the environment that it is installed in.

    Attributes:
        parent: folder that contains the clone, which is named ``sft``.
        python: interpreter of the environment.
    """

    parent: Path
    python: Path

    def run(self, *arguments: str | Path, folder: Path) -> str:
        """Standard output of the interpreter in a folder."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self.python), *map(str, arguments)]
        return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> _Installation:
    """An editable install of a copy of this checkout; dependencies come from the environment of the tests, by a path entry."""
    parent = tmp_path_factory.mktemp("work")
    clone, home = parent / "sft", parent / "env"
    clone.mkdir()
    for name in _CLONED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone / name)
    venv.create(home, symlinks=True)
    names = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=names))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", scheme="venv", vars=names)) / "python"
    offline = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(python), "install", *offline, "-e", str(clone)]
    done = subprocess.run(pip, cwd=parent, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return _Installation(parent=parent, python=python)


def _check(report: str, clone: Path) -> None:
    places = json.loads(report)
    assert places.pop("version") == sft.__version__
    for place in places.values():
        assert Path(place).resolve().is_relative_to(clone.resolve()), places


@pytest.mark.parametrize("place", [".", "sft", "sft/sft", "home"])
def test_import_in_any_folder(installation: _Installation, place: str, tmp_path: Path) -> None:
    folder = tmp_path if place == "home" else installation.parent / place
    _check(installation.run("-c", _REPORT, folder=folder), installation.parent / "sft")


def test_import_without_the_current_folder(installation: _Installation) -> None:
    _check(installation.run("-P", "-c", _REPORT, folder=installation.parent), installation.parent / "sft")


def test_script_next_to_the_clone(installation: _Installation, tmp_path: Path) -> None:
    """The script's folder comes first on Python's path, and its ``sft/`` is the root of the clone."""
    script = installation.parent / "train.py"
    script.write_text(_STEP)
    assert installation.run(script, folder=tmp_path).strip() == "(1, 4, 14, 14)"


def test_command_line_next_to_the_clone(installation: _Installation) -> None:
    assert installation.run("-m", "sft", "--version", folder=installation.parent).strip() == f"sft {sft.__version__}"
    assert installation.run("-m", "sft.wsi", "--version", folder=installation.parent).strip() == f"sft {sft.__version__}"


def test_only_one_name_is_importable(installation: _Installation, tmp_path: Path) -> None:
    """Other folders of the clone hide no package of that name, and are not importable."""
    names = ("analysis", "kernels", "tests", "examples", "benchmarks", "docs")
    code = f"import importlib.util\nprint([name for name in {names} if importlib.util.find_spec(name)])"
    assert installation.run("-c", code, folder=tmp_path).strip() == "[]"


def test_the_remedy_for_a_missing_library_names_the_clone(installation: _Installation, tmp_path: Path) -> None:
    code = "from sft.common.installation import install_command; print(install_command('wsi'))"
    assert installation.run("-c", code, folder=tmp_path).strip() == f'pip install -e "{(installation.parent / "sft").resolve()}[wsi]"'
