"""Generated pages are up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_operators_is_generated_from_the_table() -> None:
    page = runpy.run_path(str(_DOCS / "operators.py"))["page"]
    assert (_DOCS / "operators.md").read_text() == page(), "run python docs/operators.py"


def test_the_page_of_modules_is_generated_from_docstrings() -> None:
    page = runpy.run_path(str(_DOCS / "modules.py"))["page"]
    assert (_DOCS / "modules.md").read_text() == page(), "run python docs/modules.py"
