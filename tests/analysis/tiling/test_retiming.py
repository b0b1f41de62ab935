"""Retiming: operators move to the phase that reads them if fewer bytes cross the barriers then, and only then."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.analysis.tiling import phases as phases_module
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from tests.helpers.exactness import assert_exact
from tests.helpers.graphs import GraphBuilder
from tests.helpers.models import image, seeded
from tests.helpers.problems import problem_of

pytestmark = pytest.mark.usefixtures("without_proposals")


class _Involution(nn.Module):
    """Windows of an image, weighted by values from a norm of it (Li et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.reduce, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)
        self.span, self.after = nn.Conv2d(2, 2 * 25, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(x))
        n, _, height, width = x.shape
        kernel = self.span(torch.relu(self.norm(self.reduce(x)))).view(n, 2, 1, 25, height, width)
        windows = F.unfold(x, 5, padding=2).view(n, 2, 2, 25, height, width)
        y: Tensor = self.after((kernel * windows).sum(3).view(n, 4, height, width))
        return y


class _Spade(nn.Module):
    """Normalized images, scaled and shifted by convolutions of a label map (Park et al. 2019), in sequence."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.shared = nn.ModuleList(nn.Conv2d(2, 16, 3, padding=1) for _ in range(num_layers))
        self.scales = nn.ModuleList(nn.Conv2d(16, 4, 3, padding=1) for _ in range(num_layers))
        self.shifts = nn.ModuleList(nn.Conv2d(16, 4, 3, padding=1) for _ in range(num_layers))
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(num_layers))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.before(x)
        for shared, scale, shift, conv in zip(self.shared, self.scales, self.shifts, self.convs, strict=True):
            hidden = torch.relu(shared(labels))
            x = x + conv(F.leaky_relu(F.instance_norm(x) * (1 + scale(hidden)) + shift(hidden), 0.2))
        y: Tensor = self.after(x)
        return y


class _Dice(nn.Module):
    """A loss of labels as channels, which are also summed alone, after norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        shares = self.head(F.pad(self.body(x), (1, 1, 1, 1))).softmax(1)
        wanted = F.one_hot(labels, 16).permute(0, 3, 1, 2).to(shares.dtype)
        both, either = (shares * wanted).sum((0, 2, 3)), shares.sum((0, 2, 3)) + wanted.sum((0, 2, 3))
        loss: Tensor = 1 - ((2 * both + 1) / (either + 1)).mean()
        return loss


class _Enlarged(nn.Module):
    """Sum of an image after a norm and of an enlarged small image."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.norm, self.coarse = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3, 4, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        large = F.interpolate(torch.tanh(self.coarse(x)), size=x.shape[2:], mode="bilinear")
        y: Tensor = torch.relu(self.norm(self.fine(x))) + large
        return y


def _needed_bytes(model: nn.Module, *shapes: tuple[int, ...]) -> int:
    with pytest.raises(sft.BudgetError) as caught:
        sft.plan(model.float(), list(shapes) if len(shapes) > 1 else shapes[0], budget=1024, options=sft.Options(host_budget=0))
    return caught.value.needed_bytes


def _phase_of(phases: PhasedGraph, target: str) -> list[int]:
    return [at for at, phase in enumerate(phases.phases) for name in phase.streamed if phases.graph[name].target == target]


def test_windows_wait_for_their_weights() -> None:
    report = assert_exact(seeded(_Involution), image(2, 3, 21, 17), options=sft.Options(tile=(4, 6)))
    assert [segment.mode for segment in report.plan.segments].count("tiled") == 2
    problem = problem_of(seeded(_Involution).float(), (1, 3, 64, 48), training=True, passes=run_passes)
    assert _phase_of(problem.sized.phases, "sft.im2col") == [len(problem.sized.phases.phases) - 1]
    pixels, float_bytes = 512 * 512, 4
    windows_bytes = 4 * 25 * pixels * float_bytes
    assert _needed_bytes(seeded(_Involution), (1, 3, 512, 512)) < windows_bytes // 2


def test_scales_from_a_label_map_wait_for_the_norm() -> None:
    """The hidden image moves together with both of its readers; more layers need hardly more bytes."""
    assert_exact(seeded(_Spade), image(1, 3, 21, 17), image(1, 2, 21, 17, seed=1), options=sft.Options(tile=(4, 6)))
    one, four = (_needed_bytes(seeded(lambda n=n: _Spade(n)), (1, 3, 256, 256), (1, 2, 256, 256)) for n in (1, 4))  # type: ignore[misc]
    scale_and_shift_bytes = 2 * 4 * 256 * 256 * 4
    assert four - one < 3 * 2 * scale_and_shift_bytes  # with their gradients, the bytes of three layers before


def test_an_image_is_enlarged_where_it_is_read() -> None:
    assert_exact(seeded(_Enlarged), image(2, 3, 21, 17), options=sft.Options(tile=(4, 6)))
    problem = problem_of(seeded(_Enlarged).float(), (1, 3, 64, 48), training=True, passes=run_passes)
    assert _phase_of(problem.sized.phases, "aten.upsample_bilinear2d.vec") == [len(problem.sized.phases.phases) - 1]


def test_labels_become_channels_where_they_are_compared() -> None:
    labels = torch.randint(0, 16, (2, 21, 17), generator=torch.Generator().manual_seed(0))
    model = seeded(_Dice)
    assert_exact(model, image(2, 3, 21, 17), labels, options=sft.Options(tile=(4, 6)))
    net: Any = sft.compile(model, [image(2, 3, 21, 17), labels], options=sft.Options(tile=(4, 6)))
    phases = net._sft_engine.phases()
    assert _phase_of(phases, "sft.one_hot") == [len(phases.phases) - 1]


class _Pyramid(nn.Module):
    """Levels of a pyramid, each normalised and enlarged step by step to full size, and summed (Kirillov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(3, 4, 3, stride, padding=1) for stride in (1, 2, 4))
        self.convs = nn.ModuleList(nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(1 + level)) for level in range(3))
        self.norms = nn.ModuleList(nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(1 + level)) for level in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(1)
        levels: Any = zip(self.levels, self.convs, self.norms, strict=True)
        for first, convs, norms in levels:
            y = first(x)
            for conv, norm in zip(convs, norms, strict=True):
                y = F.interpolate(torch.relu(norm(conv(y))), scale_factor=2.0, mode="bilinear")
            total = total + F.interpolate(y, size=x.shape[2:], mode="nearest")
        return total


