"""CUDA graphs of whole passes: the forward pass and the backward pass of a plan, each recorded once and replayed with a single call.

The host issues the instructions of a pass one after the other, each in 10 to 20 microseconds. Kernels of small strips take less, so the
device waits. The schedule of a plan is the same in every step, as long as no host code computes a part of it: a pass is recorded as a CUDA
graph, and a replay issues all of its kernels and copies at once.

A graph runs on the addresses that it was recorded on:

- the model's weights and buffers are recorded as they are; if they have moved, the passes are recorded again, as they are if settings of
  torch that select kernels have changed;
- inputs and gradients of outputs are copied into tensors of the recording before a replay;
- outputs and gradients are copied out of the recording after it, gradients of parameters in groups
  (:mod:`sft.torch_runtime.gradient_groups`);
- values that wait on the host, and strips of cuts there, are copied to and from one slab of page-locked memory, which the recording leases.

All other tensors are in the recording's memory pool. It consists of the plan's segments, as the pool of passes without graphs
(:mod:`sft.torch_runtime.device_pool`) does, which it replaces.

The values that a forward pass leaves for its backward pass are in the recording, too. So the pass of a call whose backward pass is pending
cannot be replayed: a second call before that runs without graphs, and so do all later ones. A backward pass that is repeated
(``retain_graph=True``) replays the forward pass before it, since the first one has overwritten these values.

The first call of a plan runs without a graph: libraries select and compile kernels in it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.backends.kernel_call import kernel_call_of
from sft.common.errors import SftError
from sft.common.torch_internals import copy_tensors
from sft.lower.row_gather import keep_tables
from sft.runtime.region import Region, Tape
from sft.runtime.strip_policy import RUN_ALL_STRIPS
from sft.runtime.tiled_segment import TiledSegment
from sft.torch_runtime.cuda_graphs import recording_stream
from sft.torch_runtime.device_pool import PoolLayout, prepare_cublas, reserve_pool
from sft.torch_runtime.gradient_groups import GradientGroups, group_gradients
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.pass_statistics import LISTENERS, note_flops, report_flops
from sft.torch_runtime.profiling import kernel_settings

__all__ = ["CudaPassRecorder", "PassGraphs", "PassRecorder", "RecordedCall", "can_record_passes"]

#: Recordings of a pass because weights have moved. A model whose weights move in every step is not recorded.
_MAX_RECORDINGS = 4

#: Runs a forward pass on leaves: outputs, and the tape.
RunForward = Callable[[Mapping[str, Tensor], HostOffloader | None], tuple[dict[str, Tensor], Tape]]
#: Runs a backward pass on gradients of outputs: gradients of leaves.
RunBackward = Callable[[Tape, HostOffloader | None, dict[str, Tensor]], dict[str, Tensor]]


class PassRecorder(Protocol):
    """Recorder of device work."""

    @property
    def is_recorded(self) -> bool:
        """True while the caller records the present device work, which no other recording may interrupt."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work without running it, and return a function that runs it on the same memory."""

    def allocate_inputs(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make the inputs of a recording, the largest first, outside of the recordings' memory."""

    def close(self) -> None:
        """Free the memory of all recordings, once they are dropped."""


@dataclass(slots=True)
class CudaPassRecorder:
    """Recorder of CUDA graphs in one memory pool.

    Attributes:
        device: the GPU.
        layout: layout of the pool; without segments the allocator chooses them.
    """

    device: torch.device
    layout: PoolLayout
    _pool: Any = None

    @property
    def is_recorded(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device), recording_stream(self.device) as stream:
            with torch.cuda.stream(stream):
                if self.layout.multiplies:
                    prepare_cublas(self.device)
                if self._pool is None:
                    self._pool = reserve_pool(self.device, self.layout.segments)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a data loader's, may use the device during the recording.
            with torch.cuda.graph(graph, pool=self._pool.id, stream=stream, capture_error_mode="thread_local"):
                work()
        return graph.replay

    def allocate_inputs(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        if not self.layout.input_segment_bytes:
            return make()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
            torch.empty(self.layout.input_segment_bytes, dtype=torch.uint8, device=self.device)
            inputs = make()
            torch.cuda.empty_cache()  # the segment, if another one had room for the input
        return inputs

    def close(self) -> None:
        self._pool = None


def can_record_passes(region: Region, *, copies_to_files: bool = False) -> bool:
    """True if no host code computes a part of a region's passes, and they are the same in every call.

    Args:
        region: the region.
        copies_to_files: true if offloaded values are copied to files: their pages cannot be locked.
    """
    if region.from_source or region.host_outputs or region.streamed - region.direct or region.weights is not None:
        return False
    if copies_to_files and any(op.is_copy for op in region.schedule):
        return False
    if any(isinstance(segment, TiledSegment) and segment.strip_policy is not RUN_ALL_STRIPS for segment in region.segments):
        return False
    programs = [program for segment in region.segments for program in getattr(segment, "lowered_programs", ())]
    calls = (kernel_call_of(instruction.function) for program in programs for instruction in program.instructions)
    return not any(call is not None and call.uploads for call in calls)


@dataclass(slots=True)
class _Recording:
    """Recorded pass.

    Attributes:
        inputs: tensors that are written before a replay.
        results: tensors that are read after it.
        replay: runs the pass.
        flops: floating-point operations of the pass.
        tables: tables on the host that the pass copies to the device.
        is_new: true before the first replay; its operations were reported when it was recorded.
    """

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    replay: Callable[[], None]
    flops: int
    tables: list[Tensor]
    is_new: bool = True

    def run(self, values: Mapping[str, Tensor]) -> None:
        """Replay the pass on values."""
        with _recording_mode():
            copy_tensors([*self.inputs.values()], [*map(values.__getitem__, self.inputs)])
            self.replay()
        if LISTENERS and not self.is_new:
            note_flops(self.flops)
        self.is_new = False

    def copy_results(self, uncopied: Collection[str] = ()) -> dict[str, Tensor]:
        """The results, which the next replay does not overwrite, except for the uncopied ones."""
        results = {name: result for name, result in self.results.items() if name not in uncopied}
        copies = [*map(torch.empty_like, results.values())]
        copy_tensors(copies, [*results.values()])
        return {**self.results, **dict(zip(results, copies, strict=True))}


@dataclass(slots=True, weakref_slot=True)
class _RecordedStep:
    """Recorded forward pass, and the backward pass of its tape.

    Attributes:
        key: addresses and strides of the weights and buffers, and torch's settings.
        forward: the forward pass.
        tape: its tape, until the backward pass is recorded, which consumes it.
        offloader: its copies on the host; ``None`` if it has none.
        backward: the backward pass, once it is recorded.
        call: the call that was replayed last.
    """

    key: tuple[Any, ...]
    forward: _Recording
    tape: Tape | None
    offloader: HostOffloader | None
    backward: _Recording | None = None
    call: weakref.ref[RecordedCall] | None = None

    @property
    def is_pending(self) -> bool:
        """True if a backward pass still needs the values on the tape."""
        call = None if self.call is None else self.call()
        return call is not None and call.is_pending


@dataclass(slots=True, weakref_slot=True)
class RecordedCall:
    """A forward pass that was replayed, and its backward pass.

    Attributes:
        outputs: its outputs, in memory of their own except for uncopied ones; taken by the caller.
        is_pending: true until the last backward pass has run.
    """

    outputs: dict[str, Tensor]
    is_pending: bool
    _step: _RecordedStep
    _graphs: PassGraphs
    _is_spent: bool = False

    def backward(
        self, output_grads: Mapping[str, Tensor], run: RunBackward, *, is_last: bool, uncopied: Collection[str] = ()
    ) -> dict[str, Tensor] | None:
        """Gradients of the leaves, in memory of their own; ``None`` if the pass cannot be recorded, which ends the call.

        Args:
            output_grads: gradients of the outputs.
            run: runs the pass without a graph, to record it.
            is_last: true if no other backward pass of this call follows.
            uncopied: leaves with gradients that stay in memory of the recording. The call is pending until :meth:`release`.
        """
        step = self._step
        if step.backward is None and not self._graphs.record_backward(step, output_grads, run):
            self.is_pending = False
            return None
        assert step.backward is not None
        if self._is_spent:
            step.forward.replay()
        step.backward.run(output_grads)
        self._is_spent = True
        grads = step.backward.copy_results(uncopied)
        self.is_pending = bool(uncopied) or not is_last
        return grads

    def release(self) -> None:
        """End the call: the caller has copied the gradients of its last backward pass."""
        self.is_pending = False


@dataclass(slots=True)
class PassGraphs:
    """Recorded passes of one plan: of its training step or of its inference, whichever ran last.

    Attributes:
        fixed: names of the weights and buffers.
        recorder: records passes.
        num_replays: number of replayed forward passes, for tests.
        is_enabled: false after a call that cannot be recorded; all later ones then run without graphs.
    """

    fixed: frozenset[str]
    recorder: PassRecorder
    num_replays: int = 0
    is_enabled: bool = True
    _step: _RecordedStep | None = field(default=None, repr=False)
    _keep: bool | None = None
    _num_recordings: int = 0
    _fixed_names: tuple[str, ...] = ()
    _groups: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = field(default_factory=dict, repr=False)  # by the names of the leaves
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def forward(
        self,
        leaves: Mapping[str, Tensor],
        run: RunForward,
        *,
        keep: bool,
        uncopied: Collection[str] = (),
        release: Callable[[], None] = lambda: None,
        make_offloader: Callable[[], HostOffloader | None] = lambda: None,
    ) -> RecordedCall | None:
        """Run a forward pass as a graph; ``None`` if it must run without one.

        Args:
            leaves: inputs, weights and buffers by name.
            run: runs the pass without a graph, to record it.
            keep: true if a backward pass follows.
            uncopied: outputs that the caller reads before the next call; they stay in memory of the recording.
            release: frees the memory of passes without graphs, before a recording.
            make_offloader: makes the copies on the host of a recording; ``None`` if it has none.
        """
        with self._lock:
            if not self.is_enabled or self.recorder.is_recorded:
                return None
            if self._step is not None and self._step.is_pending:
                self._disable()
                return None
            if self._keep is not keep:
                self.clear()
                self._keep = keep
                return None
            if self._step is None:
                release()
            step = self._recorded_step(leaves, run, make_offloader, keep)
            if step is None:
                return None
            step.forward.run(leaves)
            self.num_replays += 1
            call = RecordedCall(step.forward.copy_results(uncopied), is_pending=keep, _step=step, _graphs=self)
            step.call = weakref.ref(call)
            return call

    def gradient_groups(self, region: Region, trained: Mapping[str, Tensor]) -> GradientGroups:
        """Groups of the parameters of a call.

        Args:
            region: the plan's region.
            trained: the leaves that require gradients.
        """
        names = tuple(trained)
        groups = self._groups.get(names)
        if groups is None:
            groups = group_gradients({name: leaf.nbytes for name, leaf in trained.items() if region.graph[name].kind == "parameter"})
            self._groups[names] = groups
        return GradientGroups(groups, frozenset(chain.from_iterable(groups)))

    def clear(self) -> None:
        """Drop the recordings. That of a pending backward pass lives until it has run. The next call runs without a graph."""
        with self._lock:
            self._step = self._keep = None
            self.recorder.close()

    def record_backward(self, step: _RecordedStep, output_grads: Mapping[str, Tensor], run: RunBackward) -> bool:
        """Record the backward pass of a tape, which it consumes. False if that is impossible."""
        with self._lock:
            tape, step.tape = step.tape, None
            if step is not self._step or tape is None:
                return False
            # Dense and in the layout of images, as the caller's gradient may be expanded.
            layouts = {name: CHANNELS_LAST.get(grad.dim(), torch.contiguous_format) for name, grad in output_grads.items()}
            inputs = {name: torch.empty_like(grad, memory_format=layouts[name]) for name, grad in output_grads.items()}
            step.backward = self._record(inputs, lambda: run(tape, step.offloader, dict(inputs)))
            return step.backward is not None

    def _recorded_step(
        self, leaves: Mapping[str, Tensor], run: RunForward, make_offloader: Callable[[], HostOffloader | None], keep: bool
    ) -> _RecordedStep | None:
        """The recording for these weights; ``None`` if there is none."""
        if not self._fixed_names:
            self._fixed_names = tuple(name for name in leaves if name in self.fixed)  # in one order, that of the plan
        fixed = [*map(leaves.__getitem__, self._fixed_names)]
        key = (*map(Tensor.data_ptr, fixed), *map(Tensor.stride, fixed), torch.backends.cudnn.enabled, *kernel_settings().values())
        if self._step is not None and self._step.key == key:
            return self._step
        self._step = None
        self._num_recordings += 1
        if self._num_recordings > _MAX_RECORDINGS:
            self._disable()
            return None
        tapes: list[Tape] = []
        offloader = make_offloader()
        # The largest one first, as in the simulation of their memory.
        entering = sorted(((name, leaf) for name, leaf in leaves.items() if name not in self.fixed), key=lambda item: -item[1].nbytes)
        with _recording_mode():
            inputs = self.recorder.allocate_inputs(lambda: {name: torch.empty_like(leaf) for name, leaf in entering})

        def work() -> dict[str, Tensor]:
            outputs, tape = run({**leaves, **inputs}, offloader)
            tapes.extend([tape] if keep else [])
            return {name: output for name, output in outputs.items() if name not in leaves}

        forward = self._record(inputs, work)
        if forward is not None:
            self._step = _RecordedStep(key=key, forward=forward, tape=tapes[0] if keep else None, offloader=offloader)
        return self._step

    def _record(self, inputs: dict[str, Tensor], work: Callable[[], dict[str, Tensor]]) -> _Recording | None:
        """Record a pass; ``None`` if that fails, which changes no tensor of the caller."""
        results: dict[str, Tensor] = {}
        flops, tables = list[int](), list[Tensor]()
        try:
            with _recording_mode(), report_flops(flops.append), keep_tables(tables):
                replay = self.recorder.record(lambda: results.update(work()))
        except RuntimeError as error:
            if isinstance(error, SftError):
                raise
            self._disable()
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            warnings.warn(
                f"a pass could not be recorded as a CUDA graph ({reason}): it runs without one, with the same results. "
                "Options(cuda_graphs=False) silences this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return _Recording(inputs=inputs, results=results, replay=replay, flops=sum(flops), tables=tables)

    def _disable(self) -> None:
        """Never record again."""
        self.is_enabled = False
        self.clear()


@contextmanager
def _recording_mode() -> Iterator[None]:
    """Mode of torch in which tensors of a recording are made and written: calls of every mode use them, also outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
