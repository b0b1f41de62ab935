"""The engine of a compiled module: it runs calls.

A call passes through four steps: resolve the inputs, look up its prepared plan (:class:`~sft.api.plan_cache.PlanCache`), bind the plan's
values to tensors, and run the region. Outputs are published and buffers updated only once the forward pass has succeeded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.aliasing.overlapping_writes import check_written_inputs
from sft.analysis.ir.graph import Graph
from sft.analysis.tiling.bands import BandPartition
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.call_arguments import CallStructure
from sft.api.call_signature import CallSignature, Shape, signature_of
from sft.api.inputs import InputHint, InputSpec, ResolvedInput, add_missing_channels, find_missing_channels, floating_input, resolve_inputs
from sft.api.memory_limits import MemoryLimits
from sft.api.outputs import HostOutputs, OutputDestination
from sft.api.pipeline import PreparedPlan
from sft.api.plan_cache import PlanCache
from sft.api.problem_builder import resolve_tensor
from sft.api.proposals import propose
from sft.api.settings import CompileSettings
from sft.api.weight_placement import check_can_stream
from sft.common.errors import BudgetError, InputError
from sft.common.module_snapshot import ModuleSnapshot, ModuleStructure
from sft.common.process_lock import patch_lock
from sft.common.torch_internals import copy_tensors, pytree
from sft.common.transform_checks import autocast_dtype, refuse_cached_updates
from sft.distributed.fsdp import ShardedWeights, refuse_late_shards
from sft.distributed.mesh import LiveMesh, MeshShape, refuse_sinks_on_mesh
from sft.distributed.rank_context import RankContext
from sft.kernels.rng.philox import draw_seed, seed_tensor
from sft.lower.context import Backend
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.runtime.region import Region
from sft.torch_runtime.autograd import run_region
from sft.torch_runtime.cuda_graphs import ActiveGraphs
from sft.torch_runtime.device_pool import DevicePool
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.pass_statistics import Reading, Skipping
from sft.torch_runtime.region_inputs import RegionInputs
from sft.torch_runtime.streamed_parameters import StreamedParameters
from sft.torch_runtime.weight_streaming import BoundWeights

__all__ = ["Engine"]


@dataclass(frozen=True, slots=True)
class _PreparedCall:
    """A call that is ready to run.

    Attributes:
        prepared: its plan.
        inputs: the values of its region.
        snapshot: modules and tensors of the model.
        generator_state: state of torch's generator before the call's seed was drawn.
    """

    prepared: PreparedPlan
    inputs: RegionInputs
    snapshot: ModuleSnapshot
    generator_state: torch.Tensor


class Engine:
    """Runs the calls of one compiled module. It refers to the model, never the other way round.

    Args:
        model: the model.
        budget_bytes: device memory.
        options: planner options.
        optimizer: its state counts as resident; or the bytes of that state.
        plan: a plan passed by the user.
        destination: destination of outputs.
        mesh: the ranks that share an image.
        backend: replaces the backend that the options select.
        limits: limits that no argument states as a number.

    Attributes:
        settings: the arguments, with the model's sharding.
        plan_cache: captures and prepared plans.
        rank_context: this rank on the mesh; ``None`` before the first call.
        last_plan: plan of the last call, or of the shapes given to ``compile``.
        last_reading: statistics of the last call's streamed inputs.
        last_skipping: statistics of the last call's constant strips.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int,
        options: Options,
        optimizer: torch.optim.Optimizer | int | None,
        plan: Plan | None,
        destination: OutputDestination | None = None,
        mesh: LiveMesh | MeshShape | None = None,
        backend: Backend | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        self.model = model
        self.rank_context: RankContext | None = None
        self.last_plan: Plan | None = None
        self.last_reading: Reading | None = None
        self.last_skipping: Skipping | None = None
        self._structure: ModuleStructure | None = None
        self._active_graphs = ActiveGraphs()
        self._device_pool = DevicePool()
        limits = limits or MemoryLimits()
        if limits.budget_note and isinstance(mesh, LiveMesh):
            self.rank_context = RankContext(mesh, self._snapshot().device)
            own_bytes, budget_bytes = budget_bytes, self.rank_context.minimum(budget_bytes)
            limits = limits.on_ranks(own_bytes, budget_bytes, mesh.shape.num_ranks)
        self.settings = CompileSettings(
            budget_bytes=budget_bytes,
            options=options,
            optimizer=optimizer,
            plan=plan,
            destination=destination or OutputDestination(),
            mesh=mesh,
            backend=backend,
            sharding=ShardedWeights.of(model),
            backward_context=_backward_context(weakref.ref(self)),
            limits=limits,
        )
        self.plan_cache = PlanCache(model, self.settings)
        if options.streams_weights:
            check_can_stream(mesh, self.settings.sharding)

    # -- planning ---------------------------------------------------------------------------------------------------

    @patch_lock()
    def plan_for_shapes(
        self, shapes: Sequence[Shape], hints: Sequence[InputHint] | None = None, structure: CallStructure | None = None
    ) -> Plan:
        """The plan for inputs of these shapes on the model's device.

        Args:
            shapes: shape of each input.
            hints: further facts about each input.
            structure: containers, keywords and constants of the calls.
        """
        snapshot = self._snapshot()
        return self._prepared(snapshot, lambda now: self._signature_of_shapes(now, shapes, hints, structure)).plan

    @patch_lock()
    def plan_for_inputs(self, inputs: Sequence[Any], input_grad: Any = None, structure: CallStructure | None = None) -> Plan:
        """The plan that a call with these inputs would use."""
        snapshot = self._snapshot()
        resolved, lacking = self._resolve(snapshot, inputs, input_grad)
        specs = [value.spec for value in resolved]
        return self._prepared(snapshot, lambda now: self._signature(now, specs, lacking, structure)).plan

    @patch_lock()
    def specialize_for_shapes(
        self, shapes: Sequence[Shape], hints: Sequence[InputHint] | None = None, structure: CallStructure | None = None
    ) -> PhasedGraph:
        """The captured graph with all sizes as numbers, for inputs of these shapes; nothing is planned."""
        snapshot = self._snapshot()
        return self.plan_cache.specialize(self._signature_of_shapes(snapshot, shapes, hints, structure), snapshot)

    @patch_lock()
    def specialize_for_inputs(self, inputs: Sequence[Any], structure: CallStructure | None = None) -> PhasedGraph:
        """The captured graph with all sizes as numbers, for a call with these inputs; nothing is planned."""
        snapshot = self._snapshot()
        resolved, lacking = self._resolve(snapshot, inputs, None)
        return self.plan_cache.specialize(self._signature(snapshot, [value.spec for value in resolved], lacking, structure), snapshot)

    def replan(self, budget_bytes: int, options: Options) -> Plan:
        """The plan of the latest signature for another budget and other options. Captures are shared; no cached plan changes."""
        signature, _ = self.plan_cache.latest
        return self.plan_cache.with_settings(budget_bytes, options).get_or_prepare(signature, self._snapshot()).plan

    def phases(self) -> PhasedGraph:
        """Phases of the latest capture that was planned."""
        _, prepared = self.plan_cache.latest
        return prepared.captured.phases

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def streamed_weights(self) -> StreamedParameters | None:
        """The streamed weights of the model, if any."""
        return StreamedParameters.known(self.model)

    @patch_lock()
    def stream_weights(self) -> StreamedParameters | None:
        """Move the weights off the device if the options or the last plan say so; ``None`` if they stay resident.

        Raises:
            InputError, SourceError, UnsupportedError: as `StreamedParameters.of`.
        """
        options, streamed = self.settings.options, self.streamed_weights
        if not options.streams_weights:
            is_planned = self.last_plan is not None and self.last_plan.streamed_weights > 0
            if streamed is not None or not is_planned:
                return streamed
        return StreamedParameters.of(self.model, self._snapshot().device, options.weights_file)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait for the other ranks of the mesh, if any.

        Raises:
            RankError: one does not respond.
        """
        if isinstance(self.settings.mesh, LiveMesh):
            self.join_mesh().barrier()

    def band_rows(self, extent: int) -> tuple[int, int]:
        """This rank's rows of a value of ``extent`` rows, by the last plan."""
        mesh, plan = self.settings.mesh, self.last_plan
        if not isinstance(mesh, LiveMesh) or plan is None or plan.mesh is None:
            raise InputError("band_rows is for models on a mesh of processes that have a plan: compile with mesh, and call the model first")
        rows = BandPartition((0, *(rank.rows[1] for rank in plan.mesh.ranks))).rows(mesh.band, extent)
        return rows.start, rows.stop

    def join_mesh(self) -> RankContext:
        """This rank's context on the mesh."""
        mesh = self.settings.mesh
        if not isinstance(mesh, LiveMesh):
            raise InputError("this model was compiled for a mesh without processes: it only plans; give a DeviceMesh to run it")
        if self.rank_context is None:
            self.rank_context = RankContext(mesh, self._snapshot().device)
        return self.rank_context

    # -- calls ------------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any], input_grad: Any = None, structure: CallStructure | None = None) -> Any:
        """The model's output for the inputs of a call and its structure."""
        if self.settings.sharding is not None:
            self.settings.sharding.check_in_call()
        if self.settings.mesh is None:
            return self._run(inputs, input_grad, structure)
        context = self.join_mesh()
        refuse_sinks_on_mesh(input_grad)
        with context.transport.propagate_failures():
            return self._run(inputs, input_grad, structure)

    def _run(self, inputs: Sequence[Any], input_grad: Any, structure: CallStructure | None) -> Any:
        # Ranks wait for each other while they prepare a call, and do so in one thread each.
        with patch_lock() if self.rank_context is None else contextlib.nullcontext():
            call = self._prepare_call(inputs, input_grad, structure)
        prepared = call.prepared
        self.last_reading = call.inputs.statistics.reading if call.inputs.sources else None
        self.last_skipping = call.inputs.statistics.skipping if prepared.plan.skips_repeats else None
        graph = prepared.captured.capture.graph
        hosts = HostOutputs()
        try:
            refuse_cached_updates(path for _, path in graph.updates)
            hosts = HostOutputs.open(self.settings.destination, graph.outputs, prepared.region, call.inputs.device)
            outputs = run_region(prepared.region, call.inputs, hosts.by_name)
            results = hosts.in_order(graph.outputs, outputs)
            hosts.publish()
            updates = [outputs[name] for name, _ in graph.updates]
            if self.rank_context is not None:
                updates = self.rank_context.broadcast_buffers(updates)
        except BaseException:
            hosts.discard()
            torch.set_rng_state(call.generator_state)
            raise
        with torch.no_grad():  # no failure is possible any more
            copy_tensors([call.snapshot.tensors[path] for _, path in graph.updates], updates)
        returned: list[Any] = [*results]
        for position, value in prepared.constant_outputs:
            returned.insert(position, value)
        return pytree.tree_unflatten(returned, prepared.captured.capture.out_spec)

    def _prepare_call(self, inputs: Sequence[Any], input_grad: Any, structure: CallStructure | None) -> _PreparedCall:
        """Resolve the inputs of a call, look up its plan, and bind its tensors."""
        if self.settings.options.streams_weights:
            self.stream_weights()
        if self.streamed_weights is not None:
            self.streamed_weights.check()
        with patch_lock():
            snapshot = self._snapshot()
            if self.settings.sharding is None:
                refuse_late_shards(snapshot.parameters)
            resolved, lacking = self._resolve(snapshot, inputs, input_grad)
            specs = [value.spec for value in resolved]
            signature = self._signature(snapshot, specs, lacking, structure)
        if self.rank_context is not None:
            self.rank_context.check_agreement(signature.rank_invariants(), "call all ranks of one image with the same inputs and modes")
        prepared = self._prepared(snapshot, lambda now: signature if now is snapshot else self._signature(now, specs, lacking, structure))
        check_written_inputs(prepared.captured.capture.written_inputs, inputs)
        if self.rank_context is not None:
            _agree_on_cuts(self.rank_context, prepared.plan)
        self.last_plan = prepared.plan
        if prepared.plan.streamed_weights and self.streamed_weights is None:
            streamed = self.stream_weights()
            assert streamed is not None
            self.plan_cache.add(replace(signature, weights_revision=streamed.revision), prepared)
        generator_state = torch.get_rng_state()
        return _PreparedCall(prepared, self._bind(prepared, snapshot, resolved), snapshot, generator_state)

    @patch_lock()
    def _bind(self, prepared: PreparedPlan, snapshot: ModuleSnapshot, inputs: Sequence[ResolvedInput]) -> RegionInputs:
        """Bind the values of a region to the tensors and sources of a call."""
        graph, sharding = prepared.captured.phases.graph, self.settings.sharding
        by_name = dict(zip(graph.inputs, inputs, strict=True))
        tensors: dict[str, Any] = dict.fromkeys(prepared.leaf_names)
        registered = prepared.registered_leaves
        tensors.update(zip(registered, map(snapshot.tensors.__getitem__, registered.values()), strict=True))
        for node in prepared.other_leaves:
            if node.kind == "input":
                tensors[node.name] = by_name[node.name].tensor
            elif node.kind == "seed":
                seed = seed_tensor(draw_seed(), snapshot.device)
                tensors[node.name] = seed if self.rank_context is None else self.rank_context.broadcast_seed(seed)
            else:
                constant = prepared.captured.capture.constants.get(node.target)
                tensors[node.name] = resolve_tensor(self.model, node.target) if constant is None else constant
        for name in [name for name, value in by_name.items() if value.tensor is None]:  # of sources
            del tensors[name]
        return RegionInputs(
            names=tuple(tensors),
            tensors=tuple(tensors.values()),
            device=snapshot.device,
            updated=prepared.updated_buffers,
            new_buffers=prepared.new_buffers,
            sources={name: value.source for name, value in by_name.items() if value.source is not None},
            version_guards=tuple(value.version_guard for value in inputs if value.version_guard is not None),
            sinks={name: value.make_sink for name, value in by_name.items() if value.make_sink is not None},
            resources=prepared.resources,
            host_allocator=self.settings.host_allocator,
            make_machine=TorchMachine if self.rank_context is None else self.rank_context.machine,
            cudnn_benchmark=self.settings.options.cudnn_benchmark,
            active_graphs=self._active_graphs,
            device_pool=self._device_pool,
            backward_context=contextlib.nullcontext if sharding is None else sharding.backward_context(),
            check_retain_graph=(lambda: None) if prepared.retain_check is None else prepared.retain_check.check,
            weights=self._bound_weights(prepared.region, graph, tensors),
        )

    def _bound_weights(self, region: Region, graph: Graph, tensors: Mapping[str, torch.Tensor]) -> BoundWeights | None:
        """The streamed weights of a call.

        Raises:
            InputError: they were replaced for this call.
        """
        streamed = self.streamed_weights
        if region.weights is None or streamed is None:
            return None
        paths = {name: graph[name].target for name in region.weights.num_bytes}
        replaced = [path for name, path in paths.items() if tensors[name] is not streamed.params[path]]
        if replaced:
            raise InputError(f"{', '.join(replaced)}: streamed weights are not replaced for a call (functional_call); use the plain model")
        return BoundWeights.of(streamed, paths)

    def _resolve(
        self, snapshot: ModuleSnapshot, inputs: Sequence[Any], input_grad: Any
    ) -> tuple[tuple[ResolvedInput, ...], tuple[bool, ...]]:
        """The inputs as images, and for each whether it lacked channels."""
        dtype, device = self._dtype(snapshot), snapshot.device
        if snapshot.dtype is None and (first := floating_input(inputs)) is not None:  # it decides, as in eager PyTorch
            dtype = first.dtype
            if not snapshot.tensors:
                snapshot.device = device = first.device
        resolved = resolve_inputs(inputs, input_grad, dtype, device, casts=autocast_dtype(device) is not None)
        lacking = find_missing_channels([value.shape for value in resolved])
        return add_missing_channels(resolved, lacking), lacking

    def _signature(
        self, snapshot: ModuleSnapshot, inputs: Sequence[InputSpec], lacking: tuple[bool, ...], structure: CallStructure | None
    ) -> CallSignature:
        """The signature of a call in the present modes of torch."""
        sharding, streamed = self.settings.sharding, self.streamed_weights
        return signature_of(
            snapshot,
            inputs,
            lacking,
            snapshot.device,
            structure,
            holds_gradients=sharding is not None and sharding.holds_gradients(),
            weights_revision=None if streamed is None else streamed.revision,
        )

    def _signature_of_shapes(
        self,
        snapshot: ModuleSnapshot,
        shapes: Sequence[Shape],
        hints: Sequence[InputHint] | None = None,
        structure: CallStructure | None = None,
    ) -> CallSignature:
        """The signature of a call with inputs of these shapes on the model's device."""
        default, lacking = self._dtype(snapshot), find_missing_channels(shapes)
        specs = [
            InputSpec(
                shape=(shape[0], 1, *shape[1:]) if lacks else shape,
                dtype=default if hint.dtype is None else hint.dtype,
                channels_last=hint.channels_last and not lacks,
                needs_grad=hint.needs_grad,
            )
            for shape, lacks, hint in zip(shapes, lacking, hints or (InputHint(),) * len(shapes), strict=True)
        ]
        return self._signature(snapshot, specs, lacking, structure)

    def _prepared(self, snapshot: ModuleSnapshot, signature_of: Callable[[ModuleSnapshot], CallSignature]) -> PreparedPlan:
        """The prepared plan of a call; a budget error proposes settings that fit."""
        try:
            return self.plan_cache.get_or_prepare(signature_of(snapshot), snapshot)
        except BudgetError as error:
            raise propose(error, self.plan_cache, lambda: signature_of(self._snapshot())) from None

    def _snapshot(self) -> ModuleSnapshot:
        """Modules and tensors of the model at this moment, and the device on which it computes."""
        snapshot = ModuleSnapshot(self.model, self._structure)
        self._structure = snapshot.structure
        streamed = self.streamed_weights
        if streamed is not None and snapshot.dtype is not None:
            snapshot.device = streamed.device
        return snapshot

    def _dtype(self, snapshot: ModuleSnapshot) -> torch.dtype:
        return torch.get_default_dtype() if snapshot.dtype is None else snapshot.dtype


def _backward_context(reference: weakref.ref[Engine]) -> Callable[[], AbstractContextManager[None]]:
    """The context of backward passes on a mesh. A weak reference, so that an unused engine is freed at once with its programs."""

    def context() -> AbstractContextManager[None]:
        engine = reference()
        assert engine is not None
        return engine.join_mesh().synchronized()

    return context


def _agree_on_cuts(context: RankContext, plan: Plan) -> None:
    """Check that all ranks cut the model and the image at the same places, which determine their messages.

    Raises:
        InputError: they do not.
    """
    cuts = [(segment.mode, segment.nodes[-1]) for segment in plan.segments]
    rows = plan.mesh and [rank.rows for rank in plan.mesh.ranks]
    remedy = "their plans cut the model, or the image, at other places: compile with the same budget and options on all ranks"
    context.check_agreement((cuts, rows), remedy)
