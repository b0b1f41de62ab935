"""Processor time of ``import sft``, of its first use, and of the command lines' help, next to that of ``import torch``.

Every measurement is a new Python process: user and system time of the process, interpreter start included. All commands run once per
round, in turns, after one round that fills the file cache and writes compiled modules. Processor time is less sensitive than elapsed time
to other work on the machine. The last column is the median difference to ``import torch`` of the same round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median
from typing import Any

from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console

BASELINE = "import torch"

#: Arguments of the interpreter, by the name of the case.
COMMANDS: dict[str, tuple[str, ...]] = {
    "(nothing)": ("-c", "pass"),
    BASELINE: ("-c", "import torch"),
    "import sft": ("-c", "import sft"),
    "import torch, sft": ("-c", "import torch, sft"),
    "import sft; sft.Options()": ("-c", "import sft; sft.Options()"),
    "import sft; sft.nn.WithLoss": ("-c", "import sft; sft.nn.WithLoss"),
    "import sft; sft.sources.open_image": ("-c", "import sft; sft.sources.open_image"),
    "import sft; sft.compile": ("-c", "import sft; sft.compile"),
    "python -m sft --help": ("-m", "sft", "--help"),
    "python -m sft plan --help": ("-m", "sft", "plan", "--help"),
    "python -m sft.wsi --help": ("-m", "sft.wsi", "--help"),
    "python -m sft.wsi train --help": ("-m", "sft.wsi", "train", "--help"),
}


def processor_seconds(arguments: tuple[str, ...], threads: int) -> float:
    """User and system seconds of a Python process."""
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    process = subprocess.Popen([sys.executable, "-P", *arguments], env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} failed with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def measure(num_rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each command in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(num_rounds + 1):
        for name, arguments in COMMANDS.items():
            measured = processor_seconds(arguments, threads)
            if number:
                seconds[name].append(measured)
    return seconds


def rows(seconds: dict[str, list[float]]) -> list[list[str]]:
    """Median, least and greatest seconds of each command, and the median difference to ``import torch``."""
    table = []
    for name, values in seconds.items():
        differences = [value - baseline for value, baseline in zip(values, seconds[BASELINE], strict=True)]
        table.append([name, *(f"{number:.3f}" for number in (median(values), min(values), max(values))), f"{median(differences):+.3f}"])
    return table


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Processor time of imports and of the command lines' help.")
    parser.add_argument("--rounds", type=positive_int, default=9, help="measured processes of each command (default: 9)")
    add_common_arguments(parser)
    args = parser.parse_args()
    seconds = measure(args.rounds, args.threads)
    table = Table(
        title="Processor seconds of a new process",
        headers=("command", "median", "least", "greatest", "above import torch"),
        rows=rows(seconds),
    )
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {"rounds": args.rounds},
        "results": seconds,
    }
    notes = (
        "User and system time of a new Python process, interpreter start included. Commands take turns within a round; the last column is "
        "the median of the differences to `import torch` of the same round. `import sft` alone loads no library; `sft.compile` loads the "
        "whole planner with torch, SymPy and networkx."
    )
    written = write_results(result_stem(args.out, "importing"), raw, [table], notes, None)
    console = Console()
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
