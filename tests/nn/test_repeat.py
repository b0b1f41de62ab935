"""Chains of repeated blocks: the same bits as eager PyTorch for every schedule, and common uses of such a module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.kernels.rng.dropout import positional_dropout
from sft.kernels.rng.philox import draw_seed
from sft.nn import Repeat

pytestmark = pytest.mark.usefixtures("without_proposals")

Make = Callable[[], nn.Module]


class ConvBlock(nn.Module):
    """Pre-activation residual block with running statistics and an in-place operation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(self.act(self.norm(x)))
        return out


class AttentionBlock(nn.Module):
    """A decoder block with a non-persistent constant and a parameter that is used twice."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) + self.mask.to(x.dtype)).softmax(-1)
        out: Tensor = x + self.again(nn.functional.gelu(self.out(weights @ v)))
        return out


class TanhBlock(nn.Module):
    """A block with a backward pass that reads its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ScaleBlock(nn.Module):
    """A block with a backward pass that reads its input only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


_MODELS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "conv": (ConvBlock, (2, 3, 5, 4)),
    "attention": (AttentionBlock, (2, 5, 4)),
    "tanh": (TanhBlock, (3, 4)),
    "scale": (ScaleBlock, (3, 4)),
}


def _assert_same_step(net: Repeat, x: Tensor, *, input_grad: bool = True) -> None:
    """Compare one step of the net with one of its blocks in eager PyTorch, bit for bit."""
    eager = net.unstacked()
    mine, theirs = (x.detach().clone().requires_grad_(input_grad) for _ in range(2))
    torch.manual_seed(5)
    out = net(mine)
    gradient = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    out.backward(gradient)
    expected = eager(theirs)
    expected.backward(gradient)
    assert torch.equal(out, expected)
    if input_grad:
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    for number, block in enumerate(eager):
        for name, param in block.named_parameters():
            stack = net.block.get_parameter(name).grad
            assert (stack is None) is (param.grad is None)
            assert stack is None or param.grad is None or torch.equal(stack[number], param.grad), name
        own = dict(net.block.named_buffers())
        for name, buffer in block.named_buffers():
            assert torch.equal(own[name] if name == "mask" else own[name][number], buffer), name


def _net(kind: str, num_blocks: int = 7, **options: Any) -> tuple[Repeat, Tensor]:
    make, shape = _MODELS[kind]
    torch.manual_seed(0)
    return Repeat(make, num_blocks, **options).double(), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["none", "revolve", "bisect", "optimal", "auto"])
@pytest.mark.parametrize("kind", list(_MODELS))
def test_the_same_bits_as_eager_within_the_budget(kind: str, strategy: Any) -> None:
    net, x = _net(kind, strategy=strategy)
    x.requires_grad_()
    most = net.plan_for(x).projected_peak_bytes
    with pytest.raises(sft.BudgetError) as caught:
        net.budget_bytes = 1
        net.plan_for(x)
    needed = caught.value.needed_bytes
    for budget in {needed, (needed + most) // 2, max(most, needed)}:
        net.budget_bytes = budget
        plan = net.plan_for(x)
        with sft.measure_peak() as peak:
            out = net(x)
            gradient = torch.ones_like(out)
            out.backward(gradient)
        assert peak.num_bytes == plan.projected_peak_bytes <= budget
        del out, gradient
        net.zero_grad()
        _assert_same_step(net, x)
        net.zero_grad()


class RecurrentBlock(nn.Module):
    """A recurrent block, for which oneDNN computes the workspace of the derivative only in grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def test_recurrent_blocks_in_single_precision() -> None:
    net, x = Repeat(RecurrentBlock, 3), torch.rand(2, 5, 4).requires_grad_()
    expected = torch.autograd.grad(net.unstacked()(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(net(x).sum(), x), expected, rtol=1e-4, atol=1e-5)


def test_the_input_needs_no_gradient() -> None:
    for kind in _MODELS:
        net, x = _net(kind, strategy="revolve")
        plan = net.plan_for(x)
        with sft.measure_peak() as peak:
            out = net(x)
            out.backward(torch.ones_like(out))
        assert peak.num_bytes <= plan.projected_peak_bytes
        net.zero_grad()
        _assert_same_step(net, x, input_grad=False)


def test_the_first_block_is_like_the_others() -> None:
    """Blocks draw the random numbers of their weights as the blocks of a sequence do."""
    torch.manual_seed(3)
    net = Repeat(ConvBlock, 4)
    torch.manual_seed(3)
    blocks = [ConvBlock() for _ in range(4)]
    for number, block in enumerate(blocks):
        assert all(torch.equal(net.block.get_parameter(name)[number], param) for name, param in block.named_parameters())
    other = Repeat(ConvBlock, 4)
    other.load_blocks(blocks)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    with pytest.raises(sft.InputError, match="4"):
        other.load_blocks(blocks[:2])
    with pytest.raises(sft.InputError, match="structure"):
        other.load_blocks([*blocks[:3], nn.Conv2d(3, 3, 3)])


def test_running_statistics_change_once_a_step_and_stay_in_eval_mode() -> None:
    net, x = _net("conv", strategy="revolve")
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net(x).sum().backward()
    assert net.block.get_buffer("norm.num_batches_tracked").tolist() == [1] * 7
    with torch.no_grad():
        net(x)
    assert net.block.get_buffer("norm.num_batches_tracked").tolist() == [2] * 7
    after = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert not torch.equal(before["block.norm.running_mean"], after["block.norm.running_mean"])
    net.zero_grad()
    _assert_same_step(net.eval(), x)
    assert all(torch.equal(buffer, after[name]) for name, buffer in net.named_buffers())


def test_frozen_parameters_and_frozen_norms() -> None:
    net, x = _net("conv", strategy="revolve")
    net.block.get_parameter("conv.bias").requires_grad_(False)
    net.block.get_submodule("norm").eval()
    _assert_same_step(net, x)
    assert net.block.get_parameter("conv.bias").grad is None
    for param in net.parameters():
        param.requires_grad_(False)
    net.zero_grad()
    _assert_same_step(net, x)


def test_inference_keeps_nothing() -> None:
    net, x = _net("attention", 30)
    eager = net.unstacked()
    with torch.no_grad(), sft.measure_peak() as peak:
        out = net(x)
        assert torch.equal(out, eager(x))
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(net(x), out)
    with torch.no_grad(), sft.measure_peak() as long:
        Repeat(AttentionBlock, 60).double()(x)
    assert long.num_bytes - peak.num_bytes < 60 * 4 * sum(p[0].numel() for p in net.parameters()) * 8  # its weights, and no activations


class DropBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.linear(x)), 0.3, self.training)
        return x + nn.functional.dropout(hidden * 2.0, 0.1, self.training)


