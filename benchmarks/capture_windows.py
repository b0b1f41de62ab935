"""Capture time saved by the limit on operations of a symbolic size (`sft.analysis.frontend.torch_patches`).

Networks that cut images into windows, captured three times each: for one size, as `sft` captures them, and with the exporter following
every size. It takes the environment of `make test-zoo`, for the models are timm's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from rich.console import Console
from torch import nn

from sft.analysis.frontend.capture import Capture, capture
from sft.common.model_zoo import import_library

#: With the size that they are made for.
MODELS = {
    "resnet50": 96,
    "convnext_atto": 96,
    "pvt_v2_b0": 96,
    "mobilevit_xxs": 96,
    "mobilevitv2_050": 96,
    "coatnet_nano_rw_224": 224,
    "maxvit_pico_rw_256": 256,
}
HEADERS = ["model", "px", "operators", "one size: s", "as captured: s", "for any size", "all followed: s", "then for any size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Processor seconds of one capture of each kind."""

    model: str
    size_px: int
    num_operators: int
    one_size_seconds: float
    seconds: float
    is_symbolic: bool
    followed_seconds: float
    followed_is_symbolic: bool

    def cells(self) -> list[str]:
        """A row of the table."""
        seconds = [f"{value:.1f}" for value in (self.one_size_seconds, self.seconds, self.followed_seconds)]
        holds = ["yes" if value else "no" for value in (self.is_symbolic, self.followed_is_symbolic)]
        return [self.model, str(self.size_px), str(self.num_operators), seconds[0], seconds[1], holds[0], seconds[2], holds[1]]


def timed(model: nn.Module, size_px: int, *, any_size: bool = True) -> tuple[Capture, float]:
    """A capture, and its processor seconds."""
    begin = time.process_time()
    result = capture(model, [(2, 3, size_px, size_px)], [torch.float32], torch.device("cpu"), any_size=any_size)
    return result, time.process_time() - begin


def measured(name: str, size_px: int) -> Result:
    """All three captures of a model."""
    model: nn.Module = import_library("timm").create_model(name, pretrained=False, num_classes=5).train()
    timed(model, size_px, any_size=False)  # warms up
    one_size, one_size_seconds = timed(model, size_px, any_size=False)
    found, seconds = timed(model, size_px)
    with patch("sft.analysis.frontend.torch_patches._MAX_OPERATIONS", 10**9):
        followed, followed_seconds = timed(model, size_px)
    return Result(
        model=name,
        size_px=size_px,
        num_operators=len(one_size.graph.operators),
        one_size_seconds=one_size_seconds,
        seconds=seconds,
        is_symbolic=_is_symbolic(found),
        followed_seconds=followed_seconds,
        followed_is_symbolic=_is_symbolic(followed),
    )


def _is_symbolic(captured: Capture) -> bool:
    return any(not isinstance(extent, int) for extent in captured.graph[captured.graph.inputs[0]].shape)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Captures of networks of windows, with sizes followed as far as that pays, and always.")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), help="which of them (default: all)")
    add_common_arguments(parser)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, results = Console(), list[Result]()
    for name in args.models:
        results.append(measured(name, MODELS[name]))
        console.print(" | ".join(results[-1].cells()), markup=False)
    raw: dict[str, Any] = {"environment": environment(args.threads), "results": [asdict(one) for one in results]}
    table = Table(title="Capturing a model in training", headers=HEADERS, rows=[one.cells() for one in results])
    notes = (
        "Processor seconds of one thread; one capture of each kind, in this order, after one to warm up. What is first to follow sizes "
        "finds SymPy's caches empty. Other work ran on the machine."
    )
    console.print(write_results(result_stem(args.out, "capture-windows"), raw, [table], notes, None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
