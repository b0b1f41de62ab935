"""Which operands autocast casts, asked of PyTorch itself.

Under autocast an operator with a kernel for it casts operands first, by a policy that PyTorch does not publish: it differs between devices
and releases. The policy looks at element types and devices alone, so that one call tells it for all calls with such operands. It is made
on fake tensors, while a dispatch mode below autocast watches.

Functions whose inner operators autocast runs in another precision.

The exporter keeps an interpolation or a cross-entropy whole, and finds the type of its result without autocast; which on GPUs knows the
operator inside, and runs it in single precision. All that follows would be captured in another type than eager PyTorch's. So such functions
are given what autocast would make of their input. Which they are PyTorch is asked, on fake tensors of that device. In the same way the
operands of an ``einsum`` are brought together, which is a product of matrices inside.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from sft.analysis.frontend.torch_patches import COMPOSITE_FUNCTIONS, apply_patches
from sft.common.torch_internals import FakeTensorMode, OpOverload, TorchDispatchMode, disable_current_modes, has_autocast_kernel, pytree

__all__ = ["AutocastPolicy", "OperandCast", "autocast_composites", "contracted_letters", "replace_tensor_operands", "tensor_operands"]

aten = torch.ops.aten

#: Other names of an operand, of the same numbers.
_VIEWS = frozenset({aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten.squeeze.dim})

#: The operand at a place among all tensors of a call, and the type that it is cast to; in the order in which this happens.
OperandCast = tuple[int, torch.dtype]


class AutocastPolicy:
    """What autocast does on one device, while it is on.

    Args:
        device_type: ``"cpu"``, ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: dict[tuple[Any, ...], tuple[OperandCast, ...] | None] = {}

    def of(self, node: fx.Node, *, looks_inside: bool = False) -> tuple[OperandCast, ...] | None:
        """The casts before an operator; ``None`` where they are not all that autocast changes.

        Args:
            node: the operator.
            looks_inside: whether it is made of others, of which autocast may know one.
        """
        target = node.target
        if not isinstance(target, OpOverload):
            return ()
        if not looks_inside and not has_autocast_kernel(target, self._device_type):
            return ()
        operands = [operand.meta["val"] for operand in tensor_operands(node)]
        told = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
        key = (target, *((operand.dtype, operand.device.type) for operand in operands), *told)
        if key not in self._known:
            try:
                self._known[key] = _probe_casts(target, node)
            except (RuntimeError, TypeError):  # no size is at hand, or autocast refuses the operator: the long way says it
                self._known[key] = None
        return self._known[key]


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that are tensors, with repetitions."""
    found: list[fx.Node] = []

    def note(value: Any) -> Any:
        if _is_tensor(value):
            found.append(value)
        return value

    map_aggregate((node.args, dict(node.kwargs)), note)
    return found


def replace_tensor_operands(node: fx.Node, operands: Sequence[Any]) -> tuple[Any, Any]:
    """The positional and keyword arguments with other operands in the place of those."""
    left = iter(operands)
    found: Any = map_aggregate((node.args, dict(node.kwargs)), lambda value: next(left) if _is_tensor(value) else value)
    return found[0], found[1]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _probe_casts(target: OpOverload, node: fx.Node) -> tuple[OperandCast, ...] | None:
    """The casts of a call like that of a node."""
    seen = [operand.meta["val"] for operand in tensor_operands(node)]
    with FakeTensorMode():
        # Tensors that are at no other place, of the sizes at hand.
        operands = [torch.empty([_symbol_hint(extent) for extent in each.shape], dtype=each.dtype, device=each.device) for each in seen]
        watch = _CastRecorder(operands)
        with watch:
            found = _result_dtypes(target, node, operands)
        if watch.is_unclear:
            return None
        # What has been seen must be all: some kernels are told a type instead, which shows in what they return without being told.
        for place, dtype in watch.casts:
            operands[place] = operands[place].to(dtype)
        with torch.autocast(seen[0].device.type, enabled=False):
            plain = _result_dtypes(target, node, operands)
    return tuple(watch.casts) if found == plain else None


def _result_dtypes(target: OpOverload, node: fx.Node, operands: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """The types of what an operator makes of other operands."""
    args, kwargs = map_aggregate(
        replace_tensor_operands(node, operands), lambda value: _symbol_hint(value.meta["val"]) if isinstance(value, fx.Node) else value
    )
    return [value.dtype for value in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(value, torch.Tensor)]


def _symbol_hint(extent: Any) -> Any:
    """The number that a symbol stood for while the program was exported."""
    return extent.node.hint if isinstance(extent, (torch.SymInt, torch.SymFloat, torch.SymBool)) else extent


class _CastRecorder(TorchDispatchMode):
    """Notes which operands are cast before anything else happens.

    Attributes:
        casts: so far.
        is_unclear: whether something was cast that is no operand, or in another way than to a type alone.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.casts: list[OperandCast] = []
        self.is_unclear = False
        self._place = {id(operand): place for place, operand in enumerate(operands)}
        self._views: list[Any] = []  # held, so that no other tensor gets the identity of one
        self._has_begun = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and not self._has_begun:
            found = func(*args, **kwargs)
            if id(args[0]) in self._place:  # a cast of a view is a view of a cast
                self._place[id(found)] = self._place[id(args[0])]
                self._views.append(found)
            return found
        if func is not aten._to_copy.default:
            self._has_begun |= func.namespace == "aten"  # fake tensors are asked for their device, too
        elif not self._has_begun:
            place = self._place.get(id(args[0]))
            given = {key: value for key, value in kwargs.items() if value is not None}
            if place is None or given.keys() != {"dtype"}:
                self.is_unclear = True
            else:
                self.casts.append((place, given["dtype"]))
        return func(*args, **kwargs)


