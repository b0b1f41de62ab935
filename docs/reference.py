"""Writes docs/reference.md from the docstrings of the public names: ``python docs/reference.py`` (``--check`` only compares)."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("reference.md")

INTRODUCTION = """# Public names

Written by `python docs/reference.py` from the docstrings; a test compares. `help(name)` in Python says the same.
"""

#: The packages whose names are public.
_PACKAGES = ("sft", "sft.nn", "sft.sources", "sft.tissue", "sft.wsi")


def page() -> str:
    """The page."""
    lines = [INTRODUCTION]
    for package in _PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## `{package}`", "", (inspect.getdoc(module) or "").split("\n\n")[0].strip(), ""]
        for name, member in sorted(_members(module).items()):
            lines += _entry(f"{package}.{name}", member)
    return "\n".join(lines).rstrip() + "\n"


def _members(module: ModuleType) -> dict[str, Any]:
    """What a package exports, but for modules."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    members = {name: getattr(module, name) for name in names}
    return {name: member for name, member in members.items() if not inspect.ismodule(member)}


def _entry(name: str, member: Any) -> list[str]:
    if not (inspect.isclass(member) or inspect.isfunction(member)):
        return [f"### `{name}`", "", "One of several types or values; see the source.", ""]
    lines = [f"### `{name}{_signature(member)}`", "", *_text(member), ""]
    if inspect.isclass(member):
        for method, found in _class_members(member).items():
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            shown = method if isinstance(found, property) else f"{method}{_signature(function)}"
            lines += [f"- **`{shown}`**: {' '.join(_text(function)[0].split())}"]
        lines.append("")
    return lines


def _class_members(member: type) -> dict[str, Any]:
    """Members of a class, including those of its bases up to the first public one."""
    packages = (importlib.import_module(package) for package in _PACKAGES)
    public = {exported for package in packages for exported in _members(package).values() if inspect.isclass(exported)}
    bases = takewhile(lambda base: base not in public and base.__module__.startswith("sft."), member.__mro__[1:])
    return dict(item for cls in reversed([member, *bases]) for item in vars(cls).items())


def _signature(member: Any) -> str:
    try:
        signature = inspect.signature(member)
    except (TypeError, ValueError):
        return "(...)"
    if {parameter.kind for parameter in signature.parameters.values()} <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return "(...)" if signature.parameters else "()"
    parameters = [parameter.replace(annotation=_unquoted(parameter.annotation)) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=_unquoted(signature.return_annotation)))
    # Where an object lies in memory is no part of a default.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Unquoted:
    """An annotation that prints as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _unquoted(annotation: Any) -> Any:
    return _Unquoted(annotation) if isinstance(annotation, str) else annotation


def _text(member: Any) -> list[str]:
    """The docstring: prose as it is, sections, lists and examples as preformatted text."""
    lines: list[str] = []
    for part in (inspect.getdoc(member) or "").split("\n\n"):
        first = part.split("\n")[0]
        is_section = first.rstrip(":") in ("Args", "Attributes", "Returns", "Raises") or first.startswith((">>>", "===", "    "))
        lines += ["```text", part, "```", ""] if is_section else [part, ""]
    return lines[:-1]


def main() -> int:
    """Write the page, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 where the page is out of date")
    if parser.parse_args().check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
