"""The documentation site: its navigation has every page, and its reference every public name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_PACKAGES = ("sft", "sft.nn", "sft.sources", "sft.tissue", "sft.wsi")


def _paths(item: Any) -> list[str]:
    if isinstance(item, str):
        return [item]
    return [path for value in (item.values() if isinstance(item, dict) else item) for path in _paths(value)]


def test_the_navigation_has_every_page() -> None:
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load((_DOCS.parent / "mkdocs.yml").read_text())
    excluded = set(settings["exclude_docs"].split())
    pages = {str(path.relative_to(_DOCS)) for path in _DOCS.rglob("*.md")} - excluded
    pages = {page for page in pages if f"{page.partition('/')[0]}/" not in excluded}
    listed = _paths(settings["nav"])
    assert sorted(listed) == sorted(pages)


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text() for path in (_DOCS / "api").glob("*.md"))
    named = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(named) == len(set(named))
    modules = {package: importlib.import_module(package) for package in _PACKAGES}
    public = {f"{package}.{name}" for package, module in modules.items() for name in module.__all__}
    objects = {getattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in named}
    missing = {
        name
        for name in public - set(named)
        if f"sft.{name.rpartition('.')[2]}" not in modules
        and getattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) not in objects
    }
    assert not missing, f"add to docs/api: {sorted(missing)}"
    assert set(named) <= public
