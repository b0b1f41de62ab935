"""Host time of one call of a network whose passes are recorded as CUDA graphs, without a GPU.

The recorder of the passes is replaced: a replay does nothing. What remains is the host's work of a call: the comparison of the model with
its earlier state, the lookup of the plan, copies into and out of the recording, and autograd. The network is a ResNet-18 in training mode
with few channels, so that its copies take little time. A GPU waits until a replay, and computes during the rest of the call. Several
checkouts of this project take turns, each in a process of its own:

    python benchmarks/call_overhead.py --checkouts ../before . --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console
from torch import Tensor

import sft
from examples.models import resnet18
from sft.torch_runtime.pass_graphs import PassGraphs

_SHAPE, _WIDTH, _CALLS = (1, 3, 64, 64), 8, 200


class _IdleRecorder:
    """Recorder that runs a pass once; its replays note the time, and do nothing.

    Attributes:
        replayed: processor time of the last replay, in seconds.
    """

    is_recorded = False
    replayed = 0.0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work."""
        work()
        return self._replay

    def _replay(self) -> None:
        self.replayed = time.thread_time()

    def allocate_inputs(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make the inputs."""
        return make()

    def close(self) -> None:
        """Free nothing."""


def _check_step(net: Any, x: Tensor) -> None:
    """Check the gradients of a step against those of plain PyTorch, in float64."""
    plain = resnet18(4, width=_WIDTH).double()
    plain.load_state_dict(net.state_dict())
    compiled = sft.compile(resnet18(4, width=_WIDTH).double(), _SHAPE, budget="1GiB")
    compiled.load_state_dict(net.state_dict())
    for each in (plain, compiled):
        each(x.double()).sum().backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        if not torch.allclose(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10):
            raise SystemExit(f"the gradient of {name} is not that of plain PyTorch: no times")


def _record(net: Any, run: Callable[[], object]) -> _IdleRecorder:
    """Replace the recorder of the plan of a call."""
    run()
    prepared = net._sft_engine.plan_cache.prepared
    key = next(reversed(prepared))
    graph = prepared[key].captured.phases.graph
    recorder = _IdleRecorder()
    graphs = PassGraphs(fixed=frozenset(node.name for node in graph.nodes) - graph.call_leaves, recorder=recorder)
    prepared[key] = replace(prepared[key], resources=replace(prepared[key].resources, pass_graphs=graphs))
    for _ in range(3):
        run()
    if not graphs.num_replays:
        raise SystemExit("the passes were not replayed: no times")
    return recorder


def measure(num_calls: int = _CALLS) -> dict[str, float]:
    """Median milliseconds of processor time of each kind of call, over this number of calls."""
    torch.manual_seed(0)
    net = sft.compile(resnet18(4, width=_WIDTH), _SHAPE, budget="1GiB")
    x = torch.randn(_SHAPE)
    _check_step(net, x)
    times: dict[str, list[float]] = {
        f"{kind} call{extent}": [] for kind in ("forward", "backward", "inference") for extent in (", until its replay", "")
    }

    def note(kind: str, start: float) -> None:
        times[f"{kind} call"].append(time.thread_time() - start)
        times[f"{kind} call, until its replay"].append(recorder.replayed - start)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        start = time.thread_time()
        loss = net(x)
        note("forward", start)
        loss = loss.sum()
        start = time.thread_time()
        loss.backward()
        note("backward", start)

    def predict() -> None:
        with torch.no_grad():
            start = time.thread_time()
            net(x)
            note("inference", start)

    recorder = _IdleRecorder()
    for run, is_training in ((step, True), (predict, False)):
        net.train(is_training)
        recorder = _record(net, run)
        for _ in range(num_calls):
            run()
    return {name: 1e3 * median(values[-num_calls:]) for name, values in times.items()}


def _measure_in_process(checkout: Path, threads: int) -> dict[str, float]:
    variables = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    output = subprocess.run(command, env=variables, check=True, capture_output=True, text=True, cwd=checkout).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def rows(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """For each kind of call and checkout the median, least and greatest of the rounds."""
    table = []
    for kind in next(iter(results.values()))[0]:
        for checkout, rounds in results.items():
            values = [measured[kind] for measured in rounds]
            table.append([kind, checkout, *(f"{number:.2f}" for number in (median(values), min(values), max(values)))])
    return table


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Host time of a call whose passes are recorded.")
    parser.add_argument("--rounds", type=positive_int, default=5, help="processes of each checkout (default: 5)")
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path()], help="folders of this project (default: the present one)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_common_arguments(parser)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure()))
        return 0
    commits = [
        subprocess.run(["git", "-C", str(path), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        for path in args.checkouts
    ]
    results: dict[str, list[dict[str, float]]] = {commit: [] for commit in commits}
    for _ in range(args.rounds):
        for commit, path in zip(commits, args.checkouts, strict=True):
            results[commit].append(_measure_in_process(path, args.threads))
    table = Table(title="Milliseconds of processor time", headers=("call", "commit", "median", "least", "greatest"), rows=rows(results))
    notes = (
        f"ResNet-18 in training mode with {_WIDTH} channels in its first stage, {_SHAPE}, float32, and in evaluation mode for the "
        f"inference call. The replay of a recorded pass does nothing. Each round is a process, in turns; its number is the median of "
        f"{_CALLS} calls. Processor time of the calling thread, on a machine that ran other work as well."
    )
    raw: dict[str, Any] = {"environment": environment(args.threads), "settings": {"rounds": args.rounds}, "results": results}
    written = write_results(result_stem(args.out, "call-overhead"), raw, [table], notes, None)
    console = Console()
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
