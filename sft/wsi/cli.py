"""Command line: a YAML file with overriding options (``--train.lr 1e-4``), and one-line error messages.

Exit codes: 0 done; 1 an error; 2 a command line or file with options that do not exist, or values of another type; 3 done, but slides were
left out (0 on several ranks); 75 stopped by a signal, saved, start again to resume.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TextIO

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from rich.console import Console

import sft
from sft.cli.main import escape_unencodable_output, exit_on_interrupt, output_problem
from sft.common.errors import BudgetError, InputError, SftError
from sft.common.terminal import print_text
from sft.common.untrusted.foreign_files import escape_control_characters, shortened
from sft.common.untrusted.trusted_code import Trust
from sft.planner.remedies import Setting, Spelling, message_for
from sft.wsi.config import GROUPS, Config
from sft.wsi.config_file import check_config_file
from sft.wsi.errors import DatasetError, RunInterrupted
from sft.wsi.run.world import World
from sft.wsi.usage_errors import usage_text

__all__ = ["EXIT_ERROR", "EXIT_FAILED_SLIDES", "EXIT_INTERRUPTED", "EXIT_USAGE", "main", "make_config", "read_config"]

EXIT_ERROR, EXIT_USAGE, EXIT_FAILED_SLIDES, EXIT_INTERRUPTED = 1, 2, 3, 75

_ON_SEVERAL_RANKS = ("train", "evaluate", "folds")

#: Remedies of a budget error that a run can take.
_REMEDIES: dict[Setting, Spelling] = {
    "budget": Spelling(action="raise the budget to {size} ({num_bytes} bytes) with --model.budget {text}", code="--model.budget {text}"),
    "input": Spelling(action="take a coarser --data.mpp, or --data.tissue crop"),
    "norms": Spelling(change="--model.norm frozen", code="--model.norm frozen"),
    "options": Spelling(action="leave out --model.tile"),
}
_INFERENCE_REMEDIES = {
    **_REMEDIES,
    "budget": Spelling(action="raise the budget to {size} ({num_bytes} bytes) with --budget {text}", code="--budget {text}"),
}
_TRUST = "--trust"
#: Help of `evaluate --maps`.
_MAPS_HELP = "formats in which to write the predicted maps of a segmentation as well, with the confusion of pixels; default: none"
_WITH_NETWORK = ("plan", "train", "evaluate", "predict", "heatmap", "folds")


#: Output without a command.
_EXAMPLES = """\
Train and evaluate on whole slides. Examples:

  python -m sft.wsi doctor
      installed packages, and missing ones
  python -m sft.wsi slide-info slide.svs
      levels and resolution of a slide
  python -m sft.wsi plan --size 80000x60000 --model.budget 10GiB
      memory and time of a training step, without any slide
  python -m sft.wsi train --config train.yaml --run runs/first
      train with the settings of a file, and evaluate
  python -m sft.wsi heatmap runs/first --split test
      draw class-activation maps over the slides

python -m sft.wsi --help lists all commands, python -m sft.wsi COMMAND --help their options."""


def main(arguments: Sequence[str] | None = None, *, trust: Trust = ()) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: of the command line. Default: `None` (the process's own)
        trust: modules, files or folders that ``model.backbone`` may name, as with ``--trust``. Default: none
    """
    escape_unencodable_output()
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if not command_line:
        print(_EXAMPLES)
        return 0
    is_debug, is_json = "--debug" in command_line, "--json" in command_line
    # Of several ranks the first one reports progress, and the first of each machine reports errors.
    try:
        world = World.here()
    except InputError as error:
        return _complain(error, EXIT_ERROR, is_debug=is_debug, is_json=is_json, is_quiet=False)
    # Messages go to stderr when a program reads stdout.
    console = Console(stderr=is_json, quiet=world.rank > 0)
    if console.width < 20:  # COLUMNS=0 would print nothing
        console.width = 80
    complain = partial(_complain, is_debug=is_debug, is_json=is_json and world.rank == 0, is_quiet=world.local_rank > 0)
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            if world.local_rank > 0:
                warnings.simplefilter("ignore")
            command_line, trusted_names = _split_trust(command_line)
            command, settings = _parse(command_line, trusted_names, world)
            settings.trust = trusted_names or trust
            with exit_on_interrupt():
                from sft.wsi.dispatch import COMMANDS  # imports torch, which --help and mistakes need not wait for

            result = COMMANDS[command](settings, console)
    except ArgumentError as error:
        return complain(ArgumentError(None, usage_text(error)), EXIT_USAGE)
    except RunInterrupted as error:
        return complain(error, EXIT_INTERRUPTED, kind="interrupted")
    except (SftError, OSError) as error:
        return complain(_described(error), EXIT_ERROR, is_inference=command_line[:1] in (["evaluate"], ["predict"], ["heatmap"]))
    except KeyboardInterrupt as error:
        return complain(error, 130, kind="interrupted")
    if is_json and world.rank == 0:
        print(json.dumps(result.value, allow_nan=False))
    if result.num_failed and world.num_ranks > 1:
        # torchrun takes any other code for a failure, and would start the ranks again.
        left_out = "1 slide was" if result.num_failed == 1 else f"{result.num_failed} slides were"
        print_text(console, f"{left_out} left out: failed.csv")
        return 0
    return EXIT_FAILED_SLIDES if result.num_failed else 0


