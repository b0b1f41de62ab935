"""Functions of the release check detect their faults. ``make release-check`` runs the check itself."""

from __future__ import annotations

import email
import io
import tarfile
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.release_check import metadata_problems, readme_problems, sdist_problems

_ROOT = Path(__file__).resolve().parents[2]
_FILES = ("PKG-INFO", "LICENSE", "README.md", "pyproject.toml", "src/sft/__init__.py", "src/sft/analysis/__init__.py")


def _sdist(*members: tarfile.TarInfo, files: tuple[str, ...] = _FILES) -> tarfile.TarFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in (*(tarfile.TarInfo(f"sft-1/{name}") for name in files), *members):
            archive.addfile(member)
    buffer.seek(0)
    return tarfile.open(fileobj=buffer)


def _link(name: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "../analysis"
    return member


def test_links_and_missing_files_of_an_sdist_are_named() -> None:
    assert sdist_problems(_sdist()) == []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        (problem,) = sdist_problems(_sdist(_link("sft-1/src/sft/kernels", kind)))
        assert "sft-1/src/sft/kernels" in problem
    for name in ("/etc/passwd", "sft-1/../../passwd"):
        (problem,) = sdist_problems(_sdist(tarfile.TarInfo(name)))
        assert "leads out" in problem
    assert sdist_problems(_sdist(files=_FILES[1:])) == ["PKG-INFO is missing"]


def _metadata(**changes: str) -> tuple[Message, dict[str, Any]]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    fields = {"Name": project["name"], "Version": "1.0", "Requires-Python": project["requires-python"], **changes}
    fields.setdefault("Description-Content-Type", "text/markdown")
    extras = [f"Provides-Extra: {name}" for name in project["optional-dependencies"] if name != changes.get("without")]
    text = "\n".join([*(f"{name}: {value}" for name, value in fields.items() if name != "without"), *extras])
    return email.message_from_string(f"{text}\n\n# Text\n"), project


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"Version": "0.9"}, ["Version", "0.9"]),
        ({"without": "wsi"}, ["wsi"]),
        ({"Requires-Dist": "torch @ https://example.org/torch.whl"}, ["URL"]),
        ({"Description-Content-Type": "text/plain"}, ["Markdown"]),
    ],
)
def test_metadata_that_differ_are_named(changes: dict[str, str], words: list[str]) -> None:
    problems = metadata_problems(*_metadata(**changes), "1.0")
    assert len(problems) == bool(words)
    assert all(word in problems[0] for word in words)


def test_links_of_the_readme_lead_to_files(tmp_path: Path) -> None:
    assert not readme_problems((_ROOT / "README.md").read_text(), _ROOT)
    (tmp_path / "a.md").touch()
    text = '[a](a.md#top) [b](b.md) [c](https://example.org) <img src="d.svg">'
    assert [problem.split()[3] for problem in readme_problems(text, tmp_path)] == ["b.md,", "d.svg,"]
