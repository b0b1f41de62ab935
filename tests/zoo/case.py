"""Case of a model of another package: constructor and input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["IMAGE", "LARGER", "MULTIPLE_OF_32", "Case", "Package"]

Package = Literal["torchvision", "timm", "monai"]

#: Small, and no multiple of the usual strides: strips of 32 rows make three of them and panels of 40 columns two. A batch of two, so that
#: norms in training mode have two values where a map has one position.
IMAGE = (2, 3, 88, 72)
#: For models with branches that join only at sizes that every stride divides.
MULTIPLE_OF_32 = (2, 3, 96, 96)
#: For models with a last map of one position: norms over the two values of a batch amplify every rounding error, eager's own too.
LARGER = (2, 3, 128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to check.

    Attributes:
        package: where it comes from.
        name: unique in the package.
        make: builds it, with few classes and without pretrained weights; imports the package only when called.
        shape: of the input.
    """

    package: Package
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE

    @property
    def label(self) -> str:
        """Unique among all cases: ``"timm/resnet18"``."""
        return f"{self.package}/{self.name}"
