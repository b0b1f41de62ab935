"""Comparison of random networks with eager PyTorch for some minutes; a mismatch is shrunk and printed, with exit code 1.

``make fuzz``. Each mismatch becomes a test in ``test_random_networks.py``.
"""

from __future__ import annotations

import argparse
import time

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers.random_networks import assert_wild_exact, wild_budget, wild_plannings, wild_tilings, wilds

_ROUND = 25


def main() -> int:
    """Run rounds of examples, each from a seed of its own, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: 0)")
    parser.add_argument("--wishes", type=int, default=8, help="most layers of a network (default: 8)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    ends, number, tiled, total, skipped = time.monotonic() + 60 * args.minutes, args.seed, 0, 0, 0

    def check(data: st.DataObject) -> None:
        nonlocal tiled, total, skipped
        wild = data.draw(wilds(max_wishes=args.wishes), label="network")
        if data.draw(st.booleans(), label="whether the planner chooses"):
            options, share = data.draw(wild_plannings(), label="options and share of plain PyTorch's budget")
            report = assert_wild_exact(wild, options, budget=wild_budget(wild, options, share))
        else:
            report = assert_wild_exact(wild, data.draw(wild_tilings(wild), label="options"))
        if report is None:
            skipped += 1
            return
        total += 1
        tiled += any(segment.mode == "tiled" for segment in report.plan.segments)

    while time.monotonic() < ends:
        runs = settings(max_examples=_ROUND, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        seed(number)(runs(given(st.data())(check)))()
        number += 1
        console.print(
            f"seed {number - 1}: {total} networks so far, {tiled} of them with segments in strips, no mismatch; {skipped} were rounding"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
