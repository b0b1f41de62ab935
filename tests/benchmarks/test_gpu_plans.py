"""Plans for a GPU are no slower by the time model, and reserve no more, than the committed ones."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sft import parse_bytes

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "benchmarks" / "results"
#: Estimates differ by a little where candidates are nearly equal.
_TOLERANCE = 1.01


def _newest() -> dict[str, dict[str, Any]]:
    """Results of the newest file, by case."""
    newest = max(_RESULTS.glob("*-cpu-gpu-plans.json"))
    return {json.dumps(result["case"]): result for result in json.loads(newest.read_text())["results"]}


#: Cases that are planned in more than eight seconds.
_SLOW = (2, 8, 10, 11, 15, 16)


@pytest.mark.parametrize("number", [pytest.param(number, marks=[pytest.mark.slow] * (number in _SLOW)) for number in range(17)])
def test_no_plan_has_become_worse(number: int) -> None:
    import gpu_plans

    case = gpu_plans.CASES[number]
    before, now = _newest()[json.dumps(asdict(case))], gpu_plans.measure(case)
    assert now.seconds <= _TOLERANCE * before["seconds"]
    assert now.replays_passes >= before["replays_passes"]
    if not now.replays_passes:  # recorded passes allocate from the pool of their graphs, and are chosen for their time
        assert now.reserved_bytes / now.tensor_bytes <= _TOLERANCE * before["reserved_bytes"] / before["tensor_bytes"]
    assert now.reserved_bytes <= parse_bytes(case.budget)
    assert now.flops_ratio <= _TOLERANCE * before["flops_ratio"]


def test_the_pool_reserves_less() -> None:
    # Recorded passes allocate from the pool of their graphs.
    results = [result for result in _newest().values() if not result["replays_passes"]]
    assert all(result["reserved_bytes"] <= 1.005 * result["reserved_without_pool_bytes"] for result in results)
    ratios = sorted(result["reserved_bytes"] / result["tensor_bytes"] for result in _newest().values())
    assert ratios[3] <= 1.04 and ratios[-1] <= 1.22  # small budgets: segments of 20 MiB outside of the pool


def test_the_page_and_the_changelog_cite_the_newest_result() -> None:
    page, changelog = ((_ROOT / name).read_text() for name in ("docs/gpu.md", "CHANGELOG.md"))
    cited = {name for text in (page, changelog) for name in re.findall(r"results/([0-9-]+-cpu-gpu-plans)\.md", text)}
    assert cited == {max(_RESULTS.glob("*-cpu-gpu-plans.json")).stem}
    ratios = {}
    for result in _newest().values():
        case = result["case"]
        ratios[f"{case['network']} {case['size_px']} {case['budget']}"] = f"{result['seconds'] / result['plain_seconds']:.2f}"
    for text, names in (
        (page, ("resnet18 20480 40GiB", "resnet18 20480 28GiB", "resnet18 2048 500MiB", "resnet18 2048 350MiB")),
        (page, ("resnet18 2048 400MiB", "resnet18 2048 250MiB", "resnet18 2048 450MiB", "resnet18 2048 300MiB")),
        (
            changelog,
            ("resnet18 2048 350MiB", "resnet18 2048 450MiB", "resnet18 20480 40GiB", "resnet18 2048 400MiB", "resnet18 2048 250MiB"),
        ),
    ):
        assert all(f" {ratios[name]} times" in " ".join(text.split()) for name in names)


def test_low_strips_fit_where_the_tallest_need_half_as_much_again() -> None:
    """Regression: an error for the tallest strips excluded all others, and values of 7.5 GiB were copied through the host."""
    import gpu_plans

    case = gpu_plans.Case(network="resnet18", size_px=8192, budget="6GiB")
    assert gpu_plans.measure(case).host_bytes == 0