def test_dropout_follows_positions_and_has_the_same_bits_in_a_recomputation() -> None:
    torch.manual_seed(0)
    net = Repeat(DropBlock, 6, strategy="revolve").double()
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(9)
    seed = draw_seed()
    torch.manual_seed(9)
    out = net(x)
    out.sum().backward()
    x_grad = x.grad
    x.grad = None
    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    value = x
    for number in range(6):
        hidden = torch.relu(nn.functional.linear(value, weights[0][number], weights[1][number]))
        hidden = positional_dropout(hidden, 0.3, site=0, seed=seed, draw=number)
        value = value + positional_dropout(hidden * 2.0, 0.1, site=1, seed=seed, draw=number)
    value.sum().backward()
    torch.testing.assert_close(out, value, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x_grad, x.grad, rtol=1e-14, atol=1e-14)
    for param, weight in zip(net.parameters(), weights, strict=True):
        torch.testing.assert_close(param.grad, weight.grad, rtol=1e-14, atol=1e-14)
    torch.manual_seed(9)
    net.strategy = "none"
    assert torch.equal(net(x), out)
    assert torch.equal(net.eval()(x), net.unstacked()(x))


def test_two_steps_in_a_row_and_two_nets_interleaved() -> None:
    first, x = _net("conv", strategy="revolve")
    second, _ = _net("conv", 4, strategy="none")
    pairs = [(net, copy.deepcopy(net).unstacked()) for net in (first, second)]
    for _ in range(2):
        outs = [(net(x).square().sum(), eager(x).square().sum()) for net, eager in pairs]
        for ours, theirs in outs:
            ours.backward()
            theirs.backward()
    for net, eager in pairs:
        for number, block in enumerate(eager):
            for name, param in block.named_parameters():
                stack = net.block.get_parameter(name).grad
                assert stack is not None and param.grad is not None and torch.equal(stack[number], param.grad)


