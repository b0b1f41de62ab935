"""Whole segments and whole training steps on a GPU: ``backend="auto"`` (what ``python -m sft tune`` measured), ATen alone and every kernel,
against eager PyTorch in channels-last layout.

Every case is timed. A case is flagged as wrong, and the script exits with 1, in three cases: the relative L2 error of output and gradients
against float64, at a small size, is above both the limit of its number format and 1.1 times that of eager PyTorch (the limits of ``python
-m sft tune``); the step allocates more than its plan projects; the plan exceeds the budget. Eager and ours take turns, with the same
settings of cuDNN; peaks are the allocator's, allocated and reserved, of the step alone.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from allocation_history import PlanRecorder, recorded_history, write_allocations
from step_cases import StepCase, case_budget, compiled, draw_input, file_input, make_network, step_cases, training_step
from step_processes import Turns, run_in_processes

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from harness.gpu import Deadline, convolution_settings, device_environment, measure_step_memory, memory_problem, reserved_bytes

from sft.backends.autotune.benchmark import relative_error
from sft.backends.autotune.table import error_limit
from sft.backends.selector import NumberFormat
from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.interval import Interval
from sft.torch_runtime.device_pool import release_cublas

__all__ = ["StepRecord", "main", "run_step", "step_cases", "step_table", "verify_step", "write_steps"]

_ROOT = Path(__file__).resolve().parents[2]
_NUM_SEEDS = 3
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_FORMATS: dict[str, NumberFormat] = {"bf16": "bfloat16", "fp32": "float32"}
#: Rows and columns of a dry run.
_DRY_SIZE = 64


@dataclass(kw_only=True)
class StepRecord:
    """Result of a case in one dtype with one backend.

    Attributes:
        name: name of the case.
        dtype: element type.
        backend: backend of the compiled network.
        status: ``ok``, ``wrong`` or ``failed``.
        note: reasons of the status.
        error: median relative L2 error, at a small size.
        eager_error: that of eager PyTorch.
        seconds: least, median and most seconds of the rounds.
        plain_seconds: those of eager PyTorch.
        queued_seconds: seconds of a step among many that are queued without a wait, as in a training loop.
        plain_queued_seconds: that of eager PyTorch.
        allocated_bytes: peak of the step in the allocator's blocks.
        reserved_bytes: peak of the allocator's segments, resident tensors included; 0 on a CPU.
        plain_allocated_bytes: peak of eager PyTorch's step.
        projected_peak_bytes: the plan's projection of the allocated bytes.
        projected_reserved_bytes: the plan's projection of the reserved bytes.
        redundancy: FLOPs of the plan over those of eager PyTorch.
        num_kernel_operators: operators that kernels run.
        replays_passes: true if both passes are replayed as CUDA graphs.
        modelled_seconds: seconds of the plan in the planner's time model.
        planning_seconds: seconds of capturing, planning and trials of workspaces; other cases may plan at the same time.
    """

    name: str
    dtype: str
    backend: str
    status: str = "ok"
    note: str = ""
    error: float | None = None
    eager_error: float | None = None
    seconds: tuple[float, float, float] | None = None
    plain_seconds: tuple[float, float, float] | None = None
    queued_seconds: float | None = None
    plain_queued_seconds: float | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    plain_allocated_bytes: int = 0
    projected_peak_bytes: int = 0
    projected_reserved_bytes: int = 0
    redundancy: float = 0.0
    num_kernel_operators: int = 0
    replays_passes: bool = False
    modelled_seconds: float = 0.0
    planning_seconds: float = 0.0

    def flag(self, status: str, note: str) -> None:
        """Set a worse status, and add the reason."""
        self.status = status
        self.note = f"{self.note}; {note}" if self.note else note


def verify_step(case: StepCase, dtype: torch.dtype, backend: str, device: torch.device, size: int) -> tuple[float, float]:
    """Medians over seeds of our error and eager PyTorch's, in strips, at a small size."""
    ours, eager = [], []
    is_bag = case.num_images > 1
    case = case.verified(size)
    options = case.options(backend, None if is_bag else (max(32, size // 4), None))
    for seed in range(_NUM_SEEDS):
        model = make_network(case, dtype, device, seed)
        x = draw_input(case, case.size, dtype, device, seed)
        net = compiled(case, copy.deepcopy(model), x, options, plain_bytes=0 if is_bag else None)
        truth = training_step(copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad))
        ours.append(relative_error([each.to(device) for each in training_step(net, x)], truth))
        eager.append(relative_error(training_step(model, x), truth))
    return statistics.median(ours), statistics.median(eager)


def run_step(
    case: StepCase, name: str, backend: str, device: torch.device, options: argparse.Namespace, turns: Turns | None = None
) -> StepRecord:
    """Verify and time a case. An exception of either is recorded, and the other runs nevertheless."""
    record, dtype = StepRecord(name=case.name, dtype=name, backend=backend), _DTYPES[name]
    try:
        if not options.time and not options.prepare:
            record.error, record.eager_error = verify_step(case, dtype, backend, device, options.small)
    except Exception as error:  # one case that fails must not hide the others
        record.flag("failed", _first_line(error))
    if record.error is not None and record.eager_error is not None:
        limit = error_limit(_FORMATS[name], record.eager_error)
        if not record.error <= limit:
            record.flag("wrong", f"error {record.error:.3g}, limit {limit:.3g}, eager PyTorch's {record.eager_error:.3g}")
    if not options.verify:
        try:
            with tempfile.TemporaryDirectory() as folder:
                _time_step(case, record, dtype, device, options, Path(folder), turns or Turns.alone())
        except Exception as error:
            record.flag("failed", _first_line(error))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return record


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _time_step(
    case: StepCase, record: StepRecord, dtype: torch.dtype, device: torch.device, options: argparse.Namespace, folder: Path, turns: Turns
) -> None:
    """Peaks and times of the case, and of eager PyTorch where it can take the step."""
    reserved_before = reserved_bytes(device)
    x: Any = file_input(case, case.size, dtype, folder) if case.reads_file else draw_input(case, case.size, dtype, device)

    def make_plain() -> Callable[[], object]:
        return _plain_step(case, make_network(case, dtype, device), x, device)

    if case.has_plain:
        with turns.eager:
            try:
                record.plain_allocated_bytes = _peak_of(make_plain(), device)
            except torch.OutOfMemoryError:
                record.note = "eager PyTorch runs out of memory"
        release_cublas()  # its workspaces may occupy segments of eager PyTorch's values
    reserved_bytes(device)  # frees unused segments, so that the model occupies none of a copy of the input
    model = make_network(case, dtype, device)
    plain_bytes = None if options.dry_run else record.plain_allocated_bytes or None  # weights are most of a small case
    budget_bytes = parse_bytes(case_budget(case, model, x, case.options(record.backend), plain_bytes))
    plans = PlanRecorder()
    started = time.perf_counter()
    with plans.recording():
        net: Any = compiled(case, model, x, case.options(record.backend), plain_bytes)
    record.planning_seconds = time.perf_counter() - started
    if 1 < budget_bytes < net.plan.budget_bytes:
        record.note = f"smallest budget with a plan, {format_bytes(net.plan.budget_bytes)} in place of {format_bytes(budget_bytes)}"
    if options.prepare:
        return
    with turns.timed:
        step = functools.partial(training_step, net, x)
        with recorded_history(device):
            _measure_memory(case, record, net, step, reserved_before, device)
            if record.status == "wrong" and device.type == "cuda":
                write_allocations(_result_stem(record, options), plans.simulated(net.plan.projected_peak_bytes))
        # Not before: its tensors would share segments of the allocator with ours.
        steps = [make_plain()] if record.plain_allocated_bytes else []
        _measure_times(record, step, steps, device, options)


def _peak_of(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that the second run of a step allocates."""
    step()
    return measure_step_memory(step, device, 0).allocated_bytes


def _measure_memory(
    case: StepCase, record: StepRecord, net: Any, step: Callable[[], object], reserved_before: int, device: torch.device
) -> None:
    """Peaks of the step of a compiled network, and its projections."""
    for _ in range(2):  # in the first step libraries select algorithms, in the second one passes are recorded
        step()
    memory = measure_step_memory(step, device, reserved_before)
    record.allocated_bytes, record.reserved_bytes = memory.allocated_bytes, memory.reserved_bytes or 0
    record.projected_peak_bytes, record.redundancy = net.plan.projected_peak_bytes, net.plan.redundancy
    record.num_kernel_operators = sum(len(segment.kernels) for segment in net.plan.segments)
    record.projected_reserved_bytes, record.replays_passes = net.plan.projected_reserved_bytes, net.plan.replays_passes
    record.modelled_seconds = net.plan.estimated_seconds
    problem = memory_problem(memory, net.plan)
    if problem:
        record.flag("wrong", problem)
    if case.budget is not None and net.plan.total_bytes > parse_bytes(case.budget):
        record.flag("wrong", f"planned {format_bytes(net.plan.total_bytes)} of {case.budget}")


def _measure_times(
    record: StepRecord,
    step: Callable[[], object],
    plain_steps: Sequence[Callable[[], object]],
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    """Times of the step of a compiled network, in turn with those of eager PyTorch."""
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _do_nothing
    times = _measure([*plain_steps, step], options.rounds, wait)
    record.seconds, record.plain_seconds = times[-1], times[0] if plain_steps else None
    queued = [_measure_queued(each, options.rounds, wait) for each in (*plain_steps, step)]
    record.queued_seconds, record.plain_queued_seconds = queued[-1], queued[0] if plain_steps else None
    if options.trace is not None and (not options.trace or record.name in options.trace):
        try:
            _write_trace(step, device, _result_stem(record, options))
        except Exception as error:  # a trace is an extra
            record.note = f"{record.note}; no trace: {_first_line(error)}".removeprefix("; ")


def _plain_step(case: StepCase, model: torch.nn.Module, x: Any, device: torch.device) -> Callable[[], object]:
    """Eager PyTorch's step. An image in a file is read and normalised by the same source, as a whole, and moved to the device."""
    if not case.reads_file:
        return functools.partial(training_step, model, x)

    def step() -> object:
        rows = torch.empty(x.shape, dtype=x.dtype)
        x.rows(Interval(0, x.shape[2]), rows)
        return training_step(model, rows.to(device, memory_format=torch.channels_last))

    return step


def _do_nothing() -> None:
    pass


def _measure(steps: Sequence[Callable[[], object]], rounds: int, wait: Callable[[], None]) -> list[tuple[float, float, float]]:
    """Least, median and most seconds of steps that take turns, after two rounds that do not count."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        for step, own in zip(steps, times, strict=True):
            wait()
            started = time.perf_counter()
            step()
            wait()
            if number >= 2:
                own.append(time.perf_counter() - started)
    return [(min(own), statistics.median(own), max(own)) for own in times]


def _measure_queued(step: Callable[[], object], rounds: int, wait: Callable[[], None]) -> float:
    """Mean seconds of steps that follow each other without a wait."""
    wait()
    started = time.perf_counter()
    for _ in range(rounds):
        step()
    wait()
    return (time.perf_counter() - started) / rounds


def _result_stem(record: StepRecord, options: argparse.Namespace) -> Path:
    """Path of the files of a case, without an extension."""
    name = "-".join(f"{record.name} {record.dtype} {record.backend}".replace(",", "").lower().split())
    return Path(options.out, f"{datetime.date.today().isoformat()}-{options.name}-{name}")


def _write_trace(step: Callable[[], object], device: torch.device, stem: Path) -> None:
    """Write a trace of one step (Chrome's format), and on a GPU the allocator's history of it (for pytorch.org/memory_viz)."""
    from torch.profiler import ProfilerActivity, profile

    stem.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        step()
    profiler.export_chrome_trace(f"{stem}.trace.json.gz")
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
        step()
        torch.cuda.synchronize(device)
        torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


def step_table(records: Sequence[StepRecord]) -> str:
    """The records in Markdown."""
    heads = (
        "case",
        "dtype",
        "backend",
        "error / eager's",
        "ms",
        "modelled ms",
        "eager ms",
        "queued ms",
        "eager queued ms",
        "eager / ours",
        "allocated",
        "reserved",
        "projected",
        "eager",
    )
    more = ("reserved / projected", "FLOPs / plain", "kernels", "CUDA graphs", "planning s", "note")
    lines = ["| " + " | ".join((*heads, *more)) + " |", "| --- " * (len(heads) + len(more)) + "|"]
    for r in records:

        def milliseconds(seconds: tuple[float, float, float] | None) -> str:
            return "" if seconds is None else f"{1e3 * seconds[1]:.1f} ({1e3 * seconds[0]:.1f} to {1e3 * seconds[2]:.1f})"

        ratio = f"{r.plain_seconds[1] / r.seconds[1]:.2f}" if r.seconds and r.plain_seconds else ""
        error = f"{r.error / r.eager_error:.2f}" if r.error is not None and r.eager_error else ""
        sizes = [
            format_bytes(n) if n else "" for n in (r.allocated_bytes, r.reserved_bytes, r.projected_peak_bytes, r.plain_allocated_bytes)
        ]
        note = (r.note if r.status == "ok" else f"**{r.status}**: {r.note}").replace("|", "\\|")
        reserved = f"{r.reserved_bytes / r.projected_reserved_bytes:.3f}" if r.reserved_bytes and r.projected_reserved_bytes else ""
        modelled = f"{1e3 * r.modelled_seconds:.1f}" if r.modelled_seconds else ""
        cells = [r.name, r.dtype, r.backend, error, milliseconds(r.seconds), modelled, milliseconds(r.plain_seconds)]
        cells += [f"{1e3 * seconds:.1f}" if seconds else "" for seconds in (r.queued_seconds, r.plain_queued_seconds)] + [ratio, *sizes]
        cells += [
            reserved,
            f"{r.redundancy:.3f}" if r.redundancy else "",
            str(r.num_kernel_operators),
            "yes" if r.replays_passes else "",
            f"{r.planning_seconds:.1f}" if r.planning_seconds else "",
            note,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_steps(stem: Path, records: Sequence[StepRecord], facts: dict[str, str]) -> None:
    """Replace the results by what is known now."""
    raw = {"environment": facts, "steps": [asdict(record) for record in records]}
    notes = (
        "Medians, with least and most; queued: means of steps without a wait between them. Allocated and projected bytes are above the "
        "start of a step, as the allocator counts them. Reserved bytes contain resident tensors, and are compared "
        "with the plan's projection of the same."
    )
    sections = [f"# {stem.name}", notes]
    sections += [step_table(records), "## Environment", "\n".join(f"- {key}: {value}" for key, value in facts.items())]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in {".json": json.dumps(raw, indent=1) + "\n", ".md": "\n\n".join(sections) + "\n"}.items():
        temporary = stem.with_name(f".{stem.name}{suffix}.{os.getpid()}.tmp")
        temporary.write_text(content)
        os.replace(temporary, stem.with_name(stem.name + suffix))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [case.name for case in step_cases()]
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh steps", description="Time whole segments and steps against eager PyTorch.")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"cases to run: {', '.join(names)}")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(_DTYPES), default=sorted(_DTYPES), help="dtypes to run")
    parser.add_argument("--backends", nargs="+", choices=("auto", "aten", "triton"), default=["auto", "aten", "triton"], help="of ours")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each step (default: 7)")
    parser.add_argument("--small", type=int, default=256, help="rows and columns of the images that steps are verified on (default: 256)")
    parser.add_argument("--verify", action="store_true", help="verify, and time nothing")
    parser.add_argument("--time", action="store_true", help="time, and verify nothing")
    prepare = "plan the cases alone, so that the programs that a plan tries are in the cache for the next run"
    parser.add_argument("--prepare", action="store_true", help=prepare)
    trace = "write a trace of one step of each case, or of the named ones, and on a GPU its memory history"
    parser.add_argument("--trace", nargs="*", choices=names, metavar="CASE", help=trace)
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes; with --together, end after so many")
    together = "plan all cases at a time, in a process each, before the first is timed; then they are timed one after another"
    parser.add_argument("--together", action="store_true", help=together)
    search = "let cuDNN search for its fastest algorithm for each shape, on both sides (default: its heuristics)"
    parser.add_argument("--cudnn-benchmark", action="store_true", help=search)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at a small size, one round, to try the script")
    parser.add_argument("--name", default="gpu-steps", help="name of the results, after the date (default: gpu-steps)")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.rounds, options.small = 1, _DRY_SIZE
        options.backends = [backend for backend in options.backends if backend != "triton"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if everything was right, 1 if not, 2 without a GPU."""
    options = parse(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no CUDA device here, and nothing else can be measured; run it on a machine with a GPU", file=sys.stderr)
        return 2
    with convolution_settings(search=options.cudnn_benchmark):
        return _run(options, torch.device("cpu") if options.dry_run else torch.device("cuda", 0))


def _run_process(case: StepCase, name: str, backend: str, device: torch.device, options: argparse.Namespace, turns: Turns) -> StepRecord:
    """Run a case in a process of its own, with settings of its own."""
    with convolution_settings(search=options.cudnn_benchmark):
        return run_step(case, name, backend, device, options, turns)


def _run(options: argparse.Namespace, device: torch.device) -> int:
    """Run the cases, and save the results after each."""
    facts, records, deadline = device_environment(device), list[StepRecord](), Deadline.after(options.minutes)
    stem = options.out / f"{datetime.date.today().isoformat()}-{options.name}"
    cases = [case for case in step_cases() if options.only is None or case.name in options.only]
    wanted = [
        (case.small(_DRY_SIZE, 2) if options.dry_run else case, name, backend)
        for backend in options.backends
        for case in cases
        for name in case.dtypes
        if name in options.dtypes
    ]
    if options.together:
        runs = [functools.partial(_run_process, case, name, backend, device, options) for case, name, backend in wanted]

        def report(number: int, state: str, seconds: float) -> None:
            print(f"{seconds:5.0f} s  {state:8} {wanted[number][0].name}, {', '.join(wanted[number][1:])}", file=sys.stderr, flush=True)

        done: Iterator[StepRecord] = run_in_processes(runs, options.minutes, report)
    else:
        done = (run_step(case, name, backend, device, options) for case, name, backend in wanted if not deadline.is_over)
    for record in done:
        records.append(record)
        print(step_table(records[-1:]).splitlines()[-1], flush=True)
        write_steps(stem, records, facts)
    bad = [record for record in records if record.status != "ok"]
    left = f", no time for {len(wanted) - len(records)} more" if len(records) < len(wanted) else ""
    print(f"{len(records) - len(bad)} of {len(records)} right{left}; written: {stem.name}.json, .md")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
