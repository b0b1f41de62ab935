"""Traces: torch's own derivative of an operator, flattened to ATen calls.

Functions of one element (``gelu``, ``silu``, ...) have the same list of calls for every shape, so they are traced once
on a tiny tensor. Others are traced at the shapes that they run on; views among their calls are recognised by the storages of the
fake tensors. A reshape that merges dimensions is a view only for some layouts of the tensor, so it is always a copy here.

The trace runs forward and backward in one graph. Calls that do not depend on the gradient belong to the forward; a program that
only wants the forward drops the ones that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.analysis.frontend.module_state import exact_key
from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.frontend.trace_context import without_autograd_debugging
from sft.analysis.ir.graph import map_refs
from sft.common.errors import InternalError
from sft.common.torch_internals import OpOverload, op_schema, storage_id
from sft.lower.custom_ops import BY_SHAPE, FUNCTIONS
from sft.lower.op_recorder import OpRecording, RecordedOp, record_ops
from sft.lower.program import DEVICE

__all__ = [
    "TINY_SHAPE",
    "BitwiseKey",
    "JointTrace",
    "SlotArg",
    "TracedCall",
    "TracedResult",
    "resolve_target",
    "trace_pointwise",
    "trace_whole",
]

aten = torch.ops.aten

TINY_SHAPE = (2, 3, 4, 5)
#: Reshapes that trust the layout of the tensor they were traced with; ours may have another.
_VIEW_OPS = frozenset({aten.view.default, aten._unsafe_view.default})
#: Calls whose result is their operand.
_ALIAS_OPS = frozenset({aten.detach.default, aten.alias.default})


def _with_exact_storage(overload: Any) -> Callable[..., torch.Tensor]:
    def made(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out: torch.Tensor = overload(self, *arguments, out=self.new_empty(0))
        return out

    return made


#: Operators that resize a tensor as large as their operand, and leave it the room where the result is smaller.
_OVERALLOCATING_OPS = {aten.im2col.default: _with_exact_storage(aten.im2col.out), aten.col2im.default: _with_exact_storage(aten.col2im.out)}

#: Results of which ATen makes one element more than the result has, which keeps its room: the bag that each index is in.
_PADDED_RESULTS = frozenset((overload.default, 1) for overload in (aten._embedding_bag, aten._embedding_bag_forward_only))


def resolve_target(target: str) -> Any:
    """The ATen overload named in a node.

    >>> resolve_target("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True, slots=True)
class TracedResult:
    """A tensor that a call makes: its index among the trace's values, and the value whose storage it shares."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    view_of: int | None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a trace; tensors stand as indices into the trace's values. ``None`` is a result that nobody reads."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[TracedResult | None, ...]
    has_many: bool


@dataclass(frozen=True, slots=True)
class SlotArg:
    index: int


@dataclass(frozen=True, slots=True)
class JointTrace:
    """A flat joint function: inputs then gradient -> output, gradients of the inputs that need one."""

    forward: tuple[TracedCall, ...]
    backward: tuple[TracedCall, ...]
    num_inputs: int
    result: int
    gradients: tuple[int | None, ...]


def _trace_joint(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    needs_grad: Sequence[bool],
    *,
    by_shape: bool = False,
) -> JointTrace:
    # The caller's modes may be on, and a trace is kept for later calls.
    with torch.inference_mode(False), without_autograd_debugging(), _math_kernels_for_gpu():
        return _TraceBuilder(record_ops(function, shapes, dtypes, needs_grad, by_shape=by_shape)).trace()


@contextmanager
def _math_kernels_for_gpu() -> Iterator[None]:
    """Where there is a GPU, attention and LSTMs are traced as what they consist of: one call would be the CPU's, which GPUs lack."""
    if not _has_gpu():
        yield
        return
    with apply_patches("onednn"), sdpa_kernel(SDPBackend.MATH):
        yield


def _has_gpu() -> bool:
    return torch.cuda.is_available()


class _TraceBuilder:
    """Turns what was recorded into a trace: tensors become numbers, and calls that nobody needs are left out."""

    def __init__(self, recording: OpRecording) -> None:
        self._recording = recording
        self._index: dict[int, int] = {}  # the number of each tensor, by its identity: the recording keeps all of them alive
        self._roots: list[int] = []  # of each number the one whose storage it shares
        self._transposed: dict[int, int] = {}  # of what a transposition made that which it transposed
        for tensor in (*recording.inputs, recording.grad):
            self._new(tensor, None)

    def trace(self) -> JointTrace:
        """The trace."""
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
                from_grad.update(made.index for made in call.results if made is not None)
                backward.append(call)
        return JointTrace(tuple(forward), tuple(backward), num_inputs, result, gradients)

    def _new(self, tensor: torch.Tensor, shared: int | None) -> int:
        number = self._index[id(tensor)] = len(self._roots)
        self._roots.append(number if shared is None else shared)
        return number

    def _call(self, recorded: RecordedOp) -> TracedCall | None:
        """A call; ``None`` where its result is its operand."""
        target = recorded.function
        arguments = tuple(map(self._converted, recorded.arguments))
        if target in _ALIAS_OPS:
            self._index[id(recorded.made)] = arguments[0].index
            return None
        if target is aten.t.default and arguments[0].index in self._transposed:  # twice, as gradients of products are: as it was
            self._index[id(recorded.made)] = self._transposed[arguments[0].index]
            return None
        keywords = tuple((key, self._converted(item)) for key, item in recorded.keywords.items())
        if target in _VIEW_OPS and not _only_splits(recorded.first_argument_shape, recorded.result_shapes[0]):
            target = aten._reshape_copy.default
        storages = {} if target is aten._reshape_copy.default else self._storages(recorded)
        results: list[TracedResult | None] = []
        for position, (tensor, shape) in enumerate(zip(recorded.listed, recorded.result_shapes, strict=True)):
            if tensor is None:
                results.append(None)
                continue
            if (target, position) in _PADDED_RESULTS:
                shape = (shape[0] + 1,)
            shared = storages.get(storage_id(tensor))
            results.append(TracedResult(self._new(tensor, shared), shape, tensor.dtype, shared))
        if target is aten.t.default and results[0] is not None:
            self._transposed[results[0].index] = arguments[0].index
        target, has_many = _OVERALLOCATING_OPS.get(target, target), recorded.has_many
        if has_many and len(results) == 1:  # a list of one tensor, as of `unbind`
            target, has_many = _unwrap_single(target), False
        return TracedCall(target, arguments, keywords, tuple(results), has_many)

    def _storages(self, recorded: RecordedOp) -> dict[int, int]:
        """The values that own the storages of a call's operands, by storage."""
        found: dict[int, int] = {}
        for tensor in _tensors((*recorded.arguments, *recorded.keywords.values())):
            found.setdefault(storage_id(tensor), self._roots[self._index[id(tensor)]])
        return found

    def _converted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._index.get(id(value))
            if number is None:
                raise InternalError("an operator reads a tensor that is neither its operand nor made by one of its calls")
            return SlotArg(number)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._converted, value))
        return DEVICE if isinstance(value, torch.device) else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _live_calls(calls: Sequence[TracedCall], wanted: set[int]) -> list[TracedCall]:
    """The calls that make what is wanted, that write into their operands, or make nothing: these are checks.

    Of calls that make several tensors those are left out that nobody wants.
    """
    kept = []
    for call in reversed(calls):
        made = [result is not None and result.index in wanted for result in call.results]
        if any(made) or not made or (isinstance(call.function, OpOverload) and op_schema(call.function).is_mutable):
            results = tuple(r if is_wanted else None for r, is_wanted in zip(call.results, made, strict=True))
            kept.append(replace(call, results=results) if call.has_many else call)
            wanted.update(_operand_indices(call))
    return kept[::-1]


