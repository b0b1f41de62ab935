"""Versions of installed distributions."""

from __future__ import annotations

import importlib.metadata

import torch

__all__ = ["installed_version"]


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; ``None`` if it is not installed.

    That of torch names its build, as in ``2.11.0+cu130``. The metadata of the package index's wheels do not.
    """
    if distribution == "torch":
        return str(torch.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
