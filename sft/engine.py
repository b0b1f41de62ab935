"""Plans and runs one model: captures it, plans each kind of call once, and executes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sft.analysis.bands import Shares
from sft.analysis.capture import Capture, attribute_of, capture, is_channels_last, outputs_channels_last
from sft.analysis.gradients import reached_by_gradients
from sft.analysis.graph import Graph
from sft.analysis.operators import differentiable_operands
from sft.analysis.passes import in_terms_of_the_table
from sft.analysis.phases import Phases, find_phases
from sft.analysis.preparation import NORMS_OF_WEIGHTS, dropping_channels
from sft.backends.select import backend_for
from sft.bands.mesh import LiveMesh, MeshShape, refuse_on_mesh
from sft.bands.party import Party
from sft.bands.planning import plan_bands
from sft.bands.syncnorm import captured_plainly, check_synchronized, synchronized_moments
from sft.errors import InputError, UnsupportedError
from sft.execute.costs import table_folders
from sft.execute.function import Leaves, autocast_off, run_region
from sft.execute.graphs import CudaRecorder, GraphStore, repeated_programs
from sft.execute.machine import TorchMachine
from sft.execute.reading import Reading
from sft.execute.room import HostRoom
from sft.execute.slab import Slabs
from sft.execute.stopwatch import time_step
from sft.fingerprint import Fingerprint, fingerprint
from sft.inputs import Given, lacking_channels, resolve_inputs, with_channels
from sft.kernels.philox import draw_seed
from sft.lower.backend import Backend
from sft.options import Options
from sft.outputs import Destination, HostOutputs
from sft.plan.describe import describe
from sft.plan.planner import Planned, carry_out, check_host, plan_segments
from sft.plan.problem import Problem, at_size
from sft.plan.rates import Rates
from sft.plan.strategy_chain import OFFLOADING
from sft.plan.types import Plan
from sft.resident import resident_bytes
from sft.walk.order import parse_order
from sft.walk.region import Region

__all__ = ["Engine"]

_LOG = logging.getLogger("sft")
Shape = tuple[int, ...]

#: Captures and plans that are kept; an attribute that changes at every call must not fill the memory.
_MAX_CAPTURES, _MAX_PLANS = 16, 128


@dataclass(frozen=True)
class _Traced:
    """What a capture is made for, besides the inputs' shapes."""

    dtypes: tuple[torch.dtype, ...]
    lacking_channels: tuple[bool, ...]
    device: torch.device
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    training_flags: tuple[bool, ...]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class _CallKind:
    """What a plan is made for."""

    shapes: tuple[Shape, ...]
    traced: _Traced
    channels_last: tuple[bool, ...]
    weights_last: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    with_grad: bool
    from_source: tuple[bool, ...] = ()
    splits_batch: bool = True


@dataclass(frozen=True)
class _Captured:
    capture: Capture
    phases: Phases
    traced: _Traced


@dataclass(frozen=True)
class _Ready:
    plan: Plan
    region: Region
    captured: _Captured
    slabs: Slabs | None = None
    graphs: GraphStore | None = None


