"""Pages that are written from the code are up to date, and what pages show runs."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.slides import SLIDE, overwrite_tile

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_operators_is_what_the_table_says() -> None:
    page = runpy.run_path(str(_DOCS / "operators.py"))["page"]
    assert (_DOCS / "operators.md").read_text() == page(), "run python docs/operators.py"


def test_the_page_of_modules_is_what_the_docstrings_say() -> None:
    page = runpy.run_path(str(_DOCS / "modules.py"))["page"]
    assert (_DOCS / "modules.md").read_text() == page(), "run python docs/modules.py"


def test_the_page_of_sources_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("openslide", "tifffile", "simplejpeg", "skimage", "shapely"):
        pytest.importorskip(library)
    nibabel: Any = pytest.importorskip("nibabel")
    shutil.copy(SLIDE, tmp_path / "slide.svs")
    overwrite_tile(SLIDE, tmp_path / "damaged.svs", 25)
    nibabel.save(nibabel.Nifti1Image(np.zeros((6, 5, 8), np.int16), np.eye(4)), tmp_path / "brain.nii.gz")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    names: dict[str, Any] = {"model": model}
    blocks = re.findall(r"^```python\n(.*?)^```", (_DOCS / "sources.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    for block in blocks:
        exec(compile(block, "docs/sources.md", "exec"), names)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
    assert [tile.y for tile in names["image"].bad_tiles] == [480] and "damaged.svs" in names["skipped"][0]
