"""A script: compile kernels ahead of time, without a GPU or a driver. See ``triton_process.compile_kernels``.

A job is a dictionary: ``module`` and ``kernel`` name it, ``capability`` is the target's (90 for sm_90), ``signature``
maps runtime parameters to Triton's types, ``constants`` the others to values (``"tl.float32"`` stands for the dtype),
``aligned`` lists what may be taken as a multiple of 16. The result is a dictionary of what the code costs.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


def compile_job(
    module: str, kernel: str, capability: int, signature: dict[str, str], constants: dict[str, Any], aligned: list[str]
) -> dict[str, int]:
    function = getattr(importlib.import_module(module), kernel)
    values = {name: getattr(tl, value.removeprefix("tl.")) if isinstance(value, str) else value for name, value in constants.items()}
    names = list(function.arg_names)
    types = {name: "constexpr" if name in values else signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature=types, constexprs=values, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    log = _assemble(ptx, capability)
    return {
        "registers": _number(r"Used (\d+) registers", log),
        "spilled_bytes": _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "wide_loads": len(re.findall(r"ld\.global\.v[24]", ptx)),
        "loads": len(re.findall(r"ld\.global\.", ptx)),
    }


def _assemble(ptx: str, capability: int) -> str:
    """What the assembler says about the registers of the kernel."""
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", str(path), "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, f"the assembler does not say {pattern!r}: {log}"
    return int(found[1])


def main(source: str, target: str) -> None:
    jobs = pickle.loads(Path(source).read_bytes())
    Path(target).write_bytes(pickle.dumps([compile_job(**job) for job in jobs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
