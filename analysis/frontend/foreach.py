"""Operators that write lists of tensors, as the same operators on one tensor after the other.

``_foreach_mul_([a, b], 3.0)`` is ``a.mul_(3.0)`` and ``b.mul_(3.0)``, in numbers and in gradients. It returns no new name of what it
wrote, by which everything else here follows a write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sft.common.torch_internals import storage_id

__all__ = ["decompose_foreach", "is_in_place_foreach"]

_FOREACH_PREFIX = "_foreach_"

#: Of these the factor comes by place for lists, and by name for a tensor.
_WITH_VALUE_KEYWORD = frozenset({"addcmul_", "addcdiv_"})

#: What has the same name in both forms.
_KEYWORDS = frozenset({"alpha", "value", "non_blocking"})

TensorMethodCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def is_in_place_foreach(name: str) -> bool:
    """Whether an operator, by its name without an overload, writes the tensors of a list."""
    return name.startswith(_FOREACH_PREFIX) and name.endswith("_")


def decompose_foreach(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[TensorMethodCall] | None:
    """The calls that an operator on lists stands for; ``None`` where they would not be the same as the operator.

    >>> import torch
    >>> calls = decompose_foreach("_foreach_add_", ([torch.ones(1), torch.ones(1)], [2, 3]), {})
    >>> [(call.__name__, *args) for call, args, _ in calls]
    [('add_', tensor([1.]), 2), ('add_', tensor([1.]), 3)]
    """
    single = name.removeprefix(_FOREACH_PREFIX)
    function = getattr(Tensor, single, None)
    lengths = {len(value) for value in args if _is_list(value)}
    if function is None or len(lengths) != 1 or not _is_list(args[0]) or not kwargs.keys() <= _KEYWORDS:
        return None
    calls: list[TensorMethodCall] = []
    for place in range(*lengths):
        own, named = [value[place] if _is_list(value) else value for value in args], dict(kwargs)
        if single in _WITH_VALUE_KEYWORD and len(own) > 3:
            named["value"] = own.pop()
            if isinstance(named["value"], Tensor):
                return None  # the factors of all of them in one tensor
        calls.append((function, tuple(own), named))
    return None if _alias_each_other(calls) else calls


def _alias_each_other(calls: Sequence[TensorMethodCall]) -> bool:
    """Whether a call writes what another one reads or writes: the gradient of the list is then not that of one after the other."""
    writer: dict[int, int] = {}
    for place, (_, args, _) in enumerate(calls):
        if writer.setdefault(storage_id(args[0]), place) != place:
            return True
    return any(
        isinstance(value, Tensor) and writer.get(storage_id(value), place) != place
        for place, (_, args, _) in enumerate(calls)
        for value in args
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
