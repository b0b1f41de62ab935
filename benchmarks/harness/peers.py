"""Methods to train on a large image with exact gradients: PyTorch's own, lightstream, the tiles of the SFT paper, and `sft`.

Each method turns a body and an input into one training step, `loss = sum(body(x) * weights)` and its backward pass. The step leaves the
gradients in `.grad`. The statistics of norms are frozen, as lightstream requires; the weights of norms train wherever a method allows it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config  # noqa: TID251 - PyTorch has no other way to set activation_memory_budget
from torch.utils.checkpoint import checkpoint

import sft
from harness.cases import Built, PlanNumbers, build_body, checkpointed, describe_plan, make_body
from harness.workers import Refused

__all__ = ["METHODS", "NETWORKS", "Method", "Network", "PeerCase", "Prepared", "build_peer", "prepare_peer"]

#: Largest share of the image's pixels that lightstream may compute with the tile size that we choose.
_MOST_TILED_PIXELS = 2.3
#: Tile size in the examples of lightstream's README.
_README_TILE_PX = 2880


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A body of `examples/models.py`.

    Attributes:
        model: function of that module.
        channels: channels of the first stage.
        halo_px: rows that lightstream loses at both edges of a tile together, in the backward pass.
        stride_px: pixels of the input for each position of the output.
    """

    model: str
    channels: int
    halo_px: int
    stride_px: int


