"""Verify every kernel on this machine's GPU against float64, then time it: quantiles, the roofline, and PyTorch's own kernels.

First the relative L2 error of each result is verified at a small size with ragged borders. A kernel that fails is not timed, and the script
exits with 1. Then ours and PyTorch's own (cuDNN channels-last with its separate bias, ReLU and pool kernels) take turns on a large tile,
each after the cache was overwritten. The floor of an operation is the larger of two times: its least bytes over the speed of a copy, and
its operations over the speed of a matrix product of its dtype; both speeds are measured first.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from kernel_case import Case, Draw
from kernel_convolutions import convolution_cases
from kernel_streams import stream_cases
from torch import Tensor

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from harness.gpu import Deadline, convolution_settings, device_environment

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
#: relative L2 error of a result; a half precision rounds results, and values between two kernels of a backward pass
_LIMITS = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
#: for products of fp32 numbers rounded to ten bits, or to sixteen
_LIMITS_OF_PRODUCTS = {"tf32": 2e-3, "bf16x3": 5e-5}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_FLUSH_BYTES = 512 * 2**20
#: a buffer of half the cache of a large GPU, and enough copies of it that the first does not count
_CACHED_BYTES = 8 * 2**20
_CACHED_COPIES = 64


@dataclass(kw_only=True)
class Record:
    """Results of one case in one dtype."""

    name: str
    family: str
    dtype: str
    status: str = "ok"
    """`ok`, `wrong` or `failed`."""
    note: str = ""
    error: float | None = None
    """The largest relative L2 error of its results."""
    floor_seconds: float | None = None
    floor: str = ""
    """`bytes` or `operations`, whichever is the limit."""
    num_bytes: int = 0
    num_flops: int = 0
    ours_seconds: tuple[float, float, float] | None = None
    """Quantiles 0.2, 0.5 and 0.8."""
    theirs_seconds: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured peak rates of the device."""

    copy_bytes_per_second: float
    cached_bytes_per_second: float
    """Read and written by copies that stay in the second-level cache."""
    flops_per_second: dict[str, float]
    """By dtype or precision."""


def all_cases() -> list[Case]:
    """Cases of all kernels."""
    return convolution_cases() + stream_cases()


