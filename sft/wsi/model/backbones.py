"""Backbones by name, cut before their pooling, so that they map an image of any size to a feature map.

timm gives feature maps itself. Any other network is traced one level deep (Reed et al., torch.fx, 2022): its ``forward`` becomes a
list of calls of its children, which stay unchanged (dropout, norms and ``train()`` included). The network runs at two image sizes. The
feature map is the last value that the result depends on and that has height and width proportional to the image's. The layers after it
(pooling, flatten, classifier) are removed, with their parameters. Names of parameters stay, so published weights load.

Networks are traced in eval mode, since auxiliary classifiers (Szegedy et al., 2015) are part of the result in training mode only. The
layers that remain must be the same in both modes: a trace cannot follow ``self.training``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import sft
from sft.common.errors import InputError, SftError, SourceError
from sft.common.model_zoo import ModelName
from sft.common.untrusted.foreign_files import require_regular_file
from sft.common.untrusted.tensor_files import load_tensor_file
from sft.common.untrusted.trusted_code import Trust, TrustedCode
from sft.wsi.model.input_channels import fit_input_weights, timm_channels, with_input_channels
from sft.wsi.model.position_resize import AxisResize, axis_resizes

__all__ = [
    "backbone_library",
    "check_backbone",
    "cut_before_pooling",
    "feature_resizes",
    "feature_shapes",
    "load_backbone",
    "load_weights",
    "model_name",
    "num_features",
]

_SIZES_PX = (128, 192)
_MAX_DEPTH = 3
#: Budget of a network that is captured and not run.
_UNLIMITED_BYTES = 2**62


def load_backbone(name: str, options: dict[str, Any], *, num_channels: int = 3, trust: Trust = ()) -> nn.Module:
    """A network from an image to a feature map.

    Args:
        name: "timm:NAME", "torchvision:NAME", "torch.nn:LAYER", the bare name of a timm or torchvision model, or
            "package.module:name", a class or function of a trusted module.
        options: keyword arguments of its constructor.
        num_channels: of an image. Default: 3
        trust: modules, files or folders whose code may be run (`sft.common.untrusted.trusted_code`). Default: none

    Raises:
        InputError: the network does not exist, is of a module that is not trusted, its constructor fails, or it has no feature map.
    """
    maker = model_name(name, trust).factory()
    if maker.library == "timm":
        return maker.make({"num_classes": 0, "global_pool": "", **timm_channels(num_channels), **options})
    options = dict(options)
    if maker.library == "torchvision" and options.pop("pretrained", False):
        options.setdefault("weights", "DEFAULT")
    return cut_before_pooling(with_input_channels(maker.make(options), num_channels), name, num_channels)


def backbone_library(name: str) -> str:
    """Library of a backbone: "timm", "torchvision", or a module of the caller's.

    Raises:
        InputError: the network does not exist.
    """
    return model_name(name).factory().library


def check_backbone(name: str, *, trust: Trust = ()) -> None:
    """Check that a backbone is of a known library or of a trusted module; nothing is imported.

    Raises:
        InputError: it is not.
    """
    model_name(name, trust).check_trust()


def model_name(name: str, trust: Trust = ()) -> ModelName:
    """Name of a network in a configuration, for messages about ``model.backbone``."""
    return ModelName(
        text=name,
        place="model.backbone",
        options_place="model.options",
        libraries=("timm", "torchvision"),
        trust=TrustedCode.of(trust),
    )


def num_features(backbone: nn.Module, name: str, num_channels: int = 3) -> int:
    """Channels of the feature map.

    Raises:
        InputError: the backbone does not give one.
    """
    return feature_shapes(backbone, name, num_channels)[0][0]


def feature_shapes(backbone: nn.Module, name: str, num_channels: int = 3) -> tuple[tuple[int, ...], ...]:
    """Channels, height and width of the feature map at two image sizes, which determine the output stride.

    Raises:
        InputError: the backbone does not give a feature map.
    """
    features = [_run(backbone, size_px, name, num_channels) for size_px in _SIZES_PX]
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in features]
    small, large = (value.shape if isinstance(value, Tensor) and value.dim() == 4 else None for value in features)
    if small is None or large is None or small[1] != large[1] or not (small[2] < large[2] and small[3] < large[3]):
        results = " and ".join(f"{shape} for {size_px} x {size_px} px" for shape, size_px in zip(shapes, _SIZES_PX, strict=True))
        raise InputError(
            f"model.backbone {name!r} ({type(backbone).__name__}) gives {results} instead of feature maps [N, C, H, W] whose height and "
            'width follow the image\'s. Name one that does, or a callable of yours ("package.module:callable") that permutes its results.'
        )
    return tuple(small[1:]), tuple(large[1:])


def feature_resizes(backbone: nn.Module, num_channels: int = 3) -> tuple[AxisResize, ...] | None:
    """Resizes of the rows and columns of the feature map to the pixels of the image, by the grid of its positions.

    Returns:
        None for a backbone whose positions are not a grid, or another grid at another image size: they divide the image into equal cells.
    """
    with _EvalMode(backbone):
        try:
            net = sft.compile(backbone, (1, num_channels, None, None), budget=_UNLIMITED_BYTES)
            grids = [sft.position_grids(net, (1, num_channels, size_px, size_px))[0] for size_px in _SIZES_PX]
        except SftError:  # of operators without an exact rule, which the compilation of the whole model reports
            return None
    axes = []
    for size_px, of_size in zip(_SIZES_PX, grids, strict=True):
        if of_size is None or len(of_size) != 2:
            return None
        axes.append(axis_resizes(of_size, size_px, tuple(_run(backbone, size_px, type(backbone).__name__, num_channels).shape[2:])))
    small, large = axes
    return large if small == large else None


def load_weights(backbone: nn.Module, path: Path) -> None:
    """Load a backbone's weights; those of its pooling and classifier are ignored.

    Raises:
        SourceError: the file cannot be read.
        InputError: parameters are missing, or have another shape.
    """
    try:
        require_regular_file(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = load_tensor_file(path)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"cannot read weights from {path}: {error.strerror or error}. Check model.weights.") from error
    except Exception as error:  # of a damaged file
        raise SourceError(f"cannot read weights from {path}: {error} Give a .safetensors file or a state_dict.") from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()):
        raise SourceError(
            f"cannot read weights from {path}: it holds other values than tensors by name. Give a .safetensors file or a state_dict."
        )
    for prefix in ("module.", "backbone."):
        if any(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    expected = backbone.state_dict()
    state = fit_input_weights(backbone, state)
    missing = [key for key in expected if key not in state]
    misfit = [
        f"{key} {tuple(state[key].shape)} for {tuple(expected[key].shape)}"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    if missing or misfit:
        listed = ", ".join([*missing[:3], *misfit[:3]])
        raise InputError(f"weights {path}: {len(missing)} missing, {len(misfit)} of another shape ({listed}). Give those of this backbone.")
    backbone.load_state_dict({key: state[key] for key in expected})


def cut_before_pooling(network: nn.Module, name: str, num_channels: int = 3) -> nn.Module:
    """The part of a network up to its last feature map; the network itself where that is all of it.

    Raises:
        InputError: none is found.
    """
    results = [_run(network, size, name, num_channels) for size in _SIZES_PX]
    if all(isinstance(result, Tensor) and result.dim() == 4 for result in results) and results[0].shape[2:] != results[1].shape[2:]:
        return network
    reasons = []
    for depth in range(1, _MAX_DEPTH + 1):
        try:
            feature_network = _cut(network, depth, num_channels)
        except Exception as error:  # tracing runs the network's own code, which may raise anything
            reasons.append(f"{type(error).__name__}: {error}".split("\n")[0])
            continue
        if feature_network is not None:
            return feature_network
        reasons.append("no value follows the image's size")
    raise InputError(
        f"model.backbone {name!r}: no feature map found ({reasons[-1]}). Name a callable whose network ends in a feature map [N, C, H, W]."
    )


class _ShallowTracer(fx.Tracer):
    """Traces modules down to a depth; deeper ones are called."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.count(".") + 1 >= self._depth


