"""Verification of kernel-benchmark cases under Triton's interpreter, served by ``serve_triton``. See ``triton_process``.

A job is a dictionary with the ``name`` of a case; its result is the largest relative error of the case's results in its last dtype.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

import kernel_bench  # a folder of scripts
import kernel_launches

#: enough to detect a wrong order of slots; the interpreter runs a program for each
kernel_launches.num_weight_splits, kernel_launches.num_norm_splits = 2, 4


def run(job: dict[str, Any]) -> float:
    """Verify one case at a quarter of its small size."""
    (case,) = (case for case in kernel_bench.all_cases() if case.name == job["name"])
    error: float = kernel_bench.verify(kernel_bench.shrunken(case), case.dtypes[-1], torch.device("cpu"))
    return error
