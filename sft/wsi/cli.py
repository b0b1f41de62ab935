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
from typing import Any, TextIO

from jsonargparse import ArgumentError, Namespace
from rich.console import Console

from sft.cli.main import escape_unencodable_output, exit_on_interrupt, output_problem
from sft.common.errors import BudgetError, InputError, SftError
from sft.common.terminal import print_text
from sft.common.untrusted.foreign_files import escape_control_characters, shortened
from sft.common.untrusted.trusted_code import Trust
from sft.planner.remedies import Setting, Spelling, message_for
from sft.wsi.config import GROUPS, Config
from sft.wsi.config_file import check_config_file
from sft.wsi.errors import DatasetError, RunInterrupted
from sft.wsi.parsers import TRUST, WITH_NETWORK, config_parser, make_parser
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
    named = next((argument for argument in command_line if not argument.startswith("-")), None)
    has_size = any(argument == "--size" or argument.startswith("--size=") for argument in command_line)
    parsed = make_parser(named, needs_table=not (named == "plan" and has_size)).parse_args(command_line)
    command = str(parsed.subcommand)
    if world.num_ranks > 1 and command not in _ON_SEVERAL_RANKS:
        raise InputError(
            f"{command} is for one process, and {world.num_ranks} were started: start it without torchrun; several ranks can "
            f"{' and '.join(_ON_SEVERAL_RANKS)}"
        )
    settings = parsed[command]
    if trusted_names and command not in WITH_NETWORK:
        raise InputError(f"{TRUST} is for {', '.join(WITH_NETWORK)}, which load a network; leave it out")
    if getattr(settings, "trust", None):
        raise InputError(f"trust is not a setting of a configuration: the command line says what is trusted, with {TRUST} MODULE")
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
        return make_config(config_parser().parse_args(["--config", str(path)]))
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
        if option != TRUST:
            rest.append(argument)
            continue
        names.append(value if has_value else next(waiting, ""))
        if not names[-1] or names[-1].startswith("-"):
            raise InputError(f"{TRUST} {names[-1]}: give a module, a file or a folder, such as {TRUST} my_net")
    return rest, names


def make_config(options: Namespace) -> Config:
    """The configuration that options describe."""
    groups = {name: cls(**options[name].as_dict()) for name, cls in GROUPS.items()}
    return Config(**groups, run=options.run, tensorboard=options.tensorboard)


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