class _ShapeRecorder(fx.Interpreter):
    """Interpreter of a traced network that records each node's result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.sizes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.dim() == 4:
            self.sizes[n.name] = tuple(value.shape[2:])
        return value


def _cut(network: nn.Module, depth: int, num_channels: int) -> nn.Module | None:
    with _EvalMode(network):
        graph = _ShallowTracer(depth).trace(network)
    traced = fx.GraphModule(network, graph, type(network).__name__)
    sizes = []
    with torch.no_grad(), _EvalMode(traced):
        for size in _SIZES_PX:
            shapes = _ShapeRecorder(traced)
            shapes.run(torch.zeros(1, num_channels, size, size))
            sizes.append(shapes.sizes)
    output = next(node for node in graph.nodes if node.op == "output")
    needed = _ancestors(output)
    image = next(node for node in graph.nodes if node.op == "placeholder")
    maps = [
        node
        for node in graph.nodes
        if node in needed and node is not image and node.name in sizes[0] and sizes[0][node.name] != sizes[1].get(node.name)
    ]
    # Backwards: the last one that all that follows depends on the image through.
    for node in reversed(maps):
        if image not in _ancestors(output, without=node):
            if not _same_in_training(network, node, depth):
                raise InputError("the layers before its feature map depend on the training flag of the network itself")
            output.args = (node,)
            graph.eliminate_dead_code()
            cut = fx.GraphModule(network, graph, type(network).__name__)
            cut.delete_all_unused_submodules()
            return cut
    return None


def _same_in_training(network: nn.Module, node: fx.Node, depth: int) -> bool:
    """True if a value of the trace in eval mode is computed in the same way in training mode."""
    flags = [(module, module.training) for module in network.modules()]
    try:
        network.train()
        other = _ShallowTracer(depth).trace(network)
    finally:
        for module, flag in flags:
            module.training = flag
    numbers: dict[str, int] = {}
    in_training = set(_value_numbers(other, numbers).values())
    return _value_numbers(node.graph, numbers)[node] in in_training


def _value_numbers(graph: fx.Graph, numbers: dict[str, int]) -> dict[fx.Node, int]:
    """A number for each node; the same for those that compute the same, also of another graph with the same ``numbers``."""
    keys: dict[fx.Node, int] = {}
    for node in graph.nodes:
        operands = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{keys[operand]}")
        keys[node] = numbers.setdefault(f"{node.op} {node.target} {operands!r}", len(numbers))
    return keys


def _ancestors(node: fx.Node, *, without: fx.Node | None = None) -> set[fx.Node]:
    ancestors: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent is not without and parent not in ancestors:
                ancestors.add(parent)
                waiting.append(parent)
    return ancestors


class _EvalMode:
    """A network in eval mode for a while, each module's flag put back after."""

    def __init__(self, network: nn.Module) -> None:
        self._flags = [(module, module.training) for module in network.modules()]
        self._network = network

    def __enter__(self) -> None:
        self._network.eval()

    def __exit__(self, *_: object) -> None:
        for module, flag in self._flags:
            module.training = flag


def _run(network: nn.Module, size_px: int, name: str, num_channels: int) -> Any:
    with torch.no_grad(), _EvalMode(network):
        try:
            return network(torch.zeros(1, num_channels, size_px, size_px))
        except Exception as error:
            raise InputError(
                f"model.backbone {name!r} does not take an image of {size_px} x {size_px} px with {num_channels} channels "
                f"({type(error).__name__}: {error}). Name a convolutional network for images of any size with {num_channels} channels."
            ) from error
