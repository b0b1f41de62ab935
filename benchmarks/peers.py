"""Comparison of methods for large images at equal memory of the process: PyTorch's own, lightstream, tiles of the SFT paper, and `sft`.

First, memory and error of each method, one process each; then `sft` under budgets that lead to the memory of each; then seconds, in rounds
in which all methods take turns. `--resume` keeps the measurements of an earlier result and adds what is missing, so that memory can be
measured on a busy machine and time on a quiet one. Needs the `peers` extra for lightstream.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from harness.memory import available_bytes
from harness.peer_measure import REFERENCES, Question, check_outcome, measure_peer, save_reference, start_peer
from harness.peer_report import SITUATIONS, PeerRecord, all_tables, peers_figure, write_page
from harness.peers import METHODS, NETWORKS, PeerCase
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from harness.workers import StepWorker, WorkerError, call_in_process
from rich.console import Console

_ROOT = Path(__file__).resolve().parents[1]
#: Reference methods.
_OWN = ("sft", "sft, channels last")
#: Methods that run the same operators as another one.
_UNCHECKED = ("plain", "plain, channels last", "torch.compile, budget 1.0", "torch.compile, budget 0.5", "sft, channels last")
#: Budgets of `sft` are chosen for each memory of another method that differs by more than this share.
_DISTINCT = 0.05
#: Trials to stay below the memory of another method.
_MOST_TRIALS = 2
#: Budget of `sft` for the float64 step.
_REFERENCE_BUDGET = 4 * 2**30
#: Share of the free memory that one process may allocate.
_MEMORY_SHARE = 0.8


class Bench:
    """Records of all cases, and the files that show them."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.records: list[PeerRecord] = []
        self.outcomes: dict[str, dict[str, str]] = {}
        self.references: dict[str, str] = {}
        free_bytes = available_bytes()
        self.limit_bytes = None if free_bytes is None else round(_MEMORY_SHARE * free_bytes)
        self.stem = result_stem(args.out, "peers-quick" if args.quick else "peers")
        if args.resume is not None:
            raw = json.loads(args.resume.read_text())
            self.records = [PeerRecord.from_json(record) for record in raw["records"]]
            self.outcomes = raw["outcomes"]
            self.references = raw.get("references", {})

    def cells(self) -> Iterator[PeerCase]:
        """Plain cases of all networks and sizes, from the smallest."""
        for size in sorted(self.args.sizes):
            for network in self.args.networks:
                yield PeerCase(
                    network=network, height=size, width=size, method="plain", threads=self.args.threads, limit_bytes=self.limit_bytes
                )

    def of(self, cell: PeerCase) -> list[PeerRecord]:
        """Records of one network and size."""
        return [record for record in self.records if (record.case.network, record.case.height) == (cell.network, cell.height)]

    def check(self) -> None:
        """Compare every method with plain PyTorch in float64, in each situation."""
        for situation in SITUATIONS:
            row = self.outcomes.setdefault(situation.text, {})
            for method in self.args.methods:
                if method in _UNCHECKED or method in row:
                    continue
                case = situation.case(method, self.args.threads, self.args.quick)
                self.console.print("check", situation.text, method, markup=False)
                row[method] = call_in_process(check_outcome, case).text
            self.write()

    def measure(self, cell: PeerCase, folder: Path) -> None:
        """Memory and error of all methods, then of `sft` in the memory of each."""
        wanted = [name for name in self.args.methods if name not in _OWN and all(r.case.method != name for r in self.of(cell))]
        owned = any(record.case.method in _OWN for record in self.of(cell))
        if not wanted and owned:
            return
        reference = folder / f"{cell.network}-{cell.height}.pt"
        self.save_reference(cell, reference)
        for name in wanted:
            self.records.append(self.read(replace(cell, method=name, budget_bytes=self._tiles_budget(cell)), reference))
            self.write()
        if not owned:
            self.measure_own(cell, reference)
        reference.unlink()

    def save_reference(self, cell: PeerCase, reference: Path) -> None:
        """Take the float64 step by the first method that fits, and note which one it was."""
        for method in REFERENCES:
            self.console.print("reference", cell.network, cell.height, method, markup=False)
            case = replace(cell, method=method, budget_bytes=_REFERENCE_BUDGET)
            try:
                call_in_process(save_reference, Question(case=case, reference=reference))
            except WorkerError as error:
                if error.kind != "does not fit" or method == REFERENCES[-1]:
                    raise
            else:
                self.references[f"{cell.network}, {cell.height}"] = method
                return

    def _tiles_budget(self, cell: PeerCase) -> int:
        """Budget of the paper's tiles: what is resident, old and new gradients, and a fifth of plain's memory."""
        readings = [record.reading for record in self.of(cell) if record.reading is not None]
        if not readings:
            return 2**30
        most = max(reading.process_bytes for reading in readings)
        return 3 * readings[0].resident_bytes + most // 5

    def read(self, case: PeerCase, reference: Path) -> PeerRecord:
        """Measure one case in a process of its own."""
        question = Question(case=case, reference=reference)
        self.console.print("memory", case.network, case.height, case.method, markup=False)
        try:
            return PeerRecord(case=case, reading=call_in_process(measure_peer, question, timeout_seconds=self.args.timeout))
        except WorkerError as error:
            return PeerRecord(case=case, status=error.kind, note=str(error).splitlines()[0])

    def measure_own(self, cell: PeerCase, reference: Path) -> None:
        """`sft` in at most the process memory of each other method."""
        readings = {r.case.method: r.reading for r in self.of(cell) if r.reading is not None}
        for method in _OWN:
            if method not in self.args.methods:
                continue
            targets = sorted(
                (reading.process_bytes, reading.resident_bytes)
                for name, reading in readings.items()
                if ("channels last" in name) == ("channels last" in method)
            )
            overhead, last = 0, 0.0
            for process_bytes, resident_bytes in reversed(targets):
                if last and process_bytes > (1 - _DISTINCT) * last:
                    continue
                last = process_bytes
                overhead = self._fit(replace(cell, method=method), process_bytes, resident_bytes, overhead, reference)

    def _fit(self, case: PeerCase, process_bytes: int, resident_bytes: int, overhead: int, reference: Path) -> int:
        """Lower the budget until the process stays below `process_bytes`; returns the process's bytes above the budget."""
        for _ in range(_MOST_TRIALS):
            budget_bytes = process_bytes + resident_bytes - overhead
            if budget_bytes <= resident_bytes:
                return overhead
            record = self.read(replace(case, budget_bytes=budget_bytes), reference)
            if record.reading is None or record.reading.plan is None:
                if not any(r.status == "no plan" for r in self.of(case)):
                    self.records.append(record)
                return overhead
            same = [r for r in self.of(case) if r.reading is not None and r.case.method == case.method and _same_plan(r, record)]
            if not same:
                self.records.append(record)
                self.write()
            excess = record.reading.process_bytes - process_bytes
            if excess <= 0:
                return overhead
            overhead += excess
        return overhead

    def time_cell(self, cell: PeerCase, deadline: float) -> None:
        """Add rounds in which the methods take turns, in groups that fit into memory together."""
        ready = [r for r in self.of(cell) if r.status == "ok" and r.reading is not None and r.case.method in self.args.methods]
        anchor = next((record for record in ready if record.case.method == "plain"), None)
        rest = [record for record in ready if record is not anchor]
        if not rest:
            return
        num_groups = -(-len(rest) // (self.args.workers - 1))
        groups = [rest[number::num_groups] for number in range(num_groups)]
        for number, group in enumerate(groups):
            now = time.monotonic()
            self.time_group(anchor, group, now + (deadline - now) / (num_groups - number))

    def time_group(self, anchor: PeerRecord | None, group: Sequence[PeerRecord], deadline: float) -> None:
        """Rounds of plain PyTorch and some methods; at least one."""
        members: list[PeerRecord] = []
        with ExitStack() as stack:
            workers = []
            for record in [*([anchor] if anchor else []), *group]:
                self.console.print("start", record.case.network, record.case.height, record.label, markup=False)
                try:
                    workers.append(stack.enter_context(StepWorker(replace(record.case, limit_bytes=None), start_peer)))
                except WorkerError as error:  # it has its memory; the other methods continue
                    record.note = f"not timed: {error.kind}: {str(error).splitlines()[0]}"
                    continue
                members.append(record)
            has_anchor = anchor is not None and anchor in members
            for number in range(self.args.rounds):
                started = time.monotonic()
                turns = [(index + number) % len(members) for index in range(len(members))]
                seconds = {index: workers[index].step() for index in turns}
                for index, record in enumerate(members):
                    record.seconds.append(seconds[index])
                    record.plain_seconds.append(seconds[0] if has_anchor else None)
                if 2 * time.monotonic() - started > deadline:  # the next round would end later
                    break
        self.write()

    def time_all(self) -> None:
        """Time all cells within a time limit; larger images get more of it."""
        cells = list(self.cells())
        ends = time.monotonic() + 60 * self.args.minutes
        for number, cell in enumerate(cells):
            now = time.monotonic()
            pixels = [each.height * each.width for each in cells[number:]]
            self.time_cell(cell, now + (ends - now) * pixels[0] / sum(pixels))

    def tables(self) -> list[Table]:
        """Tables of the result."""
        return all_tables(self.records, self.outcomes)

    def write(self) -> None:
        """Write the result so far."""
        settings = {name: value for name, value in vars(self.args).items() if name not in ("out", "resume", "page")}
        raw = {
            "environment": environment(self.args.threads),
            "settings": settings,
            "records": [asdict(record) for record in self.records],
            "outcomes": self.outcomes,
            "references": self.references,
        }
        self.written = write_results(self.stem, raw, self.tables(), _NOTES, peers_figure(self.records))


def _same_plan(record: PeerRecord, other: PeerRecord) -> bool:
    """True for two budgets that lead to one plan."""
    plans = [each.reading.plan for each in (record, other) if each.reading is not None and each.reading.plan is not None]
    return len(plans) == 2 and plans[0].segments == plans[1].segments and plans[0].projected_peak_bytes == plans[1].projected_peak_bytes


_NOTES = """\
One training step of the body, batch 1, float32, norm statistics frozen. *Process*: high-water mark of a warm step above the process with
libraries, model and input; *metered*: `sft.measure_peak`. *Error*: largest difference from float64, output and all gradients, over the
largest value of the same module. The float64 step is PyTorch's, or that of `sft` for images for which PyTorch's does not fit
(`references`). Seconds: median [least, most] of rounds in which the methods take turns. The last columns have the fastest plan of `sft`
whose process takes no more memory than the method of the row, and its time over the method's: below 1, `sft` is faster.

*budget* of `torch.compile` is `activation_memory_budget`. lightstream runs as its documentation requires, with the weights of norms
frozen."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sizes", nargs="+", type=positive_int, default=[1024, 2048], help="sides of the images, pixels")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=positive_int, default=7, help="most rounds of each method (default 7)")
    parser.add_argument("--minutes", type=float, default=20, help="minutes for all rounds; 0 measures memory alone (default 20)")
    parser.add_argument("--timeout", type=float, default=1200, help="most seconds of a method's two steps for its memory (default 1200)")
    parser.add_argument("--workers", type=int, default=10, help="most processes at the same time (default 10)")
    parser.add_argument("--resume", type=Path, help="result to add to")
    parser.add_argument("--no-checks", action="store_true", help="leave out the comparison in float64")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced, docs/benchmarks/peers.md")
    parser.add_argument("--quick", action="store_true", help="small images and one round, to try the script")
    add_common_arguments(parser)
    args = parser.parse_args(arguments)
    if args.quick:
        args.sizes, args.rounds, args.workers = [256], 1, 4
    if args.workers < 2:
        parser.error("--workers: at least 2, plain PyTorch and one method")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_arguments(arguments)
    console = Console()
    bench = Bench(args, console)
    with tempfile.TemporaryDirectory() as folder:
        for cell in bench.cells():
            bench.measure(cell, Path(folder))
    if not args.no_checks:
        bench.check()
    if args.minutes > 0:
        bench.time_all()
    bench.write()
    if args.page is not None:
        write_page(args.page, bench.stem.name, bench.records, bench.outcomes)
    for table in bench.tables():
        console.print(table.terminal())
    console.print(bench.written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
