"""Ahead-of-time compilation of kernels without a GPU or a driver, served by ``serve_triton``. See ``triton_process.compile_kernels``.

A job is a dictionary: ``module`` and ``kernel`` name it, ``target`` is the architecture (``"sm_90"``, ``"gfx942"``), ``signature``
maps runtime parameters to Triton's types, ``constants`` the others to values (``"tl.float32"`` stands for the dtype),
``aligned`` lists parameters that are multiples of 16. The result is a dictionary of the code's resources.

Or a job names a launch: ``module``, ``launch``, ``arguments`` (tensors on the meta device are enough) and ``target``. The launch is called
with kernels that record their arguments, and its kernel is compiled. With ``affected`` it is called as on a Hopper GPU with an assembler
that overwrites computed operands of products (see ``kernels/common_triton.py``).

Or a job names a standard network: ``network`` and ``numbers``, and ``affected``. Nothing is compiled then; the result has the launches of
``python -m sft tune`` for it, each as a job of the first kind without its target. Its trials run on tensors without memory.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sft.common.torch_internals import FakeTensorMode

_POINTERS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.uint8: "u8"}
_POINTERS |= {torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


def compile_job(
    module: str,
    kernel: str,
    target: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    aligned: list[str],
    options: dict[str, Any] | None = None,
    counts_instructions: bool = False,
) -> dict[str, int]:
    function = getattr(importlib.import_module(module), kernel)
    values = {name: getattr(tl, str(value)[3:]) if str(value).startswith("tl.") else value for name, value in constants.items()}
    names = list(function.arg_names)
    types = {name: "constexpr" if name in values else signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature=types, constexprs=values, attrs=attributes)
    chosen = {"num_warps": 4, "enable_fp_fusion": False} | (options or {})
    if target.startswith("gfx"):
        compiled = triton.compile(source, target=GPUTarget("hip", target, 64), options=chosen)
        return _amd_cost(compiled.asm["amdgcn"]) | {"shared_bytes": compiled.metadata.shared, "binary_bytes": len(compiled.asm["hsaco"])}
    capability = int(target.removeprefix("sm_"))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    cost = _nvidia_cost(compiled.asm["ptx"], capability)
    if counts_instructions:
        cost |= _instructions(compiled.asm["cubin"])
    return cost | {"shared_bytes": compiled.metadata.shared, "binary_bytes": len(compiled.asm["cubin"])}


def _nvidia_cost(ptx: str, capability: int) -> dict[str, int]:
    log = _assemble(ptx, capability)
    return {
        "registers": _number(r"Used (\d+) registers", log),
        "spilled_bytes": _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        "wide_loads": len(re.findall(r"ld\.global\.v[24]", ptx)),
        "loads": len(re.findall(r"ld\.global\.", ptx)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.", ptx)),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        "warp_group_instructions": len(re.findall(r"wgmma\.mma_async", ptx)),
        "computed_operands": len(re.findall(r"wgmma\.mma_async\S* *\{[^}]*\}, *\{", ptx)),
    }


def _amd_cost(code: str) -> dict[str, int]:
    """Resources of the code for a gfx target, as far as it has the same quantities."""
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", code),
        "spilled_bytes": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", code),
        "matrix_instructions": len(re.findall(r"v_mfma", code)),
    }


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@contextmanager
def _noted(*, affected: bool, warp_groups: bool = True) -> Iterator[list[_Call]]:
    """Context that records kernels with their arguments, and does not run them.

    Args:
        affected: as on a GPU with wrong products of computed operands.
        warp_groups: as on a GPU with products of warp groups.
    """
    calls: list[_Call] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append((self, args, kwargs))

    with ExitStack() as patches:
        patches.enter_context(patch.object(triton.runtime.jit.JITFunction, "run", note))
        answers = {"can_compute_operands": not affected, "has_warp_groups": warp_groups}
        for name, loaded in list(sys.modules.items()):
            for function in [function for function in answers if name.startswith("sft.kernels.") and hasattr(loaded, function)]:
                patches.enter_context(patch.object(loaded, function, lambda device, answer=answers[function]: answer))
        yield calls


def _instructions(cubin: bytes) -> dict[str, int]:
    """Instructions of a kernel, and the largest loop with matrix products of warp groups: its instructions and its products.

    A product is one of 64 x 64 x 16 elements.

    A product's name contains its extents: ``HGMMA.64x128x16.F32.BF16``.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"), "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    largest = {"loop_instructions": 0, "loop_products": 0}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            branch = re.search(r"BRA.*(\.L_x_\d+)", instruction[1])
            if branch and branch[1] in labels:
                body = instructions[labels[branch[1]] :]
                sizes = [re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", each) for each in body]
                elements = sum(int(m) * int(n) * int(k) for each in sizes for m, n, k in each)
                if elements and len(body) > largest["loop_instructions"]:
                    largest = {"loop_instructions": len(body), "loop_products": elements // (64 * 64 * 16)}
    return {"instructions": len(instructions)} | largest


def launched_job(module: str, launch: str, arguments: dict[str, Any], target: str, *, affected: bool = False) -> dict[str, Any]:
    """The job for the one kernel that a launch launches."""
    function = getattr(importlib.import_module(module), launch)
    with _noted(affected=affected, warp_groups=target == "sm_90") as calls:
        function(**arguments)
    (call,) = calls
    return {"target": target} | _job(*call)


def _job(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The job for a call of a kernel, without the target."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {name: kwargs[name] for name in kernel.arg_names if name in kwargs}
    job: dict[str, Any] = {"module": kernel.fn.__module__, "kernel": kernel.fn.__name__}
    job |= {"signature": {}, "constants": {}, "aligned": [], "options": {name: kwargs[name] for name in kwargs if name not in values}}
    assert "enable_fp_fusion" in job["options"], f"{kernel.fn.__name__}: Triton's default for fused multiply-adds differs between versions"
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            job["constants"][name] = f"tl.{value}" if isinstance(value, tl.dtype) else value
            continue
        if isinstance(value, torch.Tensor):
            job["signature"][name] = f"*{_POINTERS[value.dtype]}"
        elif isinstance(value, float):
            job["signature"][name] = "fp32"
        else:
            job["signature"][name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if special and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            job["aligned"].append(name)
    return job


def table_launches(
    network: str, numbers: str, *, affected: bool = False, warp_groups: bool = True
) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Labels and jobs of launches, for each class of a standard network and each split that a table may choose.

    Args:
        numbers: as `ShapeClass` names them; ``"tf32"`` is fp32 where convolutions may round it.
        affected, warp_groups: as for `_noted`.
    """
    from sft.backends.selector import launch_variants  # imported here: most jobs need no planner
    from sft.cli import tune
    from sft.cli.tune import STANDARD_NETWORKS
    from sft.planner.options import Options

    with torch.device("meta"):
        model = STANDARD_NETWORKS[network]()
    request = tune.TuneRequest(
        models=[(model, ((1, 3, 2048, 2048),))],
        dtypes=["float32" if numbers == "tf32" else numbers],
        options=Options(),
        budget="11GiB",
    )
    with (
        patch.object(tune, "allows_tf32", lambda device: numbers == "tf32"),
        patch.object(tune, "computes_operands", lambda device: not affected),
    ):
        trials = tune.collect_tuning_cases(request, torch.device("cpu"))
    launches: list[tuple[str, str, list[dict[str, Any]]]] = []
    for trial in trials:
        for variant in launch_variants(trial.shape_class):
            with _noted(affected=affected, warp_groups=warp_groups) as calls, FakeTensorMode(), torch.no_grad():
                varied = trial.with_variant(variant)
                varied.run_kernels(varied.draw(torch.device("cpu")))
            launches.append((trial.shape_class.label, variant, [_job(*call) for call in calls]))
    return launches


def _assemble(ptx: str, capability: int) -> str:
    """The assembler's report of the kernel's registers."""
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", str(path), "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _number(pattern: str, log: str) -> int:
    number = re.search(pattern, log)
    assert number is not None, f"the assembler does not say {pattern!r}: {log}"
    return int(number[1])


def run(job: dict[str, Any]) -> Any:
    """Run one job."""
    if "network" in job:
        return table_launches(**job)
    counts_instructions = job.pop("counts_instructions", False)
    return compile_job(**(launched_job(**job) if "launch" in job else job), counts_instructions=counts_instructions)
