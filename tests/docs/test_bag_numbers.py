"""Numbers about bags of tiles are those of the newest committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def _newest(theme: str) -> Path:
    """The newest result of a theme, in Markdown."""
    return max((_ROOT / "benchmarks" / "results").glob(f"*-cpu-{theme}.md"))


def _content(theme: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_newest(theme).with_suffix(".json").read_text())
    return content


@pytest.mark.parametrize("theme", ["bags", "bag-adapters"])
def test_tables_of_the_page_are_those_of_the_result(theme: str) -> None:
    result, page = _newest(theme), (_ROOT / "docs" / "benchmarks" / "memory.md").read_text()
    rows = [line for line in result.read_text().splitlines() if line.startswith("| ")]
    assert rows and all(row in page for row in rows)
    assert f"../../benchmarks/results/{result.name}" in page


def test_steps_take_no_more_than_their_plans() -> None:
    metered = [result for result in _content("bags")["results"] if result["least"]["is_metered"]]
    assert metered and all(result["least"]["num_bytes"] <= result["projected_bytes"] for result in metered)


def test_a_large_encoder_with_adapters() -> None:
    adapters = _content("bag-adapters")["adapters"]
    assert adapters["total_bytes"] <= adapters["budget_bytes"] == 2 * 2**30 and adapters["redundancy"] < 1.51
    assert adapters["num_tiles"] == 4096 and adapters["compared_tiles"] >= 128
    assert adapters["metered_bytes"] <= adapters["projected_bytes"] + 16  # the values of the loss, which is outside of the model
    assert max(adapters["worst_error"], adapters["loss_error"]) < 1e-3
