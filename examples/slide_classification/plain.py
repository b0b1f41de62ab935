"""Measured training step of plain PyTorch, for comparison with the demo.

It runs in a process of its own, so that running out of memory ends this process and not the demo.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from task import LABEL, StepResult, build_model, load_image
from torch.nn import functional as F

import sft
from sft.sources import Slide

__all__ = ["PlainFailed", "measure_in_subprocess"]


class PlainFailed(Exception):
    """The process of plain PyTorch ended without a result."""


def measure_in_subprocess(slide_path: Path, seed: int) -> StepResult:
    """Run one plain step on the slide in another process.

    Raises:
        PlainFailed: it ended without a result, as when the system ran out of memory.
    """
    command = [sys.executable, __file__, "--slide", str(slide_path), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise PlainFailed(f"ended by {signal.Signals(-done.returncode).name}, probably out of memory")
    if done.returncode > 0:
        raise PlainFailed(" ".join(done.stderr.split("\n")[-2:]).strip() or f"exit status {done.returncode}")
    return StepResult(**json.loads(done.stdout.splitlines()[-1]))


def _measure(slide_path: Path, seed: int) -> StepResult:
    with Slide(slide_path) as slide:
        image = load_image(slide)
    model = build_model(image, seed)
    target = torch.tensor([LABEL])
    start = time.perf_counter()
    with sft.measure_peak("cpu") as peak:
        loss = F.cross_entropy(model(image), target)
        loss.backward()
    seconds = time.perf_counter() - start
    return StepResult(loss=loss.item(), seconds=seconds, peak_bytes=peak.num_bytes + image.nbytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(asdict(_measure(arguments.slide, arguments.seed))))
