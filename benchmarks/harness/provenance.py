"""Commit and arguments of a run, without libraries that a machine with a GPU may lack."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

__all__ = ["bare_arguments", "commit"]


def commit() -> str:
    """The short commit of this checkout, with a plus sign when files differ from it."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:  # a machine without git
        return "unknown"


def bare_arguments() -> list[str]:
    """The command's arguments without the output folder, and the file of a continued run, which are paths of the caller."""
    bare = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    bare.add_argument("--out")
    bare.add_argument("--resume")
    _, arguments = bare.parse_known_args()
    return arguments
