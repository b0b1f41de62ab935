"""The stages of planning, each called alone; together they give the plan of `sft.plan`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.api.call_signature import CallSignature, signature_of
from sft.api.capture_cache import CaptureCache, CapturedModel, SpecializedModel, capture_model
from sft.api.inputs import InputSpec
from sft.api.pipeline import PreparedPlan, planning_context, prepare, search
from sft.api.plan_cache import PlanCache
from sft.api.plan_search import PlanSearch
from sft.api.problem_builder import build_problem
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.module_snapshot import ModuleSnapshot
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.problem import PlanningProblem
from tests.helpers.models import ConvNet, image, seeded

_SHAPE = (1, 3, 64, 48)


def _model() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def _signature(model: nn.Module, shape: tuple[int, ...] = _SHAPE, **properties: bool) -> CallSignature:
    spec = InputSpec(shape=shape, dtype=torch.float32, **properties)
    return signature_of(ModuleSnapshot(model), [spec], (False,), torch.device("cpu"))


def _specialized(model: nn.Module, signature: CallSignature) -> SpecializedModel:
    specialized = capture_model(model, signature).specialize(signature.shapes)
    assert specialized is not None
    return specialized


def _problem(model: nn.Module, signature: CallSignature, settings: CompileSettings) -> PlanningProblem:
    return build_problem(PlanningRequest(model=model, signature=signature, settings=settings), _specialized(model, signature))


def _settings(budget: str = "4MiB", **options: object) -> CompileSettings:
    return CompileSettings(budget_bytes=sft.parse_bytes(budget), options=sft.Options(**options))  # type: ignore[arg-type]


def test_signatures_differ_by_shape_and_gradients_and_not_by_unasked_modes() -> None:
    model = _model()
    signature = _signature(model)
    assert signature == _signature(model) and hash(signature) == hash(_signature(model))
    assert signature != _signature(model, (1, 3, 64, 50)) and signature != _signature(model, needs_grad=True)
    with torch.no_grad():
        assert signature != _signature(model)
    torch.use_deterministic_algorithms(True)
    try:
        assert signature == _signature(model), "the model has not asked"
        assert signature.with_guards({"deterministic"}) != _signature(model).with_guards({"deterministic"})
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_capture_holds_for_many_sizes() -> None:
    model = _model()
    captured = capture_model(model, _signature(model))
    assert isinstance(captured, CapturedModel) and len(captured.phases.phases) == 1
    for shape in (_SHAPE, (1, 3, 65, 31)):
        specialized = captured.specialize([shape])
        assert specialized is not None
        (name,) = specialized.phases.graph.inputs
        assert specialized.phases.graph[name].shape == shape
        assert all(isinstance(extent, int) for node in specialized.phases.graph.nodes for extent in node.shape)
    assert captured.specialize([(1, 4, 64, 48)]) is None, "another number of channels"


def test_the_capture_cache_captures_a_model_once() -> None:
    model = _model()
    captures = CaptureCache(model)
    first = captures.get_or_capture(_signature(model))
    second = captures.get_or_capture(_signature(model, (1, 3, 32, 32)))
    assert len(captures) == 1 and first.captured.capture is second.captured.capture


def test_the_problem_has_the_gradients_and_bytes_of_the_call() -> None:
    model = _model()
    model.get_submodule("0").requires_grad_(False)
    problem = _problem(model, _signature(model), _settings())
    weights = {node.name for node in problem.sized.graph.nodes if node.kind == "parameter" and node.target.startswith("0.")}
    assert problem.sized.training and weights and problem.sized.requires_grad.isdisjoint({*weights, *problem.sized.graph.inputs})
    grads = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert problem.resources.resident_bytes == 4 * (sum(p.numel() for p in model.parameters()) + grads)
    with torch.no_grad():
        assert not _problem(model, _signature(model), _settings()).sized.training


def test_a_streamed_input_that_the_model_returns_is_refused_by_the_problem() -> None:
    class Returning(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    with pytest.raises(sft.InputError, match="read strip by strip, but the model returns it whole"):
        _problem(Returning(), _signature(Returning(), from_source=True), _settings())


def test_the_search_fits_the_budget_or_names_the_smallest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    signature = _signature(model)
    ample, tight = _settings("64MiB"), _settings("256KiB")
    problem = _problem(model, signature, ample)
    plain, tiled = (
        search(PlanSearch(request=PlanningRequest(model=model, signature=signature, settings=settings)), problem)
        for settings in (ample, tight)
    )
    assert isinstance(plain, FittedPlan) and plain.seconds is None
    assert tiled.problem.resources.resident_bytes + tiled.projected.projection.peak_bytes <= tight.budget_bytes
    assert tiled.projected.projection.peak_bytes < plain.projected.projection.peak_bytes
    with pytest.raises(sft.BudgetError) as refusal:
        search(PlanSearch(request=PlanningRequest(model=model, signature=signature, settings=_settings("10KiB"))), problem)
    assert refusal.value.needed_bytes > sft.parse_bytes("10KiB")


def test_the_search_takes_the_previous_plan_without_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    request = PlanningRequest(model=model, signature=_signature(model), settings=_settings())
    specialized = _specialized(model, request.signature)
    problem = build_problem(request, specialized)
    plan = prepare(request, search(PlanSearch(request=request), problem), specialized).plan

    def planned(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("sft.api.plan_search.plan_segments", planned)
    again = search(PlanSearch(request=request, previous=plan), problem)
    assert prepare(request, again, specialized).plan == plan


def test_a_timed_search_measures_each_operation_of_the_schedule() -> None:
    model = _model()
    request = PlanningRequest(model=model, signature=_signature(model), settings=_settings(profile="measure"))
    specialized = _specialized(model, request.signature)
    fitted = search(PlanSearch(request=request), build_problem(request, specialized))
    assert fitted.seconds is not None and len(fitted.seconds) == len(fitted.projected.region.schedule)
    plan = prepare(request, fitted, specialized).plan
    assert plan.projected_seconds is not None and plan.projected_seconds > 0


def test_the_stages_make_the_plan_of_the_public_function() -> None:
    model = _model()
    request = PlanningRequest(model=model, signature=_signature(model), settings=_settings())
    with planning_context(request):
        specialized = _specialized(model, request.signature)
        prepared = prepare(request, search(PlanSearch(request=request), build_problem(request, specialized)), specialized)
    assert isinstance(prepared, PreparedPlan) and prepared.retain_check is not None and prepared.resources.graphs is None
    assert prepared.plan.to_json() == sft.plan(model, _SHAPE, budget="4MiB").to_json()


def test_the_plan_cache_prepares_a_signature_once_and_shares_captures_with_other_requests() -> None:
    model = _model()
    cache = PlanCache(model, _settings())
    snapshot, signature = ModuleSnapshot(model), _signature(model)
    prepared = cache.get_or_prepare(signature, snapshot)
    assert cache.get_or_prepare(signature, snapshot) is prepared
    assert cache.latest == (cache.with_guards(signature), prepared) and cache.plans[signature] == prepared.plan
    other = cache.with_settings(sft.parse_bytes("8MiB"), sft.Options(strategy="none"))
    assert not other.prepared and other.captures is cache.captures
    assert other.get_or_prepare(signature, snapshot).plan.budget_bytes == sft.parse_bytes("8MiB")
    assert len(cache.captures) == 1 and len(cache.prepared) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_example_is_planned_in_its_layout(memory_format: torch.memory_format) -> None:
    """The first call has the plan of the example."""
    x = image(2, 3, 32, 24).float().contiguous(memory_format=memory_format)
    net: Any = sft.compile(seeded(ConvNet).float(), x, budget="64MiB")
    plans = net._sft_engine.plan_cache.prepared
    (planned,) = plans
    net(x).sum().backward()
    assert list(plans) == [planned] and planned.channels_last == (memory_format == torch.channels_last,)
    assert net.plan_for(torch.empty_like(x)) is net.plan
