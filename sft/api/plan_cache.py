"""From a kind of call to a region that is planned: capture once, plan each kind once.

What a plan is made for is a :class:`CallSignature`: shapes, layouts, which gradients are wanted, training flags, autocast, and what else
the model's forward may look at (``sft.analysis.frontend.fingerprint``). A capture serves all sizes that it holds for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import CallModes, GuardValues
from sft.analysis.frontend.capture import Capture, is_in_program_layout, outputs_channels_last, tensor_attribute
from sft.analysis.frontend.fingerprint import check_no_inner_hooks
from sft.analysis.frontend.trace_context import squeeze_label_channels
from sft.analysis.ir.grad_reachability import grad_reachable_values
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import differentiable_operands
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.capture_cache import CaptureCache, CapturedModel, CaptureKey, Shape
from sft.api.outputs import OutputDestination
from sft.api.plan_search import PlanSearch
from sft.backends.resolve import backend_for
from sft.common.call_guards import without_dispatch_modes
from sft.common.errors import InputError, UnsupportedError
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.process_lock import gc_paused, patch_lock
from sft.common.weighted_lru import WeightedLRU
from sft.distributed.fsdp import ShardedWeights
from sft.distributed.mesh import LiveMesh, MeshShape
from sft.distributed.planning import plan_bands
from sft.distributed.sync_batch_norm import check_sync_batch_norms, synchronized_moments, without_sync_batch_norm
from sft.lower.context import Backend
from sft.planner.cost.roofline import DeviceRates
from sft.planner.options import OFFLOAD_STRATEGIES, Options
from sft.planner.plan import Plan
from sft.planner.plan_builder import build_plan
from sft.planner.problem import PlanningProblem, specialize_phases
from sft.planner.repeat_budgets import RetainedGraphCheck
from sft.runtime.region import Region
from sft.torch_runtime.autograd import autocast_disabled
from sft.torch_runtime.cuda_graphs import ActiveGraphs, CudaGraphRecorder, GraphCache, recordable_programs
from sft.torch_runtime.host_memory import HostAllocator, HostSlabPool
from sft.torch_runtime.profiling import table_folders

__all__ = ["CallSignature", "PlanCache", "PreparedPlan", "resolve_tensor"]

#: Plans that are kept; an attribute that changes at every call must not fill the memory.
_MAX_PLANS = 128
#: Plans without programs, which images of ever new sizes have looked for in the next epoch, too.
_MAX_CACHED_OBJECTS = 1024


@dataclass(frozen=True)
class CallSignature:
    """What a plan is made for."""

    shapes: tuple[Shape, ...]
    traced: CaptureKey
    channels_last: tuple[bool, ...]
    weights_last: tuple[bool, ...]
    weights_in_layout: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    with_grad: bool
    from_source: tuple[bool, ...] = ()
    splits_batch: bool = True
    holds_gradients: bool = False
    deterministic: bool = False
    #: of streamed weights that were taken: what changes with where their gradients go
    weights_revision: int | None = None
    #: what the model's forward may ask, and the answers to what it has asked so far, which alone tell calls apart
    modes: CallModes = field(default=CallModes(), compare=False)
    answers: GuardValues = ()


@dataclass(frozen=True)
class PreparedPlan:
    plan: Plan
    region: Region
    captured: CapturedModel
    #: what the model returns besides tensors, and where
    beside: tuple[tuple[int, Any], ...]
    slabs: HostSlabPool | None = None
    graphs: GraphCache | None = None
    #: judges backward passes that retain the graph; there is none on a mesh
    retained: RetainedGraphCheck | None = None


class PlanCache:
    """Captures and plans of one model.

    Args:
        model: the model.
        budget_bytes: what the device may hold.
        options: wishes about plans.
        optimizer: its state counts as resident.
        plan: a plan that the user handed in, for inputs that it fits.
        destination: where outputs go.
        mesh: the ranks that share an image.
        backend: in the place of what the options ask for.
        together: what the backward pass on a mesh runs in.
        sharding: the model's weights, where they are sharded.

    Attributes:
        captures: of the model.
        ready: what is planned, by kind of call, the last one last.
        made: plans by kind of call, also of those that are not ready any more.
        turn: whose recorded programs are alive.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int,
        options: Options,
        optimizer: torch.optim.Optimizer | int | None,
        plan: Plan | None,
        destination: OutputDestination,
        mesh: LiveMesh | MeshShape | None,
        backend: Backend | None,
        together: Callable[[], AbstractContextManager[None]],
        sharding: ShardedWeights | None = None,
    ) -> None:
        self.model, self.sharding, self.budget_bytes, self.options = model, sharding, budget_bytes, options
        self.optimizer, self.given_plan, self.destination, self.mesh = optimizer, plan, destination, mesh
        self.backend, self._together = backend, together
        self.captures = CaptureCache(model)
        self.ready: dict[CallSignature, PreparedPlan] = {}
        self.made: dict[CallSignature, Plan] = {}
        self.turn = ActiveGraphs()
        self._shared = WeightedLRU()

    def for_request(self, budget_bytes: int, options: Options) -> PlanCache:
        """The same model and captures, nothing planned yet, for another budget and other wishes."""
        other = PlanCache(
            self.model,
            budget_bytes=budget_bytes,
            options=options,
            optimizer=self.optimizer,
            plan=None,
            destination=self.destination,
            mesh=self.mesh,
            backend=self.backend,
            together=self._together,
            sharding=self.sharding,
        )
        other.captures, other._shared = self.captures, self._shared
        return other

    @patch_lock()
    def prepare(self, kind: CallSignature, contents: ModuleSnapshot) -> PreparedPlan:
        """The plan for a kind of call of a model that holds this, made at the first.

        Raises:
            UnsupportedError, BudgetError, InputError: as :func:`sft.compile`.
        """
        check_no_inner_hooks(contents)
        kind = self.answered(kind)
        ready = self.ready.get(kind)
        if ready is None:
            with autocast_disabled(kind.traced.device), gc_paused(), without_dispatch_modes():
                ready = self._plan(kind)
            kind = self.answered(kind)  # a capture may have asked more
            _insert_bounded(self.ready, kind, ready, _MAX_PLANS)
            _insert_bounded(self.made, kind, ready.plan, _MAX_CACHED_OBJECTS)
        return ready

    def answered(self, kind: CallSignature) -> CallSignature:
        """A kind of call with the answers to what the model has asked so far."""
        answers = kind.modes.answers(self.captures.asked)
        return kind if answers == kind.answers else replace(kind, answers=answers)

    def _plan(self, kind: CallSignature) -> PreparedPlan:
        check_sync_batch_norms(self.model, self.mesh)
        with without_sync_batch_norm(self.model):
            return self._plan_captured(kind)

    def _plan_captured(self, kind: CallSignature) -> PreparedPlan:
        captured, symbols = self.captures.of(kind.traced, kind.shapes, kind.modes)
        captured = captured.at(symbols)
        inputs = captured.phases.graph.inputs
        phases = specialize_phases(captured.phases, symbols, dict(zip(inputs, kind.shapes, strict=True)))
        graph = phases.graph
        search = self._search(kind)
        problem = PlanningProblem(
            phases=phases,
            requires_grad=self._requires_grad(kind, phases, captured.capture),
            channels_last=self._channels_last(kind, graph, captured) - self._in_files(graph),
            weights_in_layout=self._weights_in_layout(graph),
            resident_bytes=search.resident_bytes(),
            from_source=frozenset(name for name, is_read in zip(inputs, kind.from_source, strict=True) if is_read),
            outputs_on_host=self.destination.on_host,
            splits_batch=kind.splits_batch,
            on_host=kind.traced.device.type in ("cpu", "meta"),
            host_budget_bytes=self._host_budget_bytes(kind.traced.device),
            link=DeviceRates(kind.traced.device.type).link(self.options.link_bytes_per_second),
            skips_repeats=search.skips_repeats,
            deterministic=kind.deterministic,
            backend=self.backend or backend_for(self.options.backend, kind.traced.device, table_folders()),
            shared=self._shared,
        )
        try:
            return self._planned(kind, problem, captured, search)
        finally:
            problem.clear_memo()

    def _planned(self, kind: CallSignature, problem: PlanningProblem, captured: CapturedModel, search: PlanSearch) -> PreparedPlan:
        """The plan for a problem."""
        self._check_sources(problem)
        self.destination.check([problem.dtypes[name] for name in problem.graph.outputs])
        rates = DeviceRates(kind.traced.device.type)
        if self.mesh is not None:
            return self._plan_on_mesh(problem, captured, rates)
        problem, planned = search.run(problem)
        seconds: Sequence[float] | None = None
        if self.options.profile == "measure" and kind.traced.device.type != "meta":
            planned, seconds = search.fastest(problem, planned)
        plan = build_plan(problem, planned, budget_bytes=self.budget_bytes, rates=rates)
        if seconds is not None:
            timeline = plan.timeline.measured(seconds)
            plan = replace(plan, projected_seconds=timeline.seconds, timeline=timeline)
        copies = any(move.is_copy for move in planned.region.schedule)
        slabs = HostSlabPool(planned.projection.slab_bytes, kind.traced.device, self.room) if copies else None
        graphs = self._recordings(problem, planned.region, plan, search)
        if graphs is not None:
            plan = replace(plan, projected_peak_bytes=plan.projected_peak_bytes + graphs.num_bytes)
        retained = RetainedGraphCheck(problem, planned.region, plan) if plan.training else None
        return PreparedPlan(plan, planned.region, captured, problem.graph.constant_outputs, slabs, graphs, retained)

    def _search(self, kind: CallSignature) -> PlanSearch:
        return PlanSearch(
            model=self.model,
            optimizer=self.optimizer,
            sharding=self.sharding,
            mesh=self.mesh,
            budget_bytes=self.budget_bytes,
            options=self.options,
            given=self.given_plan,
            made=self.made.get(kind),
            device=kind.traced.device,
            uses_autocast=kind.traced.autocast is not None,
            holds_gradients=kind.holds_gradients,
            are_weights_streamed=kind.weights_revision is not None,
        )

    def _plan_on_mesh(self, problem: PlanningProblem, captured: CapturedModel, rates: DeviceRates) -> PreparedPlan:
        """The plan for a mesh, and this rank's region (without processes that of the band that needs most)."""
        assert self.mesh is not None
        shape = self.mesh.shape if isinstance(self.mesh, LiveMesh) else self.mesh
        found = plan_bands(
            problem,
            shape,
            self.budget_bytes,
            self.options,
            outputs_in_bands=self.destination.in_bands,
            synchronized=synchronized_moments(self.model, problem.graph, self.mesh),
        )
        plan = build_plan(problem, found.planned, budget_bytes=self.budget_bytes, rates=rates)
        plan = replace(plan, mesh=found.mesh, flops=sum(rank.flops for rank in found.mesh.ranks))
        region = found.planned.region
        if isinstance(self.mesh, LiveMesh):
            region = found.bands.region(self.mesh.band, self._together)
        return PreparedPlan(plan, region, captured, problem.graph.constant_outputs)

    def _recordings(self, problem: PlanningProblem, region: Region, plan: Plan, search: PlanSearch) -> GraphCache | None:
        """What is replayed as CUDA graphs: what the budget has left decides how much."""
        device = search.device
        if not self.options.cuda_graphs or device.type != "cuda":
            return None
        weights = () if self.sharding else (node.name for node in problem.graph.nodes if node.kind in ("parameter", "buffer"))
        store = GraphCache.within(
            recordable_programs(region, training=plan.training),
            self.budget_bytes - plan.total_bytes,
            CudaGraphRecorder(device),
            frozenset(weights),  # sharded ones are gathered anew for each pass
            search.overheads(problem).working_bytes,
        )
        return store if store.programs else None

    def _check_sources(self, problem: PlanningProblem) -> None:
        returned = sorted(problem.from_source.intersection(problem.graph.results))
        if returned:
            raise InputError(f"{', '.join(returned)} is read strip by strip, but the model returns it whole; give it as a tensor")
        tile = self.options.batch_tile
        if not problem.splits_batch and tile is not None and tile < problem.num_batch:
            raise InputError(
                f"batch_tile {tile} takes {problem.num_batch} batch elements in parts, but a source or sink has no method "
                "samples(batch); add one, or leave out batch_tile"
            )

    def _channels_last(self, kind: CallSignature, graph: Graph, captured: CapturedModel) -> frozenset[str]:
        """Inputs that are laid out channels last, and the outputs that eager PyTorch would then lay out so."""
        given = [name for name, last in zip(graph.inputs, kind.channels_last, strict=True) if last]
        if not given and not any(kind.weights_last) and not captured.permutes:
            return frozenset()
        traced = kind.traced
        with squeeze_label_channels(self.model, traced.lacking_channels):
            found = outputs_channels_last(
                self.model, kind.shapes, traced.dtypes, traced.device, kind.channels_last, autocast=traced.autocast
            )
        # Where eager PyTorch cannot be asked, the outputs follow the inputs.
        outputs = graph.outputs if found is None and given else [n for n, last in zip(graph.outputs, found or (), strict=False) if last]
        return frozenset((*given, *outputs))

    def _weights_in_layout(self, graph: Graph) -> frozenset[str]:
        """Parameters that lie in memory as their gradients are made."""
        weights = [node for node in graph.nodes if node.kind == "parameter"]
        return frozenset(node.name for node in weights if is_in_program_layout(resolve_tensor(self.model, node.target)))

    def _in_files(self, graph: Graph) -> frozenset[str]:
        """Outputs that go to files, which are in C order."""
        paths = self.destination.paths
        return frozenset(n for n, path in zip(graph.outputs, paths, strict=False) if path is not None and graph[n].kind == "operator")

    def _requires_grad(self, kind: CallSignature, phases: PhasedGraph, capture: Capture) -> frozenset[str]:
        """Values that need a gradient.

        Raises:
            UnsupportedError: one of them is a tensor that modules hold besides parameters and buffers, or an output that `forward` gives
                a gradient which the call has not.
        """
        if not kind.with_grad and not capture.enables_grad:
            return frozenset()
        found: set[str] = set()
        problems: list[str] = []
        reached = grad_reachable_values(phases.graph)
        arriving = iter(kind.modes.inputs)
        for node in phases.graph.nodes:
            if node.kind == "input":
                needs = next(arriving)
            elif node.kind == "parameter":
                needs = node.name in reached and resolve_tensor(self.model, node.target).requires_grad
            elif node.kind == "buffer":
                needs = node.name in reached and self.model.get_buffer(node.target).requires_grad
            elif node.kind == "constant":
                needs = False
                where = capture.differentiable_constants.get(node.target)
                if where is None and node.target not in capture.constants and resolve_tensor(self.model, node.target).requires_grad:
                    where = node.target
                if where is not None and node.name in reached:
                    problems.append(_unregistered_message(where))
            elif node.kind == "seed":
                needs = False
            else:
                needs = node.name in reached and any(name in found for name in differentiable_operands(node))
            if needs:
                found.add(node.name)
        if not kind.with_grad:
            if not found.isdisjoint(phases.graph.outputs):
                raise UnsupportedError([_ENABLE_GRAD_MESSAGE.format(type(self.model).__name__)])
            return frozenset()
        if problems:
            raise UnsupportedError(problems)
        return frozenset(found)

    @property
    def room(self) -> HostAllocator:
        """Where what leaves the device during a step goes."""
        folder = self.options.host_folder
        return HostAllocator(None if folder is None else Path(folder))

    def _host_budget_bytes(self, device: torch.device) -> int | None:
        """Bytes of the host that a plan may use. Where the device's memory is the host's, nothing is gained unless somebody says so."""
        options = self.options
        if (
            options.host_budget is None
            and device.type == "cpu"
            and options.host_folder is None
            and options.strategy not in OFFLOAD_STRATEGIES
        ):
            return 0
        return options.host_budget_bytes


def _insert_bounded(known: dict[CallSignature, Any], kind: CallSignature, value: Any, most: int) -> None:
    """Remember something of a kind of call, and forget what was remembered first where it becomes too much."""
    known.pop(kind, None)
    while len(known) >= most:
        del known[next(iter(known))]
    known[kind] = value


_ENABLE_GRAD_MESSAGE = (
    "{}: `forward` switches gradients on (torch.enable_grad), so that in eager PyTorch its outputs have one although it is called without; "
    "call it outside of torch.no_grad, or leave the switch to the caller"
)


def _unregistered_message(name: str) -> str:
    return (
        f"{name}: a tensor that requires a gradient and is no parameter of the model; make it an nn.Parameter of one of its modules (of "
        "modules in a plain list: make it an nn.ModuleList), or detach it"
    )


def resolve_tensor(model: nn.Module, path: str) -> torch.Tensor:
    """A tensor of the model; a parameter, too, whose place may have another tensor in a ``functional_call``."""
    value = tensor_attribute(model, path)
    assert value is not None
    return value
