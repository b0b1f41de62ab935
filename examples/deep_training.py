"""Common parts of the examples of deep models: steps with their memory, and one-line errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sft
from sft.nn import Repeat

__all__ = ["guarded", "train"]


def guarded(run: Callable[[], None]) -> int:
    """Run an example; errors of sft are printed as one line, with exit status 1."""
    try:
        run()
    except sft.SftError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def train(
    model: nn.Sequential,
    optimizer: sft.StreamedOptimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: str,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """A step for each batch of inputs and classes; the model has layers before the blocks, the blocks, and layers after them."""
    before, blocks, after = model
    assert isinstance(blocks, Repeat)
    for step, batch in enumerate(batches):
        inputs, targets = (value.to(device) for value in batch)
        started = time.perf_counter()
        with sft.measure_peak(device) as peak:
            hidden = before(inputs)
            if step == 0:
                print(blocks.plan_for(hidden).explain())
            loss = cross_entropy(after(blocks(hidden)).flatten(0, -2), targets.flatten())
            del hidden
            loss.backward()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        seconds = time.perf_counter() - started
        peaked = f"peak {sft.format_bytes(peak.num_bytes)} on the device with the layers around the blocks"
        print(f"step {step}: loss {loss.item():.4f}, {peaked}, {seconds:.1f} s")
        del loss
