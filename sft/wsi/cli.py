"""Command line: a YAML file with overriding options (``--train.lr 1e-4``), and one-line error messages.

Exit codes: 0 done; 1 an error; 2 a command line or file with options that do not exist, or values of another type; 3 done, but slides were
left out (0 on several ranks); 75 asked to end, saved, start again to go on.
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
from typing import Literal, TextIO

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt
from rich.console import Console

import sft
from sft.cli.main import escape_unencodable_output
from sft.common.errors import InputError, SftError
from sft.wsi.config import GROUPS, Config
from sft.wsi.errors import DatasetError, RunInterrupted
from sft.wsi.run.world import World

__all__ = ["EXIT_ERROR", "EXIT_FAILED_SLIDES", "EXIT_INTERRUPTED", "EXIT_USAGE", "main", "make_config", "read_config"]

EXIT_ERROR, EXIT_USAGE, EXIT_FAILED_SLIDES, EXIT_INTERRUPTED = 1, 2, 3, 75

_ON_SEVERAL_RANKS = ("train", "evaluate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: of the command line. Default: `None` (the process's own)
    """
    escape_unencodable_output()
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_debug, is_json = "--debug" in given, "--json" in given
    # Of several ranks the first one tells how the run goes, and the first of each machine what went wrong.
    world = World.here()
    # What people read goes to stderr when a program reads stdout.
    console = Console(stderr=is_json, quiet=world.rank > 0)
    complain = partial(_complain, is_debug=is_debug, is_json=is_json and world.rank == 0, is_quiet=world.local_rank > 0)
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            if world.local_rank > 0:
                warnings.simplefilter("ignore")
            parser = _parser()
            for option, value in zip_longest(given, given[1:], fillvalue=""):
                if option == "--config" or option.startswith("--config="):
                    _check_file(Path(option.partition("=")[2] or value))
            parsed = parser.parse_args(given)
            if world.num_ranks > 1 and parsed.subcommand not in _ON_SEVERAL_RANKS:
                raise InputError(
                    f"{parsed.subcommand} is for one process, and {world.num_ranks} were started: start it without torchrun; several ranks "
                    f"can {' and '.join(_ON_SEVERAL_RANKS)}"
                )
            from sft.wsi.dispatch import COMMANDS  # imports torch, which --help and mistakes need not wait for

            result = COMMANDS[parsed.subcommand](parsed[parsed.subcommand], console)
    except ArgumentError as error:
        return complain(error, EXIT_USAGE)
    except RunInterrupted as error:
        return complain(error, EXIT_INTERRUPTED, kind="interrupted")
    except (SftError, OSError) as error:
        return complain(error, EXIT_ERROR)
    except KeyboardInterrupt as error:
        return complain(error, 130, kind="interrupted")
    if is_json and world.rank == 0:
        print(json.dumps(result.value, allow_nan=False))
    if result.num_failed and world.num_ranks > 1:
        # What starts ranks takes any other code for a failure, and would start them again.
        console.print(f"{result.num_failed} slides were left out: failed.csv", markup=False, highlight=False, soft_wrap=True)
        return 0
    return EXIT_FAILED_SLIDES if result.num_failed else 0


def read_config(path: Path) -> Config:
    """The configuration in a YAML file.

    Raises:
        InputError: it is wrong.
    """
    _check_file(path)
    try:
        return make_config(_configured("config").parse_args(["--config", str(path)]))
    except ArgumentError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error


_NULL = "tag:yaml.org,2002:null"


