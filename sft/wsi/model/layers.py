"""Parts of a network by depth and by name: layer-wise learning rates, and frozen modules.

Layer-wise decay of the learning rate (Clark et al., ELECTRA, 2020; Bao et al., BEiT, 2022): the head learns at the full rate, and each
block before it at that of the block after it times the decay. Blocks of a timm network are those of its ``group_matcher``, as in
``timm.optim``. Blocks of other networks are the modules inside its containers: a residual block, or a single convolution with its norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sft.common.errors import InputError
from sft.common.model_zoo import import_library
from sft.wsi.model.heads import SlideModel

__all__ = ["block_depths", "freeze_modules", "lr_scales"]

#: Modules that only have other modules: their children are blocks of their own.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
_MAX_LISTED = 60
_HEAD_MARK = "~head~"


def lr_scales(model: SlideModel, layer_decay: float) -> dict[str, float]:
    """Factor of the learning rate of each parameter, by name."""
    depths = block_depths(model)
    deepest = max(depths.values(), default=0)
    return {name: layer_decay ** (deepest - depth) for name, depth in depths.items()}


def block_depths(model: SlideModel) -> dict[str, int]:
    """Number of the block of each parameter, by name, from the image to the head."""
    backbone = model.backbone
    if hasattr(backbone, "group_matcher"):
        return _timm_depths(model)
    depths: dict[str, int] = {}
    depth = 0
    for name, module in _blocks("backbone", backbone):
        parameters = [f"{name}.{own}" for own, _ in module.named_parameters()]
        if parameters:
            # A norm belongs to the layer before it.
            depth += not isinstance(module, _NORMS) or not depths
            depths |= dict.fromkeys(parameters, depth)
    shared = [name for name, _ in model.named_parameters() if name not in depths and name.startswith("backbone.")]
    depths |= dict.fromkeys(shared, 0 if depths else 1)  # parameters of the network itself, such as an embedding of positions
    head = max(depths.values(), default=0) + 1
    return depths | {f"head.{name}": head for name, _ in model.head.named_parameters()}


def freeze_modules(model: SlideModel, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze modules: their parameters get no gradient, and their norms stay in eval mode (`sft.wsi.model.heads.set_training`).

    Args:
        model: the network.
        patterns: names of modules, such as ``backbone.layer1``; ``*`` stands for any characters.

    Returns:
        Names of the frozen modules, each without the modules inside it.

    Raises:
        InputError: a pattern fits no module, or nothing is left to train.
    """
    names = [name for name, _ in model.named_modules() if name]
    frozen: list[str] = []
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise InputError(f"train.freeze {pattern!r} fits no module of the network. Its modules are: {_listed(names)}")
        frozen += fitting
    outermost = tuple(name for name in dict.fromkeys(frozen) if not any(name.startswith(f"{other}.") for other in frozen))
    for name in outermost:
        model.get_submodule(name).requires_grad_(False)
    if outermost and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"train.freeze {', '.join(patterns)} freezes all parameters; leave some to train, such as those of head")
    model.frozen_modules = outermost
    return outermost


def _blocks(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks of a network in the order of its definition: the children of containers, of containers in them, and so on."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        # fx makes plain modules of the containers around layers that it has kept.
        if isinstance(child, _CONTAINERS) or type(child) is nn.Module:
            yield from _blocks(path, child)
        else:
            yield path, child


def _timm_depths(model: SlideModel) -> dict[str, int]:
    """Depths by timm's own matcher; what it does not match, such as a last norm, is in the head's group."""
    backbone: Any = model.backbone
    group = import_library("timm.models").group_with_matcher
    backbone_params = dict(backbone.named_parameters())
    # The names of the head's parameters must fit no pattern of the backbone's.
    heads = {f"{_HEAD_MARK}{name}": parameter for name, parameter in model.head.named_parameters()}
    depths: dict[str, int] = group(iter({**backbone_params, **heads}.items()), backbone.group_matcher(coarse=False), reverse=True)
    return {
        f"backbone.{name}" if name in backbone_params else f"head.{name.removeprefix(_HEAD_MARK)}": int(depth)
        for name, depth in depths.items()
    }


def _listed(names: Sequence[str]) -> str:
    """Names, the outer ones first; few of many."""
    by_depth = sorted(names, key=lambda name: name.count("."))
    more = f", and {len(names) - _MAX_LISTED} more inside them" if len(names) > _MAX_LISTED else ""
    return ", ".join(by_depth[:_MAX_LISTED]) + more
