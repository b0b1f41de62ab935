"""All cases, each in a process of its own, and their tables.

The files are saved after every case. ``--resume`` continues an interrupted run, and with ``--redo`` repeats cases that have been fixed
since.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from fnmatch import fnmatch
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .blockers import blocker_of, blockers
from .case import Case
from .models import CASES
from .outcome import FAILURES, KINDS, Outcome, TilingOutcome
from .worker import Question, check

__all__ = ["known_outcomes", "main"]

_NOTES = """\
Each model in training mode and float64 against eager PyTorch: outputs, the gradients of every parameter and of the input, buffers, and
the parameters after a step; then projected peak and FLOPs against what was measured. Twice: in strips of 32 rows, two steps, and in
strips of 32 rows by panels of 40 columns, one step. Where a model itself computes a part in float32 (`x.float()`), that is float64, too.
Results:

- **exact**: largest relative error at most 1e-10, and at least one segment runs in more than one strip. Where the error is above
  that, eager PyTorch is compared with itself, on an input whose elements move to neighbouring float64 numbers and in channels-last layout,
  and ten times as much is allowed as its own answer moves by, never more than 1e-6; the last column then says by how much;
- **exact, whole**: the same, but nothing runs in strips;
- **refused**: `sft` says that it has no exact rule;
- **eager cannot**: eager PyTorch cannot train the model at this size;
- **wrong**, **crash**: what must not be.

