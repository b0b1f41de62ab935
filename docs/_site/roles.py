"""Docstring roles of Sphinx (``:func:`check```) as code, for the reference of the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?(?:[^`<]*<)?(?P<name>[^`>]+)>?`")


class Roles(Extension):
    """Replaces roles, and double backquotes, by Markdown's code spans."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: f"`{match['name']}`", obj.docstring.value)
            obj.docstring.value = text.replace("``", "`")
