"""Models of other packages, by name.

A name is what people write on a command line or in a configuration: ``timm:NAME``, ``torchvision:NAME``, ``package.module:callable``, or
``NAME`` alone, which the two libraries are asked for. Importing a package and calling a maker run anybody's code, so whatever they raise
becomes an `InputError` that repeats what was written and says where to change it.

*The missing operators.* torchvision's compiled part is built for one build of torch and does not load with another; then importing the
rest, and timm with it, fails over the names of two operators that no convolutional network calls (pytorch/vision#9085). Declared, they need
no code. They are declared only after an import has failed over them: where the compiled part fits, it declares them itself, and twice is
an error.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sft.common.errors import InputError

__all__ = ["ModelFactory", "ModelName", "import_library"]

_OPERATORS = ("nms", "qnms")


def import_library(module: str) -> ModuleType:
    """Import a module, also beside a torchvision whose compiled operators do not fit this torch.

    Args:
        module: its full name.

    Raises:
        Exception: whatever importing it raises otherwise.
    """
    before = frozenset(sys.modules)
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if not any(f"torchvision::{operator} " in f"{error} " for operator in _OPERATORS):
            raise
    for operator in _OPERATORS:
        with suppress(RuntimeError):  # there is one
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _drop_orphan_modules(before)
    return importlib.import_module(module)


def _drop_orphan_modules(before: Collection[str]) -> None:
    """Drop modules whose package failed to import: a new package would not have them as attributes."""
    for name in set(sys.modules).difference(before):
        parts = name.split(".")
        if any(".".join(parts[:end]) not in sys.modules for end in range(1, len(parts))):
            del sys.modules[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A model as somebody named it.

    Attributes:
        text: what was written.
        place: where it was written, for messages: ``"MODEL"``, ``"model.backbone"``.
        options_place: where the maker's arguments are written: ``"--model-args"``, ``"model.options"``.
        libraries: whom to ask for a name alone, in this order.
    """

    text: str
    place: str
    options_place: str
    libraries: tuple[str, ...] = ("torchvision", "timm")

    def maker(self) -> ModelFactory:
        """Who makes the model.

        Raises:
            InputError: there is no such model, or its library cannot be imported.
        """
        library, _, member = self.text.rpartition(":")
        if not member:
            raise self.error(f": write package.module:callable, or the name of a model in {' or '.join(_FACTORIES)}")
        if library in _FACTORIES:
            remedy = f'pip install {library}, or name another model as "package.module:callable"'
            found = _FACTORIES[library](self._imported(library, remedy), member)
            if found is None:
                raise self.error(f": {library} has no model {member!r}. Check the name; {library}.list_models() has them all.")
            return ModelFactory(name=self, library=library, function=found)
        if not library:
            return self._of_any_library()
        value: Any = self._imported(library, "Check the name, and that PYTHONPATH reaches it")
        for part in member.split("."):
            value = getattr(value, part, None)
        if not callable(value):
            raise self.error(f": module {library} has no callable {member!r}. Name a class or function that makes a network.")
        return ModelFactory(name=self, library=library, function=(lambda: value) if isinstance(value, nn.Module) else value)

    def error(self, what: str) -> InputError:
        """An error about this name; ``what`` follows it."""
        return InputError(f"{self.place} {self.text!r}{what}")

    def _of_any_library(self) -> ModelFactory:
        reasons = []
        for library in self.libraries:
            try:
                function = _FACTORIES[library](import_library(library), self.text)
            except Exception as error:  # importing runs anybody's code; the other library may have the model
                reasons.append(f"{library}: {type(error).__name__}: {error}")
                continue
            if function is not None:
                return ModelFactory(name=self, library=library, function=function)
            reasons.append(f"{library} has no such model")
        raise self.error(f": not found ({'; '.join(reasons)}). Check the name, or write package.module:callable")

    def _imported(self, module: str, remedy: str) -> ModuleType:
        try:
            return import_library(module)
        except Exception as error:  # importing runs anybody's code
            raise self.error(f": cannot import {module} ({type(error).__name__}: {error}). {remedy}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFactory:
    """What makes a named model.

    Attributes:
        name: as it was asked for.
        library: ``"timm"``, ``"torchvision"``, or the module that holds the function.
        function: from options to a model; of torchvision without weights, if no option says otherwise.
    """

    name: ModelName
    library: str
    function: Callable[..., Any]

    def make(self, options: Mapping[str, Any]) -> nn.Module:
        """Make the model.

        Raises:
            InputError: the function fails, or makes something else.
        """
        try:
            model = self.function(**options)
        except Exception as error:  # a maker may raise anything
            raise self.name.error(
                f" cannot be made ({type(error).__name__}: {error}). Check the name and {self.name.options_place}."
            ) from error
        if not isinstance(model, nn.Module):
            raise self.name.error(f" made a {type(model).__name__}. Name a callable that returns an nn.Module.")
        return model


def _torchvision_factory(torchvision: Any, name: str) -> Callable[..., Any] | None:
    models = torchvision.models
    return (lambda **options: models.get_model(name, **{"weights": None, **options})) if name.lower() in models.list_models() else None


def _timm_factory(timm: Any, name: str) -> Callable[..., Any] | None:
    return (lambda **options: timm.create_model(name, **options)) if timm.is_model(name) else None


_FACTORIES: dict[str, Callable[[Any, str], Callable[..., Any] | None]] = {"torchvision": _torchvision_factory, "timm": _timm_factory}
