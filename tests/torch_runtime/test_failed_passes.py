"""A failed pass frees its memory at once, although the error is kept; the next step has the results of an undisturbed one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources import ArraySource

SHAPE = (1, 3, 96, 40)


class _Failing(ArraySource):
    """Source that fails at the n-th read of its rows."""

    num_reads = 0
    fails_at = 0

    def rows(self, interval: Interval, out: Tensor) -> None:
        self.num_reads += 1
        if self.num_reads == self.fails_at:
            raise OSError("the disk is gone")
        super().rows(interval, out)


def _source() -> _Failing:
    return _Failing(np.random.default_rng(0).random(SHAPE[1:], np.float32), layout="CHW", dtype=torch.float64)


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for num_in in (3, 16, 16):
        layers += [nn.Conv2d(num_in, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)).double()


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage collection, which would free the memory after some time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _step(net: nn.Module, source: Any) -> list[Tensor]:
    y = net(source)
    y.square().sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad(set_to_none=True)
    return [y.detach().clone(), *grads]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [{"tile": (8, None)}, {"tile": (8, 16)}], ids=["strips", "panels"])
def test_memory_is_freed(where: str, options: dict[str, Any]) -> None:
    net = sft.compile(_network(), [_source()], options=sft.Options(**options))
    source = _source()
    expected = _step(net, source)
    num_reads, source.num_reads = source.num_reads, 0
    source.fails_at = num_reads // 4 if where == "forward" else num_reads - 1
    errors: list[BaseException] = []
    with _without_collector(), sft.measure_peak() as peak:
        try:
            _step(net, source)
        except Exception as error:
            errors.append(error)
        # The source's own frame has the buffer for its rows; the frame of the step has the output and its gradient.
        rows_bytes, output_bytes = 8 * 3 * SHAPE[3] * 10, 8 * 2
        assert peak.num_bytes > 8 * rows_bytes and peak.current_bytes <= rows_bytes + 4 * output_bytes
        net.zero_grad(set_to_none=True)
    assert len(errors) == 1 and "the disk is gone" in str(errors[0])
    source.fails_at = 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(_step(net, source), expected, strict=True))


def test_frames_of_the_callers_code_keep_their_variables() -> None:
    net = sft.compile(_network(), [_source()], options=sft.Options(tile=(8, None)))
    source = _source()
    source.fails_at = 3
    with pytest.raises(Exception, match="the disk is gone") as info:
        net(source)
    frames: dict[str, dict[str, Any]] = {}
    error: BaseException | None = info.value
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            frames[trace.tb_frame.f_code.co_name] = trace.tb_frame.f_locals
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    assert isinstance(frames["rows"].get("out"), Tensor)
