"""Experiment: the slides, the task, the network and the compiled network of a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.api.weight_placement import resident_bytes
from sft.common.errors import InputError, SourceError, some_names
from sft.common.interval import Interval
from sft.common.untrusted.trusted_code import Trust
from sft.sources import ArrayImage, Normalized
from sft.sources.image import Image
from sft.tissue.annotations import is_annotation_file
from sft.wsi.config import Config, ModelConfig
from sft.wsi.data.dataset import SlideDataset
from sft.wsi.data.label_maps import IGNORED_LABEL, absent_classes, mixed_codings, remedy_of_codings
from sft.wsi.data.splits import assign_splits
from sft.wsi.data.table import SlideRecord, SlideTable, read_table
from sft.wsi.data.tile_bags import TileDataset
from sft.wsi.errors import DatasetError
from sft.wsi.eval.metrics import is_measurable
from sft.wsi.model.backbones import check_backbone, feature_resizes, feature_shapes, load_backbone, load_weights
from sft.wsi.model.bags import build_bag_model
from sft.wsi.model.heads import SlideModel, build_model, calibrate_batch_norms
from sft.wsi.model.layers import freeze_modules
from sft.wsi.model.tasks import Task, make_task
from sft.wsi.model.tile_encoders import add_adapters, load_tile_encoder, num_tile_features
from sft.wsi.run.estimate import PREDICTION_SHARE
from sft.wsi.run.files import counted
from sft.wsi.run.progress import Reporter
from sft.wsi.train.auto_budgets import resolve_budgets
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.optim import counter_seed, philox_generator

__all__ = [
    "Experiment",
    "autocast_context",
    "calibrate_norms",
    "check_records",
    "check_slides",
    "compile_model",
    "load_experiment",
    "mixed_codings_of",
    "segmentation_counts",
    "segmentation_loss",
]

_CALIBRATION_CROPS = 8
_CALIBRATION_PX = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """Parts of a run, made from its configuration.

    Attributes:
        config: settings.
        table: the slides, each with its split.
        task: of the model.
        model: the network, with its initial weights.
        feed: opens slides.
        freezes_norms: True if the statistics of BatchNorms stay unchanged.
        feature_shapes: of the backbone at two image sizes (`sft.wsi.model.backbones.feature_shapes`).
    """

    config: Config
    table: SlideTable
    task: Task
    model: SlideModel
    feed: SlideDataset
    freezes_norms: bool
    feature_shapes: tuple[tuple[int, ...], ...] = ()

    def records(self, split: str) -> list[SlideRecord]:
        """The slides of a split, in the order of the table."""
        return [record for record in self.table.records if record.split == split]

    def work_of(self, record: SlideRecord, *, predicts: bool = False) -> float:
        """Work of a training step on a slide, or of its prediction, in pixels; 0 for a slide that was not opened."""
        width_px, height_px = self.feed.sizes.get(record.name, (0, 0))
        share = PREDICTION_SHARE if predicts else 1 + PREDICTION_SHARE if self.task.kind == "cox" else 1.0
        return share * width_px * height_px

    @property
    def paints(self) -> bool:
        """True if whole slides are masked: strips of the mask's colour need not run."""
        if self.config.model.takes_tiles:
            return False
        by_table = self.task.kind != "segmentation" and any(record.mask is not None for record in self.table.records)
        return self.config.data.tissue == "mask" or by_table


