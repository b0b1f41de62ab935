"""MONAI's SupervisedTrainer with a network and a loss that are compiled together: training on whole volumes in place of patches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, drawn_volume, measured, positive, recipe_parser, run


# [recipe]
def trainer(
    network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Any], optimizer: Any, budget: str, num_epochs: int = 1
) -> Any:
    """MONAI's trainer of a network inside a budget; batches are dicts with ``image`` and ``label``."""
    from monai.engines import SupervisedTrainer, default_prepare_batch

    def prepare_batch(batch: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        image, label = default_prepare_batch(batch, *arguments, **options)
        return image, label, (label,), {}  # the compiled module takes the label, too

    first = next(iter(batches))
    net = sft.compile(sft.nn.WithLoss(network, loss), [first["image"], first["label"]], budget=budget, optimizer=optimizer)
    return SupervisedTrainer(
        device=first["image"].device,
        max_epochs=num_epochs,
        train_data_loader=batches,
        network=net,
        optimizer=optimizer,
        loss_function=lambda value, label: value,  # the loss is computed in the module, strip by strip
        prepare_batch=prepare_batch,
    )
    # [end]


def plain_trainer(network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Any], optimizer: Any) -> Any:
    """MONAI's trainer with plain PyTorch."""
    from monai.engines import SupervisedTrainer

    device = torch.device("cpu")
    return SupervisedTrainer(device, 1, batches, network, optimizer, loss)


def main(argv: Sequence[str] | None = None) -> Comparison:
    """Train a U-Net with Dice and cross-entropy, with plain PyTorch and with sft."""
    parser = recipe_parser(__doc__, height=96, width=80, budget="96MiB")
    parser.add_argument("--depth", type=positive, default=128, metavar="PX", help="depth of the drawn volume")
    options = parser.parse_args(argv)
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    network: nn.Module = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="batch")
    volume, labels = drawn_volume(options.depth, options.height, options.width)
    batches = [{"image": volume, "label": labels[:, None]}]
    loss = DiceCELoss(to_onehot_y=True, softmax=True)

    peaks, networks = [], []
    for is_compiled in (False, True):
        trained = copy.deepcopy(network)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        if is_compiled:
            engine = trainer(trained, loss, batches, optimizer, options.budget)
        else:
            engine = plain_trainer(trained, loss, batches, optimizer)
        peaks.append(measured(engine.run)[1])
        networks.append(trained)
    pairs = zip(networks[0].parameters(), networks[1].parameters(), strict=True)
    largest = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return Comparison(
        plain_bytes=peaks[0], sft_bytes=peaks[1], budget=options.budget, difference=largest, measure="largest difference of trained weights"
    )


if __name__ == "__main__":
    sys.exit(run(main))
