"""Casts of autocast: its policy for single operators, and its effect inside composite functions.

*Operators.* Under autocast an operator with an autocast kernel casts its operands first. PyTorch does not publish the policy, and it
differs between devices and releases. So it is probed: :class:`AutocastPolicy` runs the operator on fake tensors while a dispatch mode below
autocast records casts. The policy depends on dtypes and devices alone, so one probe serves all calls with such operands.

*Composite functions.* The exporter keeps an interpolation or a cross-entropy whole and finds the dtype of its result without autocast. On
GPUs, autocast has a kernel for the operator inside and runs it in single precision; values downstream would be captured in another dtype
than eager PyTorch's. :func:`autocast_composites` casts the inputs of such functions first; probes on fake tensors of the device tell which
functions these are. It also makes the products inside an ``einsum`` one by one, and casts the operands of recurrent layers to one dtype.
"""

from __future__ import annotations

import contextlib
import functools
import re
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from sft.analysis.frontend.torch_patches import COMPOSITE_FUNCTIONS, RECURRENT_FUNCTIONS, apply_patches
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
        key = (target, looks_inside, *((operand.dtype, operand.device.type) for operand in operands), *dtypes)
        if key not in self._known:
            try:
                self._known[key] = _probe_casts(target, node, looks_inside=looks_inside)
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


def _probe_casts(target: OpOverload, node: fx.Node, *, looks_inside: bool) -> tuple[OperandCast, ...] | None:
    """The casts of a call with the dtypes and devices of a node; ``None`` where they do not explain the result dtypes.

    Casts between the operators inside of a composite one are unclear as well.
    """
    values = [operand.meta["val"] for operand in tensor_operands(node)]
    with FakeTensorMode():
        # Distinct tensors, of the sizes at capture.
        operands = [torch.empty([_symbol_hint(extent) for extent in each.shape], dtype=each.dtype, device=each.device) for each in values]
        recorder = _CastRecorder(operands)
        with recorder:
            dtypes = _result_dtypes(target, node, operands)
        if recorder.is_unclear or (looks_inside and recorder.casts_later):
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
        casts_later: true after a cast that follows another operator.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.casts: list[OperandCast] = []
        self.is_unclear = self.casts_later = False
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
        else:
            self.casts_later = True
        return func(*args, **kwargs)


_HALF_DTYPES = (torch.bfloat16, torch.float16)
_CAST_DTYPES = frozenset((torch.float32, *_HALF_DTYPES))


@contextlib.contextmanager
def autocast_composites(device: torch.device) -> Iterator[None]:
    """A context in which inputs of composite functions are cast as autocast casts inside of them."""
    if not torch.amp.is_autocast_available(device.type):
        yield
        return
    # Probed before the export: during it these functions are kept whole for probes, too, and oneDNN is off.
    replacements: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        for name in COMPOSITE_FUNCTIONS:
            if _runs_in_float32(name, dtype, device):
                replacements[name] = lambda function: functools.partial(_call_in_float32, function)
    # `forward` may switch autocast itself: these two kinds look at each call.
    fused_lstms = frozenset(
        _HALF_DTYPES if device.type != "cpu" else (each for each in _HALF_DTYPES if _has_half_lstm(each, torch.backends.mkldnn.enabled))
    )
    replacements["einsum"] = lambda function: functools.partial(_einsum, function, device.type)
    for name in RECURRENT_FUNCTIONS:
        fused = fused_lstms if name == "lstm" else frozenset(_HALF_DTYPES if device.type != "cpu" or name.startswith("rnn") else ())
        replacements[name] = functools.partial(_bind_recurrent, device.type, fused)
    with apply_patches(replacements=replacements):
        yield


