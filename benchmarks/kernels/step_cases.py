"""Cases of the benchmark of steps: networks and modes of execution, and the steps of eager PyTorch and of compiled networks."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from harness.bags import adapted_bag

import sft
from sft.cli.tune import STANDARD_NETWORKS
from sft.sources import ArraySource

__all__ = ["AMPLE", "StepCase", "case_budget", "compiled", "draw_input", "file_input", "make_network", "step_cases", "training_step"]

#: Budget of a case with forced strips.
AMPLE = "1TiB"
#: A step gets this fraction of the memory that eager PyTorch's activations take, by default.
_SHARE_OF_PLAIN = 8
_NORMALIZATION = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A network, the size of its input, and the mode of execution.

    Attributes:
        name: name of the case.
        make: makes the network.
        num_channels: channels of the input. More than three: the input needs a gradient.
        size: rows and columns.
        has_plain: true if eager PyTorch takes the step as well.
        tile: forced strips, for a segment on its own.
        budget: bytes; ``None`` for a fraction of the memory that eager PyTorch takes.
        share_of_plain: divisor of that memory.
        strategy: planning strategy.
        weights: placement of the parameters.
        cuda_graphs: as in ``sft.Options``.
        reads_file: true for an image that is read from a file of uint8 pixels, strip by strip.
        num_images: images of the input; several are the tiles of a bag, whose size is that of verification as well.
        dtypes: element types to run.
    """

    name: str
    make: Callable[[], nn.Module]
    num_channels: int
    size: int
    has_plain: bool
    tile: tuple[int, int | None] | None = None
    budget: str | None = None
    share_of_plain: int = _SHARE_OF_PLAIN
    strategy: str = "auto"
    weights: str = "resident"
    cuda_graphs: bool | str = "auto"
    reads_file: bool = False
    num_images: int = 1
    dtypes: tuple[str, ...] = ("bf16", "fp32")

    def options(self, backend: str, tile: tuple[int, int | None] | None = None) -> sft.Options:
        """Planner options; ``tile`` replaces the case's strips, except for a strategy without any."""
        tile = None if self.strategy != "auto" else tile or self.tile
        host = "1TiB" if self.strategy != "auto" else None
        common = {"backend": backend, "weights": self.weights, "cuda_graphs": self.cuda_graphs, "host_budget": host}
        return sft.Options(strategy=self.strategy, tile=tile, **common)  # type: ignore[arg-type]  # of several types

    def verified(self, size: int) -> StepCase:
        """The case at the size at which its results are compared with float64."""
        return replace(self.small(size), reads_file=False)

    def small(self, size: int, num_images: int = 8) -> StepCase:
        """The case without a budget, of an image of ``size`` rows and columns, or of some tiles of the size that the network has."""
        small = replace(self, budget=None)
        return replace(small, size=size) if self.num_images == 1 else replace(small, num_images=min(self.num_images, num_images))


