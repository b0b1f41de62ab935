"""The parameters of a compiled model, off the device: a record for each of them in a store.

Records follow the model alone: one for each parameter, under its name, in the order of ``model.named_parameters()``. Which of them are on
the device together, and when, is the plan's business (``sft.runtime.weight_prefetch``). So a file of weights, or an optimizer's state, is
good for any plan: of another size, budget or strategy.

The parameters stay the model's own: what changes is where their memory is. Buffers, parameters that have two names, and those that share
memory with others, stay where they are.
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
from sft.weights.gradient_sinks import BlockSink, GradientSink
from sft.weights.record import RecordPart, layout_difference
from sft.weights.store import allocate_host_bytes

__all__ = ["ParameterSink", "StreamedParameters", "record_bytes", "streamable_parameters"]


class ParameterSink(GradientSink, Protocol):
    """Where the gradients of parameters go."""

    def updates(self, name: str) -> bool:
        """Whether it takes those of this parameter; others are autograd's to hand on."""
        ...

    def grad_transfer(self, record: int) -> GradientTransfer:
        """What it takes to take the gradient of a record's parameter."""
        ...

    def step_bytes(self) -> int:
        """Most bytes that it holds on the device between two steps of the model."""
        ...


def streamable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that have one name, elements, and memory of their own, by name.

    Raises:
        UnsupportedError: one is no plain tensor in memory, or in a store already.
    """
    if any(getattr(module, "is_streamed", False) for module in model.modules()):
        raise UnsupportedError(
            ["a repetition inside streams its blocks, and weights have one store; close() it, or leave out weights='stream'"]
        )
    num_names: dict[int, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        num_names[id(param)] = num_names.get(id(param), 0) + 1
    shared = _memory_sharing_ids([*model.parameters(), *model.buffers()])
    found = {
        name: param for name, param in model.named_parameters() if num_names[id(param)] == 1 and param.numel() and id(param) not in shared
    }
    wrong = [name for name, param in found.items() if param.layout is not torch.strided or hasattr(param, "device_mesh")]
    if wrong:
        raise UnsupportedError([f"{name}: weights are streamed of plain tensors only; leave out weights='stream'" for name in wrong])
    return found


def _memory_sharing_ids(tensors: Sequence[Tensor]) -> set[int]:
    """Those that share memory with another one, by id: what changes one of them in place changes the other."""
    spans = []
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel():
            reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), id(tensor)))
    found: set[int] = set()
    last: tuple[str, int, int, int] | None = None
    for span in sorted(spans):
        if last is not None and span[0] == last[0] and span[1] < last[2]:
            found |= {span[3], last[3]}
        if last is None or span[0] != last[0] or span[2] > last[2]:
            last = span
    return found


def record_bytes(param: Tensor) -> int:
    """What a parameter takes on the device while it is there."""
    return RecordLayout.of([_tensor_spec("", param)]).weight_bytes


class StreamedParameters:
    """The store behind the parameters of a model. Made by :meth:`of`, once for each model.

    Attributes:
        device: where the model runs.
        params: the parameters, by name.
        store: where they are.
        counters: what passes did, summed up.
        revision: changes when the gradients go elsewhere, and so plans do.
    """

    def __init__(self, model: nn.Module, device: torch.device, file: WeightsFile | None) -> None:
        self.device, self.params, self._file = device, streamable_parameters(model), file
        self._names = tuple(self.params)
        self._had = [(name, id(param)) for name, param in model.named_parameters()]
        if not self.params:
            why = " (those with two names stay resident)" if any(True for _ in model.parameters()) else ""
            raise InputError(f"{type(model).__name__} has no parameters to stream{why}; leave out weights='stream'")
        self.counters, self.revision = StreamCounters(), 0
        self._records = {name: record for record, name in enumerate(self.params)}
        self._pin = device.type == "cuda"
        self._sink: ParameterSink = _HostParameterSink(self)
        layouts = [RecordLayout.of([_tensor_spec(name, param)]) for name, param in self.params.items()]
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
        """Take the parameters of a model, or find those that were taken.

        Args:
            model: the model; its parameters move to the store.
            device: where it runs.
            file: where the store is; ``None`` for the host's memory.

        Raises:
            InputError: there are none, or the file exists, or has other weights, or they were taken for something else.
            SourceError: the file cannot be read or written.
            UnsupportedError: one is no plain tensor.
        """
        found, device = cls.known(model), torch.empty(0, device=device).device  # with its index
        if found is not None and found.parameters_replaced(model):
            if not isinstance(found.sink, _HostParameterSink):
                raise InputError(
                    f"the model's parameters are no longer those in {found.where} (another head, load_state_dict(assign=True)), where the "
                    "state of their optimizer is, too; close() the optimizer, and make a new one"
                )
            found.close()  # what came in their place is taken instead
            found = None
        if found is None:
            with torch.inference_mode(False):  # tensors that are made in there are good for nothing else
                found = _streamed_models[model] = cls(model, device, file)
        elif (found.device, found._file) != (device, file):
            raise InputError(
                f"the weights of this model are streamed already, from {found.where} to {found.device}; compile it with the same options"
            )
        return found

    @classmethod
    def known(cls, model: nn.Module) -> StreamedParameters | None:
        """Those that were taken of a model; ``None`` if none were."""
        found: StreamedParameters | None = _streamed_models.get(model)
        return found

    def parameters_replaced(self, model: nn.Module) -> bool:
        """Whether the model has other parameters now (another head, ``load_state_dict(assign=True)``).

        Tensors that are put in their place for a call (``functional_call``) are none.
        """
        own = list(model.named_parameters())
        return [(name, id(param)) for name, param in own] != self._had and all(isinstance(param, nn.Parameter) for _, param in own)

    @property
    def where(self) -> str:
        """Where the store is, for people."""
        return "the host's memory" if self._file is None else str(self._file.path)

    @property
    def num_blocks(self) -> int:
        """How many records there are."""
        return len(self.params)

    @property
    def reads_ahead(self) -> bool:
        """Whether passes read ahead: where reading, or copying, is slow."""
        return self.store.is_slow or self.device.type == "cuda"

    @property
    def sink(self) -> ParameterSink:
        """Where gradients go: to the host's memory, or to an optimizer."""
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
        """Whether the parameters are still those of the store.

        Raises:
            InputError: somebody put others in their place.
        """
        starts = (self.store.record(record).data_ptr() for record in range(self.num_blocks))
        moved = [name for (name, param), start in zip(self.params.items(), starts, strict=True) if param.data_ptr() != start]
        if moved:
            raise InputError(
                f"{', '.join(moved[:3])}{' ...' if len(moved) > 3 else ''}: streamed weights live in {self.where}, and somebody has moved "
                "or replaced these (.to(), .double(), .data = ...); convert the model before it is compiled, and change weights in place"
            )

    def versions(self) -> tuple[int, ...]:
        """What changes when the weights do: autograd itself sees to changes in place."""
        return (self.store.generation,)

    def grad_transfer_of(self, name: str) -> GradientTransfer:
        """What it takes to take a parameter's gradient."""
        own = self._sink if self._sink.updates(name) else _HostParameterSink(self)
        return own.grad_transfer(self._records[name])

    @property
    def step_bytes(self) -> int:
        """Most bytes on the device while an optimizer's step uses gradients that were added up."""
        return self._sink.step_bytes()

    @contextlib.contextmanager
    def taking(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """What takes the gradients of a backward pass; what it began is undone when the pass fails."""
        with self._sink.open_pass(order) as sink:
            yield sink if isinstance(self._sink, _HostParameterSink) else _RoutingSink(self._sink, sink)

    def rebind(self) -> None:
        """Let the parameters be views of the current generation, each of a storage of its own."""
        for record, (name, param) in enumerate(self.params.items()):
            layout = self.store.layouts[record]
            data = torch.from_numpy(self.store.record(record)[: layout.weight_bytes].numpy())
            param.data = layout.views(data, "weights")[name]
            COMPUTE_DEVICES[param] = self.device

    def close(self) -> None:
        """Close the store; the parameters are ordinary ones then, on the host."""
        for param in self.params.values():
            param.data = param.detach().clone()
            del COMPUTE_DEVICES[param]
        self.store.close()
        for model in [model for model, found in _streamed_models.items() if found is self]:
            del _streamed_models[model]

    # -- for optimizers ---------------------------------------------------------------------------------------------

    def names_of(self, block: int) -> tuple[str, ...]:
        """The parameters in a record: one."""
        return (self._names[block],)

    def shape_of(self, param: Tensor) -> tuple[int, ...]:
        """The shape of what a record has of a parameter."""
        return tuple(param.shape)

    def slice_of(self, value: Tensor, block: int) -> Tensor:
        """What a record has of a tensor that belongs to a parameter."""
        return value

    def tensor(self, name: str, key: str) -> Tensor:
        """A tensor of the current generation that belongs to a parameter."""
        record = self._records[name]
        return self.store.layouts[record].views(self.store.record(record))[key]

    def window(self, store: Store, part: RecordPart, window_bytes: int | None = None) -> UnbufferedStream:
        """A way to read a store of as many records.

        Raises:
            InputError: a size is asked for.
        """
        if window_bytes is not None:
            raise InputError(f"window={window_bytes}: state of a compiled model is there one parameter at a time; leave window out")
        return UnbufferedStream(store, self.device, part=part)

    def set_state(self, state: Mapping[str, Sequence[TensorSpec]], fill: Callable[[int, dict[str, Tensor]], None]) -> bool:
        """Make room in the records for what an optimizer keeps.

        Args:
            state: its tensors, by parameter.
            fill: writes their first values, given a record's number and all its tensors; others are zero.

        Returns:
            Whether the records had this room before, with what it holds.
        """
        layouts = [RecordLayout.of([_tensor_spec(name, param), *state.get(name, ())]) for name, param in self.params.items()]
        if tuple(layouts) == tuple(self.store.layouts):
            return any(state.values())
        old = self.store

        def both(record: int, views: dict[str, Tensor]) -> None:
            (name,) = self.names_of(record)
            views[name].copy_(old.layouts[record].views(old.record(record))[name])
            fill(record, views)

        self.store = self._stored(layouts, both)
        old.close()
        self.rebind()
        return False

    def _stored(self, layouts: Sequence[RecordLayout], fill: Callable[[int, dict[str, Tensor]], None]) -> Store:
        if self._file is not None:
            return DiskStore.create(self._file.path, layouts, fill, durable=self._file.durable)
        store = HostStore(layouts, pin=self._pin)
        with torch.no_grad():
            for record, layout in enumerate(layouts):
                fill(record, layout.views(store.record(record)))
        return store

    def _reopened(self, file: WeightsFile, layouts: Sequence[RecordLayout]) -> Store:
        check_resume(file.path, resume=file.resume)
        store = DiskStore.open(file.path, durable=file.durable)
        own = [field.spec for layout in layouts for field in layout.fields]
        theirs = [field.spec for layout in store.layouts for field in layout.fields if not field.spec.is_state]
        if other := layout_difference(own, theirs):
            raise InputError(
                f"{file.path} has the weights of another model: {other}; give another path, and load what fits with load_state_dict"
            )
        return store


#: by model
_streamed_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _HostParameterSink:
    """Gathers gradients in the host's memory, for autograd to put into ``.grad``."""

    def __init__(self, parameters: StreamedParameters) -> None:
        self._parameters = parameters

    def extra_bytes(self) -> int:
        """Nothing on the device."""
        return 0

    def updates(self, name: str) -> bool:
        """All of them."""
        return True

    def step_bytes(self) -> int:
        """Nothing: all is on the host."""
        return 0

    def grad_transfer(self, record: int) -> GradientTransfer:
        """The gradient leaves."""
        return GradientTransfer(down_bytes=self._parameters.store.layouts[record].weight_bytes)

    @contextlib.contextmanager
    def open_pass(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """For one pass."""
        yield _HostParameterGradients()


class _HostParameterGradients:
    def __init__(self) -> None:
        self._grads: dict[str, Tensor] = {}

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        for name, value in grads.items():
            room = allocate_host_bytes(value.numel() * value.element_size())  # the copy waits: locking its pages would take longer
            self._grads[name] = room.view(value.dtype).view(value.shape).copy_(value)
        return False

    def collect(self) -> Mapping[str, Tensor]:
        grads, self._grads = self._grads, {}
        return grads


class _RoutingSink:
    """Gradients of an optimizer's parameters go to it, others are gathered."""

    def __init__(self, target: ParameterSink, sink: BlockSink) -> None:
        self._target, self._sink, self._gathered = target, sink, _HostParameterGradients()

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        (name,) = grads
        return (self._sink if self._target.updates(name) else self._gathered).put(block, grads, weights)

    def collect(self) -> Mapping[str, Tensor]:
        return {**self._sink.collect(), **self._gathered.collect()}


def _tensor_spec(name: str, param: Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(param.shape), dtype=param.dtype)


def _copy_into_views(views: Mapping[str, Tensor], param: Tensor) -> None:
    for view in views.values():
        view.copy_(param.detach())
