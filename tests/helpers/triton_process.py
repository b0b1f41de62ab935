"""Triton in processes of its own: ``TRITON_INTERPRET`` is read when a kernel is defined, so one process cannot do both."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["compile_kernels", "interpret", "needs_triton"]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def interpret(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``interpret_triton`` on the CPU, by Triton's interpreter."""
    return _run("interpret_triton.py", jobs, folder, {"TRITON_INTERPRET": "1"})


def compile_kernels(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``compile_triton``: compile for a GPU that need not be there."""
    return _run("compile_triton.py", jobs, folder, {"TRITON_CACHE_DIR": str(folder / "cache")})


def _run(script: str, jobs: list[dict[str, Any]], folder: Path, variables: dict[str, str]) -> list[Any]:
    source, target = folder / "jobs.pickle", folder / "results.pickle"
    source.write_bytes(pickle.dumps(jobs))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).with_name(script)), str(source), str(target)]
    done = subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"} | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    results: list[Any] = pickle.loads(target.read_bytes())
    return results
