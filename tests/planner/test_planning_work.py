"""Planning work: number of captures, lowered programs and projected steps."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from examples.models import vgg16
from sft.analysis.frontend.capture import capture
from sft.common.process_lock import gc_paused
from sft.lower.builder import ProgramBuilder
from sft.lower.lower_strip import StripKind
from sft.lower.program import Program, Slot
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from tests.helpers.capture_cache import numbered
from tests.helpers.models import Residual, chain, image, seeded
from tests.helpers.problems import problem_of, with_sized
from tests.helpers.torch_patches import skip_patch

_SHAPE = (1, 3, 64, 48)


def test_planning_runs_no_collection_and_restores_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = import_module("sft.api.plan_search")
    plan_segments, seen = searching.plan_segments, []

    def watched(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return plan_segments(*arguments)

    monkeypatch.setattr(searching, "plan_segments", watched)
    model = seeded(Residual)
    assert gc.isenabled()
    sft.plan(model, _SHAPE, budget="1GiB")
    assert gc.isenabled()
    with pytest.raises(sft.BudgetError):
        sft.plan(model, _SHAPE, budget=1)
    assert gc.isenabled()
    gc.disable()
    try:
        sft.plan(model, _SHAPE, budget="1GiB")
        assert not gc.isenabled()  # a collector that was off stays off
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert len(seen) >= 3 and not any(seen)


def test_planning_results_are_not_traversed_by_the_next_collection() -> None:
    """The objects are old when planning ends; otherwise the next young collection would traverse a million objects."""
    numbers: list[list[int]] = []
    with gc_paused():
        numbers += [[number] for number in range(10_000)]
    young = {id(member) for generation in (0, 1) for member in gc.get_objects(generation)}
    assert not young.intersection(map(id, numbers))
    gc.freeze()
    try:
        with gc_paused():
            numbers.append([0])
        assert id(numbers) not in map(id, gc.get_objects())  # objects that were frozen before stay frozen
    finally:
        gc.unfreeze()


class _Normed(nn.Sequential):
    """A block with norms that end phases, so that the grid has many positions."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for channels in (3, 8, 8)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1))


def test_no_search_runs_if_plain_pytorch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = import_module("sft.planner.search.auto")
    count = 0

    class Counted(auto.CandidateGrid):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal count
            count += 1
            super().__init__(*arguments, **options)

    monkeypatch.setattr(auto, "CandidateGrid", Counted)
    model = seeded(_Normed)
    net: Any = sft.compile(model, (1, 3, 96, 64), budget="1GiB")
    for shape in ((1, 3, 64, 96), (1, 3, 33, 47)):
        assert [segment.mode for segment in net.plan_for(shape).segments] == ["whole"]
        assert net.plan_for(shape).flops == net.plan_for(shape).plain_flops
    assert count == 0
    plain_bytes = net.plan.total_bytes
    for options in (sft.Options(tile=(8, None)), sft.Options(state_every=2), sft.Options(host_budget="1GiB")):
        sft.plan(model, (1, 3, 96, 64), budget=plain_bytes, options=options)
    assert count == 2  # host memory gains nothing, either; the other strategies are requested
    assert sft.plan(model, (1, 3, 96, 64), budget=plain_bytes).segments == net.plan.segments
    sft.plan(model, (1, 3, 96, 64), budget=plain_bytes - 1)
    assert count > 2


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_plan_does_not_depend_on_the_sizes_before_it(share: float) -> None:
    """A training run that continues at another size must have the same bits."""
    model, shapes = seeded(Residual), [(1, 3, 288, 64), (1, 3, 192, 96), (1, 3, 416, 64)]
    alone = [sft.plan(model, shape, budget="1GiB").total_bytes for shape in shapes]
    budget = int(share * min(alone))
    first = [sft.plan(model, shape, budget=budget) for shape in shapes]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        net: Any = sft.compile(model, shapes[order[0]], budget=budget)
        assert [net.plan_for(shapes[place]).to_json() for place in order] == [first[place].to_json() for place in order]


