"""Encoders of tiles by name: networks from a tile to a vector, and low-rank adapters in them.

timm gives pooled features itself; its vision transformers are resized to the tiles, with their position embeddings. Networks of
torchvision are cut before their pooling, or lose their classifier. Networks of other modules are used unchanged: they give vectors ``[N,
D]``, or feature maps ``[N, D, h, w]``, which are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sft.common.errors import InputError, some_names
from sft.common.installation import install_command
from sft.common.untrusted.trusted_code import Trust
from sft.wsi.model.backbones import cut_before_pooling, load_weights, model_name
from sft.wsi.model.input_channels import timm_channels, with_input_channels

__all__ = ["add_adapters", "load_tile_encoder", "num_tile_features"]

#: Attributes that hold the classifier of torchvision's transformers.
_CLASSIFIERS = ("heads", "head", "classifier", "fc")


def load_tile_encoder(
    name: str,
    options: Mapping[str, Any],
    *,
    tile_px: int,
    num_channels: int = 3,
    weights: Path | None = None,
    trust: Trust = (),
) -> nn.Module:
    """A network from tiles to vectors, or to feature maps.

    Args:
        name: as of `sft.wsi.model.backbones.load_backbone`.
        options: keyword arguments of its constructor.
        tile_px: side of a tile.
        num_channels: of a tile. Default: 3
        weights: file of weights, of the network before it is resized. Default: none
        trust: modules, files or folders whose code may be run. Default: none

    Raises:
        InputError: the network does not exist, is of a module that is not trusted, its constructor fails, or weights do not fit.
        SourceError: weights cannot be read.
    """
    maker = model_name(name, trust).factory()
    settings = dict(options)
    if maker.library == "timm":
        network = maker.make({"num_classes": 0, **timm_channels(num_channels), **settings})
    elif maker.library == "torchvision":
        if settings.pop("pretrained", False):
            settings.setdefault("weights", "DEFAULT")
        network = _without_classifier(with_input_channels(maker.make(settings), num_channels), name, num_channels)
    else:
        network = with_input_channels(maker.make(settings), num_channels)
    if weights is not None:
        load_weights(network, weights)
    if maker.library == "timm":
        _fit_to_tiles(network, name, tile_px)
    return network


def _fit_to_tiles(network: nn.Module, name: str, tile_px: int) -> None:
    """Resize a transformer of timm to tiles of another size.

    Raises:
        InputError: its patches do not divide a tile, and would leave its border out.
    """
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", None)
    sides = [side for side in (patch if isinstance(patch, Sequence) else (patch,)) if isinstance(side, int) and tile_px % side]
    place = f"model.backbone {name!r} with model.tile_px {tile_px}"
    if sides:
        raise InputError(
            f"{place}: patches of {sides[0]} px do not divide a tile. Give a multiple, such as {max(1, tile_px // sides[0]) * sides[0]}."
        )
    resize = getattr(network, "set_input_size", None)
    if resize is None:
        return
    try:
        resize(img_size=(tile_px, tile_px))
    except Exception as error:  # of timm's own checks
        raise InputError(f"{place}: {' '.join(str(error).split())}. Give another size of tiles.") from error


def num_tile_features(encoder: nn.Module, name: str, tile_px: int, num_channels: int = 3) -> int:
    """Length of the vector of a tile.

    Raises:
        InputError: the encoder gives no vector for each tile.
    """
    flags = [(module, module.training) for module in encoder.modules()]
    device = next((parameter.device for parameter in encoder.parameters()), torch.device("cpu"))
    try:
        encoder.eval()
        with torch.no_grad():
            features = encoder(torch.zeros(2, num_channels, tile_px, tile_px, device=device))
    except Exception as error:  # of the network's own code
        raise InputError(
            f"model.backbone {name!r} does not take tiles of {tile_px} x {tile_px} px with {num_channels} channels "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Change model.tile_px or model.options, or name another network."
        ) from error
    finally:
        for module, flag in flags:
            module.training = flag
    if not isinstance(features, Tensor) or features.dim() not in (2, 4) or features.shape[0] != 2:
        result = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"model.backbone {name!r} gives {result} for 2 tiles of {tile_px} px instead of vectors [2, D], or feature maps [2, D, h, w]. "
            'Name one that pools its tokens, or a callable of yours ("package.module:callable") that does.'
        )
    return int(features.shape[1])


def add_adapters(encoder: nn.Module, rank: int, layers: Sequence[str] | None = None) -> tuple[str, ...]:
    """Add low-rank adapters (Hu et al., LoRA, 2022) to an encoder, by peft; all other parameters of it are frozen.

    Args:
        encoder: changed in place.
        rank: rank of the adapters; their product counts twice (``lora_alpha`` of twice the rank).
        layers: names of layers: complete ones, last parts, or patterns with ``*``. Default: `None` (all linear layers)

    Returns:
        Names of the layers with adapters.

    Raises:
        InputError: peft is not installed, a name fits no layer, or a layer cannot have an adapter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError(f"model.lora_rank {rank} needs peft ({error}). Install it with: {install_command('peft')}") from error
    names = _adapted_layers(encoder, rank, layers)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=list(names))
    encoder.requires_grad_(False)
    try:
        inject_adapter_in_model(settings, encoder)
    except ValueError as error:  # of a layer of another kind
        raise InputError(
            f"model.lora_layers [{some_names(names)}]: {' '.join(str(error).split())} Name linear layers, or convolutions."
        ) from error
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(".lora_" in f".{name}")
    return names


def _adapted_layers(encoder: nn.Module, rank: int, patterns: Sequence[str] | None) -> tuple[str, ...]:
    # The projection of nn.MultiheadAttention is read and never called: an adapter of it would have no effect.
    modules = {name: module for name, module in encoder.named_modules() if name and not isinstance(module, NonDynamicallyQuantizableLinear)}
    if patterns is None:
        linear = tuple(name for name, module in modules.items() if isinstance(module, nn.Linear))
        if not linear:
            raise InputError(
                f"model.lora_rank {rank}: the backbone ({type(encoder).__name__}) has no linear layer. Name convolutions in "
                "model.lora_layers, or leave model.lora_rank out and choose trained modules with train.freeze."
            )
        return linear
    leaves = [name for name, module in modules.items() if next(module.children(), None) is None]
    chosen: list[str] = []
    for pattern in patterns:
        fitting = [name for name in leaves if fnmatchcase(name, pattern) or name.endswith(f".{pattern}")]
        if not fitting:
            raise InputError(f"model.lora_layers {pattern!r} fits no layer of the backbone. Its layers are: {some_names(leaves)}")
        chosen += fitting
    return tuple(dict.fromkeys(chosen))


def _without_classifier(network: nn.Module, name: str, num_channels: int) -> nn.Module:
    """A network of torchvision up to its last feature map; one without a feature map with the identity in place of its classifier."""
    try:
        return cut_before_pooling(network, name, num_channels)
    except InputError:
        for attribute in _CLASSIFIERS:
            if isinstance(getattr(network, attribute, None), nn.Module):
                setattr(network, attribute, nn.Identity())
                return network
        raise
