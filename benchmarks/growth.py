"""Growth of the peak with the height of the image, at a fixed width and strip height.

Plain PyTorch keeps every activation, so its peak grows with the height. Ours has a working set that depends on the strip height, and states
kept at strip starts. These grow with the height at a far smaller rate, and the planner keeps fewer of them under a budget. The projected
and the measured peak are printed side by side: sizes that cannot be measured rely on the projection.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.cases import MODELS, Case
from harness.figures import Line, growth_figure
from harness.gradcheck import TOLERANCE, Check, check_gradients
from harness.memory import MemoryReading, PlainNeed, measure_memory, misfit, predict_plain, probe_case
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from rich.progress import track


@dataclass(kw_only=True)
class Row:
    """One height."""

    height: int
    ours: MemoryReading | None = None
    plain: MemoryReading | None = None
    ours_note: str = ""
    plain_note: str = ""

    def cells(self) -> list[str]:
        """The row of the table."""
        cells = [f"{self.height:,}"]
        if self.ours is None or self.ours.plan is None:
            cells += [self.ours_note, "", "", "", ""]
        else:
            projected = self.ours.plan.projected_peak_bytes
            cells += [mib(self.ours.metered_bytes), mib(projected), f"{projected / self.ours.metered_bytes:.3f}"]
            cells += [mib(self.ours.process_bytes), self.ours.plan.strips]
        if self.plain is None:
            return [*cells, self.plain_note, "", ""]
        ratio = "-" if self.ours is None else f"{self.ours.metered_bytes / self.plain.metered_bytes:.3f}"
        return [*cells, mib(self.plain.metered_bytes), mib(self.plain.process_bytes), ratio]


HEADERS = (
    "height",
    "ours, measured MiB",
    "ours, projected MiB",
    "projected / measured",
    "ours, process MiB",
    "plan",
    "plain, measured MiB",
    "plain, process MiB",
    "ours / plain",
)


def measure_row(case: Case, need: PlainNeed, max_plain_gib: float | None) -> Row:
    """Measure one height, ours first."""
    row = Row(height=case.height)
    try:
        row.ours = call_in_process(measure_memory, case)
    except WorkerError as error:
        row.ours_note = f"{error.kind}: {error}".splitlines()[0]
    try:
        reason = misfit(need, max_plain_gib)
        if reason is not None:
            raise WorkerError("does not fit", reason)
        plain_case = replace(case, method="plain", strip_rows=None, budget_bytes=None)
        row.plain = call_in_process(measure_memory, plain_case)
    except WorkerError as error:
        row.plain_note = f"{error.kind}: {error}".splitlines()[0]
    return row


def lines(rows: list[Row]) -> list[Line]:
    """The curves of the plot."""
    ours = [(row.height, row.ours) for row in rows if row.ours is not None]
    plain = {row.height: row.plain.metered_bytes for row in rows if row.plain is not None}
    measured = {height: reading.metered_bytes for height, reading in ours}
    projected = {height: r.plan.projected_peak_bytes for height, r in ours if r.plan is not None}
    return [
        Line(label="plain, measured", style="s-", peaks_bytes=plain),
        Line(label="ours, measured", style="o-", peaks_bytes=measured),
        Line(label="ours, projected", style="x--", peaks_bytes=projected),
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Peak memory of a step against image height.")
    parser.add_argument("--model", choices=MODELS, default="vgg16")
    parser.add_argument("--heights", nargs="+", type=positive_int, default=[1024, 2048, 4096, 8192], help="pixels")
    parser.add_argument("--width", type=positive_int, default=512, help="pixels")
    parser.add_argument("--rows", type=positive_int, default=64, help="strip height, pixels of the input")
    parser.add_argument("--budget-mib", type=positive_int, help="a budget for the planner to thin states under (default: none)")
    parser.add_argument("--max-plain-gib", type=float, help="skip plain above this (default: what the machine has free)")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when the gradients are wrong or a height of ours has no result."""
    args = parse_arguments()
    console = Console()
    stem = result_stem(args.out, "growth")
    budget_bytes = None if args.budget_mib is None else args.budget_mib * 2**20
    first = Case(
        model=args.model,
        height=args.heights[0],
        width=args.width,
        method="ours",
        threads=args.threads,
        budget_bytes=budget_bytes,
        strip_rows=args.rows,
    )
    try:
        check: Check = call_in_process(check_gradients, first)
        probe = call_in_process(measure_memory, probe_case(first))
    except WorkerError as error:
        console.print(f"{error.kind}: {error}", markup=False)
        return 1
    if not check.passed:
        console.print(f"gradients are wrong: {check.worst_tensor} is off by {check.worst_error:.1e}, allowed {TOLERANCE:.0e}")
        return 1
    rows = []
    for height in track(args.heights, description="heights", console=console):
        case = replace(first, height=height)
        rows.append(measure_row(case, predict_plain(case, probe), args.max_plain_gib))
    title = f"{args.model} body, width {args.width} px, strips of {args.rows} rows, float32"
    table = Table(title=title, headers=HEADERS, rows=[row.cells() for row in rows])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "check": asdict(check),
        "rows": [asdict(row) for row in rows],
    }
    notes = (
        "Measured: live tensor storages above the step's start, parameter gradients included. "
        "Process: high-water mark of a fresh process above model and input; for ours with capture and planning."
    )
    written = write_results(stem, raw, [table], notes, growth_figure(lines(rows), args.width))
    console.print(table.terminal())
    console.print(written)
    return int(any(row.ours is None for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
