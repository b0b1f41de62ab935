"""Messages of a wrong command line or configuration, in the words of its author: setting, value, and a value that would do.

The parser's own messages name classes of Python (``Expected a <class 'int'>``) and print all members of a union.
"""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sft.common.untrusted.foreign_files import shortened
from sft.wsi.config import GROUPS, Config

__all__ = ["setting_names", "usage_text"]

_KEY = re.compile(r'Parser key "([^"]+)": (.*)', re.DOTALL)
_VALUE = re.compile(r".*(?:Got|Given) value: (.*)$", re.DOTALL)
_RESTRICTED = re.compile(r"Not of type \w+: (?:invalid literal for int\(\) with base 10: )?'?(.*?)'?(?: does not conform .*)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Subcommand '([^']+)' does not accept option '([^']+)'")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_REQUIRED = re.compile(r"the following arguments are required: (.*)", re.DOTALL)
#: Words for types; the plural is that of list items.
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers in brackets, such as [256, 2048]"),
    float: ("a number", "numbers in brackets, such as [0.5, 0.5, 0.5]"),
    str: ("a text", "texts in brackets, such as [a, b] (numbers as texts: ['1', '2'])"),
    bool: ("true or false", "true or false, several in brackets"),
    Path: ("a path", "paths in brackets"),
    dict: ("settings in braces, such as {pretrained: true}", ""),
    NoneType: ("null", ""),
}
_LEAST = {"NonNegativeInt": "an integer of at least 0", "PositiveInt": "an integer of at least 1"}


def usage_text(error: ArgumentError | str) -> str:
    """The text of a usage error."""
    text = " ".join(str(error).split())
    if match := _KEY.fullmatch(text):
        return _wrong_value(match[1], match[2])
    if match := _UNKNOWN.fullmatch(text):
        return f"{match[2]} is not a setting of {match[1]}{_suggestion(match[2])}"
    if match := _UNRECOGNIZED.fullmatch(text):
        return f"unrecognized arguments: {match[1]}{_suggestion(match[1].split()[0].lstrip('-').partition('=')[0], '--')}"
    if match := _REQUIRED.fullmatch(text):
        return _missing(match[1].split(", "))
    return text


def setting_names() -> list[str]:
    """Names of all settings: ``group.name``, ``run``, ``tensorboard``."""
    names = [f"{group}.{item.name}" for group, cls in GROUPS.items() for item in fields(cls)]
    return [*names, *(item.name for item in fields(Config) if item.name not in GROUPS)]


def _wrong_value(key: str, reason: str) -> str:
    group, _, name = key.partition(".")
    owner: Any = GROUPS.get(group) if name else Config
    hint = get_type_hints(owner).get(name or group) if owner is not None else None
    if (match := _VALUE.search(reason)) or (match := _RESTRICTED.fullmatch(reason)):
        value = match[1]
    else:
        return f"{key}: {reason}"
    least = next((words for kind, words in _LEAST.items() if kind in reason), "")
    expected = least or (_described(hint) if hint is not None else _named_types(reason))
    if not expected:
        return f"{key}: {reason}"
    if hint is Path or (not _VALUE.search(reason) and not least):  # the value is not in the message
        return f"{key}: give {expected}"
    return f"{key} {shortened(value)!r}: give {expected}"


def _described(hint: Any) -> str:
    """Words for a type.

    >>> _described(list[int] | None), _described(Literal["sgd", "adam"])
    ('integers in brackets, such as [256, 2048], or null', 'sgd or adam')
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _alternatives(_described(member) for member in get_args(hint))
    if origin is Literal:
        return _alternatives(map(str, get_args(hint)))
    if origin is list:
        return _described_items(get_args(hint)[0])
    if origin is dict and get_args(hint)[0] is int:
        return "pairs in braces, such as {0: 0, 255: 1}"
    if origin is dict and get_args(hint)[1] is int:
        return 'whole numbers by name in braces, such as {z: 12} or {"#ff0000": 1}'
    return _WORDS.get(origin or hint, ("", ""))[0]


def _described_items(item: Any) -> str:
    """Words for a list of a type."""
    if get_origin(item) is list:
        return "lists in brackets, such as [[0, 1], [0, 2]]"
    if get_origin(item) in (Union, UnionType):
        return "texts or whole numbers in brackets, such as [DAPI, 3]"
    return _WORDS[item][1]


def _named_types(reason: str) -> str:
    """Words for the types that a message of the parser names."""
    classes = {cls.__name__: cls for cls in _WORDS}
    names = dict.fromkeys(re.findall(r"<class '(\w+)'>", reason))
    choices = re.findall(r"Literal\[(.*?)\]", reason)
    literals = [choice.strip("'\" ") for choice in choices[0].split(",")] if choices else []
    return _alternatives([*literals, *(_WORDS[classes[name]][0] for name in names if name in classes)])


def _alternatives(texts: Iterable[str]) -> str:
    listed = list(texts)
    if len(listed) < 2:
        return "".join(listed)
    separator = ", or " if any("," in text for text in listed) else " or "
    return f"{', '.join(listed[:-1])}{separator}{listed[-1]}"


def _suggestion(name: str, prefix: str = "") -> str:
    """The setting that was probably meant, or the place that lists all."""
    close = get_close_matches(name, setting_names(), n=1, cutoff=0.75)
    return f"; did you mean {prefix}{close[0]}?" if close else "; --help of the command lists all"


def _missing(names: list[str]) -> str:
    """Message of required arguments, which the parser names after their command: ``train.data.csv``."""
    command, _, _ = names[0].partition(".")
    settings = [name.partition(".")[2] or name for name in names]
    options = [f"{name} (--{name}, or in the file of --config)" if "." in name else name for name in settings]
    return f"{command} needs {', '.join(options)}; python -m sft.wsi {command} --help lists all options"