*In strips* is the share of operators, and of planned FLOPs, in segments that run in more than one strip. *Leaves strips at* names the
operators that run whole although what they read could come in strips; what follows them is whole, too."""

_HEADERS = ("model", "input", "weights", "result", "segments in strips", "operators", "FLOPs", "error", "s", "leaves strips at, or reason")

#: Limit of elapsed seconds of a case, for each second of processor time, on a shared machine.
_PATIENCE = 10


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Third-party models against eager PyTorch.")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases to run, such as 'timm/*net*' (default: all)")
    parser.add_argument("--jobs", type=positive_int, default=2, help="cases at a time (default: 2)")
    parser.add_argument("--timeout", type=positive_int, default=3600, help="processor seconds that a case may take (default: 3600)")
    parser.add_argument("--memory-gib", type=positive_int, default=14, help="memory that a case may allocate (default: 14)")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="keep the outcomes of an earlier run and run the missing cases")
    parser.add_argument("--redo", nargs="+", choices=KINDS, default=(), help="kinds of outcomes of the earlier run that are not kept")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    add_common_arguments(parser)
    parser.set_defaults(threads=1)  # at these sizes a second case is worth more than a second thread
    return parser.parse_args()


def _selected(patterns: Sequence[str] | None) -> list[Case]:
    return [case for case in CASES if patterns is None or any(fnmatch(case.label, pattern) for pattern in patterns)]


def known_outcomes(resume: Path | None, redo: Sequence[str]) -> dict[str, Outcome]:
    """Outcomes of an earlier run, by label: those of kinds that need no second run."""
    if resume is None:
        return {}
    earlier = [Outcome.from_json(result) for result in json.loads(resume.read_text())["results"]]
    return {outcome.label: outcome for outcome in earlier if outcome.kind not in redo}


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.zoo.forked"])
    root = Path(__file__).resolve().parents[2]
    # The server reads only this variable before it preloads.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (root, root / "benchmarks")))):
        forkserver.ensure_running()
    return context


def _run(case: Case, context: ForkServerContext, args: argparse.Namespace) -> Outcome:
    question = Question(label=case.label, memory_bytes=args.memory_gib * 2**30, processor_seconds=args.timeout, threads=args.threads)
    try:
        return call_in_process(check, question, timeout_seconds=_PATIENCE * args.timeout, context=context)
    except WorkerError as error:
        return Outcome(package=case.package, name=case.name, shape=case.shape, kind="crash", message=f"{error.kind}: {error}")


def _cells(outcome: Outcome) -> list[str]:
    cells = [outcome.name, "x".join(map(str, outcome.shape)), f"{outcome.num_parameters / 1e6:.1f} M", outcome.kind]
    strips = outcome.tilings[0] if outcome.tilings else None
    if strips is None or not strips.num_segments:
        cells += ["", "", "", ""]
    else:
        cells += [
            f"{strips.num_tiled_segments} of {strips.num_segments}",
            f"{strips.operators_share:.0%}",
            f"{strips.flops_share:.0%}",
            f"{max(tiling.error for tiling in outcome.tilings):.0e}",
        ]
    return [*cells, f"{outcome.seconds:.0f}", _remark(outcome)]


def _remark(outcome: Outcome) -> str:
    if outcome.kind == "refused":
        return ", ".join(sorted({blocker_of(problem) for problem in outcome.problems}))
    if outcome.message:
        return _short(outcome.message)
    strips = outcome.tilings[0]
    own = max(tiling.rounding_of_eager for tiling in outcome.tilings)
    remarks = [f"eager's own answer moves by {own:.0e}"] if own else []
    return ", ".join([*remarks, *_left(strips)])


def _left(strips: TilingOutcome) -> list[str]:
    return [f"{operator} ({count})" if count > 1 else operator for operator, count in strips.left_strips.items()]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


def _tables(outcomes: Sequence[Outcome]) -> list[Table]:
    packages = list(dict.fromkeys(outcome.package for outcome in outcomes))
    tables = [
        Table(
            title="Summary",
            headers=("package", *KINDS, "all"),
            rows=[
                *(_counts(package, [o for o in outcomes if o.package == package]) for package in packages),
                _counts("all", outcomes),
            ],
        ),
        Table(
            title="What refuses",
            headers=("reason", "models", "alone", "unblocked so far", "which"),
            rows=[
                [blocker.reason, str(len(blocker.models)), str(blocker.num_alone), str(blocker.num_unblocked), ", ".join(blocker.models)]
                for blocker in blockers(outcomes)
            ],
        ),
        Table(title="Where strips end", headers=("operator", "models", "which"), rows=_ends(outcomes)),
        Table(
            title="Failures",
            headers=("model", "result", "tiling", "message"),
            rows=[row for outcome in outcomes if outcome.kind in FAILURES for row in _failures(outcome)],
        ),
    ]
    for package in packages:
        rows = [_cells(outcome) for outcome in outcomes if outcome.package == package]
        tables.append(Table(title=package, headers=_HEADERS, rows=rows))
    return [table for table in tables if table.rows]


def _counts(title: str, outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter(outcome.kind for outcome in outcomes)
    return [title, *(str(counts[kind]) for kind in KINDS), str(len(outcomes))]


def _ends(outcomes: Iterable[Outcome]) -> list[list[str]]:
    models: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.kind in ("exact", "exact, whole"):
            for operator in outcome.tilings[0].left_strips:
                models.setdefault(operator, []).append(outcome.label)
    return [[name, str(len(which)), ", ".join(which)] for name, which in sorted(models.items(), key=lambda item: -len(item[1]))]


def _failures(outcome: Outcome) -> list[list[str]]:
    label = outcome.label
    if not outcome.tilings:
        return [[label, outcome.kind, "", _short(outcome.message)]]
    return [[label, tiling.kind, tiling.tiling, _short(tiling.message)] for tiling in outcome.tilings if tiling.kind in FAILURES]


def _save(stem: Path, outcomes: Sequence[Outcome], args: argparse.Namespace, about: dict[str, str | int]) -> tuple[list[Table], str]:
    raw: dict[str, Any] = {
        "environment": about,
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "list", "resume")},
        "results": [outcome.to_json() for outcome in outcomes],
    }
    tables = _tables(outcomes)
    return tables, write_results(stem, raw, tables, _NOTES, None)


def main() -> int:
    """Run the suite; 1 when a model is wrong or crashes, 2 when no case has a requested name."""
    args = _parse_arguments()
    console = Console()
    cases = _selected(args.only)
    if args.list or not cases:
        console.print("\n".join(case.label for case in cases) or f"no case is called {' or '.join(args.only)}", markup=False)
        return 0 if cases else 2
    # The result of some cases never replaces that of all.
    stem = result_stem(args.out, "zoo" if args.only is None else "zoo-part")
    about = environment(args.threads)
    context = _fork_server()
    done = {label: outcome for label, outcome in known_outcomes(args.resume, args.redo).items() if label in {case.label for case in cases}}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(args.jobs) as pool:
        task = progress.add_task("zoo", total=len(cases), completed=len(done))
        futures = {pool.submit(_run, case, context, args): case for case in cases if case.label not in done}
        for future in as_completed(futures):
            outcome = done[futures[future].label] = replace(future.result(), commit=str(about["commit"]))
            progress.console.print(f"{futures[future].label}: {outcome.kind} ({outcome.seconds:.0f} s)", markup=False)
            progress.advance(task)
            _save(stem, [done[case.label] for case in cases if case.label in done], args, about)
    tables, written = _save(stem, [done[case.label] for case in cases if case.label in done], args, about)
    for table in tables:
        if table.headers is not _HEADERS:  # one line a model is for the file
            console.print(table.terminal())
    console.print(written, markup=False)
    return int(any(outcome.kind in FAILURES for outcome in done.values()))
