"""Random networks of one to three axes, with all kinds of operators of the table and some others.

Where :mod:`tests.helpers.dags` draws legal networks of a few operators in all their parameters, a :class:`Wild` is a list of wishes, each a
kind with some small numbers. :class:`WildNet` makes a layer of each; a wish that PyTorch refuses at the actual size (a window larger than
the image) becomes the identity. So every list is a network, and Hypothesis shrinks it by leaving wishes out.

Values are numbered: 0 is the input, ``i + 1`` the result of layer ``i``. A wish reads the value ``back`` places before the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import (
    ExactReport,
    InexactError,
    assert_exact,
    gradient_errors,
    param_grads,
    relative_error,
    rounding_of_eager,
)

__all__ = [
    "KINDS",
    "Wild",
    "WildNet",
    "Wish",
    "assert_wild_exact",
    "assert_wild_exact_on",
    "wild_budget",
    "wild_plannings",
    "wild_tilings",
    "wilds",
]

_MAX_PIXELS = {1: 120, 2: 1600, 3: 4000}
_MAX_CHANNELS = 12
_NOTHING_BUT_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Wish:
    """A kind of layer, the value that it reads, and numbers that determine its arguments."""

    kind: str
    back: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wild:
    """A network with the shape of its input, ``(batch, channels, *extents)``."""

    shape: tuple[int, ...]
    wishes: tuple[Wish, ...]
    extra_output: int = 0
    """How far before the last value another output lies; 0 for none."""
    head: bool = False
    """True if the mean over the image and a linear layer give one more output."""
    seed: int = 0

    @property
    def num_axes(self) -> int:
        return len(self.shape) - 2

    def image(self) -> Tensor:
        """The random float64 input."""
        return torch.randn(self.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed))


Layer = nn.Module
Maker = Callable[[tuple[int, ...], tuple[int, ...]], Layer]
"""Function of the operand's shape and the numbers; returns a layer."""


class _Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)


def _of(name: str, num_axes: int) -> Any:
    return getattr(nn, f"{name}{num_axes}d")


def _each(numbers: tuple[int, ...], first: int, count: int, modulus: int) -> tuple[int, ...]:
    """One small number for each axis."""
    return tuple(numbers[(first + axis) % len(numbers)] % modulus for axis in range(count))


