"""Random convolutional DAGs for Hypothesis: legal networks, and tilings of them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import sft
from sft.common.torch_internals import pytree
from tests.helpers.dag_nets import (
    ACTIVATIONS,
    INPLACE,
    Activation,
    AvgPool,
    Conv,
    Dag,
    DagNet,
    Head,
    Join,
    MaxPool,
    Node,
    Norm,
    Pair,
    Upsample,
    make_layer,
)

__all__ = ["dags", "tilings"]

_MAX_CHANNELS = 8
_MAX_EXTENT_PX = 90


def _pair(height: int, width: int) -> Pair:
    return (height, width)


@st.composite
def _window(draw: st.DrawFn, extent_px: int, *, max_kernel: int, pool: bool) -> tuple[int, int, int, int]:
    """Kernel, stride, padding and dilation along one axis, legal for this extent."""
    dilation = draw(st.integers(1, 2))
    kernel = draw(st.integers(1, max_kernel))
    # Pools allow half of the (dilated) kernel as padding; the undilated half is legal either way.
    max_padding = kernel // 2 if pool else kernel
    if dilation * (kernel - 1) + 1 > extent_px + 2 * max_padding:
        dilation, kernel = 1, min(kernel, extent_px)
        max_padding = kernel // 2 if pool else kernel
    min_padding = max(0, math.ceil((dilation * (kernel - 1) + 1 - extent_px) / 2))
    padding = draw(st.integers(min_padding, max(min_padding, max_padding)))
    return kernel, draw(st.integers(1, 3)), padding, dilation


_SMALLEST_MEASURED = 8


class _Builder:
    """Description that grows node by node, with the size of every value."""

    def __init__(self, draw: st.DrawFn, shape: tuple[int, int, int, int], *, measuring: bool) -> None:
        self.draw, self.measuring = draw, measuring
        self.nodes: list[Node] = []
        self.sizes: list[tuple[int, int, int]] = [shape[1:]]
        self.readers: list[int] = [0]

    @property
    def last(self) -> int:
        return len(self.sizes) - 1

    def add(self, node: Node, size: tuple[int, int, int]) -> None:
        for source in node.sources if isinstance(node, Join) else (node.source,):
            self.readers[source] += 1
        self.nodes.append(node)
        self.sizes.append(size)
        self.readers.append(0)

    def source(self) -> int:
        """Mostly the newest value, sometimes an older one: a second branch."""
        return self.last if self.draw(st.integers(0, 3)) else self.draw(st.integers(0, self.last))

    def conv(self, source: int) -> None:
        draw = self.draw
        in_channels, height, width = self.sizes[source]
        groups = draw(st.sampled_from([n for n in range(1, in_channels + 1) if in_channels % n == 0]))
        channels = groups * draw(st.integers(1, max(1, 6 // groups)))
        frozen = draw(st.integers(0, 5)) == 5
        if draw(st.integers(0, 5)) == 5:
            kernel = _pair(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
            dilation = _pair(draw(st.integers(1, 2)), draw(st.integers(1, 2)))
            node = Conv(
                source=source, channels=channels, kernel=kernel, padding="same", dilation=dilation, groups=groups,
                bias=draw(st.booleans()), frozen=frozen,
            )  # fmt: skip
            self.add(node, (channels, height, width))
            return
        rows = draw(_window(height, max_kernel=5, pool=False))
        cols = draw(_window(width, max_kernel=5, pool=False))
        k, s, p, d = (_pair(a, b) for a, b in zip(rows, cols, strict=True))
        node = Conv(
            source=source, channels=channels, kernel=k, stride=s, padding=p, dilation=d, groups=groups,
            bias=draw(st.booleans()), frozen=frozen,
        )  # fmt: skip
        out = [(n + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i, n in enumerate((height, width))]
        self.add(node, (channels, out[0], out[1]))

    def pool(self, source: int) -> None:
        draw = self.draw
        _, height, width = self.sizes[source]
        rows = draw(_window(height, max_kernel=4, pool=True))
        cols = draw(_window(width, max_kernel=4, pool=True))
        k, s, p, d = (_pair(a, b) for a, b in zip(rows, cols, strict=True))
        ceil_mode = draw(st.booleans())
        if draw(st.booleans()):
            self._add_pool(MaxPool(source=source, kernel=k, stride=s, padding=p, dilation=d, ceil_mode=ceil_mode))
            return
        # An average pool has no dilation; a kernel that fitted dilated fits undilated with the same padding.
        self._add_pool(
            AvgPool(
                source=source,
                kernel=k,
                stride=s,
                padding=p,
                ceil_mode=ceil_mode,
                count_include_pad=draw(st.booleans()),
                divisor_override=draw(st.none() | st.integers(1, 5)),
            )
        )

    def _add_pool(self, node: MaxPool | AvgPool) -> None:
        """Add a pool at the size that PyTorch itself gives it (ceil_mode drops windows that start in the padding)."""
        layer, channels = make_layer(node, [size[0] for size in self.sizes])
        assert layer is not None
        out = layer(torch.empty((1, *self.sizes[node.source]), device="meta"))
        self.add(node, (channels, out.shape[2], out.shape[3]))

    def upsample(self, source: int) -> None:
        channels, height, width = self.sizes[source]
        factor = _pair(self.draw(st.integers(1, 3)), self.draw(st.integers(1, 3)))
        if factor == (1, 1) or height * factor[0] > _MAX_EXTENT_PX or width * factor[1] > _MAX_EXTENT_PX:
            self.activation(source)
            return
        self.add(Upsample(source=source, factor=factor), (channels, height * factor[0], width * factor[1]))

    def activation(self, source: int) -> None:
        # In place only on a value that has no reader yet and an operator that does not save its result.
        maker = self.nodes[source - 1] if source else None
        may_overwrite = (
            self.readers[source] == 0
            and isinstance(maker, Conv | Norm | AvgPool | Upsample | Join)
            and not (isinstance(maker, Join) and maker.how == "mul")
        )
        inplace = may_overwrite and self.draw(st.booleans())
        name = self.draw(st.sampled_from(sorted(INPLACE if inplace else ACTIVATIONS)))
        self.add(Activation(source=source, name=name, inplace=inplace), self.sizes[source])

    def norm(self, source: int) -> None:
        draw = self.draw
        channels, height, width = self.sizes[source]
        # Few elements have almost no variance: a norm of them amplifies rounding errors.
        measures = self.measuring and height * width >= _SMALLEST_MEASURED
        kind: Literal["frozen", "batch", "group", "instance"] = "frozen"
        if measures:
            kind = draw(st.sampled_from(("frozen", "batch", "group", "instance")))
        norm = Norm(source=source, affine=draw(st.booleans()), frozen=draw(st.booleans()), kind=kind)
        self.add(norm, (channels, height, width))

    def join(self, source: int) -> None:
        """Join with another value of the same size, aligning a smaller one as a U-Net does if there is none."""
        draw = self.draw
        channels, height, width = self.sizes[source]
        same = [v for v, (_, *size) in enumerate(self.sizes) if size == [height, width] and v != source]
        if not same:
            self.align(source)
            return
        other = draw(st.sampled_from(same))
        how: Literal["add", "sub", "mul", "cat"] = "cat"
        if self.sizes[other][0] == channels:
            how = draw(st.sampled_from(("add", "sub", "mul", "cat")))
        if how == "cat" and self.sizes[other][0] + channels > _MAX_CHANNELS:
            self.activation(source)
            return
        # No a - a: the difference of two equal values has gradient 0 everywhere, hence no scale.
        if how == "sub" and self._same_value(source, other):
            how = "add"
        total = channels + self.sizes[other][0] if how == "cat" else channels
        sources = draw(st.permutations((source, other)))
        self.add(Join(sources=tuple(sources), how=how), (total, height, width))

    def _same_value(self, first: int, second: int) -> bool:
        """True if one value is the other, overwritten in place."""
        return self._buffer(first) == self._buffer(second)

    def _buffer(self, value: int) -> int:
        while value:
            node = self.nodes[value - 1]
            if not (isinstance(node, Activation) and node.inplace):
                break
            value = node.source
        return value

    def align(self, source: int) -> None:
        """Upsample beyond the size of an older, larger value, trim by a valid convolution, and join the two."""
        _, height, width = self.sizes[source]
        larger = []
        for value, (_, rows, cols) in enumerate(self.sizes):
            factor = _pair(math.ceil(rows / height), math.ceil(cols / width))
            excess = _pair(factor[0] * height - rows, factor[1] * width - cols)
            if (rows, cols) != (height, width) and max(factor) <= 3 and max(excess) <= 4:
                larger.append((value, factor, excess))
        if not larger:
            self.conv(source)
            return
        value, factor, excess = self.draw(st.sampled_from(larger))
        channels, rows, cols = self.sizes[value]
        if factor != (1, 1):
            size = (self.sizes[source][0], height * factor[0], width * factor[1])
            self.add(Upsample(source=source, factor=factor), size)
            source = self.last
        node = Conv(source=source, channels=channels, kernel=_pair(excess[0] + 1, excess[1] + 1))
        self.add(node, (channels, rows, cols))
        self.join(self.last)


@st.composite
def dags(draw: st.DrawFn, *, min_nodes: int = 2, max_nodes: int = 10, measuring: bool = False) -> Dag:
    """A valid random network: eager PyTorch runs it forward and backward, and everything stays finite.

    At most two nodes more than ``max_nodes`` (an alignment adds three at once). With ``measuring``, some norms have statistics of the
    image.
    """
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(5, 40)), draw(st.integers(3, 24)))
    builder = _Builder(draw, shape, measuring=measuring)
    grow = {
        "conv": builder.conv,
        "pool": builder.pool,
        "activation": builder.activation,
        "norm": builder.norm,
        "upsample": builder.upsample,
        "join": builder.join,
    }
    kinds = st.sampled_from(("conv", "conv", "conv", "pool", "activation", "join", "join", "norm", "upsample"))
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    builder.conv(0)
    while len(builder.nodes) < num_nodes:
        grow[draw(kinds)](builder.source())
    last = builder.last
    # Either every result is used, or some nodes are dead and their parameters have no gradient.
    ends = [value for value in range(1, last) if builder.readers[value] == 0]
    extra = ends[-3:] if draw(st.booleans()) else draw(st.lists(st.integers(1, last), max_size=2, unique=True))
    outputs = [*extra, last]
    head = None
    if draw(st.booleans()):
        head = Head(source=last, features=draw(st.integers(1, 4)), pool=draw(st.sampled_from(("adaptive", "mean"))))
        outputs = outputs[:-1] if draw(st.booleans()) else outputs
    dag = Dag(
        shape=shape,
        nodes=tuple(builder.nodes),
        outputs=tuple(dict.fromkeys(outputs)),
        head=head,
        structure=draw(st.sampled_from(("flat", "nested"))),
        input_grad=draw(st.integers(0, 4)) < 4,
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    assume(_runs_in_eager(dag))
    return dag


def _runs_in_eager(dag: Dag) -> bool:
    """True if eager PyTorch accepts the network and keeps every output and gradient finite.

    Rejects dilated pools with a window inside of the padding (-inf), and overflow.
    """
    net = DagNet(dag)
    x = dag.image().requires_grad_(dag.input_grad)
    outputs = [y for y in pytree.tree_leaves(net(x)) if isinstance(y, Tensor)]
    if not all(bool(torch.isfinite(y).all()) and y.numel() for y in outputs):
        return False
    loss = sum((y.sum() for y in outputs if y.requires_grad), start=torch.zeros((), dtype=torch.float64))
    if not loss.requires_grad:
        return True
    loss.backward()
    gradients = [p.grad for p in (x, *net.parameters()) if p.grad is not None]
    return all(bool(torch.isfinite(g).all()) for g in gradients)


@st.composite
def tilings(draw: st.DrawFn, dag: Dag) -> sft.Options:
    """Forced strips of 1 to height + 3 rows, in half of the cases in panels, a state kept every k-th strip, a batch tile.

    With recomputed halos a tile is never a small fraction of the image: a deep network would compute most of the image in each.
    """
    batch, _, height, width = dag.shape
    halo = draw(st.sampled_from(["carry", "carry", "recompute"]))
    rows = draw(st.integers(1 if halo == "carry" else -(-height // 4), height + 3))
    return sft.Options(
        tile=(rows, draw(st.just(width) | st.integers(-(-width // 4), width))),
        halo=halo,
        state_every=draw(st.none() | st.integers(1, 5)),
        batch_tile=draw(st.none() | st.integers(1, batch)),
    )
