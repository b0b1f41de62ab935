"""Plan of a training step for an image size, without slides, weights or the device of the run.

The network is made without pretrained weights and moved to the meta device; the table is read if it is there. So a login node can say
whether a slide fits a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import sft
from sft.common.errors import InputError, SftError, SourceError
from sft.common.interval import Interval
from sft.common.untrusted.trusted_code import Trust
from sft.wsi.config import Config, ModelConfig
from sft.wsi.data.splits import assign_splits
from sft.wsi.data.table import SlideTable, read_table
from sft.wsi.eval.predict import options_without_download
from sft.wsi.model.heads import set_training
from sft.wsi.model.tasks import Task
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.experiment import Experiment, autocast_context, load_experiment
from sft.wsi.train.optim import make_optimizer
from sft.wsi.train.slide_net import compile_slide_net

__all__ = ["experiment_without_slides", "parse_size", "plan_of_size", "tiles_of_size"]

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


def plan_of_size(experiment: Experiment, size_px: tuple[int, int], ranks: Ranks = SINGLE_RANK) -> sft.Plan:
    """Plan of a training step on a slide of (height, width) px, with tiles on all of it for an encoder of tiles; needs no slide.

    Args:
        experiment: with the network and the budget.
        size_px: of the slide.
        ranks: ranks that share it. Default: this process alone

    Raises:
        UnsupportedError, BudgetError: as `sft.plan`.
        InputError: an invalid size, or one without a tile.
    """
    if min(size_px) < 1:
        raise InputError(f"--size {size_px[1]}x{size_px[0]}: give two positive numbers")
    settings, dtype, channels = experiment.config.model, torch.get_default_dtype(), experiment.config.num_channels
    if settings.takes_tiles:
        inputs = [_PlaceholderSlide((tiles_of_size(settings, size_px), channels, settings.side_px, settings.side_px), dtype)]
    else:
        inputs = [_PlaceholderSlide((1, channels, *size_px), dtype)]
        if experiment.task.kind == "segmentation":
            inputs.append(_PlaceholderSlide((1, 1, *size_px), torch.int64))
    net = compile_slide_net(experiment, optimizer=make_optimizer(experiment.model, experiment.config.train), ranks=ranks)
    set_training(experiment.model, training=True, freeze_norms=experiment.freezes_norms)
    with autocast_context(experiment.config):
        plan: sft.Plan = net.plan_for(*inputs)
    return plan


def tiles_of_size(settings: ModelConfig, size_px: tuple[int, int]) -> int:
    """Number of tiles on an image of (height, width) px.

    Raises:
        InputError: it is smaller than a tile.
    """
    if min(size_px) < settings.side_px:
        raise InputError(f"--size {size_px[1]}x{size_px[0]}: no tile of {settings.side_px} px fits; give a larger size or --model.tile_px")
    rows, columns = ((extent - settings.side_px) // settings.step_px + 1 for extent in size_px)
    return rows * columns


class _PlaceholderSlide:
    """A slide, a label map, or the tiles of a slide, of which only the size is known: enough to plan for."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def samples(self, batch: Interval) -> _PlaceholderSlide:
        """Some tiles."""
        return _PlaceholderSlide((len(batch), *self.shape[1:]), self.dtype)

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Never called.

        Raises:
            SourceError: always.
        """
        raise SourceError(f"rows [{interval.start}, {interval.stop}) of a slide of {self.shape} that is only planned for")
