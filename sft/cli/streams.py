"""What the command line writes to: terminals, files and pipes of any encoding."""

from __future__ import annotations

import io
import sys

__all__ = ["escape_unencodable_output"]


def escape_unencodable_output() -> None:
    r"""Let standard output take letters that its encoding lacks, as ``\xe4``; standard error does so anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