_HALF_DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def autocast_composites(device: torch.device) -> Iterator[None]:
    """A context in which the inputs of such functions are cast as autocast would inside of them; nothing where it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    # Probed before the export: during it these functions are kept whole for probes, too.
    replacements: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
        name: lambda function: functools.partial(_call_in_float32, function)
        for name in COMPOSITE_FUNCTIONS
        if _runs_in_float32(name, dtype, device)
    }
    replacements["einsum"] = lambda function: functools.partial(_einsum_in_one_dtype, function, dtype)
    with apply_patches(replacements=replacements):
        yield


def _call_in_float32(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function on an input in single precision."""
    return function(input.float() if input.dtype in _HALF_DTYPES else input, *args, **kwargs)


def _einsum_in_one_dtype(
    function: Callable[..., Tensor], half: torch.dtype, equation: str, operands: Sequence[Tensor], **kwargs: Any
) -> Tensor:
    """Call ``einsum`` on operands of one type, where it multiplies two matrices of different ones."""
    given, (shared, alone) = {operand.dtype for operand in operands}, contracted_letters(equation)
    if len(operands) == 2 and len(given) > 1 and given <= {torch.float32, *_HALF_DTYPES} and shared and not alone:
        operands = [operand.to(half) for operand in operands]
    return function(equation, operands, **kwargs)


def contracted_letters(equation: str) -> tuple[set[str], set[str]]:
    """Letters that an ``einsum`` sums over: those of several operands, for which it multiplies matrices, and those of one.

    >>> contracted_letters("nchw, cd -> ndhw"), contracted_letters("nc,nc->nc"), contracted_letters("nc...,c")
    (({'c'}, set()), (set(), set()), ({'c'}, set()))
    """
    before, arrow, after = equation.replace(" ", "").replace("...", "").partition("->")
    operands, letters = before.split(","), set(before) - {","}
    kept = set(after) if arrow else {letter for letter in letters if before.count(letter) == 1}
    shared = {letter for letter in letters if sum(letter in operand for operand in operands) > 1}
    return (letters - kept) & shared, letters - kept - shared


@functools.lru_cache(maxsize=256)
def _runs_in_float32(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast runs a function in single precision although its input is of a half type."""
    sizes = re.findall(r"(\d)d", name)
    num_axes = int(sizes[0]) if sizes else 2
    with disable_current_modes(), FakeTensorMode(), torch.no_grad():
        value = torch.empty([4] * (2 + num_axes), dtype=dtype, device=device)
        if name == "cross_entropy_loss":
            arguments: tuple[Any, ...] = (torch.empty([4] * (1 + num_axes), dtype=torch.int64, device=device),)
        else:
            arguments = ([5] * num_axes, None) if "nearest" in name else ([5] * num_axes, False, None)
        with torch.autocast(device.type, dtype):
            return bool(COMPOSITE_FUNCTIONS[name](value, *arguments).dtype == torch.float32)
