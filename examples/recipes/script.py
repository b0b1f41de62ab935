"""Common parts of the scripts of recipes: the command line, measured peaks of memory, and the printed comparison with plain PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.common.model_zoo import import_library

__all__ = [
    "Comparison",
    "drawn_volume",
    "gradient_difference",
    "import_torchvision",
    "measured",
    "positive",
    "prediction_parser",
    "recipe_parser",
    "run",
    "stored_values",
    "whole_source",
]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Memory of the same work with plain PyTorch and with sft, and the difference of the results.

    Attributes:
        plain_bytes: peak with plain PyTorch, above the model and the inputs that exist before.
        sft_bytes: peak with sft, counted in the same way.
        budget: budget of the compiled model.
        difference: difference of the results, in the unit that `measure` names.
        measure: meaning of `difference`, for the report.
    """

    plain_bytes: int
    sft_bytes: int
    budget: str
    difference: float
    measure: str

    def __str__(self) -> str:
        plain, ours = sft.format_bytes(self.plain_bytes), sft.format_bytes(self.sft_bytes)
        return f"peak: plain PyTorch {plain}, sft {ours} (budget {self.budget})\n{self.measure}: {self.difference:g}"


def measured(work: Callable[[], _Result]) -> tuple[_Result, int]:
    """Result of a function, and the peak of the bytes that it allocates on the CPU."""
    with sft.measure_peak("cpu") as peak:
        result = work()
    return result, peak.num_bytes


def gradient_difference(ours: nn.Module, plain: nn.Module) -> float:
    """Norm of the difference of the gradients of two models, relative to the norm of the second."""
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True) if b.grad is not None]
    columns = [torch.cat([gradient.flatten() for gradient in column if gradient is not None]) for column in zip(*pairs, strict=True)]
    return float((columns[0] - columns[1]).norm() / columns[1].norm())


def import_torchvision() -> None:
    """Import torchvision if it is installed, also if its compiled operators are for another build of torch."""
    if importlib.util.find_spec("torchvision") is not None:
        import_library("torchvision")


def drawn_volume(depth: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """A volume ``[1, 1, D, H, W]`` of waves with noise, and three classes of its intensity, ``[1, D, H, W]``."""
    z, y, x = torch.meshgrid(torch.arange(depth), torch.arange(height), torch.arange(width), indexing="ij")
    waves = torch.sin(x / 9) + torch.sin(y / 7) + torch.sin(z / 11)
    noise = torch.randn(waves.shape, generator=torch.Generator().manual_seed(0))
    return (waves + 0.3 * noise)[None, None], ((waves > -0.7).long() + (waves > 0.7).long())[None]


def whole_source(source: sft.sources.Source) -> Tensor:
    """All rows of a source as a tensor, the input of plain PyTorch."""
    image = torch.empty(source.shape, dtype=source.dtype)
    source.rows(Interval(0, source.shape[2]), image)
    return image


def stored_values(path: Path) -> npt.NDArray[Any]:
    """Values of a written raster, ``[channels, height, width]``."""
    rows = list(sft.sources.read_strips(sft.sources.open_image(path), 512))
    return np.moveaxis(np.concatenate([np.asarray(strip) for strip in rows]), 2, 0)


def recipe_parser(documentation: str | None, *, height: int, width: int, budget: str) -> argparse.ArgumentParser:
    """Command line of a recipe: the size of the image that it draws, and the budget.

    Args:
        documentation: docstring of the script.
        height: default height of the image in pixels.
        width: default width of the image in pixels.
        budget: default budget of the compiled model.
    """
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--height", type=positive, default=height, metavar="PX", help="height of the drawn image")
    parser.add_argument("--width", type=positive, default=width, metavar="PX", help="width of the drawn image")
    parser.add_argument("--budget", default=budget, metavar="BYTES", help="memory of the compiled model, such as 64MiB")
    return parser


def prediction_parser(documentation: str | None, name: str, *, height: int, width: int, budget: str) -> argparse.ArgumentParser:
    """Command line of a recipe that writes files: `recipe_parser` and the folder."""
    parser = recipe_parser(documentation, height=height, width=width, budget=budget)
    parser.add_argument("--out", type=_folder, default=f"out/{name}", metavar="FOLDER", help="folder of the image and the predictions")
    return parser


def positive(text: str) -> int:
    """Read a number of pixels."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def _folder(text: str) -> Path:
    """Make a folder."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path


def run(recipe: Callable[[Sequence[str] | None], Comparison]) -> int:
    """Run a recipe with the arguments of the command line, and print its comparison; returns the exit status."""
    try:
        print(recipe(None))
    except ModuleNotFoundError as error:
        print(f"error: {error}; docs/recipes says what each recipe needs", file=sys.stderr)
        return 1
    except (sft.SftError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
