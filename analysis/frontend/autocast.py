"""Casts of autocast: its policy for single operators, and its effect inside composite functions.

*Operators.* Under autocast an operator with an autocast kernel casts its operands first. PyTorch does not publish the policy, and it
differs between devices and releases. So it is probed: :class:`AutocastPolicy` runs the operator on fake tensors while a dispatch mode below
autocast records casts. The policy depends on dtypes and devices alone, so one probe serves all calls with such operands.

*Composite functions.* The exporter keeps an interpolation or a cross-entropy whole and finds the dtype of its result without autocast. On
GPUs, autocast has a kernel for the operator inside and runs it in single precision; values downstream would be captured in another dtype
than eager PyTorch's. :func:`autocast_composites` casts the inputs of such functions first; probes on fake tensors of the device tell which
functions these are. It also casts operands of an ``einsum``, a matrix product inside, to one dtype.
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

#: Operators whose result is a view of their operand with the same elements.
_VIEWS = frozenset({aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten.squeeze.dim})

#: Index of an operand among all tensors of a call, and the dtype that it is cast to; in the order of the casts.
OperandCast = tuple[int, torch.dtype]


class AutocastPolicy:
    """The casts of autocast on one kind of device.

    Args:
        device_type: ``"cpu"``, ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: dict[tuple[Any, ...], tuple[OperandCast, ...] | None] = {}

    def of(self, node: fx.Node, *, looks_inside: bool = False) -> tuple[OperandCast, ...] | None:
        """The casts before an operator; ``None`` where autocast also changes it in other ways.

        Args:
            node: the operator.
            looks_inside: true for a composite operator, since autocast may have a kernel for an operator inside.
        """
        target = node.target
        if not isinstance(target, OpOverload):
            return ()
        if not looks_inside and not has_autocast_kernel(target, self._device_type):
            return ()
        operands = [operand.meta["val"] for operand in tensor_operands(node)]
        dtypes = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
        key = (target, *((operand.dtype, operand.device.type) for operand in operands), *dtypes)
        if key not in self._known:
            try:
                self._known[key] = _probe_casts(target, node)
            except (RuntimeError, TypeError):  # a size without a hint, or autocast refuses the operator: decomposition raises the error
                self._known[key] = None
        return self._known[key]


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, with repetitions."""
    operands: list[fx.Node] = []

    def collect(value: Any) -> Any:
        if _is_tensor(value):
            operands.append(value)
        return value

    map_aggregate((node.args, dict(node.kwargs)), collect)
    return operands


def replace_tensor_operands(node: fx.Node, operands: Sequence[Any]) -> tuple[Any, Any]:
    """The positional and keyword arguments of a node, with its tensor operands replaced in order."""
    remaining = iter(operands)
    arguments: Any = map_aggregate((node.args, dict(node.kwargs)), lambda value: next(remaining) if _is_tensor(value) else value)
    return arguments[0], arguments[1]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _probe_casts(target: OpOverload, node: fx.Node) -> tuple[OperandCast, ...] | None:
    """The casts of a call with the dtypes and devices of a node; ``None`` where they do not explain the result dtypes."""
    values = [operand.meta["val"] for operand in tensor_operands(node)]
    with FakeTensorMode():
        # Distinct tensors, of the sizes at capture.
        operands = [torch.empty([_symbol_hint(extent) for extent in each.shape], dtype=each.dtype, device=each.device) for each in values]
        recorder = _CastRecorder(operands)
        with recorder:
            dtypes = _result_dtypes(target, node, operands)
        if recorder.is_unclear:
            return None
        # Autocast passes a dtype to some kernels instead of casting operands. Then results differ without autocast.
        for index, dtype in recorder.casts:
            operands[index] = operands[index].to(dtype)
        with torch.autocast(values[0].device.type, enabled=False):
            plain_dtypes = _result_dtypes(target, node, operands)
    return tuple(recorder.casts) if dtypes == plain_dtypes else None


def _result_dtypes(target: OpOverload, node: fx.Node, operands: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Result dtypes of an operator for other operands."""
    args, kwargs = map_aggregate(
        replace_tensor_operands(node, operands), lambda value: _symbol_hint(value.meta["val"]) if isinstance(value, fx.Node) else value
    )
    return [value.dtype for value in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(value, torch.Tensor)]


def _symbol_hint(extent: Any) -> Any:
    """The value of a symbol at export."""
    return extent.node.hint if isinstance(extent, (torch.SymInt, torch.SymFloat, torch.SymBool)) else extent


class _CastRecorder(TorchDispatchMode):
    """A dispatch mode that records casts of operands before the first other operator.

    Attributes:
        casts: casts so far.
        is_unclear: true after a cast of a tensor that is not an operand, or a cast that changes more than the dtype.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.casts: list[OperandCast] = []
        self.is_unclear = False
        self._index = {id(operand): index for index, operand in enumerate(operands)}
        self._views: list[Any] = []  # keeps ids from being reused
        self._has_begun = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and not self._has_begun:
            view = func(*args, **kwargs)
            if id(args[0]) in self._index:  # a cast of a view equals a view of a cast
                self._index[id(view)] = self._index[id(args[0])]
                self._views.append(view)
            return view
        if func is not aten._to_copy.default:
            self._has_begun |= func.namespace == "aten"  # other namespaces: queries of a fake tensor's device
        elif not self._has_begun:
            index = self._index.get(id(args[0]))
            options = {key: value for key, value in kwargs.items() if value is not None}
            if index is None or options.keys() != {"dtype"}:
                self.is_unclear = True
            else:
                self.casts.append((index, options["dtype"]))
        return func(*args, **kwargs)


_HALF_DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def autocast_composites(device: torch.device) -> Iterator[None]:
    """A context in which inputs of composite functions are cast as autocast casts inside of them; no change where autocast is off."""
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
    """Call a function on its input cast to single precision."""
    return function(input.float() if input.dtype in _HALF_DTYPES else input, *args, **kwargs)


def _einsum_in_one_dtype(
    function: Callable[..., Tensor], half: torch.dtype, equation: str, operands: Sequence[Tensor], **kwargs: Any
) -> Tensor:
    """Call ``einsum`` on operands cast to one dtype, where it is a product of two matrices of different dtypes."""
    dtypes, (shared, single) = {operand.dtype for operand in operands}, contracted_letters(equation)
    if len(operands) == 2 and len(dtypes) > 1 and dtypes <= {torch.float32, *_HALF_DTYPES} and shared and not single:
        operands = [operand.to(half) for operand in operands]
    return function(equation, operands, **kwargs)


def contracted_letters(equation: str) -> tuple[set[str], set[str]]:
    """Letters that an ``einsum`` sums over: those of several operands (matrix products), and those of a single operand.

    >>> contracted_letters("nchw, cd -> ndhw"), contracted_letters("nc,nc->nc"), contracted_letters("nc...,c")
    (({'c'}, set()), (set(), set()), ({'c'}, set()))
    """
    source, arrow, target = equation.replace(" ", "").replace("...", "").partition("->")
    operands, letters = source.split(","), set(source) - {","}
    kept = set(target) if arrow else {letter for letter in letters if source.count(letter) == 1}
    shared = {letter for letter in letters if sum(letter in operand for operand in operands) > 1}
    return (letters - kept) & shared, letters - kept - shared


@functools.lru_cache(maxsize=256)
def _runs_in_float32(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return true where autocast runs a composite function in single precision for an input of a half dtype."""
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
