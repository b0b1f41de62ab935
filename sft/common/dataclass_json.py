"""Frozen dataclasses parsed from the JSON of ``dataclasses.asdict``.

A file may be damaged, of another version, or edited by hand. Each value is checked against the annotation of its field, recursively; an
error names its place in the text, such as `segments[3].strip_rows`. Lists become tuples, so that the dataclasses stay hashable, and an
integer is accepted in a float field.

Numbers of a record are counts, sizes and seconds: finite, at least 0 and below 2**63. A field with other values says so in its metadata:
``minimum`` (None for a field with negative numbers), or ``choices``, the texts that it may have. A renamed field has its earlier name in
``former``; a file with that name is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sft.common.errors import InputError, some_names

__all__ = ["dataclass_from_dict", "parse_json_object"]

Record = TypeVar("Record")

_LIMIT = 2**63

_KINDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def parse_json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InputError: the text is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:  # a JSONDecodeError is a ValueError
        raise InputError(f"this is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, got {_shorten(value)}")
    return value


def dataclass_from_dict(cls: type[Record], data: Mapping[str, Any]) -> Record:
    """Build a dataclass from a dictionary of its fields.

    Args:
        cls: a frozen dataclass of numbers, strings, tuples, literals and other such dataclasses.
        data: its fields as in JSON. A missing one must have a default.

    Raises:
        InputError: a field is missing, unknown or of another type; or the class rejects the values.
    """
    record: Record = _parse_dataclass(cls, data, "")
    return record


def _parse_dataclass(cls: Any, data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        _refuse(place, "an object", data)
    types = _field_types(cls)
    data = _with_current_names(cls, data)
    missing = [f.name for f in fields(cls) if f.name not in data and f.default is MISSING and f.default_factory is MISSING]
    unknown = sorted(set(data).difference(types))
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has the unknown {some_names([*map(_shorten, unknown)])}"] * bool(
            unknown
        )
        raise InputError(f"{place or cls.__name__} {' and '.join(wrong)}")
    limits = {field.name: field.metadata for field in fields(cls)}
    return cls(**{name: _parse_value(types[name], item, f"{place}.{name}".lstrip("."), limits[name]) for name, item in data.items()})


def _with_current_names(cls: Any, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Data with the earlier names of fields replaced; one next to its current name stays, and is then unknown."""
    names = {field.metadata["former"]: field.name for field in fields(cls) if "former" in field.metadata}
    return {name if names.get(name, name) in data else names[name]: value for name, value in data.items()}


@lru_cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def _parse_value(annotation: Any, data: Any, place: str, limits: Mapping[str, Any]) -> Any:
    origin = get_origin(annotation)
    if origin is tuple:
        return _parse_items(get_args(annotation), data, place, limits)
    if origin is Literal:
        if data not in get_args(annotation):
            _refuse(place, f"one of {', '.join(map(repr, get_args(annotation)))}", data)
        return data
    if origin in (Union, UnionType):
        (member,) = (each for each in get_args(annotation) if each is not NoneType)
        return None if data is None else _parse_value(member, data, place, limits)
    if is_dataclass(annotation):
        return _parse_dataclass(annotation, data, place)
    is_whole = annotation is float and type(data) is int
    if not is_whole and type(data) is not annotation:  # not isinstance: true is not a number
        _refuse(place, _KINDS[annotation], data)
    if annotation in (int, float):
        _check_number(data, place, limits.get("minimum", 0))
    elif data not in limits.get("choices", (data,)):
        _refuse(place, f"one of {', '.join(map(repr, limits['choices']))}", data)
    return float(data) if is_whole else data


def _check_number(number: float, place: str, minimum: int | None) -> None:
    if not abs(number) < _LIMIT:  # also NaN
        _refuse(place, "a finite number below 2**63", number)
    if minimum is not None and number < minimum:
        _refuse(place, f"at minimum {minimum}", number)


def _parse_items(annotations: tuple[Any, ...], data: Any, place: str, limits: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        _refuse(place, "a list", data)
    if len(annotations) == 2 and annotations[1] is Ellipsis:
        annotations = (annotations[0],) * len(data)
    if len(data) != len(annotations):
        _refuse(place, f"a list of {len(annotations)}", data)
    return tuple(
        _parse_value(annotation, item, f"{place}[{i}]", limits) for i, (annotation, item) in enumerate(zip(annotations, data, strict=True))
    )


def _refuse(place: str, expected: str, data: Any) -> NoReturn:
    raise InputError(f"{place or 'the text'} is {_shorten(data)}, expected {expected}")


def _shorten(data: Any) -> str:
    if type(data) is int and abs(data) >= _LIMIT:
        return f"a number of {data.bit_length()} bits"  # its text may be longer than Python writes
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:37]}..."