def _parse(command_line: Sequence[str], trusted_names: Sequence[str], world: World) -> tuple[str, Any]:
    """Name and settings of a command; ``trusted_names`` are the values of ``--trust``.

    Raises:
        ArgumentError: an argument is wrong.
        InputError: the configuration file is wrong, or the command does not support an option or several ranks.
    """
    for option, value in zip_longest(command_line, command_line[1:], fillvalue=""):
        if option == "--config" or option.startswith("--config="):
            check_config_file(Path(option.partition("=")[2] or value), GROUPS)
    parsed = _parser().parse_args(command_line)
    command = str(parsed.subcommand)
    if world.num_ranks > 1 and command not in _ON_SEVERAL_RANKS:
        raise InputError(
            f"{command} is for one process, and {world.num_ranks} were started: start it without torchrun; several ranks can "
            f"{' and '.join(_ON_SEVERAL_RANKS)}"
        )
    settings = parsed[command]
    if trusted_names and command not in _WITH_NETWORK:
        raise InputError(f"{_TRUST} is for {', '.join(_WITH_NETWORK)}, which load a network; leave it out")
    if getattr(settings, "trust", None):
        raise InputError(f"trust is not a setting of a configuration: the command line says what is trusted, with {_TRUST} MODULE")
    return command, settings


def _described(error: SftError | OSError) -> SftError | OSError:
    """An error of the operating system with a remedy; other errors unchanged."""
    if not isinstance(error, OSError):
        return error
    problem = output_problem(error)
    if problem:
        return OSError(problem)
    if isinstance(error, SftError) or not error.filename or not error.strerror:
        return error
    return OSError(f"{shortened(str(error.filename))}: {error.strerror}. Check the path, its permissions, and the space on its disk.")


def read_config(path: Path) -> Config:
    """The configuration in a YAML file.

    Raises:
        InputError: it is wrong.
    """
    check_config_file(path, GROUPS)
    try:
        return make_config(_configured("config").parse_args(["--config", str(path)]))
    except ArgumentError as error:
        raise InputError(f"{path}: {usage_text(error)}") from error


