"""The commands and their options.

Exit codes: 0 success; 1 an error, or a negative result (a model that cannot be compiled, a failed self-check); 2 an invalid command line.
An error is printed as one line; ``--debug`` shows its traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from sft.cli.parser import build_parser
from sft.common.errors import BudgetError, SftError
from sft.common.untrusted.foreign_files import escape_control_characters
from sft.planner.remedies import COMMAND_LINE, message_for

__all__ = ["escape_unencodable_output", "main"]

#: Width of tables without a terminal: no screen limits it.
_PIPED_COLUMNS = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``python -m sft``; returns the exit code."""
    args = build_parser().parse_args(arguments)
    escape_unencodable_output()
    from rich.console import Console  # not for --help

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_COLUMNS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the model's package during import and construction
            from sft.cli.dispatch import run_command  # imports torch, which takes seconds

            code = run_command(args, console)
            sys.stdout.flush()
            return code
    except Exception as error:
        text = _error_text(error)
        if args.debug or text is None:
            raise
        Console(stderr=True).print(escape_control_characters(f"error: {text}"), markup=False, highlight=False, soft_wrap=True)
        return 1


def _error_text(error: Exception) -> str | None:
    """An error as one line; ``None`` for a defect of this program, which is shown with its traceback."""
    if getattr(error, "__notes__", None):  # of the model, so torch is loaded already
        from sft.analysis.frontend.diagnostics.model_errors import noted_error_text

        if (text := noted_error_text(error)) is not None:
            return text
    if isinstance(error, BudgetError):
        return str(message_for(error, COMMAND_LINE))
    return str(error) if isinstance(error, (SftError, OSError)) else None


def escape_unencodable_output() -> None:
    r"""Escape characters that standard output cannot encode, as ``\xe4``; standard error does so by default."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
