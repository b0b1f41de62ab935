"""Code that a configuration may name: classes and functions of modules that the caller trusts.

A configuration is a text file that people copy from each other. If it could name any callable, it could run any command. So it names
models of known libraries only, unless the caller trusts a module: on the command line (``--trust my_net``) or in Python
(``trust="my_net"``), never in the configuration itself. Importing a module runs its code. It is refused before it is imported, and what
it holds is checked before it is called:

- The standard library, torch and sft are never admitted: they hold functions that start programs, import files and read pickles.
- A module is admitted by its name, a package by a prefix of it, or by its file or folder.
- The member is a class derived from ``torch.nn.Module``, or a plain function, and is defined in an admitted module. A name that the
  module only imports (``my_net:os.system``) is not.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

from sft.common.errors import InputError

__all__ = ["Trust", "TrustedCode", "is_module_name", "module_place", "resolve_member"]

#: Installed packages whose functions run other code by name.
_NEVER_TRUSTED = ("torch", "sft")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedCode:
    """Modules with code that may be run.

    Attributes:
        modules: their full names; submodules are included.
        paths: files of modules, and folders of modules and packages.
    """

    modules: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()

    @classmethod
    def of(cls, trust: Trust) -> TrustedCode:
        """Parse names and paths.

        Args:
            trust: a module (``"my_net"``), a file (``"nets/my_net.py"``), a folder (``"nets/"``, ``"."``), or several of them.

        Raises:
            InputError: one is neither, does not exist, or is of a package that is never trusted.
        """
        if isinstance(trust, TrustedCode):
            return trust
        modules: list[str] = []
        paths: list[Path] = []
        for text in [trust] if isinstance(trust, str) else trust:
            if is_module_name(text) and not text.endswith(".py"):
                modules.append(text)
                continue
            path = Path(os.path.realpath(text))
            if not text or not (path.is_dir() or (path.is_file() and path.suffix == ".py" and path.stem.isidentifier())):
                raise InputError(
                    f"trust {text!r}: give a module (my_net, package.nets), its file (nets/my_net.py), or the folder that holds it (nets/)"
                )
            paths.append(path)
        for name in (*modules, *(path.stem for path in paths if path.is_file())):
            reason = _never_reason(name)
            if reason:
                raise InputError(f"trust {name!r}: {reason}, which a configuration never runs. Trust a module of yours.")
        return cls(modules=tuple(modules), paths=tuple(paths))

    def refusal(self, module: str) -> str:
        """Reason for which a module is not admitted, with the remedy; empty if it is."""
        reason = _never_reason(module)
        if reason:
            return f"{reason}, which a configuration never runs. Name a model of timm or torchvision, or a class or function of yours."
        if any(module == name or module.startswith(f"{name}.") for name in self.modules):
            return ""
        place = module_place(module)
        if place is not None and any(path in (place, place.parent) for path in self.paths):
            return ""
        if place is None:
            return f"cannot import {module}: no such module is found. Check the name, and that PYTHONPATH reaches it."
        return (
            f"the module {module} ({place}) is code, and a configuration runs only what you trust. If you know what it does, add "
            f"--trust {module} (in Python: trust={module!r})."
        )

    def extend_import_path(self) -> None:
        """Add the folders of the trusted paths to the end of ``sys.path``: installed packages keep their precedence."""
        for path in self.paths:
            folder = str(path if path.is_dir() else path.parent)
            if folder not in map(os.path.realpath, sys.path):
                sys.path.append(folder)


#: Module names, files and folders, as callers write them.
Trust: TypeAlias = str | Sequence[str] | TrustedCode


def is_module_name(text: str) -> bool:
    """True for a full name of a module: identifiers joined by points."""
    return all(name.isidentifier() for name in text.split("."))


def module_place(module: str) -> Path | None:
    """File of a module's top-level module, or folder of its package; nothing is imported. None for a module that does not exist."""
    top = module.partition(".")[0]
    with suppress(ImportError, ValueError):  # a ValueError for `__main__`, which has no spec
        spec = importlib.util.find_spec(top)
        if spec is not None:
            locations = list(spec.submodule_search_locations or ())
            place = locations[0] if locations else spec.origin
            return None if place is None else Path(os.path.realpath(place))
    return None


def resolve_member(module: Any, member: str, trust: TrustedCode) -> Any:
    """The class or function that a configuration names.

    Args:
        module: the imported module.
        member: name inside it; points lead through classes.
        trust: admitted modules.

    Raises:
        InputError: it does not exist, is neither a network's class nor a function, or is defined in another module.
    """
    from torch import nn  # the command line parses names before it imports torch

    module_name = module.__name__
    value, owner = module, module
    for attribute in member.split("."):
        owner = value
        # A class's own dictionary tells a static method from a function that is stored in it; a module may make its members on demand.
        value = (
            None if attribute.startswith("__") else (inspect.getattr_static if isinstance(owner, type) else getattr)(owner, attribute, None)
        )
        if value is None:
            raise InputError(f"module {module_name} has no callable {member!r}. Name a class or function that makes a network.")
        if inspect.ismodule(value):
            raise InputError(f"{attribute} is a module that {module_name} imports. Name a class or function of {module_name} itself.")
    is_method = isinstance(value, classmethod | staticmethod)
    function = value.__func__ if is_method else value
    remedy = f"Write a function in {module_name} that makes the network."
    if not (isinstance(function, type) and issubclass(function, nn.Module)) and type(function) is not FunctionType:
        described = f"the class {function.__name__}" if isinstance(function, type) else f"an object of type {type(function).__name__}"
        raise InputError(f"{member} is {described}, neither a class derived from torch.nn.Module nor a function. {remedy}")
    if trust.refusal(str(function.__module__)):
        raise InputError(f"{member} is defined in {function.__module__}, which is not trusted. {remedy}")
    return getattr(owner, member.rpartition(".")[2]) if is_method else value


def _never_reason(module: str) -> str:
    """The kind of a package that is never trusted; empty for others."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"{top} is of Python's standard library"
    return f"{top} holds functions that run other code" if top in _NEVER_TRUSTED else ""
