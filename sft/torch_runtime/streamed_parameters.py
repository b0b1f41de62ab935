"""Streamed parameters of a compiled model: off the device, each with a record of its own in a store.

Records follow the model alone: one for each parameter, under its name, in the order of ``model.named_parameters()``. The plan decides
which of them are on the device together, and when (``sft.runtime.weight_prefetch``). A file of weights, or an optimizer's state, is
therefore valid for any plan: of another size, budget or strategy.

The parameters remain the model's; only the location of their memory changes. Buffers, parameters with two names, and parameters that share
memory with another tensor stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sft.analysis.frontend.trace_context import COMPUTE_DEVICES
from sft.common.errors import InputError, UnsupportedError
from sft.runtime.weight_prefetch import GradientTransfer
from sft.weights import DiskStore, HostStore, RecordLayout, Store, StreamCounters, TensorSpec, UnbufferedStream, WeightsFile
from sft.weights.disk_store import check_resume
from sft.weights.gradient_sinks import BlockSink, GradientSink, HostGradients, HostGradientSink
from sft.weights.record import RecordPart, layout_difference

__all__ = ["ParameterSink", "StreamedParameters", "record_bytes", "streamable_parameters"]


class ParameterSink(GradientSink, Protocol):
    """Gradient sink of single parameters."""

    def updates(self, name: str) -> bool:
        """True if the sink consumes the gradients of this parameter; if not, they are returned to autograd."""
        ...

    def grad_transfer(self, record: int) -> GradientTransfer:
        """Cost of consuming the gradient of a record's parameter."""
        ...

    def step_bytes(self) -> int:
        """Peak bytes on the device between two steps of the model."""
        ...