def relative_error(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative L2 error of the results; infinite if one is not finite or has another shape."""
    if len(ours) != len(exact):
        return float("inf")
    errors = []
    for result, truth in zip(ours, exact, strict=True):
        if result.shape != truth.shape or not bool(result.isfinite().all()):
            return float("inf")
        distance = float((result.double() - truth).norm())
        errors.append(distance / max(float(truth.norm()), 1e-30))
    return max(errors)


def verify(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """The case's error at its small size."""
    problem = case.build(Draw(device=device, dtype=dtype, size=case.small))
    return relative_error([result.detach().clone() for result in problem.ours()], problem.exact())


def _seconds(call: Callable[[], object], flush: Tensor) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def _quantiles(times: list[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return fifths[0], statistics.median(times), fifths[3]


def _measure(calls: list[Callable[[], object]], rounds: int, flush: Tensor) -> list[tuple[float, float, float]]:
    """Quantiles of the calls' times; they take turns, after three rounds that do not count."""
    times: list[list[float]] = [[] for _ in calls]
    for round_number in range(rounds + 3):
        for call, own in zip(calls, times, strict=True):
            taken = _seconds(call, flush)
            if round_number >= 3:
                own.append(taken)
    return [_quantiles(own) for own in times]


def measure_ceilings(device: torch.device, flush: Tensor) -> Ceilings:
    """Copy a large buffer, and a small one again and again, and multiply large matrices of random numbers."""
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    (copy,) = _measure([functools.partial(target.copy_, source)], 20, flush)
    few = source[: _CACHED_BYTES // 4], target[: _CACHED_BYTES // 4]

    def again() -> None:
        for _ in range(_CACHED_COPIES):
            few[1].copy_(few[0])

    (cached,) = _measure([again], 20, flush)
    rates = {}
    for name, dtype in (*((name, dtype) for dtype, name in _NAMES.items()), ("tf32", torch.float32)):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(8192, 8192, device=device).to(dtype) for _ in range(2))
        (product,) = _measure([functools.partial(torch.matmul, a, b)], 10, flush)
        rates[name] = 2 * 8192**3 / product[1]
    torch.backends.cuda.matmul.allow_tf32 = False
    return Ceilings(
        copy_bytes_per_second=2 * 4 * 2**28 / copy[1],
        cached_bytes_per_second=2 * _CACHED_BYTES * _CACHED_COPIES / cached[1],
        flops_per_second=rates | {"bf16x3": rates["bf16"] / 3},
    )


def run_case(case: Case, dtype: torch.dtype, device: torch.device, ceilings: Ceilings | None, rounds: int, flush: Tensor) -> Record:
    """Verify a case, and time it if requested and correct. Exceptions of an operation are recorded."""
    record = Record(name=case.name, family=case.family, dtype=_NAMES[dtype])
    try:
        record.error = verify(case, dtype, device)
        limit = _LIMITS_OF_PRODUCTS.get(case.precision or "", _LIMITS[dtype])
        if not record.error <= limit:
            record.status, record.note = "wrong", f"error {record.error:.3g}, limit {limit:.3g}"
        elif ceilings is not None:
            problem = case.build(Draw(device=device, dtype=dtype, size=case.large))
            record.num_bytes, record.num_flops = problem.num_bytes, problem.num_flops
            by_bytes = problem.num_bytes / ceilings.copy_bytes_per_second
            by_flops = problem.num_flops / ceilings.flops_per_second[case.precision or record.dtype]
            record.floor_seconds, record.floor = max((by_bytes, "bytes"), (by_flops, "operations"))
            calls: list[Callable[[], object]] = [problem.ours] + ([] if problem.theirs is None else [problem.theirs])
            with torch.no_grad():
                times = _measure(calls, rounds, flush)
            record.ours_seconds, record.theirs_seconds = times[0], times[1] if len(times) > 1 else None
    except Exception as error:  # one kernel that fails must not hide the others
        record.status, record.note = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return record


def table(records: Sequence[Record]) -> str:
    """The records in Markdown."""

    def time(seconds: tuple[float, float, float] | None) -> str:
        return "" if seconds is None else f"{seconds[1] * 1e6:.0f} ({seconds[0] * 1e6:.0f} to {seconds[2] * 1e6:.0f})"

    lines = ["| operation | dtype | error | floor µs | limit | ours µs | PyTorch µs | PyTorch / ours | note |", "| --- " * 9 + "|"]
    for r in records:
        ratio = f"{r.theirs_seconds[1] / r.ours_seconds[1]:.2f}" if r.ours_seconds and r.theirs_seconds else ""
        floor = "" if r.floor_seconds is None else f"{r.floor_seconds * 1e6:.0f}"
        error = "" if r.error is None else f"{r.error:.1e}"
        note = "" if r.status == "ok" else f"**{r.status}**: {r.note}".replace("|", "\\|")
        cells = [r.name, r.dtype, error, floor, r.floor, time(r.ours_seconds), time(r.theirs_seconds), ratio, note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(stem: Path, records: Sequence[Record], ceilings: Ceilings | None, facts: dict[str, str]) -> None:
    """Save the results so far."""
    raw = {"environment": facts, "ceilings": None if ceilings is None else asdict(ceilings), "cases": [asdict(r) for r in records]}
    sections = [f"# {stem.name}", "Medians, with the quantiles 0.2 and 0.8. The error is the largest relative L2 error, at a small size."]
    if ceilings is not None:
        rates = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in ceilings.flops_per_second.items())
        sections.append(
            f"Measured ceilings: copies {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s, in the cache "
            f"{ceilings.cached_bytes_per_second / 1e12:.2f} TB/s, matrix products {rates} (bf16x3: a third of bf16)."
        )
    sections += [table(records), "## Environment", "\n".join(f"- {key}: {value}" for key, value in facts.items())]
    contents = {".json": json.dumps(raw, indent=1) + "\n", ".md": "\n\n".join(sections) + "\n"}
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in contents.items():
        temporary = stem.with_name(f".{stem.name}{suffix}.{os.getpid()}.tmp")
        temporary.write_text(content)
        os.replace(temporary, stem.with_name(stem.name + suffix))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    families = sorted({case.family for case in all_cases()})
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description="Verify every kernel against float64 on the GPU, then time it.")
    parser.add_argument("--only", nargs="+", choices=families, metavar="FAMILY", help=f"families to run: {', '.join(families)}")
    parser.add_argument("--named", nargs="+", metavar="TEXT", help="run only cases whose names contain one of the texts")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(_NAMES.values()), default=sorted(_NAMES.values()), help="dtypes to run")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of each operation (default: 30)")
    parser.add_argument("--verify", action="store_true", help="verify, and time nothing")
    parser.add_argument("--name", help="name of the results, after the date (default: gpu-kernels, gpu-kernels-verified)")
    parser.add_argument("--list", action="store_true", help="list the cases and leave")
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes")
    search = "let cuDNN search for its fastest algorithm for each shape (default: its heuristics, as compiled models use them)"
    parser.add_argument("--cudnn-benchmark", action="store_true", help=search)
    interpreted = "verify on the CPU, by Triton's interpreter, at small sizes: set TRITON_INTERPRET=1"
    parser.add_argument("--dry-run", action="store_true", help=interpreted)
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    return options


def main() -> int:
    """Run; 0 if everything was right, 1 if not, 2 without a GPU or Triton."""
    options = parse()
    wanted = [
        (case, dtype)
        for case in all_cases()
        for dtype in case.dtypes
        if (options.only is None or case.family in options.only) and _NAMES[dtype] in options.dtypes
        if options.named is None or any(text in case.name for text in options.named)
    ]
    if options.list:
        for case, dtype in wanted:
            print(f"{case.family:10} {_NAMES[dtype]:5} {case.name}")
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no CUDA device here, and nothing else can be measured; run it on a machine with a GPU", file=sys.stderr)
        return 2
    from sft.kernels.common import has_triton

    if not has_triton():
        print("benchmarks/gpu.sh: Triton is not installed, and without it there are no kernels; install triton", file=sys.stderr)
        return 2
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        print("benchmarks/gpu.sh: --dry-run runs kernels by Triton's interpreter; set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    with convolution_settings(search=options.cudnn_benchmark):
        return _run(options, wanted)


def _run(options: argparse.Namespace, wanted: Sequence[tuple[Case, torch.dtype]]) -> int:
    """Verify and time the cases, and save the results after each."""
    device, deadline = torch.device("cpu" if options.dry_run else "cuda"), Deadline.after(options.minutes)
    is_timed = not (options.verify or options.dry_run)
    facts, flush = device_environment(device), torch.empty(_FLUSH_BYTES if is_timed else 0, dtype=torch.uint8, device=device)
    ceilings = measure_ceilings(device, flush) if is_timed else None
    name = options.name or ("gpu-kernels" if is_timed else "gpu-kernels-verified")
    stem = options.out / f"{datetime.date.today().isoformat()}-{name}"
    records: list[Record] = []
    for case, dtype in wanted:
        if deadline.is_over:
            break
        record = run_case(shrunken(case) if options.dry_run else case, dtype, device, ceilings, options.rounds, flush)
        records.append(record)
        print(table([record]).splitlines()[-1], flush=True)
        write(stem, records, ceilings, facts)
    bad = [record for record in records if record.status != "ok"]
    left = f", no time for {len(wanted) - len(records)} more" if len(records) < len(wanted) else ""
    print(f"{len(records) - len(bad)} of {len(records)} right{left}; written: {stem.name}.json, .md")
    return 1 if bad else 0


def shrunken(case: Case) -> Case:
    """A case at a quarter of its small size: the interpreter runs program after program."""
    return replace(case, small=tuple(max(2, 2 * (length // 8)) for length in case.small))


if __name__ == "__main__":
    sys.exit(main())
