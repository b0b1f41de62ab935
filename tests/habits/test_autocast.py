"""Mixed precision: the compiled model is as accurate as eager PyTorch under the same autocast, inside its budget.

The reference is the model in float64; an error is the relative L2 error against it, as a median over seeds. With ReLU and max pooling the
error of one seed is arbitrary: one element that passes in one run and not in the other outweighs all rounding. So each model has two
versions: the original, compared over many seeds, and one with smooth activations and average pooling, where few seeds are enough and each
parameter is compared.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from tests.helpers.backend_networks import relative_l2
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact, assert_within_budget, plan_of
from tests.helpers.models import chain, image, seeded

captures = one_capture_a_model("options")

_BATCH, _HEIGHT, _WIDTH = 1, 64, 32
_SHAPE = (_BATCH, 3, _HEIGHT, _WIDTH)
_OPTIONS = sft.Options(tile=(16, _WIDTH))
_MOST = 1.1
"""Our median error over eager's."""


def _vgg(smooth: bool = False) -> nn.Module:
    pool, activation = (nn.AvgPool2d, nn.SiLU) if smooth else (nn.MaxPool2d, nn.ReLU)
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 8), (8, 16)):
        convs = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        layers += [convs[0], activation(), convs[1], activation(), pool(2)]
    return chain(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 32))


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.activation = activation()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        shortcut = chain(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut: nn.Module = nn.Identity() if stride == 1 else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x)))))
        out: Tensor = self.activation(y + self.shortcut(x))
        return out


def _resnet(smooth: bool = False) -> nn.Module:
    pool, activation = (nn.AvgPool2d, nn.SiLU) if smooth else (nn.MaxPool2d, nn.ReLU)
    stem = (nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), activation(), pool(3, 2, 1))
    return chain(*stem, _Block(8, 8, 1, activation), _Block(8, 16, 2, activation), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 32))


class _UNet(nn.Module):
    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.activation: nn.Module = nn.SiLU() if smooth else nn.ReLU()
        self.pool: nn.Module = nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2)
        self.down1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.down2, self.norm2 = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.InstanceNorm2d(12, affine=True)
        self.bottom = nn.Conv2d(12, 12, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.activation(self.norm1(self.down1(x)))
        b = F.silu(self.norm2(self.down2(self.pool(a))))
        c = F.gelu(self.bottom(F.avg_pool2d(b, 2)))
        b = self.activation(self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1)))
        y: Tensor = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return y


class _Mixed(nn.Module):
    """Operators on values of both types: sums, products, quotients, a gate, a branch that the model keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(i, 4, 3, padding=1) for i in (3, 8, 4))
        self.gate, self.norm = nn.Linear(4, 4), nn.BatchNorm2d(4).eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv1(x)
        wide = torch.exp(y.float() * 0.1) + 1.0
        gate = torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        z = self.norm(self.conv2(torch.cat([y * gate, wide], 1)))
        with torch.autocast("cpu", enabled=False):
            alone = self.conv3(z.to(self.conv3.weight.dtype))
        return z / wide + alone, alone.to(torch.bfloat16)


_MODELS: dict[str, Callable[..., nn.Module]] = {"vgg": _vgg, "resnet": _resnet, "unet": _UNet, "mixed": _Mixed}


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _leaves(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _step(module: nn.Module, x: Tensor, gradients: Sequence[Tensor] | None, dtype: torch.dtype | None) -> dict[str, list[Tensor]]:
    """Outputs, the input's gradient and the parameters' gradients of one step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with _autocast(dtype):
        outputs = _leaves(module(x))
    cotangents = (
        [torch.ones_like(y) for y in outputs] if gradients is None else [g.to(y.dtype) for g, y in zip(gradients, outputs, strict=True)]
    )
    torch.autograd.backward(outputs, cotangents)
    assert x.grad is not None and x.grad.dtype == x.dtype
    parameter_grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert [g.dtype for g in parameter_grads] == [p.dtype for p in module.parameters()]
    return {"outputs": [y.detach() for y in outputs], "input": [x.grad], "parameters": parameter_grads}


