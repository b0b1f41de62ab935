"""Models of other packages by name.

A name is written on a command line or in a configuration: ``timm:NAME``, ``torchvision:NAME``, ``package.module:callable``, or a bare
``NAME``, which is looked up in both libraries. Importing a package and calling a factory run foreign code; any exception that it raises
becomes an `InputError` that quotes the name and says where to change it. A name on a command line is the caller's own, and may be any
callable. A name in a configuration is possibly that of another author (`sft.common.untrusted.trusted_code`).

*The missing operators.* torchvision's compiled part is built for one build of torch and does not load with another. Importing the rest, and
timm with it, then fails because two operators are undeclared that no convolutional network calls (pytorch/vision#9085). Declaring their
names is enough. They are declared only after an import has failed: where the compiled part fits it declares them itself, and declaring
them twice is an error.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sft.common.errors import InputError
from sft.common.untrusted.trusted_code import TrustedCode, is_module_name, resolve_member

__all__ = ["ModelFactory", "ModelName", "import_library"]

_OPERATORS = ("nms", "qnms")
#: Options of timm with which it reads files of weights that a configuration names: older releases read them as pickles.
_TIMM_FILE_OPTIONS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def import_library(module: str) -> ModuleType:
    """Import a module, also when torchvision's compiled operators do not fit the installed torch.

    Args:
        module: its full name.

    Raises:
        Exception: any other exception of the import.
    """
    before = frozenset(sys.modules)
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if not any(f"torchvision::{operator} " in f"{error} " for operator in _OPERATORS):
            raise
    for operator in _OPERATORS:
        with suppress(RuntimeError):  # it is declared already
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _drop_orphan_modules(before)
    return importlib.import_module(module)


def _drop_orphan_modules(before: Collection[str]) -> None:
    """Remove the modules of packages that failed to import from ``sys.modules``: a new package would not have them as attributes."""
    for name in set(sys.modules).difference(before):
        parts = name.split(".")
        if any(".".join(parts[:end]) not in sys.modules for end in range(1, len(parts))):
            del sys.modules[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """The name of a model, as written by the user.

    Attributes:
        text: the name.
        place: the setting that holds it, for messages: ``"MODEL"``, ``"model.backbone"``.
        options_place: the setting that holds the factory's arguments: ``"--model-args"``, ``"model.options"``.
        libraries: libraries in which a bare name is looked up, in this order.
        trust: modules that may be run. Default: `None` (any: the caller has written the name)
    """

    text: str
    place: str
    options_place: str
    libraries: tuple[str, ...] = ("torchvision", "timm")
    trust: TrustedCode | None = None

    def check_trust(self) -> None:
        """Check the module of a name in a configuration, without importing it.

        Raises:
            InputError: the module is not trusted, or does not exist.
        """
        module, _, member = self.text.rpartition(":")
        if self.trust is None or not member or module in ("", "torch.nn", *_FACTORIES):
            return
        if not is_module_name(module) or not is_module_name(member):
            raise self.error(": write package.module:name, of letters, digits and underscores")
        self.trust.extend_import_path()
        refusal = self.trust.refusal(module)
        if refusal:
            raise self.error(f": {refusal}")

    def factory(self) -> ModelFactory:
        """The factory of the model.

        Raises:
            InputError: no such model exists, or its library cannot be imported.
        """
        self.check_trust()
        library, _, member = self.text.rpartition(":")
        if not member:
            raise self.error(f": write package.module:callable, or the name of a model in {' or '.join(_FACTORIES)}")
        if library in _FACTORIES:
            remedy = f'pip install {library}, or name another model as "package.module:callable"'
            function = _FACTORIES[library](self._import(library, remedy), member)
            if function is None:
                names = _NAMES[library](sys.modules[library])
                raise self.error(f": {library} has no model {member!r}.{_suggestion(member, names)} {_LISTS[library]} has all names.")
            return ModelFactory(name=self, library=library, function=function)
        if not library:
            return self._search_libraries()
        value: Any = self._import(library, "Check the name, and that PYTHONPATH reaches it")
        if self.trust is not None:
            return ModelFactory(name=self, library=library, function=self._resolve(value, member, self.trust))
        for attribute in member.split("."):
            value = getattr(value, attribute, None)
        if not callable(value):
            raise self.error(
                f": module {library} has no callable {member!r}.{_suggestion(member, dir(sys.modules[library]))} "
                "Name a class or function that makes a network."
            )
        return ModelFactory(name=self, library=library, function=(lambda: value) if isinstance(value, nn.Module) else value)

    def error(self, problem: str) -> InputError:
        """An error about this name; ``problem`` follows the quoted name."""
        return InputError(f"{self.place} {self.text!r}{problem}")

    def _resolve(self, module: ModuleType, member: str, trust: TrustedCode) -> Callable[..., Any]:
        """The trusted class or function, or a layer of torch."""
        if module is torch.nn:
            layer = getattr(module, member, None)
            if isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__module__.startswith("torch.nn.modules."):
                return layer
            raise self.error(f": torch.nn has no layer {member!r}. Check the name.")
        try:
            function: Callable[..., Any] = resolve_member(module, member, trust)
        except InputError as error:
            raise self.error(f": {error}") from error
        return function

    def _search_libraries(self) -> ModelFactory:
        if self.text.endswith(".py") or "/" in self.text:
            raise self.error(f": it is a file. Write its module and the callable that makes the network, {Path(self.text).stem}:NAME")
        reasons, names, num_missing = [], set[str](), 0
        for library in self.libraries:
            try:
                package = import_library(library)
                function = _FACTORIES[library](package, self.text)
            except ModuleNotFoundError as error:
                reasons.append(f"{library} is not installed" if error.name == library else f"{library}: {error}")
                num_missing += error.name == library
                continue
            except (Exception, SystemExit) as error:  # importing runs foreign code; the other library may have the model
                reasons.append(f"{library}: {type(error).__name__}: {error}")
                continue
            if function is not None:
                return ModelFactory(name=self, library=library, function=function)
            reasons.append(f"{library} has no such model")
            names.update(_NAMES[library](package))
        remedy = f"pip install {self.libraries[0]}" if num_missing == len(self.libraries) else "Check the name"
        raise self.error(f": not found ({'; '.join(reasons)}).{_suggestion(self.text, names)} {remedy}, or write package.module:callable")

    def _import(self, module: str, remedy: str) -> ModuleType:
        try:
            return import_library(module)
        except (Exception, SystemExit) as error:  # importing runs foreign code, which may also be a script that ends the process
            if module.endswith(".py"):
                remedy = f"Write a module without its ending: {module.removesuffix('.py')}:{self.text.rpartition(':')[2]}"
            elif isinstance(error, ModuleNotFoundError) and error.name == module and _is_in_unsearched_folder(module):
                remedy = "It is in the current folder, which is not on Python's path: set PYTHONPATH=."
            raise self.error(f": cannot import {module} ({type(error).__name__}: {error}). {remedy.removesuffix('.')}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFactory:
    """Factory of a named model.

    Attributes:
        name: as written by the user.
        library: ``"timm"``, ``"torchvision"``, or the module that holds the function.
        function: maps options to a model; for torchvision without pretrained weights unless an option asks for them.
    """

    name: ModelName
    library: str
    function: Callable[..., Any]

    def make(self, options: Mapping[str, Any]) -> nn.Module:
        """Build the model.

        Raises:
            InputError: the function fails or does not return a module, or an option names a file that may hold code.
        """
        trust = self.name.trust
        if self.library == "timm" and trust is not None and trust.refusal("timm"):
            files = [option for option in _TIMM_FILE_OPTIONS if options.get(option)]
            if files:
                raise self.name.error(
                    f": {self.name.options_place}.{files[0]} lets timm read files that may hold code. Give the weights as model.weights, "
                    "or add --trust timm."
                )
        try:
            model = self.function(**options)
        except (Exception, SystemExit) as error:  # foreign code: any exception is possible
            raise self.name.error(
                f" cannot be made ({type(error).__name__}: {' '.join(str(error).split())}). Check the name and {self.name.options_place}."
            ) from error
        if not isinstance(model, nn.Module):
            raise self.name.error(f" returned an object of type {type(model).__name__}. Name a callable that returns an nn.Module.")
        return model


def _torchvision_factory(torchvision: Any, name: str) -> Callable[..., Any] | None:
    models = torchvision.models
    return (lambda **options: models.get_model(name, **{"weights": None, **options})) if name.lower() in models.list_models() else None


def _timm_factory(timm: Any, name: str) -> Callable[..., Any] | None:
    return (lambda **options: timm.create_model(name, **options)) if timm.is_model(name) else None


def _suggestion(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant, after a blank; empty if none is similar."""
    close = get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f" Did you mean {close[0]}?" if close else ""


def _is_in_unsearched_folder(module: str) -> bool:
    """A module of the current folder that Python does not search, as with its option ``-P``."""
    name = module.partition(".")[0]
    return (Path(f"{name}.py").is_file() or Path(name).is_dir()) and not {"", os.getcwd()} & set(sys.path)


#: Names of all models of a library, and the call that lists them.
_NAMES: dict[str, Callable[[Any], list[str]]] = {
    "torchvision": lambda torchvision: list(torchvision.models.list_models()),
    "timm": lambda timm: list(timm.list_models()),
}
_LISTS = {"torchvision": "torchvision.models.list_models()", "timm": "timm.list_models()"}
_FACTORIES: dict[str, Callable[[Any, str], Callable[..., Any] | None]] = {"torchvision": _torchvision_factory, "timm": _timm_factory}
