"""Hugging Face Trainer with a compiled model: a SegFormer trains on images of full resolution."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, import_torchvision, measured, recipe_parser, run


# [recipe]
def train(model: nn.Module, dataset: Dataset[dict[str, Tensor]], arguments: Any, budget: str) -> float:
    """Train a model of transformers inside a budget; returns the mean loss.

    Args:
        model: takes the columns of the dataset by name, and returns its loss first.
        dataset: dicts such as ``{"pixel_values": [3, H, W], "labels": [H, W]}``.
        arguments: `transformers.TrainingArguments`.
        budget: bytes of the step, such as ``"11GiB"``.
    """
    from transformers import Trainer

    optimizer = Trainer(model=model, args=arguments).create_optimizer()  # the budget contains its state
    batch = {name: column.expand(arguments.train_batch_size, *column.shape) for name, column in dataset[0].items()}
    net = sft.compile(model, batch, budget=budget, optimizer=optimizer)
    trainer = Trainer(model=net, args=arguments, train_dataset=dataset, optimizers=(optimizer, None))
    loss: float = trainer.train().training_loss
    return loss  # the weights are those of the model: model.save_pretrained(...)
    # [end]


class Stripes(Dataset[dict[str, Tensor]]):
    """Drawn images with labels."""

    def __init__(self, height: int, width: int, num_images: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand((num_images, 3, height, width), generator=generator)
        self.images[:, :, :, : width // 2] *= 0.5
        self.labels = (torch.arange(width) < width // 2).long().expand(height, width)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[number], "labels": self.labels}


def segformer() -> nn.Module:
    """A small SegFormer with random weights; `from_pretrained` gives one with weights."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_labels=2,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        decoder_hidden_size=32,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model: nn.Module = SegformerForSemanticSegmentation(config)
    return model


def main(argv: Sequence[str] | None = None) -> Comparison:
    """Train with plain PyTorch and with sft."""
    parser = recipe_parser(__doc__, height=512, width=512, budget="40MiB")
    options = parser.parse_args(argv)
    import_torchvision()
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = segformer()
    plain = copy.deepcopy(model)
    dataset = Stripes(options.height, options.width)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            num_train_epochs=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        plain_loss, plain_bytes = measured(lambda: Trainer(model=plain, args=arguments, train_dataset=dataset).train().training_loss)
        loss, sft_bytes = measured(lambda: train(model, dataset, arguments, options.budget))
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=abs(loss - plain_loss),
        measure="difference of the losses",
    )


if __name__ == "__main__":
    sys.exit(run(main))
