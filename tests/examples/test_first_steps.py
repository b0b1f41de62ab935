"""The notebook of first steps runs in order, stores no outputs, and has the results of its text."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import sft

_NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_steps.ipynb"


def _cells() -> list[dict[str, Any]]:
    notebook: dict[str, Any] = json.loads(_NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells: list[dict[str, Any]] = notebook["cells"]
    return cells


def _run_cell(source: str, names: dict[str, Any]) -> object:
    """Run a cell as a notebook does; returns the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), _NOTEBOOK.name, "eval"), names)  # type: ignore[attr-defined]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [_run_cell("".join(cell["source"]), names) for cell in _cells() if cell["cell_type"] == "code"]
    (plan,) = (value for value in shown if isinstance(value, sft.Plan))
    assert "<svg" in plan._repr_html_() and any(segment.mode == "tiled" for segment in plan.segments)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert names["error"] < 1e-10 and names["peak"].num_bytes <= plan.projected_peak_bytes < plan.budget_bytes
    assert names["plain_peak"].num_bytes > 1.3 * names["peak"].num_bytes
    coarse = names["coarse"]
    assert coarse[4:8, 9:13].mean() > 3 * coarse.mean()  # the bright square
    text = capsys.readouterr().out
    assert "loss" in text and "none" in text and "auto" in text
    names["figure"].savefig(tmp_path / "figure.png")


def test_the_notebook_stores_no_outputs_and_its_links_have_targets() -> None:
    cells = _cells()
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert len({cell["id"] for cell in cells}) == len(cells)
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((_NOTEBOOK.parent / link).exists() for link in links)