def test_an_example_that_requires_a_gradient_is_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = import_module("sft.api.plan_search")
    plan_segments, count = searching.plan_segments, 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return plan_segments(*arguments)

    monkeypatch.setattr(searching, "plan_segments", counted)
    model, x = seeded(Residual), image(*_SHAPE).float()
    net: Any = sft.compile(model.float(), torch.empty(_SHAPE, device="meta", requires_grad=True))
    with_gradient = net.plan_for(x.clone().requires_grad_())
    assert (net.plan, count) == (with_gradient, 1)
    without = net.plan_for(x)
    assert count == 2
    assert without.flops < with_gradient.flops and without.projected_peak_bytes < with_gradient.projected_peak_bytes


class _Mixture(nn.Module):
    """In-place operators, norms and views, which the exporter represents in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, stride=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return nn.functional.interpolate(torch.cat([y, y.transpose(2, 3).transpose(2, 3)], 1), scale_factor=2).flatten(2).mean(2)


@pytest.mark.parametrize(
    ("autocast", "directly"), [(None, True), (torch.bfloat16, True), (None, False)], ids=["plain", "autocast", "decomposed"]
)
def test_bare_nodes_make_the_graph_of_full_ones(monkeypatch: pytest.MonkeyPatch, autocast: torch.dtype | None, directly: bool) -> None:
    module = import_module("sft.analysis.frontend.export")
    functional, stacks = module.functionalize, []

    def watched(exported: Any, *options: Any) -> Any:
        stacks.append(sum("stack_trace" in node.meta for node in exported.graph.nodes))
        functionalized = functional(exported, *options)
        assert (functionalized.program is exported) == directly
        return functionalized

    monkeypatch.setattr(module, "functionalize", watched)
    if not directly:
        monkeypatch.setattr("sft.analysis.frontend.functionalize.functionalize_by_rewriting", lambda *_: None)
    captures = []
    for patches in (("stack_traces", "tracer_stack_traces", "node_metadata"), ()):
        with monkeypatch.context() as without:
            skip_patch(without, *patches)
            made = capture(_Mixture(), [_SHAPE], [torch.float32], torch.device("cpu"), autocast=autocast)
        captures.append(made)
    full, bare = captures
    assert (numbered(bare.graph), bare.bounds) == (numbered(full.graph), full.bounds)
    assert set(bare.guards) < set(full.guards)  # memory formats hold for more than one pixel only
    assert stacks[0] > 0 and stacks[1] == 0


def test_a_size_of_which_a_pixel_is_left_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, num_captures = import_module("sft.api.capture_cache"), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_captures
        num_captures += 1
        return capture(*arguments, **options)

    monkeypatch.setattr(captured, "capture", counted)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2))
    model = seeded(lambda: chain(*layers, nn.Conv2d(4, 5, 3, padding=1))).double()
    net = sft.compile(model, _SHAPE, budget="1GiB")
    for shape in ((1, 3, 4, 5), (1, 3, 5, 4), (1, 3, 7, 40)):
        x, own = image(*shape), image(*shape)
        expected = torch.autograd.grad(model(own.requires_grad_()).square().sum(), [own, *model.parameters()])
        gradients = torch.autograd.grad(net(x.requires_grad_()).square().sum(), [x, *net.parameters()])
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    assert num_captures == 1


def test_untiled_costs_are_computed_once_for_all_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    survey, planner = import_module("sft.planner.search.estimates"), import_module("sft.planner.search.auto")
    suffix_peaks, num_asked, num_grids = survey.suffix_peaks, 0, 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return suffix_peaks(*arguments)

    class Counting(planner.CandidateGrid):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal num_grids
            num_grids += 1
            super().__init__(*arguments, **options)

    monkeypatch.setattr(survey, "suffix_peaks", counted)
    monkeypatch.setattr(planner, "CandidateGrid", Counting)
    monkeypatch.setattr("sft.api.proposals.MAX_ATTEMPTS", 0)  # each remedy is a separate problem
    with pytest.raises(sft.BudgetError):
        sft.plan(seeded(Residual), (1, 3, 64, 1024), budget=1)
    assert num_grids > 6
    assert num_asked == 2  # norms folded, and apart


def test_a_refusal_projects_the_smallest_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low strips of a deep network are thousands of programs; further candidates are projected only if the first estimate was wrong."""
    planner = import_module("sft.planner.search.auto")
    carry_out, projected = planner.materialize, []

    def noted(*arguments: Any) -> Any:
        projected.append(carry_out(*arguments).projection.peak_bytes)
        return carry_out(*arguments)

    monkeypatch.setattr(planner, "materialize", noted)
    monkeypatch.setattr("sft.api.proposals.MAX_ATTEMPTS", 0)  # remedies are separate plans
    with torch.device("meta"):
        model = vgg16(10)
    with pytest.raises(sft.BudgetError) as refused:
        sft.plan(model, (1, 3, 8192, 8192), budget=1, options=sft.Options(host_budget=0))
    assert len(projected) == 1
    assert refused.value.needed_bytes > projected[0]
    surveys_of = planner.candidate_grids

    def too_low(*arguments: Any) -> Any:
        for survey in surveys_of(*arguments):
            np.multiply(survey.estimates.peak_bytes, 0.9, out=survey.estimates.peak_bytes)
            yield survey

    projected.clear()
    monkeypatch.setattr(planner, "candidate_grids", too_low)
    with pytest.raises(sft.BudgetError) as again:
        sft.plan(model, (1, 3, 8192, 8192), budget=1, options=sft.Options(host_budget=0))
    assert 3 < len(projected) <= 24
    assert again.value.needed_bytes <= refused.value.needed_bytes


