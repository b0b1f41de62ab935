"""Capture time: in-place writes removed from an exported program directly, against the exporter's two further traces.

Both ways capture the same models in one process, in turns: `sft.analysis.frontend.functionalize`'s own, and
``run_decompositions({})``, which it falls back to: in fp32, and under autocast, whose casts either way has to find. The
two graphs must be the same up to the names of values, or nothing is reported. Times are read from the clock of the
process (processor seconds), with one thread, so that other work on the machine weighs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console
from torch import nn
from torch.export import ExportedProgram

from sft.analysis.frontend.autocast import AutocastPolicy
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.functionalize import FunctionalProgram, functionalize
from sft.analysis.ir.graph import Graph, map_refs

MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: load_models().vgg16(num_classes=10, width=16),
    "darknet19": lambda: load_models().darknet19(num_classes=10, width=16),
    "resnet18": lambda: load_models().resnet18(num_classes=10, width=16),
    "resnet50": lambda: load_models().resnet50(num_classes=10, width=16),
    "unet": lambda: load_models().unet(num_classes=2, levels=5, width=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One capture; processor seconds.

    Attributes:
        capture_seconds: of all of it: exporting, taking the writes out, reading the graph.
        functional_seconds: of taking the writes out.
        is_direct: whether that was done directly; some programs can only go the exporter's way.
    """

    capture_seconds: float
    functional_seconds: float
    is_direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Both ways, one after the other."""

    direct: Timed
    decomposed: Timed

    @property
    def ratio(self) -> float:
        """Direct capture over the exporter's way."""
        return self.direct.capture_seconds / self.decomposed.capture_seconds

    @property
    def share(self) -> float:
        """Share of the further traces in a capture of the exporter's way."""
        return self.decomposed.functional_seconds / self.decomposed.capture_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A model and its rounds."""

    model: str
    precision: str
    num_operators: int
    rounds: tuple[Round, ...]

    def cells(self) -> list[str]:
        """The row of the table."""
        ratios, shares = [one.ratio for one in self.rounds], [one.share for one in self.rounds]
        return [
            self.model,
            self.precision,
            str(self.num_operators),
            "yes" if all(one.direct.is_direct for one in self.rounds) else "no: fell back",
            f"{median(one.direct.capture_seconds for one in self.rounds):.2f}",
            f"{median(one.direct.functional_seconds for one in self.rounds):.3f}",
            f"{median(one.decomposed.capture_seconds for one in self.rounds):.2f}",
            f"{median(one.decomposed.functional_seconds for one in self.rounds):.2f}",
            f"{median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]",
            f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        ]


PRECISIONS = {"fp32": None, "autocast bf16": torch.bfloat16}

HEADERS = (
    "model",
    "precision",
    "operators",
    "direct way taken",
    "direct: capture s",
    "of it taking writes out s",
    "exporter's: capture s",
    "of it further traces s",
    "their share",
    "direct / exporter's",
)


def timed_capture(model: nn.Module, shape: tuple[int, ...], *, direct: bool, autocast: torch.dtype | None = None) -> tuple[Capture, Timed]:
    """Capture once, one way or the other."""
    seconds, is_direct = 0.0, False

    def watched(exported: ExportedProgram, casts: AutocastPolicy | None = None) -> FunctionalProgram:
        nonlocal seconds, is_direct
        started = time.process_time()
        with nullcontext() if direct else patch("sft.analysis.frontend.functionalize.functionalize_by_rewriting", lambda *_: None):
            result = functionalize(exported, casts)
        seconds += time.process_time() - started
        is_direct = result.program is exported
        return result

    with patch("sft.analysis.frontend.export.functionalize", watched):
        started = time.process_time()
        result = capture(model, [shape], [torch.float32], torch.device("cpu"), autocast=autocast)
        capture_seconds = time.process_time() - started
        return result, Timed(capture_seconds=capture_seconds, functional_seconds=seconds, is_direct=is_direct)


def unnamed(graph: Graph) -> tuple[Any, ...]:
    """A graph with its values numbered, equal for both ways."""
    names = {node.name: f"v{i}" if node.kind == "operator" else node.name for i, node in enumerate(graph.nodes)}
    nodes = tuple(
        replace(
            node,
            name=names[node.name],
            arguments=tuple((key, map_refs(value, lambda ref: names[ref])) for key, value in node.arguments),
        )
        for node in graph.nodes
    )
    outputs = tuple(names[name] for name in graph.outputs)
    return nodes, outputs, tuple((names[name], buffer) for name, buffer in graph.updates)


def results(shape: tuple[int, ...], num_rounds: int) -> Iterator[Result]:
    """Each model in training; the way that goes first changes each round, and one round before them warms up.

    Raises:
        RuntimeError: the two ways give different graphs.
    """
    for (name, make), (precision, autocast) in product(MODELS.items(), PRECISIONS.items()):
        torch.manual_seed(0)
        model = make().train()
        rounds = []
        for number in range(num_rounds + 1):
            captures: dict[bool, tuple[Capture, Timed]] = {}
            for direct in (True, False) if number % 2 else (False, True):
                captures[direct] = timed_capture(model, shape, direct=direct, autocast=autocast)
            if unnamed(captures[True][0].graph) != unnamed(captures[False][0].graph):
                raise RuntimeError(f"{name}: the two ways give different graphs; run tests/analysis/frontend/test_functionalize.py")
            rounds.append(Round(direct=captures[True][1], decomposed=captures[False][1]))
        num_operators = sum(node.kind == "operator" for node in captures[True][0].graph.nodes)
        yield Result(model=name, precision=precision, num_operators=num_operators, rounds=tuple(rounds[1:]))


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Taking the writes out of a program directly, against the exporter's further traces.")
    parser.add_argument("--size", type=positive_int, default=256, help="height and width in px, both symbolic (default: 256)")
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=6,
        help="rounds that count, after one to warm up; even, so that each way goes first as often (default: 6)",
    )
    add_common_arguments(parser)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    console = Console()
    torch.set_num_threads(args.threads)
    measured = []
    for result in results((2, 3, args.size, args.size), args.rounds):
        measured.append(result)
        console.print(" | ".join(result.cells()), markup=False)
    table = Table(title="Capturing a model in training", headers=HEADERS, rows=[one.cells() for one in measured])
    raw = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [{**asdict(one), "ratios": [r.ratio for r in one.rounds], "shares": [r.share for r in one.rounds]} for one in measured],
    }
    notes = (
        "Processor seconds of one thread, medians; share and ratio: median [least, most] of rounds in which both ways took turns. Both "
        "gave the same graph. Where the direct way cannot be taken, both are the exporter's. Other work ran on the machine."
    )
    written = write_results(result_stem(args.out, "capture"), raw, [table], notes, None)
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
