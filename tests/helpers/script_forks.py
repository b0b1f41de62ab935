"""Scripts that run as processes of their own and share the imports: a server imports the library once, and forks for each script.

A script runs as with ``python script.py`` in its folder: as ``__main__``, with its own arguments and its folder first on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

__all__ = ["WITHOUT_GPUS", "ScriptForks", "train_one_step"]

_ERRORS = "errors.txt"

#: Environment of a server: autograd has threads for GPUs, and a process with these threads cannot be forked.
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


class ScriptForks:
    """Server of scripts, as a context manager."""

    def __enter__(self) -> ScriptForks:
        root = Path(__file__).resolve().parents[2]
        # As installed: the root of the clone is not on the path.
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root.parent,
            env={**os.environ, **WITHOUT_GPUS},
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.communicate()

    def run(self, script: Path) -> tuple[int, str]:
        """Exit code and standard error of a script that runs in its folder."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(str(script)) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return code, (script.parent / _ERRORS).read_text(encoding="utf-8", errors="replace")


def train_one_step() -> None:
    """Train one step of a small compiled network: torch's exporter and SymPy load modules and fill caches at their first capture.

    A backward pass comes first. A capture pretends that there are eight GPUs, if torch is built with CUDA: the first backward pass after it
    would start a thread for each of them.
    """
    import torch

    import sft

    torch.set_num_threads(1)
    torch.ones(1, requires_grad=True).backward()
    with torch.random.fork_rng(devices=[]):
        layers = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3, padding=1)
        model = sft.compile(torch.nn.Sequential(*layers), (1, 3, 24, 8), options=sft.Options(tile=(4, None)))
        model(torch.ones(1, 3, 24, 8)).sum().backward()


def _serve() -> None:

    import sft.sources
    import sft.wsi.dispatch  # noqa: F401  # with the libraries of whole slides

    train_one_step()
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(Path(json.loads(line)))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(script: Path) -> None:
    """Run a script in this process, and end the process."""
    os.chdir(script.parent)
    for number, name in ((0, os.devnull), (1, os.devnull), (2, _ERRORS)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv, sys.path[:] = [script.name], [str(script.parent), *sys.path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(script)
    code = 1
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
