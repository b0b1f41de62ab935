"""What a chain of stages says of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from examples.models import resnet18, unet
from sft.analysis.passes import in_terms_of_the_table
from sft.plan.rates import Rates
from sft.plan.stages import StagedModel
from sft.walk.whole import WholeSegment
from tests.helpers.problems import problem_of


@pytest.mark.parametrize("build", [lambda: resnet18(10), lambda: unet(1)], ids=["norms in training", "unet"])
def test_what_a_stage_holds_that_saves_nothing_is_read_off_the_one_that_saves(build: Callable[[], nn.Module]) -> None:
    """It is not lowered for that once more."""
    staged = StagedModel(problem_of(build(), (1, 3, 96, 64), training=True, passes=in_terms_of_the_table), Rates("cpu"))
    chain = staged.chain
    assert len(chain.stages) > 10
    segments = {segment.scope.names[0]: segment for segment in staged.region.segments}
    for number, nodes in enumerate(staged.stages, start=1):
        segment = segments[nodes[0]]
        assert isinstance(segment, WholeSegment)
        saving, alone = segment.programs(True)[0], segment.programs(False)[0]
        needed = max(0, saving.peak_bytes - saving.end_bytes, alone.peak_bytes - sum(alone.result_bytes.values()))
        assert chain.stage(number).forward_workspace_bytes == needed
