"""Launches of all possible table entries: each class of the standard networks with a kernel, in every launch variant, recorded from
``python -m sft tune`` and compiled ahead of time for sm_80 and sm_90.

``SFT_KERNEL_SWEEP=1`` compiles (``make test-kernels``), network by network; launches that are equal for the compiler are compiled once.
``-rP`` shows the counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft.cli.tune import STANDARD_NETWORKS
from tests.helpers.triton_gates import Registers, is_swept, problems_of
from tests.helpers.triton_process import compile_kernels, needs_triton

_RECORD = Path(__file__).with_name("table_registers.json")
_NUMBERS = ("bfloat16", "float16", "float32", "tf32")
#: kernels that multiply blocks
_FEW_CHANNELS = ("few_channels_kernel", "few_channels_gradient_kernel")
_PRODUCTS = ("conv2d_kernel", "data_gradient_kernel", "weight_gradient_kernel", "row_streaming_kernel", *_FEW_CHANNELS)
#: costs of compiled code, by target and job
_COSTS: dict[tuple[str, str], dict[str, int]] = {}

_Launches = list[tuple[str, str, list[dict[str, Any]]]]


def _collected(network: str, numbers: str, folder: Path, *, affected: bool = False, warp_groups: bool = True) -> _Launches:
    """Launches by class and split, both named."""
    job = {"network": network, "numbers": numbers, "affected": affected, "warp_groups": warp_groups}
    (compiled,) = compile_kernels([job], folder)
    launches: _Launches = compiled
    return launches


def _label(job: dict[str, Any]) -> str:
    """A kernel with its types and constants: launches that differ in the divisibility of a stride share it."""
    constants = [f"{name}={value}" for name, value in job["constants"].items() if name.isupper()]
    options = [f"{name}={value}" for name, value in job["options"].items() if name != "enable_fp_fusion"]
    return " ".join([job["kernel"], *sorted({kind for kind in job["signature"].values() if kind[0] == "*"}), *constants, *options])


@needs_triton
def test_every_class_has_launches(tmp_path: Path) -> None:
    launches = _collected("vgg16", "float32", tmp_path)
    assert all(jobs for _, _, jobs in launches), [label for label, _, jobs in launches if not jobs]
    assert {"deep", "default"} == {variant for _, variant, _ in launches}
    kernels = {job["kernel"] for _, _, jobs in launches for job in jobs}
    assert kernels >= {"conv2d_kernel", *_FEW_CHANNELS, "data_gradient_kernel", "weight_gradient_kernel", "reduce_kernel"}


@needs_triton
@pytest.mark.skipif(not is_swept(), reason="minutes of compiling: make test-kernels, or SFT_KERNEL_SWEEP=1")
@pytest.mark.parametrize("affected", [False, True], ids=["as it is", "old assembler"])
@pytest.mark.parametrize("numbers", _NUMBERS)
@pytest.mark.parametrize("network", STANDARD_NETWORKS)
def test_the_table_compiles_ahead_of_time(network: str, numbers: str, affected: bool, tmp_path: Path) -> None:
    launches = _collected(network, numbers, tmp_path, affected=affected)
    # Old assemblers with the bug are for Hopper only, which has launches of its own.
    older = [] if affected else _collected(network, numbers, tmp_path, warp_groups=False)
    jobs: dict[str, dict[str, Any]] = {}
    cases: list[tuple[str, str]] = []
    for target, collected in (("sm_90", launches), ("sm_80", older)):
        of_target = {json.dumps(job, sort_keys=True): job for _, _, entries in collected for job in entries}
        jobs |= of_target
        cases += [(target, key) for key in of_target]
    new = [case for case in cases if case not in _COSTS]
    _COSTS.update(zip(new, compile_kernels([jobs[key] | {"target": target} for target, key in new], tmp_path), strict=True))
    problems, registers = [], Registers(_RECORD, has_spills=True)
    for target, key in cases:
        job, is_product = jobs[key], jobs[key]["kernel"] in _PRODUCTS
        is_forward = job["kernel"] in ("conv2d_kernel", "few_channels_kernel")
        facts = {
            "matrix": is_product and job["constants"]["PRECISION"] != "ieee",
            "wide": job["kernel"] == "conv2d_kernel",
            "fills_warp_groups": job["kernel"] not in ("weight_gradient_kernel", *_FEW_CHANNELS) or job["constants"]["CHANNELS"] >= 64,
            "copied_operands": affected or is_forward or job["constants"].get("MASKED") is False,
        }
        problems += problems_of(_label(job), target, _COSTS[target, key], registers, **facts)
    registers.save()
    classes, ways = len({label for label, _, _ in launches}), len(launches)
    print(f"{network}, {numbers}{', old assembler' if affected else ''}: {classes} classes, {ways} ways, {len(jobs)} launches")
    for target in ("sm_80", "sm_90"):
        costs = [_COSTS[case] for case in cases if case[0] == target]
        fresh, spilling = sum(case[0] == target for case in new), sum(cost["spilled_bytes"] > 0 for cost in costs)
        most = {name: max((cost[name] for cost in costs), default=0) for name in ("registers", "shared_bytes")}
        print(f"  {target}: {len(costs)} kernels, {fresh} not compiled before, {spilling} spill, at most {most}")
    assert not problems, "\n".join(problems)
