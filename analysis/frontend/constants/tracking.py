"""Constant tracking: while ``forward`` is traced on fake tensors, expressions of the values that do not depend on its inputs.

``forward`` may read Python numbers from such values: ``torch.arange(2, x.dim()).tolist()``, ``float(self.stride[0])``,
``if self.is_calibrated:`` on a buffer. The read returns the real value, and the graph has it as a constant. Where the value depends on a
tensor of the model, the read becomes a *guard* (:mod:`sft.analysis.frontend.constants.guards`): the capture holds while the expression has
the same value.

Values that depend on inputs have no expression; the exporter refuses most of their reads. Values that depend on the sizes of inputs
(``torch.tensor(x.shape).prod().item()``) are constants where the trace has constant sizes, so the model is captured for one size.

Some functions take a Python number, or look at values to find the size of their result. Numbers in the place of constant tensors
(``torch.full(shape, self.stride[0])``), and indices in the place of constant masks, keep these calls in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sft.analysis.frontend.constants.arguments import index_arguments, number_arguments, output_size_keyword
from sft.analysis.frontend.constants.expressions import (
    UNKNOWN,
    Blank,
    Call,
    Expression,
    Leaf,
    ResultItem,
    autocast_state,
    evaluate,
    has_values,
    map_items,
    tensor_attribute,
    value_key,
    version_of,
)
from sft.analysis.frontend.source_location import CodeLine, current_line
from sft.analysis.frontend.state_snapshot import user_attributes
from sft.common.errors import MissingValuesError
from sft.common.torch_internals import FakeTensor, disable_torch_function, pytree

__all__ = ["ConstantRead", "ConstantTracker", "SizeDependentReadError", "UnknownRead", "model_tensors"]


class SizeDependentReadError(Exception):
    """``forward`` reads a number that depends on sizes of the inputs, which are symbols in this trace."""


@dataclass(frozen=True, slots=True)
class ConstantRead:
    """A value that ``forward`` read while it was traced.

    Attributes:
        expression: expression of the value.
        key: key of the value.
        line: line of ``forward`` that reads it.
    """

    expression: Expression
    key: Any
    line: CodeLine | None


@dataclass(frozen=True, slots=True)
class UnknownRead:
    """A read of a value that is not known at capture, since it depends on the inputs.

    Attributes:
        function: name of the function that reads it, such as ``item`` or ``__bool__``.
        line: line of ``forward``.
    """

    function: str
    line: CodeLine | None

    @property
    def is_branch(self) -> bool:
        """True where the value decides a branch."""
        return self.function in ("__bool__", "is_nonzero")


class _UnknownError(Exception):
    """An argument is a value that depends on an input, or an object that is not a plain value."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain attributes of all modules that are tensors, by qualified name."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        named = (*module._parameters.items(), *module._buffers.items(), *user_attributes(module))
        tensors |= {prefix + name: value for name, value in named if isinstance(value, Tensor)}
    return tensors


#: Methods and functions that turn tensors into Python values.
_READS = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__format__", "__contains__")
}
_READS |= {Tensor.numpy: "numpy", Tensor.__array__: "numpy", Tensor.is_nonzero: "is_nonzero", torch.is_nonzero: "is_nonzero"}
_READS |= {Tensor.equal: "equal", torch.equal: "equal", Tensor.allclose: "allclose", torch.allclose: "allclose"}

#: Functions whose result depends on the values of their operands in no way, or not on them alone.
_NO_CONSTANTS = frozenset({Tensor.grad.__get__, Tensor.grad_fn.__get__, Tensor._base.__get__})  # type: ignore[union-attr]

#: Functions that read only type, device and shape of their first operand.
_READ_METADATA = frozenset({"new_tensor", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})

#: Functions on integers and masks whose results have sizes that depend on values.
_SIZED_BY_VALUES = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive", "bincount"})