def test_flops_are_those_that_torch_counts() -> None:
    image_slot, kernel, out = Slot(0, (2, 3, 9, 7), torch.float32, 0), Slot(1, (4, 3, 3, 3), torch.float32, 1), (2, 4, 9, 7)
    emitter = ProgramBuilder(dtype=torch.float32)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    emitter.call(torch.ops.aten.convolution.default, image_slot, kernel, None, *geometry, shape=out)
    emitter.narrow(image_slot, 2, 1, 4)
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten.convolution.default(torch.ones(image_slot.shape), torch.ones(kernel.shape), None, *geometry)
    convolution, view = emitter.instructions
    assert convolution.flops == counter.get_total_flops() == 2 * 2 * 4 * 9 * 7 * 3 * 9
    assert (view.function, view.flops, view.num_bytes) == (torch.ops.aten.slice.Tensor, 0, 0)
    assert view.outputs[0] is not None and view.outputs[0].shape == (2, 3, 4, 7) and view.outputs[0].root == image_slot.root


def test_unused_plans_are_freed_at_once() -> None:
    """Regression: programs of a deep network (a million objects) and memory for copies waited for the garbage collector."""
    model = seeded(Residual)
    net: Any = sft.compile(model, _SHAPE, budget="1GiB")
    engine = weakref.ref(net._sft_engine)
    region = weakref.ref(next(iter(net._sft_engine.plan_cache.prepared.values())).region)
    with gc_paused():
        del net
        assert engine() is None and region() is None


def test_a_plan_leaves_nothing_of_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = import_module("sft.api.plan_search")
    plan_segments, seen = searching.plan_segments, []

    def watched(problem: Any, *rest: Any) -> Any:
        seen.append(problem)
        return plan_segments(problem, *rest)

    monkeypatch.setattr(searching, "plan_segments", watched)
    model = seeded(Residual)
    sft.plan(model, _SHAPE, budget="1GiB")
    with pytest.raises(sft.BudgetError):
        sft.plan(model, _SHAPE, budget=1)
    assert len(seen) >= 2 and not any(problem.memo for problem in seen)


def test_a_problem_that_differs_derives_its_own_programs() -> None:
    """Programs of a training step differ from those of inference."""

    def program_of(problem: PlanningProblem, kind: StripKind) -> Program:
        choice = SegmentChoice(nodes=problem.sized.phases.phases[0].streamed, mode="tiled", strip_rows=16, batch_tile=1)
        segment = build_region(problem, (choice,)).segments[0]
        assert isinstance(segment, TiledSegment)
        return segment.program(kind, 1, segment.sweeps[0])

    training = problem_of(chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)), _SHAPE, training=True)
    inference = with_sized(training, requires_grad=frozenset())
    assert program_of(inference, "joint").flops == 0
    assert program_of(training, "joint").flops > program_of(inference, "forward").flops > 0


