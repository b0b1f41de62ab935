"""Cost of reading streamed inputs: each panel reads all columns, and the planner takes that into account."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sft
from sft.planner.cost import step_time as clock
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.step_time import input_pass_bytes
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.sources import ArraySource
from tests.helpers.models import Residual, chain, seeded


def _pixels(height: int, width: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("options", "restores"),
    [
        (Options(tile=(4, None), state_every=1), False),
        (Options(tile=(4, 12), state_every=1), True),
        (Options(tile=(4, 12), state_every=2), True),
        (Options(tile=(3, None), state_every=4), True),
        (Options(tile=(3, None), state_slots=2), True),
        (Options(tile=(8, 12), halo="recompute"), False),
        (Options(strategy="none"), False),
    ],
    ids=["strips", "panels", "panels restore", "restored", "slots", "tiles", "whole"],
)
def test_the_planner_counts_bytes_read(options: Options, restores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[PlanningProblem, tuple[SegmentChoice, ...]]] = []

    def noting(problem: PlanningProblem, choices: Any) -> Any:
        noted.append((problem, tuple(choices)))
        return input_pass_bytes(problem, choices)

    monkeypatch.setattr(clock, "input_pass_bytes", noting)
    source = ArraySource(_pixels(48, 40))
    net: Any = sft.compile(seeded(Residual).float().train(), source, options=options)
    net(source).sum().backward()
    counted = input_pass_bytes(*noted[-1])
    forward, backward = (sum(each[number] for each in counted) for number in (0, 1))
    reading = net.last_reading
    assert reading is not None and reading.forward.read_bytes >= 48 * 40 * 3 * 4
    assert reading.forward.read_bytes == pytest.approx(forward, rel=0.02)
    # Where a sweep restores states, rows of two strips are read for each.
    assert reading.backward.read_bytes == pytest.approx(backward, rel=0.02 if forward == backward else 0.3)
    assert forward != backward or not restores


def test_a_small_network_is_not_planned_in_panels_that_read_again() -> None:
    """A convolution that shrinks its image: tiles need fewer calls and hardly more FLOPs, but every column of tiles reads the image."""
    model = seeded(lambda: chain(nn.Conv2d(3, 32, 4, stride=4, bias=False), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1)))
    model = model.float().train()
    source = ArraySource(_pixels(1024, 1024))
    smallest = sft.plan(model, source, options=Options(tile=(64, None))).total_bytes
    plan = sft.plan(model, source, budget=2 * smallest)
    assert [segment.num_panels for segment in plan.segments if segment.mode == "tiled"] == [1]
    net: Any = sft.compile(model, source, plan=plan)
    net(source).sum().backward()
    assert net.last_reading is not None
    assert net.last_reading.forward.num_rows_read == net.last_reading.backward.num_rows_read == 1024


def test_on_a_device_a_pass_lasts_at_least_as_long_as_its_reads() -> None:
    assert DeviceRates("cpu").with_reading(2.0, 3e9) == pytest.approx(5.0)
    assert DeviceRates("cuda").with_reading(2.0, 3e9) == pytest.approx(3.0)
    assert DeviceRates("cuda").with_reading(4.0, 3e9) == pytest.approx(4.0)
    assert torch.device("cpu").type == "cpu" and DeviceRates("cpu").reads_on_device and not DeviceRates("cuda").reads_on_device
