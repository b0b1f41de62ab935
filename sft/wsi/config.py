"""Settings of a run, in groups; each field may be set in the YAML file or on the command line (``--train.lr 1e-4``).

A group checks itself when it is made, so that a mistake stops the run before any other work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from sft.common.errors import some_names
from sft.common.legacy_names import restore_fields
from sft.wsi.config_checks import (
    annotation_problems,
    byte_problems,
    channel_problems,
    label_map_problems,
    refuse,
    refuse_nulls,
    tile_problems,
)
from sft.wsi.data_config import DataConfig

__all__ = ["GROUPS", "AugmentConfig", "Config", "DataConfig", "ModelConfig", "RanksConfig", "TaskConfig", "TaskKind", "TrainConfig"]

_DEVICE = re.compile("cpu|cuda(:[0-9]+)?")
#: Hidden units of the attention at most; a slide's features have some thousand at most.
_MAX_HIDDEN = 2**20
#: Side of a tile by default, that of most vision transformers.
_TILE_PX = 224
#: Epochs, and slides and steps between events, at most.
_MAX_COUNT = 10**9
#: Mean and standard deviation of the channels of ImageNet.
_IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_LARGEST = 2.0**128  # numbers from here on are infinite in float32

TaskKind = Literal["classification", "multilabel", "regression", "cox", "hazard", "segmentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Prediction task.

    Args:
        kind: classification (cross-entropy), multilabel (labels "a;b"), regression (Huber), cox or hazard (survival: columns time and
            event), segmentation (column mask).
        classes: names of the classes in order; default: those of the table, sorted. Needed for segmentation.
        class_weights: "none", or "balanced" (inverse frequency in the training slides). Those of a classification are weights in the mean
            over the slides of a step, as in PyTorch, so a step must have several (``train.accumulate``).
        label_smoothing: of the cross-entropy, in 0..1.
        num_intervals: time intervals of the discrete-time hazard.
    """

    kind: TaskKind = "classification"
    classes: list[str] | None = None
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: float = 0.0
    num_intervals: int = 4

    def __post_init__(self) -> None:
        refuse_nulls("task", self)
        problems = []
        classes: Any = self.classes  # a text is a sequence of texts, too
        if isinstance(classes, str):
            problems.append(f"task.classes {classes!r}: give a list of names, such as [{classes}, other]")
        elif self.classes is not None and (len(set(self.classes)) != len(self.classes) or len(self.classes) < 1):
            problems.append(f"task.classes [{some_names(self.classes)}]: give each name once")
        elif self.classes is not None and not all(map(str.strip, self.classes)):
            problems.append(f"task.classes {self.classes}: a name is empty; leave it out, or write a name")
        if self.kind == "segmentation" and not self.classes:
            problems.append("task.kind segmentation: name the classes of the masks' values 0, 1, ... in task.classes")
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"task.label_smoothing {self.label_smoothing}: give a number in 0..1")
        if self.num_intervals < 2:
            problems.append(f"task.num_intervals {self.num_intervals}: give at least 2")
        refuse(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Network and byte budget.

    Args:
        backbone: "timm:NAME", "torchvision:NAME", "torch.nn:LAYER", the bare name of a timm or torchvision model, or
            "package.module:name", a class or function of a module that the command line trusts (``--trust``).
        options: arguments of the backbone's maker, such as {pretrained: true}.
        weights: file of the backbone's weights (.safetensors, or a state_dict that torch.load reads), loaded before training.
        head: gap (global average, linear layer), max (the maximum of each feature instead), attention (gated, over all positions),
            segmentation.
        attention_dim: hidden units of the attention.
        dropout: probability, before the last layer.
        norm: frozen (the statistics of the backbone), calibrated (measured on the training slides, then frozen), train, or auto:
            frozen with weights (pretrained or a file), else calibrated.
        budget: bytes that the device may hold, or auto: what it has free when the run starts, less a margin. A resumed run keeps it.
        tile: rows and columns in px of a tile of the computation; default: the planner's choice. With columns, tiles of background
            need not run.
        mean: of each channel, in units of its range of values (0..1); default: that of ImageNet, with data.channels 0.
        std: of each channel, likewise; default: that of ImageNet, with data.channels 1.
        encoder: slide (the backbone maps the whole slide to a feature map), or tiles (it maps each tile of the tissue to a vector; the
            head pools the vectors of all tiles of a slide).
        tile_px: with tiles: side of a tile, in px at data.mpp; default: 224.
        stride_px: with tiles: px from a tile to the next; default: tile_px.
        min_tissue: with tiles: least share of a tile that is tissue, of slides with a mask or with data.tissue; default: 0.5.
        lora_rank: with tiles: rank of low-rank adapters of the backbone's linear layers, which train in place of its weights (needs
            peft); default: no adapters.
        lora_layers: with lora_rank: names of the layers with adapters, such as [qkv, proj], or patterns with ``*``; default: all linear
            layers of the backbone.
    """

    backbone: str = "torchvision:resnet18"
    options: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    head: Literal["gap", "max", "attention", "segmentation"] = "gap"
    attention_dim: int = 128
    dropout: float = 0.0
    norm: Literal["auto", "frozen", "calibrated", "train"] = "auto"
    budget: int | str = "11GiB"
    tile: list[int] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    encoder: Literal["slide", "tiles"] = "slide"
    tile_px: int | None = None
    stride_px: int | None = None
    min_tissue: float | None = None
    lora_rank: int | None = None
    lora_layers: list[str] | None = None

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    @property
    def takes_tiles(self) -> bool:
        """True if the backbone encodes tiles, False if it maps whole slides."""
        return self.encoder == "tiles"

    @property
    def side_px(self) -> int:
        """Side of a tile."""
        return self.tile_px or _TILE_PX

    @property
    def step_px(self) -> int:
        """Px from a tile to the next."""
        return self.stride_px or self.side_px

    def __post_init__(self) -> None:
        refuse_nulls("model", self)
        problems = []
        if not 1 <= self.attention_dim <= _MAX_HIDDEN:
            problems.append(f"model.attention_dim {self.attention_dim}: give 1 to {_MAX_HIDDEN}")
        if not 0 <= self.dropout < 1:
            problems.append(f"model.dropout {self.dropout}: give a probability below 1")
        if self.tile is not None and (len(self.tile) != 2 or min(self.tile) < 1):
            problems.append(f"model.tile {self.tile}: give two positive numbers, rows and columns, such as [256, 2048]")
        problems += byte_problems("model.budget", self.budget)
        problems += tile_problems(self)
        refuse(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """Augmentation of the training slides: drawn once for each slide and epoch, and exact for any strip height.

    Args:
        flips: mirror half of the slides.
        rotations: turn slides by quarters.
        brightness: largest relative change, as a share.
        contrast: largest relative change, as a share.
        saturation: largest relative change, as a share.
        hed: largest relative and absolute change of haematoxylin, eosin and DAB.
        stain: "macenko" brings each slide's two stains to a reference, of all splits; "reinhard" the means and spreads of its colours;
            "none" changes no colours.
    """

    flips: bool = True
    rotations: bool = True
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hed: float = 0.0
    stain: Literal["none", "macenko", "reinhard"] = "none"

    def __post_init__(self) -> None:
        refuse_nulls("augment", self)
        refuse(
            f"augment.{name} {getattr(self, name)}: give a share in 0..1"
            for name in ("brightness", "contrast", "saturation", "hed")
            if not 0 <= getattr(self, name) < 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Training loop.

    Args:
        epochs: passes over the training slides.
        accumulate: slides of one optimizer step.
        optimizer: sgd (momentum 0.9), adam or adamw.
        lr: learning rate after the warm-up.
        weight_decay: of the optimizer; not for biases and norms.
        schedule: constant or cosine, after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        min_lr: end of the cosine, as a share of lr.
        clip_norm: largest norm of the gradient; default: none.
        precision: fp32, or autocast to bf16 or fp16 (with loss scaling).
        patience: stop after so many epochs without a better validation; default: never.
        monitor: metric of the best model: loss, or auc (classification, multilabel), c_index (survival), r2 (regression), dice
            (segmentation).
        checkpoint_every: optimizer steps between checkpoints.
        seed: of all random numbers.
        device: cpu or cuda.
        on_error: effect of an unreadable slide: stop the run (raise), or skip the slide (skip; the exit code reports it at the end). With
            fill, tiles that cannot be decoded become background and are listed in damaged.csv; a file that cannot be opened stops the run.
        layer_decay: layer-wise decay of the learning rate, in 0..1: the head learns at lr, each block before it at the rate of the block
            after it times this; 1 for none.
        freeze: modules that do not train, by name ([backbone.layer1], with * for any characters). Their norms stay in eval mode.
    """

    epochs: int = 20
    accumulate: int = 1
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = 1e-4
    weight_decay: float = 1e-4
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0
    clip_norm: float | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    patience: int | None = None
    monitor: Literal["loss", "auc", "c_index", "r2", "dice"] = "loss"
    checkpoint_every: int = 1
    seed: int = 0
    device: str = "cpu"
    on_error: Literal["raise", "skip", "fill"] = "raise"
    layer_decay: float = 1.0
    freeze: list[str] = field(default_factory=list)

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        refuse_nulls("train", self)
        problems = [
            f"train.{name} {getattr(self, name)}: give at least 1, and {_MAX_COUNT} at most"
            for name in ("epochs", "accumulate", "checkpoint_every", "patience")
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= _MAX_COUNT
        ]
        problems += [
            f"train.{name} {getattr(self, name)}: give a number above 0 that float32 holds"
            for name in ("lr", "clip_norm")
            if _not_positive(self, name)
        ]
        if _DEVICE.fullmatch(self.device) is None:
            problems.append(f"train.device {self.device}: give cpu, cuda, or cuda:N")
        if not 0 < self.layer_decay <= 1:
            problems.append(f"train.layer_decay {self.layer_decay}: give a factor above 0 and at most 1, such as 0.75")
        if not 0 <= self.weight_decay < inf or not 0 <= self.warmup_steps <= _MAX_COUNT or not 0 <= self.min_lr <= 1:
            problems.append("train.weight_decay and train.warmup_steps are at least 0, train.min_lr a share in 0..1")
        refuse(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """Distribution over the processes of torchrun; a run may resume with another number of them.

    Args:
        bands: ranks that share one slide, each with a band of its rows; the slides of a step are distributed over these groups.
        timeout_seconds: timeout for a rank that is alive and silent: longer than an optimizer step takes. A dead rank is detected at once.
    """

    bands: int = 1
    timeout_seconds: float = 7200.0

    def __post_init__(self) -> None:
        refuse_nulls("ranks", self)
        problems = []
        if self.bands < 1:
            problems.append(f"ranks.bands {self.bands}: give at least 1")
        if not 0 < self.timeout_seconds < 1e9:
            problems.append(f"ranks.timeout_seconds {self.timeout_seconds}: give a number of seconds above 0")
        refuse(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a run.

    Attributes:
        data, task, model, augment, train, ranks: the groups.
        run: output folder.
        tensorboard: True to write events for TensorBoard as well.
    """

    data: DataConfig
    task: TaskConfig
    model: ModelConfig
    augment: AugmentConfig
    train: TrainConfig
    ranks: RanksConfig = field(default_factory=RanksConfig)
    run: Path
    tensorboard: bool = False

    def __post_init__(self) -> None:
        problems = [f"{name} is null: give a value" for name in ("run", "tensorboard") if getattr(self, name) is None]
        if "\0" in str(self.run):
            problems.append(f"run {str(self.run)!r}: it has a zero byte, which no name of a folder has; leave it out")
        refuse(problems)
        default_mean, default_std = _IMAGENET if self.data.channels is None else ([0.0] * self.num_channels, [1.0] * self.num_channels)
        mean, std = self.model.mean or default_mean, self.model.std or default_std
        object.__setattr__(self, "model", replace(self.model, mean=mean, std=std))
        problems += channel_problems(self)
        if self.model.takes_tiles and "segmentation" in (self.model.head, self.task.kind):
            problems.append(
                f"model.encoder tiles with model.head {self.model.head} and task.kind {self.task.kind}: tiles are pooled to one vector "
                "of a slide; for segmentation give model.encoder slide, otherwise head attention, gap or max, and another task.kind"
            )
        elif (self.model.head == "segmentation") != (self.task.kind == "segmentation"):
            problems.append(f"model.head {self.model.head} with task.kind {self.task.kind}: segmentation wants both, or neither")
        problems += label_map_problems(self.data, self.task)
        problems += annotation_problems(self.data, self.task)
        if self.model.takes_tiles and self.model.norm == "train" and self.ranks.bands > 1:
            problems.append(
                f"model.norm train with model.encoder tiles and ranks.bands {self.ranks.bands}: the statistics of a slide's tiles would be "
                "those of one rank; give model.norm frozen or calibrated, or ranks.bands 1, with which ranks have slides of their own"
            )
        if self.task.kind == "cox" and self.train.accumulate < 2:
            problems.append(f"task.kind cox with train.accumulate {self.train.accumulate}: a risk set needs several slides; give 8 or more")
        if self.task.kind == "classification" and self.task.class_weights != "none" and self.train.accumulate < 2:
            problems.append(
                f"task.class_weights {self.task.class_weights} with train.accumulate {self.train.accumulate}: in a weighted mean over one "
                "slide its weight changes nothing; give train.accumulate 2 or more, or class_weights none"
            )
        allowed = {
            "classification": ("loss", "auc"),
            "multilabel": ("loss", "auc"),
            "regression": ("loss", "r2"),
            "cox": ("loss", "c_index"),
            "hazard": ("loss", "c_index"),
            "segmentation": ("loss", "dice"),
        }[self.task.kind]
        if self.train.monitor not in allowed:
            problems.append(f"train.monitor {self.train.monitor} with task.kind {self.task.kind}: choose {' or '.join(allowed)}")
        if self.task.class_weights != "none" and self.task.kind not in ("classification", "multilabel"):
            problems.append(
                f"task.class_weights {self.task.class_weights} with task.kind {self.task.kind}: classifications have class weights, and a "
                "segmentation counts every pixel once; leave it out"
            )
        if self.task.label_smoothing and self.task.kind != "classification":
            problems.append(f"task.label_smoothing with task.kind {self.task.kind}: it is for classification")
        refuse(problems)

    @property
    def num_channels(self) -> int:
        """Channels of the network's input."""
        return 3 if self.data.channels is None else len(self.data.channels)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written to YAML."""
        return {name: _plain(value) for name, value in asdict(self).items()}


#: The groups by name, as the command line knows them.
GROUPS: dict[str, type] = {
    item.name: cls
    for item, cls in zip(fields(Config), (DataConfig, TaskConfig, ModelConfig, AugmentConfig, TrainConfig, RanksConfig), strict=False)
}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _not_positive(config: TrainConfig, name: str) -> bool:
    value = getattr(config, name)
    return value is not None and not 0 < value < _LARGEST
