"""Models by name, and shapes and tiles as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sft.errors import InputError
from sft.libraries import ModelName

__all__ = ["ExampleInput", "load_model", "parse_input", "parse_tile"]

#: An input that is planned for: its shape, or where it holds whole numbers a tensor without memory.
ExampleInput = tuple[int, ...] | torch.Tensor

#: Types of whole numbers, as they are written.
_INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")


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
    maker = ModelName(text=name, place="MODEL", options_place="--model-args").maker()
    if meta:
        try:
            with torch.device("meta"):
                return maker.make(options)
        except InputError:  # some makers compute with numbers
            pass
    return maker.make(options)


def parse_input(text: str) -> ExampleInput:
    """Read ``"1x3x20480x20480"``, or ``"4x512:int64"`` for what holds no numbers of the model's type: token ids, labels, masks.

    >>> parse_input("1x3x512x640")
    (1, 3, 512, 640)
    >>> parse_input("4x512:int64")
    tensor(..., device='meta', size=(4, 512), dtype=torch.int64)

    Raises:
        InputError: the text is no shape, or its type is none of whole numbers.
    """
    sizes, has_type, kind = text.partition(":")
    least = "*" if has_type else "+"
    if re.fullmatch(rf"[1-9][0-9]{{0,17}}([x,][1-9][0-9]{{0,17}}){least}", sizes) is None:
        raise InputError(f"--input {text!r}: write batch, channels and sizes, such as 1x3x20480x20480, or 4x512:int64 for whole numbers")
    shape = tuple(map(int, re.split("[x,]", sizes)))
    if not has_type:
        return shape
    if kind not in _INTEGER_DTYPES:
        raise InputError(
            f"--input {text!r}: the type after the colon is one of {', '.join(_INTEGER_DTYPES)}; without one it is the model's"
        )
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")


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
