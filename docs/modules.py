"""Write docs/modules.md, the list of all modules: ``python docs/modules.py`` (``--check`` only compares)."""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).with_name("modules.md")
_ROOT = PAGE.resolve().parents[1]
_TOP = ("analysis", "kernels", "sft")

_INTRODUCTION = """# Modules

Every module with the first sentence of its docstring, written by `python docs/modules.py`; a test compares. [Architecture](architecture.md)
has the pipeline and the layers.
"""


def page() -> str:
    """Text of the page."""
    packages: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for top in _TOP:
        for path in sorted((_ROOT / top).rglob("*.py")):
            inside_link = any(parent.is_symlink() for parent in path.parents if parent != _ROOT and _ROOT in parent.parents)
            summary = _summary(path)
            if not inside_link and summary:
                packages[str(path.parent.relative_to(_ROOT))].append((path.name, summary))
    lines = [_INTRODUCTION.rstrip()]
    for package, modules in packages.items():
        lines += ["", f"## `{package}/`", "", "| module | content |", "| --- | --- |"]
        lines += [f"| `{name}` | {summary} |" for name, summary in modules]
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    """First sentence of a module's docstring; empty without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.sub(r":(?:mod|class|func|meth):`([^`]*)`", r"`\1`", paragraph.split(". ")[0].replace("``", "`"))
    return sentence.rstrip(".").replace("|", "\\|")


def main() -> int:
    """Write the page, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 where the page is out of date")
    if parser.parse_args().check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
