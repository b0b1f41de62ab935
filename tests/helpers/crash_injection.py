"""The command line in a process of its own that is killed at a chosen call.

A timer kills a process at a random place; these are killed at critical ones. The processes are forks of a server with all imports, so that
a dozen of them take seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.helpers.fork_server import fork_context

__all__ = ["Death", "run_process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """End of a process: place and manner.

    Attributes:
        place: a function, ``module:name`` or ``module:Class.name``.
        call: at which call of it, from 1.
        manner: SIGKILL before the call; after it; after it with the file that it wrote cut in half; or SIGTERM before it.
    """

    place: str
    call: int = 1
    manner: Literal["before", "after", "half", "term"] = "before"


def run_process(arguments: Sequence[str], death: Death | None = None) -> int:
    """Run the command line to its end; returns the exit code, or minus the signal that killed it."""
    process = fork_context().Process(target=_child, args=(list(arguments), death))
    process.start()
    process.join()
    code = process.exitcode
    process.close()
    assert code is not None
    return code


def _child(arguments: list[str], death: Death | None) -> None:
    import torch

    from tests.helpers.wsi import run_wsi as main

    torch.set_num_threads(1)
    if death is not None:
        _arrange(death)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(arguments)
    if code == 1:
        print(output.getvalue())
    os._exit(code)  # without the cleanup of a normal exit


def _arrange(death: Death) -> None:
    module, _, path = death.place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != death.call:
            return function(*arguments, **named)
        if death.manner == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            return function(*arguments, **named)
        if death.manner == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        function(*arguments, **named)
        if death.manner == "half":
            (written,) = (value for value in arguments if isinstance(value, Path))
            os.truncate(written, written.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)
