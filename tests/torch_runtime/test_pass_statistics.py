"""Progress inside a call: the FLOPs that listeners get are those of the plan, strip by strip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.torch_runtime.pass_statistics import LISTENERS, PassReading, report_flops


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 2, 3))


def test_a_step_reports_the_flops_of_its_plan_strip_by_strip() -> None:
    net: Any = sft.compile(_net(), (1, 3, 96, 64), options=sft.Options(tile=(8, None)))
    x = torch.randn(1, 3, 96, 64)
    reports: list[int] = []
    with report_flops(reports.append):
        y = net(x)
        num_forward = len(reports)
        y.sum().backward()
    assert sum(reports) == net.plan.flops > 0
    assert num_forward >= 8 and len(reports) >= num_forward + 8, "each strip reports"
    assert not LISTENERS
    net(x)
    assert sum(reports) == net.plan.flops, "a listener is gone with its block"


def test_skipped_strips_count_as_done() -> None:
    x = torch.zeros(1, 3, 160, 64)
    net: Any = sft.compile(_net(), (1, 3, 160, 64), options=sft.Options(tile=(8, None), skip_repeats=True))
    reports: list[int] = []
    with report_flops(reports.append):
        net(x).sum().backward()
    assert net.last_skipping is not None and net.last_skipping.skipped_flops > 0
    assert sum(reports) == net.plan.flops


def test_a_listener_is_removed_after_an_error() -> None:
    with pytest.raises(KeyError), report_flops(lambda flops: None):
        raise KeyError
    assert not LISTENERS


def test_the_hidden_share_of_reading() -> None:
    assert str(PassReading(read_seconds=3.1, waited_seconds=0.2)).endswith("(94 % hidden)")
    assert PassReading(read_seconds=3.1, waited_seconds=4.0).hidden_fraction == 0
