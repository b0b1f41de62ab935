"""Parsers of the command line: one function a command, which adds its options.

Options of a configuration take a tenth of a second a command, so that only those of the command at hand are added.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

import sft
from sft.wsi.config import GROUPS

__all__ = ["TRUST", "WITH_NETWORK", "config_parser", "make_parser"]

TRUST = "--trust"
WITH_NETWORK = ("plan", "train", "evaluate", "predict", "heatmap", "folds")
_MapFormat = Literal["ome.tif", "tif", "zarr", "npy", "geojson"]


class _Command(NamedTuple):
    """A command: its line in ``--help``, and a function that adds its options."""

    description: str
    add_options: Callable[[ArgumentParser], None]


class _SettingsParser(ArgumentParser):
    """A parser with plain names of types in its help: ``path`` instead of ``<class 'Path'>``."""

    def format_help(self, *arguments: Any, **keywords: Any) -> str:
        return re.sub(r"<class\s+'(\w+)'>", lambda match: match[1].lower(), super().format_help(*arguments, **keywords))


def make_parser(command: str | None, *, needs_table: bool = True) -> ArgumentParser:
    """The parser of all commands, of which ``command`` has its options; the others have a name and a description.

    Args:
        command: name of the command at hand.
        needs_table: False for ``plan --size``, which reads the table of the slides only if it is there.
    """
    parser = _empty_parser("Train and evaluate on whole slides.", prog="python -m sft.wsi")
    parser.add_argument("--version", action="version", version=f"sft {sft.__version__}")
    subcommands = parser.add_subcommands(required=True)
    for name, (description, add_options) in _COMMANDS.items():
        subparser = _empty_parser(description)
        if name == command:
            subparser.add_argument("--json", action="store_true", help="print the result as one JSON object")
            subparser.add_argument("--debug", action="store_true", help="show tracebacks")
            add_options(subparser)
            if not needs_table:
                subparser.set_defaults({"data.csv": Path("slides.csv")})
            if name in WITH_NETWORK:
                about = "module, file or folder whose classes and functions model.backbone may name; may be repeated (never in a file)"
                subparser.add_argument(TRUST, type=str, action="append", metavar="MODULE", help=about)
        subcommands.add_subcommand(name, subparser, help=description)
    return parser


@cache
def config_parser() -> ArgumentParser:
    """The parser of a configuration file alone."""
    parser = _empty_parser("config")
    _add_config(parser)
    return parser


def _empty_parser(description: str, prog: str | None = None) -> ArgumentParser:
    # An abbreviated --config would escape the checks of its file.
    return _SettingsParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action="config", help="YAML file; options after it win")
    for name, cls in GROUPS.items():
        parser.add_class_arguments(cls, name)
    # The argparse of Python 3.11 lets torchrun take `--run` for the beginning of an option of its own, wherever it stands.
    parser.add_argument("--run", "--folder", type=Path, default=Path("runs/run"), help="folder that everything is written to")
    parser.add_argument("--tensorboard", type=bool, default=False, help="write events for TensorBoard as well")


def _add_run(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--split", type=Literal["train", "val", "test", "all"], default="val", help="slides of the run's table")
    parser.add_argument("--csv", type=Path, help="another table, all slides of it")
    parser.add_argument("--slides", type=Path, help="folder that slides are relative to")
    parser.add_argument("--checkpoint", type=Literal["best", "last"], default="best", help="which weights")
    parser.add_argument("--device", type=str, help="cpu or cuda; default: that of the run")
    parser.add_argument("--budget", type=str, help="bytes that the device may hold, or auto; default: those of the run")
    parser.add_argument("--out", type=Path, help="folder for the results; default: in the run's")


def _add_bootstrap(parser: ArgumentParser) -> None:
    parser.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")


def _add_doctor(_: ArgumentParser) -> None:
    pass


def _add_slide_info(parser: ArgumentParser) -> None:
    parser.add_argument("slides", type=Path, nargs="+", help="files")


def _add_tissue(parser: ArgumentParser) -> None:
    parser.add_argument("slides", type=Path, nargs="+", help="slide files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--mpp", type=float, default=8.0, help="micrometres per pixel of the masks")
    parser.add_argument("--overwrite", action="store_true", help="replace masks that exist already")
    parser.add_argument("--slide-mpp", type=float, help="micrometres per pixel of the slides, if the files state none or a wrong value")


def _add_plan(parser: ArgumentParser) -> None:
    _add_config(parser)
    size = "of the image in px, as slide-info prints it, without any slide, such as 80000x60000; default: the largest slide of the table"
    parser.add_argument("--size", type=str, nargs="+", metavar="WIDTHxHEIGHT", help=f"{size}. Two numbers are height and width")


def _add_train(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="run all checks, print the plan, and write no files")
    _add_bootstrap(parser)


def _add_evaluate(parser: ArgumentParser) -> None:
    _add_run(parser)
    _add_bootstrap(parser)
    parser.add_argument("--bands", type=int, default=1, help="of the ranks that torchrun starts, how many share one slide")
    about = "formats in which to write the predicted maps of a segmentation as well, with the confusion of pixels; default: none"
    parser.add_argument("--maps", type=_MapFormat, nargs="+", help=about)


def _add_predict(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("files", type=Path, nargs="*", metavar="SLIDE", help="slide files; default: those of --csv, or of --split")
    parser.add_argument("--kind", type=Literal["classes", "softmax", "sigmoid", "values"], help="default: classes of a segmentation")
    parser.add_argument("--formats", type=_MapFormat, nargs="+", help="default: ome.tif, and geojson of classes")
    parser.add_argument("--dtype", type=str, help="element type, such as uint16 or float16; default: uint8, of values float32")
    parser.add_argument("--overwrite", action="store_true", help="compute maps again that exist already")


def _add_heatmap(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--names", type=str, nargs="+", help="slides by name; default: all of the split")
    parser.add_argument("--classes", type=str, nargs="+", help="classes to draw; default: all, or the second of two")
    parser.add_argument("--saliency", action="store_true", help="draw the gradient of the input as well")
    parser.add_argument("--crops", type=int, default=5, help="number of crops at the maxima of the map")
    parser.add_argument("--crop-px", type=int, default=256, help="side of a crop in px")


def _add_folds(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--folds", type=PositiveInt, help="number of folds; default: data.num_folds")
    _add_bootstrap(parser)


def _add_compare(parser: ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or of folds")
    parser.add_argument("--split", type=str, help="folder of results to compare; default: val and test")
    parser.add_argument("--out", type=Path, help="CSV file for the table")


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run")


_COMMANDS: dict[str, _Command] = {
    "doctor": _Command("list installed and missing packages", _add_doctor),
    "slide-info": _Command("print the metadata of slide files", _add_slide_info),
    "tissue": _Command("find the tissue on slides: masks, polygons, and pictures to look at", _add_tissue),
    "plan": _Command("memory, time and schedule of a training step, without running it", _add_plan),
    "train": _Command("train, or resume an interrupted run; then evaluate", _add_train),
    "evaluate": _Command("predict and measure", _add_evaluate),
    "predict": _Command(
        "write maps of slides without labels: classes or probabilities of a segmentation, otherwise the evidence of each class",
        _add_predict,
    ),
    "heatmap": _Command("draw class-activation maps over slides, or the predicted masks of a segmentation", _add_heatmap),
    "folds": _Command("train or resume each fold of a cross-validation; then write one table over the folds", _add_folds),
    "compare": _Command("one table of the metrics of several runs, and the settings in which they differ", _add_compare),
    "report": _Command("write the pages of a run, summary.md and report.html, from what its folder has", _add_report),
}
