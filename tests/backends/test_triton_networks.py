"""Networks with ``backend="triton"`` under Triton's interpreter: the accuracy of eager PyTorch against fp64, within the projected bytes,
with equal bits in each step and the planned number of operations. Also every rewritten group alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sft
from tests.helpers.triton_process import interpret_networks, needs_triton

pytestmark = needs_triton

_MOST = 1.1
"""Our median error over eager's."""
#: Network, shape, options, number of seeds, and kernels that must run.
_STEPS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int, set[str]]] = {
    "strips, batch 2": (
        "vgg",
        (2, 3, 8, 6),
        {"tile": (4, None)},
        1,
        {
            "PooledConvolutionCall.run",
            "ConvolutionCall.run",
            "DataGradientCall.run",
            "GradientSumsCall.add_gradients",
        },
    ),
    "panels": ("vgg", (1, 3, 8, 12), {"tile": (8, 8)}, 1, {"PooledConvolutionCall.run", "ConvolutionCall.run"}),
    "eval norm": (
        "residual, eval norm",
        (1, 3, 12, 8),
        {"tile": (8, None)},
        3,
        {"FrozenNormCall.run", "FrozenNormCall.sum", "FrozenNormCall.differentiate", "LoadRowsCall.run"},
    ),
    "folded norm": ("residual, eval norm", (1, 3, 12, 8), {"tile": (8, None)}, 1, {"ConvolutionCall.run", "WeightGradientCall.run"}),
    "train norm": ("residual, train norm", (2, 3, 8, 6), {"tile": (4, None)}, 1, {"MomentsCall.run", "AffineCall.run", "AffineCall.sum"}),
    "u-net": ("u-net", (1, 3, 8, 6), {"tile": (4, None)}, 3, {"ResizeCall.run", "MaxPoolCall.run", "MaxPoolCall.differentiate"}),
    "sums of branches": ("branches", (1, 3, 10, 6), {"tile": (8, None)}, 1, {"ConvolutionCall.run", "WeightGradientCall.run"}),
    "whole": (
        "vgg",
        (1, 3, 9, 8),
        {"strategy": "none"},
        1,
        {"PooledConvolutionCall.run", "DataGradientCall.run", "GradientSumsCall.write_gradients"},
    ),
    "windows": (
        "windows",
        (1, 3, 13, 10),
        {"tile": (9, None)},
        7,
        {"AveragePoolCall.run", "AveragePoolCall.differentiate", "MaxPoolCall.differentiate"},
    ),
    "volume": (
        "volume",
        (1, 2, 6, 5, 4),
        {"tile": (4, None)},
        1,
        {"ConvolutionCall.run", "DataGradientCall.run", "WeightGradientCall.run"},
    ),
}


@pytest.mark.parametrize("case", _STEPS)
def test_steps_are_exact_and_planned(case: str, tmp_path: Path) -> None:
    name, shape, options, seeds, wanted = _STEPS[case]
    job = {"run": "steps", "name": name, "shape": shape, "options": options, "seeds": seeds, "folds_norms": case != "eval norm"}
    (step,) = interpret_networks([job], tmp_path)
    assert wanted <= step["calls"].keys()
    assert step["ours"] <= _MOST * step["eager"]
    assert step["same"]
    assert step["flops"] == step["planned_flops"]
    assert step["measured"] <= step["projected"] <= step["measured"] + max(step["measured"] // 100, 64 * 1024)
    plan = sft.Plan.from_json(step["plan"])
    assert any(segment.backend == "mixed" for segment in plan.segments)
    assert plan.total_bytes <= plan.budget_bytes


@pytest.mark.parametrize(("name", "shape"), [("residual, eval norm", (1, 3, 12, 8)), ("volume, eval norm", (1, 2, 6, 4, 5))], ids=str)
def test_frozen_norms_join_convolutions_where_no_gradient_follows(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    job = {"run": "inference", "name": name, "shape": shape, "options": {"tile": (shape[2] - 4, None)}, "folds_norms": False}
    (step,) = interpret_networks([job], tmp_path)
    assert step["calls"].keys() >= {"NormedConvolutionCall.run", "ConvolutionCall.run"}
    assert "FrozenNormCall.run" not in step["calls"]
    assert step["ours"] <= _MOST * step["eager"]
    assert step["flops"] == step["plain_flops"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_group_equals_the_operators_it_replaces(dtype: str, tmp_path: Path) -> None:
    """Also in the subsets that a measured table may choose. The interpreter truncates to bfloat16: an error of one unit in the last
    place of each result, and of each value between two kernels."""
    cases = [("residual, eval norm", (1, 3, 8, 6)), ("u-net", (1, 3, 8, 6))] + [("vgg", (1, 3, 8, 6))] * (dtype == "float32")
    common = {"run": "trials", "options": {"tile": (8, None)}, "dtype": dtype, "folds_norms": False}
    jobs = [{"name": name, "shape": shape, **common} for name, shape in cases]
    groups = [group for network_groups in interpret_networks(jobs, tmp_path) for group in network_groups]
    limit = 2e-6 if dtype == "float32" else 2.0**-6
    wrong = [f"{label}: {kernels:.2g} (ATen {aten:.2g})" for _, label, kernels, aten in groups if not kernels <= max(limit, 2 * aten)]
    assert not wrong, "\n".join(wrong)
    operators = {operator for operator, *_ in groups}
    assert operators >= {"conv2d", "conv2d data gradient", "conv2d weight gradient", "conv2d data and weight gradient"}
    assert operators >= {"frozen norm", "frozen norm gradient", "max pool", "resize", "resize gradient"}
