"""Strategies over a range of budgets, and the figure of time against memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sft.common.errors import BudgetError, InputError, SourceError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.offloading import plain_peak_bytes
from sft.solvers.plot import ParetoPoint, pareto_front
from sft.solvers.registry import SOLVERS, get_solver
from sft.solvers.simulate import simulate
from tests.helpers.chains import random_chain

_LINK = HostLink(down_bytes_per_second=2, up_bytes_per_second=2)


def _point(name: str, peak_bytes: int, seconds: float) -> ParetoPoint:
    return ParetoPoint(strategy=name, seconds=seconds, peak_bytes=peak_bytes)


def _min_budget(chain: StageChain, name: str) -> int:
    with pytest.raises(BudgetError) as refusal:
        get_solver(name)(chain, budget_bytes=1, link=_LINK)
    return refusal.value.needed_bytes


def test_every_strategy_stays_within_every_budget_that_it_can_meet_and_none_is_faster_than_auto() -> None:
    chain = random_chain(random.Random(41), 6)
    least = {name: _min_budget(chain, name) for name in SOLVERS}
    top, low = least["none"], min(least.values())
    assert top == plain_peak_bytes(chain)
    grid = {round(top * (low / top) ** (step / 3)) for step in range(4)}
    seconds: dict[str, dict[int, float]] = {}
    for name, solver in SOLVERS.items():
        for budget in {*(budget for budget in grid if budget >= least[name]), least[name]}:
            simulation = simulate(chain, solver(chain, budget_bytes=budget, link=_LINK), link=_LINK)
            assert simulation.peak_bytes <= budget
            seconds.setdefault(name, {})[budget] = simulation.seconds
    assert set(seconds) == set(SOLVERS)
    for times in seconds.values():
        assert all(time >= seconds["auto"][budget] for budget, time in times.items() if budget in seconds["auto"])
    assert list(seconds["none"]) == [plain_peak_bytes(chain)]


def test_the_front_has_the_points_that_no_other_point_betters() -> None:
    a, b, c, d = _point("a", 1, 9.0), _point("b", 2, 9.0), _point("c", 3, 4.0), _point("d", 3, 5.0)
    assert pareto_front([d, c, b, a]) == (a, c)


def test_pictures_are_written_atomically(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sft.solvers import plot

    points = [_point("a", 1, 2.0), _point("auto", 1, 1.0)]
    plot.save_figure(plot.pareto_figure(points, plain_seconds=1.0, title="auto"), tmp_path / "front.png")
    assert [path.name for path in tmp_path.iterdir()] == ["front.png"]
    before = (tmp_path / "front.png").read_bytes()
    assert before.startswith(b"\x89PNG") and len(before) > 5000
    figure = plot.pareto_figure(points)
    with pytest.raises(InputError, match=r"front\.strange"):
        plot.save_figure(figure, tmp_path / "front.strange")
    with pytest.raises(SourceError):
        plot.save_figure(figure, tmp_path / "nowhere" / "front.png")
    assert [path.name for path in tmp_path.iterdir()] == ["front.png"]
    assert (tmp_path / "front.png").read_bytes() == before
    with pytest.raises(InputError, match="no points"):
        plot.pareto_figure([])
