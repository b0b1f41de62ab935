"""Time and memory of one training step: ours and checkpoint_sequential against plain PyTorch.

For each model and size, plain's memory is measured first. It determines our budget: the resident bytes and a share of plain's activation
peak. Then follow, for each method, the gradient check, its memory and, only if the check passed, its time in rounds paired with plain. The
table shows the median of the per-round ratios with the smallest and the largest; the JSON has every round.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.cases import METHODS, MODELS, Case
from harness.figures import Point, tradeoff_figure
from harness.gradcheck import TOLERANCE, Check, check_gradients
from harness.memory import MemoryReading, PlainNeed, measure_memory, misfit, predict_plain, probe_case
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import Round, WorkerError, call_in_process, run_pairs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NUM_WARMUPS = 1


@dataclass(kw_only=True)
class Record:
    """Measurements of one method on one model and size, filled one by one."""

    case: Case
    status: str = "ok"
    """`ok`, `does not fit`, `no plan`, `check failed` or `failed`."""
    note: str = ""
    """Reason of a status other than ok; the prediction, if plain was not run."""
    check: Check | None = None
    memory: MemoryReading | None = None
    rounds: list[Round] = field(default_factory=list)
    """The warm-up first."""

    @property
    def timed(self) -> list[Round]:
        """The rounds that count."""
        return self.rounds[NUM_WARMUPS:]

    @property
    def ratios(self) -> list[float]:
        """Time over plain's, a round each."""
        return [r.ratio for r in self.timed if r.ratio is not None]

    def to_json(self) -> dict[str, Any]:
        """All fields, with the summary of the table."""
        ratios = self.ratios
        summary = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)} if ratios else None
        return {**asdict(self), "time_ratio": summary}


class Bench:
    """All measurements: loops over models, sizes and methods, records and progress bar."""

    def __init__(self, args: argparse.Namespace, progress: Progress, stem: Path) -> None:
        self.args = args
        self.progress = progress
        self.stem = stem
        self.records: list[Record] = []
        self.written = "nothing written"
        self.others = args.methods
        jobs = 2 + len(self.others) * (2 + args.rounds + NUM_WARMUPS)
        self.bar = progress.add_task("start", total=len(args.models) * len(args.sizes) * jobs)

    def run(self) -> None:
        """Measure all requested cases; the results are written after every model and size."""
        for model in self.args.models:
            for size in self.args.sizes:
                args = self.args
                plain = Case(model=model, height=size, width=size, method="plain", threads=args.threads, fraction=args.fraction)
                self.measure_size(plain)
                self.write()

    def measure_size(self, plain_case: Case) -> None:
        """All methods on one model and size."""
        goal = self.progress.tasks[self.bar].completed
        plain, budget_bytes = self.measure_plain(plain_case)
        self.records.append(plain)
        goal += 2
        for method in self.others:
            self.progress.update(self.bar, completed=goal)
            record = Record(case=replace(plain_case, method=method))
            self.records.append(record)
            try:
                if budget_bytes is None:
                    raise WorkerError("failed", "plain's memory is unknown: nothing to compare with, and no budget")
                record.case = replace(record.case, budget_bytes=budget_bytes if method == "ours" else None)
                self.measure_method(record, plain_case if plain.status == "ok" else None)
            except WorkerError as error:
                record.status, record.note = error.kind, str(error)
            goal += 2 + self.args.rounds + NUM_WARMUPS
        self.progress.update(self.bar, completed=goal)

    def measure_plain(self, case: Case) -> tuple[Record, int | None]:
        """Plain's memory, and from it our budget; predicted from a small probe where plain does not fit."""
        record = Record(case=case)
        need: PlainNeed | None = None
        try:
            self.say(case, "probe")
            need = predict_plain(case, call_in_process(measure_memory, probe_case(case)))
            reason = misfit(need, self.args.max_plain_gib)
            if reason is not None:
                raise WorkerError("does not fit", reason)
            self.progress.advance(self.bar)
            self.say(case, "memory")
            record.memory = call_in_process(measure_memory, case)
            need = record.memory.need
        except WorkerError as error:
            record.status, record.note = error.kind, str(error)
        return record, None if need is None else need.budget_bytes(self.args.fraction)

    def measure_method(self, record: Record, plain: Case | None) -> None:
        """Check, memory and paired rounds of one method."""
        case = record.case
        self.say(case, "gradient check")
        record.check = call_in_process(check_gradients, case)
        if not record.check.passed:
            record.status = "check failed"
            record.note = f"{record.check.worst_tensor} is off by {record.check.worst_error:.1e}, allowed {TOLERANCE:.0e}"
            return
        self.progress.advance(self.bar)
        self.say(case, "memory")
        record.memory = call_in_process(measure_memory, case)
        self.progress.advance(self.bar)
        self.say(case, "rounds")
        num_rounds = self.args.rounds + NUM_WARMUPS
        record.rounds = run_pairs(plain, case, num_rounds, lambda: self.progress.advance(self.bar))

    def say(self, case: Case, what: str) -> None:
        """Show the progress."""
        self.progress.update(self.bar, description=f"{case.model} {case.height} x {case.width} {case.method}: {what}")

    def table(self) -> Table:
        """One row a record."""
        headers = ("model", "size", "method", "activations MiB", "process MiB", "step s", "time ratio", "FLOPs", "plan")
        rows = [_row(record, self.plain_memory(record), self.seconds(record)) for record in self.records]
        return Table(title="One training step against plain PyTorch", headers=headers, rows=rows)

    def plain_memory(self, record: Record) -> MemoryReading | None:
        """Plain's reading on the same model and size; None where it does not fit."""
        plain = replace(record.case, method="plain", budget_bytes=None)
        return next((r.memory for r in self.records if r.case == plain), None)

    def seconds(self, record: Record) -> list[float]:
        """The method's step times; plain's come from every pair on the same model and size."""
        if record.case.method != "plain":
            return [r.other_seconds for r in record.timed]
        place = (record.case.model, record.case.height)
        partners = [other for other in self.records if (other.case.model, other.case.height) == place]
        return [r.plain_seconds for other in partners for r in other.timed if r.plain_seconds is not None]

    def problems(self) -> list[str]:
        """One line with the reason for every record without a full result."""
        return [
            f"{r.case.model} {r.case.height} x {r.case.width} {r.case.method}: {r.status}: {r.note.splitlines()[0]}"
            for r in self.records
            if r.note
        ]

    def points(self) -> list[Point]:
        """Points of the plot: records with both ratios."""
        points = []
        for record in self.records:
            plain = self.plain_memory(record)
            if record.memory is not None and plain is not None and record.ratios:
                points.append(
                    Point(
                        model=record.case.model,
                        size=record.case.height,
                        method=record.case.method,
                        memory_ratio=record.memory.activation_bytes / plain.activation_bytes,
                        time_ratios=tuple(record.ratios),
                    )
                )
        return points

    def write(self) -> None:
        """Save the results so far."""
        settings = {name: value for name, value in vars(self.args).items() if name != "out"}
        raw = {
            "environment": environment(self.args.threads),
            "settings": settings,
            "records": [record.to_json() for record in self.records],
        }
        notes = (
            "Body, batch 1, float32, norm statistics frozen; in brackets the share of plain's. "
            f"`ours` may use {self.args.fraction:g} of plain's activation peak. "
            f"Time ratio: median [least, most] of {self.args.rounds} rounds in which plain and the method took turns. "
            "Activations: metered peak without the parameters' gradients. "
            "Process: high-water mark of a fresh process above model and input. "
            f"Every method timed here passed the gradient check in float64 to {TOLERANCE:.0e}."
        )
        notes = "\n".join([notes, "", *(f"- {problem}" for problem in self.problems())]).strip()
        points = self.points()
        self.written = write_results(self.stem, raw, [self.table()], notes, tradeoff_figure(points) if points else None)


