"""Outcomes of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["FAILURES", "KINDS", "Kind", "Outcome", "TilingOutcome"]

Kind = Literal["exact", "exact, whole", "refused", "wrong", "crash", "eager cannot"]

#: From best to worst.
KINDS: tuple[Kind, ...] = ("exact", "exact, whole", "refused", "eager cannot", "wrong", "crash")

#: Failures. A refusal is a valid outcome.
FAILURES: frozenset[Kind] = frozenset({"wrong", "crash"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingOutcome:
    """A model under one tiling."""

    tiling: str
    """Name of the tiling."""
    kind: Kind
    message: str = ""
    """Message of a refusal, a mismatch or an exception."""
    problems: tuple[str, ...] = ()
    """Of a refusal, one line for each reason."""
    seconds: float = 0.0
    """Of everything: capture, planning, all steps of both sides."""
    compile_seconds: float = 0.0
    """Of ``sft.compile``."""
    num_segments: int = 0
    num_tiled_segments: int = 0
    """Segments that run in more than one strip or panel."""
    operators_share: float = 0.0
    """Of all operators, those in such segments."""
    flops_share: float = 0.0
    """Of all planned FLOPs (what strips compute again included), those in such segments."""
    error: float = 0.0
    """The largest relative error of outputs, gradients, buffers and updated parameters."""
    rounding_of_eager: float = 0.0
    """If the error is above the tolerance: the sensitivity of eager PyTorch's results to rounding."""
    left_strips: Mapping[str, int] = field(default_factory=dict)
    """Operators that run whole although a value that they read could come in strips, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A model under all tilings; the worst outcome is the model's."""

    package: str
    name: str
    shape: tuple[int, ...]
    kind: Kind
    message: str = ""
    num_parameters: int = 0
    seconds: float = 0.0
    """Of the case's process, building the model included."""
    tilings: tuple[TilingOutcome, ...] = ()
    commit: str = ""
    """Commit of the code that ran it: a resumed run may have outcomes of several."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Read the result of :meth:`to_json`."""
        tilings = tuple(TilingOutcome(**{**tiling, "problems": tuple(tiling["problems"])}) for tiling in data["tilings"])
        return cls(**{**data, "shape": tuple(data["shape"]), "tilings": tilings})

    def to_json(self) -> dict[str, Any]:
        """Fields for a JSON file."""
        return asdict(self)

    @property
    def label(self) -> str:
        """Label of the case."""
        return f"{self.package}/{self.name}"

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons of a refusal."""
        return next((tiling.problems for tiling in self.tilings if tiling.problems), ())
