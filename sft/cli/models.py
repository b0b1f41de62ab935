"""Models by name, and shapes and tiles as people write them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sft.errors import InputError

__all__ = ["load_model", "parse_shape", "parse_tile"]

_LIBRARIES = ("torchvision", "timm")


def load_model(name: str, options: Mapping[str, Any], *, meta: bool = True) -> nn.Module:
    """Build a model that a name stands for.

    Args:
        name: ``"package.module:callable"``, ``"torchvision:resnet50"``, ``"timm:resnet50"``, or a bare name, which is looked up in
            torchvision, then in timm.
        options: keyword arguments of its maker.
        meta: without memory for its parameters, where its maker allows that.

    Raises:
        InputError: there is no such model, or its maker fails.
    """
    make = _maker(name)
    if meta:
        try:
            with torch.device("meta"):
                return _made(name, make, options)
        except InputError:  # some makers compute with numbers
            pass
    return _made(name, make, options)


def _maker(name: str) -> Callable[..., Any]:
    library, _, member = name.rpartition(":")
    if not member:
        raise InputError(f"MODEL {name!r}: write package.module:callable, or the name of a model in torchvision or timm")
    if library in _LIBRARIES:
        maker = _of_library(library, member)
        if maker is None:
            raise InputError(f"MODEL {name!r}: {library} is not installed, or has no model {member!r}")
        return maker
    if not library:
        found = next((maker for known in _LIBRARIES if (maker := _of_library(known, member)) is not None), None)
        if found is None:
            raise InputError(
                f"MODEL {name!r}: neither torchvision nor timm has it, as far as they are installed; write package.module:callable"
            )
        return found
    try:
        module = importlib.import_module(library)
    except Exception as error:  # importing runs the module's own code
        raise InputError(f"MODEL {name!r}: cannot import {library} ({type(error).__name__}: {error}); is it on PYTHONPATH?") from error
    value: Any = module
    for part in member.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise InputError(f"MODEL {name!r}: {library} has no callable {member!r}")
    return value if not isinstance(value, nn.Module) else lambda: value


def _of_library(library: str, name: str) -> Callable[..., Any] | None:
    try:
        module: Any = importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except (ImportError, RuntimeError):  # a torchvision that was built for another torch raises the latter
        return None
    if library == "torchvision":
        return None if name not in module.list_models() else lambda **options: module.get_model(name, **{"weights": None, **options})
    return None if not module.is_model(name) else lambda **options: module.create_model(name, **options)


def _made(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> nn.Module:
    try:
        model = make(**options)
    except Exception as error:  # a maker may raise anything
        raise InputError(f"MODEL {name!r}: making it failed ({type(error).__name__}: {error}); see --model-args") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"MODEL {name!r}: made a {type(model).__name__}, not an nn.Module")
    return model


def parse_shape(text: str) -> tuple[int, ...]:
    """Read ``"1x3x20480x20480"``.

    >>> parse_shape("1x3x512x640")
    (1, 3, 512, 640)

    Raises:
        InputError: the text is no shape.
    """
    if re.fullmatch(r"[1-9][0-9]*([x,][1-9][0-9]*)+", text) is None:
        raise InputError(f"--input {text!r}: write batch, channels and sizes, such as 1x3x20480x20480")
    return tuple(map(int, re.split("[x,]", text)))


def parse_tile(text: str) -> tuple[int, int | None]:
    """Read ``"512"`` (rows) or ``"512x1024"`` (rows, columns).

    >>> parse_tile("512"), parse_tile("512x1024")
    ((512, None), (512, 1024))

    Raises:
        InputError: the text is no tile.
    """
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)?", text) is None:
        raise InputError(f"--tile {text!r}: write rows, or rows and columns, such as 512 or 512x1024")
    rows, _, cols = text.partition("x")
    return int(rows), int(cols) if cols else None
