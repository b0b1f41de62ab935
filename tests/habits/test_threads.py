"""Compiled models called by several threads, which capture, plan and run at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.common.process_lock import is_locked_by_other_thread, patch_lock
from tests.helpers.models import Residual, TinyUNet, image, seeded

_NUM_THREADS = 4


@pytest.mark.parametrize("shared", [False, True], ids=["a model each", "one model"])
def test_threads_that_capture_at_once_equal_eager_pytorch(shared: bool) -> None:
    models = [seeded(Residual) if number % 2 else seeded(TinyUNet) for number in range(_NUM_THREADS)]
    nets = [sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(8, None))) for model in models]
    x, begin, streams = image(1, 3, 32, 24), Barrier(_NUM_THREADS), (sys.stdout, sys.stderr)
    for model in models:
        model.eval()  # which is captured anew

    def call(number: int) -> None:
        place = 0 if shared else number
        begin.wait()
        for rows in (32, 24 + 8 * number):
            with torch.no_grad():
                torch.testing.assert_close(nets[place](x[:, :, :rows]), models[place](x[:, :, :rows]), rtol=1e-10, atol=1e-10)

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        list(threads.map(call, range(_NUM_THREADS)))
    assert (sys.stdout, sys.stderr) == streams


def test_a_call_during_a_capture_is_not_captured() -> None:
    """torch reports an export to all threads."""
    inside, done = Event(), Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            done.wait(30)
            return x * 2

    net = sft.compile(seeded(Residual).eval(), image(1, 3, 16, 16))
    x, results = image(1, 3, 16, 16), list[Any]()
    other = Thread(target=lambda: results.append(sft.plan(Slow(), (1, 3, 8, 8))))
    other.start()
    assert inside.wait(30)
    caller = Thread(target=lambda: results.append(net(x)))
    caller.start()
    caller.join(0.2)
    assert is_locked_by_other_thread()
    done.set()
    caller.join()
    other.join()
    outputs = [value for value in results if isinstance(value, torch.Tensor)]
    torch.testing.assert_close(outputs, [net(x)])


def test_exclusive_access_ends_with_the_block() -> None:
    with pytest.raises(KeyError), patch_lock():
        assert not is_locked_by_other_thread()
        raise KeyError
    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(is_locked_by_other_thread).result()


@pytest.mark.parametrize("is_file", [False, True])
def test_threads_that_call_first_stream_the_weights_once(is_file: bool, tmp_path: Path) -> None:
    """Weights move to the store of streamed weights at the first call."""
    for number in range(4):
        model = seeded(Residual).eval()
        x, begin = image(1, 3, 16, 24), Barrier(_NUM_THREADS)
        expected = model(x).detach()
        weights = sft.WeightsFile(tmp_path / f"{number}.safetensors") if is_file else "stream"
        net = sft.compile(model, x.shape, options=sft.Options(weights=weights, tile=(4, None)))

        def call(_: int, net: Any = net, begin: Barrier = begin) -> torch.Tensor:
            begin.wait()
            with torch.no_grad():
                y: torch.Tensor = net(x)  # noqa: B023
            return y

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for output in threads.map(call, range(_NUM_THREADS)):
                torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
