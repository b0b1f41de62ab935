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
    assert rows
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
