"""Overview of a run, read from its folder: epochs, best weights, results and the weights that each of them is of."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.wsi.run.results import read_weights_id
from sft.wsi.train.checkpoint import CheckpointFolder, WeightsId

__all__ = ["ResultsOverview", "RunOverview", "read_overview", "read_rows"]

#: Results of the run's own splits come first, in this order.
_FIRST = ("val", "test")
_LEVELS = ("slides", "patients")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsOverview:
    """One folder of results.

    Attributes:
        path: of the folder.
        weights: that they are of; None for results of an earlier version.
        metrics: contents of metrics.json.
    """

    path: Path
    weights: WeightsId | None
    metrics: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """State of a run.

    Attributes:
        path: of the run folder.
        settings: of the run, as ``group.name``; empty for a run of an earlier version.
        epochs: rows of metrics.csv.
        best: best weights; None before the first epoch ends.
        results: folders of results, those of the run's own splits first.
        failed: omitted slides with their problems.
        num_filled: number of damaged tiles that are background.
    """

    path: Path
    settings: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...]
    best: WeightsId | None
    results: tuple[ResultsOverview, ...]
    failed: Mapping[str, str]
    num_filled: int

    def is_outdated(self, results: ResultsOverview) -> bool:
        """True if results are of a best model that training has improved since."""
        weights = results.weights
        return weights is not None and weights.checkpoint == "best" and self.best is not None and weights.sha256 != self.best.sha256


def read_overview(run: Path) -> RunOverview:
    """Overview of a run folder; what is missing or damaged is left out."""
    newest = CheckpointFolder(run / "checkpoints").newest_state("best")
    folders = [path.parent for path in run.glob("*/metrics.json") if not path.parent.name.startswith(".")]
    order = {name: number for number, name in enumerate(_FIRST)}
    folders.sort(key=lambda path: (order.get(path.name, len(order)), path.name))
    results = []
    for folder in folders:
        with suppress(OSError, ValueError, RecursionError):
            metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
            results.append(ResultsOverview(path=folder, weights=read_weights_id(folder), metrics=_whole_metrics(metrics)))
    return RunOverview(
        path=run,
        settings={} if newest is None else newest[1].get("settings", {}),
        epochs=tuple({name: _number(cell) for name, cell in row.items() if cell} for row in read_rows(run / "metrics.csv")),
        best=None if newest is None else newest[0],
        results=tuple(results),
        failed={row.get("slide", ""): row.get("problem", "") for row in read_rows(run / "failed.csv")},
        num_filled=len(read_rows(run / "damaged.csv")),
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Complete rows of a CSV file; none for a file that cannot be read."""
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        return [dict(zip(header, row, strict=True)) for row in reader if len(row) == len(header)]
    return []


def _whole_metrics(content: Any) -> dict[str, Any]:
    """Contents of metrics.json without parts of another structure: estimates with numbers, by level and name."""
    levels = content if isinstance(content, dict) else {}
    whole: dict[str, Any] = {}
    for level, estimates in levels.items():
        if level not in _LEVELS:
            whole[level] = estimates
        elif isinstance(estimates, dict):
            whole[level] = {name: estimate for name, estimate in estimates.items() if _is_estimate(estimate)}
    return whole


def _is_estimate(estimate: Any) -> bool:
    return isinstance(estimate, dict) and all(
        isinstance(estimate.get(name), (int, float, type(None))) for name in ("value", "low", "high", "num_patients")
    )


def _number(cell: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell
