"""The planning pipeline: from a model and a call signature to a plan that is ready to run.

Each arrow is a function that can be called alone, each box a frozen type::

    nn.Module
        |  capture_model             sft.api.capture_cache: torch.export -> ExportedProgram -> Graph -> passes -> phases
    CapturedModel                    holds for many sizes
        |  .specialize               sft.api.capture_cache: all sizes become numbers
    SpecializedModel                 PhasedGraph
        |  build_problem             sft.api.problem_builder: gradients, layouts, resident bytes, streamed inputs
    PlanningProblem
        |  search                    sft.api.plan_search: candidates -> decisions (SegmentChoice*) -> Region -> projected bytes
    FittedPlan                       problem and ProjectedPlan
        |  prepare                   this module: Plan, host memory, CUDA graphs
    PreparedPlan
        |  run_region                sft.torch_runtime.autograd: programs -> tensors
    outputs

Later stages never call earlier ones. Caches lie outside: captures in a :class:`~sft.api.capture_cache.CaptureCache`, prepared plans in a
:class:`~sft.api.plan_cache.PlanCache`. On a mesh :func:`prepare_on_mesh` replaces the last two planning stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from sft.analysis.ir.graph import Node
from sft.api.capture_cache import CapturedModel, SpecializedModel
from sft.api.plan_search import PlanSearch, overhead_estimator
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.process_lock import gc_paused
from sft.common.transform_checks import without_dispatch_modes
from sft.distributed.mesh import LiveMesh
from sft.distributed.planning import plan_bands
from sft.distributed.sync_batch_norm import check_sync_batch_norms, synchronized_moments, without_sync_batch_norm
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.plan import Plan
from sft.planner.plan_builder import build_plan
from sft.planner.problem import PlanningProblem
from sft.planner.repeat_budgets import RetainedGraphCheck
from sft.runtime.region import Region
from sft.torch_runtime.cuda_graphs import CudaGraphRecorder, GraphCache, recordable_programs
from sft.torch_runtime.device_pool import PoolLayout
from sft.torch_runtime.host.host_memory import HostAllocator, HostSlabPool
from sft.torch_runtime.pass_graphs import CudaPassRecorder, PassGraphs
from sft.torch_runtime.pass_settings import autocast_disabled
from sft.torch_runtime.region_inputs import PlanResources

__all__ = ["PreparedPlan", "planning_context", "prepare", "prepare_on_mesh", "search"]


@dataclass(frozen=True)
class PreparedPlan:
    """A plan with all that a call needs to run it, except for tensors.

    Attributes:
        plan: the plan, as the user sees it.
        region: the schedule and its programs.
        captured: the model that the region computes.
        constant_outputs: outputs of the model that are not tensors, with their positions.
        resources: memory and recordings of the region's passes.
        retain_check: refuses backward passes that retain the graph if they exceed the budget; ``None`` for inference and on a mesh.
    """

    plan: Plan
    region: Region
    captured: CapturedModel
    constant_outputs: tuple[tuple[int, Any], ...]
    resources: PlanResources = field(default_factory=PlanResources)
    retain_check: RetainedGraphCheck | None = None

    @cached_property
    def updated_buffers(self) -> frozenset[str]:
        """Names of the buffers that a call overwrites."""
        paths = {path for _, path in self.captured.capture.graph.updates}
        return frozenset(node.name for node in self.captured.phases.graph.leaves if node.kind == "buffer" and node.target in paths)

    @cached_property
    def leaf_names(self) -> tuple[str, ...]:
        """Names of the leaves of the region, in order."""
        return tuple(node.name for node in self.captured.phases.graph.leaves)

    @cached_property
    def registered_leaves(self) -> dict[str, str]:
        """Parameters and buffers of the region, with their paths in the model."""
        return {node.name: node.target for node in self.captured.phases.graph.leaves if node.kind in ("parameter", "buffer")}

    @cached_property
    def other_leaves(self) -> tuple[Node, ...]:
        """Inputs, seeds and constants of the region."""
        return tuple(node for node in self.captured.phases.graph.leaves if node.name not in self.registered_leaves)

    @cached_property
    def new_buffers(self) -> frozenset[str]:
        """Names of the values that become the content of buffers and are not outputs of the model."""
        graph = self.captured.capture.graph
        return frozenset(name for name, _ in graph.updates).difference(graph.outputs)


@contextlib.contextmanager
def planning_context(request: PlanningRequest) -> Iterator[None]:
    """The context of all stages: no autocast, dispatch modes or garbage collection, and synchronised batch norms replaced.

    Raises:
        UnsupportedError, InputError: as :func:`sft.distributed.sync_batch_norm.check_sync_batch_norms`.
    """
    with autocast_disabled(request.device), gc_paused(), without_dispatch_modes():
        check_sync_batch_norms(request.model, request.settings.mesh)
        with without_sync_batch_norm(request.model):
            yield


def search(plan_search: PlanSearch, problem: PlanningProblem) -> FittedPlan:
    """Find a plan that fits the budget; with ``Options(profile="measure")`` the fastest of several, by a clock.

    Args:
        plan_search: the search for plans of a form of the graph.
        problem: its problem.

    Raises:
        BudgetError, InputError, UnsupportedError, SlowerPlansError: as :meth:`PlanSearch.fit`.
    """
    fitted, request = plan_search.fit(problem), plan_search.request
    is_timed = request.settings.options.profile == "measure" and request.device.type != "meta"
    return plan_search.fastest(fitted) if is_timed else fitted


def prepare(request: PlanningRequest, fitted: FittedPlan, specialized: SpecializedModel) -> PreparedPlan:
    """Build the user's plan, and allocate host memory and CUDA graphs for its region."""
    problem, region, device, settings = fitted.problem, fitted.projected.region, request.device, request.settings
    plan = build_plan(problem, fitted.projected, budget_bytes=settings.budget_bytes)
    plan = replace(plan, transferred_from=fitted.transferred_from, **_limits_of(plan, settings))
    if fitted.seconds is not None:
        timeline = plan.timeline.measured(fitted.seconds)
        plan = replace(plan, projected_seconds=timeline.seconds, timeline=timeline)
    has_copies = bool(region.direct) or any(op.is_copy for op in region.schedule)
    slab_pool = HostSlabPool(fitted.projected.projection.slab_bytes, device, settings.host_allocator) if has_copies else None
    records_passes = fitted.projected.projection.records_passes and device.type == "cuda"
    graphs = None if records_passes else _recordable_graphs(request, problem, region, plan)
    if graphs is not None:
        plan = replace(plan, projected_peak_bytes=plan.projected_peak_bytes + graphs.num_bytes)
    if plan.device_type == "cuda":
        replays = fitted.projected.projection.records_passes
        plan = replace(plan, projected_reserved_bytes=plan.total_bytes, replays_passes=replays)
    return PreparedPlan(
        plan=plan,
        region=region,
        captured=specialized.captured,
        constant_outputs=problem.sized.graph.constant_outputs,
        resources=PlanResources(
            slab_pool=slab_pool,
            staging_pool=_staging_pool(fitted.projected.projection.staging_bytes, device),
            pool_layout=_pool_layout(fitted) if _has_pool(device) else None,
            graphs=graphs,
            pass_graphs=_pass_graphs(problem, fitted, device) if records_passes else None,
        ),
        retain_check=RetainedGraphCheck(problem, region, plan) if plan.training else None,
    )


def _has_pool(device: torch.device) -> bool:
    """True if steps on the device may have a memory pool of their own."""
    return device.type == "cuda"


def _pool_layout(fitted: FittedPlan) -> PoolLayout | None:
    """Layout of the memory pool of a plan; ``None`` if it has no segments."""
    projection = fitted.projected.projection
    if projection.segments is None:
        return None
    return PoolLayout(projection.segments, projection.multiplies, projection.input_segment_bytes)


def _staging_pool(num_bytes: int, device: torch.device) -> HostSlabPool | None:
    """Page-locked memory for copies to a CUDA device; ``None`` if a step has none."""
    if not num_bytes or device.type != "cuda":
        return None
    return HostSlabPool(num_bytes, device, HostAllocator(), "the plan's page-locked buffers")


def prepare_on_mesh(request: PlanningRequest, problem: PlanningProblem, specialized: SpecializedModel) -> PreparedPlan:
    """Plan for a mesh; the region is this rank's, or without processes that of the band with the largest peak.

    Raises:
        BudgetError, UnsupportedError, InputError: as :func:`sft.distributed.planning.plan_bands`.
    """
    settings = request.settings
    assert settings.mesh is not None and settings.mesh_shape is not None
    projected = plan_bands(
        problem,
        settings.mesh_shape,
        settings.budget_bytes,
        settings.options,
        outputs_in_bands=settings.destination.in_bands,
        synchronized=synchronized_moments(request.model, problem.sized.graph, settings.mesh),
    )
    plan = build_plan(problem, projected.planned, budget_bytes=settings.budget_bytes)
    plan = replace(plan, mesh=projected.mesh, flops=sum(rank.flops for rank in projected.mesh.ranks))
    plan = replace(plan, **_limits_of(plan, settings))
    region = projected.planned.region
    if isinstance(settings.mesh, LiveMesh):
        region = projected.bands.region(settings.mesh.band, settings.backward_context)
    return PreparedPlan(plan, region, specialized.captured, problem.sized.graph.constant_outputs)


def _limits_of(plan: Plan, settings: CompileSettings) -> dict[str, Any]:
    """Fields of a plan about limits that were read from the machine.

    Raises:
        BudgetError: the host lacks the memory that the plan takes.
    """
    limits = settings.limits
    limits.check_host(plan.host_bytes)
    return {
        "budget_note": limits.budget_note,
        "host_note": limits.host_note if plan.host_bytes else "",
    }


def _pass_graphs(problem: PlanningProblem, fitted: FittedPlan, device: torch.device) -> PassGraphs:
    """Recordings of the passes of a plan, in a memory pool with the plan's segments."""
    graph = problem.sized.graph
    fixed = frozenset(node.name for node in graph.nodes) - graph.call_leaves
    layout = _pool_layout(fitted) or PoolLayout(multiplies=fitted.projected.projection.multiplies)
    return PassGraphs(fixed=fixed, recorder=CudaPassRecorder(device, layout))


def _recordable_graphs(request: PlanningRequest, problem: PlanningProblem, region: Region, plan: Plan) -> GraphCache | None:
    """Programs that are replayed as CUDA graphs, as many as the rest of the budget allows."""
    settings, device = request.settings, request.device
    if settings.options.cuda_graphs is not True or device.type != "cuda":
        return None
    # Sharded weights are gathered again for each pass, so their addresses change.
    weights = () if settings.sharding else (node.name for node in problem.sized.graph.nodes if node.kind in ("parameter", "buffer"))
    graphs = GraphCache.within(
        recordable_programs(region, training=plan.training),
        settings.budget_bytes - plan.total_bytes,
        CudaGraphRecorder(device),
        frozenset(weights),
        overhead_estimator(request.model, problem, device, cuda_graphs="strips").working_bytes,
    )
    return graphs if graphs.programs else None