def _conv(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes, channels = len(shape) - 2, shape[1]
    kernel = tuple(1 + k for k in _each(numbers, 0, axes, 4))
    groups = math.gcd(channels, 1 + numbers[1] % 3) if numbers[2] % 3 == 0 else 1
    out = groups * (1 + numbers[3] % max(1, 6 // groups))
    mode = ("zeros", "zeros", "zeros", "reflect", "replicate", "circular")[numbers[4] % 6]
    padding = tuple(min(p, k) for p, k in zip(_each(numbers, 2, axes, 3), kernel, strict=True))
    stride, dilation = tuple(1 + s for s in _each(numbers, 5, axes, 3)), tuple(1 + d for d in _each(numbers, 4, axes, 2))
    layer: Layer = _of("Conv", axes)(
        channels, out, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=numbers[0] % 2 == 0, padding_mode=mode
    )
    return layer


def _transposed(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes, channels = len(shape) - 2, shape[1]
    kernel = tuple(1 + k for k in _each(numbers, 0, axes, 4))
    stride = tuple(1 + s for s in _each(numbers, 3, axes, 3))
    padding = tuple(p % k for p, k in zip(_each(numbers, 1, axes, 2), kernel, strict=True))
    more = tuple(o % s for o, s in zip(_each(numbers, 2, axes, 2), stride, strict=True))
    groups = math.gcd(channels, 2) if numbers[5] % 3 == 0 else 1
    out = groups * (1 + numbers[4] % 3)
    layer: Layer = _of("ConvTranspose", axes)(channels, out, kernel, stride=stride, padding=padding, output_padding=more, groups=groups)
    return layer


def _pool(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes = len(shape) - 2
    kernel = tuple(1 + k for k in _each(numbers, 0, axes, 3))
    stride = tuple(1 + s for s in _each(numbers, 2, axes, 3))
    padding = tuple(min(p, k // 2) for p, k in zip(_each(numbers, 1, axes, 2), kernel, strict=True))
    ceil = numbers[3] % 2 == 0
    more = {} if numbers[4] % 2 else {"count_include_pad": numbers[5] % 2 == 0}
    layer: Layer = _of("MaxPool" if numbers[4] % 2 else "AvgPool", axes)(kernel, stride=stride, padding=padding, ceil_mode=ceil, **more)
    return layer


def _adaptive(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    size = tuple(1 + s for s in _each(numbers, 0, len(shape) - 2, 7))
    layer: Layer = _of("AdaptiveMaxPool" if numbers[3] % 2 else "AdaptiveAvgPool", len(shape) - 2)(size)
    return layer


def _norm(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes, channels = len(shape) - 2, shape[1]
    if math.prod(shape[2:]) < 8:  # few elements have almost no variance: a norm of them amplifies rounding errors
        return nn.Identity()
    kind = numbers[0] % 4
    if kind == 0:
        return nn.GroupNorm(math.gcd(channels, 2), channels)
    if kind == 1:
        instance: nn.Module = _of("InstanceNorm", axes)(channels, affine=numbers[1] % 2 == 0)
        return instance
    batch: nn.Module = _of("BatchNorm", axes)(channels)
    return _Frozen(batch) if kind == 2 else batch


class _Frozen(nn.Module):
    """A norm that stays in eval mode."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.elu, F.softplus, lambda x: F.leaky_relu(x, 0.1),
    lambda x: torch.clamp(x, -1.0, 0.7), lambda x: torch.where(x > 0.1, x, x * x), lambda x: torch.maximum(x, x * 0.5), torch.abs,
)  # fmt: skip


def _activation(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    return nn.PReLU(shape[1]) if numbers[1] % 6 == 0 else _Function(_ACTIVATIONS[numbers[0] % len(_ACTIVATIONS)])


def _pad(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes = len(shape) - 2
    mode = ("constant", "reflect", "replicate", "constant", "circular")[numbers[0] % 5]
    low = -2 if mode == "constant" else 0
    amounts = [low + numbers[(1 + i) % len(numbers)] % (4 - low) for i in range(2 * axes)]
    return _Function(lambda x: F.pad(x, amounts, mode=mode, **({"value": 0.5} if mode == "constant" else {})))


def _slice(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axis, start, end, step = numbers[0] % (len(shape) - 1), numbers[1] % 4, numbers[2] % 4, 1 + numbers[3] % 2
    selection = slice(start, -end or None, step)
    return _Function(lambda x: x[(slice(None), *[slice(None)] * axis, selection)])


def _interpolate(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    axes = len(shape) - 2
    smooth = ("linear", "bilinear", "trilinear")[axes - 1]
    mode = ("nearest", smooth, smooth, "nearest-exact", "bicubic" if axes == 2 else smooth)[numbers[0] % 5]
    arguments: dict[str, Any] = {"mode": mode}
    if numbers[1] % 2:
        arguments["size"] = tuple(
            max(1, extent + change - 6) for extent, change in zip(shape[2:], _each(numbers, 2, axes, 17), strict=True)
        )
    else:
        arguments["scale_factor"] = (0.5, 0.7, 1.5, 2.0, 2.0, 3.0)[numbers[2] % 6]
    if not mode.startswith("nearest"):
        arguments["align_corners"] = numbers[3] % 2 == 0
        arguments["antialias"] = axes == 2 and numbers[4] % 3 == 0
    return _Function(lambda x: F.interpolate(x, **arguments))


def _channels(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    """An operator over the channels of each pixel."""
    count, extents = shape[1], list(shape[2:])
    groups = math.gcd(count, 2)

    def shuffle(x: Tensor) -> Tensor:
        return x.view(x.shape[0], groups, count // groups, *extents).transpose(1, 2).reshape(x.shape)

    def swap(x: Tensor) -> Tensor:
        first, second = x.split([count // 2, count - count // 2], 1)
        return torch.cat([second, first], 1)

    def pool(x: Tensor) -> Tensor:
        return x * torch.sigmoid(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1).sum(1, keepdim=True))

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, -x], 2).flatten(1, 2)

    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        shuffle, swap, pool, spread, lambda x: x.softmax(1), lambda x: F.normalize(x, dim=1), lambda x: F.local_response_norm(x, 3),
        lambda x: F.glu(torch.cat([x, x * 0.5], 1), 1), lambda x: x - x.logsumexp(1, keepdim=True), lambda x: x.flip(1),
    )  # fmt: skip
    return _Function(functions[numbers[0] % len(functions)])


class _Last(nn.Module):
    """Layer norm and linear layers with channels last, or on a list of pixels."""

    def __init__(self, channels: int, *, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens
        self.norm, self.first, self.second = nn.LayerNorm(channels), nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2) if self.tokens else x.movedim(1, -1)
        y = self.second(F.gelu(self.first(self.norm(y)))) * self.scale
        image: Tensor = y.transpose(1, 2).reshape(x.shape) if self.tokens else y.movedim(-1, 1)
        return x + image


class _Gate(nn.Module):
    """Squeeze and excite, by some reduction over the image."""

    def __init__(self, channels: int, num_axes: int, kind: int) -> None:
        super().__init__()
        self.kind, self.dims = kind, tuple(range(2, 2 + num_axes))
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        pooled = (x.mean(self.dims), x.sum(self.dims) / 50, x.amax(self.dims), x.norm(p=2, dim=self.dims) / 7)[self.kind]
        gate: Tensor = torch.sigmoid(self.linear(pooled))
        return x * gate.reshape(*gate.shape, *[1] * len(self.dims))


def _last(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    return _Last(shape[1], tokens=numbers[0] % 2 == 0) if shape[1] > 1 else nn.Identity()


def _gate(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    return _Gate(shape[1], len(shape) - 2, numbers[0] % 4)


def _grid(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    """Pixels to channels and back; of images only."""
    return nn.PixelShuffle(2) if numbers[0] % 2 else nn.PixelUnshuffle(2)


def _whole(shape: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    """Operators without a rule for strips."""

    def attend(x: Tensor) -> Tensor:
        y = x.flatten(2)
        return x + (y @ (y.transpose(1, 2) @ y / 9).softmax(-1)).view(x.shape)

    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.flip(2),
        lambda x: torch.roll(x, 1, 2),
        attend,
        lambda x: x.cumsum(2) * 0.1,
    )
    return _Function(functions[numbers[0] % len(functions)])


def _join(shape: tuple[int, ...], other: tuple[int, ...], numbers: tuple[int, ...]) -> Layer:
    """Join of two values at one size, by cropping or interpolation."""
    extents = [min(a, b) for a, b in zip(shape[2:], other[2:], strict=True)]
    selection = (slice(None), slice(None), *(slice(0, extent) for extent in extents))

    def join(x: Tensor, y: Tensor) -> Tensor:
        y = F.interpolate(y, size=x.shape[2:]) if numbers[1] % 3 == 0 else y
        x, y = (x, y) if numbers[1] % 3 == 0 else (x[selection], y[selection])
        if numbers[0] % 4 == 0 or (x.shape[1] != y.shape[1] and 1 not in (x.shape[1], y.shape[1])):
            return torch.cat([x, y], 1)
        joined: Tensor = (x + y, x * y, x - 2.0 * y)[numbers[0] % 4 - 1]
        return joined

    return _Function(join)


_MAKERS: dict[str, Maker] = {
    "conv": _conv,
    "transposed": _transposed,
    "pool": _pool,
    "adaptive": _adaptive,
    "norm": _norm,
    "activation": _activation,
    "pad": _pad,
    "slice": _slice,
    "interpolate": _interpolate,
    "channels": _channels,
    "last": _last,
    "gate": _gate,
    "grid": _grid,
    "whole": _whole,
}
KINDS = (*_MAKERS, "join")


class WildNet(nn.Module):
    """Module of a :class:`Wild`; float64, in training mode."""

    def __init__(self, wild: Wild) -> None:
        super().__init__()
        self.wild = wild
        self.layers = nn.ModuleList()
        shapes: list[tuple[int, ...]] = [wild.shape]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(wild.seed)
            for index, wish in enumerate(wild.wishes):
                reads = self.reads(index)
                layer, shape = _granted(wish, [shapes[at] for at in reads])
                self.layers.append(layer)
                shapes.append(shape)
            self.linear = nn.Linear(shapes[-1][1], 2) if wild.head else None
            self.double()
        self.train()

    def reads(self, index: int) -> tuple[int, ...]:
        """The values that a layer reads."""
        wish = self.wild.wishes[index]
        source = max(0, index - wish.back)
        return (index, source) if wish.kind == "join" else (source,)

    def extra_repr(self) -> str:
        return repr(self.wild)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for index, layer in enumerate(self.layers):
            values.append(layer(*(values[at] for at in self.reads(index))))
        outputs = [values[-1]]
        if self.wild.extra_output:
            outputs.append(values[max(1, len(values) - 1 - self.wild.extra_output)])
        if self.linear is not None:
            outputs.append(self.linear(values[-1].mean(tuple(range(2, x.dim())))))
        return tuple(outputs)


def _granted(wish: Wish, shapes: list[tuple[int, ...]]) -> tuple[Layer, tuple[int, ...]]:
    """The layer and the shape of its result; the identity if the layer is impossible at this size."""
    try:
        layer = _join(shapes[0], shapes[1], wish.numbers) if wish.kind == "join" else _MAKERS[wish.kind](shapes[0], wish.numbers)
        with torch.no_grad():
            made = layer.double()(*(torch.rand(shape, dtype=torch.float64) for shape in shapes))
    except (RuntimeError, ValueError, IndexError):
        return _Function(lambda *values: values[0] * 1.0), shapes[0]
    rank, size = len(shapes[0]), tuple(made.shape)
    fits = len(size) == rank and min(size) > 0 and size[1] <= _MAX_CHANNELS and math.prod(size[2:]) <= _MAX_PIXELS[rank - 2]
    return (layer, size) if fits else (_Function(lambda *values: values[0] * 1.0), shapes[0])


@st.composite
def wilds(draw: st.DrawFn, *, max_wishes: int = 8, kinds: tuple[str, ...] = KINDS) -> Wild:
    """A random network."""
    num_axes = draw(st.sampled_from((2, 2, 1, 3)))
    most = {1: 60, 2: 26, 3: 11}[num_axes]
    extents = tuple(draw(st.integers(3, most)) for _ in range(num_axes))
    wish = st.builds(
        Wish, st.sampled_from(kinds), st.sampled_from((0, 0, 0, 1, 2, 4)), st.tuples(*[st.integers(0, 59)] * 6)
    )  # fmt: skip
    wishes = draw(st.lists(wish, min_size=1, max_size=max_wishes))
    return Wild(
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 4)), *extents),
        wishes=(Wish("conv", 0, (2, 5, 1, 3, 0, 0)), *wishes),
        extra_output=draw(st.integers(0, 3)),
        head=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def wild_tilings(draw: st.DrawFn, wild: Wild) -> sft.Options:
    """Forced strips, often in panels, sometimes tiles that compute their own halo."""
    height, width = (*wild.shape[2:], 1)[:2]
    halo = draw(st.sampled_from(("carry", "carry", "carry", "recompute")))
    rows = draw(st.integers(1 if halo == "carry" else -(-height // 4), height + 3))
    cols = draw(st.just(width) | st.integers(-(-width // 4), width))
    return sft.Options(
        tile=(rows, cols), halo=halo, state_every=draw(st.none() | st.integers(1, 4)), batch_tile=draw(st.none() | st.just(1))
    )


@st.composite
def wild_plannings(draw: st.DrawFn) -> tuple[sft.Options, float]:
    """Options that leave tiles to the planner, and the budget as a share between the smallest one and plain PyTorch's."""
    host_budget = draw(st.sampled_from([None, None, "1GiB"]))
    link_bandwidth = draw(st.sampled_from([1e8, 1e10, 1e12])) if host_budget else None
    return sft.Options(host_budget=host_budget, link_bandwidth=link_bandwidth), draw(st.floats(0, 0.9))


def wild_budget(wild: Wild, options: sft.Options, share: float) -> int:
    """Budget in bytes at a share between the smallest one and plain PyTorch's."""
    model = WildNet(wild)
    example = torch.empty(wild.shape, dtype=torch.float64, device="meta", requires_grad=True)
    try:
        least = sft.plan(model, example, budget=1, options=options).total_bytes
    except sft.BudgetError as refused:
        least = refused.needed_bytes
    plain = sft.plan(model, example, budget="4GiB", options=sft.Options(strategy="none")).total_bytes
    return least + int(share * max(0, plain - least))


def assert_wild_exact(wild: Wild, options: sft.Options, *, budget: int | str = "4GiB") -> ExactReport | None:
    """Compare a random network with eager PyTorch.

    A norm over equal values divides their rounding errors by the root of its epsilon. So the tolerance of a difference is ten times the
    change of eager PyTorch's own results when input and parameters change by their last bit. If that change is as large as the result, the
    comparison has no meaning, and None is returned.
    """
    try:
        return assert_exact(WildNet(wild), wild.image(), budget=budget, options=options)
    except InexactError:
        own = rounding_of_eager(WildNet(wild), wild.image(), weights=True)
        if own >= _NOTHING_BUT_ROUNDING:
            return None
        if own <= 1e-11:  # a tenth of the tolerance: the difference has another cause
            raise
        return assert_exact(WildNet(wild), wild.image(), budget=budget, options=options, tolerance=10 * own)


def assert_wild_exact_on(device: torch.device, wild: Wild, options: sft.Options) -> float | None:
    """Compare a random network on a device with eager PyTorch; the largest error, or None without a meaningful comparison.

    The reference is eager PyTorch on the CPU: some operators are wrong on a GPU for images channels last. If the results differ, they must
    be those of eager PyTorch on the device, for contiguous images: some operators compute in single precision there, such as the positions
    of nearest pixels and the constants of ``hardswish``.
    """
    image = wild.image()
    net = sft.compile(WildNet(wild).to(device), image.to(device).requires_grad_(), budget="4GiB", options=options)
    ours = _own_steps(net, image.to(device))
    error = _largest_error(ours, _own_steps(WildNet(wild), image))
    if error <= 1e-10:
        return error
    own = rounding_of_eager(WildNet(wild), wild.image(), weights=True)
    if own >= _NOTHING_BUT_ROUNDING:
        return None
    if error > 10 * own:
        error = _largest_error(ours, _own_steps(WildNet(wild).to(device), image.to(device)))
    if error > max(1e-10, 10 * own):
        raise InexactError(f"error {error:.1e} on {device}, where rounding explains {own:.1e}: {wild}, {options}")
    return error


_Step = tuple[list[Tensor], dict[str, Tensor | None]]
"""Outputs and buffers, and gradients of the image (``"image"``) and of parameters."""


def _own_steps(model: nn.Module, x: Tensor) -> list[_Step]:
    """Results of two steps on the CPU; the second one has updated buffers."""
    return [_own_step(model, x, number) for number in range(2)]


def _own_step(model: nn.Module, x: Tensor, seed: int) -> _Step:
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    outputs = model(x)
    random = torch.Generator().manual_seed(seed)
    grads = [torch.randn(y.shape, generator=random, dtype=y.dtype).to(y.device) for y in outputs]
    torch.autograd.backward(outputs, grads)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    gradients = {"image": x.grad, **param_grads(model)}
    return [value.detach().cpu() for value in (*outputs, *buffers)], {
        name: None if grad is None else grad.cpu() for name, grad in gradients.items()
    }


def _largest_error(ours: Sequence[_Step], reference: Sequence[_Step]) -> float:
    """The largest error of two runs, by the rule of :mod:`tests.helpers.exactness`."""
    errors = [0.0]
    for (values, gradients), (other_values, other_gradients) in zip(ours, reference, strict=True):
        errors += [relative_error(mine, other) for mine, other in zip(values, other_values, strict=True)]
        errors += gradient_errors(gradients, other_gradients).values()
    return max(errors)