def load_experiment(config: Config, *, table: SlideTable | None = None, task: Task | None = None, trust: Trust = ()) -> Experiment:
    """Read the table, and make the network with its initial weights (the same for the same configuration).

    Args:
        config: settings.
        table: slides with splits, instead of those of the configuration. Default: `None`
        task: instead of one made for the training slides. Default: `None`
        trust: modules, files or folders that ``model.backbone`` may name (`sft.common.untrusted.trusted_code`). Default: none

    Raises:
        DatasetError: the table is wrong.
        InputError: the network cannot be made, is of a module that is not trusted, or the free memory for an automatic budget is unknown.
        SourceError: weights cannot be read.
    """
    check_backbone(config.model.backbone, trust=trust)
    config = resolve_budgets(config, run=config.run).config
    if table is None:
        table = read_table(config.data.csv, config.task, root=config.data.slides)
        table = assign_splits(table, config.data, config.task.kind, config.train.seed)
    if task is None:
        task = make_task(config.task, table.classes, [record for record in table.records if record.split == "train"])
    settings = config.model
    torch.manual_seed(counter_seed(config.train.seed, "weights"))
    make = _tile_model if settings.takes_tiles else _whole_slide_model
    model, shapes = make(settings, config.num_channels, task.num_outputs, trust)
    _freeze(model, config)
    return Experiment(
        config=config,
        table=table,
        task=task,
        model=model,
        feed=TileDataset(config) if settings.takes_tiles else SlideDataset(config),
        freezes_norms=settings.norm != "train",
        feature_shapes=shapes,
    )


def _whole_slide_model(
    settings: ModelConfig, num_channels: int, num_outputs: int, trust: Trust
) -> tuple[SlideModel, tuple[tuple[int, ...], ...]]:
    """Network of whole slides with its initial weights, and its feature map at two image sizes."""
    backbone = load_backbone(settings.backbone, settings.options, num_channels=num_channels, trust=trust)
    if settings.weights is not None:
        load_weights(backbone, settings.weights)
    shapes = feature_shapes(backbone, settings.backbone, num_channels)
    model = build_model(
        backbone,
        shapes[0][0],
        num_outputs,
        head=settings.head,
        attention_dim=settings.attention_dim,
        dropout=settings.dropout,
        axes=feature_resizes(backbone, num_channels) if settings.head == "segmentation" else None,
    )
    return model, shapes


def _tile_model(settings: ModelConfig, num_channels: int, num_outputs: int, trust: Trust) -> tuple[SlideModel, tuple[tuple[int, ...], ...]]:
    """Encoder of tiles and head over them with initial weights, and the length of the vector of a tile."""
    assert settings.head != "segmentation"
    encoder = load_tile_encoder(
        settings.backbone,
        settings.options,
        tile_px=settings.side_px,
        num_channels=num_channels,
        weights=settings.weights,
        trust=trust,
    )
    num_features = num_tile_features(encoder, settings.backbone, settings.side_px, num_channels)
    if settings.lora_rank is not None:
        add_adapters(encoder, settings.lora_rank, settings.lora_layers)
    dim, dropout = settings.attention_dim, settings.dropout
    model = build_bag_model(encoder, num_features, num_outputs, head=settings.head, attention_dim=dim, dropout=dropout)
    return model, ((num_features,),)


def _freeze(model: SlideModel, config: Config) -> None:
    """Freeze the modules of ``train.freeze``.

    Raises:
        InputError: a name fits no module, or all adapters are frozen.
    """
    freeze_modules(model, config.train.freeze)
    if config.model.lora_rank is not None and not any(parameter.requires_grad for parameter in model.backbone.parameters()):
        raise InputError(
            f"train.freeze [{some_names(config.train.freeze)}] freezes all adapters of model.lora_rank {config.model.lora_rank}; leave one "
            "of the two out (weights with adapters are frozen without train.freeze)"
        )


def check_records(experiment: Experiment, records: Sequence[SlideRecord], ranks: Ranks, reporter: Reporter) -> dict[str, str]:
    """Open slides, each on one of the ranks; returns problems by slide name, and records the sizes of the usable slides in the feed."""
    feed = experiment.feed
    own_records = records[ranks.rank :: ranks.shape.num_ranks]
    reporter.start_checks(len(own_records))
    problems: dict[str, str] = {}
    for record in own_records:
        problem = feed.check(record)
        if problem is not None:
            problems[record.name] = problem
        reporter.advance()
    for theirs, sizes, label_values in ranks.gathered((problems, feed.sizes, feed.label_values)):
        problems |= theirs
        feed.sizes |= sizes
        feed.label_values |= label_values
    reporter.note(f"{counted(len(records), 'slide', 'slides')} checked, {len(problems)} cannot be used")
    for split, name in (("val", "val slide"), ("test", "test slide"), (None, "slide")):
        absent, text = _absent_classes(experiment, [record for record in records if record.split == split])
        if absent:
            reporter.note(f"warning: no {name} has a pixel of class {', '.join(absent)}, whose metrics mean nothing: {text}")
    return {record.name: problems[record.name] for record in records if record.name in problems}


