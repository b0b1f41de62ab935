"""Whole segments and whole training steps on a GPU: ``backend="auto"`` (what ``python -m sft tune`` measured), ATen alone and every kernel,
against eager PyTorch in channels-last layout.

Before a case is timed its step is compared with eager PyTorch in float64 at a small size: the relative L2 error of output and gradients
may be 1.1 times that of eager PyTorch in the case's own type, the median over seeds. One that is further off gets no time, and the script
exits with 1. Eager and ours take turns; peaks are the allocator's, allocated and reserved, of the step alone.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_bench import environment
from torch import Tensor, nn

import sft
from sft.backends.autotune.benchmark import relative_error
from sft.cli.tune import STANDARD_NETWORKS
from sft.common.byte_units import format_bytes, parse_bytes

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
_MOST = 1.1
_NUM_SEEDS = 3
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SHARE_OF_PLAIN = 8
"""A whole step of ours gets this part of the memory that eager PyTorch's activations take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A network and the size of its input."""

    name: str
    make: Callable[[], nn.Module]
    num_channels: int
    size: int
    has_plain: bool
    """Whether eager PyTorch can take the step on the device at all."""
    tile: tuple[int, int | None] | None = None
    """Forced strips, for a segment on its own."""
    budget: str | None = None
    """None for a part of what eager PyTorch needs."""
    dtypes: tuple[str, ...] = ("bf16", "fp32")


@dataclass(kw_only=True)
class StepRecord:
    """What is known about a case in one dtype with one backend."""

    name: str
    dtype: str
    backend: str
    status: str = "ok"
    note: str = ""
    error: float | None = None
    eager_error: float | None = None
    seconds: tuple[float, float, float] | None = None
    """Least, median and most of the rounds."""
    plain_seconds: tuple[float, float, float] | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    plain_allocated_bytes: int = 0
    projected_peak_bytes: int = 0
    redundancy: float = 0.0
    num_kernel_operators: int = 0


def _block(num_in: int, width: int) -> nn.Module:
    """A block of two convolutions of VGG."""
    first = nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def step_cases() -> list[StepCase]:
    """Two segments, a step that eager PyTorch can take, and one that it cannot."""
    vgg = STANDARD_NETWORKS["vgg16"]
    return [
        StepCase(name="vgg block 1", make=functools.partial(_block, 3, 64), num_channels=3, size=2048, has_plain=True, tile=(256, None)),
        StepCase(name="vgg block 2", make=functools.partial(_block, 64, 128), num_channels=64, size=1024, has_plain=True, tile=(256, None)),
        StepCase(name="vgg16 step", make=vgg, num_channels=3, size=2048, has_plain=True),
        StepCase(name="vgg16 large", make=vgg, num_channels=3, size=20480, has_plain=False, budget="11GiB", dtypes=("bf16",)),
    ]


def _step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients; the input needs none where it is an image."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    y = module(x)
    y.sum().backward()
    return [y.detach(), *([x.grad] if x.grad is not None else []), *(p.grad for p in module.parameters() if p.grad is not None)]