def _operand_indices(call: TracedCall) -> set[int]:
    return {value.index for value in _slot_args((*call.arguments, *(item for _, item in call.keywords)))}


@lru_cache(maxsize=32)
def _unwrap_single(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """A function that makes a list of one tensor, as one that makes the tensor."""

    def made(*arguments: Any, **keywords: Any) -> torch.Tensor:
        (found,) = function(*arguments, **keywords)
        return found

    return made


def _only_splits(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a reshape only splits dimensions, which is a view however the tensor is laid out.

    >>> _only_splits((2, 6, 5), (2, 3, 2, 5)), _only_splits((2, 3, 2, 5), (2, 6, 5))
    (True, False)
    """
    if 0 in old:
        return True  # there is nothing to lay out
    sizes = [size for size in new if size != 1][::-1]
    for extent in old:
        rest = int(extent)
        while rest != 1:
            if not sizes or rest % sizes[-1]:
                return False
            rest //= sizes.pop()
    return not sizes


def _slot_args(items: Any) -> list[SlotArg]:
    found: list[SlotArg] = []
    for item in items:
        if isinstance(item, SlotArg):
            found.append(item)
        elif isinstance(item, tuple):
            found += _slot_args(item)
    return found


class BitwiseKey:
    """Arguments as they are: 1, 1.0 and True are equal, and so are 0.0 and -0.0, but operators make something else of each."""

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
    overload = resolve_target(target)
    return _trace_joint(lambda x: overload(x, *arguments.value, **dict(keywords.value)), [TINY_SHAPE], [dtype], [True])


@lru_cache(maxsize=1024)
def trace_whole(
    target: str,
    arguments: BitwiseKey,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    needs_grad: tuple[bool, ...],
    default: torch.dtype,
) -> JointTrace:
    given = dict(arguments.value)
    result = given.pop("result", None)
    if target in FUNCTIONS:
        positional, keyword = [], list(given)
    else:
        schema = op_schema(resolve_target(target)).arguments
        positional = [a.name for a in schema if not a.kwarg_only and a.name in given]
        keyword = [a.name for a in schema if a.kwarg_only and a.name in given]
    callee = FUNCTIONS[target] if target in FUNCTIONS else resolve_target(target)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        by_name = dict(zip(names, tensors, strict=True))
        filled = {name: map_refs(value, by_name.__getitem__) for name, value in given.items()}
        made = callee(*(filled[name] for name in positional), **{name: filled[name] for name in keyword})
        out: torch.Tensor = made if result is None and isinstance(made, torch.Tensor) else made[result or 0]
        return out

    return _trace_joint(function, shapes, dtypes, needs_grad, by_shape=target in BY_SHAPE)
