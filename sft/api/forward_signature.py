"""The method ``forward`` of a compiled model, with the metadata of the model's own: signature, documentation and annotations.

Trainers read the signature: Hugging Face's ``Trainer`` passes those columns of a batch that ``forward`` names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sft.api.compiled_handle import CompiledHandle
from sft.common.transform_checks import dynamo_disabled

__all__ = ["forward_like"]

#: The argument that a compiled model adds, where its model has none of that name.
_INPUT_GRAD = inspect.Parameter("input_grad", inspect.Parameter.KEYWORD_ONLY, default=None)


def forward_like(own: Callable[..., Any], *, is_bound: bool = False) -> Callable[..., Any]:
    """A function of a compiled module and the arguments of a call, with the metadata of ``own``.

    Args:
        own: ``forward`` of the model's class.
        is_bound: ``own`` is a function of the arguments alone, as in the dictionary of an instance. Default: `False`
    """
    signature = _signature(own, is_bound=is_bound)
    takes_input_grad = signature is not None and _INPUT_GRAD.name in signature.parameters

    @functools.wraps(own)
    def forward(net: Any, *args: Any, **kwargs: Any) -> Any:
        handle = CompiledHandle(net._sft_engine)
        if takes_input_grad:  # the model's own argument of that name
            return handle.run(args, kwargs)
        input_grad = kwargs.pop(_INPUT_GRAD.name, None)
        return handle.run(args, kwargs, input_grad)

    if signature is not None:
        forward.__signature__ = signature if takes_input_grad else _with_input_grad(signature)  # type: ignore[attr-defined]
    return dynamo_disabled(forward)


def _signature(own: Callable[..., Any], *, is_bound: bool) -> inspect.Signature | None:
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # a function of C
        return None
    if not is_bound:
        return signature
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.POSITIONAL_ONLY not in kinds:
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if "self" in signature.parameters:
        parameters = [inspect.Parameter("_net", parameters[0].kind)]
    return signature.replace(parameters=[*parameters, *signature.parameters.values()])


def _with_input_grad(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    has_keywords = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_keywords, _INPUT_GRAD)
    return signature.replace(parameters=parameters)
