"""Compare the floors of networks with the committed table, or write it.

    PYTHONPATH=. python -P tests/floors/__main__.py                            # compare the networks of `make test`
    PYTHONPATH=. python -P tests/floors/__main__.py --set zoo --write          # write the zoo's rows, each as it is measured
    PYTHONPATH=. python -P tests/floors/__main__.py --set zoo --write --missing

A script, so that `-P` keeps this folder's names off `sys.path`.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(_ROOT))  # after the installed packages, which the repository's folders must not hide

from tests.floors.floor import NetworkFloors, measure_floors  # noqa: E402
from tests.floors.networks import SETS, Network  # noqa: E402
from tests.floors.table import PAGE, TABLES, differences, page, read_table, write_table  # noqa: E402


def main() -> int:
    """Run the command; 1 if a floor has risen or an operator has left the strips."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SETS), default="small", help="networks (default: small)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="networks to measure, such as 'timm/*net*' (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table and its page instead of comparing")
    parser.add_argument("--missing", action="store_true", help="measure networks without a row only")
    parser.add_argument("--seconds", type=float, default=0.0, help="processor seconds after which a network is left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = TABLES[arguments.set]
    committed, measured, failures = read_table(path), {}, 0
    for name, network in SETS[arguments.set]().items():
        is_selected = arguments.only is None or any(fnmatch(name, pattern) for pattern in arguments.only)
        if not is_selected or (arguments.missing and name in committed):
            continue
        try:
            with _time_limit(arguments.seconds):
                measured[name] = _measured(network)
        except _OutOfTimeError:
            print(f"{name}: left out, planning takes more than {arguments.seconds:.0f} s", flush=True)
            continue
        print(f"{name}: {_line(measured[name])}", flush=True)
        if arguments.write:
            committed = {**read_table(path), name: measured[name]}
            write_table(path, committed)
            continue
        for line in differences(committed, {name: measured[name]}):
            failures += 1
            print(f"  {line}", flush=True)
    if arguments.write:
        PAGE.write_text(page({name: read_table(file) for name, file in TABLES.items()}))
    return int(bool(failures))


class _OutOfTimeError(BaseException):
    """Time limit of a network; no base class is caught as a refusal."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTimeError` after a number of processor seconds; 0 for no limit."""

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _measured(network: Network) -> NetworkFloors:
    gc.collect()
    floors = measure_floors(network.built(), network.shape)
    if floors.problem and network.other_shape not in (None, network.shape):
        smaller = measure_floors(network.built(), network.other_shape)
        return floors if smaller.problem else smaller
    return floors


def _line(floors: NetworkFloors) -> str:
    passes = (("training", floors.training), ("inference", floors.inference))
    shares = ", ".join(f"{name} {floor.share:.1%}" for name, floor in passes if floor is not None)
    whole = sum(len(labels) for labels in (floors.whole or {}).values())
    return floors.problem or f"{shares}, {whole} operators whole"


if __name__ == "__main__":
    raise SystemExit(main())
