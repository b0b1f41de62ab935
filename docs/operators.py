"""Writes docs/operators.md from the operator table: ``python docs/operators.py`` (``--check`` only compares)."""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from pathlib import Path

from sft.analysis.ir.ops import operator_table
from sft.analysis.ir.ops.pointwise import RandomOpSpec
from sft.analysis.passes.canonicalize import CANONICALIZED_TARGETS

PAGE = Path(__file__).with_name("operators.md")

INTRODUCTION = """# Operators

Written by `python docs/operators.py` from the operator table; a test compares. `sft.check(model, input_shape)` says the same of one model.

**In strips**: any use of these operators that their row of the table knows runs strip by strip, with one to three axes. The others, and
uses that a row refuses (attention of pixels to pixels, `cat` along the image, ...), run on whole tensors, as in plain
PyTorch, where these fit the budget; `plan.explain()` lists them with the reason. What follows them is streamed again where it is still
an image.

**Refused** (`sft.UnsupportedError`): random numbers that do not follow positions (`torch.rand` of the image's size, `poisson`;
dropout in all forms is fine, and so are `rand_like`, `randn_like`, and `uniform_`, `normal_` and `exponential_` into
`empty_like`), sizes that depend on values, operators that write into their operands where the exporter leaves such,
autograd functions with a backward of their own, in-place writes that autograd would not notice.
"""


#: Rows that only explain why an operator runs on the full tensor.
_UNTILED = ("UndecomposedLayerNormSpec",)


def page() -> str:
    """The page."""
    families: dict[str, list[str]] = defaultdict(list)
    texts: dict[str, str] = {}
    for target, rows in sorted(operator_table().items()):
        for row in (row for row in rows if type(row).__name__ not in _UNTILED):
            name = row.name if isinstance(row, RandomOpSpec) else type(row).__name__.removesuffix("Spec")
            families[name].append(f"`{target.removeprefix('aten.')}`")
            texts[name] = " ".join((inspect.getdoc(type(row)) or "").split("\n\n")[0].split())
    lines = [INTRODUCTION, "## In strips", "", "| family | what | operators |", "| --- | --- | --- |"]
    for name in sorted(families):
        lines.append(f"| {name} | {texts[name].replace('|', '/')} | {', '.join(families[name])} |")
    lines += [
        "",
        "## Followed without moving anything, or rewritten into the above",
        "",
        ", ".join(f"`{t.removeprefix('aten.')}`" for t in CANONICALIZED_TARGETS),
    ]
    return "\n".join(lines) + "\n"


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
