"""Checks of settings: missing values, byte counts, classes of label maps, tiles; one error for all problems of a group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError, first_problems, some_names

if TYPE_CHECKING:
    from sft.wsi.config import Config, ModelConfig, TaskConfig
    from sft.wsi.data_config import DataConfig

__all__ = [
    "annotation_problems",
    "byte_problems",
    "channel_problems",
    "label_map_problems",
    "pixel_problems",
    "refuse",
    "refuse_nulls",
    "tile_problems",
    "value_pairs",
]

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


def label_map_problems(data: DataConfig, task: TaskConfig) -> list[str]:
    """Problems of the classes that values or colours of label maps have."""
    problems: list[str] = []
    tables: dict[str, dict[Any, int] | None] = {"mask_values": data.mask_values, "mask_colours": data.mask_colours}
    for name, table in tables.items():
        if table is not None:
            problems += _class_problems(f"data.{name}", "value" if name == "mask_values" else "colour", table, task)
    wrong = [colour for colour in data.mask_colours or {} if not re.fullmatch("#[0-9a-fA-F]{6}", str(colour))]
    if wrong:
        problems.append(f'data.mask_colours {wrong[0]!r}: give red, green and blue in hexadecimal digits, such as "#ff0000"')
    if data.mask_outside is not None and task.kind != "segmentation":
        problems.append(f"data.mask_outside {data.mask_outside} with task.kind {task.kind}: label maps are for segmentation")
    if data.mask_colours is not None and (data.mask_values is not None or data.mask_channel is not None):
        other = "mask_values" if data.mask_values is not None else "mask_channel"
        problems.append(f"data.mask_colours and data.{other} are two ways to read a label map; leave one of them out")
    return problems


def _class_problems(setting: str, kind: str, table: dict[Any, int], task: TaskConfig) -> list[str]:
    """Problems of a table of class indices."""
    if task.kind != "segmentation":
        return [f"{setting} with task.kind {task.kind}: label maps are for segmentation"]
    classes = task.classes or []
    wrong = sorted({index for index in table.values() if not (0 <= index < len(classes) or index == _IGNORED_INDEX)})
    unused = [name for index, name in enumerate(classes) if index not in table.values()]
    problems = []
    if wrong:
        allowed = f"classes are 0 to {len(classes) - 1}, and {_IGNORED_INDEX} is for ignored {kind}s"
        problems.append(f"{setting} {table}: {', '.join(map(str, wrong))} is not a class; {allowed}")
    if unused:
        problems.append(f"{setting} {table}: no {kind} is of class {', '.join(unused)}; give each class a {kind}")
    return problems


def annotation_problems(data: DataConfig, task: TaskConfig) -> list[str]:
    """Problems of settings of annotated classes in a run without a segmentation, which would have no effect."""
    settings = {} if data.mask_column == "class" else {"mask_column": data.mask_column}
    settings |= {"ignore_other_classes": "true"} if data.ignore_other_classes else {}
    unused = {} if task.kind == "segmentation" else settings
    return [f"data.{name} {value} with task.kind {task.kind}: it is for segmentation; leave it out" for name, value in unused.items()]


def pixel_problems(data: DataConfig) -> list[str]:
    """Problems of the settings of pixels: channels, ranges of values, axes, the colour of background."""
    problems = []
    num_channels = 3 if data.channels is None else len(data.channels)
    if data.channels is not None:
        wrong = [channel for channel in data.channels if channel == "" or (isinstance(channel, int) and channel < 0)]
        if not data.channels or wrong or len(set(data.channels)) < num_channels:
            problems.append(
                f"data.channels {data.channels}: give each channel once, by its name or its number from 0, such as [0, 1, 2, 3]"
            )
    pairs = [] if data.value_range is None else value_pairs(data.value_range, num_channels)
    if pairs is None:
        problems.append(f"data.value_range {data.value_range}: give [low, high] with low < high, or one such pair for each channel")
    elif data.value_range is not None and len(pairs) != num_channels:
        problems.append(
            f"data.value_range {data.value_range}: these are {len(pairs)} pairs for {num_channels} channels; give one a channel"
        )
    if data.percentiles is not None and not (len(data.percentiles) == 2 and 0 <= data.percentiles[0] < data.percentiles[1] <= 100):
        problems.append(f"data.percentiles {data.percentiles}: give two numbers, 0 <= low < high <= 100, such as [1, 99]")
    if data.percentiles is not None and data.value_range is not None:
        problems.append("data.percentiles and data.value_range are two ways to give one range; leave one of them out")
    if data.background is not None:
        is_colour = data.channels is not None or all(0 <= value <= 255 for value in data.background)
        if len(data.background) != num_channels or not is_colour:
            numbers = "three numbers of 0 to 255, such as [255, 255, 255]" if data.channels is None else "a number for each channel"
            problems.append(f"data.background {data.background}: give {numbers}")
    if data.at is not None and (not data.at or min(data.at.values()) < 0):
        problems.append(f"data.at {data.at}: give an index from 0 for each axis, such as {{z: 12}}")
    if data.series is not None and data.series < 0:
        problems.append(f"data.series {data.series}: images of a file are counted from 0")
    if data.fill_value and data.invalid_pixels != "fill":
        problems.append(f"data.fill_value {data.fill_value} is of data.invalid_pixels fill; give that, or leave it out")
    return problems


def channel_problems(config: Config) -> list[str]:
    """Problems of the number of channels in settings of several groups."""
    data, model, augment = config.data, config.model, config.augment
    count = config.num_channels
    problems = []
    mean, std = model.mean or [], model.std or []
    if not len(mean) == len(std) == count or not all(map(isfinite, (*mean, *std))) or min(std) <= 0:
        told = "three finite numbers" if data.channels is None else f"{count} finite numbers, one for each of data.channels"
        problems.append(f"model.mean [{some_names(mean)}], model.std [{some_names(std)}]: give {told} each, std above 0")
    if data.channels is None:
        return problems
    colours = [name for name in ("brightness", "contrast", "saturation", "hed") if getattr(augment, name)]
    colours += ["stain"] if augment.stain != "none" else []
    if colours:
        problems.append(
            f"augment.{', augment.'.join(colours)} with data.channels: colours change in RGB slides of 8 bits; set "
            "them to 0 (stain: none), or leave data.channels out"
        )
    return problems


def value_pairs(value_range: list[float] | list[list[float]], num_channels: int) -> list[tuple[float, float]] | None:
    """Pair of low and high of each channel, or each given pair; ``None`` for what is no range.

    >>> value_pairs([0, 10], 2), value_pairs([[0, 10], [5, 6]], 2), value_pairs([3, 1], 1)
    ([(0.0, 10.0), (0.0, 10.0)], [(0.0, 10.0), (5.0, 6.0)], None)
    """
    is_one = not any(isinstance(item, list) for item in value_range)
    rows: list[Any] = [value_range] * num_channels if is_one else list(value_range)
    try:
        pairs = [(float(low), float(high)) for low, high in rows]
    except (TypeError, ValueError):
        return None
    return pairs if all(isfinite(low) and isfinite(high) and low < high for low, high in pairs) else None
