"""Pictures of the documentation come from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def drawings() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("drawings", _DOCS / "drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_strips_are_those_of_the_planner(drawings: ModuleType) -> None:
    strips = drawings.schedule()
    assert strips.num_steps == 4
    rows = [sum(len(strips.step(index).nodes[column].new) for index in range(4)) for column in range(5)]
    assert rows == [24, 24, 24, 24, 12]
    assert [len(node.carried) for node in strips.step(1).nodes] == [2, 0, 2, 0, 0]
    (axes,) = drawings.strips_figure(strips, "light").axes
    assert len(axes.patches) == sum(bool(len(n.new)) + bool(len(n.carried)) for i in range(4) for n in strips.step(i).nodes)


@pytest.mark.parametrize("name", ["strips-light.svg", "strips-dark.svg", "mask.png"])
def test_a_page_shows_each_picture(name: str) -> None:
    assert (_DOCS / "images" / name).stat().st_size > 1000
    shown = name.replace("-dark", "-light")  # the site's hooks add the dark one
    assert any(f"images/{shown})" in page.read_text() for page in _DOCS.glob("*.md"))
