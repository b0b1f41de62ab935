"""Results as files: raw JSON, a Markdown table and a plot under one dated name, each written to a temporary file and renamed.

The JSON holds every round and enough of the environment to judge and repeat the run; the table and the plot are views
of it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.markup
import rich.table
from matplotlib.figure import Figure

from harness.provenance import bare_arguments, commit
from sft.common.atomic_files import atomic_write

__all__ = ["Table", "add_common_arguments", "environment", "mib", "positive_int", "result_stem", "write_results"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that prints on a terminal and in Markdown."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def terminal(self) -> rich.table.Table:
        """The table for a rich console."""
        table = rich.table.Table(*self.headers, title=self.title)
        for row in self.rows:
            table.add_row(*(rich.markup.escape(cell) for cell in row))
        return table


def mib(num_bytes: float) -> str:
    """Bytes as a cell in MiB."""
    return f"{num_bytes / 2**20:,.1f}"


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every script has."""
    default_out = Path(__file__).resolve().parents[1] / "results"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--out", type=Path, default=default_out, help="folder for the results (default: benchmarks/results)")
    parser.add_argument("--threads", type=positive_int, default=cores, help="threads that torch may use (default: all cores)")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _command() -> str:
    script = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[2])
    return shlex.join(["python", str(script), *bare_arguments()])


def environment(threads: int) -> dict[str, str | int]:
    """Environment of the measurements."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": _command(),
        "commit": commit(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
    }


def result_stem(folder: Path, theme: str) -> Path:
    """Path of a result without its suffix: `<folder>/<date>-cpu-<theme>`."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.date.today().isoformat()}-cpu-{theme}"


def write_results(stem: Path, raw: dict[str, Any], tables: Sequence[Table], notes: str, figure: Figure | None) -> str:
    """Write `<stem>.json`, `<stem>.md` and, with a figure, `<stem>.png`; returns their names for the terminal."""
    with atomic_write(stem.with_name(stem.name + ".json")) as temporary:
        temporary.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    sections = [f"# {stem.name}", notes]
    for table in tables:
        sections += [f"## {table.title}", table.markdown()]
    picture = stem.with_name(stem.name + ".png")
    if figure is None:
        picture.unlink(missing_ok=True)
    else:
        with atomic_write(picture) as temporary:
            figure.savefig(temporary, dpi=150)
        sections.append(f"![plot]({picture.name})")
    sections.append("## Environment")
    sections.append("\n".join(f"- {key}: {value}" for key, value in raw["environment"].items()))
    with atomic_write(stem.with_name(stem.name + ".md")) as temporary:
        temporary.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return f"written: {stem.name}.json, .md" + (", .png" if figure is not None else "")
