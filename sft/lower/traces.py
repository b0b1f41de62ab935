"""Traces: torch's own derivative of an operator, flattened to ATen calls.

Functions of one element (``gelu``, ``silu``, ...) have the same list of calls for every shape, so they are traced once
on a tiny tensor. Others are traced at the shapes that they run on; views among their calls are recognised by the storages of the
fake tensors. A reshape that merges dimensions is a view only for some layouts of the tensor, so it is always a copy here.

The trace runs forward and backward in one graph. Calls that do not depend on the gradient belong to the forward; a program that
only wants the forward drops the ones that nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.analysis.attributes import told_apart
from sft.analysis.graph import map_refs
from sft.analysis.quiet import plain_autograd
from sft.errors import InternalError
from sft.lower.functions import FUNCTIONS
from sft.lower.program import DEVICE

__all__ = ["TINY", "Call", "Exactly", "Placed", "Result", "Trace", "resolve_target", "trace_pointwise", "trace_whole"]

aten = torch.ops.aten

TINY = (2, 3, 4, 5)
#: Reshapes that trust the layout of the tensor they were traced with; ours may have another.
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def _in_own_bytes(overload: Any) -> Callable[..., torch.Tensor]:
    def made(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out: torch.Tensor = overload(self, *arguments, out=self.new_empty(0))
        return out

    return made


#: Operators that resize a tensor as large as their operand, and leave it the room where the result is smaller.
_ROOMY = {aten.im2col.default: _in_own_bytes(aten.im2col.out), aten.col2im.default: _in_own_bytes(aten.col2im.out)}

#: Results of which ATen makes one element more than the result has, which keeps its room: the bag that each index is in.
_ONE_MORE = frozenset((overload.default, 1) for overload in (aten._embedding_bag, aten._embedding_bag_forward_only))


def resolve_target(target: str) -> Any:
    """The ATen overload named in a node.

    >>> resolve_target("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call makes: its index among the trace's values, and the value whose storage it shares."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    view_of: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a trace; tensors stand as indices into the trace's values. ``None`` is a result that nobody reads."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Result | None, ...]
    has_many: bool


@dataclass(frozen=True, slots=True)
class Placed:
    index: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A flat joint function: inputs then gradient -> output, gradients of the inputs that need one."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    num_inputs: int
    result: int
    gradients: tuple[int | None, ...]


def _trace(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    needs_grad: Sequence[bool],
) -> Trace:
    # The caller's modes may be on, and a trace is kept for later calls.
    with torch.inference_mode(False), plain_autograd(), _for_gpus():
        return _traced(function, shapes, dtypes, needs_grad)


@contextmanager
def _for_gpus() -> Iterator[None]:
    """Where there is a GPU, attention and LSTMs are traced as what they consist of: one call would be the CPU's, which GPUs lack."""
    if not _has_gpu():
        yield
        return
    is_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags also sets what other devices than the CPU warn of
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(is_enabled)


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _traced(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    needs_grad: Sequence[bool],
) -> Trace:
    needs_grad = [need and (dtype.is_floating_point or dtype.is_complex) for need, dtype in zip(needs_grad, dtypes, strict=True)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [torch.empty(s, dtype=d, device="cpu").requires_grad_(n) for s, d, n in zip(shapes, dtypes, needs_grad, strict=True)]
        with torch.no_grad():
            sample = function(*inputs)

    def joint(*args: torch.Tensor) -> list[torch.Tensor | None]:
        *values, grad = args
        leaves = [value.detach().requires_grad_(need) for value, need in zip(values, needs_grad, strict=True)]
        with torch.enable_grad():
            out = function(*leaves)
        wanted = [leaf for leaf, need in zip(leaves, needs_grad, strict=True) if need]
        # Whole numbers have no gradient, and what is cut off from its operands has none either.
        is_attached = bool(wanted) and out.requires_grad
        grads = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True) if is_attached else [None] * len(wanted))
        return [out.detach(), *(next(grads) if need else None for need in needs_grad)]

    with mode:
        grad = torch.empty_like(sample)
        traced = make_fx(joint)(*(value.detach() for value in inputs), grad)
    return _flatten(traced, len(inputs))


