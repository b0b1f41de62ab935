"""Checks of settings: missing values, byte counts, classes of label maps, tiles; one error for all problems of a group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError, first_problems, some_names

if TYPE_CHECKING:
    from sft.wsi.config import ModelConfig, TaskConfig

__all__ = ["byte_problems", "mask_value_problems", "refuse", "refuse_nulls", "tile_problems"]

#: Index of values of a label map that count for nothing.
_IGNORED_INDEX = 255
_MAX_TILE_PX = 2**16
_MAX_RANK = 2**16


def byte_problems(name: str, text: int | str) -> list[str]:
    """Problem of a number of bytes, or of ``auto``; empty for a valid one."""
    if text == "auto":
        return []
    try:
        parse_bytes(text)
    except InputError as error:
        return [f"{name}: {error}"]
    return []


def refuse_nulls(group: str, config: Any) -> None:
    """Refuse settings without a value that must have one, and zero bytes in texts and paths.

    Raises:
        InputError: some are.
    """
    values = {f"{group}.{item.name}": getattr(config, item.name) for item in fields(config)}
    refuse(
        f"{name} {str(value)!r}: it has a zero byte, which no name of a file has; leave it out"
        for name, value in values.items()
        if isinstance(value, (str, Path)) and "\0" in str(value)
    )
    refuse(
        f"{group}.{item.name} is null: give a value, or leave the line out"
        for item in fields(config)
        if getattr(config, item.name) is None and "None" not in str(item.type)
    )


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems as one error.

    Raises:
        InputError: there are some.
    """
    messages = list(problems)
    if messages:
        raise InputError("; ".join(first_problems(messages)))


def tile_problems(model: ModelConfig) -> list[str]:
    """Problems of the settings of tiles, alone and with others of the model."""
    of_tiles = ("tile_px", "stride_px", "min_tissue", "lora_rank", "lora_layers")
    if not model.takes_tiles:
        return [
            f"model.{name} {getattr(model, name)} with model.encoder slide: it is for tiles; give model.encoder tiles, or leave it out"
            for name in of_tiles
            if getattr(model, name) is not None
        ]
    problems = [
        f"model.{name} {getattr(model, name)}: give an integer from 1 to {largest}"
        for name, largest in (("tile_px", _MAX_TILE_PX), ("stride_px", _MAX_TILE_PX), ("lora_rank", _MAX_RANK))
        if getattr(model, name) is not None and not 1 <= getattr(model, name) <= largest
    ]
    if model.min_tissue is not None and not 0 <= model.min_tissue <= 1:
        problems.append(f"model.min_tissue {model.min_tissue}: give a share of a tile, 0 to 1")
    if model.tile is not None:
        problems.append(f"model.tile {model.tile} with model.encoder tiles: it divides whole slides; leave it out (tiles: model.tile_px)")
    if model.lora_layers is not None and model.lora_rank is None:
        problems.append(f"model.lora_layers [{some_names(model.lora_layers)}] without model.lora_rank: give the rank, such as 8")
    if model.lora_layers == []:
        problems.append("model.lora_layers []: name a layer, or leave it out for all linear layers")
    return problems


def mask_value_problems(values: dict[int, int] | None, task: TaskConfig) -> list[str]:
    """Problems of the classes that values of label maps have."""
    if values is None:
        return []
    if task.kind != "segmentation":
        return [f"data.mask_values with task.kind {task.kind}: values of label maps are for segmentation"]
    classes = task.classes or []
    wrong = sorted({index for index in values.values() if not (0 <= index < len(classes) or index == _IGNORED_INDEX)})
    unused = [name for index, name in enumerate(classes) if index not in values.values()]
    problems = []
    if wrong:
        allowed = f"classes are 0 to {len(classes) - 1}, and {_IGNORED_INDEX} is for ignored values"
        problems.append(f"data.mask_values {values}: {', '.join(map(str, wrong))} is not a class; {allowed}")
    if unused:
        problems.append(f"data.mask_values {values}: no value is of class {', '.join(unused)}; give each class a value")
    return problems
