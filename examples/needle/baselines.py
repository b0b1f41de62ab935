"""Alternatives to training on whole slides, with the same network, optimizer and number of pixels.

Downsampled*: slides at a lower resolution. *Patches*: random squares at full resolution that take the label of their slide, as weakly
labelled patch classifiers do; a slide is predicted by the mean or by the maximum over all of its squares. Both keep all slides in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.needle.network import needle_net
from sft.sources import Slide
from sft.wsi import Prediction, SlideRecord, SlideTable, TrainConfig, build_model
from sft.wsi.model.backbones import num_features
from sft.wsi.model.heads import calibrate_batch_norms, set_training
from sft.wsi.train.optim import learning_rate, make_optimizer

__all__ = ["WARMUP_STEPS", "WEIGHT_DECAY", "Settings", "load_slides", "train_downsampled", "train_on_patches"]

#: Of the optimizer, in all three methods.
WEIGHT_DECAY = 0.01
#: Optimizer steps in which the learning rate rises, in all three methods.
WARMUP_STEPS = 20

_MEAN, _STD = 0.7, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Common settings of the three methods.

    Attributes:
        size_px: side of a slide.
        num_steps: optimizer steps.
        slides_per_step: so many slides, or as many pixels, make a step.
        learning_rate: of AdamW, after the warm-up and before a half cosine.
        head: of the network.
        seed: of all random numbers.
    """

    size_px: int
    num_steps: int
    slides_per_step: int
    learning_rate: float
    head: Literal["gap", "max", "attention"]
    seed: int


def load_slides(table: SlideTable, level: int) -> dict[str, Tensor]:
    """All slides at a level of the pyramid, uint8 ``[3, height, width]``."""
    return {record.name: _pixels(record.path, level) for record in table.records}


def train_downsampled(table: SlideTable, images: dict[str, Tensor], settings: Settings) -> list[Prediction]:
    """Train on downsampled slides; predictions of the slides that are not for training."""
    training = [record for record in table.records if record.split == "train"]
    count = settings.slides_per_step * (settings.size_px // next(iter(images.values())).shape[-1]) ** 2

    def batch(draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        chosen = [training[int(number)] for number in draw.integers(len(training), size=count)]
        return torch.stack([_turned(images[record.name], draw) for record in chosen]), _labels(chosen)

    model = _train(batch, [images[record.name] for record in training[:8]], settings)
    return [_prediction(record, model(_normalised(images[record.name][None]))) for record in table.records if record.split != "train"]


def train_on_patches(table: SlideTable, images: dict[str, Tensor], settings: Settings, patch_px: int) -> dict[str, list[Prediction]]:
    """Train on random patches; predictions of the slides that are not for training by the mean and by the largest of their patches."""
    training = [record for record in table.records if record.split == "train"]
    count = settings.slides_per_step * (settings.size_px // patch_px) ** 2

    def patch(record: SlideRecord, draw: np.random.Generator) -> Tensor:
        top, left = draw.integers(0, settings.size_px - patch_px + 1, 2).tolist()
        return _turned(images[record.name][:, top : top + patch_px, left : left + patch_px], draw)

    def batch(draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        chosen = [training[int(number)] for number in draw.integers(len(training), size=count)]
        return torch.stack([patch(record, draw) for record in chosen]), _labels(chosen)

    model = _train(batch, [images[record.name] for record in training[:8]], settings)
    predictions: dict[str, list[Prediction]] = {"mean": [], "max": []}
    for record in table.records:
        if record.split != "train":
            patches = images[record.name].unfold(1, patch_px, patch_px).unfold(2, patch_px, patch_px).permute(1, 2, 0, 3, 4).flatten(0, 1)
            scores = model(_normalised(patches))
            predictions["mean"].append(_prediction(record, scores.softmax(1).mean(0, keepdim=True).log()))
            suspicious = scores[(scores[:, 1] - scores[:, 0]).argmax()]
            predictions["max"].append(_prediction(record, suspicious[None]))
    return predictions


def _train(
    batch: Callable[[np.random.Generator], tuple[Tensor, Tensor]], crops: list[Tensor], settings: Settings
) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(settings.seed)
    backbone = needle_net()
    model: nn.Module = build_model(backbone, num_features(backbone, "needle_net"), 2, head=settings.head, attention_dim=32)
    calibrate_batch_norms(backbone, [_normalised(crop[None]) for crop in crops])
    config = TrainConfig(lr=settings.learning_rate, weight_decay=WEIGHT_DECAY, warmup_steps=WARMUP_STEPS)
    optimizer = make_optimizer(model, config)
    draw = np.random.default_rng(settings.seed)
    set_training(model, training=True, freeze_norms=True)
    for step in range(settings.num_steps):
        pixels, labels = batch(draw)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, settings.num_steps)
        optimizer.zero_grad()
        F.cross_entropy(model(_normalised(pixels)), labels).backward()
        optimizer.step()
    model.eval()

    def predict(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            scores: Tensor = model(pixels)
        return scores

    return predict


def _pixels(path: Path, level: int) -> Tensor:
    with Slide(path, level=level) as slide:
        return torch.from_numpy(slide.read(0, 0, slide.width_px, slide.height_px)).permute(2, 0, 1)


def _turned(image: Tensor, draw: np.random.Generator) -> Tensor:
    turned = torch.rot90(image, int(draw.integers(4)), (1, 2))
    return turned.flip(2) if draw.integers(2) else turned


def _normalised(pixels: Tensor) -> Tensor:
    return (pixels / 255 - _MEAN) / _STD


def _labels(records: list[SlideRecord]) -> Tensor:
    return torch.tensor([int(record.target[0]) for record in records if record.target is not None])


def _prediction(record: SlideRecord, scores: Tensor) -> Prediction:
    output = tuple(scores[0].double().softmax(0).tolist())
    return Prediction(name=record.name, patient=record.patient, split=record.split or "", target=record.target, output=output)
