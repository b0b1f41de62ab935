"""Frozen dataclasses read back from the JSON that ``dataclasses.asdict`` makes of them.

A file may be damaged, of another version, or edited by hand. What is read has the type that its field says, all the way down, or is refused
with its place in the text: `segments[3].strip_rows`. Lists become tuples, as records are hashable; whole numbers may stand where a field is
a float.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sft.common.errors import InputError

__all__ = ["dataclass_from_dict", "parse_json_object"]

Record = TypeVar("Record")

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def parse_json_object(text: str) -> dict[str, Any]:
    """The object that a text is.

    Raises:
        InputError: it is not JSON, or something else than an object.
    """
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:  # a JSONDecodeError is a ValueError
        raise InputError(f"this is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"expected a JSON object, got {_shorten(found)}")
    return found


def dataclass_from_dict(cls: type[Record], data: Mapping[str, Any]) -> Record:
    """A record with these fields.

    Args:
        cls: a frozen dataclass of numbers, texts, tuples, literals and other such dataclasses.
        data: its fields, as JSON has them. One that is missing must have a default.

    Raises:
        InputError: a field is missing, of another type, or none of the class; or the class refuses them.
    """
    found: Record = _parse_dataclass(cls, data, "")
    return found


def _parse_dataclass(cls: Any, data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        _refuse(place, "an object", data)
    types = _field_types(cls)
    missing = [f.name for f in fields(cls) if f.name not in data and f.default is MISSING and f.default_factory is MISSING]
    unknown = sorted(set(data).difference(types))
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has the unknown {', '.join(map(repr, unknown))}"] * bool(unknown)
        raise InputError(f"{place or cls.__name__} {' and '.join(wrong)}")
    return cls(**{name: _parse_value(types[name], item, f"{place}.{name}".lstrip(".")) for name, item in data.items()})


@lru_cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def _parse_value(wanted: Any, data: Any, place: str) -> Any:
    origin = get_origin(wanted)
    if origin is tuple:
        return _parse_items(get_args(wanted), data, place)
    if origin is Literal:
        if data not in get_args(wanted):
            _refuse(place, f"one of {', '.join(map(repr, get_args(wanted)))}", data)
        return data
    if origin in (Union, UnionType):
        (other,) = (part for part in get_args(wanted) if part is not NoneType)
        return None if data is None else _parse_value(other, data, place)
    if is_dataclass(wanted):
        return _parse_dataclass(wanted, data, place)
    if wanted is float and type(data) is int:
        return float(data)
    if type(data) is not wanted:  # not isinstance: true is no number
        _refuse(place, _KINDS[wanted], data)
    return data


def _parse_items(wanted: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        _refuse(place, "a list", data)
    if len(wanted) == 2 and wanted[1] is Ellipsis:
        wanted = (wanted[0],) * len(data)
    if len(data) != len(wanted):
        _refuse(place, f"a list of {len(wanted)}", data)
    return tuple(_parse_value(kind, item, f"{place}[{i}]") for i, (kind, item) in enumerate(zip(wanted, data, strict=True)))


def _refuse(place: str, expected: str, data: Any) -> NoReturn:
    raise InputError(f"{place or 'the text'} is {_shorten(data)}, expected {expected}")


def _shorten(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:37]}..."
