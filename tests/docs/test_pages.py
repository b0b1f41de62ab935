"""Blocks of every page run when pasted, in order, into one file in an empty folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.script_forks import ScriptForks

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LIBRARIES = {
    "docs/sources.md": ("openslide", "tifffile", "imagecodecs", "simplejpeg", "skimage", "shapely", "nibabel"),
    "docs/training.md": ("accelerate", "pytorch_lightning"),
    "docs/wsi-config.md": ("sklearn", "jsonargparse"),
    "docs/wsi.md": ("openslide", "tifffile", "imagecodecs", "sklearn", "jsonargparse"),
}
#: A page of blocks and commands, which `test_guides.py` runs together.
_TUTORIAL = "docs/tutorial.md"


def _pages() -> list[str]:
    """Pages with Python blocks, without the tutorial."""
    folders = ("docs", "examples", "benchmarks")
    pages = [*_ROOT.glob("*.md"), *(path for folder in folders for path in (_ROOT / folder).rglob("*.md"))]
    return sorted({str(path.relative_to(_ROOT)) for path in pages if _PYTHON_BLOCK.search(path.read_text())} - {_TUTORIAL})


@pytest.fixture(scope="module")
def forks() -> Iterator[ScriptForks]:
    """Server of processes with shared imports, which take longer than most pages."""
    with ScriptForks() as server:
        yield server


@pytest.mark.parametrize("page", _pages())
def test_the_blocks_of_a_page_run_as_one_file(page: str, forks: ScriptForks, tmp_path: Path) -> None:
    for library in _LIBRARIES.get(page, ()):
        pytest.importorskip(library)
    script = tmp_path / "page.py"
    script.write_text("\n".join(_PYTHON_BLOCK.findall((_ROOT / page).read_text())))
    code, errors = forks.run(script)
    assert code == 0, errors[-3000:]


def test_a_failing_page_is_an_error_with_its_traceback(forks: ScriptForks, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("import sys\nassert __name__ == '__main__' and sys.argv == ['page.py']\nundefined\n")
    code, errors = forks.run(script)
    assert code == 1 and 'page.py", line 3' in errors and "NameError: name 'undefined' is not defined" in errors
    script.write_text("raise SystemExit(7)\n")
    assert forks.run(script)[0] == 7
