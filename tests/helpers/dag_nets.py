"""Convolutional DAGs as frozen descriptions, and as modules.

A network is a :class:`Dag`; :class:`DagNet` runs it. A failing example of Hypothesis therefore prints as one expression that rebuilds it:
``assert_exact(DagNet(Dag(...)), dag.image(), options=sft.Options(...))``. The strategies that draw them are in :mod:`tests.helpers.dags`.

Values are numbered: 0 is the network's input, ``i + 1`` the result of node ``i``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ACTIVATIONS",
    "INPLACE",
    "Activation",
    "AvgPool",
    "Conv",
    "Dag",
    "DagNet",
    "Head",
    "Join",
    "MaxPool",
    "Node",
    "Norm",
    "Pair",
    "Upsample",
    "make_layer",
]

Pair: TypeAlias = tuple[int, int]
"""(height, width)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv:
    source: int
    channels: int
    """Of the output."""
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair | Literal["same"] = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = True
    frozen: bool = False
    """Weight and bias do not require grad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPool:
    source: int
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    ceil_mode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AvgPool:
    source: int
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upsample:
    source: int
    factor: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    source: int
    name: str
    inplace: bool = False
    """The source's value is overwritten, also for later readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    sources: tuple[int, ...]
    how: Literal["add", "sub", "mul", "cat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm: BatchNorm with frozen, random statistics, or one with statistics of the image."""

    source: int
    affine: bool = True
    frozen: bool = False
    """True if its parameters do not train."""
    kind: Literal["frozen", "batch", "group", "instance"] = "frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Global average pool and a linear layer."""

    source: int
    features: int
    pool: Literal["adaptive", "mean"]


Node: TypeAlias = Conv | MaxPool | AvgPool | Upsample | Activation | Join | Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """A network with the shape of its input."""

    shape: tuple[int, int, int, int]
    """(batch, channels, height, width) of the input."""
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    """Values returned, in order."""
    head: Head | None = None
    """Its result is one more output."""
    structure: Literal["flat", "nested"] = "flat"
    """Of the outputs: a tensor or a tuple, or a dict that holds a tuple."""
    input_grad: bool = True
    training: bool = False
    """The root's flag; frozen norms stay in eval mode."""
    seed: int = field(default=0)
    """Of parameters, statistics and input."""

    def image(self) -> Tensor:
        """The random float64 input."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.shape, dtype=torch.float64, generator=generator)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
INPLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


def _join(how: str, values: list[Tensor]) -> Tensor:
    if how == "cat":
        return torch.cat(values, dim=1)
    total = values[0]
    for value in values[1:]:
        total = total + value if how == "add" else total - value if how == "sub" else total * value
    return total


class DagNet(nn.Module):
    """Module of a :class:`Dag`; float64, parameters and statistics drawn from its seed."""

    def __init__(self, dag: Dag) -> None:
        super().__init__()
        self.dag = dag
        self.layers = nn.ModuleDict()
        channels = [dag.shape[1]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dag.seed)
            for index, node in enumerate(dag.nodes):
                layer, out_channels = make_layer(node, channels)
                channels.append(out_channels)
                if layer is not None:
                    self.layers[str(index)] = layer
            self.head = None if dag.head is None else nn.Linear(channels[dag.head.source], dag.head.features)
            self.double()
        self.train(dag.training)

    def train(self, mode: bool = True) -> DagNet:
        super().train(mode)
        for index, module in self.layers.items():
            node = self.dag.nodes[int(index)]
            if isinstance(node, Norm) and node.kind == "frozen":
                module.eval()
        return self

    def extra_repr(self) -> str:
        return repr(self.dag)

    def forward(self, x: Tensor) -> object:
        values = [x]
        for index, node in enumerate(self.dag.nodes):
            match node:
                case Join():
                    values.append(_join(node.how, [values[source] for source in node.sources]))
                case Activation():
                    activation = (INPLACE if node.inplace else ACTIVATIONS)[node.name]
                    values.append(activation(values[node.source]))
                case Upsample():
                    factors = tuple(float(factor) for factor in node.factor)
                    values.append(F.interpolate(values[node.source], scale_factor=factors, mode="nearest"))
                case _:
                    values.append(self.layers[str(index)](values[node.source]))
        outputs = [values[output] for output in self.dag.outputs]
        head = self.dag.head
        if head is not None and self.head is not None:
            value = values[head.source]
            pooled = value.mean((2, 3)) if head.pool == "mean" else F.adaptive_avg_pool2d(value, 1).flatten(1)
            outputs.append(self.head(pooled))
        if self.dag.structure == "nested":
            return {"last": outputs[-1], "others": tuple(outputs[:-1])}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def make_layer(node: Node, channels: list[int]) -> tuple[nn.Module | None, int]:
    """The node's module, if it has one, and its number of output channels."""
    layer: nn.Module
    match node:
        case Join():
            counts = [channels[source] for source in node.sources]
            return None, sum(counts) if node.how == "cat" else counts[0]
        case Activation() | Upsample():
            return None, channels[node.source]
        case Conv():
            layer = nn.Conv2d(
                channels[node.source],
                node.channels,
                node.kernel,
                stride=node.stride,
                padding=node.padding,
                dilation=node.dilation,
                groups=node.groups,
                bias=node.bias,
            )
            return layer.requires_grad_(not node.frozen), node.channels
        case Norm(kind="group"):
            layer = nn.GroupNorm(math.gcd(2, channels[node.source]), channels[node.source], affine=node.affine)
            return layer.requires_grad_(not node.frozen), channels[node.source]
        case Norm(kind="instance"):
            layer = nn.InstanceNorm2d(channels[node.source], affine=node.affine)
            return layer.requires_grad_(not node.frozen), channels[node.source]
        case Norm():
            layer = nn.BatchNorm2d(channels[node.source], affine=node.affine)
            assert layer.running_mean is not None and layer.running_var is not None
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
            if node.affine:
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias)
            return layer.requires_grad_(not node.frozen), channels[node.source]
        case MaxPool():
            layer = nn.MaxPool2d(
                node.kernel,
                stride=node.stride,
                padding=node.padding,
                dilation=node.dilation,
                ceil_mode=node.ceil_mode,
            )
            return layer, channels[node.source]
        case AvgPool():
            layer = nn.AvgPool2d(
                node.kernel,
                stride=node.stride,
                padding=node.padding,
                ceil_mode=node.ceil_mode,
                count_include_pad=node.count_include_pad,
                divisor_override=node.divisor_override,
            )
            return layer, channels[node.source]
