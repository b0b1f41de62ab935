"""Blocks of every page run when pasted, in order, into one file in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LIBRARIES = {
    "docs/sources.md": ("openslide", "tifffile", "imagecodecs", "simplejpeg", "skimage", "shapely", "nibabel"),
    "docs/training.md": ("accelerate", "pytorch_lightning"),
    "docs/tutorial.md": ("openslide", "tifffile", "imagecodecs"),
    "docs/wsi-config.md": ("sklearn", "jsonargparse"),
    "docs/wsi.md": ("openslide", "tifffile", "imagecodecs", "sklearn", "jsonargparse"),
}


def _pages() -> list[str]:
    """Pages with Python blocks."""
    folders = ("docs", "examples", "benchmarks")
    pages = [*_ROOT.glob("*.md"), *(path for folder in folders for path in (_ROOT / folder).rglob("*.md"))]
    return sorted(str(path.relative_to(_ROOT)) for path in pages if _PYTHON_BLOCK.search(path.read_text()))


@pytest.mark.parametrize("page", _pages())
def test_the_blocks_of_a_page_run_as_one_file(page: str, tmp_path: Path) -> None:
    for library in _LIBRARIES.get(page, ()):
        pytest.importorskip(library)
    script = tmp_path / "page.py"
    script.write_text("\n".join(_PYTHON_BLOCK.findall((_ROOT / page).read_text())))
    result = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
