"""Numbers about budgets and time are those of the newest committed result."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

_ROOT = Path(__file__).resolve().parents[2]


def test_times_over_budgets() -> None:
    path = max((_ROOT / "benchmarks" / "results").glob("*-cpu-budgets.json"))
    page = (_ROOT / "docs" / "benchmarks" / "speed.md").read_text()
    assert f"benchmarks/results/{path.stem}.md" in page
    results = json.loads(path.read_text())["results"]
    section = page.partition("## Time over a ladder of budgets")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and " MiB | " in line]
    assert len(rows) == len({record["case"]["network"] for record in results})
    slowest = 0.0
    for row in rows:
        network, least, most, ratios = (cell.strip() for cell in row.strip("|").split("|"))
        times = {
            (record["case"]["budget_bytes"], record["case"]["channels_last"]): median(record["seconds"])
            for record in results
            if record["case"]["network"] == network
        }
        budgets = sorted(budget for budget, _ in times if budget is not None)
        plain = min(seconds for (budget, _), seconds in times.items() if budget is None)
        assert [least, most] == [f"{budget / 2**20:,.1f} MiB" for budget in (budgets[0], budgets[-1])]
        assert ratios == ", ".join(f"{times[budget, False] / plain:.2f}" for budget in budgets)
        seconds = [times[budget, False] for budget in budgets]
        slowest = max(slowest, *(later / min(seconds[:index]) for index, later in enumerate(seconds) if index))
    assert f"No step takes more than {100 * slowest - 100:.0f} % longer than that of a smaller budget." in section


def test_times_with_kept_pages() -> None:
    path = max((_ROOT / "benchmarks" / "results").glob("*-cpu-page-faults.json"))
    page = (_ROOT / "docs" / "benchmarks" / "speed.md").read_text()
    section = page.partition("## Page faults")[2].partition("\n## ")[0]
    assert f"benchmarks/results/{path.stem}.md" in section
    results = json.loads(path.read_text())["results"]
    costs = {(each["steps"]["case"]["network"], each["steps"]["case"]["budget_bytes"], each["steps"]["heap"]): each for each in results}
    budgets = {", plain PyTorch": None, " in 600 MiB": 600 * 2**20, " in 3 GiB": 3 * 2**30}
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if " | " in line}
    names = {f"{network}{text}": (network, budget) for network in ("U-Net", "VGG-like") for text, budget in budgets.items()}
    stated = {name: cells for name, cells in rows.items() if name in names}
    assert len(stated) == len(rows) - 2  # headers and rule
    for name, cells in stated.items():
        default, kept = (costs[*names[name], heap] for heap in ("default", "keeps pages"))
        seconds = [f"{each['seconds']:.2f}" for each in (default, kept)]
        assert cells == [*seconds, *(f"{each['peak_bytes'] / 2**20:,.0f}" for each in (default, kept))]
    shares = [100 * each["system_seconds"] / each["seconds"] for each in results if each["steps"]["heap"] == "default"]
    assert f"{min(shares):.0f} to {max(shares):.0f} %" in section