class Engine:
    """Everything behind a compiled module; holds the model, never the other way round."""

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan | None,
        destination: Destination | None = None,
        mesh: LiveMesh | MeshShape | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.mesh = mesh
        self.party: Party | None = None
        self.destination = destination or Destination()
        self._backend = backend  # in the place of what the options ask for
        self.model, self.budget_bytes, self.options = model, budget_bytes, options
        self.optimizer, self.given_plan = optimizer, plan
        self.last_plan: Plan | None = None
        self.last_reading: Reading | None = None
        self._captured: list[_Captured] = []
        self._ready: dict[_CallKind, _Ready] = {}

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan_for_shapes(self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype | None] | None = None) -> Plan:
        """The plan for inputs of these shapes on the model's device; ``None`` for a dtype is the model's."""
        own, device = self._dtype_and_device()
        no, lacking = (False,) * len(shapes), lacking_channels(shapes)
        given = tuple(own if dtype is None else dtype for dtype in dtypes or (None,) * len(shapes))
        held = tuple((shape[0], 1, *shape[1:]) if lacks else shape for shape, lacks in zip(shapes, lacking, strict=True))
        return self._prepare(self._kind(held, given, device, no, no, lacking)).plan

    def plan_for_inputs(self, inputs: Sequence[Any], input_grad: Any = None) -> Plan:
        """The plan that a call with these inputs would use."""
        return self._prepare(self._kind_of(*self._resolve(inputs, input_grad))).plan

    def planned_again(self, budget_bytes: int, options: Options) -> Plan:
        """The plan for what was planned last, had the question been this one; the capture is shared, and nothing here changes."""
        kind = next(reversed(self._ready))
        other = Engine(
            self.model,
            budget_bytes=budget_bytes,
            options=options,
            optimizer=self.optimizer,
            plan=None,
            destination=self.destination,
            mesh=self.mesh,
        )
        other._captured = list(self._captured)
        return other._prepare(kind).plan

    def phases(self) -> Phases:
        """The sorted graph of the last capture."""
        return self._captured[-1].phases

    def run(self, inputs: Sequence[Any], input_grad: Any = None) -> Any:
        """The model's output."""
        if self.mesh is None:
            return self._run(inputs, input_grad)
        party = self._joined()
        refuse_on_mesh(input_grad)
        with party.link.guarded():
            return self._run(inputs, input_grad)

    def band_rows(self, extent: int) -> tuple[int, int]:
        """This rank's rows of a value of so many rows, by the last plan."""
        if not isinstance(self.mesh, LiveMesh) or self.last_plan is None or self.last_plan.mesh is None:
            raise InputError("band_rows is for models on a mesh of processes that have a plan: compile with mesh, and call the model first")
        ranks = self.last_plan.mesh.ranks
        rows = Shares((0, *(rank.rows[1] for rank in ranks))).rows(self.mesh.band, extent)
        return rows.start, rows.stop

    def _joined(self) -> Party:
        """This rank among the others of the mesh."""
        if not isinstance(self.mesh, LiveMesh):
            raise InputError("this model was compiled for a mesh without processes: it only plans; give a DeviceMesh to run it")
        if self.party is None:
            self.party = Party(self.mesh, self._dtype_and_device()[1])
        return self.party

    def _run(self, inputs: Sequence[Any], input_grad: Any) -> Any:
        given, lacking = self._resolve(inputs, input_grad)
        kind = self._kind_of(given, lacking)
        if self.party is not None:
            same = (kind.shapes, kind.requires_grad, kind.input_grads, kind.from_source, kind.traced.dtypes, kind.traced.training_flags)
            self.party.agree(same)
        ready = self._prepare(kind)
        self.last_plan = ready.plan
        self._forget_recordings(ready)
        generator_state = torch.get_rng_state()
        leaves = self._bind(ready, given)
        self.last_reading = leaves.reading if leaves.sources else None
        graph = ready.captured.capture.graph
        hosts = HostOutputs()
        try:
            hosts = HostOutputs.open(self.destination, graph.outputs, ready.region, leaves.device)
            outputs = run_region(ready.region, leaves, hosts.by_name)
            results = hosts.arranged(graph.outputs, outputs)
            hosts.publish()
            updates = [outputs[name] for name, _ in graph.updates]
            if self.party is not None:
                updates = self.party.settled(updates)
        except BaseException:
            hosts.discard()
            torch.set_rng_state(generator_state)
            raise
        with torch.no_grad():  # nothing can fail any more
            for (_, path), update in zip(graph.updates, updates, strict=True):
                self.model.get_buffer(path).copy_(update)
        return pytree.tree_unflatten(results, ready.captured.capture.out_spec)

    def _forget_recordings(self, ready: _Ready) -> None:
        """Give back the memory of recordings of other plans: a plan knows only of its own."""
        for other in self._ready.values():
            if other is not ready and other.graphs is not None:
                other.graphs.clear()

    def _bind(self, ready: _Ready, inputs: Sequence[Given]) -> Leaves:
        graph = ready.captured.phases.graph
        by_name = dict(zip(graph.inputs, inputs, strict=True))
        tensors: dict[str, torch.Tensor] = {}
        for node in graph.nodes:
            if node.kind == "input":
                tensor = by_name[node.name].tensor
                if tensor is not None:
                    tensors[node.name] = tensor
            elif node.kind == "parameter":
                tensors[node.name] = _held(self.model, node.target)
            elif node.kind == "buffer":
                tensors[node.name] = self.model.get_buffer(node.target)
            elif node.kind == "seed":
                seed = _signed(draw_seed())
                tensors[node.name] = seed if self.party is None else self.party.shared_seed(seed)
            elif node.kind != "operator":
                constant = ready.captured.capture.constants.get(node.target)
                tensors[node.name] = _held(self.model, node.target) if constant is None else constant
        paths = {path for _, path in ready.captured.capture.graph.updates}
        return Leaves(
            names=tuple(tensors),
            tensors=tuple(tensors.values()),
            device=self._dtype_and_device()[1],
            updated=frozenset(node.name for node in graph.nodes if node.kind == "buffer" and node.target in paths),
            sources={name: value.source for name, value in by_name.items() if value.source is not None},
            witnesses=tuple(value.witness for value in inputs if value.witness is not None),
            sinks={name: value.make_sink for name, value in by_name.items() if value.make_sink is not None},
            slabs=ready.slabs,
            room=self._room,
            make_machine=TorchMachine if self.party is None else self.party.machine,
            graphs=ready.graphs,
        )

    @property
    def _room(self) -> HostRoom:
        """Where what leaves the device during a step goes."""
        folder = self.options.host_folder
        return HostRoom(None if folder is None else Path(folder))

    def _host_budget_bytes(self, device: torch.device) -> int | None:
        """Bytes of the host that a plan may use. Where the device's memory is the host's, nothing is gained unless somebody says so."""
        options = self.options
        if options.host_budget is None and device.type == "cpu" and options.host_folder is None and options.strategy not in OFFLOADING:
            return 0
        return options.host_budget_bytes

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        first = next((t for t in tensors if t.is_floating_point()), None)
        return (first.dtype, first.device) if first is not None else (torch.get_default_dtype(), torch.device("cpu"))

    def _resolve(self, inputs: Sequence[Any], input_grad: Any) -> tuple[tuple[Given, ...], tuple[bool, ...]]:
        """The inputs as images, and which of them lacked channels."""
        dtype, device = self._dtype_and_device()
        given = resolve_inputs(inputs, input_grad, dtype, device, casts=_autocast_dtype(device) is not None)
        lacking = lacking_channels([value.shape for value in given])
        return with_channels(given, lacking), lacking

    def _kind_of(self, inputs: Sequence[Given], lacking: tuple[bool, ...]) -> _CallKind:
        kind = self._kind(
            tuple(value.shape for value in inputs),
            tuple(value.dtype for value in inputs),
            self._dtype_and_device()[1],
            tuple(value.is_channels_last for value in inputs),
            tuple(value.needs_grad for value in inputs),
            lacking,
        )
        splits_batch = all(value.splits_batch for value in inputs)
        return replace(kind, from_source=tuple(value.source is not None for value in inputs), splits_batch=splits_batch)

    def _kind(
        self,
        shapes: tuple[Shape, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        channels_last: tuple[bool, ...],
        input_grads: tuple[bool, ...],
        lacking_channels: tuple[bool, ...],
    ) -> _CallKind:
        with_grad = torch.is_grad_enabled()
        return _CallKind(
            shapes=shapes,
            traced=_Traced(
                dtypes=dtypes,
                lacking_channels=lacking_channels,
                device=device,
                autocast=_autocast_dtype(device),
                default_dtype=torch.get_default_dtype(),
                training_flags=tuple(module.training for module in self.model.modules()),
                fingerprint=fingerprint(self.model),
            ),
            channels_last=channels_last,
            weights_last=tuple(is_channels_last(p) for p in self.model.parameters() if p.dim() == 4),
            requires_grad=tuple(p.requires_grad for p in self.model.parameters()) if with_grad else (),
            input_grads=input_grads if with_grad else (),
            with_grad=with_grad,
            from_source=(False,) * len(shapes),
        )

    def _prepare(self, kind: _CallKind) -> _Ready:
        self._refuse_hooks()
        ready = self._ready.get(kind)
        if ready is None:
            with autocast_off(kind.traced.device):
                ready = self._plan(kind)
            while len(self._ready) >= _MAX_PLANS:
                del self._ready[next(iter(self._ready))]
            self._ready[kind] = ready
        return ready

    def _refuse_hooks(self) -> None:
        problems = [
            f"{name}: {type(module).__name__} has a {what}; hooks on submodules do not run inside a compiled model, remove it"
            for name, module in self.model.named_modules()
            if name
            for what, hooks in (
                ("forward hook", module._forward_hooks),
                ("forward pre-hook", module._forward_pre_hooks),
                ("backward hook", module._backward_hooks),
                ("backward pre-hook", module._backward_pre_hooks),
            )
            if any(not isinstance(hook, NORMS_OF_WEIGHTS) for hook in hooks.values())
        ]
        if problems:
            raise UnsupportedError(problems)

    def _plan(self, kind: _CallKind) -> _Ready:
        check_synchronized(self.model, self.mesh)
        with captured_plainly(self.model):
            return self._plan_captured(kind)

    def _plan_captured(self, kind: _CallKind) -> _Ready:
        captured, symbols = self._capture(kind)
        inputs = captured.phases.graph.inputs
        phases = at_size(captured.phases, symbols, dict(zip(inputs, kind.shapes, strict=True)))
        graph = phases.graph
        problem = Problem(
            phases=phases,
            requires_grad=self._requires_grad(kind, phases),
            channels_last=self._channels_last(kind, graph) - self._in_files(graph),
            resident_bytes=resident_bytes(self.model, self.optimizer),
            from_source=frozenset(name for name, is_read in zip(inputs, kind.from_source, strict=True) if is_read),
            outputs_on_host=self.destination.on_host,
            splits_batch=kind.splits_batch,
            on_host=kind.traced.device.type in ("cpu", "meta"),
            host_budget_bytes=self._host_budget_bytes(kind.traced.device),
            link=Rates(kind.traced.device.type).link(self.options.link_bytes_per_second),
            backend=self._backend or backend_for(self.options.backend, kind.traced.device, table_folders()),
        )
        self._check_sources(problem)
        self.destination.check([problem.dtypes[name] for name in graph.outputs])
        rates = Rates(kind.traced.device.type)
        if self.mesh is not None:
            return self._plan_on_mesh(problem, captured, rates)
        planned = self._given(problem, kind) or plan_segments(problem, self.budget_bytes, self.options, kind.traced.device.type)
        plan = describe(problem, planned, budget_bytes=self.budget_bytes, rates=rates)
        if self.options.profile == "measure" and kind.traced.device.type != "meta":
            with autocast_off(kind.traced.device):
                seconds = time_step(problem, planned.region, kind.traced.device, progress=self.options.progress)
            timeline = plan.timeline.measured(seconds)
            plan = replace(plan, projected_seconds=timeline.seconds, timeline=timeline)
        copies = any(move.is_copy for move in planned.region.moves)
        slabs = Slabs(planned.projection.slab_bytes, kind.traced.device, self._room) if copies else None
        graphs = self._recordings(planned.region, plan, kind.traced.device)
        if graphs is not None:
            plan = replace(plan, projected_peak_bytes=plan.projected_peak_bytes + graphs.num_bytes)
        return _Ready(plan, planned.region, captured, slabs, graphs)

    def _plan_on_mesh(self, problem: Problem, captured: _Captured, rates: Rates) -> _Ready:
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
        plan = describe(problem, found.planned, budget_bytes=self.budget_bytes, rates=rates)
        plan = replace(plan, mesh=found.mesh, flops=sum(rank.flops for rank in found.mesh.ranks))
        region = found.planned.region
        if isinstance(self.mesh, LiveMesh):
            region = found.bands.region(self.mesh.band, self._together)
        return _Ready(plan, region, captured)

    def _together(self) -> AbstractContextManager[None]:
        """What the backward pass runs in."""
        return self._joined().together()

    def _recordings(self, region: Region, plan: Plan, device: torch.device) -> GraphStore | None:
        """What is replayed as CUDA graphs: what the budget has left decides how much."""
        if not self.options.cuda_graphs or device.type != "cuda":
            return None
        spare_bytes = self.budget_bytes - plan.total_bytes
        store = GraphStore.within(repeated_programs(region, training=plan.training), spare_bytes, CudaRecorder(device))
        return store if store.programs else None

    def _check_sources(self, problem: Problem) -> None:
        returned = sorted(problem.from_source.intersection(problem.graph.results))
        if returned:
            raise InputError(f"{', '.join(returned)} is read strip by strip, but the model returns it whole; give it as a tensor")
        tile = self.options.batch_tile
        if not problem.splits_batch and tile is not None and tile < problem.num_batch:
            raise InputError(
                f"batch_tile {tile} takes {problem.num_batch} batch elements in parts, but a source or sink has no method "
                "samples(batch); add one, or leave out batch_tile"
            )

    def _channels_last(self, kind: _CallKind, graph: Graph) -> frozenset[str]:
        """Inputs that are laid out channels last, and the outputs that eager PyTorch would then lay out so."""
        given = [name for name, last in zip(graph.inputs, kind.channels_last, strict=True) if last]
        if not given and not any(kind.weights_last):
            return frozenset()
        traced = kind.traced
        with dropping_channels(self.model, traced.lacking_channels):
            found = outputs_channels_last(
                self.model, kind.shapes, traced.dtypes, traced.device, kind.channels_last, autocast=traced.autocast
            )
        # Where eager PyTorch cannot be asked, the outputs follow the inputs.
        outputs = graph.outputs if found is None and given else [n for n, last in zip(graph.outputs, found or (), strict=False) if last]
        return frozenset((*given, *outputs))

    def _in_files(self, graph: Graph) -> frozenset[str]:
        """Outputs that go to files, which are in C order."""
        paths = self.destination.paths
        return frozenset(n for n, path in zip(graph.outputs, paths, strict=False) if path is not None and graph[n].kind == "operator")

    def _given(self, problem: Problem, kind: _CallKind) -> Planned | None:
        """The plan that the user handed in, where it is for this input."""
        plan = self.given_plan
        shapes = tuple(problem.shapes[name] for name in problem.graph.inputs)
        if plan is None or plan.input_shapes != shapes or plan.training != problem.training:
            return None
        if plan.input_placements != problem.input_placements or plan.output_placements != problem.output_placements:
            return None
        known = [name for phase in problem.phases.phases for name in (*phase.streamed, *phase.tail)]
        if sorted(name for segment in plan.segments for name in segment.nodes) != sorted(known):
            if kind.traced.autocast is not None:
                return None  # made for calls without autocast, which have other operators
            raise InputError("the plan names other operators than the model has; make a new one with sft.plan(model, ...)")
        order = parse_order(plan.order, len(plan.segments)) if plan.order and problem.training else None
        planned = carry_out(problem, tuple(segment.choice for segment in plan.segments), order)
        check_host(planned, self.options.host_budget_bytes)
        return planned

    def _capture(self, kind: _CallKind) -> tuple[_Captured, dict[Any, int]]:
        traced = kind.traced
        for captured in self._captured:
            if captured.traced == traced:
                symbols = captured.capture.bind(kind.shapes)
                if symbols is not None:
                    return captured, symbols
        if self._captured:
            _LOG.info("capturing %s again for inputs %s", type(self.model).__name__, kind.shapes)
        with dropping_channels(self.model, traced.lacking_channels):
            found = capture(self.model, kind.shapes, traced.dtypes, traced.device, autocast=traced.autocast)
        found = replace(found, graph=in_terms_of_the_table(found.graph))
        captured = _Captured(found, find_phases(found.graph), traced)
        self._refuse_unbatched(found.graph, kind.shapes)
        symbols = found.bind(kind.shapes)
        if symbols is None:
            sizes = ", ".join("x".join(map(str, shape)) for shape in kind.shapes)
            raise UnsupportedError([f"{type(self.model).__name__}: the capture at {sizes} does not hold for that very size"])
        self._captured = [*self._captured[1 - _MAX_CAPTURES :], captured]
        return captured, symbols

    def _refuse_unbatched(self, graph: Graph, shapes: Sequence[Shape]) -> None:
        """PyTorch takes an image without a batch for most of its layers; our axes would be one short.

        Raises:
            InputError: the input lacks the batch.
        """
        for node in graph.operators:
            count = next((n for n in (1, 2, 3) if node.target.startswith(f"aten.conv{n}d.")), None)
            if count is not None and len(node.shape) == count + 1:
                given = " and ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(f"{node.label}: an input of {given} has no batch; expected {count + 2} dimensions, batch it with x[None]")

    def _requires_grad(self, kind: _CallKind, phases: Phases) -> frozenset[str]:
        if not kind.with_grad:
            return frozenset()
        found: set[str] = set()
        reached = reached_by_gradients(phases.graph)
        arriving = iter(kind.input_grads)
        for node in phases.graph.nodes:
            if node.kind == "input":
                needs = next(arriving)
            elif node.kind == "parameter":
                needs = node.name in reached and _held(self.model, node.target).requires_grad
            elif node.kind == "buffer":
                needs = node.name in reached and self.model.get_buffer(node.target).requires_grad
            elif node.kind in ("constant", "seed"):
                needs = False
            else:
                needs = node.name in reached and any(name in found for name in differentiable_operands(node))
            if needs:
                found.add(node.name)
        return frozenset(found)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on this device, ``None`` where it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _signed(seed: int) -> torch.Tensor:
    """A seed of 64 bits as a tensor, its two's complement."""
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])


def _held(model: nn.Module, path: str) -> torch.Tensor:
    """A tensor of the model; a parameter, too, whose place may have another tensor in a ``functional_call``."""
    value = attribute_of(model, path)
    assert value is not None
    return value