def _absent_classes(experiment: Experiment, records: Sequence[SlideRecord]) -> tuple[list[str], str]:
    """Classes of a segmentation that no checked label map of these slides has a pixel of, and a text about their values."""
    maps = [experiment.feed.label_values[record.name] for record in records if record.name in experiment.feed.label_values]
    if not maps:
        return [], ""
    return absent_classes(maps, experiment.task.classes, experiment.config.data.mask_values)


def mixed_codings_of(experiment: Experiment, records: Sequence[SlideRecord]) -> str | None:
    """Problem of checked label maps of which some say 1 and others 255 for one class; annotations state their classes by name."""
    label_values = experiment.feed.label_values
    maps = {
        str(record.mask): label_values[record.name]
        for record in records
        if record.name in label_values and record.mask is not None and not is_annotation_file(record.mask)
    }
    return mixed_codings(maps, experiment.task.classes, experiment.config.data.mask_values)


def check_slides(experiment: Experiment, ranks: Ranks, reporter: Reporter) -> dict[str, str]:
    """Open every slide.

    Args:
        experiment: with the slides.
        ranks: ranks that share the work.
        reporter: of the progress.

    Returns:
        Problems by slide name; empty unless unreadable slides are skipped.

    Raises:
        DatasetError: unusable slides, and ``train.on_error`` is not "skip"; no training slide is left, or none has a pixel of a class;
            label maps of two codings.
        InputError: the remaining validation slides do not define ``train.monitor``.
    """
    unusable = check_records(experiment, experiment.table.records, ranks, reporter)
    if unusable and experiment.config.train.on_error != "skip":
        problems = [f"line {record.row}: {unusable[record.name]}" for record in experiment.table.records if record.name in unusable]
        raise DatasetError(str(experiment.config.data.csv), problems)
    if all(record.name in unusable for record in experiment.records("train")):
        raise DatasetError(str(experiment.config.data.csv), ["no training slide can be read:", *unusable.values()])
    absent, text = _absent_classes(experiment, experiment.records("train"))
    if absent:
        raise DatasetError(str(experiment.config.data.csv), [f"no training slide has a pixel of class {', '.join(absent)}: {text}"])
    mixed = mixed_codings_of(experiment, experiment.table.records)
    if mixed is not None:
        raise DatasetError(str(experiment.config.data.csv), [f"{mixed}. {remedy_of_codings(experiment.task.classes)}"])
    monitor = experiment.config.train.monitor
    targets = [r.target for r in experiment.records("val") if r.name not in unusable and r.target is not None]
    if targets and not is_measurable(experiment.task, monitor, targets):
        raise InputError(
            f"train.monitor {monitor} is undefined on the {len(targets)} validation slides: one class, one value, or no pair to compare; "
            "validate on more or other slides, or set train.monitor to loss"
        )
    return unusable


def calibrate_norms(experiment: Experiment, failed: dict[str, str]) -> int:
    """Measure the statistics of norms on crops of the training slides, if configured; returns the number of norms.

    Raises:
        SourceError: slides cannot be read.
    """
    settings = experiment.config.model
    brings_own = settings.weights is not None or bool(settings.options.get("pretrained") or settings.options.get("weights"))
    if settings.norm not in ("calibrated", "auto") or (settings.norm == "auto" and brings_own):
        return 0
    records = [record for record in experiment.records("train") if record.name not in failed]
    draw = philox_generator(experiment.config.train.seed, "calibration")
    chosen = [records[int(number)] for number in draw.integers(len(records), size=_CALIBRATION_CROPS)]
    return calibrate_batch_norms(experiment.model.backbone, _crops(experiment, chosen, draw))


