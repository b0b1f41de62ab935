"""The page of a run as one file: complete, self-contained, and safe with any text."""

from __future__ import annotations

import base64
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from sft.wsi.eval import run_page
from sft.wsi.train.checkpoint import CheckpointFolder
from tests.helpers.wsi import run_wsi as main
from tests.helpers.wsi import write_config, write_table, write_task


class _Page(HTMLParser):
    """Tags that are open at the end, all attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "img"):
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _images(page: _Page) -> list[tuple[int, int]]:
    sizes = []
    for tag, name, value in page.attributes:
        if (tag, name) == ("img", "src"):
            kind, _, data = value.partition(";base64,")
            assert kind in ("data:image/png", "data:image/jpeg")
            with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
                picture.load()
                sizes.append(picture.size)
    return sizes


_CLASS = 'z<script>alert("x")</script> & $title ${body}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    table = write_task(folder, num_slides=8, size_px=96)
    import csv

    with table.open(newline="") as file:
        rows = [{**row, "label": row["label"].replace("swapped", _CLASS)} for row in csv.DictReader(file)]
    config = write_config(folder / "c.yaml", write_table(table, rows), folder / "run<b>", train={"epochs": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "20"]) == 0
    return folder / "run<b>"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run<b>")
    return tmp_path / "run<b>"


def _read(run: Path) -> _Page:
    page = _Page((run / "report.html").read_text(encoding="utf-8"))
    assert page.unclosed == []
    return page


def test_a_page_is_one_file_with_everything_in_it(run: Path) -> None:
    page = _read(run)
    assert len(_images(page)) == 5  # curves; ROC and confusion of two splits
    best = CheckpointFolder(run / "checkpoints").best_id()
    assert best is not None and page.text.count(best.short_hash) == 3
    assert "auc" in page.text and "(n=2: no interval)" in page.text and "at least 10 patients" in page.text and "None yet" in page.text
    assert "train.lr" in page.text and "s6" in page.text
    assert main(["heatmap", str(run), "--crops", "0", "--saliency"]) == 0
    page = _read(run)
    sizes = _images(page)
    assert len(sizes) == 5 + 4 and max(width for width, _ in sizes) <= 1200 and "None yet" not in page.text
    assert f"s4, {_CLASS}: score" in page.text and f"best model, {best.text}" in page.text


def test_nothing_on_a_page_is_loaded_or_run(run: Path) -> None:
    assert main(["heatmap", str(run), "--crops", "0"]) == 0
    page = _read(run)
    assert not {"script", "link", "iframe", "object", "b"} & set(page.tags), "texts are texts"
    assert all(value.startswith("data:image/") for _, name, value in page.attributes if name in ("src", "href"))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert _CLASS in page.text and "run<b>" in page.text
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "default-src" in value]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_a_page_follows_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heatmap", str(run), "--crops", "0"]) == 0
    monkeypatch.setattr(run_page, "_MAX_MAPS", 1)
    (run / "val" / "roc.png").write_bytes(b"no picture")
    (run / "val" / "metrics.json").write_text("{")
    (run / "failed.csv").write_text("slide,problem\ns9,<i>broken\n")
    (run / "damaged.csv").write_text("slide,level\ns1,0\n")
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert "summary.md, report.html" in capsys.readouterr().out
    page = _read(run)
    assert "<i>broken" in page.text and "Left out: 1 slide" in page.text and "1 tile could not be decoded and is background" in page.text
    assert "The first 1 of 2" in page.text and len(_images(page)) == 1 + 2 + 1
    assert re.search(r"\btest\b", page.text) and not re.search(r"\n\s*val\s*\n", page.text)
    assert main(["report", str(run.parent)]) == 1
    assert "is not a folder of a run" in capsys.readouterr().err


def test_maps_of_older_weights_are_marked(run: Path) -> None:
    assert main(["heatmap", str(run), "--crops", "0"]) == 0
    assert "not the best model any more" not in _read(run).text
    state = next((run / "checkpoints").glob("best-*/state.pt"))
    import torch

    torch.save({**torch.load(state, weights_only=True), "weights_sha256": "0" * 64}, state)
    assert main(["report", str(run)]) == 0
    page = _read(run)
    assert "not the best model any more" in page.text and page.text.count("Not of the best model of this run") == 2