def _median_errors(
    make: Callable[[], nn.Module], autocast: torch.dtype | None, weights: torch.dtype, num_seeds: int
) -> tuple[dict[str, float], ...]:
    """Errors of eager PyTorch and of the compiled model: outputs, gradients of input and parameters, buffers, each parameter's gradient."""
    eager = seeded(make).to(weights)
    net = sft.compile(copy.deepcopy(eager), _SHAPE, options=_OPTIONS)
    errors_of_modules: tuple[dict[str, list[float]], ...] = ({}, {})
    for seed in range(num_seeds):
        reference = seeded(make, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            x = torch.randn(_SHAPE)
            gradients = [torch.randn(y.shape) for y in _leaves(copy.deepcopy(reference)(x.double()))]
        for module in (eager, net):
            module.load_state_dict(reference.state_dict())
        exact = _step(reference, x.double(), gradients, None)
        for module, errors in zip((eager, net), errors_of_modules, strict=True):
            step = _step(module, x.to(weights), gradients, autocast)
            for key, values in step.items():
                errors.setdefault(key, []).append(relative_l2(values, exact[key]))
            for number, (gradient, expected) in enumerate(zip(step["parameters"], exact["parameters"], strict=True)):
                errors.setdefault(str(number), []).append(relative_l2([gradient], [expected]))
            for (name, buffer), expected in zip(module.named_buffers(), reference.buffers(), strict=True):
                if buffer.is_floating_point():
                    errors.setdefault(name, []).append(relative_l2([buffer], [expected]))
                else:
                    assert torch.equal(buffer, expected)
    return tuple({key: statistics.median(values) for key, values in errors.items()} for errors in errors_of_modules)


@pytest.mark.parametrize(
    ("autocast", "weights"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (None, torch.bfloat16),
        (None, torch.float16),
    ],
    ids=["autocast bf16", "autocast fp16", "model bf16", "model fp16"],
)
@pytest.mark.parametrize("name", ["vgg", "resnet", "unet"])
def test_as_accurate_as_eager_where_all_is_smooth(name: str, autocast: torch.dtype | None, weights: torch.dtype) -> None:
    eager, ours = _median_errors(lambda: _MODELS[name](smooth=True), autocast, weights, 9)
    assert eager.keys() == ours.keys()
    ratios = {key: ours[key] / eager[key] for key in eager}
    # In bfloat16 a gradient that passes a train-mode norm is rounded once more than in eager PyTorch; this dominates if all else is smooth.
    most = {"outputs": _MOST, "input": 1.2, "parameters": _MOST}
    for key, limit in most.items():
        assert ratios[key] <= limit, f"{key}: {ours[key]:.2e} instead of eager's {eager[key]:.2e}"
    buffers = {key: ratio for key, ratio in ratios.items() if "running" in key}
    assert all(ratio <= _MOST for ratio in buffers.values()), buffers
    # The error of a parameter with a nearly cancelling gradient is arbitrary; that of all parameters together is not.
    assert statistics.geometric_mean([ratio for key, ratio in ratios.items() if key.isdigit()]) <= _MOST


@pytest.mark.parametrize("name", ["vgg", "resnet", "unet"])
def test_as_accurate_as_eager(name: str) -> None:
    eager, ours = _median_errors(_MODELS[name], torch.bfloat16, torch.float32, 25)
    for key in ("outputs", "input", "parameters"):
        assert ours[key] <= _MOST * eager[key], f"{key}: {ours[key]:.2e} instead of eager's {eager[key]:.2e}"


def test_values_of_both_types() -> None:
    for autocast in (torch.bfloat16, None):
        eager, ours = _median_errors(_Mixed, autocast, torch.float32, 9)
        # A norm is folded into its convolution, whose bias is rounded then; eager PyTorch rounds the result of the convolution instead.
        for key, limit in {"outputs": 1.2, "input": _MOST, "parameters": _MOST}.items():
            assert ours[key] <= limit * eager[key] + 1e-6, (autocast, key)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, _OPTIONS),
        (torch.bfloat16, sft.Options(tile=(7, _WIDTH), state_every=3)),
        (torch.bfloat16, sft.Options(strategy="none")),
        (torch.float16, _OPTIONS),
        (None, sft.Options(tile=(7, _WIDTH))),
    ],
    ids=["bf16", "bf16, sparse states", "bf16, whole", "fp16", "model bf16"],
)
@pytest.mark.parametrize("name", list(_MODELS))
def test_bytes_and_flops(name: str, dtype: torch.dtype | None, options: sft.Options) -> None:
    """Each value by its own size; the multiplications are those of float32."""
    model = seeded(_MODELS[name]).float()
    x = torch.randn(2, *_SHAPE[1:]).requires_grad_()
    net = sft.compile(model, tuple(x.shape), options=options)
    wide = plan_of(net, x)
    with _autocast(dtype):
        measured, _, plan = assert_within_budget(net, x.detach(), budget="4GiB")
    assert plan.plain_flops == wide.plain_flops
    if dtype == torch.bfloat16 and name != "mixed":
        assert measured < wide.projected_peak_bytes
    if dtype is None and name != "mixed":
        half = sft.compile(copy.deepcopy(model).to(torch.bfloat16), tuple(x.shape), options=options)
        assert_within_budget(half, x.detach().to(torch.bfloat16), budget="4GiB")


