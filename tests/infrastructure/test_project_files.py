"""Project files agree with each other: versions, workflow, hooks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import sft

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_and_the_changelog_name_the_version() -> None:
    version = sft.__version__
    assert f"\nversion: {version}\n" in (_ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}] - " in (_ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"- run: make ([a-z-]+)", (_ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert "test" in called and set(called) <= targets


def test_the_workflow_and_the_hooks_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((_ROOT / ".github" / "workflows" / "ci.yml").read_text())
    lowest = _PROJECT["requires-python"].removeprefix(">=")
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"][0] == lowest
    hooks = yaml.safe_load((_ROOT / ".pre-commit-config.yaml").read_text())
    commands = [hook["entry"].split()[0] for repo in hooks["repos"] for hook in repo["hooks"]]
    lint = (_ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert all(command.removeprefix(".venv/bin/") in lint for command in commands)
