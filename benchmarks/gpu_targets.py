"""Steps in a budget over the untiled step, by the time model, as users of an H200 have them: with the kernels of the library's table.

Plans are made on a CPU, with the table and the rates of a committed run of ``python -m sft tune`` on an H200. Each case has a limit of its
ratio that the project has set. Ratios with PyTorch's operators alone are for comparison; nothing runs on a GPU here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_plans import Case, build
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from rich.console import Console
from torch import nn

import sft
from sft.api import problem_builder, settings
from sft.backends.autotune.table import KernelTable, TableSelector
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.common.dataclass_json import dataclass_from_dict
from sft.planner.cost.gpu_time import GpuModel

_RESULTS = Path(__file__).resolve().parent / "results"
#: Cases and the largest ratio to the untiled step that they should have.
LIMITS = {
    Case(network="vgg16", size_px=2048, budget="1.2GiB"): 1.10,
    Case(network="resnet18", size_px=2048, budget="250MiB", frozen_norms=True): 1.30,
    Case(network="resnet18", size_px=2048, budget="4GiB"): 1.05,
    Case(network="vgg16", size_px=20_480, budget="11GiB"): 1.25,
    Case(network="unet", size_px=20_480, budget="40GiB"): 1.35,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Modelled seconds of a case.

    Attributes:
        case: the case.
        limit: largest ratio that it should have.
        plain_seconds: the untiled step with PyTorch's operators.
        aten_seconds: the step in the budget with PyTorch's operators.
        kernel_seconds: the same with the table of kernels.
    """

    case: Case
    limit: float
    plain_seconds: float
    aten_seconds: float
    kernel_seconds: float


def measured_gpu() -> tuple[KernelTable, GpuModel]:
    """Table of kernels and rates of the newest committed run of ``python -m sft tune``."""
    result = json.loads(max(_RESULTS.glob("*-gpu-table.json")).read_text(encoding="utf-8"))
    rates = {name: value for name, value in result["rates"].items() if name != "format"}
    return KernelTable.from_json(json.dumps(result["table"])), dataclass_from_dict(GpuModel, rates)


@contextmanager
def _planning_for(backend: KernelBackend, rates: GpuModel) -> Iterator[None]:
    """Plans for the meta device are those of a GPU with this backend and these rates."""
    with patch.object(settings, "planning_model", lambda *_: rates), patch.object(problem_builder, "backend_for", lambda *_: backend):
        yield


def _seconds(model: nn.Module, case: Case, budget: str, options: sft.Options) -> float:
    shape = (1, 3, case.size_px, case.size_px)
    return sft.plan(model, shape, budget=budget, device="cuda", options=options).estimated_seconds


def measure(case: Case) -> Ratios:
    """Plan a case."""
    table, rates = measured_gpu()
    model, fusion = build(case), FusionDevice(None)
    # The kernels of an H200 write operands that they compute to memory (`sft.backends.resolve.computes_operands`).
    kernels = KernelBackend(selector=TableSelector(table=table, allows_tf32=True), computes_operands=False, fusion_device=fusion)
    with _planning_for(KernelBackend(selector=None, fusion_device=fusion), rates):
        plain_seconds = _seconds(model, case, "4000GiB", sft.Options(strategy="none"))
        aten_seconds = _seconds(model, case, case.budget, sft.Options())
    with _planning_for(kernels, rates):
        kernel_seconds = _seconds(model, case, case.budget, sft.Options())
    return Ratios(case=case, limit=LIMITS[case], plain_seconds=plain_seconds, aten_seconds=aten_seconds, kernel_seconds=kernel_seconds)


HEADERS = ("network", "size", "budget", "untiled, ms", "PyTorch's operators, ms", "ratio", "kernels, ms", "ratio", "limit")


def cells(ratios: Ratios) -> list[str]:
    """The row of the table."""
    plain = ratios.plain_seconds
    return [
        *ratios.case.cells,
        *(f"{1e3 * plain:.1f}", f"{1e3 * ratios.aten_seconds:.1f}", f"{ratios.aten_seconds / plain:.2f}"),
        *(f"{1e3 * ratios.kernel_seconds:.1f}", f"{ratios.kernel_seconds / plain:.2f}", f"{ratios.limit:.2f}"),
    ]


def main() -> None:
    """Plan all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for case in LIMITS:
        results.append(measure(case))
        Console().print("  ".join(cells(results[-1])), highlight=False)
    notes = "Nothing ran on a GPU here: modelled times of an H200, in bfloat16, channels last. The untiled step has PyTorch's operators."
    raw = {"environment": environment(args.threads), "results": [asdict(result) for result in results]}
    table = Table(title="Steps in a budget over the untiled step", headers=HEADERS, rows=[cells(result) for result in results])
    write_results(result_stem(args.out, "gpu-targets"), raw, [table], notes, None)


if __name__ == "__main__":
    main()
