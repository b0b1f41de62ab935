"""Lazy names of a package (PEP 562): a public name is imported from its module when it is first read.

``import sft`` then loads neither torch nor SymPy, and ``python -m sft --help`` needs neither. A package states its names twice: in a block
under ``TYPE_CHECKING``, which type checkers and editors read, and in the table that is passed to :func:`lazy_exports`. A test compares.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, modules: Mapping[str, str], *, submodules: Sequence[str] = (), internal: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The values of ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: name of the package.
        modules: the public names of each module, separated by spaces.
        submodules: public submodules.
        internal: further submodules that can be read as attributes. The first one that is read loads all modules of the table, so that
            the attributes of every internal package are complete.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}
    public = sorted((*places, *submodules))

    def get_attribute(name: str) -> Any:
        if name in places:
            value = getattr(importlib.import_module(places[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        elif name in internal:
            for module in modules:
                importlib.import_module(module)
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return public, get_attribute, lambda: public
