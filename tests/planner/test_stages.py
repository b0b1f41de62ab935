"""Staged models: stages, their bytes and seconds, and buffer updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from examples.models import resnet18, unet
from sft.analysis.passes.pipeline import run_passes
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.projection import plain_programs
from sft.planner.stages import StagedModel
from sft.runtime.whole_segment import WholeSegment
from tests.helpers.problems import problem_of


@pytest.mark.parametrize("build", [lambda: resnet18(10), lambda: unet(1)], ids=["norms in training", "unet"])
def test_bytes_without_residuals_follow_from_the_program_with_residuals(build: Callable[[], nn.Module]) -> None:
    """No second lowering is needed."""
    staged = StagedModel(problem_of(build(), (1, 3, 96, 64), training=True, passes=run_passes), DeviceRates("cpu"))
    chain = staged.chain
    assert len(chain.stages) > 10
    segments = {segment.scope.names[0]: segment for segment in staged.region.segments}
    for number, nodes in enumerate(staged.stages, start=1):
        segment = segments[nodes[0]]
        assert isinstance(segment, WholeSegment)
        saving, alone = segment.programs(True)[0], segment.programs(False)[0]
        needed = max(0, saving.peak_bytes - saving.end_bytes, alone.peak_bytes - sum(alone.result_bytes.values()))
        assert chain.stage(number).forward_workspace_bytes == needed


@pytest.mark.parametrize("build", [lambda: resnet18(10), lambda: unet(1)], ids=["norms in training", "unet"])
def test_stages_together_seem_no_cheaper_than_the_whole_model(build: Callable[[], nn.Module]) -> None:
    """Buffer updates that run once after a stage, such as running statistics, count towards it."""
    problem = problem_of(build(), (1, 3, 96, 64), training=True, passes=run_passes)
    rates = DeviceRates("cpu")
    stages = StagedModel(problem, rates).chain.stages
    together = sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
    whole = sum(map(rates.seconds, plain_programs(problem)))
    assert whole * (1 - 1e-9) <= together <= 1.05 * whole


def test_no_stage_ends_within_a_norm() -> None:
    """This includes norms with an affine map in a later phase: one torch call computes the entire norm in every plan."""
    staged = StagedModel(problem_of(resnet18(10), (1, 3, 96, 64), training=True, passes=run_passes), DeviceRates("cpu"))
    graph, asides = staged.problem.sized.graph, {name for nodes in staged.buffer_updates for name in nodes}
    stage_of = {name: number for number, nodes in enumerate(staged.stages) for name in nodes}
    affine = [name for name in stage_of if graph[name].target == "sft.affine"]
    assert affine
    for name in affine:
        scale_shift = graph[graph[name].argument("scale_shift").name]
        assert stage_of[name] == stage_of[scale_shift.name] == stage_of[scale_shift.argument("moments").name]
    # All operators are there, each after its operands.
    assert {*stage_of, *asides, *staged.problem.sized.phases.prologue} == set(staged.problem.sized.operators)
    place = {name: number for number, name in enumerate(stage_of)}
    assert all(place[operand] < place[name] for name in place for operand in graph[name].operands if operand in place)


def test_the_stage_after_a_head_follows_all_its_operators() -> None:
    staged = StagedModel(problem_of(resnet18(10), (1, 3, 96, 64), training=True, passes=run_passes), DeviceRates("cpu"))
    main = [name for nodes in staged.stages for name in nodes]
    for stage, place in enumerate(staged.stage_starts):
        head = [*staged.problem.sized.phases.prologue, *main[:place]]
        assert staged.stage_after(head) == stage
        if place:
            assert staged.stage_after([*head[:-1], main[-1]]) is None  # as many, but others
            assert staged.stage_after([*head, *staged.buffer_updates[stage - 1]]) == stage
