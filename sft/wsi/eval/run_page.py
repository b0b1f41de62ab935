"""Page of a run as one HTML file: curves, metrics with intervals, figures, and maps on the slides.

Images are embedded, and the page has no script and no link to another site, so the file can be mailed and opened anywhere. All texts
(names of slides, classes, settings, error messages) are escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image as PillowImage

from sft.wsi.eval.heatmap_folder import read_heatmaps
from sft.wsi.eval.report import MIN_INTERVAL_PATIENTS
from sft.wsi.run.files import counted, write_text
from sft.wsi.run.overview import ResultsOverview, RunOverview, read_rows
from sft.wsi.run.results import as_weights_id

__all__ = ["PAGE_NAME", "write_run_page"]

PAGE_NAME = "report.html"
#: Maps on the page, and their width: a page of megabytes is still opened by every browser.
_MAX_MAPS, _MAP_PX = 40, 960
_MAX_ROWS = 200
_LEVELS = ("slides", "patients")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: .8rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; vertical-align: top; max-width: 100%; }
figcaption, .note { color: #555; font-size: .9em; }
.warning { border-left: 4px solid #c60; padding-left: .8rem; }
</style>
</head>
<body>
$body
</body>
</html>
""")


def write_run_page(overview: RunOverview) -> Path:
    """Write report.html of a run; the caller has the lock of its results.

    Returns:
        Path of the page.

    Raises:
        RunFolderError: it cannot be written.
    """
    path = overview.path / PAGE_NAME
    parts = [
        f"<h1>{escape(overview.path.name)}</h1>",
        *_state(overview),
        *_figure(overview.path / "curves.png", "Losses and metrics of the validation"),
    ]
    for results in overview.results:
        parts += _results(overview, results)
    parts += [*_maps(overview), *_omitted(overview), *_settings(overview)]
    write_text(path, _PAGE.substitute(title=escape(overview.path.name), body="\n".join(parts)))
    return path


def _state(overview: RunOverview) -> list[str]:
    epochs, num_planned = len(overview.epochs), overview.settings.get("train.epochs", len(overview.epochs))
    steps = overview.epochs[-1].get("step", 0) if overview.epochs else 0
    rows = [("epochs", f"{epochs} of {num_planned}"), ("optimizer steps", str(steps))]
    if overview.best is not None:
        rows.append(("best model", overview.best.text))
    for name in ("task.kind", "model.encoder", "model.backbone", "model.head"):
        if name in overview.settings:
            rows.append((name, str(overview.settings[name])))
    return _table((), rows)


def _results(overview: RunOverview, results: ResultsOverview) -> list[str]:
    parts = [f"<h2>{escape(results.name)}</h2>"]
    if results.weights is not None:
        parts.append(f'<p class="note">{escape(results.weights.checkpoint)} model, {escape(results.weights.text)}</p>')
    if overview.is_outdated(results):
        parts.append('<p class="warning">Not of the best model of this run, which training has improved since. Run evaluate again.</p>')
    names = list(dict.fromkeys(name for level in _LEVELS for name in results.metrics.get(level, {})))
    if names:
        rows = [(name, *(_estimate(results.metrics.get(level, {}).get(name)) for level in _LEVELS)) for name in names]
        parts += _table(("metric", *_LEVELS), rows)
        parts.append(f'<p class="note">{escape(_interval_note(results))}</p>')
    else:
        parts.append("<p>No metrics: no slide has a target.</p>")
    for name, caption in (("roc.png", "ROC"), ("confusion.png", "Confusion matrix")):
        parts += _figure(results.path / name, caption)
    return parts + _predictions(results)


def _interval_note(results: ResultsOverview) -> str:
    estimates = [estimate for level in _LEVELS for estimate in results.metrics.get(level, {}).values()]
    if any(estimate.get("num_patients", MIN_INTERVAL_PATIENTS) < MIN_INTERVAL_PATIENTS for estimate in estimates):
        return f"No intervals: they need at least {MIN_INTERVAL_PATIENTS} patients."
    if all(estimate.get("low") is None for estimate in estimates):
        return "No intervals were computed, or the slides do not tell them."
    return "In brackets 95 % intervals: percentiles of a bootstrap that draws patients with all of their slides."


def _estimate(estimate: Any) -> str:
    if not isinstance(estimate, dict) or estimate.get("value") is None:
        return "-"
    value, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    if estimate.get("num_patients", MIN_INTERVAL_PATIENTS) < MIN_INTERVAL_PATIENTS:
        return f"{value:.4f} (n={estimate['num_patients']}: no interval)"
    if low is None or high is None:
        return f"{value:.4f}"
    return f"{value:.4f} [{low:.3f}, {high:.3f}]"