def test_every_state_has_its_own_plan() -> None:
    model = seeded(_vgg).float()
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)
    x = torch.randn(_SHAPE)
    plans = []
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        with _autocast(dtype):
            ours, eager = net(x), model(x)
        assert ours.dtype == eager.dtype == (dtype or torch.float32)
        torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.01 if dtype else 1e-5)
        plans.append(net.plan)
    assert plans[0] is plans[3] and plans[1] is plans[4]
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        net(x)
    assert net.plan is plans[1]
    with torch.autocast("cuda", torch.float16, enabled=torch.cuda.is_available()):
        net(x)
    assert net.plan is plans[1]


def test_backward_under_autocast() -> None:
    """Common in loops, although PyTorch advises against it: the casts are made once, in the forward pass."""
    net = sft.compile(seeded(_resnet).float(), _SHAPE, options=_OPTIONS)
    x = torch.randn(_SHAPE)
    gradients = []
    for inside in (False, True):
        net.load_state_dict(seeded(_resnet).state_dict())
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_planned_for_a_budget() -> None:
    """The planner's own choice, where not everything fits."""
    model = seeded(_resnet).float()
    shape = (1, 3, 256, 64)
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        roomy = sft.plan(model, shape, options=sft.Options(strategy="none"))
        budget = roomy.resident_bytes + roomy.projected_peak_bytes * 3 // 4
        net = sft.compile(model, shape, budget=budget)
        _, _, plan = assert_within_budget(net, x, budget=budget, input_grad=False)
    assert any(segment.mode == "tiled" for segment in plan.segments)


