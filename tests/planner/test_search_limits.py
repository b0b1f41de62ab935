"""Search limits: printed by plans, optional in plan files, and passed with the planning problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

import sft
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.step_time import project_timeline
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.planner.planner import plan_segments
from sft.planner.search_limits import SearchLimits
from tests.helpers.models import chain, seeded
from tests.helpers.problems import problem_of, with_resources

_SHAPE = (1, 3, 64, 48)


def _model() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU()) for channels in (3, 8, 8, 8, 8, 8)]
    return seeded(lambda: chain(*layers))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sft.plan(_model(), _SHAPE, budget="1GiB")


def test_a_plan_file_has_the_limits_of_its_search(plan: Plan) -> None:
    assert plan.search_limits == SearchLimits()
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["search_limits"]["max_projections"] == 8


def test_a_plan_file_without_limits_loads(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    del data["search_limits"]
    assert Plan.from_json(json.dumps(data)) == replace(plan, search_limits=None)
    assert "search limits" not in Plan.from_json(json.dumps(data)).explain()


def test_the_report_lists_changed_limits_only(plan: Plan) -> None:
    assert "search limits" not in plan.explain()
    changed = replace(plan, search_limits=SearchLimits(max_heads=2, state_slots=(4, 2)))
    (line,) = (line for line in changed.explain().splitlines() if "search limits" in line)
    assert line.split(maxsplit=2)[2] == "state_slots=(4, 2), max_heads=2"


def test_limits_bound_a_search() -> None:
    problem = problem_of(_model().float(), _SHAPE, training=True)
    with pytest.raises(sft.BudgetError) as refused:
        plan_segments(problem, 1, Options())
    coarse = replace(problem, limits=SearchLimits(num_value_limits=1, max_tiles=1, state_slots=()))
    with pytest.raises(sft.BudgetError) as coarsely_refused:
        plan_segments(coarse, 1, Options())
    assert coarsely_refused.value.needed_bytes >= refused.value.needed_bytes


def test_the_joint_solver_never_costs_time() -> None:
    """The label search over recomputation and copies is added to the plans that auto compares."""
    problem = with_resources(problem_of(_model().float(), _SHAPE, training=True), host_budget_bytes=None)
    plain = plan_segments(problem, 2**40, Options()).projection
    without = replace(problem, limits=SearchLimits(max_joint_stages=0))
    for percent in (70, 50):
        costs = []
        for each in (problem, without):
            planned = plan_segments(each, plain.peak_bytes * percent // 100, Options())
            costs.append(project_timeline(each, planned.choices, planned.projection, DeviceRates("cpu")).estimated_seconds)
            assert planned.projection.peak_bytes <= plain.peak_bytes * percent // 100
        assert costs[0] <= costs[1]


@pytest.mark.parametrize("record", [SearchLimits(max_projections=3), Options(progress=True)], ids=["limits", "options"])
def test_a_pickle_of_an_older_release_lacks_the_last_fields(record: SearchLimits | Options) -> None:
    make, arguments, state = record.__reduce_ex__(4)[:3]  # type: ignore[str-unpack]  # the general type is text or a tuple
    assert callable(make) and isinstance(arguments, tuple) and isinstance(state, list)
    older = make(*arguments)
    older.__setstate__(state[:-1])
    assert older == record and repr(older) == repr(record)