def _call_in_float32(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function on its input cast to single precision."""
    return function(input.float() if input.dtype in _HALF_DTYPES else input, *args, **kwargs)


# -- einsum ----------------------------------------------------------------------------------------------------------


def _einsum(
    function: Callable[..., Tensor], device_type: str, equation: str, operands: Sequence[Tensor], path: Sequence[int] | None = None
) -> Tensor:
    """Call ``einsum``, under autocast by products of two operands with casts; operands that autocast does not cast are left to PyTorch."""
    terms = equation.partition("->")[0].split(",")
    is_cast = torch.is_autocast_enabled(device_type) and {each.dtype for each in operands} <= _CAST_DTYPES
    if is_cast and len(terms) == len(operands) > 1:
        return _einsum_by_pairs(function, torch.get_autocast_dtype(device_type), equation, operands, path or ())
    return function(equation, operands) if path is None else function(equation, operands, path=path)


def _einsum_by_pairs(
    function: Callable[..., Tensor], half: torch.dtype, equation: str, operands: Sequence[Tensor], path: Sequence[int]
) -> Tensor:
    """``einsum`` as products of two operands, in the order of a path of PyTorch's, or from the first operand to the last."""
    source, target = _with_letters(equation, [operand.dim() for operand in operands])
    plain = [_diagonal(term, operand) for term, operand in zip(source, operands, strict=True)]
    terms, tensors = [term for term, _ in plain], [tensor for _, tensor in plain]
    order = iter(path)
    while len(tensors) > 1:
        first, second = (next(order), next(order)) if path else (0, 1)
        pair = [(terms[index], tensors[index]) for index in sorted((first, second))]
        for index in sorted((first, second), reverse=True):
            del terms[index], tensors[index]
        kept = set(target).union(*terms)
        term = target if not terms else "".join(sorted(kept & set(pair[0][0] + pair[1][0])))
        position = len(terms) if path else 0
        terms.insert(position, term)
        tensors.insert(position, _product(function, half, pair, kept, term))
    return tensors[0]


def _with_letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Letters of each operand of an equation, and of its result, with letters in place of ellipses.

    >>> _with_letters("n...c, cd", [4, 2])
    (['nabc', 'cd'], 'abdn')
    """
    source, arrow, target = equation.replace(" ", "").partition("->")
    free = "".join(letter for letter in string.ascii_letters if letter not in equation)
    terms = source.split(",")
    sizes = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    letters = free[: max(sizes)]
    terms = [term.replace("...", letters[len(letters) - size :]) for term, size in zip(terms, sizes, strict=True)]
    if not arrow:
        target = "..." + "".join(sorted(letter for letter in set(source) - set(".,") if source.count(letter) == 1))
    return terms, target.replace("...", letters)


def _diagonal(term: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The diagonal of an operand along each letter that it has twice."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            tensor = tensor.diagonal(0, first, second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return term, tensor


def _product(function: Callable[..., Tensor], half: torch.dtype, pair: Sequence[tuple[str, Tensor]], kept: set[str], term: str) -> Tensor:
    """The product of two operands of ``einsum``, each with its letters. Letters of one operand alone are summed first, as PyTorch does."""
    first, second = (dict(zip(source, tensor.shape, strict=True)) for source, tensor in pair)
    shared = {letter for letter in first.keys() & second.keys() if first[letter] != 1 and second[letter] != 1}
    letters, tensors = [], []
    for source, tensor in pair:
        alone = [dim for dim, letter in enumerate(source) if letter not in shared | kept]
        letters.append("".join(letter for dim, letter in enumerate(source) if dim not in alone))
        tensors.append(tensor.sum(alone) if alone else tensor)
    if shared - kept:  # a product of matrices; without a sum it is one of elements, which has the wider dtype
        tensors = [tensor.to(half) for tensor in tensors]
    return function(f"{letters[0]},{letters[1]}->{term}", tensors)


# -- recurrent layers ------------------------------------------------------------------------------------------------


def _bind_recurrent(device_type: str, fused: Collection[torch.dtype], function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_recur_in_one_dtype, function, device_type, fused)


def _recur_in_one_dtype(function: Callable[..., Any], device_type: str, fused: Collection[torch.dtype], *arguments: Any) -> Any:
    """Call a recurrent layer on input, states and weights cast to one dtype, that of its results in eager PyTorch.

    A kernel of the whole layer casts everything. A layer of single operators casts the operands of its products alone; its results have
    the dtype of the state that is not one of these (of an LSTM the cell, of a GRU the hidden state; an RNN has none).

    Args:
        function: ``torch.lstm``, ``torch.gru``, ...
        device_type: kind of device.
        fused: dtypes of autocast for which the layer casts everything.
        arguments: input, sizes of a packed batch if it is one, states, weights, and options.
    """
    if not torch.is_autocast_enabled(device_type):
        return function(*arguments)
    half = torch.get_autocast_dtype(device_type)
    states = next(value for value in arguments[1:] if not isinstance(value, Tensor) or value.is_floating_point())
    state = states if isinstance(states, Tensor) else states[-1]
    tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, Tensor) and value.is_floating_point()]
    dtype = half if half in fused or state.dtype == half else torch.float32
    if not {tensor.dtype for tensor in tensors} <= _CAST_DTYPES:
        return function(*arguments)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return function(*pytree.tree_map(cast, arguments))


@functools.lru_cache(maxsize=8)
def _has_half_lstm(dtype: torch.dtype, has_onednn: bool) -> bool:
    """True if an LSTM on the CPU is one call of oneDNN under autocast; it is not on processors without instructions of the dtype, nor
    where the caller has switched oneDNN off: a part of the key."""
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", dtype):
        value, state = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
        weights = [torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4)]
        try:
            output = torch.lstm(value, (state, state), weights, True, 1, 0.0, False, False, False)[0]
        except RuntimeError:  # oneDNN has no LSTM of the dtype
            return False
    return output.dtype == dtype


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