def test_a_model_with_its_own_autocast() -> None:
    """A region under autocast inside ``forward``, one taken out of it, and one of another type."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.convs[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.norm(self.convs[1](x.float()))
            with torch.autocast("cpu", torch.float16):
                y: Tensor = self.convs[2](x)
            return y + x

    model = seeded(Own).float()
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)
    x = torch.randn(_SHAPE)
    for outer in (None, torch.bfloat16):
        steps = [_step(module, x, None, outer) for module in (net, model)]
        for key in steps[0]:
            assert steps[0][key][0].dtype == steps[1][key][0].dtype == torch.float32
            assert relative_l2(steps[0][key], steps[1][key]) <= 1e-2, key  # some CPUs round more often than others
        for (name, ours), eager in zip(net.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4, msg=name)
    with torch.autocast("cpu", torch.bfloat16):
        casts = [node for segment in plan_of(net, x).segments for node in segment.nodes if "to_copy" in node]
    assert len(casts) == 7  # image, weight and bias to bf16, the first result back to float32, values, weight and bias to float16


def test_input_in_half_precision() -> None:
    model = seeded(_UNet).float()
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)
    x = torch.randn(_SHAPE).bfloat16()
    ours, eager = (_step(module, x, None, torch.bfloat16) for module in (net, model))
    for key in ours:
        assert relative_l2(ours[key], eager[key]) <= 0.05, key
    with pytest.raises(sft.InputError, match=r"input 0 has dtype torch\.bfloat16, the model torch\.float32"):
        net(x)


def test_sums_over_strips_are_kept_in_float32() -> None:
    """4096 ones: in bf16 a running sum stops at 256."""
    shape = (1, 1, 64, 64)
    for weights, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float16, None)):
        net = sft.compile(nn.Conv2d(1, 2, 1).to(weights), shape, options=sft.Options(tile=(1, 64)))
        _step(net, torch.ones(shape).to(weights), None, dtype)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, 4096))


def test_casts_of_weights_come_first_and_once() -> None:
    """They depend on no image, and end no run of streamed operators."""
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    second.weight = first.weight
    net = sft.compile(chain(first, nn.ReLU(), second), _SHAPE, options=_OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_of(net, torch.randn(_SHAPE))
    assert [segment.mode for segment in plan.segments] == ["whole", "tiled"]
    casts, run = (segment.nodes for segment in plan.segments)
    assert len(casts) == 3  # one weight, two biases
    assert len(run) == 4  # the image's cast, two convolutions, an activation


def test_a_supplied_plan_is_for_its_own_precision() -> None:
    model = seeded(_vgg).float()
    x = torch.randn(_SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        plan = sft.Plan.from_json(sft.plan(model, _SHAPE, options=sft.Options(tile=(8, _WIDTH))).to_json())
        net: Any = sft.compile(copy.deepcopy(model), _SHAPE, plan=plan)
        net(x)
        assert net.plan.segments[1].strip_rows == 8
    net = sft.compile(copy.deepcopy(model), _SHAPE, plan=sft.plan(model, _SHAPE, options=sft.Options(tile=(8, _WIDTH))))
    net(x)
    assert net.plan.segments[0].strip_rows == 8
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


def test_a_cast_to_integers_stops_the_gradient() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y.to(torch.int32).to(y.dtype)

    assert_exact(Quantised().double(), torch.randn(_SHAPE, dtype=torch.float64), options=sft.Options(tile=(5, None)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grad_scaler(dtype: torch.dtype) -> None:
    """Scale, unscale, clip, step: the same steps are skipped as in eager PyTorch, and a skipped one changes nothing."""
    model = seeded(_vgg).float()
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)
    scales: list[list[float]] = []
    norms: list[list[float]] = []
    for module in (model, net):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if dtype == torch.bfloat16 else 2.0**40, backoff_factor=2.0**-12)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        seen, clipped = [], []
        for seed in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                loss = module(torch.randn(_SHAPE)).float().square().sum() * 1024
            before = copy.deepcopy(module.state_dict())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clipped.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
            skipped = scaler.get_scale() < scale
            assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items()) == skipped
        scales.append(seen)
        norms.append([norm for norm in clipped if norm == norm and norm != float("inf")])
    assert scales[0] == scales[1]
    assert 1 <= len(norms[0]) < 6, "some steps are skipped, some are not"
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    moved = relative_l2([p.detach() for p in net.parameters()], [p.detach() for p in model.parameters()])
    assert moved <= 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_inside_of_operators_under_autocast(dtype: torch.dtype) -> None:
    """Autocast casts operators inside of ``nll_loss`` and ``einsum``; torch.export's decompositions lose these casts."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            y = self.conv(x)
            scores, target = F.log_softmax(y, 1), y.flip(1)
            distances = [distance(y, target) for distance in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)]
            gram = torch.einsum("bchw,bdhw->bcd", x, x * 2)
            return F.nll_loss(scores, labels), gram, F.kl_div(scores, y.softmax(1), reduction="batchmean"), *distances

    random = torch.Generator().manual_seed(0)  # the divergence is small for some images: a difference of close numbers
    model, x = seeded(Losses).float(), torch.rand(_SHAPE, dtype=torch.float32, generator=random)
    labels = torch.randint(0, 4, (_BATCH, _HEIGHT, _WIDTH), generator=random)
    net = sft.compile(model, [x, labels], budget="64MiB", options=_OPTIONS)
    with _autocast(dtype):
        expected, distances = model(x, labels), net(x, labels)
    for ours, eagers in zip(distances, expected, strict=True):
        assert ours.dtype == eagers.dtype
        torch.testing.assert_close(ours, eagers, rtol=1e-2, atol=1e-4)
    assert (distances[0].dtype, distances[1].dtype) == (torch.float32, dtype)


