"""Sweeps over budgets, and their pictures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sft.common.errors import InputError, SourceError
from sft.solvers.chain import HostLink
from sft.solvers.offloading import plain_peak_bytes
from sft.solvers.plot import ParetoPoint, pareto_front, points_to_csv, sweep_budgets
from sft.solvers.registry import SOLVERS, get_solver
from sft.solvers.simulate import simulate
from tests.helpers.chains import random_chain

_LINK = HostLink(down_bytes_per_second=2, up_bytes_per_second=2)


def _point(name: str, peak_bytes: int, seconds: float) -> ParetoPoint:
    return ParetoPoint(strategy=name, budget_bytes=peak_bytes, seconds=seconds, peak_bytes=peak_bytes, host_bytes=0)


def test_a_sweep_has_every_strategy_within_every_budget_that_it_can_meet() -> None:
    chain = random_chain(random.Random(41), 6)
    points = sweep_budgets(chain, num_budgets=4, link=_LINK)
    assert {point.strategy for point in points} == set(SOLVERS)
    for point in points:
        assert point.peak_bytes <= point.budget_bytes
        found = simulate(chain, get_solver(point.strategy)(chain, budget_bytes=point.budget_bytes, link=_LINK), link=_LINK)
        assert (found.seconds, found.peak_bytes, found.host_peak_bytes) == (point.seconds, point.peak_bytes, point.host_bytes)
    autos = {point.budget_bytes: point.seconds for point in points if point.strategy == "auto"}
    assert all(point.seconds >= autos[point.budget_bytes] for point in points if point.budget_bytes in autos)
    assert [point.budget_bytes for point in points if point.strategy == "none"] == [plain_peak_bytes(chain)]
    lines = points_to_csv(points).splitlines()
    assert lines[0] == "strategy,budget_bytes,seconds,peak_bytes,host_bytes" and len(lines) == len(points) + 1
    with pytest.raises(InputError, match="two budgets"):
        sweep_budgets(chain, num_budgets=1)


def test_the_front_is_what_nothing_betters() -> None:
    a, b, c, d = _point("a", 1, 9.0), _point("b", 2, 9.0), _point("c", 3, 4.0), _point("d", 3, 5.0)
    assert pareto_front([d, c, b, a]) == (a, c)


def test_pictures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sft.solvers import plot

    chain = random_chain(random.Random(42), 6)
    budget = plain_peak_bytes(chain) * 3 // 4
    found = simulate(chain, get_solver("auto")(chain, budget_bytes=budget, link=_LINK), link=_LINK)
    plot.save_figure(plot.timeline_figure(found, budget_bytes=budget, title="auto"), tmp_path / "time.png")
    plot.save_figure(plot.pareto_figure([_point("a", 1, 2.0), _point("auto", 1, 1.0)], plain_seconds=1.0), tmp_path / "front.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front.png", "time.png"]
    before = (tmp_path / "time.png").read_bytes()
    assert before.startswith(b"\x89PNG") and len(before) > 5000
    figure = plot.timeline_figure(found)
    with pytest.raises(InputError, match=r"time\.strange"):
        plot.save_figure(figure, tmp_path / "time.strange")
    with pytest.raises(SourceError):
        plot.save_figure(figure, tmp_path / "nowhere" / "time.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front.png", "time.png"]
    assert (tmp_path / "time.png").read_bytes() == before
    with pytest.raises(InputError, match="no points"):
        plot.pareto_figure([])
