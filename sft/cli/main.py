"""The commands and their options.

Exit codes: 0 success; 1 an error, or a negative result (a model that cannot be compiled, a failed self-check); 2 an invalid command line.
An error is printed as one line; ``--debug`` shows its traceback. With ``--json`` standard output has an object with ``error`` and ``type``.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sft.cli.parser import EXAMPLES, UsageError, parse_command_line
from sft.common.errors import BudgetError, SftError, UnsupportedError
from sft.common.untrusted.foreign_files import escape_control_characters
from sft.planner.remedies import COMMAND_LINE, message_for

__all__ = ["escape_unencodable_output", "exit_on_interrupt", "main", "output_problem"]

_EXIT_INTERRUPTED = 130
#: Narrower terminals do not exist; a width of 0 would print nothing.
_MIN_COLUMNS, _DEFAULT_COLUMNS = 20, 80

#: Width of tables without a terminal: no screen limits it.
_PIPED_COLUMNS = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``python -m sft``; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        print(EXAMPLES)
        return 0
    try:
        args = parse_command_line(arguments)
    except UsageError as error:
        if "--json" in arguments:
            print(json.dumps({"error": str(error), "type": "UsageError"}))
        print(escape_control_characters(f"error: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    escape_unencodable_output()
    from rich.console import Console  # not for --help

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_COLUMNS
    if console.width < _MIN_COLUMNS:
        console.width = _DEFAULT_COLUMNS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the model's package during import and construction
            with exit_on_interrupt():
                from sft.cli.dispatch import run_command  # imports torch, which takes seconds

            code = run_command(args, console)
            sys.stdout.flush()
            return code
    except Exception as error:
        text = _error_text(error, args)
        if args.debug or text is None:
            raise
        if args.json:
            print(json.dumps({"error": text, "type": type(error).__name__}))
        Console(stderr=True).print(escape_control_characters(f"error: {text}"), markup=False, highlight=False, soft_wrap=True)
        return 1


def _error_text(error: Exception, args: argparse.Namespace) -> str | None:
    """An error as one line; ``None`` for a defect of this program, which is shown with its traceback."""
    if getattr(error, "__notes__", None):  # of the model, so torch is loaded already
        from sft.analysis.frontend.diagnostics.model_errors import noted_error_text

        if (text := noted_error_text(error)) is not None:
            return text
    if isinstance(error, BudgetError):
        return " ".join(message_for(error, COMMAND_LINE).split("\n"))
    if isinstance(error, UnsupportedError):
        problems, has_attempt, _ = str(error).partition("\nTry: ")
        return f"{problems}\nTry: {_check_command(args)}" if has_attempt else problems
    if isinstance(error, OSError) and (problem := output_problem(error)):
        return problem
    return str(error) if isinstance(error, (SftError, OSError)) else None


def _check_command(args: argparse.Namespace) -> str:
    """The command that lists all operators of a model."""
    options = [*(["--model-args", *args.model_args] if args.model_args else []), *(["--inference"] if args.inference else [])]
    return shlex.join(["python", "-m", "sft", "check", args.model, "--input", *args.input, *options])


def escape_unencodable_output() -> None:
    r"""Escape characters that standard output cannot encode, as ``\xe4``; standard error does so by default."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process at once while libraries are imported: an exception in the middle of an import may be lost or replaced."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(_EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def output_problem(error: OSError) -> str:
    """Message of a failure to write standard output; empty for other errors."""
    is_own = isinstance(error, SftError) or error.filename is not None
    return (
        "" if is_own or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EBADF) else f"cannot write standard output: {error.strerror}"
    )