def test_meters_around_the_first_call_do_not_see_planning() -> None:
    """Planning runs on fake tensors with symbolic bytes; the meters see the bytes and FLOPs of any later call."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            out = torch.zeros(y.shape[0], 4, 2 * y.shape[2], 2 * y.shape[3])
            out[:, :, ::2, ::2] = y
            return out

    net, x = sft.compile(seeded(Spread).float(), _SHAPE), image(*_SHAPE).float()
    measured = []
    with torch.no_grad():
        for _ in range(2):
            with sft.measure_peak("cpu") as peak, FlopCounterMode(display=False) as flops:
                net(x)
            measured.append((peak.num_bytes, flops.get_total_flops()))
    assert measured[0] == measured[1]
    assert measured[0][1] == 2 * 4 * 27 * 64 * 48


class _Compared(nn.Module):
    """A model with variadic inputs, as a training loss around a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        output: Tensor = self.conv(first)
        for other in others:
            output = output - self.conv(other)
        return output


@pytest.mark.parametrize("name", ["a loss", "several"])
def test_inputs_taken_as_one_are_captured_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Regression: each size was captured anew, as the exporter got one input spec for each and matched one parameter."""
    captured, captures = import_module("sft.api.capture_cache"), []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        captures.append(arguments)
        return capture(*arguments, **keywords)

    monkeypatch.setattr(captured, "capture", counted)
    model = sft.nn.WithLoss(seeded(lambda: nn.Conv2d(3, 4, 3, padding=1)), nn.functional.cross_entropy) if name == "a loss" else _Compared()
    model = model.double()

    def inputs_of(size: tuple[int, int]) -> tuple[Tensor, ...]:
        labels = (torch.arange(size[0] * size[1]) % 4).view(1, *size)
        return (
            (image(1, 3, *size), labels)
            if name == "a loss"
            else (image(1, 3, *size), image(1, 3, *size, seed=1), image(1, 3, *size, seed=2))
        )

    net: Any = sft.compile(model, [tuple(x.shape) if x.is_floating_point() else x for x in inputs_of((32, 24))])
    for size in ((32, 24), (48, 20), (17, 31)):
        torch.testing.assert_close(net(*inputs_of(size)), model(*inputs_of(size)), rtol=1e-11, atol=1e-11)
        shapes = [tuple(x.shape) if x.is_floating_point() else x for x in inputs_of(size)]
        assert net.plan_for(*shapes) == net.plan
    assert len(captures) == 1
    refusal = (
        r"class labels of shape \(1, 17, 31\) for a prediction" if name == "a loss" else "the model refuses an input of shape 1x3x32x24, 1x"
    )
    with pytest.raises(sft.InputError, match=refusal):
        net(inputs_of((32, 24))[0], *inputs_of((17, 31))[1:])


def test_equal_operators_of_equal_sizes_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each norm of a network was traced anew at each lowering, which took most of the time with hundreds of norms."""
    traces = import_module("sft.lower.joint_traces")
    calls: list[Any] = []
    make = traces.trace_joint

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return make(*arguments, **keywords)

    monkeypatch.setattr(traces, "trace_joint", counted)

    def num_traces(num_blocks: int) -> int:
        calls.clear()
        traces.trace_whole.cache_clear()
        traces.trace_pointwise.cache_clear()
        layers = [layer for _ in range(num_blocks) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Softsign())]
        sft.plan(seeded(lambda: chain(*layers)), (2, 4, 24, 20), budget="64MiB", options=sft.Options(tile=(8, None)))
        return len(calls)

    few = num_traces(3)
    assert 0 < few == num_traces(7)


@pytest.mark.parametrize("make", [Residual, lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))])
def test_plain_execution_is_selected_where_it_just_fits(make: Any) -> None:
    """Regression: an output of a program was counted twice, so stages were recomputed without need."""
    model = seeded(make)
    shape = _SHAPE if isinstance(model, Residual) else (32, 16)
    plain = sft.plan(model, shape, options=sft.Options(strategy="none"), budget="1GiB")
    tight = sft.plan(model, shape, budget=plain.total_bytes)
    assert (tight.flops, tight.total_bytes) == (plain.plain_flops, plain.total_bytes)
