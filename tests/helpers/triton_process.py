"""Triton in processes of its own: ``TRITON_INTERPRET`` is read when a kernel is defined, so one process cannot do both.

Each script is started once and then serves all tests: its start takes longer than many a test.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

__all__ = ["compile_kernels", "count_launches", "interpret", "interpret_benchmark", "interpret_networks", "needs_triton", "replay_launches"]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def interpret(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``interpret_triton`` on the CPU, by Triton's interpreter; on a GPU, compiled, with ``SFT_KERNELS_ON_GPU=1``."""
    return _run("interpret_triton.py", jobs, folder)


def interpret_networks(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``interpret_networks_triton`` on the CPU, by Triton's interpreter."""
    return _run("interpret_networks_triton.py", jobs, folder)


def interpret_benchmark(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``interpret_benchmark_triton`` on the CPU, by Triton's interpreter."""
    return _run("interpret_benchmark_triton.py", jobs, folder)


def compile_kernels(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``compile_triton``: compile for a GPU that need not be present."""
    return _run("compile_triton.py", jobs, folder)


def count_launches(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``launch_counts_triton``: kernel calls with kernels that do nothing."""
    return _run("launch_counts_triton.py", jobs, folder)


def replay_launches(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run the jobs of ``replay_launches_triton``: kernel calls compiled for a GPU, with a driver that launches nothing."""
    return _run("replay_launches_triton.py", jobs, folder)


def _run(script: str, jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    source, target = folder / "jobs.pickle", folder / "results.pickle"
    source.write_bytes(pickle.dumps(jobs))
    process, log = _server(script)
    assert process.stdin is not None and process.stdout is not None
    if process.poll() is None:
        process.stdin.write(f"{source}\t{target}\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if process.poll() is not None or not answer:
        process.wait()
        _server.cache_clear()  # the next test starts another
    assert answer == "done\n", f"{script} failed: {answer}\n{log.read_text()[-10000:]}"
    results: list[Any] = pickle.loads(target.read_bytes())
    return results


@functools.cache
def _server(script: str) -> tuple[subprocess.Popen[str], Path]:
    """The process that serves a script, and its standard error."""
    folder = Path(tempfile.mkdtemp(prefix="sft-triton-"))
    is_compiled = script == "interpret_triton.py" and os.environ.get("SFT_KERNELS_ON_GPU") == "1"
    variables = {"TRITON_INTERPRET": "1"} if script.startswith("interpret") else {"TRITON_CACHE_DIR": str(folder / "cache")}
    variables = {} if is_compiled else variables
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")]))  # scripts import other helpers
    command = [sys.executable, "-P", *(str(Path(__file__).with_name(name)) for name in ("serve_triton.py", script))]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    atexit.register(_stop, process, folder)
    return process, log


def _stop(process: subprocess.Popen[str], folder: Path) -> None:
    process.kill()
    process.communicate()
    shutil.rmtree(folder, ignore_errors=True)