def test_an_untiled_operand_is_computed_one_phase_earlier() -> None:
    assert_exact(seeded(_Pyramid), image(2, 3, 24, 16), options=sft.Options(tile=(4, 6)))


def test_ties_do_not_move() -> None:
    """An operator with a result no larger than its operands runs as early as possible."""
    builder = GraphBuilder()
    builder.conv("a", "x", 8)
    builder.mean("of_a", "a")
    builder.relu("short", "a")
    builder.conv("b", "x", 8)
    builder.join("gated", "b", "of_a", how="mul")
    builder.mean("of_gated", "gated")
    builder.join("again", "gated", "of_gated", how="mul")
    builder.join("sum", "again", "short")
    phases = find_phases(builder.build("sum").graph)
    assert [phase.streamed for phase in phases.phases] == [("a", "of_a", "short"), ("b", "gated", "of_gated"), ("again", "sum")]


@st.composite
def _gated(draw: st.DrawFn) -> GraphBuilder:
    """Convolutions of any width, sums of equal ones, and gates by means, which are barriers."""
    builder = GraphBuilder((1, 2, 16, 16))
    images = ["x"]
    for at in range(draw(st.integers(3, 14))):
        kind, source = draw(st.sampled_from(["conv", "conv", "relu", "add", "gate"])), draw(st.sampled_from(images))
        alike = [name for name in images if builder.channels[name] == builder.channels[source]]
        match kind:
            case "conv":
                builder.conv(f"v{at}", source, draw(st.sampled_from([1, 2, 8])))
            case "relu":
                builder.relu(f"v{at}", source)
            case "add":
                builder.join(f"v{at}", source, draw(st.sampled_from(alike)))
            case _:
                gate = builder.mean(f"mean{at}", draw(st.sampled_from(alike)))
                gate = builder.sigmoid_of_global(f"gate{at}", gate) if draw(st.booleans()) else gate
                builder.join(f"v{at}", source, gate, how="mul")
        images.append(f"v{at}")
    return builder


def _crossing_bytes(phases: PhasedGraph) -> int:
    """Bytes of images, times the barriers that they cross."""
    at = {name: index for index, phase in enumerate(phases.phases) for name in (*phase.streamed, *phase.tail)}
    graph = phases.graph
    crossed = ((name, max((at[user] for user in graph.users[name]), default=0) - at[name]) for name in at if name not in graph.results)
    return sum(8 * prod(graph[name].shape) * max(0, barriers) for name, barriers in crossed)


@given(_gated())
def test_retiming_never_adds_crossing_bytes_and_keeps_the_order(builder: GraphBuilder) -> None:
    graph = builder.build().graph
    phases = find_phases(graph)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(phases_module, "retime", lambda _, level, *rest: dict(level))
        earliest = find_phases(graph)
    assert _crossing_bytes(phases) <= _crossing_bytes(earliest)
    at = {name: index for index, phase in enumerate(phases.phases) for name in (*phase.streamed, *phase.tail)}
    streamed = {name for phase in phases.phases for name in phase.streamed}
    for name, index in at.items():
        strips = phases.rows[name].streamed_operands(phases.graph[name], phases.streamed)
        for operand in phases.graph[name].operands:
            if operand in at:
                waits = name in streamed and not (operand in streamed and operand in strips)
                assert at[operand] + waits <= index
