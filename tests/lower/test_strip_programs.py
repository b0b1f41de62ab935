"""A strip linked from cached fragments equals, instruction for instruction, the strip lowered alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sft.lower.lower_strip import StripKind, emit_strip
from sft.lower.program import Program
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from tests.helpers.models import ConvNet, TinyUNet, chain
from tests.helpers.problems import problem_of
from tests.helpers.programs import described

_KINDS: tuple[StripKind, ...] = ("forward", "restore", "joint")


class _Joined(nn.Module):
    """Operators that depend on each other: zero rows for a reader's padding, overwritten operands, concatenation, two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 5, padding=2)
        self.second = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.third = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = torch.relu(self.second(y))
        z = torch.cat([z, self.pool(y), torch.tanh(z)], 1)
        up = nn.functional.interpolate(z, scale_factor=2.0, mode="bilinear")
        return torch.cat([up, self.third(torch.relu(z[:, :4])), y], 1) * 2.0 + up.sum(1, keepdim=True)


def _segment(model: nn.Module, shape: tuple[int, int, int, int], rows: int, cols: int | None, halo: str, *, training: bool) -> Any:
    problem = problem_of(model, shape, training=training)
    names = next(phase.streamed for phase in problem.sized.phases.phases if phase.streamed)
    rest = tuple(node.name for node in problem.sized.graph.operators if node.name not in names)
    choice = SegmentChoice(nodes=names, mode="tiled", strip_rows=rows, panel_cols=cols or 0, batch_tile=shape[0], halo=halo)  # type: ignore[arg-type]
    choices = (choice, *([SegmentChoice(nodes=rest, mode="whole")] if rest else []))
    segment = build_region(problem, choices).segments[0]
    assert isinstance(segment, TiledSegment)
    return segment


def _pairs(segment: TiledSegment, *, training: bool) -> list[tuple[Program, Program]]:
    """Each strip's programs, linked and lowered alone."""
    programs = []
    for sweep in segment.sweeps:
        for index in map(int, segment.schedule.kinds[0]):
            for kind in _KINDS if training else _KINDS[:1]:
                alone = emit_strip(segment.scope_of(sweep), segment.step(index), kind).finish()
                programs.append((segment.program(kind, index, sweep), alone))
    return programs


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv_net": ConvNet,
    "joined": _Joined,
    "unet": TinyUNet,
    "reduced": lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3)),
}


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize(
    ("rows", "cols", "halo", "training"),
    [(8, None, "carry", True), (5, 12, "carry", True), (16, 12, "recompute", True), (7, None, "carry", False)],
)
def test_a_strip_of_parts_is_the_strip_lowered_alone(name: str, rows: int, cols: int | None, halo: str, training: bool) -> None:
    segment = _segment(_MODELS[name](), (1, 3, 44, 24), rows, cols, halo, training=training)
    pairs = _pairs(segment, training=training)
    assert len(pairs) > 2
    for linked, alone in pairs:
        assert described(linked) == described(alone)


def test_the_order_in_which_strips_are_lowered_changes_nothing() -> None:
    first, second = (_segment(_Joined(), (1, 3, 48, 16), 8, None, "carry", training=True) for _ in range(2))
    asked = [(kind, int(index)) for index in first.schedule.kinds[0] for kind in _KINDS]
    sweep = first.sweeps[0]
    forwards = [described(first.program(kind, index, sweep)) for kind, index in asked]
    backwards = [described(second.program(kind, index, sweep)) for kind, index in reversed(asked)]
    assert forwards == backwards[::-1]


def test_fragments_that_strips_share_are_lowered_once() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    model = chain(nn.Conv2d(3, 4, 1), *layers)
    segment = _segment(model, (1, 3, 64, 16), 2, None, "carry", training=True)
    sweep, first = segment.sweeps[0], segment.schedule.kinds[0]
    programs = [segment.program(kind, int(index), sweep) for kind in _KINDS for index in first]
    num_passes = [2 * len(first) if kind == "joint" else len(first) for kind in _KINDS]
    lowered_alone = sum(num_passes) * len(segment.scope.names)
    # Strips differ while rows reach one layer after another; the fragment of a layer differs only for its first and last rows.
    assert len(first) == 14 and len(programs) == 42
    assert segment._lowering(sweep).num_fragments < lowered_alone / 4