def _row(record: Record, plain: MemoryReading | None, seconds: list[float]) -> list[str]:
    case, memory, ratios = record.case, record.memory, record.ratios
    cells = [case.model, f"{case.height}²", case.method]
    if record.status != "ok" or memory is None:
        return [*cells, record.status, "", "", "", "", ""]
    cells.append(_with_ratio(memory.activation_bytes, plain.activation_bytes if plain else None))
    cells.append(_with_ratio(memory.process_bytes, plain.process_bytes if plain else None))
    cells.append(f"{statistics.median(seconds):.2f}" if seconds else "")
    cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else "")
    cells.append(f"{memory.flops / plain.flops:.3f}" if plain else f"{memory.flops / 1e12:.2f}e12")
    cells.append(memory.plan.strips if memory.plan else "")
    return cells


def _with_ratio(num_bytes: int, plain_bytes: int | None) -> str:
    return f"{mib(num_bytes)} ({num_bytes / plain_bytes:.2f})" if plain_bytes else mib(num_bytes)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {value}")
    return value


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time and memory against plain PyTorch, in paired runs.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", type=positive_int, default=[1024, 2048], help="sides of the images, pixels")
    parser.add_argument("--methods", nargs="+", choices=METHODS[1:], default=list(METHODS[1:]), help="compared with plain")
    parser.add_argument("--rounds", type=positive_int, default=5, help=f"rounds that count, after {NUM_WARMUPS} warm-up")
    parser.add_argument("--fraction", type=_fraction, default=0.2, help="our budget as a share of plain's activation peak")
    parser.add_argument("--max-plain-gib", type=float, help="skip plain above this (default: what the machine has free)")
    parser.add_argument("--quick", action="store_true", help="one small size and two rounds, to try the script")
    add_common_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = [384], 2
    return args


def main() -> int:
    """Run the benchmark; 1 when a method failed or its gradients were wrong."""
    args = parse_arguments()
    console = Console()
    stem = result_stem(args.out, "step-quick" if args.quick else "step")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bench = Bench(args, progress, stem)
        bench.run()
    console.print(bench.table().terminal())
    for problem in bench.problems():
        console.print(problem, markup=False)
    console.print(bench.written)
    return int(any(record.status in ("failed", "check failed") for record in bench.records))


if __name__ == "__main__":
    raise SystemExit(main())
