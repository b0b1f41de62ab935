"""Script that runs jobs of a file of functions until standard input ends. See ``triton_process``.

The file, ``interpret_triton.py`` or ``compile_triton.py``, has a function ``run`` for one job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(run: Callable[[dict[str, Any]], Any]) -> None:
    """Serve lines ``source<tab>target`` of standard input: results of the jobs pickled in source go to target, then ``done`` is printed.

    The traceback of an error is written to standard error, and the answer is the error's type.
    """
    for line in sys.stdin:
        source, target = line.rstrip("\n").split("\t")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                jobs = pickle.loads(Path(source).read_bytes())
                Path(target).write_bytes(pickle.dumps([run(job) for job in jobs]))
            answer = "done"
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            answer = type(error).__name__
        print(answer, flush=True)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton reads a kernel's source from there
    spec.loader.exec_module(module)
    return module


def main(script: str) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        _module(Path(__file__).with_name("older_triton.py")).repair()
    serve(_module(Path(script)).run)


if __name__ == "__main__":
    main(*sys.argv[1:])