class _Mixes(nn.Module):
    """An image in half precision times a parameter in single."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.conv, self.equation = nn.Conv2d(3, 4, 3), equation
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, self.conv(x), self.weight)


@pytest.mark.parametrize("equation", ["nchw,cd->ndhw", "nchw,cd", "nc..., cd -> nd...", "nchw,cd->nd"])
def test_einsum_of_two_types(equation: str) -> None:
    _assert_same_types_and_values(seeded(lambda: _Mixes(equation)).float(), torch.randn(2, 3, 7, 10), torch.bfloat16)


class _Composites(nn.Module):
    """Operators that the exporter keeps whole, of values in half precision and weights in single."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 4))
        self.gru, self.lstm, self.rnn = nn.GRUCell(4, 4), nn.LSTMCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3))
        out: Tensor = torch.linalg.matmul(self.rnn(self.lstm(self.gru(y, y))[0]), self.weight)
        return out


def test_operators_inside_of_recurrent_cells() -> None:
    _assert_same_types_and_values(seeded(_Composites).float(), image(2, 3, 7, 10).float(), torch.bfloat16)


class _Recurrent(nn.Module):
    """A recurrent layer over the columns of an image, and of its convolution in half precision."""

    def __init__(self, layer: Callable[..., nn.Module], autocast: bool | None) -> None:
        super().__init__()
        self.conv, self.layer, self.autocast = nn.Conv2d(3, 3, 3, padding=1), layer(3, 4, 2, bidirectional=True), autocast

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with nullcontext() if self.autocast is None else torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            columns = [image.mean(2).permute(2, 0, 1) for image in (x, self.conv(x))]
            return tuple(self.layer(each)[0] for each in columns)


def _assert_same_types_and_values(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> None:
    net = sft.compile(copy.deepcopy(model), x.shape, options=_OPTIONS)
    steps = [_step(module, x, None, dtype) for module in (net, model)]
    for key, ours in steps[0].items():
        assert [value.dtype for value in ours] == [value.dtype for value in steps[1][key]], key
        assert relative_l2(ours, steps[1][key]) <= 2e-2, key


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("switched", [None, True, False])
def test_recurrent_layers(layer: Callable[..., nn.Module], switched: bool | None) -> None:
    """Of inputs of both types; ``switched`` by the model itself."""
    model = seeded(lambda: _Recurrent(layer, switched)).float()
    _assert_same_types_and_values(model, image(2, 3, 5, 3).float(), None if switched else torch.bfloat16)


class _Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.conv, self.equation, self.weight = nn.Conv2d(3, 4, 1), equation, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean(3)
        return torch.einsum(self.equation, y, self.weight, y)


@pytest.mark.parametrize(
    "equation", ["nch,cd,ndh->n", "nch,cd,ndh", "n...h,cc,n...h->n...h", "nch,dd,mdh->nm", "nch,de,mfh->cf", "nch,ce,nch->neh"]
)
@pytest.mark.parametrize("planned", [True, False])
def test_einsum_of_three_operands(equation: str, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.opt_einsum.enabled", planned and torch.backends.opt_einsum.is_available())
    _assert_same_types_and_values(seeded(lambda: _Einsum(equation)).float(), image(2, 3, 7, 10).float(), torch.bfloat16)


def test_linear_equations() -> None:
    class Solves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.matrix = nn.Conv2d(3, 4, 1), nn.Parameter(torch.randn(4, 4) + 9 * torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.linalg.solve(self.matrix, self.conv(x).mean((2, 3)).mT)
            return out

    _assert_same_types_and_values(seeded(Solves).float(), image(2, 3, 7, 10).float(), torch.bfloat16)