def test_a_graph_may_be_retained_and_is_otherwise_freed() -> None:
    net, x = _net("tanh", strategy="revolve")
    x.requires_grad_()
    out = net(x)
    out.sum().backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    out.sum().backward()
    assert torch.equal(2 * once, x.grad)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_second_derivatives_are_refused() -> None:
    net, x = _net("tanh")
    x.requires_grad_()
    with pytest.raises(sft.UnsupportedError, match="create_graph"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_changes_between_the_passes_are_noticed() -> None:
    net, x = _net("tanh")
    out = net(x.requires_grad_())
    with torch.no_grad():
        net.block.get_parameter("linear.weight").add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()
    out = net(x)
    with torch.no_grad():
        out.add_(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        out.sum().backward()


class Boom(BaseException):
    pass


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, Boom])
def test_a_failing_forward_changes_nothing_and_a_failing_backward_leaves_gradients(raised: type[BaseException]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop = ConvBlock(), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.drop(self.conv(x))
            return out

    torch.manual_seed(0)
    net = Repeat(Both, 7, strategy="revolve").double()
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    net(x).sum().backward()
    state = copy.deepcopy(net.state_dict())
    grads = {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}
    random = torch.get_rng_state()

    def fail_at(word: str) -> Callable[[str], None]:
        def check(operation: str) -> None:
            if operation == word:
                raise raised

        return check

    def assert_unchanged() -> None:
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        assert all(param.grad is not None and torch.equal(param.grad, grads[name]) for name, param in net.named_parameters())

    with sft.measure_peak() as peak:
        net.trace = fail_at("F6")
        with pytest.raises(raised):
            net(x)
    assert_unchanged()
    assert torch.equal(torch.get_rng_state(), random)
    assert peak.current_bytes == 0
    net.trace = fail_at("B3")
    out = net(x)
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(raised):
        out.sum().backward()
    assert_unchanged()
    net.trace = None
    with pytest.raises(RuntimeError, match=r"an earlier backward pass of this call failed.*call the model again"):
        out.sum().backward()
    assert_unchanged()
    net(x).sum().backward()  # it works again


def test_copies_pickles_state_dicts_and_casts() -> None:
    net, x = _net("conv", 3, budget="1MiB")
    out = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.load_state_dict(net.state_dict())
        assert torch.equal(other.eval()(x), net.eval()(x))
        net.train()
    assert out.dtype == torch.float64
    assert net.float()(x.float()).dtype == torch.float32
    assert "num_blocks=3" in repr(net)
    assert next(iter(net.state_dict())) == "block.norm.weight"


def test_autocast_is_followed() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.linear(x)
            return out

    net = Repeat(Block, 5, strategy="revolve")
    eager = net.unstacked()
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = net(x), eager(x)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(out, expected)
    grad = net.block.get_parameter("linear.weight").grad
    assert grad is not None
    for number, block in enumerate(eager):
        expected_grad = block.get_parameter("linear.weight").grad
        assert expected_grad is not None and torch.equal(grad[number], expected_grad)


def test_layouts_and_changed_attributes() -> None:
    net, x = _net("conv", 3, strategy="revolve")
    strange = torch.randn(4, 5, 3, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    torch.testing.assert_close(net(strange), net.unstacked()(strange), rtol=1e-12, atol=1e-12)
    net, x = _net("conv", 3, strategy="revolve")
    net.block.get_submodule("norm").momentum = 0.5  # type: ignore[assignment]  # a module's attribute
    net.zero_grad()
    _assert_same_step(net, x)
    out = net(x)
    out.sum().backward()  # a gradient of zero strides
    for shape in ((1, 3, 7, 2), (2, 3, 5, 4)):
        net.zero_grad()
        _assert_same_step(net, torch.randn(shape, dtype=torch.float64))


class _Returns(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


class _Power(nn.Module):
    """A block with an output that depends on a buffer that it changes."""

    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.u
        self.u.add_(x.detach().mean(0))
        return out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _Returns(lambda x: x[:, :2]), "must return the shape and dtype of its input"),
        (lambda: _Returns(lambda x: x.float()), "must return the shape and dtype of its input"),
        (lambda: _Returns(lambda x: (x, x)), "one tensor"),
        (lambda: _Returns(lambda x: x + torch.rand_like(x)), "rand_like"),
        (lambda: _Returns(lambda x: x if x.sum() > 0 else -x), "traced"),
        (_Power, "buffer u"),
    ],
)
def test_blocks_that_cannot_be_repeated_are_refused(make: Make, words: str) -> None:
    net = Repeat(make, 3).double()
    with pytest.raises(sft.UnsupportedError, match=words):
        net(torch.ones(3, 4, dtype=torch.float64))