def _check_file(path: Path) -> None:
    """Refuse a YAML file with a duplicate key (the reader keeps only the last value, without a warning), a group without settings, or an
    anchor inside its own value, on which the reader fails.

    Raises:
        InputError: it is such a file, or it is no text.
    """

    def check(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> None:
        if node in above:
            raise InputError(f"{path}, line {node.start_mark.line + 1}: an alias of what it is part of; write it out")
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for key, value in pairs:
            where = f"{path}, line {key.start_mark.line + 1}: {key.value}"
            if keys.count(key.value) > 1:
                raise InputError(f"{where} is there {keys.count(key.value)} times; leave one")
            is_empty = not isinstance(value, yaml.MappingNode) if not above else key.value == "options" and value.tag == _NULL
            if is_empty and (above or key.value in GROUPS):
                raise InputError(f"{where} has no settings below it; write some, or leave the line out")
            check(value, (*above, node))
        for item in node.value if isinstance(node, yaml.SequenceNode) else []:
            check(item, (*above, node))

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None:
            check(root)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is no UTF-8; save it as plain text") from error
    except (OSError, yaml.YAMLError):
        return  # who reads it will say what is wrong


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m sft.wsi", description="Train and evaluate on whole slides.", exit_on_error=False)
    parser.add_argument("--version", action="version", version=f"sft {sft.__version__}")
    subcommands = parser.add_subcommands(required=True)

    doctor = _plain("what is installed here, and what is missing")
    info = _plain("what slide files say of themselves")
    info.add_argument("slides", type=Path, nargs="+", help="files")
    tissue = _plain("find the tissue on slides: masks, polygons, and pictures to look at")
    tissue.add_argument("slides", type=Path, nargs="+", help="slide files")
    tissue.add_argument("--out", type=Path, required=True, help="folder for the results")
    tissue.add_argument("--mpp", type=float, default=8.0, help="micrometres per pixel of the masks")
    tissue.add_argument("--overwrite", action="store_true", help="find masks anew that are there already")
    tissue.add_argument("--slide-mpp", type=float, help="micrometres per pixel of the slides, where the files are wrong or silent")
    plan = _configured("how a training step is computed, and what it takes; runs nothing")
    plan.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="of the image, in px; default: the largest slide")
    train = _configured("train, or go on with a run that was interrupted; then evaluate")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and write nothing")
    train.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")
    evaluate = _of_run("predict and measure")
    evaluate.add_argument("--bootstrap", type=NonNegativeInt, default=1000, help="draws for the intervals")
    evaluate.add_argument("--bands", type=int, default=1, help="of the ranks that torchrun starts, how many share one slide")
    heatmap = _of_run("draw class-activation maps over slides")
    heatmap.add_argument("--names", type=str, nargs="+", help="slides by name; default: all of the split")
    heatmap.add_argument("--classes", type=str, nargs="+", help="classes to draw; default: all, or the second of two")
    heatmap.add_argument("--saliency", action="store_true", help="draw the gradient of the input as well")
    heatmap.add_argument("--crops", type=int, default=5, help="how many crops to cut out where the map is highest")
    heatmap.add_argument("--crop-px", type=int, default=256, help="their side")

    for name, sub in (
        ("doctor", doctor),
        ("slide-info", info),
        ("tissue", tissue),
        ("plan", plan),
        ("train", train),
        ("evaluate", evaluate),
        ("heatmap", heatmap),
    ):
        subcommands.add_subcommand(name, sub, help=sub.description)
    return parser


def _plain(description: str) -> ArgumentParser:
    parser = ArgumentParser(description=description, exit_on_error=False)
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
    parser.add_argument("--budget", type=str, help="bytes that the device may hold; default: those of the run")
    parser.add_argument("--out", type=Path, help="folder for the results; default: in the run's")
    return parser


def make_config(given: Namespace) -> Config:
    """The configuration that options describe."""
    groups = {name: cls(**given[name].as_dict()) for name, cls in GROUPS.items()}
    return Config(**groups, run=given.run, tensorboard=given.tensorboard)


def _complain(error: BaseException, code: int, *, is_debug: bool, is_json: bool, is_quiet: bool, kind: str = "error") -> int:
    """Print an error as one line (a wrong table: one line a problem)."""
    if is_quiet and not is_debug:
        return code
    if is_debug:
        traceback.print_exception(error)
    message = str(error).rstrip() if isinstance(error, DatasetError) else " ".join(str(error).split())
    print(f"{kind}: {message or type(error).__name__}", file=sys.stderr)
    if is_json:
        problems = {"problems": list(error.problems)} if isinstance(error, DatasetError) else {}
        print(json.dumps({"error": message, "type": type(error).__name__, **problems}))
    return code


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
