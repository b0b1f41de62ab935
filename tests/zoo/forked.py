"""The module that the fork server preloads: importing it warms up."""

from __future__ import annotations

import os
import sys

# The server finds this module by this variable alone. Now move it after the installed packages, which our folders must not hide.
_OURS = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
sys.path[:] = [path for path in sys.path if path not in _OURS] + _OURS

from .warm import warm_up  # noqa: E402  # it imports those packages

warm_up()