def _block(num_in: int, width: int) -> nn.Module:
    """A block of two convolutions of VGG."""
    first = nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def step_cases() -> list[StepCase]:
    """All cases, the most important ones first: steps that eager PyTorch can take, steps that it cannot, segments, and further modes."""
    vgg, frozen = STANDARD_NETWORKS["vgg16"], STANDARD_NETWORKS["resnet18"]
    training, unet = STANDARD_NETWORKS["resnet18 in training"], STANDARD_NETWORKS["u-net"]
    image = functools.partial(StepCase, num_channels=3, size=2048, has_plain=True)
    large = functools.partial(StepCase, num_channels=3, size=20480, has_plain=False, dtypes=("bf16",))
    bag = functools.partial(StepCase, make=adapted_bag, num_channels=3, size=224, budget="2GiB", dtypes=("bf16",))
    return [
        image(name="vgg16 step", make=vgg),
        image(name="resnet18 frozen step", make=frozen),
        image(name="resnet18 training step", make=training),
        image(name="u-net step", make=unet),
        image(name="vgg16 step in 1.2 GiB", make=vgg, budget="1.2GiB"),
        image(name="resnet18 frozen step in 400 MiB", make=frozen, budget="400MiB"),
        image(name="resnet18 training step in 8 GiB", make=training, budget="8GiB"),
        image(name="u-net step in 700 MiB", make=unet, budget="700MiB"),
        image(name="resnet18 frozen step in 250 MiB", make=frozen, budget="250MiB"),
        image(name="resnet18 training step in 500 MiB", make=training, budget="500MiB"),
        image(name="resnet18 training step in 450 MiB, cuts on the host", make=training, budget="450MiB"),
        image(name="resnet18 training step in 300 MiB, cuts on the host", make=training, budget="300MiB"),
        image(name="u-net step in 1 GiB", make=unet, budget="1GiB"),
        bag(name="ViT-S adapters, 512 tiles", num_images=512, has_plain=True),
        bag(name="ViT-S adapters, 4,096 tiles", num_images=4096, has_plain=False, reads_file=True),
        large(name="vgg16 large", make=vgg, budget="11GiB"),
        image(name="resnet18 frozen strips", make=frozen, tile=(256, None), cuda_graphs=False),
        image(name="resnet18 frozen strips, CUDA graphs", make=frozen, tile=(256, None), cuda_graphs=True),
        image(name="vgg16 offload", make=vgg, strategy="offload-dp", share_of_plain=2),
        image(name="vgg16 streamed weights", make=vgg, tile=(512, None), weights="stream"),
        image(name="vgg16 file", make=vgg, size=4096, reads_file=True, tile=(512, None)),
        StepCase(name="vgg block 1", make=functools.partial(_block, 3, 64), num_channels=3, size=2048, has_plain=True, tile=(256, None)),
        StepCase(name="vgg block 2", make=functools.partial(_block, 64, 128), num_channels=64, size=1024, has_plain=True, tile=(256, None)),
        large(name="resnet18 frozen large", make=frozen, budget="11GiB"),
        large(name="resnet18 training large", make=training, budget="40GiB"),
        large(name="resnet18 training large in 28 GiB, cuts on the host", make=training, budget="28GiB"),
        large(name="u-net large", make=unet, budget="28GiB"),
    ]


def training_step(module: nn.Module, x: Any) -> list[Tensor]:
    """Output and gradients; the input needs none where it is an image."""
    module.zero_grad(set_to_none=True)
    if isinstance(x, Tensor):
        x.grad = None
    y = module(x)
    y.sum().backward()
    input_grads = [x.grad] if isinstance(x, Tensor) and x.grad is not None else []
    return [y.detach(), *input_grads, *(p.grad for p in module.parameters() if p.grad is not None)]


def draw_input(case: StepCase, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Random images on the device, channels last."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.num_images, case.num_channels, size, size, generator=random, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(case.num_channels > 3)


def file_input(case: StepCase, size: int, dtype: torch.dtype, folder: Path) -> ArraySource:
    """A source that reads a file of random uint8 pixels."""
    path = folder / f"image-{size}.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).integers(0, 256, (case.num_images, size, size, case.num_channels), dtype=np.uint8))
    mean, std = _NORMALIZATION
    return ArraySource(path, layout="NHWC", mean=mean, std=std, dtype=dtype)


def make_network(case: StepCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """The network on the device, its weights channels last."""
    torch.manual_seed(seed)
    module = case.make().to(device, dtype)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def compiled(case: StepCase, model: nn.Module, x: Any, options: sft.Options, plain_bytes: int | None = None) -> Any:
    """The compiled network, within the case's budget, or with the smallest budget that has a plan where that one has none.

    Args:
        case: the case.
        model: its network.
        x: its input.
        options: planner options.
        plain_bytes: peak of eager PyTorch's step, of which the case gets a fraction; ``None`` where it is unknown.
    """
    budget = case_budget(case, model, x, options, plain_bytes)
    try:
        return sft.compile(model, x, budget=budget, options=options)
    except sft.BudgetError as error:
        if case.budget is not None:
            raise
        return sft.compile(model, x, budget=error.needed_bytes, options=options)


def case_budget(case: StepCase, model: nn.Module, x: Any, options: sft.Options, plain_bytes: int | None = None) -> int | str:
    """The budget of a case; arguments as of :func:`compiled`. A strategy without strips gets one byte where eager PyTorch is unknown."""
    if case.budget is not None:
        return case.budget
    if options.tile is None and plain_bytes is not None:
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        activation_bytes = max(0, plain_bytes - weight_bytes)  # the step's new gradients take as much as the weights
        num_bytes: int = 3 * weight_bytes + x.numel() * x.element_size() + math.ceil(activation_bytes / case.share_of_plain)
        return num_bytes
    return AMPLE if case.strategy == "auto" else 1