def _split_trust(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without ``--trust``, and the values of that option.

    The parser also reads configurations, and a configuration must not trust itself.

    Raises:
        InputError: the option has no value.
    """
    rest: list[str] = []
    names: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        option, has_value, value = argument.partition("=")
        if option != _TRUST:
            rest.append(argument)
            continue
        names.append(value if has_value else next(waiting, ""))
        if not names[-1] or names[-1].startswith("-"):
            raise InputError(f"{_TRUST} {names[-1]}: give a module, a file or a folder, such as {_TRUST} my_net")
    return rest, names


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m sft.wsi", description="Train and evaluate on whole slides.", exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sft {sft.__version__}")
    subcommands = parser.add_subcommands(required=True)

    doctor = _plain("list installed and missing packages")
    info = _plain("print the metadata of slide files")
    info.add_argument("slides", type=Path, nargs="+", help="files")
    tissue = _plain("find the tissue on slides: masks, polygons, and pictures to look at")
    tissue.add_argument("slides", type=Path, nargs="+", help="slide files")
    tissue.add_argument("--out", type=Path, required=True, help="folder for the results")
    tissue.add_argument("--mpp", type=float, default=8.0, help="micrometres per pixel of the masks")
    tissue.add_argument("--overwrite", action="store_true", help="replace masks that exist already")
    tissue.add_argument("--slide-mpp", type=float, help="micrometres per pixel of the slides, if the files state none or a wrong value")
    plan = _configured("memory, time and schedule of a training step, without running it")
    size = "of the image in px, as slide-info prints it, without any slide, such as 80000x60000; default: the largest slide of the table"
    plan.add_argument("--size", type=str, nargs="+", metavar="WIDTHxHEIGHT", help=f"{size}. Two numbers are height and width")
    train = _configured("train, or resume an interrupted run; then evaluate")
    train.add_argument("--dry-run", action="store_true", help="run all checks, print the plan, and write no files")
    train.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")
    evaluate = _of_run("predict and measure")
    evaluate.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")
    evaluate.add_argument("--bands", type=int, default=1, help="of the ranks that torchrun starts, how many share one slide")
    evaluate.add_argument("--maps", type=Literal["ome.tif", "tif", "zarr", "npy", "geojson"], nargs="+", help=_MAPS_HELP)
    predict = _of_run(
        "write maps of slides without labels: classes or probabilities of a segmentation, otherwise the evidence of each class"
    )
    predict.add_argument("files", type=Path, nargs="*", metavar="SLIDE", help="slide files; default: those of --csv, or of --split")
    predict.add_argument("--kind", type=Literal["classes", "softmax", "sigmoid", "values"], help="default: classes of a segmentation")
    predict.add_argument(
        "--formats", type=Literal["ome.tif", "tif", "zarr", "npy", "geojson"], nargs="+", help="default: ome.tif, and geojson of classes"
    )
    predict.add_argument("--dtype", type=str, help="element type, such as uint16 or float16; default: uint8, of values float32")
    predict.add_argument("--overwrite", action="store_true", help="compute maps again that exist already")
    heatmap = _of_run("draw class-activation maps over slides, or the predicted masks of a segmentation")
    heatmap.add_argument("--names", type=str, nargs="+", help="slides by name; default: all of the split")
    heatmap.add_argument("--classes", type=str, nargs="+", help="classes to draw; default: all, or the second of two")
    heatmap.add_argument("--saliency", action="store_true", help="draw the gradient of the input as well")
    heatmap.add_argument("--crops", type=int, default=5, help="number of crops at the maxima of the map")
    heatmap.add_argument("--crop-px", type=int, default=256, help="side of a crop in px")
    folds = _configured("train or resume each fold of a cross-validation; then write one table over the folds")
    folds.add_argument("--folds", type=PositiveInt, help="number of folds; default: data.num_folds")
    folds.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")
    compare = _plain("one table of the metrics of several runs, and the settings in which they differ")
    compare.add_argument("runs", type=Path, nargs="+", help="folders of runs, or of folds")
    compare.add_argument("--split", type=str, help="folder of results to compare; default: val and test")
    compare.add_argument("--out", type=Path, help="CSV file for the table")

    report = _plain("write the pages of a run, summary.md and report.html, from what its folder has")
    report.add_argument("run", type=Path, help="folder of a run")

    for sub in (plan, train, evaluate, predict, heatmap, folds):
        about = "module, file or folder whose classes and functions model.backbone may name; may be repeated (never in a file)"
        sub.add_argument(_TRUST, type=str, action="append", metavar="MODULE", help=about)

    for name, sub in (
        ("doctor", doctor),
        ("slide-info", info),
        ("tissue", tissue),
        ("plan", plan),
        ("train", train),
        ("evaluate", evaluate),
        ("predict", predict),
        ("heatmap", heatmap),
        ("folds", folds),
        ("compare", compare),
        ("report", report),
    ):
        subcommands.add_subcommand(name, sub, help=sub.description)
    return parser


def _plain(description: str) -> ArgumentParser:
    # An abbreviated --config would escape the checks of its file.
    parser = ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _configured(description: str) -> ArgumentParser:
    parser = _plain(description)
    parser.add_argument("--config", action="config", help="YAML file; options after it win")
    for name, cls in GROUPS.items():
        parser.add_class_arguments(cls, name)
    # The argparse of Python 3.11 lets torchrun take `--run` for the beginning of an option of its own, wherever it stands.
    parser.add_argument("--run", "--folder", type=Path, default=Path("runs/run"), help="folder that everything is written to")
    parser.add_argument("--tensorboard", type=bool, default=False, help="write events for TensorBoard as well")
    return parser


def _of_run(description: str) -> ArgumentParser:
    parser = _plain(description)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--split", type=Literal["train", "val", "test", "all"], default="val", help="slides of the run's table")
    parser.add_argument("--csv", type=Path, help="another table, all slides of it")
    parser.add_argument("--slides", type=Path, help="folder that slides are relative to")
    parser.add_argument("--checkpoint", type=Literal["best", "last"], default="best", help="which weights")
    parser.add_argument("--device", type=str, help="cpu or cuda; default: that of the run")
    parser.add_argument("--budget", type=str, help="bytes that the device may hold, or auto; default: those of the run")
    parser.add_argument("--out", type=Path, help="folder for the results; default: in the run's")
    return parser


def make_config(given: Namespace) -> Config:
    """The configuration that options describe."""
    groups = {name: cls(**given[name].as_dict()) for name, cls in GROUPS.items()}
    return Config(**groups, run=given.run, tensorboard=given.tensorboard)


def _complain(
    error: BaseException, code: int, *, is_debug: bool, is_json: bool, is_quiet: bool, kind: str = "error", is_inference: bool = False
) -> int:
    """Print an error as one line (a wrong table: one line a problem)."""
    if is_quiet and not is_debug:
        return code
    if is_debug:
        traceback.print_exception(error)
    if isinstance(error, BudgetError):
        text = message_for(error, _INFERENCE_REMEDIES if is_inference else _REMEDIES)
    else:
        text = str(error)
    message = text.rstrip() if isinstance(error, DatasetError) else " ".join(text.split())
    print(escape_control_characters(f"{kind}: {message or type(error).__name__}"), file=sys.stderr)
    if is_json:
        problems = {"problems": list(error.problems)} if isinstance(error, DatasetError) else {}
        print(json.dumps({"error": message, "type": type(error).__name__, **problems}))
    return code


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    print(escape_control_characters(f"warning: {' '.join(str(message).split())}"), file=sys.stderr)
