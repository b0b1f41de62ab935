"""Processes of tests: forks of one server that has imported the library and trained one step.

A new interpreter imports torch for seconds, and its first capture takes seconds more: torch's exporter and SymPy load modules and fill
caches. Forks share both.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.helpers.script_forks import WITHOUT_GPUS

__all__ = ["fork_context", "run_module"]

_ROOT = Path(__file__).resolve().parents[2]


def fork_context() -> ForkServerContext:
    """Context of ``multiprocessing`` for forks of the server; the first call of a process starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.forked_state"])
    with pytest.MonkeyPatch.context() as patches:
        # The server ignores modules that it cannot import, and a test may have left the root of the repository.
        patches.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT)))))
        for name, value in {"OMP_NUM_THREADS": "1", **WITHOUT_GPUS}.items():
            patches.setenv(name, value)
        forkserver.ensure_running()
    return context


def run_module(module: str, arguments: Sequence[str], folder: Path) -> CompletedProcess[str]:
    """Run ``python -m module`` in a process of its own.

    Args:
        module: name of the module.
        arguments: command line.
        folder: folder of files with its output.
    """
    outputs = [folder / "stdout.txt", folder / "stderr.txt"]
    process = fork_context().Process(target=_run_module, args=(module, list(arguments), outputs))
    process.start()
    process.join()
    code = process.exitcode
    assert code is not None
    process.close()
    return CompletedProcess(arguments, code, *(path.read_text(encoding="utf-8") for path in outputs))


def _run_module(module: str, arguments: list[str], outputs: Sequence[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