NETWORKS: Mapping[str, Network] = {
    "VGG-like": Network(model="vgg16", channels=16, halo_px=372, stride_px=32),
    "ResNet-18": Network(model="resnet18", channels=64, halo_px=977, stride_px=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCase:
    """One method on one network and image."""

    network: str
    """Key of `NETWORKS`."""
    height: int
    width: int
    method: str
    """Key of `METHODS`."""
    threads: int
    budget_bytes: int = 0
    """Budget of the methods that have one."""
    limit_bytes: int | None = None
    """Most memory that the process may allocate."""
    double: bool = False
    """Float64 in place of float32."""
    channels: int | None = None
    """Channels of the first stage; None: those of the network."""
    norms: str = "frozen"
    """`frozen` statistics, or `trained`: BatchNorm as in training, in VGG after each convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A method applied to a body.

    Attributes:
        step: run one training step and return the output.
        trained: the module with the parameters that the step trains.
        plan: numbers of the plan, if the method has one.
    """

    step: Callable[[], Tensor]
    trained: nn.Module
    plan: PlanNumbers | None = None

    def reset(self) -> None:
        """Drop the gradients."""
        self.trained.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to run the step.

    Attributes:
        prepare: applies the method to a case.
        libraries: modules that are imported before memory is measured.
        is_metered: `sft.measure_peak` sees its tensors; not those of compiled code.
        strategy: the strategy of a method that plans for a budget.
    """

    prepare: Callable[[PeerCase, Built], Prepared]
    libraries: tuple[str, ...] = ()
    is_metered: bool = True
    strategy: str | None = None

    @property
    def is_budgeted(self) -> bool:
        """True if the method takes a budget."""
        return self.strategy is not None


def build_peer(case: PeerCase) -> Built:
    """Build body, input and loss weights of a case."""
    network = NETWORKS[case.network]
    options: dict[str, Any] = {"width": case.channels or network.channels}
    if case.norms == "trained" and network.model == "vgg16":
        options["batch_norm"] = True
    make = partial(make_body, network.model, frozen=case.norms == "frozen", **options)
    return build_body(make, case.height, case.width, torch.float64 if case.double else torch.float32)


def prepare_peer(case: PeerCase, built: Built) -> Prepared:
    """Apply a case's method.

    Raises:
        Refused: the method cannot run the case.
    """
    return METHODS[case.method].prepare(case, built)


def _autograd_step(built: Built, net: Callable[[Tensor], Tensor], x: Tensor | None = None, plan: PlanNumbers | None = None) -> Prepared:
    """A step of a module that autograd differentiates."""
    image = built.x if x is None else x

    def step() -> Tensor:
        built.body.zero_grad(set_to_none=True)
        output = net(image)
        torch.autograd.backward(torch.sum(output * built.weights))
        return output.detach()

    return Prepared(step=step, trained=built.body, plan=plan)


def _plain(case: PeerCase, built: Built) -> Prepared:
    return _autograd_step(built, built.body)


def _to_channels_last(built: Built) -> Tensor:
    """Convert the body's weights in place; returns the image in that layout."""
    converted: Any = built.body  # the stubs of PyTorch lack the argument
    converted.to(memory_format=torch.channels_last)
    return built.x.contiguous(memory_format=torch.channels_last)


def _plain_channels_last(case: PeerCase, built: Built) -> Prepared:
    return _autograd_step(built, built.body, _to_channels_last(built))


def _checkpoint_sequential(case: PeerCase, built: Built) -> Prepared:
    return _autograd_step(built, checkpointed(built.body))


def _blocks(body: nn.Sequential) -> list[nn.Sequential]:
    """The body's blocks: residual blocks, and layers up to a max pool."""
    blocks: list[list[nn.Module]] = [[]]
    for layer in body:
        is_block = any(True for _ in layer.children())
        if is_block and blocks[-1]:
            blocks.append([])
        blocks[-1].append(layer)
        if is_block or isinstance(layer, nn.MaxPool2d):
            blocks.append([])
    return [nn.Sequential(*layers) for layers in blocks if layers]


def _checkpoint_blocks(case: PeerCase, built: Built) -> Prepared:
    blocks = _blocks(built.body)

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return _autograd_step(built, forward)


def _compiled(case: PeerCase, built: Built, *, share: float) -> Prepared:
    functorch_config.activation_memory_budget = share
    return _autograd_step(built, torch.compile(built.body))


def _chosen_tile_px(network: Network, size: int) -> int:
    """The smallest tile that covers an image without more than `_MOST_TILED_PIXELS` times its pixels."""
    best = size
    for num_tiles in range(2, size // network.stride_px):
        valid = math.ceil((size - network.halo_px) / num_tiles / network.stride_px) * network.stride_px
        tile = math.ceil((valid + network.halo_px) / network.stride_px) * network.stride_px
        if tile >= size or (num_tiles * tile / size) ** 2 > _MOST_TILED_PIXELS:
            break
        best = tile
    return best


def _lightstream(case: PeerCase, built: Built, *, tile_px: int | None) -> Prepared:
    """Streamed tiles. Trained norms stay as the case has them; for frozen ones lightstream freezes the weights, too."""
    try:
        constructor_module = importlib.import_module("lightstream.core.constructor")
        utils = importlib.import_module("lightstream.core.utils")
    except ImportError as error:
        raise Refused(f"{error.name} is not installed: pip install -e '.[peers]'") from error
    size = min(case.height, case.width)
    tile = _chosen_tile_px(NETWORKS[case.network], size) if tile_px is None else tile_px
    if tile >= size:
        reason = "no smaller tile covers it" if tile_px is None else f"its tile has {tile_px} px"
        raise Refused(f"would run untiled: {reason}")
    if case.norms == "frozen":
        utils.freeze_normalization_layers(built.body)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its statistics
        constructor = constructor_module.StreamingConstructor(
            built.body, tile, verbose=False, normalize_on_gpu=False, copy_to_gpu=False, add_keep_modules=[nn.BatchNorm2d]
        )
        constructor.statistics_on_cpu = False  # after the constructor, which may move the model to CUDA
        streaming = constructor.prepare_streaming_model()
    trained: nn.Module = streaming.stream_module

    def step() -> Tensor:
        trained.zero_grad(set_to_none=True)
        output: Tensor = streaming(built.x).detach().requires_grad_()
        torch.autograd.backward(torch.sum(output * built.weights))
        assert output.grad is not None
        streaming.backward(built.x, output.grad)
        return output.detach()

    return Prepared(step=step, trained=trained)


def _sft(case: PeerCase, built: Built, *, strategy: str = "auto", channels_last: bool = False) -> Prepared:
    x = _to_channels_last(built) if channels_last else built.x
    net: Any = sft.compile(built.body, x, budget=case.budget_bytes, options=sft.Options(strategy=strategy))
    return _autograd_step(built, net, x, describe_plan(net.plan))


_LIGHTSTREAM = ("lightstream.core.constructor",)
_INDUCTOR = ("torch._dynamo", "torch._inductor.compile_fx")

METHODS: Mapping[str, Method] = {
    "plain": Method(prepare=_plain),
    "plain, channels last": Method(prepare=_plain_channels_last),
    "checkpoint_sequential": Method(prepare=_checkpoint_sequential),
    "checkpoint each block": Method(prepare=_checkpoint_blocks),
    "torch.compile, budget 1.0": Method(prepare=partial(_compiled, share=1.0), libraries=_INDUCTOR, is_metered=False),
    "torch.compile, budget 0.5": Method(prepare=partial(_compiled, share=0.5), libraries=_INDUCTOR, is_metered=False),
    "torch.compile, budget 0.2": Method(prepare=partial(_compiled, share=0.2), libraries=_INDUCTOR, is_metered=False),
    "lightstream, tile chosen": Method(prepare=partial(_lightstream, tile_px=None), libraries=_LIGHTSTREAM),
    f"lightstream, tile {_README_TILE_PX}": Method(prepare=partial(_lightstream, tile_px=_README_TILE_PX), libraries=_LIGHTSTREAM),
    "tiles of the SFT paper": Method(prepare=partial(_sft, strategy="sft"), strategy="sft"),
    "sft": Method(prepare=_sft, strategy="auto"),
    "sft, channels last": Method(prepare=partial(_sft, channels_last=True), strategy="auto"),
}
