"""All cases, in the order in which they run: the longest list last."""

from __future__ import annotations

from .case import Case
from .models_monai import MONAI
from .models_timm import TIMM
from .models_torchvision import TORCHVISION

__all__ = ["CASES", "case_named"]

CASES: tuple[Case, ...] = (*TORCHVISION, *MONAI, *TIMM)


def case_named(label: str) -> Case:
    """The case with this label."""
    return next(case for case in CASES if case.label == label)