def _predictions(results: ResultsOverview) -> list[str]:
    rows = read_rows(results.path / "predictions.csv")
    if not rows:
        return []
    shown = [[_short(cell) for cell in row.values()] for row in rows[:_MAX_ROWS]]
    left_out = f"; the first {_MAX_ROWS} are shown, predictions.csv has all" if len(rows) > _MAX_ROWS else ""
    summary = f"<summary>{escape(counted(len(rows), 'prediction', 'predictions') + left_out)}</summary>"
    return ["<details>", summary, *_table(list(rows[0]), shown), "</details>"]


def _short(cell: str) -> str:
    """A number with four digits; other texts as they are."""
    with suppress(ValueError):
        number = float(cell)
        if math.isnan(number):
            return "-"
        return cell if cell.lstrip("-").isdigit() or not math.isfinite(number) else f"{number:.4g}"
    return cell


def _maps(overview: RunOverview) -> list[str]:
    """Pictures of the heatmaps, each a thumbnail of its slide and the map on it."""
    entries = [
        (folder.name, output, folder / name, entry)
        for folder in sorted(path.parent for path in (overview.path / "heatmaps").glob("*/heatmap.json"))
        for output, entry in read_heatmaps(folder).items()
        for name in entry.get("files", [])
        if name.endswith(".png") and name.startswith(("map-", "saliency-")) and Path(name).name == name
    ]
    if not entries:
        return ["<h2>Maps</h2>", "<p>None yet: <code>python -m sft.wsi heatmap</code> draws them.</p>"]
    parts = ["<h2>Maps</h2>"]
    if len(entries) > _MAX_MAPS:
        parts.append(f'<p class="note">The first {_MAX_MAPS} of {len(entries)}; the others are in the folder heatmaps.</p>')
    for slide, output, path, entry in entries[:_MAX_MAPS]:
        is_map = path.name.startswith("map-")
        caption_text = str(entry.get("note") or f"score {_score(entry):.3f}") if is_map else "gradient of the score"
        caption = f"{slide}, {output}: {caption_text}"
        with suppress(KeyError, TypeError, ValueError):
            weights = as_weights_id(entry["weights"])
            caption += f"; {weights.checkpoint} model, {weights.text}"
            if overview.best is not None and weights.checkpoint == "best" and weights.sha256 != overview.best.sha256:
                caption += " (not the best model any more)"
        parts += _figure(path, caption, width_px=_MAP_PX)
    return parts


def _score(entry: Mapping[str, Any]) -> float:
    """Score of a map; nan in a file that does not have it."""
    score = entry.get("score")
    return float(score) if isinstance(score, (int, float)) else math.nan


def _omitted(overview: RunOverview) -> list[str]:
    parts = []
    if overview.failed:
        parts += [f"<h2>Left out: {counted(len(overview.failed), 'slide', 'slides')}</h2>"]
        parts += _table(("slide", "problem"), list(overview.failed.items())[:_MAX_ROWS])
    if overview.num_filled:
        problem = counted(overview.num_filled, "tile could not be decoded and is", "tiles could not be decoded and are")
        parts.append(f"<p>{problem} background: damaged.csv.</p>")
    return parts


def _settings(overview: RunOverview) -> list[str]:
    if not overview.settings:
        return []
    rows = [(name, str(value)) for name, value in overview.settings.items()]
    return ["<details>", "<summary>Settings</summary>", *_table(("setting", "value"), rows), "</details>"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["<table>"]
    if header:
        lines.append(f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>")
    for name, *cells in rows:
        first = "td" if header else "th"
        lines.append(f"<tr><{first}>{escape(name)}</{first}>{''.join(f'<td class=number>{escape(cell)}</td>' for cell in cells)}</tr>")
    return [*lines, "</table>"]


def _figure(path: Path, caption: str, *, width_px: int | None = None) -> list[str]:
    """An embedded picture; nothing for a file that is missing or no picture."""
    try:
        data = path.read_bytes()
        with PillowImage.open(io.BytesIO(data)) as picture:
            kind = (picture.format or "").lower()
            if width_px is not None and picture.width > width_px:
                small = picture.convert("RGB").resize((width_px, max(1, round(picture.height * width_px / picture.width))))
                stream = io.BytesIO()
                small.save(stream, "JPEG", quality=85)
                data, kind = stream.getvalue(), "jpeg"
    except (OSError, ValueError, PillowImage.DecompressionBombError):
        return []
    if kind not in ("png", "jpeg"):
        return []
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    text = escape(caption)
    return [f'<figure><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>']
