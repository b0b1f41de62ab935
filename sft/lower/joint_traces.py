"""Joint traces: a function and its derivative by autograd, as two flat lists of ATen calls.

:func:`trace_joint` records any function of tensors (:mod:`sft.lower.op_recorder`) and turns tensors into numbered values. Dead calls are
dropped. Calls that depend on the gradient of the output belong to the backward list, all others to the forward list; a program that only
wants the output drops forward calls that serve the derivative alone.

Two cached traces of graph nodes build on it. A pointwise function (``gelu``, ``silu``, ...) makes the same calls for every shape, so
:func:`trace_pointwise` traces it once on a tiny tensor. :func:`trace_whole` traces any other operator at the shapes that it runs on.

Views are recognised by the storages of the fake tensors. A reshape that merges dimensions is a view only for some memory layouts, so it
is always a copy here; programs make it a view again where they know the layout (:mod:`sft.lower.redundant_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.frontend.trace_context import without_autograd_debugging
from sft.analysis.ir.graph import map_refs
from sft.common.errors import InternalError
from sft.common.module_snapshot import exact_key
from sft.common.torch_internals import OpOverload, op_schema, storage_id
from sft.lower.custom_ops import BY_SHAPE, EXACT_STORAGE, FUNCTIONS
from sft.lower.op_recorder import ArgumentSpec, OpRecording, RecordedOp, record_ops
from sft.lower.program import DEVICE

__all__ = [
    "TINY_SHAPE",
    "BitwiseKey",
    "JointTrace",
    "SlotArg",
    "TraceBuilder",
    "TracedCall",
    "TracedResult",
    "only_splits",
    "resolve_target",
    "trace_joint",
    "trace_pointwise",
    "trace_whole",
]

aten = torch.ops.aten

TINY_SHAPE = (2, 3, 4, 5)
#: Reshapes that are valid only in the memory layout that was traced; programs may use another.
_VIEW_OPS = frozenset({aten.view.default, aten._unsafe_view.default})
#: Calls that return their operand.
_ALIAS_OPS = frozenset({aten.detach.default, aten.alias.default})

#: (operator, result) pairs of which ATen allocates one element more than the result has: the bag of each index.
_PADDED_RESULTS = frozenset((overload.default, 1) for overload in (aten._embedding_bag, aten._embedding_bag_forward_only))

#: Normalisations; all but their first result are statistics.
_NORMS = (aten.native_layer_norm.default, aten.native_batch_norm.default, aten.native_group_norm.default)


def resolve_target(target: str) -> Any:
    """The ATen overload of a node's target.

    >>> resolve_target("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True, slots=True)
class TracedResult:
    """A tensor result of a call.

    Attributes:
        index: its number among the trace's values.
        shape: its extents.
        dtype: its element type.
        view_of: the owner of its storage, if it is a view.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    view_of: int | None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a trace.

    Attributes:
        function: the ATen overload, or a Python function.
        arguments: positional arguments; tensors are :class:`SlotArg`, devices are ``DEVICE``.
        keywords: keyword arguments, likewise.
        results: its tensor results; ``None`` for an unused view, which takes no memory, and for a result that is not a tensor.
        has_many: True if the call returns a tuple.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[TracedResult | None, ...]
    has_many: bool


@dataclass(frozen=True, slots=True)
class SlotArg:
    """A tensor argument of a traced call: the index of a value of the trace."""

    index: int


@dataclass(frozen=True, slots=True)
class JointTrace:
    """A function and its derivative as flat lists of calls on numbered values.

    Values ``0 .. num_inputs - 1`` are the inputs, value ``num_inputs`` is the gradient of the output.

    Attributes:
        forward: calls that do not depend on the gradient.
        backward: calls that do.
        num_inputs: number of inputs.
        result: index of the output.
        gradients: index of the gradient of each input; ``None`` if the input needs none, or the output does not depend on it.
        constants: tensors from outside by index, if the trace allows them (:class:`TraceBuilder`).
    """

    forward: tuple[TracedCall, ...]
    backward: tuple[TracedCall, ...]
    num_inputs: int
    result: int
    gradients: tuple[int | None, ...]
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict, compare=False)


def trace_joint(function: Callable[..., torch.Tensor], arguments: Sequence[ArgumentSpec], *, by_shape: bool = False) -> JointTrace:
    """Trace a function and its derivative with respect to the arguments that need a gradient.

    Args:
        function: computes one tensor from tensors. All tensors that it reads are arguments or results of its own calls.
        arguments: its tensors, contiguous.
        by_shape: True if the function makes the same calls on every device, which makes tracing faster (:func:`record_ops`).

    Raises:
        InternalError: the function reads or returns a tensor from outside.
    """
    # The caller's modes may be on, and a trace is kept for later calls.
    has_derivative = any(spec.needs_grad for spec in arguments)
    with torch.inference_mode(False), without_autograd_debugging(), _replayable_kernels(has_derivative=has_derivative):
        return TraceBuilder(record_ops(function, arguments, by_shape=by_shape)).trace()


@contextmanager
def _replayable_kernels(*, has_derivative: bool) -> Iterator[None]:
    """Decompose operators while tracing whose fused CPU call does not do the same in a program.

    - On machines with a GPU: attention and LSTMs, since their CPU calls do not exist on GPUs.
    - With a derivative: LSTMs of oneDNN, whose forward call leaves the workspace of its derivative only in grad mode; programs run without.
    """
    with ExitStack() as stack:
        if has_derivative or _has_gpu():
            stack.enter_context(apply_patches("onednn"))
        if _has_gpu():
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def _has_gpu() -> bool:
    return torch.cuda.is_available()


class TraceBuilder:
    """Builds a trace from a recording: numbers the tensors, finds views by their storages, and drops dead calls.

    Args:
        recording: the calls.
        keeps_layouts: True if the trace runs on tensors with the memory layout and the device of the recording. Reshapes then stay views,
            devices stay as they are, and tensors from outside become constants. Otherwise a reshape that merges dimensions becomes a copy,
            devices become ``DEVICE``, and tensors from outside are an error.
    """

    def __init__(self, recording: OpRecording, *, keeps_layouts: bool = False) -> None:
        self._recording, self._keeps_layouts = recording, keeps_layouts
        self._constants: dict[int, torch.Tensor] = {}
        self._index: dict[int, int] = {}  # tensor id -> value index; the recording keeps all tensors alive
        self._roots: list[int] = []  # value index -> index of the value that owns its storage
        self._transposed: dict[int, int] = {}  # result of `aten.t` -> its operand
        for tensor in (*recording.inputs, recording.grad):
            self._new(tensor, None)

    def trace(self) -> JointTrace:
        """Build the trace."""
        recording, num_inputs = self._recording, len(self._recording.inputs)
        calls = [call for recorded in recording.calls if (call := self._call(recorded)) is not None]
        result = self._index.get(id(recording.output))
        if result is None:
            raise InternalError("an operator returns a tensor that none of its calls made")
        gradients = tuple(None if gradient is None else self._index[id(gradient)] for gradient in recording.gradients)
        forward: list[TracedCall] = []
        backward: list[TracedCall] = []
        from_grad = {num_inputs}
        for call in _live_calls(calls, {result, *(gradient for gradient in gradients if gradient is not None)}):
            if from_grad.isdisjoint(_operand_indices(call)):
                forward.append(call)
            else:
                from_grad.update(output.index for output in call.results if output is not None)
                backward.append(call)
        return JointTrace(tuple(forward), tuple(backward), num_inputs, result, gradients, self._constants)

    def _new(self, tensor: torch.Tensor, shared: int | None) -> int:
        number = self._index[id(tensor)] = len(self._roots)
        self._roots.append(number if shared is None else shared)
        return number

    def _call(self, recorded: RecordedOp) -> TracedCall | None:
        """The traced call; ``None`` if it returns its operand."""
        target = recorded.function
        arguments = tuple(map(self._converted, recorded.arguments))
        if target in _ALIAS_OPS:
            self._index[id(recorded.output)] = arguments[0].index
            return None
        if target is aten.t.default and arguments[0].index in self._transposed:  # a double transposition, as in gradients of products
            self._index[id(recorded.output)] = self._transposed[arguments[0].index]
            return None
        keywords = tuple((key, self._converted(item)) for key, item in recorded.keywords.items())
        if not self._keeps_layouts and target in _VIEW_OPS and not only_splits(recorded.first_argument_shape, recorded.result_shapes[0]):
            target = aten._reshape_copy.default
        storages = {} if target is aten._reshape_copy.default else self._storages(recorded)
        results: list[TracedResult | None] = []
        for position, (tensor, shape) in enumerate(zip(recorded.results, recorded.result_shapes, strict=True)):
            if tensor is None:
                results.append(None)
                continue
            if (target, position) in _PADDED_RESULTS:
                shape = (shape[0] + 1,)
            shared = storages.get(storage_id(tensor))
            results.append(TracedResult(self._new(tensor, shared), shape, _real_dtype(recorded, position, tensor.dtype), shared))
        if target is aten.t.default and results[0] is not None:
            self._transposed[results[0].index] = arguments[0].index
        target, has_many = EXACT_STORAGE.get(target, target), recorded.has_many
        if has_many and len(results) == 1:  # a list of one tensor, as of `unbind`
            target, has_many = _unwrap_single(target), False
        return TracedCall(target, arguments, keywords, tuple(results), has_many)

    def _storages(self, recorded: RecordedOp) -> dict[int, int]:
        """Storage ids of a call's operands -> the values that own them."""
        owners: dict[int, int] = {}
        for tensor in _tensors((*recorded.arguments, *recorded.keywords.values())):
            owners.setdefault(storage_id(tensor), self._roots[self._index[id(tensor)]])
        return owners

    def _converted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._index.get(id(value))
            if number is None and self._keeps_layouts:
                number = self._new(value, None)
                self._constants[number] = value
            if number is None:
                raise InternalError("an operator reads a tensor that is neither its operand nor made by one of its calls")
            return SlotArg(number)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._converted, value))
        return DEVICE if isinstance(value, torch.device) and not self._keeps_layouts else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _live_calls(calls: Sequence[TracedCall], targets: set[int]) -> list[TracedCall]:
    """The calls that matter: those with a needed result, those that write in place, and those without results, which are checks.

    Unused views of a call with several results become ``None``. Other unused results stay: the call allocates them, and their storages are
    freed after it.
    """
    needed = set(targets)
    live = []
    for call in reversed(calls):
        is_used = [result is not None and result.index in needed for result in call.results]
        if any(is_used) or not is_used or (isinstance(call.function, OpOverload) and op_schema(call.function).is_mutable):
            live.append(_without_unused_views(call, is_used) if call.has_many else call)
            needed.update(_operand_indices(call))
    return live[::-1]


