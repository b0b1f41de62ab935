"""Operators that write lists of tensors, as the same operators on one tensor after the other.

``torch._foreach_mul_([a, b], 3.0)`` is ``a.mul_(3.0)`` and ``b.mul_(3.0)``, in numbers and in gradients. It returns no new name of what it
wrote, by which everything else here follows a write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["one_by_one", "writes_lists"]

_PREFIX = "_foreach_"

#: Of these the factor comes by place for lists, and by name for a tensor.
_WITH_VALUE = frozenset({"addcmul_", "addcdiv_"})

#: What has the same name in both forms.
_NAMED = frozenset({"alpha", "value", "non_blocking"})

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def writes_lists(name: str) -> bool:
    """Whether an operator, by its name without an overload, writes the tensors of a list."""
    return name.startswith(_PREFIX) and name.endswith("_")


def one_by_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call] | None:
    """The calls that an operator on lists stands for; ``None`` where they would not be the same as the operator.

    >>> import torch
    >>> calls = one_by_one("_foreach_add_", ([torch.ones(1), torch.ones(1)], [2, 3]), {})
    >>> [(call.__name__, *args) for call, args, _ in calls]
    [('add_', tensor([1.]), 2), ('add_', tensor([1.]), 3)]
    """
    single = name.removeprefix(_PREFIX)
    function = getattr(Tensor, single, None)
    lengths = {len(value) for value in args if _is_list(value)}
    if function is None or len(lengths) != 1 or not _is_list(args[0]) or not kwargs.keys() <= _NAMED:
        return None
    calls: list[Call] = []
    for place in range(*lengths):
        own, named = [value[place] if _is_list(value) else value for value in args], dict(kwargs)
        if single in _WITH_VALUE and len(own) > 3:
            named["value"] = own.pop()
            if isinstance(named["value"], Tensor):
                return None  # the factors of all of them in one tensor
        calls.append((function, tuple(own), named))
    return None if _meet(calls) else calls


def _meet(calls: Sequence[Call]) -> bool:
    """Whether a call writes what another one reads or writes: the gradient of the list is then not that of one after the other."""
    writer: dict[int, int] = {}
    for place, (_, args, _) in enumerate(calls):
        if writer.setdefault(_memory(args[0]), place) != place:
            return True
    return any(
        isinstance(value, Tensor) and writer.get(_memory(value), place) != place
        for place, (_, args, _) in enumerate(calls)
        for value in args
    )


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
