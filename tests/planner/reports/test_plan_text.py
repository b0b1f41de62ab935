"""Text reports: at most 80 columns, 40 lines where they are short, and words that the documentation defines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sft
from tests.helpers.models import ConvNet, TinyUNet, seeded

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def plans() -> tuple[sft.Plan, ...]:
    """A tiled plan, a plan for a GPU with all kinds of rows, and one with long names and lists."""
    tiled = sft.plan(seeded(TinyUNet), (2, 3, 40, 24), budget="64MiB", options=sft.Options(tile=(8, 12)))
    with torch.device("meta"):
        model = ConvNet()
    gpu = sft.plan(model, (1, 3, 1024, 1024), budget="60MiB", device="cuda")
    rich = replace(
        gpu,
        host_bytes=2**40,
        host_note="20.00 GiB of 1022.93 GiB free on the disk",
        budget_note="budget auto: 1.00 GiB of 2.00 GiB free",
        streamed_weights=12345,
        weights_peak_bytes=2**30,
        skips_repeats=True,
        notes=tuple(f"features.{number}.body: a reason of {number * 10} words {'and words ' * number}" for number in range(30)),
        order=tuple(f"F{number}+" for number in range(300)),
        input_shapes=gpu.input_shapes * 9,
        projected_seconds=1234.5,
        segments=tuple(
            replace(each, layers=("encoder." * 20 + "conv", "x" * 200), strip_rows=123456, num_steps=12345, num_panels=99, num_forwards=17)
            if each.mode == "tiled"
            else each
            for each in gpu.segments
        ),
    )
    return tiled, gpu, rich


def test_no_line_is_longer_than_80_columns(plans: tuple[sft.Plan, ...]) -> None:
    for plan in plans:
        for text in (plan.explain(), plan.explain(costs=True), plan.explain(full=False), plan.explain(full=False, costs=True)):
            assert not [line for line in text.splitlines() if len(line) > 80 or line != line.rstrip()]
        assert len(plan.explain(full=False).splitlines()) <= 40


def test_values_are_aligned(plans: tuple[sft.Plan, ...]) -> None:
    """The remarks of the first block begin in one column, continued lines as well."""
    head = plans[2].explain().partition("\n\n")[0].partition("  budget")[2].partition("  order")[0].splitlines()[1:-1]
    assert head and all(re.match(r".{32}  \S", line) for line in head)


def test_words_of_a_report_are_defined(plans: tuple[sft.Plan, ...]) -> None:
    """Each name of a row is a word of the table in the documentation."""
    glossary = _PAGE.read_text().partition("## Terms of a plan")[2].partition("\n## ")[0]
    words = " ".join(line.split("|")[1].replace("`", "") for line in glossary.splitlines() if line.startswith("| "))
    names = set()
    for plan in plans:
        text = plan.explain()
        names |= {match[1] for match in re.finditer(r"^ {2,4}([a-zA-Z][a-zA-Z ]*?)  +[\d.e+]+( [KMGT]?i?B| s)?(  |$)", text, re.MULTILINE)}
        names |= {match[1] for match in re.finditer(r"^  ([a-z][a-z -]*?)(?: of [a-z ]+)?: ", text, re.MULTILINE)}
    assert {"resident", "working set", "halo", "footprint", "states", "kernels", "receptive field"} - {"kernels"} <= names
    missing = {name for name in names if name not in words and name.rstrip("s") not in words}
    assert missing <= {"tallest strip for this budget, by the footprint", "FLOPs"}


def test_a_segment_of_one_operator_has_one_label(plans: tuple[sft.Plan, ...]) -> None:
    segments = plans[1].segments
    single = replace(segments[-1], nodes=segments[-1].nodes[-1:], layers=("head: linear", "head: linear"))
    text = replace(plans[1], segments=(*segments[:-1], single)).explain()
    assert ", 1 operator, head: linear\n" in text
    assert not re.search(r"(\S+: \S+) \.\. \1\n|\b1 operators|\(s\)", text)
    panels = [line for plan in plans[:2] for line in plan.explain().splitlines() if line.startswith("  panels")]
    assert panels and all(("of all columns" in line) == (line.split()[1] == "1") for line in panels)
