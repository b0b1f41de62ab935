"""Plan of a training step for an image size, without slides, weights or the device of the run.

The network is made without pretrained weights and moved to the meta device; the table is read if it is there. So a login node can say
whether a slide fits a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sft.common.errors import InputError, SftError
from sft.common.untrusted.trusted_code import Trust
from sft.wsi.config import Config
from sft.wsi.data.splits import assign_splits
from sft.wsi.data.table import SlideTable, read_table
from sft.wsi.eval.predict import options_without_download
from sft.wsi.model.tasks import Task
from sft.wsi.train.experiment import Experiment, load_experiment

__all__ = ["experiment_without_slides", "parse_size"]

#: Classes of a table that is not there: their number hardly matters to a plan.
_UNKNOWN_CLASSES = ("class 0", "class 1")


def parse_size(texts: Sequence[str]) -> tuple[int, int]:
    """Height and width of ``--size``: one text ``WIDTHxHEIGHT``, or two numbers, height and width.

    >>> parse_size(["80000x60000"]), parse_size(["60000", "80000"])
    ((60000, 80000), (60000, 80000))

    Raises:
        InputError: it is neither.
    """
    joined = " ".join(texts)
    if match := re.fullmatch(r"([1-9][0-9]{0,8})[x×]([1-9][0-9]{0,8})", joined):
        return int(match[2]), int(match[1])
    if match := re.fullmatch(r"([1-9][0-9]{0,8}) ([1-9][0-9]{0,8})", joined):
        return int(match[1]), int(match[2])
    raise InputError(f"--size {joined}: write the width and the height in px, such as 80000x60000; two numbers are height and width")


def experiment_without_slides(config: Config, *, trust: Trust = ()) -> Experiment:
    """The experiment of a configuration with a network on the meta device; slides, weights and a GPU need not be there.

    Raises:
        InputError: the network cannot be made, or is of a module that is not trusted.
    """
    table = _table(config)
    classes = table.classes or tuple(config.task.classes or _UNKNOWN_CLASSES)
    of_kind = dict.fromkeys(("classification", "multilabel", "segmentation"), len(classes)) | {"hazard": config.task.num_intervals}
    num_outputs = of_kind.get(config.task.kind, 1)
    task = Task(kind=config.task.kind, classes=classes, num_outputs=num_outputs)
    model = replace(config.model, weights=None, options=options_without_download(config.model))
    experiment = load_experiment(replace(config, model=model), table=table, task=task, trust=trust)
    experiment.model.to("meta")
    return experiment


def _table(config: Config) -> SlideTable:
    """The table of the configuration; an empty one if it or its slides are not there."""
    try:
        table = read_table(config.data.csv, config.task, root=config.data.slides)
        return assign_splits(table, config.data, config.task.kind, config.train.seed)
    except (SftError, OSError):
        return SlideTable(records=(), classes=())