def streamable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a model that can be streamed, by name: those with one name, at least one element, and memory of their own.

    Raises:
        UnsupportedError: one is not a strided tensor of this process, or is in a store already.
    """
    if any(getattr(module, "is_streamed", False) for module in model.modules()):
        raise UnsupportedError(
            ["a repetition inside streams its blocks, and weights have one store; close() it, or leave out weights='stream'"]
        )
    num_names: dict[int, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        num_names[id(param)] = num_names.get(id(param), 0) + 1
    shared = _memory_sharing_ids([*model.parameters(), *model.buffers()])
    streamable = {
        name: param for name, param in model.named_parameters() if num_names[id(param)] == 1 and param.numel() and id(param) not in shared
    }
    wrong = [name for name, param in streamable.items() if param.layout is not torch.strided or hasattr(param, "device_mesh")]
    if wrong:
        raise UnsupportedError(
            [f"{name}: only weights that are plain tensors can be streamed; leave out weights='stream'" for name in wrong]
        )
    return streamable


def _memory_sharing_ids(tensors: Sequence[Tensor]) -> set[int]:
    """Ids of the tensors that share memory with another one, so that a change of one in place changes the other."""
    spans = []
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel():
            reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), id(tensor)))
    shared: set[int] = set()
    last: tuple[str, int, int, int] | None = None
    for span in sorted(spans):
        if last is not None and span[0] == last[0] and span[1] < last[2]:
            shared |= {span[3], last[3]}
        if last is None or span[0] != last[0] or span[2] > last[2]:
            last = span
    return shared


def record_bytes(param: Tensor) -> int:
    """Bytes of a parameter on the device."""
    return RecordLayout.of([TensorSpec.of("", param)]).weight_bytes


class StreamedParameters:
    """Parameters of a model in a store; :meth:`of` constructs one for each model.

    Attributes:
        device: device of the model.
        params: the parameters, by name.
        store: their store.
        counters: statistics of all passes.
        revision: changes with the gradient sink, and so with the plans.
    """

    def __init__(self, model: nn.Module, device: torch.device, file: WeightsFile | None) -> None:
        self.device, self.params, self._file = device, streamable_parameters(model), file
        self._names = tuple(self.params)
        self._param_ids = [(name, id(param)) for name, param in model.named_parameters()]
        if not self.params:
            reason = " (those with two names stay resident)" if any(True for _ in model.parameters()) else ""
            raise InputError(f"{type(model).__name__} has no parameters to stream{reason}; leave out weights='stream'")
        self.counters, self.revision = StreamCounters(), 0
        self._records = {name: record for record, name in enumerate(self.params)}
        self._pin = device.type == "cuda"
        self._sink: ParameterSink = _HostParameterSink(self)
        layouts = [RecordLayout.of([TensorSpec.of(name, param)]) for name, param in self.params.items()]
        self.store: Store
        if file is not None and (file.resume or Path(file.path).exists()):
            self.store = self._reopened(file, layouts)
        else:
            self.store = self._stored(layouts, lambda record, views: _copy_into_views(views, self.params[self._names[record]]))
        self.rebind()
        for param in self.params.values():
            if param.grad is not None:
                param.grad = param.grad.to(param.device)

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, file: WeightsFile | None = None) -> StreamedParameters:
        """Move the parameters of a model to a store, or return its existing store.

        Args:
            model: the model.
            device: device of the model.
            file: file of the store; ``None`` for the host's memory.

        Raises:
            InputError: the model has no parameters to stream, the file exists or has other weights, or the existing store has another
            device
                or file.
            SourceError: the file cannot be read or written.
            UnsupportedError: a parameter is not a strided tensor.
        """
        streamed, device = cls.known(model), torch.empty(0, device=device).device  # with its index
        if streamed is not None and streamed.parameters_replaced(model):
            if not isinstance(streamed.sink, _HostParameterSink):
                raise InputError(
                    f"the model's parameters are no longer those in {streamed.where} (another head, load_state_dict(assign=True)), where "
                    "the state of their optimizer is, too; close() the optimizer, and make a new one"
                )
            streamed.close()  # the new parameters are streamed instead
            streamed = None
        if streamed is None:
            with torch.inference_mode(False):  # tensors created in inference mode could not be used outside of it
                streamed = _streamed_models[model] = cls(model, device, file)
        elif (streamed.device, streamed._file) != (device, file):
            raise InputError(
                f"the weights of this model are streamed already, from {streamed.where} to {streamed.device}; compile it with the same "
                "options"
            )
        return streamed

    @classmethod
    def known(cls, model: nn.Module) -> StreamedParameters | None:
        """The store of a model's parameters; ``None`` if they are not streamed."""
        streamed: StreamedParameters | None = _streamed_models.get(model)
        return streamed

    def parameters_replaced(self, model: nn.Module) -> bool:
        """True if the model has other parameters now (another head, ``load_state_dict(assign=True)``).

        Tensors that replace them for a call (``functional_call``) do not count.
        """
        params = list(model.named_parameters())
        return [(name, id(param)) for name, param in params] != self._param_ids and all(
            isinstance(param, nn.Parameter) for _, param in params
        )

    @property
    def where(self) -> str:
        """Location of the store, for messages."""
        return "the host's memory" if self._file is None else str(self._file.path)

    @property
    def num_blocks(self) -> int:
        """Number of records."""
        return len(self.params)

    @property
    def reads_ahead(self) -> bool:
        """True if passes prefetch weights, since reading or copying them is slow."""
        return self.store.is_slow or self.device.type == "cuda"

    @property
    def sink(self) -> ParameterSink:
        """Gradient sink: the host's memory, or an optimizer."""
        return self._sink

    @sink.setter
    def sink(self, sink: ParameterSink) -> None:
        self._sink = sink
        self.revision += 1

    @property
    def weights(self) -> UnbufferedStream:
        """The weights, a record at a time."""
        return self.window(self.store, "weights")

    def record_of(self, path: str) -> int:
        """The number of a parameter's record."""
        return self._records[path]

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by name."""
        return self.params

    def check(self) -> None:
        """Check that the parameters are still views of the store.

        Raises:
            InputError: a parameter was moved or replaced.
        """
        starts = (self.store.record(record).data_ptr() for record in range(self.num_blocks))
        moved = [name for (name, param), start in zip(self.params.items(), starts, strict=True) if param.data_ptr() != start]
        if moved:
            raise InputError(
                f"{', '.join(moved[:3])}{' ...' if len(moved) > 3 else ''}: streamed weights live in {self.where}, and these were moved "
                "or replaced (.to(), .double(), .data = ...); convert the model before it is compiled, and change weights in place"
            )

    def versions(self) -> tuple[int, ...]:
        """Value that changes with every generation of the weights; autograd itself detects changes in place."""
        return (self.store.generation,)

    def grad_transfer_of(self, name: str) -> GradientTransfer:
        """Cost of consuming a parameter's gradient."""
        sink = self._sink if self._sink.updates(name) else _HostParameterSink(self)
        return sink.grad_transfer(self._records[name])

    @property
    def step_bytes(self) -> int:
        """Peak bytes on the device while an optimizer's step uses accumulated gradients."""
        return self._sink.step_bytes()

    @contextlib.contextmanager
    def open_sink(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """Sink of the gradients of one backward pass; its effects are undone if the pass fails."""
        with self._sink.open_pass(order) as sink:
            yield sink if isinstance(self._sink, _HostParameterSink) else _RoutingSink(self._sink, sink)

    def rebind(self) -> None:
        """Make the parameters views of the current generation, each with a storage of its own."""
        for record, (name, param) in enumerate(self.params.items()):
            layout = self.store.layouts[record]
            data = torch.from_numpy(self.store.record(record)[: layout.weight_bytes].numpy())
            param.data = layout.views(data, "weights")[name]
            COMPUTE_DEVICES[param] = self.device

    def close(self) -> None:
        """Close the store; the parameters become ordinary ones on the host."""
        for param in self.params.values():
            param.data = param.detach().clone()
            del COMPUTE_DEVICES[param]
        self.store.close()
        for model in [model for model, streamed in _streamed_models.items() if streamed is self]:
            del _streamed_models[model]

    # -- for optimizers ---------------------------------------------------------------------------------------------

    def names_of(self, block: int) -> tuple[str, ...]:
        """Names of a record's parameters: one."""
        return (self._names[block],)

    def shape_of(self, param: Tensor) -> tuple[int, ...]:
        """Shape of a parameter in a record."""
        return tuple(param.shape)

    def slice_of(self, value: Tensor, block: int) -> Tensor:
        """The share of a record in a tensor of a parameter: all of it."""
        return value

    def tensor(self, name: str, key: str) -> Tensor:
        """A tensor of the current generation that belongs to a parameter."""
        record = self._records[name]
        return self.store.layouts[record].views(self.store.record(record))[key]

    def window(self, store: Store, part: RecordPart, window_bytes: int | None = None) -> UnbufferedStream:
        """Stream that reads a store with the same records.

        Raises:
            InputError: ``window_bytes`` is given.
        """
        if window_bytes is not None:
            raise InputError(
                f"window={window_bytes}: the state of a compiled model is on the device one parameter at a time; leave window out"
            )
        return UnbufferedStream(store, self.device, part=part)

    def set_state(self, state: Mapping[str, Sequence[TensorSpec]], fill: Callable[[int, dict[str, Tensor]], None]) -> bool:
        """Add an optimizer's state to the records.

        Args:
            state: its tensors, by parameter.
            fill: writes their first values, given a record's number and all its tensors; without a value, a tensor is zero.

        Returns:
            True if the records had this state already, with its content.
        """
        layouts = [RecordLayout.of([TensorSpec.of(name, param), *state.get(name, ())]) for name, param in self.params.items()]
        if tuple(layouts) == tuple(self.store.layouts):
            return any(state.values())
        old = self.store

        def both(record: int, views: dict[str, Tensor]) -> None:
            (name,) = self.names_of(record)
            views[name].copy_(old.layouts[record].views(old.record(record))[name])
            fill(record, views)

        self.store = self._stored(layouts, both, replaces=old)
        old.close()
        self.rebind()
        return False

    def _stored(
        self, layouts: Sequence[RecordLayout], fill: Callable[[int, dict[str, Tensor]], None], *, replaces: Store | None = None
    ) -> Store:
        if self._file is not None:
            return DiskStore.create(self._file.path, layouts, fill, durable=self._file.durable, replaces=replaces)
        store = HostStore(layouts, pin=self._pin)
        with torch.no_grad():
            for record, layout in enumerate(layouts):
                fill(record, layout.views(store.record(record)))
        return store

    def _reopened(self, file: WeightsFile, layouts: Sequence[RecordLayout]) -> Store:
        check_resume(file.path, resume=file.resume)
        store = DiskStore.open(file.path, durable=file.durable)
        expected = [field.spec for layout in layouts for field in layout.fields]
        stored = [field.spec for layout in store.layouts for field in layout.fields if not field.spec.is_state]
        if difference := layout_difference(expected, stored):
            raise InputError(
                f"{file.path} has the weights of another model: {difference}; give another path, and load what fits with load_state_dict"
            )
        if any(param.requires_grad for param in self.params.values()):  # a frozen model only reads
            store.reserve()
        return store


#: stores by model
_streamed_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _HostParameterSink(HostGradientSink):
    """Sink without an optimizer: gradients are gathered in host memory and returned to autograd."""

    def __init__(self, parameters: StreamedParameters) -> None:
        super().__init__()
        self._parameters = parameters

    def updates(self, name: str) -> bool:
        """True for every parameter."""
        return True

    def step_bytes(self) -> int:
        """Zero bytes on the device."""
        return 0

    def grad_transfer(self, record: int) -> GradientTransfer:
        """Copy of the gradient to the host."""
        return GradientTransfer(down_bytes=self._parameters.store.layouts[record].weight_bytes)


class _RoutingSink:
    """Sends gradients of an optimizer's parameters to it, and gathers all other gradients for autograd."""

    def __init__(self, target: ParameterSink, sink: BlockSink) -> None:
        self._target, self._sink, self._gathered = target, sink, HostGradients()

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        (name,) = grads
        return (self._sink if self._target.updates(name) else self._gathered).put(block, grads, weights)

    def collect(self) -> Mapping[str, Tensor]:
        return {**self._sink.collect(), **self._gathered.collect()}


def _copy_into_views(views: Mapping[str, Tensor], param: Tensor) -> None:
    for view in views.values():
        view.copy_(param.detach())