def _flatten(module: torch.fx.GraphModule, num_inputs: int) -> Trace:
    index: dict[torch.fx.Node, int] = {}
    alias: dict[torch.fx.Node, torch.fx.Node] = {}
    roots: dict[int, int] = {}  # value -> the one whose storage it shares
    from_grad: set[int] = set()
    forward: list[Call] = []
    backward: list[Call] = []
    result: list[Any] = []
    placeholders = 0

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Placed(index[alias.get(value, value)])
        if isinstance(value, (list, tuple)):
            return tuple(convert(item) for item in value)
        return DEVICE if isinstance(value, torch.device) else value

    def root_in(node: torch.fx.Node, storage: int) -> int | None:
        """The value whose storage a result shares with one of the call's arguments."""
        for argument in node.all_input_nodes:
            found = alias.get(argument, argument)
            value = found.meta["val"]
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
                return roots[index[found]]
        return None

    for node in module.graph.nodes:
        if node.op == "placeholder":
            index[node] = placeholders
            roots[placeholders] = placeholders
            if placeholders == num_inputs:
                from_grad.add(placeholders)
            placeholders += 1
        elif node.op == "output":
            # A call may have no such result: the gradient of an operand that needs none.
            result = [None if item is None else index.get(alias.get(item, item)) for item in node.args[0]]
        elif node.op == "call_function":
            if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                alias[node] = alias.get(node.args[0], node.args[0])
                continue
            if node.target is operator.getitem:
                continue  # numbered with the call that it belongs to
            value, target = node.meta.get("val"), node.target  # a check, as of a matrix for being singular, returns nothing
            if target in _VIEWS and not _only_splits(node.args[0].meta["val"].shape, value.shape):
                target = aten._reshape_copy.default
            target = _ROOMY.get(target, target)
            has_many = isinstance(value, (tuple, list))
            made = {user.args[1]: user for user in node.users} if has_many else {0: node}
            results: list[Result | None] = []
            for position, tensor in enumerate(value if has_many else () if value is None else (value,)):
                if position not in made or tensor is None:
                    results.append(None)
                    continue
                number = len(index)
                index[made[position]] = number
                storage = tensor.untyped_storage()._cdata
                shared = None if target is aten._reshape_copy.default else root_in(node, storage)
                roots[number] = number if shared is None else shared
                shape = tuple(tensor.shape)
                if (node.target, position) in _ONE_MORE:
                    shape = (shape[0] + 1,)
                results.append(Result(number, shape, tensor.dtype, shared))
            arguments = tuple(convert(arg) for arg in node.args)
            keywords = tuple((key, convert(item)) for key, item in node.kwargs.items())
            if len(results) == 1:  # a list of one tensor, as of `unbind`
                target, has_many = _only(target) if has_many else target, False
            call = Call(target, arguments, keywords, tuple(results), has_many)
            reads = {v.index for v in _values((*arguments, *(item for _, item in keywords)))}
            if reads & from_grad:
                from_grad.update(r.index for r in results if r is not None)
                backward.append(call)
            else:
                forward.append(call)
        else:
            raise InternalError(f"the trace of an operator holds a {node.op} node: {node}")
    return Trace(tuple(forward), tuple(backward), num_inputs, result[0], tuple(result[1:]))


@lru_cache(maxsize=32)
def _only(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., torch.Tensor]:
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


def _values(items: Any) -> list[Placed]:
    found: list[Placed] = []
    for item in items:
        if isinstance(item, Placed):
            found.append(item)
        elif isinstance(item, tuple):
            found += _values(item)
    return found


class Exactly:
    """Arguments as they are: 1, 1.0 and True are equal, and so are 0.0 and -0.0, but operators make something else of each."""

    def __init__(self, value: Any) -> None:
        self.value, self._key = value, self._told_apart(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @classmethod
    def _told_apart(cls, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(cls._told_apart, value))
        return told_apart(value)


@lru_cache(maxsize=512)
def trace_pointwise(target: str, arguments: Exactly, keywords: Exactly, dtype: torch.dtype, default: torch.dtype) -> Trace:
    overload = resolve_target(target)
    return _trace(lambda x: overload(x, *arguments.value, **dict(keywords.value)), [TINY], [dtype], [True])


@lru_cache(maxsize=1024)
def trace_whole(
    target: str,
    arguments: Exactly,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    needs_grad: tuple[bool, ...],
    default: torch.dtype,
) -> Trace:
    given = dict(arguments.value)
    result = given.pop("result", None)
    if target in FUNCTIONS:
        positional, keyword = [], list(given)
    else:
        schema = resolve_target(target)._schema.arguments
        positional = [a.name for a in schema if not a.kwarg_only and a.name in given]
        keyword = [a.name for a in schema if a.kwarg_only and a.name in given]
    callee = FUNCTIONS[target] if target in FUNCTIONS else resolve_target(target)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        by_name = dict(zip(names, tensors, strict=True))
        filled = {name: map_refs(value, by_name.__getitem__) for name, value in given.items()}
        made = callee(*(filled[name] for name in positional), **{name: filled[name] for name in keyword})
        out: torch.Tensor = made if result is None and isinstance(made, torch.Tensor) else made[result or 0]
        return out

    return _trace(function, shapes, dtypes, needs_grad)