_PLAIN_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, np.generic)
_ATOMS = (*_PLAIN_ATOMS, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of a call, with expressions in place of tensors."""

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    are_size_dependent: bool

    def call(self, func: Any, results: Sequence[Tensor] = (), *, writes_first: bool = False) -> Call | None:
        """The call, with the results of the trace; ``None`` where it depends on symbolic sizes."""
        if self.are_size_dependent:
            return None
        return Call(
            func,
            self.positional,
            self.keywords,
            writes_first=writes_first,
            autocast=autocast_state(),
            max_result_bytes=max((value.numel() * value.element_size() for value in results), default=0),
        )


@dataclass(slots=True)
class _Entry:
    """The expression of a tensor of the trace; valid while the tensor is not written to."""

    tensor: Tensor
    version: int
    expression: Expression | None  # None: it depends on symbolic sizes


class ConstantTracker(TorchFunctionMode):
    """A function mode that records expressions of constant values, and returns their values where ``forward`` reads them.

    Args:
        model: the model.
        originals: its tensors (:func:`model_tensors`) before the exporter replaces them by fake ones.
        is_any_size: true where sizes are symbols; a read that depends on them raises SizeDependentReadError.

    Attributes:
        reads: reads of values that depend on tensors of the model.
        unknown_reads: reads of values that are not known.
        has_size_dependent_reads: true where a value that was read depends on symbolic sizes.
    """

    def __init__(self, model: nn.Module, originals: Mapping[str, Tensor], *, is_any_size: bool) -> None:
        super().__init__()
        self._model, self._originals, self._is_any_size = model, originals, is_any_size
        self._entries: dict[int, _Entry] = {}
        self.reads: list[ConstantRead] = []
        self.unknown_reads: list[UnknownRead] = []
        self.has_size_dependent_reads = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """A context in which calls of this thread are recorded. The model has the tensors of the trace by now."""
        self._entries = {}
        for path, original in self._originals.items():
            traced = tensor_attribute(self._model, path)
            if traced is None or id(traced) in self._entries or not (has_values(original) or _is_meta(original)):
                continue
            if traced is original or isinstance(traced, FakeTensor):  # tensors with two names have one expression
                self._note(traced, Leaf(path))
        with self:
            yield

    def is_constant(self, tensor: Tensor) -> bool:
        """True for a tensor of the trace that is known to be the same in each call with inputs of these sizes."""
        try:
            expression = self._expression(tensor)
        except _UnknownError:
            return False
        return expression is None or evaluate(expression, self._originals.get) is not UNKNOWN

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            value = self._read(func, args, kwargs)
            if value is not UNKNOWN:
                return value
            return func(*args, **kwargs)
        args, kwargs = self._with_numbers(func, args, kwargs)
        lifted = self._lifted(func, args, kwargs)
        if lifted is not None and getattr(func, "__name__", "") in _SIZED_BY_VALUES:
            results = self._read_tensors(self._known_call(func, args, kwargs))
            if results is not UNKNOWN:
                return results
        result = func(*args, **kwargs)
        if lifted is not None:
            self._note_results(func, lifted, args, result)
        return result

    # -- expressions ------------------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor, expression: Expression | None) -> None:
        self._entries[id(tensor)] = _Entry(tensor, version_of(tensor), expression)

    def _expression(self, tensor: Tensor) -> Expression | None:
        """The expression of a tensor; ``None`` where it depends on symbolic sizes.

        Raises:
            _UnknownError: its value is not known.
        """
        entry = self._entries.get(id(tensor))
        if entry is not None:
            if version_of(tensor) != entry.version:
                raise _UnknownError  # it was written to, perhaps through a view
            return entry.expression
        if not has_values(tensor):
            raise _UnknownError
        leaf = Leaf("", tensor)  # of a container, another object, a global or a closure
        self._note(tensor, leaf)
        return leaf

    def _lifted(self, func: Any, args: Any, kwargs: Any) -> _Arguments | None:
        """The arguments of a call as expressions; ``None`` where they depend on inputs."""
        is_size_dependent = False

        def lift(item: Any) -> Any:
            nonlocal is_size_dependent
            if isinstance(item, Tensor):
                expression = self._expression(item)
                is_size_dependent |= expression is None
                return expression
            if isinstance(item, _SYMBOLS) and self._is_any_size:
                is_size_dependent = True
                return None
            if isinstance(item, np.ndarray):
                return item.copy()
            if isinstance(item, _ATOMS):
                return item
            raise _UnknownError

        try:
            name = getattr(func, "__name__", "")
            if args and isinstance(args[0], Tensor) and name in _READ_METADATA:
                shape = map_items(lift, tuple(args[0].shape)) if name.endswith("_like") else ()
                blank = None if is_size_dependent else Blank(shape, args[0].dtype, args[0].device)
                arguments = (blank, *map_items(lift, args[1:]))
            else:
                arguments = map_items(lift, args)
            keywords = map_items(lift, kwargs)
        except _UnknownError:
            return None
        return _Arguments(arguments, keywords, is_size_dependent)

    def _note_results(self, func: Any, lifted: _Arguments, args: Any, result: Any) -> None:
        """Note the expressions of the tensors that a call returns, or of the one that it writes to."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        entry = None if first is None else self._entries.get(id(first))
        if first is not None and entry is not None and version_of(first) != entry.version:
            self._note(first, lifted.call(func, writes_first=True))
        elif isinstance(result, Tensor):
            self._note_result(result, lifted.call(func, [result]))
        elif isinstance(result, (tuple, list, dict)):
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            call = lifted.call(func, tensors) if tensors else None
            for index, tensor in enumerate(tensors):
                self._note_result(tensor, None if call is None else ResultItem(call, index))

    def _note_result(self, tensor: Tensor, expression: Expression | None) -> None:
        entry = self._entries.get(id(tensor))
        if entry is None or entry.tensor is not tensor:  # functions may return their operand
            self._note(tensor, expression)

    # -- reads ------------------------------------------------------------------------------------------------------

    def _known_call(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """A call as an expression; ``None`` where its value depends on inputs.

        Raises:
            SizeDependentReadError: it depends on sizes, which are symbols.
        """
        lifted = self._lifted(func, args, kwargs)
        if lifted is not None and lifted.are_size_dependent:
            self.has_size_dependent_reads = True
            raise SizeDependentReadError
        return None if lifted is None else lifted.call(func)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The value of a read; :data:`UNKNOWN` where it depends on inputs."""
        value = self._value(self._known_call(func, args, kwargs))
        if value is UNKNOWN:
            self.unknown_reads.append(UnknownRead(_READS[func], current_line()))
        return value

    def _value(self, expression: Expression | None) -> Any:
        """The value of an expression, with a guard on it; :data:`UNKNOWN` without one."""
        if expression is None:
            return UNKNOWN
        missing = [leaf.path for leaf in expression.leaves if _is_meta(self._originals.get(leaf.path))]
        if missing:
            line = current_line()
            place = f" at {line}" if line else ""
            problem = f"`forward` reads values of this tensor{place}, and the model is on the meta device; give a model with values"
            raise MissingValuesError([f"{', '.join(sorted(missing))}: {problem}"])
        value = evaluate(expression, self._originals.get)
        if value is not UNKNOWN and expression.leaves:
            self.reads.append(ConstantRead(expression, value_key(value), current_line()))
        return value

    def _number(self, tensor: Tensor) -> Any:
        """The number in a constant tensor of no dimension; :data:`UNKNOWN` where it is not a constant."""
        return self._value(self._known_call(Tensor.item, (tensor,), {}))

    def _read_tensors(self, call: Call | None) -> Any:
        """The results of a call as real tensors, which the graph has as constants."""
        value = self._value(call)
        for index, tensor in enumerate(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)):
            self._note_result(tensor, call if tensor is value or call is None else ResultItem(call, index))
        return value

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with numbers and indices in place of constant tensors, where the function would read values itself."""
        args, kwargs = number_arguments(func, args, kwargs, self._number)
        args = index_arguments(func, args, self._mask_indices)
        return args, output_size_keyword(func, args, kwargs, self._total)

    def _mask_indices(self, mask: Tensor) -> Any:
        """Indices of the true elements of a constant mask, one tensor for each dimension; :data:`UNKNOWN` where it is not a constant."""
        return self._read_tensors(self._known_call(torch.nonzero, (mask,), {"as_tuple": True}))

    def _total(self, repeats: Tensor) -> Any:
        """The sum of a constant tensor; :data:`UNKNOWN` where it is not a constant."""
        call = self._known_call(torch.sum, (repeats,), {})
        return self._value(None if call is None else Call(Tensor.item, (call,), {}))


def _is_meta(tensor: Tensor | None) -> bool:
    with disable_torch_function():
        return tensor is not None and tensor.device.type == "meta"
