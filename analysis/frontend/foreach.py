"""Decomposition of in-place operators on lists of tensors (``_foreach_mul_``) into the same operators on single tensors.

``_foreach_mul_([a, b], 3.0)`` is ``a.mul_(3.0); b.mul_(3.0)``, in values and in gradients. The list form returns no new names of the
tensors that it writes, and functionalization follows writes by these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sft.common.torch_internals import storage_id

__all__ = ["decompose_foreach", "is_in_place_foreach"]

_FOREACH_PREFIX = "_foreach_"

#: Operators whose factor is positional in the list form and a keyword (``value``) in the single form.
_WITH_VALUE_KEYWORD = frozenset({"addcmul_", "addcdiv_"})

#: Keywords of both forms.
_KEYWORDS = frozenset({"alpha", "value", "non_blocking"})

TensorMethodCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def is_in_place_foreach(name: str) -> bool:
    """Return true for the name (without overload) of an operator that writes the tensors of a list."""
    return name.startswith(_FOREACH_PREFIX) and name.endswith("_")


def decompose_foreach(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[TensorMethodCall] | None:
    """The calls on single tensors that equal a call on lists; ``None`` where they would not be equal.

    >>> import torch
    >>> calls = decompose_foreach("_foreach_add_", ([torch.ones(1), torch.ones(1)], [2, 3]), {})
    >>> [(call.__name__, *args) for call, args, _ in calls]
    [('add_', tensor([1.]), 2), ('add_', tensor([1.]), 3)]
    """
    single_name = name.removeprefix(_FOREACH_PREFIX)
    function = getattr(Tensor, single_name, None)
    lengths = {len(value) for value in args if _is_list(value)}
    if function is None or len(lengths) != 1 or not _is_list(args[0]) or not kwargs.keys() <= _KEYWORDS:
        return None
    calls: list[TensorMethodCall] = []
    for index in range(*lengths):
        single_args, single_kwargs = [value[index] if _is_list(value) else value for value in args], dict(kwargs)
        if single_name in _WITH_VALUE_KEYWORD and len(single_args) > 3:
            single_kwargs["value"] = single_args.pop()
            if isinstance(single_kwargs["value"], Tensor):
                return None  # one tensor with the factors of all calls
        calls.append((function, tuple(single_args), single_kwargs))
    return None if _alias_each_other(calls) else calls


def _alias_each_other(calls: Sequence[TensorMethodCall]) -> bool:
    """Return true where a call writes memory that another call reads or writes: then gradients depend on the order of the calls."""
    writers: dict[int, int] = {}
    for index, (_, args, _) in enumerate(calls):
        if writers.setdefault(storage_id(args[0]), index) != index:
            return True
    return any(
        isinstance(value, Tensor) and writers.get(storage_id(value), index) != index
        for index, (_, args, _) in enumerate(calls)
        for value in args
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