def _without_unused_views(call: TracedCall, is_used: Sequence[bool]) -> TracedCall:
    results = tuple(
        result if used or result is None or result.view_of is None else None for result, used in zip(call.results, is_used, strict=True)
    )
    return replace(call, results=results)


def _operand_indices(call: TracedCall) -> set[int]:
    return {value.index for value in _slot_args((*call.arguments, *(item for _, item in call.keywords)))}


@lru_cache(maxsize=32)
def _unwrap_single(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """A function that returns the only tensor of the list that ``function`` returns."""

    def unwrapped(*arguments: Any, **keywords: Any) -> torch.Tensor:
        (tensor,) = function(*arguments, **keywords)
        return tensor

    return unwrapped


def _real_dtype(recorded: RecordedOp, position: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a result of a real call, where fake kernels give sums another one.

    - The log-sum-exp of attention on the CPU, with operands in float64: float32 in torch 2.11 and 2.12.
    - Statistics of norms of half precision: the dtype of the operand. Real calls return float32 if the weights are in float32 (autocast),
      and on GPUs, where only group norm keeps the dtype. The gradient of the operand has its dtype, and not that of the statistics.
    """
    function, operands = recorded.function, [value for value in recorded.arguments if isinstance(value, torch.Tensor)]
    if function is aten._scaled_dot_product_flash_attention_for_cpu.default and position == 1:
        return torch.float64 if operands[0].dtype == torch.float64 else torch.float32
    if function in _NORMS and position > 0 and dtype in (torch.bfloat16, torch.float16):
        is_mixed = any(operand.dtype == torch.float32 for operand in operands)
        return torch.float32 if is_mixed or (_has_gpu() and function is not aten.native_group_norm.default) else dtype
    return operands[1].dtype if function is aten.native_group_norm_backward.default and position == 0 else dtype


def only_splits(old: Sequence[int], new: Sequence[int]) -> bool:
    """True if a reshape only splits dimensions, which is a view in every memory layout.

    >>> only_splits((2, 6, 5), (2, 3, 2, 5)), only_splits((2, 3, 2, 5), (2, 6, 5))
    (True, False)
    """
    if 0 in old:
        return True  # no elements
    sizes = [size for size in new if size != 1][::-1]
    for extent in old:
        remaining = int(extent)
        while remaining != 1:
            if not sizes or remaining % sizes[-1]:
                return False
            remaining //= sizes.pop()
    return not sizes


def _slot_args(items: Any) -> list[SlotArg]:
    slots: list[SlotArg] = []
    for item in items:
        if isinstance(item, SlotArg):
            slots.append(item)
        elif isinstance(item, tuple):
            slots += _slot_args(item)
    return slots


class BitwiseKey:
    """Hashable wrapper of arguments that distinguishes equal values of different types and signs.

    In Python ``1 == 1.0 == True`` and ``0.0 == -0.0``, but operators give different results for each.
    """

    def __init__(self, value: Any) -> None:
        self.value, self._key = value, self._exact_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BitwiseKey) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @classmethod
    def _exact_key(cls, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(cls._exact_key, value))
        return exact_key(value)


@lru_cache(maxsize=512)
def trace_pointwise(target: str, arguments: BitwiseKey, keywords: BitwiseKey, dtype: torch.dtype, default: torch.dtype) -> JointTrace:
    """The cached trace of a function of one element, on a tensor of :data:`TINY_SHAPE`.

    Args:
        target: the ATen overload.
        arguments: positional arguments after the tensor.
        keywords: keyword arguments as pairs.
        dtype: element type of the tensor.
        default: the default element type, on which results may depend.
    """
    overload = resolve_target(target)
    return trace_joint(lambda x: overload(x, *arguments.value, **dict(keywords.value)), [ArgumentSpec(TINY_SHAPE, dtype, True)])


@lru_cache(maxsize=4096)
def trace_whole(
    target: str,
    arguments: BitwiseKey,
    operands: tuple[tuple[str, ArgumentSpec], ...],
    default: torch.dtype,
) -> JointTrace:
    """The cached trace of an operator on full tensors.

    Args:
        target: the ATen overload, or one of :data:`sft.lower.custom_ops.FUNCTIONS`.
        arguments: the node's arguments as pairs; tensors are references. ``result`` selects one of several results.
        operands: each referenced name and its tensor.
        default: the default element type, on which results may depend.
    """
    named_arguments = dict(arguments.value)
    result = named_arguments.pop("result", None)
    if target in FUNCTIONS:
        positional, keyword = [], list(named_arguments)
    else:
        schema = op_schema(resolve_target(target)).arguments
        positional = [a.name for a in schema if not a.kwarg_only and a.name in named_arguments]
        keyword = [a.name for a in schema if a.kwarg_only and a.name in named_arguments]
    callee = FUNCTIONS[target] if target in FUNCTIONS else resolve_target(target)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        by_name = {name: tensor for (name, _), tensor in zip(operands, tensors, strict=True)}
        values = {name: map_refs(value, by_name.__getitem__) for name, value in named_arguments.items()}
        output = callee(*(values[name] for name in positional), **{name: values[name] for name in keyword})
        out: torch.Tensor = output if result is None and isinstance(output, torch.Tensor) else output[result or 0]
        return out

    return trace_joint(function, [spec for _, spec in operands], by_shape=target in BY_SHAPE)
