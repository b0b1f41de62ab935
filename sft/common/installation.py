"""Installed distributions: their versions, the pip command of optional libraries, and numbers in environment variables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from sft.common.errors import InputError

__all__ = [
    "DISTRIBUTION",
    "ENVIRONMENT_VARIABLES",
    "clone_folder",
    "environment_number",
    "install_command",
    "installed_version",
    "missing_modules",
    "unread_variables",
]

#: Name of the distribution; the name of the import is ``sft``.
DISTRIBUTION = "sft-engine"

#: Environment variables of this package.
ENVIRONMENT_VARIABLES = ("SFT_CACHE_DIR",)
_PREFIX = "SFT_"


def environment_number(name: str, default: int, *, least: int) -> int:
    """The number in an environment variable, or the default if it is unset or empty.

    Raises:
        InputError: it is not an integer, or too small.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(
            f"the environment variable {name} is {text!r}: set it to an integer of at least {least}, as torchrun does, or unset it"
        )
    return number


def missing_modules(names: Iterable[str]) -> list[str]:
    """Modules that are not installed, of some names; none is imported.

    >>> missing_modules(["json", "no_such_module"])
    ['no_such_module']
    """
    return [name for name in names if importlib.util.find_spec(name) is None]


def unread_variables() -> list[str]:
    """Environment variables that begin as those of this package and are none of them, such as misspelt ones."""
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in ENVIRONMENT_VARIABLES)


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; ``None`` if it is not installed.

    That of torch names its build, as in ``2.11.0+cu130``. The metadata of the package index's wheels do not.
    """
    if distribution == "torch":
        import torch  # not needed for the commands in messages, which come before torch is imported

        return str(torch.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(extras: str) -> str:
    """The pip command that installs optional libraries (``"wsi"``, ``"slide,fast"``) into this environment.

    It names the clone or the file that this package was installed from, since only that is known to have it.
    """
    try:
        record = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # imported from a clone by way of PYTHONPATH
        clone = clone_folder()
        return f'pip install "{DISTRIBUTION}[{extras}]"' if clone is None else f'pip install -e "{clone}[{extras}]"'
    return f"pip install {_requirement(json.loads(record) if record else {}, extras)}"


def clone_folder() -> Path | None:
    """Root of the clone that this package is imported from; ``None`` for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "constraints.txt").is_file() else None


def _requirement(origin: dict[str, Any], extras: str) -> str:
    """Requirement with extras, from the origin that pip has recorded (PEP 610).

    >>> _requirement({"url": "file:///home/me/sft", "dir_info": {"editable": True}}, "wsi")
    '-e "/home/me/sft[wsi]"'
    >>> _requirement({"url": "https://host/sft.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}, "wsi")
    '"sft-engine[wsi] @ git+https://host/sft.git@1a2b"'
    >>> _requirement({}, "slide,fast")
    '"sft-engine[slide,fast]"'
    """
    url = origin.get("url", "")
    if not url:
        return f'"{DISTRIBUTION}[{extras}]"'
    if "vcs_info" in origin:
        info = origin["vcs_info"]
        return f'"{DISTRIBUTION}[{extras}] @ {info["vcs"]}+{url}@{info["commit_id"]}"'
    if urlsplit(url).scheme != "file":
        return f'"{DISTRIBUTION}[{extras}] @ {url}"'
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f'{editable}"{url2pathname(urlsplit(url).path)}[{extras}]"'