def _input(case: StepCase, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(1, case.num_channels, size, size, generator=random, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(case.num_channels > 3)


def _network(case: StepCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = case.make().to(device, dtype)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def verify_step(case: StepCase, dtype: torch.dtype, backend: str, device: torch.device, size: int) -> tuple[float, float]:
    """Medians over seeds of our error and eager PyTorch's, in strips, at a small size."""
    ours, eager = [], []
    for seed in range(_NUM_SEEDS):
        model = _network(case, dtype, device, seed)
        x = _input(case, size, dtype, device, seed)
        options = sft.Options(backend=backend, tile=(max(32, size // 4), None))
        net = sft.compile(copy.deepcopy(model), tuple(x.shape), budget="64GiB", options=options)
        truth = _step(copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad))
        ours.append(relative_error(_step(net, x), truth))
        eager.append(relative_error(_step(model, x), truth))
    return statistics.median(ours), statistics.median(eager)


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


def _peak(step: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes that a step allocates and reserves above its start; in a first one cuDNN looks for algorithms in all memory that is free."""
    step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved


def run_step(case: StepCase, name: str, backend: str, device: torch.device, options: argparse.Namespace) -> StepRecord:
    """Verify, then time. Whatever a step raises is noted."""
    record, dtype = StepRecord(name=case.name, dtype=name, backend=backend), _DTYPES[name]
    try:
        record.error, record.eager_error = verify_step(case, dtype, backend, device, options.small)
        if not record.error <= _MOST * record.eager_error:
            record.status, record.note = "wrong", f"error {record.error:.3g}, eager PyTorch's {record.eager_error:.3g}"
        elif not options.verify:
            _time_step(case, record, dtype, device, options.rounds)
    except Exception as error:  # one case that does not run must not hide the others
        record.status, record.note = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    torch.cuda.empty_cache()
    return record


def _time_step(case: StepCase, record: StepRecord, dtype: torch.dtype, device: torch.device, rounds: int) -> None:
    model, x = _network(case, dtype, device), _input(case, case.size, dtype, device)
    steps: list[Callable[[], object]] = []
    budget: int | str = case.budget or "64GiB"
    if case.has_plain:
        plain = copy.deepcopy(model)
        record.plain_allocated_bytes, _ = _peak(functools.partial(_step, plain, x), device)
        steps.append(functools.partial(_step, plain, x))
    if case.budget is None and case.tile is None:
        resident = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        budget = resident + x.numel() * x.element_size() + math.ceil(record.plain_allocated_bytes / _SHARE_OF_PLAIN)
    wishes = sft.Options(backend=record.backend, tile=case.tile)
    net: Any = sft.compile(model, tuple(x.shape), budget=budget, options=wishes)
    steps.append(functools.partial(_step, net, x))
    record.allocated_bytes, record.reserved_bytes = _peak(steps[-1], device)
    record.projected_peak_bytes, record.redundancy = net.plan.projected_peak_bytes, net.plan.redundancy
    record.num_kernel_operators = sum(len(segment.kernels) for segment in net.plan.segments)
    found = _measure(steps, rounds, functools.partial(torch.cuda.synchronize, device))
    record.seconds, record.plain_seconds = found[-1], found[0] if case.has_plain else None
    if case.budget is not None and net.plan.total_bytes > parse_bytes(case.budget):
        record.status, record.note = "wrong", f"planned {format_bytes(net.plan.total_bytes)} of {case.budget}"


def step_table(records: Sequence[StepRecord]) -> str:
    """The records in Markdown."""
    heads = ("case", "dtype", "backend", "error / eager's", "ms", "eager ms", "eager / ours", "allocated", "reserved", "projected", "eager")
    lines = ["| " + " | ".join((*heads, "FLOPs / plain", "kernels", "note")) + " |", "| --- " * (len(heads) + 3) + "|"]
    for r in records:

        def milliseconds(seconds: tuple[float, float, float] | None) -> str:
            return "" if seconds is None else f"{1e3 * seconds[1]:.1f} ({1e3 * seconds[0]:.1f} to {1e3 * seconds[2]:.1f})"

        ratio = f"{r.plain_seconds[1] / r.seconds[1]:.2f}" if r.seconds and r.plain_seconds else ""
        error = f"{r.error / r.eager_error:.2f}" if r.error is not None and r.eager_error else ""
        sizes = [
            format_bytes(n) if n else "" for n in (r.allocated_bytes, r.reserved_bytes, r.projected_peak_bytes, r.plain_allocated_bytes)
        ]
        note = "" if r.status == "ok" else f"**{r.status}**: {r.note}".replace("|", "\\|")
        cells = [r.name, r.dtype, r.backend, error, milliseconds(r.seconds), milliseconds(r.plain_seconds), ratio, *sizes]
        lines.append("| " + " | ".join([*cells, f"{r.redundancy:.3f}" if r.redundancy else "", str(r.num_kernel_operators), note]) + " |")
    return "\n".join(lines)


def write_steps(stem: Path, records: Sequence[StepRecord], facts: dict[str, str]) -> None:
    """Replace the results by what is known now."""
    raw = {"environment": facts, "steps": [asdict(record) for record in records]}
    parts = [f"# {stem.name}", "Medians, with least and most. Bytes are above the start of a step, as the allocator counts them."]
    parts += [step_table(records), "## Environment", "\n".join(f"- {key}: {value}" for key, value in facts.items())]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in {".json": json.dumps(raw, indent=1) + "\n", ".md": "\n\n".join(parts) + "\n"}.items():
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
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of the results")
    return parser.parse_args(arguments)


def main() -> int:
    """Run; 0 if everything was right, 1 if not, 2 without a GPU."""
    options = parse()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no CUDA device here, and nothing else can be measured; run it on a machine with a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    facts, records = environment(), list[StepRecord]()
    stem = options.out / f"{datetime.date.today().isoformat()}-gpu-steps"
    for case in step_cases():
        if options.only is not None and case.name not in options.only:
            continue
        for name in [name for name in case.dtypes if name in options.dtypes]:
            for backend in options.backends:
                records.append(run_step(case, name, backend, device, options))
                print(step_table(records[-1:]).splitlines()[-1], flush=True)
                write_steps(stem, records, facts)
    bad = [record for record in records if record.status != "ok"]
    print(f"{len(records) - len(bad)} of {len(records)} right; written: {stem.name}.json, .md")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
