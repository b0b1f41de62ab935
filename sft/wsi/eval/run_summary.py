"""Top pages of a run folder: one consistent state of the run, written by every command that changes its results."""

from __future__ import annotations

from pathlib import Path

from sft.wsi.eval.report import draw_curves
from sft.wsi.eval.run_page import write_run_page
from sft.wsi.run.files import counted, write_text
from sft.wsi.run.overview import ResultsOverview, RunOverview, read_overview

__all__ = ["write_run_summary"]

#: Results that the page shows in full; it links the others.
_SHOWN = ("val", "test")


def write_run_summary(run: Path) -> RunOverview:
    """Write curves.png, summary.md and report.html of a run from the contents of its folder; the caller has the lock of its results.

    Raises:
        RunFolderError: a file cannot be written.
    """
    overview = read_overview(run)
    if overview.epochs:
        draw_curves(run / "curves.png", overview.epochs)
    write_text(run / "summary.md", "\n".join(_lines(overview)).rstrip() + "\n")
    write_run_page(overview)
    return overview


def _lines(overview: RunOverview) -> list[str]:
    lines = [f"# {overview.path.name}", "", _state_text(overview), ""]
    if overview.epochs:
        lines += ["![losses and metrics](curves.png)", ""]
    for results in overview.results:
        if results.name in _SHOWN:
            lines += [*_section(results, is_outdated=overview.is_outdated(results)), ""]
    others = [results for results in overview.results if results.name not in _SHOWN]
    if others:
        lines += ["## Other results", ""]
        lines += [f"- [{results.name}]({results.name}/summary.md){_weights_text(results)}" for results in others]
        lines += [""]
    if overview.num_filled:
        problem = counted(overview.num_filled, "tile could not be decoded and is", "tiles could not be decoded and are")
        lines += [f"{problem} background: [damaged.csv](damaged.csv)."]
    return lines


def _state_text(overview: RunOverview) -> str:
    num_epochs = len(overview.epochs)
    num_planned = overview.settings.get("train.epochs", num_epochs)
    done = f"{num_epochs}" if num_planned == num_epochs else f"{num_epochs} (train.epochs: {num_planned})"
    steps = overview.epochs[-1].get("step", 0) if overview.epochs else 0
    if overview.best is None:
        return f"Epochs: {done}; {counted(steps, 'optimizer step', 'optimizer steps')}."
    return (
        f"Best epoch: {overview.best.epoch} of {done}; {counted(steps, 'optimizer step', 'optimizer steps')}; "
        f"weights {overview.best.short_hash}."
    )


def _section(results: ResultsOverview, *, is_outdated: bool) -> list[str]:
    page = (results.path / "summary.md").read_text(encoding="utf-8") if (results.path / "summary.md").is_file() else f"# {results.name}\n"
    title, _, rest = page.replace("# ", "## ", 1).replace("](", f"]({results.name}/").partition("\n")
    if is_outdated:
        title += "\n\n**Not of the best model of this run, which training has improved since. Run evaluate again.**"
    return [f"{title}\n{rest}".rstrip()]


def _weights_text(results: ResultsOverview) -> str:
    return "" if results.weights is None else f": {results.weights.checkpoint} model, {results.weights.text}"
