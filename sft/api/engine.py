"""Plans and runs one model: captures it, plans each kind of call once, and executes it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import CallModes
from sft.analysis.frontend.capture import is_channels_last, is_in_program_layout
from sft.analysis.frontend.fingerprint import module_fingerprint
from sft.analysis.frontend.torch_patches import needs_deterministic_sums
from sft.analysis.ir.graph import Graph
from sft.analysis.tiling.bands import BandPartition
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.capture_cache import CaptureKey, Shape
from sft.api.inputs import ResolvedInput, add_missing_channels, find_missing_channels, resolve_inputs
from sft.api.outputs import HostOutputs, OutputDestination
from sft.api.plan_cache import CallSignature, PlanCache, PreparedPlan, resolve_tensor
from sft.api.weight_placement import check_can_stream
from sft.common.errors import InputError
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.process_lock import patch_lock
from sft.common.torch_internals import pytree
from sft.distributed.fsdp import ShardedWeights
from sft.distributed.mesh import LiveMesh, MeshShape, refuse_sinks_on_mesh
from sft.distributed.rank_context import RankContext
from sft.kernels.rng.philox import draw_seed
from sft.lower.context import Backend
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.runtime.region import Region
from sft.torch_runtime.autograd import RegionInputs, run_region
from sft.torch_runtime.input_streaming import Reading
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.skip_constant import Skipping
from sft.torch_runtime.streamed_parameters import StreamedParameters
from sft.torch_runtime.weight_streaming import BoundWeights

__all__ = ["Engine"]


class Engine:
    """Everything behind a compiled module; holds the model, never the other way round."""

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
    ) -> None:
        self.model, self.mesh = model, mesh
        self.sharding = ShardedWeights.of(model)
        self.party: RankContext | None = None
        self.last_plan: Plan | None = None
        self.last_reading: Reading | None = None
        self.last_skipping: Skipping | None = None
        own = weakref.ref(self)  # so that an engine which nobody needs any more is gone at once, with its programs

        def together() -> contextlib.AbstractContextManager[None]:
            engine = own()
            assert engine is not None
            return engine._joined().synchronized()

        self.preparation = PlanCache(
            model,
            budget_bytes=budget_bytes,
            options=options,
            optimizer=optimizer,
            plan=plan,
            destination=destination or OutputDestination(),
            mesh=mesh,
            backend=backend,
            together=together,
            sharding=self.sharding,
        )
        if options.streams_weights:
            check_can_stream(mesh, self.sharding)

    # -- planning ---------------------------------------------------------------------------------------------------

    @patch_lock()
    def plan_for_shapes(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype | None] | None = None, input_grads: tuple[bool, ...] | None = None
    ) -> Plan:
        """The plan for inputs of these shapes on the model's device; ``None`` for a dtype is the model's."""
        contents = ModuleSnapshot(self.model)
        own, device = self._dtype(contents), self._device(contents)
        no, lacking = (False,) * len(shapes), find_missing_channels(shapes)
        given = tuple(own if dtype is None else dtype for dtype in dtypes or (None,) * len(shapes))
        held = tuple((shape[0], 1, *shape[1:]) if lacks else shape for shape, lacks in zip(shapes, lacking, strict=True))
        return self.preparation.prepare(self._kind(contents, held, given, device, no, input_grads or no, lacking), contents).plan

    @patch_lock()
    def plan_for_inputs(self, inputs: Sequence[Any], input_grad: Any = None) -> Plan:
        """The plan that a call with these inputs would use."""
        contents = ModuleSnapshot(self.model)
        return self.preparation.prepare(self._kind_of(contents, *self._resolve(contents, inputs, input_grad)), contents).plan

    def replan(self, budget_bytes: int, options: Options) -> Plan:
        """The plan for what was planned last, had the question been this one; the capture is shared, and nothing here changes."""
        kind = next(reversed(self.preparation.ready))
        return self.preparation.for_request(budget_bytes, options).prepare(kind, ModuleSnapshot(self.model)).plan

    def phases(self) -> PhasedGraph:
        """The sorted graph of what was planned last."""
        return next(reversed(self.preparation.ready.values())).captured.phases

    @property
    def streamed_weights(self) -> StreamedParameters | None:
        """The weights of the model, if they were taken to be streamed."""
        return StreamedParameters.known(self.model)

    @patch_lock()
    def stream_weights(self) -> StreamedParameters | None:
        """Take the weights to stream them, where that was asked for, or the last plan says so; ``None`` where they stay resident.

        Raises:
            InputError, SourceError, UnsupportedError: as `StreamedParameters.of`.
        """
        options, taken = self.preparation.options, self.streamed_weights
        if not options.streams_weights:
            is_planned = self.last_plan is not None and self.last_plan.streamed_weights > 0
            if taken is not None or not is_planned:
                return taken
        return StreamedParameters.of(self.model, self._device(ModuleSnapshot(self.model)), options.weights_file)

    def run(self, inputs: Sequence[Any], input_grad: Any = None) -> Any:
        """The model's output."""
        if self.sharding is not None:
            self.sharding.check_in_call()
        if self.mesh is None:
            return self._run(inputs, input_grad)
        party = self._joined()
        refuse_sinks_on_mesh(input_grad)
        with party.transport.propagate_failures():
            return self._run(inputs, input_grad)

    def meet(self) -> None:
        """Wait for the other ranks, where there are any.

        Raises:
            RankError: one does not come.
        """
        if isinstance(self.mesh, LiveMesh):
            self._joined().barrier()

    def band_rows(self, extent: int) -> tuple[int, int]:
        """This rank's rows of a value of so many rows, by the last plan."""
        if not isinstance(self.mesh, LiveMesh) or self.last_plan is None or self.last_plan.mesh is None:
            raise InputError("band_rows is for models on a mesh of processes that have a plan: compile with mesh, and call the model first")
        ranks = self.last_plan.mesh.ranks
        rows = BandPartition((0, *(rank.rows[1] for rank in ranks))).rows(self.mesh.band, extent)
        return rows.start, rows.stop

    def _joined(self) -> RankContext:
        """This rank among the others of the mesh."""
        if not isinstance(self.mesh, LiveMesh):
            raise InputError("this model was compiled for a mesh without processes: it only plans; give a DeviceMesh to run it")
        if self.party is None:
            self.party = RankContext(self.mesh, self._device(ModuleSnapshot(self.model)))
        return self.party

    def _run(self, inputs: Sequence[Any], input_grad: Any) -> Any:
        # Ranks wait for each other while they make ready, and have one thread that does.
        with patch_lock() if self.party is None else contextlib.nullcontext():
            ready, leaves, contents, generator_state = self._prepare_call(inputs, input_grad)
        self.last_reading = leaves.reading if leaves.sources else None
        self.last_skipping = leaves.skipping if ready.plan.skips_repeats else None
        graph = ready.captured.capture.graph
        hosts = HostOutputs()
        try:
            hosts = HostOutputs.open(self.preparation.destination, graph.outputs, ready.region, leaves.device)
            outputs = run_region(ready.region, leaves, hosts.by_name)
            results = hosts.in_order(graph.outputs, outputs)
            hosts.publish()
            updates = [outputs[name] for name, _ in graph.updates]
            if self.party is not None:
                updates = self.party.broadcast_buffers(updates)
        except BaseException:
            hosts.discard()
            torch.set_rng_state(generator_state)
            raise
        with torch.no_grad():  # nothing can fail any more
            for (_, path), update in zip(graph.updates, updates, strict=True):
                contents.tensors[path].copy_(update)
        returned: list[Any] = [*results]
        for place, value in ready.beside:
            returned.insert(place, value)
        return pytree.tree_unflatten(returned, ready.captured.capture.out_spec)

    def _prepare_call(self, inputs: Sequence[Any], input_grad: Any) -> tuple[PreparedPlan, RegionInputs, ModuleSnapshot, torch.Tensor]:
        """What a call runs, on which tensors, what the model holds, and the state of torch's generator before it drew the call's seed."""
        if self.preparation.options.streams_weights:
            self.stream_weights()
        if self.streamed_weights is not None:
            self.streamed_weights.check()
        contents = ModuleSnapshot(self.model)
        with patch_lock():
            given, lacking = self._resolve(contents, inputs, input_grad)
            kind = self._kind_of(contents, given, lacking)
        if self.party is not None:
            traced = kind.traced
            same = (kind.shapes, kind.requires_grad, kind.input_grads, kind.from_source, traced.dtypes, traced.training_flags)
            modes = (traced.autocast, traced.default_dtype, kind.deterministic)
            self.party.check_agreement((*same, *modes), "call all ranks of one image with the same inputs and modes")
        ready = self.preparation.prepare(kind, contents)
        if self.party is not None:  # where a run is cut, and so what is sent, depends on the budget
            cuts = [(segment.mode, segment.nodes[-1]) for segment in ready.plan.segments]
            rows = ready.plan.mesh and [rank.rows for rank in ready.plan.mesh.ranks]
            remedy = "their plans cut the model, or the image, at other places: compile with the same budget and options on all ranks"
            self.party.check_agreement((cuts, rows), remedy)
        self.last_plan = ready.plan
        if ready.plan.streamed_weights and self.streamed_weights is None:
            taken = self.stream_weights()
            assert taken is not None
            self.preparation.ready[self.preparation.answered(replace(kind, weights_revision=taken.revision))] = ready
        generator_state = torch.get_rng_state()
        return ready, self._bind(ready, contents, given), contents, generator_state

    @patch_lock()
    def _bind(self, ready: PreparedPlan, contents: ModuleSnapshot, inputs: Sequence[ResolvedInput]) -> RegionInputs:
        graph = ready.captured.phases.graph
        by_name = dict(zip(graph.inputs, inputs, strict=True))
        tensors: dict[str, torch.Tensor] = {}
        for node in graph.nodes:
            if node.kind == "input":
                tensor = by_name[node.name].tensor
                if tensor is not None:
                    tensors[node.name] = tensor
            elif node.kind in ("parameter", "buffer"):
                tensors[node.name] = contents.tensors[node.target]
            elif node.kind == "seed":
                seed = _seed_tensor(draw_seed())
                tensors[node.name] = seed if self.party is None else self.party.broadcast_seed(seed)
            elif node.kind != "operator":
                constant = ready.captured.capture.constants.get(node.target)
                tensors[node.name] = resolve_tensor(self.model, node.target) if constant is None else constant
        paths = {path for _, path in ready.captured.capture.graph.updates}
        return RegionInputs(
            names=tuple(tensors),
            tensors=tuple(tensors.values()),
            device=self._device(contents),
            updated=frozenset(node.name for node in graph.nodes if node.kind == "buffer" and node.target in paths),
            sources={name: value.source for name, value in by_name.items() if value.source is not None},
            version_guards=tuple(value.version_guard for value in inputs if value.version_guard is not None),
            sinks={name: value.make_sink for name, value in by_name.items() if value.make_sink is not None},
            slab_pool=ready.slabs,
            host_allocator=self.preparation.room,
            make_machine=TorchMachine if self.party is None else self.party.machine,
            graphs=ready.graphs,
            active_graphs=self.preparation.turn,
            backward_context=contextlib.nullcontext if self.sharding is None else self.sharding.backward_context(),
            check_retain_graph=(lambda: None) if ready.retained is None else patch_lock()(ready.retained.check),
            weights=self._bound_weights(ready.region, graph, tensors),
        )

    def _bound_weights(self, region: Region, graph: Graph, tensors: Mapping[str, torch.Tensor]) -> BoundWeights | None:
        """The streamed weights of a call.

        Raises:
            InputError: others were put in their place for this call.
        """
        taken = self.streamed_weights
        if region.weights is None or taken is None:
            return None
        paths = {name: graph[name].target for name in region.weights.num_bytes}
        replaced = [path for name, path in paths.items() if tensors[name] is not taken.params[path]]
        if replaced:
            raise InputError(f"{', '.join(replaced)}: streamed weights are not replaced for a call (functional_call); use the plain model")
        return BoundWeights.of(taken, paths)

    def _dtype(self, contents: ModuleSnapshot) -> torch.dtype:
        return torch.get_default_dtype() if contents.dtype is None else contents.dtype

    def _device(self, contents: ModuleSnapshot) -> torch.device:
        has_numbers = contents.dtype is not None
        return self.streamed_weights.device if has_numbers and self.streamed_weights is not None else contents.device

    def _resolve(
        self, contents: ModuleSnapshot, inputs: Sequence[Any], input_grad: Any
    ) -> tuple[tuple[ResolvedInput, ...], tuple[bool, ...]]:
        """The inputs as images, and which of them lacked channels."""
        dtype, device = self._dtype(contents), self._device(contents)
        if contents.dtype is None:  # what comes in says it, as in eager PyTorch
            dtype = next((value.dtype for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point()), dtype)
        given = resolve_inputs(inputs, input_grad, dtype, device, casts=_autocast_dtype(device) is not None)
        lacking = find_missing_channels([value.shape for value in given])
        return add_missing_channels(given, lacking), lacking

    def _kind_of(self, contents: ModuleSnapshot, inputs: Sequence[ResolvedInput], lacking: tuple[bool, ...]) -> CallSignature:
        kind = self._kind(
            contents,
            tuple(value.shape for value in inputs),
            tuple(value.dtype for value in inputs),
            self._device(contents),
            tuple(value.is_channels_last for value in inputs),
            tuple(value.needs_grad for value in inputs),
            lacking,
        )
        splits_batch = all(value.splits_batch for value in inputs)
        return replace(kind, from_source=tuple(value.source is not None for value in inputs), splits_batch=splits_batch)

    def _kind(
        self,
        contents: ModuleSnapshot,
        shapes: tuple[Shape, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        channels_last: tuple[bool, ...],
        input_grads: tuple[bool, ...],
        lacking_channels: tuple[bool, ...],
    ) -> CallSignature:
        with_grad = torch.is_grad_enabled()
        weights = tuple(p.requires_grad for p in contents.parameters)
        weights_last = tuple(is_channels_last(p) for p in contents.parameters if p.dim() == 4)
        return CallSignature(
            shapes=shapes,
            traced=CaptureKey(
                dtypes=dtypes,
                lacking_channels=lacking_channels,
                device=device,
                autocast=_autocast_dtype(device),
                default_dtype=torch.get_default_dtype(),
                training_flags=tuple(module.training for module in contents.modules.values()),
                fingerprint=module_fingerprint(contents),
            ),
            channels_last=channels_last,
            weights_last=weights_last,
            weights_in_layout=tuple(is_in_program_layout(p) for p in contents.parameters),
            requires_grad=weights if with_grad else (),
            input_grads=input_grads if with_grad else (),
            with_grad=with_grad,
            from_source=(False,) * len(shapes),
            holds_gradients=self.sharding is not None and self.sharding.holds_gradients(),
            deterministic=needs_deterministic_sums(device),
            weights_revision=None if self.streamed_weights is None else self.streamed_weights.revision,
            modes=CallModes(
                grad_enabled=with_grad,
                inference=torch.is_inference_mode_enabled(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                weights=weights,
                inputs=input_grads,
                channels_last=channels_last,
                weights_last=weights_last,
            ),
        )


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on this device, ``None`` where it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _seed_tensor(seed: int) -> torch.Tensor:
    """A seed of 64 bits as a tensor, its two's complement."""
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device="cpu")
