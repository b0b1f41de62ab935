"""Results of a GPU in the form of `benchmarks/results`: rates, smoke test, counts of tests and steps of a run of `gpu.sh`.

    python benchmarks/gpu_results.py results --gpu h100 --out benchmarks/results

The folder is the one that `gpu.sh --out` filled, or an unpacked archive. Several files of one kind are merged; of two results with one name
the later file counts. Written are ``<date>-<gpu>-gpu-rates``, ``-gpu-smoke``, ``-gpu-tests``, ``-gpu-steps`` and ``-gpu-kernels`` as
``.json`` and ``.md``, each if the folder has something of the kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import Table

from sft.common.atomic_files import atomic_write
from sft.common.byte_units import format_bytes

__all__ = ["collect", "main"]

#: Summary line of pytest, and the line of a failed test.
_SUMMARY = re.compile(r"^=*\s*((?:\d+ (?:passed|failed|skipped|deselected|errors?|warnings?)(?:, )?)+) in [\d.]+s", re.MULTILINE)
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
#: Parts of kernel names that are left out.
_NOISE = re.compile(r"void |at::native::|\(anonymous namespace\)::")
#: Copies between the device and its host.
_LINK_COPY = re.compile(r"HtoD|DtoH")
#: Kernels and kinds of copies of a step in the table.
_MOST_KERNELS, _MOST_COPIES = 16, 4
#: Settings of a process that differ from command to command.
_OF_A_COMMAND = ("command", "tf32", "cudnn.benchmark")
_NOTES = {
    "rates": "Host: microseconds until a call of PyTorch on tiny tensors returns. Device: rates between CUDA events. Convolutions are "
    "3 x 3 with channels-last images; times of small ones are at least those of the host's calls. `gpu_rates.py` measures, and "
    "`sft.planner.cost.gpu_time` has rounded values.",
    "smoke": "One training step in float64 against eager PyTorch (`gpu_smoke.py`): largest relative L2 error of output, gradients and "
    "buffers, and peaks with their projections.",
    "tests": "Tests of `gpu.sh`: those marked `gpu`, and the kernels' interpreted tests, compiled.",
    "kernels": "Kernels of one step by PyTorch's profiler (`kernels/kernel_steps.py --trace`): all, and those with the most time; copies "
    "over the link.",
    "steps": "Medians of training steps in milliseconds against eager PyTorch (`kernels/kernel_steps.py`), with least and most; queued: "
    "means of steps without a wait between them. A step has the commit at which it was measured, if that is not the one below.",
}


def _load(folder: Path, kind: str) -> tuple[list[dict[str, Any]], str]:
    """The files of a kind, oldest first, and the date of the last one."""
    paths = sorted(folder.rglob(f"*-{kind}.json"), key=lambda path: (path.name[:10], path.stat().st_mtime))
    return [json.loads(path.read_text()) for path in paths], paths[-1].name[:10] if paths else ""


def _environment(files: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {key: value for key, value in files[-1]["environment"].items() if key not in _OF_A_COMMAND}


def _rates_table(rates: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    simple = [[name, f"{value:.4g} {unit}"] for name, numbers in rates.items() for unit, value in numbers.items() if name.count(":")]
    kernels: tuple[str, ...] = ("forward", "forward, no bias", "fused", "data", "weight", "bias", "bias, wide rows", "relu_")
    convolutions = [numbers for name, numbers in rates.items() if ":" not in name]
    kernels = tuple(kernel for kernel in kernels if all(kernel in numbers for numbers in convolutions))  # older results have fewer
    rows = []
    for name, numbers in rates.items():
        if ":" not in name:
            cells = [numbers[kernel] for kernel in kernels]
            rows.append([name, *(f"{c['microseconds']:.4g}" + (f" ({c['TFLOP/s']:.4g})" if "TFLOP/s" in c else "") for c in cells)])
    return [
        Table(title="Host, memory and link", headers=("what", "rate"), rows=simple),
        Table(title="Convolutions: microseconds (TFLOP/s)", headers=("convolution", *kernels), rows=rows),
    ]


def _short(note: str) -> str:
    """The first clause of a note."""
    return note.partition(". ")[0].partition(" (")[0]


def _smoke_table(cases: Sequence[Mapping[str, Any]]) -> Table:
    def size(num_bytes: int | None) -> str:
        return "" if num_bytes is None else format_bytes(num_bytes)

    names = ("allocated_bytes", "projected_bytes", "reserved_bytes", "projected_reserved_bytes")
    rows = [
        [case["network"], case["mode"], case["status"], "" if case["error"] is None else f"{case['error']:.1e}"]
        + [size(case[name]) for name in names]
        + [_short(case["note"])]
        for case in cases
    ]
    return Table(
        title="Smoke test",
        headers=("network", "mode", "status", "error", "allocated", "projected", "reserved", "projected", "note"),
        rows=rows,
    )


def _tests(folder: Path) -> dict[str, dict[str, Any]]:
    """Counts and failures of the last run of pytest of each kind."""
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted([*folder.rglob("*.txt")], key=lambda path: path.stat().st_mtime):
        text = path.read_text(errors="replace")
        summaries = _SUMMARY.findall(text)
        if not summaries:
            continue
        is_kernels = "kernel" in path.name or path.parent.name == "gpu-test"
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", summaries[-1])}
        runs["kernels, compiled" if is_kernels else "marked gpu"] = {**counts, "failures": _FAILED.findall(text)}
    return runs


def _write(stem: Path, raw: Mapping[str, Any], tables: Sequence[Table], note: str) -> None:
    parts = [f"# {stem.name}", note, *(text for table in tables for text in (f"## {table.title}", table.markdown()))]
    parts += ["## Environment", "\n".join(f"- {key}: {value}" for key, value in raw["environment"].items())]
    for suffix, content in {".json": json.dumps(raw, indent=1) + "\n", ".md": "\n\n".join(parts) + "\n"}.items():
        with atomic_write(stem.with_name(stem.name + suffix), parents=True) as part:
            part.write_text(content)


def collect(folder: Path, gpu: str, out: Path) -> list[str]:
    """Write the results of a folder; the names of the files."""
    names: list[str] = []

    def write(kind: str, date: str, raw: Mapping[str, Any], tables: Sequence[Table]) -> None:
        names.append(f"{date}-{gpu}-gpu-{kind}")
        _write(out / names[-1], raw, tables, _NOTES[kind])

    files, date = _load(folder, "gpu-rates")
    if files:
        rates = {name: numbers for file in files for name, numbers in file["rates"].items()}
        write("rates", date, {"environment": _environment(files), "rates": rates}, _rates_table(rates))
    files, date = _load(folder, "gpu-smoke")
    environment: dict[str, str] = {}
    if files:
        environment = _environment(files)
        cases = list({(case["network"], case["mode"]): case for file in files for case in file["cases"]}.values())
        write("smoke", date, {"environment": environment, "cases": cases}, [_smoke_table(cases)])
    tests = _tests(folder)
    if tests and environment:
        rows = [[name, str(run.get("passed", 0)), str(run.get("failed", 0)), "; ".join(run["failures"])] for name, run in tests.items()]
        table = Table(title="Tests", headers=("tests", "passed", "failed", "failures"), rows=rows)
        write("tests", date, {"environment": environment, "tests": tests}, [table])
    files, date = _load(folder, "gpu-steps*")
    if files:
        steps = list({(step["name"], step["dtype"], step["backend"]): step for file in files for step in file["steps"]}.values())
        write("steps", date, {"environment": _environment(files), "steps": steps}, [_steps_table(steps)])
        kernels = _kernels(folder)
        if kernels:
            write("kernels", date, {"environment": _environment(files), "kernels": kernels}, [_kernels_table(kernels)])
    return names


def _kernels(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Kernels of each trace of a step, those with the most time first, and the sum of all; then its copies over the link, by size."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("*.trace.json.gz")):
        calls: dict[str, list[float]] = {}
        copies: dict[str, list[float]] = {}
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("cat") == "kernel":
                calls.setdefault(_NOISE.sub("", event["name"])[:90], []).append(event["dur"] / 1e3)
            elif event.get("cat") == "gpu_memcpy" and (match := _LINK_COPY.search(event["name"])):
                copies.setdefault(f"copy {match[0]}, {event['args']['bytes'] / 2**20:.1f} MiB", []).append(event["dur"] / 1e3)
        by_time = sorted(calls.items(), key=lambda item: -sum(item[1]))[:_MOST_KERNELS]
        by_time += sorted(copies.items(), key=lambda item: -sum(item[1]))[:_MOST_COPIES]
        everything = ("all", [time for times in calls.values() for time in times])
        rows = [{"kernel": name, "calls": len(times), "ms": sum(times)} for name, times in (everything, *by_time)]
        steps[path.name.removesuffix(".trace.json.gz")[len("2026-01-01-") :]] = rows
    return steps


def _kernels_table(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows = [[step, each["kernel"], str(each["calls"]), f"{each['ms']:.2f}"] for step, kernels in steps.items() for each in kernels]
    return Table(title="Kernels", headers=("step", "kernel", "calls", "ms"), rows=rows)


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    def milliseconds(seconds: Sequence[float] | None) -> str:
        return f"{1e3 * seconds[1]:.1f} ({1e3 * seconds[0]:.1f} to {1e3 * seconds[2]:.1f})" if seconds else ""

    def modelled(step: Mapping[str, Any]) -> str:
        return f"{1e3 * step['modelled_seconds']:.1f}" if step.get("modelled_seconds") else ""

    def size(num_bytes: int) -> str:
        return format_bytes(num_bytes) if num_bytes else ""

    rows = [
        [step["name"], step["dtype"], step["backend"], step["status"], milliseconds(step["seconds"]), modelled(step)]
        + [milliseconds(step["plain_seconds"])]
        + [f"{1e3 * step[name]:.1f}" if step.get(name) else "" for name in ("queued_seconds", "plain_queued_seconds")]
        + [size(step[name]) for name in ("allocated_bytes", "projected_peak_bytes", "reserved_bytes", "plain_allocated_bytes")]
        + [step.get("commit", ""), _short(step["note"])]
        for step in steps
    ]
    times = ("case", "dtype", "backend", "status", "ms", "modelled ms", "eager ms", "queued ms", "eager queued ms")
    sizes = ("allocated", "projected", "reserved", "eager allocated")
    return Table(title="Steps", headers=(*times, *sizes, "commit", "note"), rows=rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect; 0, or 1 if the folder has no results."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_results.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that gpu.sh filled")
    parser.add_argument("--gpu", required=True, help="short name of the GPU in names of files, such as h100")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(arguments)
    names = collect(options.folder, options.gpu, options.out)
    for name in names:
        print(f"written: {name}.json, .md")
    if not names:
        print(f"gpu_results.py: no results of gpu.sh in {options.folder}", file=sys.stderr)
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