def _crops(experiment: Experiment, records: Sequence[SlideRecord], draw: np.random.Generator) -> Iterator[Tensor]:
    """One crop of each slide; none of a slide with damage at that place, which training will report."""
    for record in records:
        try:
            yield _crop(experiment, record, draw)
        except SourceError:
            if experiment.config.train.on_error != "skip":
                raise


def _crop(experiment: Experiment, record: SlideRecord, draw: np.random.Generator) -> Tensor:
    """A crop of a slide, the one with the most different pixels of four places: half of a slide may be glass."""
    image: Image = experiment.feed.coloured(record)
    settings = experiment.config.model
    side_px = settings.side_px if settings.takes_tiles else _CALIBRATION_PX
    width_px, height_px = min(side_px, image.width_px), min(side_px, image.height_px)
    crops = []
    for _ in range(4):
        left, top = int(draw.integers(image.width_px - width_px + 1)), int(draw.integers(image.height_px - height_px + 1))
        crops.append(image.read(left, top, width_px, height_px))
    pixels = max(crops, key=lambda crop: float(np.nan_to_num(crop.astype(np.float64)).std()))
    crop = ArrayImage(pixels, layout="HWC")
    source = Normalized(crop, **experiment.feed.normalisation(record))
    out = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    source.rows(Interval(0, height_px), out)
    return out


def compile_model(
    model: nn.Module,
    config: Config,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_inputs: int = 1,
    skip_repeats: bool = False,
    ranks: Ranks = SINGLE_RANK,
    output: str = "device",
) -> Any:
    """Compile the model inside the budget, for slides of any size, or for any number of tiles.

    The optimizer's state counts with its final size. So a plan does not depend on the step at which it is made, and a resumed run computes
    the same bits.

    Args:
        model: `SlideModel`, or a module around one.
        config: of the run.
        optimizer: before its first step; its state counts.
        num_inputs: of the model; label maps follow the image.
        skip_repeats: True if strips of background need not run; see `sft.Options`.
        ranks: ranks that share each slide. Default: this process alone
        output: place of the output, as in `sft.compile`. Default: ``"device"``

    Raises:
        UnsupportedError: the network has operators without an exact rule.
    """
    state_bytes = resident_bytes(model, optimizer) - resident_bytes(model, None)
    settings = config.model
    channels = config.num_channels
    shapes: list[tuple[int | None, ...]] = [(1, channels, None, None), *[(1, 1, None, None)] * (num_inputs - 1)]
    if settings.takes_tiles:
        shapes = [(None, channels, settings.side_px, settings.side_px)]
    return sft.compile(
        model,
        shapes if num_inputs > 1 else shapes[0],
        budget=settings.budget,
        device=config.train.device,
        optimizer=state_bytes,
        mesh=ranks.mesh,
        output=output,
        options=sft.Options(
            skip_repeats=skip_repeats,
            mesh_timeout_seconds=ranks.timeout_seconds,
            tile=None if settings.tile is None else (settings.tile[0], settings.tile[1]),
        ),
    )


def autocast_context(config: Config) -> contextlib.AbstractContextManager[Any]:
    """The precision of the run."""
    device = torch.device(config.train.device)
    if config.train.precision == "fp32" or (device.type == "cuda" and not torch.cuda.is_available()):  # only plans are made without it
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float16
    return torch.autocast(torch.device(config.train.device).type, dtype=dtype)


def segmentation_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the pixels that have a label."""
    return F.cross_entropy(prediction, target, ignore_index=IGNORED_LABEL)


def segmentation_counts(prediction: Tensor, target: Tensor) -> Tensor:
    """Pixels that are right, predicted and true, class after class: ``[3 K]`` sums that stream, in 32 bits at least."""
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    labels = target.unsqueeze(1) if target.dim() == prediction.dim() - 1 else target
    counted = (labels != IGNORED_LABEL).to(dtype)
    guess = prediction.argmax(1, keepdim=True)
    sums = []
    for number in range(prediction.shape[1]):
        predicted = (guess == number).to(dtype) * counted
        true = (labels == number).to(dtype)
        sums += [(predicted * true).sum(), predicted.sum(), true.sum()]
    return torch.stack(sums)