def test_bad_input_is_refused() -> None:
    with pytest.raises(sft.InputError, match="num_blocks"):
        Repeat(ConvBlock, 0)
    with pytest.raises(sft.InputError, match="strategy"):
        Repeat(ConvBlock, 2, strategy="best")  # type: ignore[arg-type]  # the point
    with pytest.raises(sft.InputError, match=r"make_block is a Linear: .* a function without arguments"):
        Repeat(nn.Linear(3, 3), 2)
    sizes = iter([3, 4])
    with pytest.raises(sft.InputError, match="block 1"):
        Repeat(lambda: nn.Linear(3, next(sizes)), 2)
    with pytest.raises(sft.InputError, match="not initialised yet"):
        Repeat(lambda: nn.LazyConv2d(4, 3), 2)
    with pytest.raises(sft.InputError, match=r"refuses an input of torch.float32 and shape \(3, 5\): RuntimeError"):
        Repeat(lambda: nn.Linear(4, 4), 2)(torch.ones(3, 5))
    with pytest.raises(sft.UnsupportedError, match="let its first operator not work in place"):
        Repeat(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), 2)(torch.ones(3, 4))
    net, _ = _net("scale")
    with pytest.raises(sft.InputError, match="floating"):
        net(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(sft.InputError, match="meta"):
        net(torch.ones(3, 4, dtype=torch.float64, device="meta"))
    net.block.register_forward_hook(lambda *_: None)
    with pytest.raises(sft.UnsupportedError, match="hook"):
        net(torch.ones(3, 4, dtype=torch.float64))


def test_constants_of_the_block_are_kept() -> None:
    net = Repeat(lambda: _Returns(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)), 3).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(net(x), x * torch.tensor([1.0, 8.0, 27.0, 64.0], dtype=torch.float64))


class _Keeps(nn.Module):
    """A block that counts its calls and keeps its input."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.linear, self.uses, self.calls = nn.Linear(4, 4), uses, 0
        self.last_input: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last_input = self.calls + 1, x
        y: Tensor = torch.tanh(self.linear(x))
        return y * self.calls if self.uses else y


def test_a_block_that_counts_is_refused_and_nothing_is_left_in_it() -> None:
    """All blocks would be the first one, and a fake tensor would remain in it."""
    x = torch.randn(2, 4)
    with pytest.raises(sft.UnsupportedError, match="its `forward` sets calls, so the next call computes other values"):
        Repeat(lambda: _Keeps(uses=True), 3)(x)
    net = Repeat(lambda: _Keeps(uses=False), 3)
    torch.testing.assert_close(net(x), net.unstacked()(x))
    block: Any = net.block
    assert block.calls == 0 and block.last_input is None


def test_numbers_read_from_tensors_and_loose_layers_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.item()

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = [nn.Linear(4, 4)], nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers[0](x) * self.scale
            return y

    for make in (Scaled, Loose):
        with pytest.raises(sft.UnsupportedError, match="Give it registered parameters and buffers alone"):
            Repeat(make, 3)(torch.randn(2, 4))
