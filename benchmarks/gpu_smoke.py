"""Smoke test of a GPU: one training step of four networks in float64, in each mode of execution, against eager PyTorch.

Every case compares the output, all gradients of parameters and all buffers with those of eager PyTorch, and the peaks of the step with
the plan's projections. A line for each case is printed when the case ends: relative L2 error, bytes that the step allocated and reserved,
and the projections of both. A case is wrong if its error is above 1e-10, if it allocates or reserves more than projected, or if the plan
lacks the feature of the mode (copies to the host, streamed weights). The script ends with 1 if a case is wrong or fails, and with 2 without
the device.

``--device cpu`` tries all of it without a GPU. The CPU has no reserved bytes and no CUDA graphs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any, Literal

import numpy as np
import torch
from harness.gpu import (
    Deadline,
    convolution_settings,
    device_environment,
    measure_step_memory,
    memory_problem,
    reserved_bytes,
)
from torch import Tensor, nn

import sft
from sft.backends.autotune.benchmark import relative_error
from sft.cli.tune import STANDARD_NETWORKS
from sft.common.byte_units import format_bytes
from sft.sources import ArraySource
from sft.torch_runtime.cuda_graphs import recordable_programs

__all__ = ["MODES", "NETWORKS", "SmokeResult", "main", "run_case"]

#: Relative L2 error in float64 that rounding explains, of the gradients of a norm over a few hundred pixels as well.
ERROR_LIMIT = 1e-10
NETWORKS = {"vgg16": "vgg16", "resnet18-frozen": "resnet18", "resnet18-training": "resnet18 in training", "u-net": "u-net"}
Mode = Literal["strips", "offload", "streamed-weights", "cuda-graphs", "file"]
MODES: tuple[Mode, ...] = ("strips", "offload", "streamed-weights", "cuda-graphs", "file")
#: Rows and columns; no multiple of a strip. Except for U-Nets only larger images have activations that are worth an offload. Graphs are
#: recorded of programs that run several times, so the image has many strips.
_SIZE, _OFFLOAD_SIZE, _GRAPHS_SIZE = (168, 120), (520, 392), (392, 64)
_STRIP_ROWS = 32
_AMPLE = "64GiB"


@dataclass(kw_only=True)
class SmokeResult:
    """Outcome of one case.

    Attributes:
        network: name of the network.
        mode: mode of execution.
        status: ``ok``, ``wrong`` or ``failed``.
        note: reason of the status, or a restriction of the device.
        error: largest relative L2 error.
        allocated_bytes: peak of the step in the allocator's blocks.
        projected_bytes: the plan's projection of it.
        reserved_bytes: peak of the allocator's segments, resident tensors included; ``None`` on the CPU.
        projected_reserved_bytes: the plan's projection of it.
        seconds: time of the case, with capture and planning.
    """

    network: str
    mode: Mode
    status: Literal["ok", "wrong", "failed"] = "ok"
    note: str = ""
    error: float | None = None
    allocated_bytes: int | None = None
    projected_bytes: int | None = None
    reserved_bytes: int | None = None
    projected_reserved_bytes: int | None = None
    seconds: float = 0.0

    def line(self, *, has_reserved: bool) -> str:
        """The result in one line."""

        def size(num_bytes: int | None) -> str:
            return f"{'-' if num_bytes is None else format_bytes(num_bytes):>10}"

        error = "-" if self.error is None else f"{self.error:.1e}"
        cells = [f"{self.status:6} {self.network:18} {self.mode:17} error {error:>7}"]
        cells.append(f"allocated {size(self.allocated_bytes)} of {size(self.projected_bytes)} projected")
        if has_reserved:
            cells.append(f"reserved {size(self.reserved_bytes)} of {size(self.projected_reserved_bytes)} projected")
        cells.append(f"{self.seconds:5.1f} s")
        return "  ".join(cells) + (f"  {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """Eager PyTorch's step and its initial state.

    Attributes:
        model: the network before the step.
        pixels: the image, ``[1, 3, H, W]`` on the host.
        results: output, gradients and buffers after the step.
    """

    model: nn.Module
    pixels: Tensor
    results: list[Tensor]


@cache
def _reference(network: str, size: tuple[int, int], device: torch.device) -> _Reference:
    torch.manual_seed(0)
    model = STANDARD_NETWORKS[NETWORKS[network]]().to(device, torch.float64)
    pixels = torch.randn(1, 3, *size, dtype=torch.float64)
    eager = copy.deepcopy(model)
    y = _step(eager, pixels.to(device))
    return _Reference(model=model, pixels=pixels, results=_results(eager, y))


def _step(model: nn.Module, x: Any) -> Tensor:
    """Forward, and backward of a weighted sum."""
    y: Tensor = model(x)
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    y.backward(weights)
    return y.detach()


def _results(model: nn.Module, y: Tensor) -> list[Tensor]:
    """Output, gradients (zeros for a parameter without one) and floating-point buffers."""
    grads = [torch.zeros(()) if parameter.grad is None else parameter.grad for parameter in model.parameters()]
    return [y, *grads, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def _options(mode: Mode) -> sft.Options:
    if mode == "offload":
        return sft.Options(strategy="offload-dp", host_budget=_AMPLE)
    return sft.Options(
        tile=(_STRIP_ROWS, None), weights="stream" if mode == "streamed-weights" else "resident", cuda_graphs=mode == "cuda-graphs"
    )


def _compile(model: nn.Module, x: Any, mode: Mode) -> Any:
    """The compiled network. Offloading needs a budget that is too small without it: the smallest one that has a plan."""
    options, budget = _options(mode), _AMPLE
    if mode != "offload":
        return sft.compile(model, x, budget=budget, options=options)
    try:
        sft.compile(model, x, budget=1, options=options)
    except sft.BudgetError as error:
        return sft.compile(model, x, budget=error.needed_bytes, options=options)
    raise AssertionError("a budget of one byte has a plan")


def _input_of(pixels: Tensor, mode: Mode, device: torch.device, folder: Path) -> Callable[[], Any]:
    """Maker of the image of a step: a tensor on the device, or a source that reads the rows of a file."""
    if mode != "file":
        return lambda: pixels.to(device)
    path = folder / "image.npy"
    np.save(path, pixels[0].permute(1, 2, 0).contiguous().numpy())
    return lambda: ArraySource(path, layout="HWC", dtype=torch.float64)


def image_size(network: str, mode: Mode) -> tuple[int, int]:
    """Rows and columns of the image of a case."""
    if mode == "cuda-graphs":
        return _GRAPHS_SIZE
    return _OFFLOAD_SIZE if mode == "offload" and network != "u-net" else _SIZE


def run_case(network: str, mode: Mode, device: torch.device, size: tuple[int, int] | None = None) -> SmokeResult:
    """One case. Every exception is a result, so that one case does not hide the others."""
    result, started = SmokeResult(network=network, mode=mode), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _fill(result, device, size or image_size(network, mode), Path(folder))
    except Exception as error:
        result.status, result.note = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    result.seconds = time.monotonic() - started
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _fill(result: SmokeResult, device: torch.device, size: tuple[int, int], folder: Path) -> None:
    """Run the step twice: on the first model for the results, on the same plan once more for its memory."""
    reference = _reference(result.network, size, device)
    reserved_before = reserved_bytes(device)
    model = copy.deepcopy(reference.model)
    make = _input_of(reference.pixels, result.mode, device, folder)
    net = _compile(model, make(), result.mode)
    if result.mode == "cuda-graphs":  # the first call runs without graphs
        _step(net, make())
        net.load_state_dict(reference.model.state_dict())
        net.zero_grad(set_to_none=True)
    result.error = relative_error([each.to(device) for each in _results(net, _step(net, make()))], reference.results)
    net.zero_grad(set_to_none=True)
    memory = measure_step_memory(lambda: _step(net, make()), device, reserved_before)
    result.allocated_bytes, result.reserved_bytes = memory.allocated_bytes, memory.reserved_bytes
    result.projected_bytes, result.projected_reserved_bytes = net.plan.projected_peak_bytes, net.plan.projected_reserved_bytes or None
    problems = [] if result.error <= ERROR_LIMIT else [f"error above {ERROR_LIMIT:g}"]
    missing, restriction = _missing(net.plan, result.mode), ""
    if result.mode == "cuda-graphs":
        missing, restriction = _check_graphs(net, device)
    problems += [problem for problem in (memory_problem(memory, net.plan), missing) if problem]
    result.status, result.note = ("wrong", "; ".join(problems)) if problems else ("ok", restriction)


def _missing(plan: sft.Plan, mode: Mode) -> str:
    """A sentence if a plan lacks the feature of its mode; otherwise empty."""
    if mode == "offload":
        return "" if plan.host_bytes else "the plan copies no value to the host"
    if not any(segment.mode == "tiled" for segment in plan.segments):
        return "the plan has no strips"
    if mode == "streamed-weights" and not plan.streamed_weights:
        return "the plan streams no weights"
    return "the plan reads no source" if mode == "file" and "source" not in plan.input_placements else ""


def _check_graphs(net: Any, device: torch.device) -> tuple[str, str]:
    """A sentence if graphs could be recorded and none was replayed, and a restriction of the network or the device."""
    prepared = list(net._sft_engine.plan_cache.prepared.values())
    resources = [each.resources for each in prepared]
    if any(each.pass_graphs is not None for each in resources):
        num_passes = sum(each.pass_graphs.num_replays for each in resources if each.pass_graphs is not None)
        return ("", f"{num_passes} passes replayed") if num_passes else ("no pass was replayed as a graph", "")
    if not any(recordable_programs(each.region, training=True) for each in prepared):
        return "", "no strip of this network can be recorded as a graph"
    if device.type != "cuda":
        return "", "no graphs on a CPU: the strips ran one call at a time"
    num_replays = sum(each.graphs.num_replays for each in resources if each.graphs is not None)
    return ("", f"{num_replays} replays") if num_replays else ("no strip was replayed as a graph", "")


def _write(folder: Path, results: Sequence[SmokeResult], environment: dict[str, str]) -> None:
    """Save the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-gpu-smoke.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"environment": environment, "cases": [asdict(result) for result in results]}, indent=1) + "\n")
    temporary.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The cases of one process.

    Attributes:
        cases: networks and modes, in order.
        device: the device.
        size: size of all images; ``None`` for those of the cases.
        deadline: end of the time in which cases begin.
    """

    cases: Sequence[tuple[str, Mode]]
    device: torch.device
    size: tuple[int, int] | None
    deadline: Deadline

    def results(self) -> Iterator[SmokeResult]:
        """Results of the cases, each when it ends."""
        with convolution_settings():
            for network, mode in self.cases:
                if self.deadline.is_over:
                    return
                yield run_case(network, mode, self.device, self.size)


def _send(run: _Run, queue: Any) -> None:
    """Put the results of a run on a queue, and ``None`` at its end."""
    try:
        for result in run.results():
            queue.put(result)
    finally:
        queue.put(None)


def _results_of(runs: Sequence[_Run]) -> Iterator[SmokeResult]:
    """Results of several runs, each in a process of its own."""
    if len(runs) == 1:
        yield from runs[0].results()
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_send, args=(run, queue), daemon=True) for run in runs]
    for process in processes:
        process.start()
    num_ended = 0
    while num_ended < len(processes):
        try:
            result = queue.get(timeout=1)
        except Empty:
            if any(process.is_alive() for process in processes):
                continue
            return  # a process ended by a signal puts no end on the queue
        if result is None:
            num_ended += 1
        else:
            yield result


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_smoke.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="device to test, such as cuda:1, or cpu to try the script (default: cuda)")
    parser.add_argument("--only", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS), metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--size", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="size of all images (default: by the case)")
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes")
    parser.add_argument("--processes", type=int, default=1, help="run the networks in so many processes at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 0 if all are right, 1 if one is not, 2 without the device."""
    options = parse(arguments)
    device, deadline = torch.device(options.device), Deadline.after(options.minutes)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        print(f"gpu_smoke.py: no device {options.device} on this machine; --device cpu tries the script without a GPU", file=sys.stderr)
        return 2
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    size = None if options.size is None else tuple(options.size)
    results: list[SmokeResult] = []
    modes = [mode for mode in MODES if mode in options.modes]
    groups = [options.only[number :: max(1, options.processes)] for number in range(max(1, options.processes))]
    runs = [
        _Run(cases=[(network, mode) for mode in modes for network in group], device=device, size=size, deadline=deadline)
        for group in groups
        if group
    ]
    num_cases = sum(len(run.cases) for run in runs)
    environment = device_environment(device)
    print(", ".join(f"{name} {environment[name]}" for name in ("device", "torch", "triton", "python", "commit")), flush=True)
    for result in _results_of(runs):
        results.append(result)
        print(result.line(has_reserved=device.type == "cuda"), flush=True)
        if options.out is not None:
            _write(options.out, results, environment)
    num_right = sum(result.status == "ok" for result in results)
    left = f", no time for {num_cases - len(results)} of {num_cases}" if len(results) < num_cases else ""
    print(f"{num_right} of {len(results)} right{left}, {sum(result.seconds for result in results):.0f} s", flush=True)
    return 0 if num_right == num_cases else 1


if __name__ == "__main__":
    sys.exit(main())
