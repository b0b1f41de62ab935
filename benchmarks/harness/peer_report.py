"""Records, tables, pictures and the page of the comparison of methods (`benchmarks/peers.py`)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness.cases import PlanNumbers, SegmentNumbers
from harness.peer_measure import PeerReading
from harness.peers import NETWORKS, PeerCase
from harness.report import Table, mib
from sft.common.atomic_files import atomic_write

__all__ = [
    "SITUATIONS",
    "PeerRecord",
    "Situation",
    "all_tables",
    "comparison_tables",
    "outcome_table",
    "page_tables",
    "peers_figure",
    "write_page",
]

_REGION = re.compile(r"(<!-- tables -->\n).*?(<!-- end of tables -->\n)", re.DOTALL)
_COLORS = {"plain": "#24292f", "checkpoint": "#8250df", "torch.compile": "#bf8700", "lightstream": "#1a7f37", "tiles": "#d0495c"}
_OWN_COLOR = "#1f6feb"


@dataclass(kw_only=True)
class PeerRecord:
    """Measurements of one method on one network and image."""

    case: PeerCase
    status: str = "ok"
    """`ok`, or the kind of a `WorkerError`."""
    note: str = ""
    """Message of a method without a reading."""
    reading: PeerReading | None = None
    seconds: list[float] = field(default_factory=list)
    """One for each round."""
    plain_seconds: list[float | None] = field(default_factory=list)
    """Those of plain PyTorch in the same round."""

    @property
    def label(self) -> str:
        """Name of the row."""
        return self.case.method

    @property
    def is_own(self) -> bool:
        """True for `sft` under a budget."""
        return self.case.method.startswith("sft")

    @property
    def median(self) -> float | None:
        """Median of the seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PeerRecord:
        """Read a record of a result."""
        reading = raw["reading"]
        if reading is not None and reading["plan"] is not None:
            plan = reading["plan"]
            segments = tuple(SegmentNumbers(**segment) for segment in plan["segments"])
            reading = {**reading, "plan": PlanNumbers(**{**plan, "segments": segments})}
        return cls(**{**raw, "case": PeerCase(**raw["case"]), "reading": None if reading is None else PeerReading(**reading)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A step in which methods are compared in float64."""

    text: str
    network: str
    size: int
    norms: str = "frozen"

    def case(self, method: str, threads: int, is_quick: bool) -> PeerCase:
        """The case of one method; a quick one has an eighth of the size, in which lightstream's tiles do not fit."""
        size = self.size // 8 if is_quick else self.size
        return PeerCase(
            network=self.network, height=size, width=size, method=method, threads=threads, channels=8, norms=self.norms, double=True
        )


SITUATIONS = (
    Situation(text="VGG-like, 1024²", network="VGG-like", size=1024),
    Situation(text="VGG-like, 1000²: no multiple of the stride", network="VGG-like", size=1000),
    Situation(text="VGG-like, BatchNorm in training", network="VGG-like", size=1024, norms="trained"),
    Situation(text="ResNet-18, BatchNorm in training", network="ResNet-18", size=2048, norms="trained"),
)


def _cells(records: Sequence[PeerRecord]) -> list[tuple[str, int]]:
    """Networks and sizes, by network."""
    names = list(NETWORKS)
    return sorted({(r.case.network, r.case.height) for r in records}, key=lambda cell: (names.index(cell[0]), cell[1]))


def best_own(record: PeerRecord, own: Sequence[PeerRecord]) -> PeerRecord | None:
    """The fastest plan of `sft` in at most the memory of another method; before any timing, the one with most memory."""
    if record.reading is None:
        return None
    most = record.reading.process_bytes
    fitting = [each for each in own if each.reading is not None and each.reading.process_bytes <= most]
    timed = [each for each in fitting if each.median is not None]
    if timed:
        return min(timed, key=lambda each: each.median or 0.0)
    return max(fitting, key=lambda each: each.reading.process_bytes if each.reading else 0, default=None)


def _scatter(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]" if seconds else ""


def _ratio(record: PeerRecord, own: PeerRecord) -> str:
    """Time of `sft` over the method's, each over plain's in the same round if plain ran."""

    def relative(each: PeerRecord) -> float | None:
        pairs = [(own, plain) for own, plain in zip(each.seconds, each.plain_seconds, strict=True) if plain is not None]
        return statistics.median(seconds / plain for seconds, plain in pairs) if pairs else each.median

    mine, theirs = relative(own), relative(record)
    return "" if mine is None or theirs is None else f"{mine / theirs:.2f}"


def _compact_row(record: PeerRecord, own: Sequence[PeerRecord]) -> list[str]:
    reading, best = record.reading, best_own(record, own)
    if reading is None:
        return [record.label, f"{record.status}: {record.note}", *[""] * 5]
    cells = [record.label, mib(reading.process_bytes), f"{reading.error:.1e}", _median(record)]
    if best is None or best.reading is None:
        return [*cells, "no smaller plan measured", "", ""]
    return [*cells, mib(best.reading.process_bytes), _median(best), _ratio(record, best)]


def _median(record: PeerRecord) -> str:
    return "" if record.median is None else f"{record.median:.2f}"


def _row(record: PeerRecord, own: Sequence[PeerRecord]) -> list[str]:
    reading = record.reading
    if reading is None:
        return [record.label, f"{record.status}: {record.note}", *[""] * 6]
    untrained = f"; {reading.num_untrained} of {reading.num_parameters} parameters untrained" if reading.num_untrained else ""
    cells = [
        record.label,
        mib(reading.process_bytes),
        "" if reading.metered_bytes is None else mib(reading.metered_bytes),
        f"{reading.error:.1e}{untrained}",
        _scatter(record.seconds),
    ]
    best = None if record.is_own else best_own(record, own)
    if best is None or best.reading is None:
        return [*cells, "" if record.is_own else "no smaller plan measured", "", ""]
    return [*cells, mib(best.reading.process_bytes), _scatter(best.seconds), _ratio(record, best)]


def comparison_tables(records: Sequence[PeerRecord]) -> list[Table]:
    """One table for each network and size."""
    headers = ("method", "process MiB", "metered MiB", "error", "step, s", "sft: process MiB", "sft: step, s", "sft / method")
    tables = []
    for network, size in _cells(records):
        here = [record for record in records if (record.case.network, record.case.height) == (network, size)]
        own = [record for record in here if record.is_own]
        order = [record for record in here if not record.is_own]
        order += sorted(own, key=lambda record: -record.reading.process_bytes if record.reading else 0)
        tables.append(Table(title=f"{network}, {size} x {size} px", headers=headers, rows=[_row(record, own) for record in order]))
    return tables


def outcome_table(outcomes: Mapping[str, Mapping[str, str]]) -> Table:
    """Correctness of each method in each situation."""
    methods = dict.fromkeys(method for row in outcomes.values() for method in row)
    rows = [[method, *(row.get(method, "") for row in outcomes.values())] for method in methods]
    return Table(title="Output, gradients and running statistics in float64, 8 channels", headers=("method", *outcomes), rows=rows)


def all_tables(records: Sequence[PeerRecord], outcomes: Mapping[str, Mapping[str, str]]) -> list[Table]:
    """Tables of a result."""
    return [*comparison_tables(records), *([outcome_table(outcomes)] if any(outcomes.values()) else [])]


def peers_figure(records: Sequence[PeerRecord]) -> Figure | None:
    """Seconds against process memory, one panel for each network and size; None before any timing."""
    timed = [record for record in records if record.median is not None and record.reading is not None]
    cells = _cells(timed)
    if not cells:
        return None
    columns = max(sum(1 for cell in cells if cell[0] == name) for name in NETWORKS)
    names = [name for name in NETWORKS if any(cell[0] == name for cell in cells)]
    figure = Figure(figsize=(4.2 * columns, 3.6 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), columns, squeeze=False)
    for row, name in enumerate(names):
        sizes = [size for network, size in cells if network == name]
        for column in range(columns):
            axes = grid[row][column]
            if column >= len(sizes):
                axes.set_axis_off()
                continue
            here = [r for r in timed if (r.case.network, r.case.height) == (name, sizes[column])]
            _panel(axes, here)
            axes.set_title(f"{name}, {sizes[column]}²", fontsize=10)
    return figure


def _panel(axes: Any, records: Sequence[PeerRecord]) -> None:
    points = [(record, record.reading.process_bytes / 2**20, record.median) for record in records if record.reading is not None]
    own = sorted((memory, seconds) for record, memory, seconds in points if record.is_own)
    if own:
        axes.plot([memory for memory, _ in own], [seconds for _, seconds in own], "o-", color=_OWN_COLOR, label="sft", zorder=3)
    labelled: set[str] = set()
    for record, memory, seconds in points:
        if record.is_own:
            continue
        kind = next(kind for kind in _COLORS if record.label.startswith(kind))
        axes.plot(memory, seconds, "s", color=_COLORS[kind], label=None if kind in labelled else kind, zorder=2)
        labelled.add(kind)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="memory of the process, MiB", ylabel="step, s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def page_tables(stem: str, records: Sequence[PeerRecord], outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """Tables of a page: medians of the other methods next to `sft`, with a link to the result."""
    headers = ("method", "process MiB", "error", "step, s", "sft: process MiB", "sft: step, s", "sft / method")
    tables = []
    for network, size in _cells(records):
        here = [record for record in records if (record.case.network, record.case.height) == (network, size)]
        own = [record for record in here if record.is_own]
        rows = [_compact_row(record, own) for record in here if not record.is_own]
        tables.append(Table(title=f"{network}, {size} x {size} px", headers=headers, rows=rows))
    if any(outcomes.values()):
        tables.append(outcome_table(outcomes))
    texts = [f"From [{stem}](../../benchmarks/results/{stem}.md), which also has ranges, metered bytes and all plans of `sft`."]
    texts.append(f"![Seconds of a step against memory of the process, for each network and size](../../benchmarks/results/{stem}.png)")
    for table in tables:
        texts += [f"### {table.title}", table.markdown()]
    return "\n\n".join(texts) + "\n"


def write_page(page: Path, stem: str, records: Sequence[PeerRecord], outcomes: Mapping[str, Mapping[str, str]]) -> None:
    """Replace the tables of a page."""
    text = page.read_text(encoding="utf-8")
    if not _REGION.search(text):
        raise SystemExit(f"{page.name} has no lines `<!-- tables -->` and `<!-- end of tables -->`")
    region = page_tables(stem, records, outcomes)
    with atomic_write(page) as temporary:
        temporary.write_text(_REGION.sub(lambda match: f"{match[1]}\n{region}\n{match[2]}", text), encoding="utf-8")
