"""Blocks of the guides run, and their links have targets."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    sorted(str(path.relative_to(_ROOT)) for path in [*_ROOT.glob("*.md"), *_DOCS.rglob("*.md"), *(_ROOT / "examples").rglob("*.md")]),
)
def test_links_have_targets(page: str) -> None:
    path = _ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#")):
            assert (path.parent / target.split("#")[0]).exists(), target


def _run(page: str, names: dict[str, Any]) -> int:
    """Run the blocks of a page in order, including our commands; returns their number."""
    from sft.wsi.cli import main

    count = 0
    for language, block in _BLOCK.findall((_DOCS / page).read_text()):
        if language == "python":
            exec(compile(block, f"docs/{page}", "exec"), names)
        else:
            for line in block.strip().splitlines():
                words = shlex.split(line, comments=True)
                assert words[:3] == ["python", "-m", "sft.wsi"], line
                assert main(words[3:]) == 0, line
        count += 1
    return count


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("openslide", "tifffile", "imagecodecs", "skimage", "sklearn"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    assert _run("tutorial.md", {}) == 9
    assert (tmp_path / "runs" / "first" / "summary.md").exists()
    metrics = json.loads((tmp_path / "runs" / "first" / "test" / "metrics.json").read_text())
    assert metrics["slides"]["auc"]["value"] == 1, metrics
    assert list((tmp_path / "runs" / "first" / "heatmaps").rglob("*.png"))


def test_the_page_of_scientific_images_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tifffile", "imagecodecs", "rasterio", "shapely"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    assert _run("readers.md", {}) == 4


def test_the_readme_is_short() -> None:
    """At most 700 words and 60 numbers, without code, pictures and link targets."""
    text = (_ROOT / "README.md").read_text()
    for pattern in (r"```.*?```", r"<picture>.*?</picture>", r"\]\([^)]*\)"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    assert len(text.split()) <= 700
    assert len(re.findall(r"\d[\d,.]*", text)) <= 60


#: Pages that are generated, or lists.
_LISTS = ("floors.md", "modules.md", "operators.md")


@pytest.mark.parametrize("page", sorted(path.name for path in _DOCS.glob("*.md") if path.name not in _LISTS))
def test_pages_are_short(page: str) -> None:
    assert len((_DOCS / page).read_text().split()) <= 2000
