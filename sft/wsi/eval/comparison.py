"""Comparison of runs: one table of metrics over runs, or over the folds of a cross-validation, with means and standard deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.wsi.run.files import write_csv
from sft.wsi.run.overview import RunOverview

__all__ = ["MetricRow", "differing_settings", "markdown_table", "metric_rows", "write_metric_rows"]

_LEVELS = ("slides", "patients")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric of several runs.

    Attributes:
        split: folder of results that it is from, such as ``test``.
        level: ``slides`` or ``patients``.
        metric: its name.
        values: of each run; nan where a run does not have it.
        is_comparable: False if the runs have other tasks: a loss, or a metric of other classes, then has another meaning in each.
        pooled: of the predictions of all runs together; nan if they are not pooled.
    """

    split: str
    level: str
    metric: str
    values: tuple[float, ...]
    pooled: float = math.nan
    is_comparable: bool = True

    @property
    def mean(self) -> float:
        """Mean over the runs that have a value; nan for runs of different tasks."""
        values = self._known if self.is_comparable else []
        return statistics.fmean(values) if values else math.nan

    @property
    def sd(self) -> float:
        """Standard deviation of a sample over the runs that have a value; nan for fewer than two."""
        values = self._known if self.is_comparable else []
        return statistics.stdev(values) if len(values) > 1 else math.nan

    @property
    def _known(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain values for JSON."""
        numbers = {"mean": self.mean, "sd": self.sd, "pooled": self.pooled, **dict(zip(names, self.values, strict=True))}
        plain = {name: None if math.isnan(value) else value for name, value in numbers.items()}
        return {"split": self.split, "level": self.level, "metric": self.metric, **plain}


def metric_rows(
    runs: Sequence[RunOverview], splits: Sequence[str], pooled: Mapping[str, Mapping[str, Any]] | None = None
) -> list[MetricRow]:
    """Metrics of several runs, in the order of the first run that has them.

    Args:
        runs: the runs.
        splits: folders of results to compare, such as ``val`` and ``test``.
        pooled: metrics of the pooled predictions by split, as metrics.json has them. Default: `None`
    """
    rows = []
    is_comparable = len({_task_of(run) for run in runs}) == 1
    for split in splits:
        metrics = [next((results.metrics for results in run.results if results.name == split), {}) for run in runs]
        for level in _LEVELS:
            names = dict.fromkeys(name for each in metrics for name in each.get(level, {}))
            rows += [
                MetricRow(
                    split=split,
                    level=level,
                    metric=name,
                    values=tuple(_value(each, level, name) for each in metrics),
                    pooled=_value((pooled or {}).get(split, {}), level, name),
                    is_comparable=is_comparable,
                )
                for name in names
            ]
    return rows


def write_metric_rows(path: Path, names: Sequence[str], rows: Sequence[MetricRow]) -> None:
    """Write the table as CSV.

    Args:
        path: of the file.
        names: of the runs.
        rows: the metrics.

    Raises:
        RunFolderError: it cannot be written.
    """
    columns = ["split", "level", "metric", "mean", "sd", "pooled", *names]
    write_csv(path, columns, [["" if value is None else value for value in row.as_dict(names).values()] for row in rows])


def markdown_table(names: Sequence[str], rows: Sequence[MetricRow], *, has_pooled: bool) -> list[str]:
    """Lines of the table for a page.

    Args:
        names: of the runs.
        rows: metrics of one split.
        has_pooled: True to show pooled metrics.
    """
    columns = ["metric", "of", "mean", "sd", *names, *(["pooled"] if has_pooled else [])]
    lines = [f"| {' | '.join(_cell(name) for name in columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        numbers = [row.mean, row.sd, *row.values, *([row.pooled] if has_pooled else [])]
        lines.append(f"| {_cell(row.metric)} | {row.level} | {' | '.join(_number(value) for value in numbers)} |")
    return lines


def differing_settings(runs: Sequence[RunOverview]) -> dict[str, tuple[Any, ...]]:
    """Settings that differ between runs, with the value of each run; None for a run that does not have the setting."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: tuple(run.settings.get(name) for run in runs) for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _task_of(run: RunOverview) -> tuple[str, ...]:
    """Kind and classes of a run's task."""
    return tuple(str(run.settings.get(name)) for name in ("task.kind", "task.classes"))


def _value(metrics: Mapping[str, Any], level: str, name: str) -> float:
    value = metrics.get(level, {}).get(name, {}).get("value")
    return math.nan if value is None else float(value)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _cell(text: str) -> str:
    """Text of a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
