"""Other tools around a compiled model: they work, or name a remedy."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import relative_error
from tests.helpers.models import Around, ConvNet, chain, image, seeded

_SHAPE = (2, 3, 14, 12)
_OPTIONS = sft.Options(tile=(5, None))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: Tensor, guide: Tensor) -> Tensor:
        out: Tensor = self.conv(image) * guide
        return out


def _pair() -> tuple[nn.Module, Any]:
    model = seeded(lambda: Around(nn.SiLU()))
    return model, sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, Any]:
    """Plain and compiled model for tests that do not change them."""
    return _pair()


def test_inputs_by_name() -> None:
    model = seeded(TwoInputs)
    net = sft.compile(copy.deepcopy(model), (_SHAPE, _SHAPE), options=_OPTIONS)
    x, guide = image(*_SHAPE), image(*_SHAPE, seed=1)
    expected = model(x, guide)
    assert relative_error(net(guide=guide, image=x), expected) <= 1e-12
    assert relative_error(net(x, guide=guide), expected) <= 1e-12
    with pytest.raises(sft.InputError, match=r"keyword inputs \['mask'\].*forward takes \(image"):
        net(x, mask=guide)
    with pytest.raises(sft.InputError, match="missing a required argument: 'image'"):
        net(guide=guide)


class _Guided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None, mode: str = "sum", *, flip: bool = False) -> Tensor:
        y = self.conv(x.flip(3) if flip else x)
        output: Tensor = y if scale is None else y * scale if mode == "product" else y + scale
        return output


def test_inputs_that_are_defaults_are_left_out() -> None:
    model = seeded(_Guided)
    x, scale = image(*_SHAPE), torch.tensor(0.3, dtype=torch.float64)
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    for arguments in ((None,), (None, "sum"), ()):
        torch.testing.assert_close(net(x, *arguments), model(x, *arguments), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net(x, None, flip=False), model(x))
    torch.testing.assert_close(net(x, scale, "sum"), model(x, scale), rtol=1e-12, atol=1e-12)  # captured anew


@pytest.mark.parametrize("value", [torch.tensor(0.3, dtype=torch.float64), torch.tensor(3)])
@pytest.mark.parametrize("num_batch", [1, 2])
def test_numbers_next_to_an_image(num_batch: int, value: Tensor) -> None:
    """Temperatures, noise levels: tensors without dimensions."""
    model, x = seeded(_Guided), image(num_batch, 3, 12, 10)
    for shape in ([x.shape, value], [x.shape, value.shape]):
        net = sft.compile(model, shape, options=_OPTIONS)
        torch.testing.assert_close(net(x, value), model(x, value), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler inspects all tensors
def test_torch_compile_does_not_change_it() -> None:
    model, net = _pair()
    x = image(*_SHAPE)

    def loss(module: nn.Module, value: Tensor) -> Tensor:
        out: Tensor = module(value * 2).square().sum()
        return out

    ours = torch.compile(loss, backend="eager")(net, x)
    ours.backward()
    loss(model, x).backward()
    for mine, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert relative_error(mine.grad, theirs.grad, scale=float(theirs.grad.abs().max()) + 1) <= 1e-11
    assert relative_error(torch.compile(cast(nn.Module, net), backend="eager")(x), model(x)) <= 1e-12


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]+` is deprecated")
@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda net, x: cast(Any, torch.jit).trace(net, x), "called inside torch.jit.trace.*trace the original model"),
        (lambda net, x: cast(Any, torch.jit).script(net), "torch.jit.script cannot take it; script the original model"),
        (lambda net, x: torch.export.export(net, (x,)), "called inside torch.export.*export or compile the original model"),
        (lambda net, x: sft.compile(chain(net, nn.ReLU()), _SHAPE), "another sft.compile.*as a whole"),
        (lambda net, x: net._replicate_for_data_parallel(), "nn.DataParallel cannot take it; use nn.parallel.DistributedDataParallel"),
        (lambda net, x: net.compile(backend="eager"), r"its own method compile\(\) cannot take it; use torch.compile\(net\)"),
        (lambda net, x: torch.autograd.functional.jacobian(lambda v: net(v).mean((1, 2, 3)), x, vectorize=True), "batched gradients"),
        (lambda net, x: _dual(net, x), "forward-mode derivatives have no strips"),
    ],
)
def test_tools_that_record_operators_are_refused(tool: Any, message: str, pair: tuple[nn.Module, Any]) -> None:
    model, net = pair
    x = image(*_SHAPE)
    with pytest.raises(sft.UnsupportedError, match=message):
        tool(net, x)
    assert relative_error(net(x), model(x)) <= 1e-12, "and it works as before"


def _dual(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        out: Tensor = net(torch.autograd.forward_ad.make_dual(x, x))
        return out


def test_second_derivatives_are_refused_for_every_caller(pair: tuple[nn.Module, Any]) -> None:
    """Also where autograd would otherwise report that the gradient does not depend on anything, and Hessians are zero."""
    _, net = pair
    x = image(*_SHAPE).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    for wanted in (x, next(net.parameters())):
        with pytest.raises(sft.UnsupportedError, match="cannot be differentiated again"):
            torch.autograd.grad(gradient.sum(), wanted, allow_unused=True, retain_graph=True)
    with pytest.raises(sft.UnsupportedError, match="cannot be differentiated again"):
        torch.autograd.functional.hessian(lambda value: net(value).square().sum(), x[:1])


def test_hooks_of_submodules_are_refused_by_name() -> None:
    net = sft.compile(seeded(ConvNet), (2, 3, 20, 12))
    taken: list[Tensor] = []
    handle = net.body[0].register_forward_hook(lambda module, args, output: taken.append(output))
    with pytest.raises(sft.UnsupportedError, match=r"body\.0: Conv2d has a forward hook \(.*<lambda>\) that changes `taken`"):
        net(image(2, 3, 20, 12))
    handle.remove()
    for kind in ("hook", "pre_hook"):
        said = rf"body\.3: Conv2d has a backward {kind.replace('_', '-')}"
        with getattr(net.body[3], f"register_full_backward_{kind}")(lambda *_: None), pytest.raises(sft.UnsupportedError, match=said):
            net(image(2, 3, 20, 12))
    net(image(2, 3, 20, 12))
    assert not taken


@pytest.mark.parametrize("kind", ["forward hook", "forward pre-hook", "full backward hook", "full backward pre-hook"])
def test_hooks_of_all_modules_are_refused(kind: str) -> None:
    """They would run for the root alone, without an error."""
    net = sft.compile(seeded(ConvNet), (2, 3, 20, 12))
    register = getattr(torch.nn.modules.module, f"register_module_{kind.replace(' ', '_').replace('-', '_')}")
    said = rf"\(all modules\): .*<lambda> is a {kind.removeprefix('full ')} of all modules.*remove it"
    with register(lambda *_: None):
        with pytest.raises(sft.UnsupportedError, match=said):
            net(image(2, 3, 20, 12))
        with pytest.raises(sft.UnsupportedError, match=said):
            sft.compile(seeded(ConvNet), (2, 3, 20, 12))
    net(image(2, 3, 20, 12))


def test_half_precision_weights_want_half_precision_inputs() -> None:
    _, net = _pair()
    net.half()
    with pytest.raises(sft.InputError, match=r"input 0 has dtype torch\.float32, the model torch\.float16; convert one of them"):
        net(image(*_SHAPE).float())
    assert net(image(*_SHAPE).half()).dtype == torch.float16


def test_a_layer_with_two_names_keeps_its_parameters() -> None:
    """The trace of eager PyTorch's layouts replaces parameters by fake tensors for a while."""
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = seeded(lambda: chain(shared, nn.SiLU(), shared))
    own = list(model.parameters())
    x = image(*_SHAPE).contiguous(memory_format=torch.channels_last)
    expected = model(x)
    assert relative_error(sft.compile(model, _SHAPE, options=_OPTIONS)(x), expected) <= 1e-12
    assert all(parameter is p for parameter, p in zip(model.parameters(), own, strict=True))


def test_a_plain_model_that_is_compiled_in_place_is_not_run() -> None:
    """``model.compile()`` puts its wrapper into the dictionary that both share; the compiled model must not run the plain one."""
    model, net = _pair()
    x = image(*_SHAPE)
    plain: nn.Module = net._sft_engine.model
    plain.compile(backend="eager")
    with sft.measure_peak() as peak:
        y = net(x)
    assert relative_error(y, model(x)) <= 1e-12
    assert peak.num_bytes <= net.plan.projected_peak_bytes


def test_a_wrapper_for_several_devices_goes_around_the_compiled_model() -> None:
    with pytest.raises(sft.InputError, match=r"DataParallel copies gradients.*compile model.module, and wrap the compiled one"):
        sft.compile(nn.DataParallel(nn.Conv2d(3, 2, 3)), _SHAPE)


def test_a_model_without_numbers_takes_its_inputs_type() -> None:
    net = sft.compile(nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), _SHAPE, options=_OPTIONS)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = image(*_SHAPE).to(dtype)
        assert net(x).dtype == dtype and torch.equal(net(x), torch.relu(nn.functional.avg_pool2d(x, 2)))


def test_layers_without_outputs() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Last())
    net = sft.compile(model, (1, 3, 16, 16))
    y = net(torch.randn(1, 3, 16, 16))
    assert y.shape == (1, 0)
    y.sum().backward()


_PARAMETRIZATIONS = torch.nn.utils.parametrizations


@pytest.mark.parametrize("reads_first", [False, True])
def test_first_call_in_a_cache_of_parametrized_weights(reads_first: bool) -> None:
    """The trace neither reads weights from the cache nor writes its own."""
    model = seeded(lambda: _PARAMETRIZATIONS.weight_norm(nn.Conv2d(3, 4, 3)))
    net = sft.compile(copy.deepcopy(model), (None, 3, None, None), options=_OPTIONS)
    for module in (net, model):
        with torch.nn.utils.parametrize.cached():
            weight = module.weight.sum() if reads_first else 0
            (module(image(*_SHAPE)).square().sum() + weight + module.weight.square().sum()).backward()
    for (name, ours), eager in zip(net.named_parameters(), model.parameters(), strict=True):
        assert relative_error(cast(Tensor, ours.grad), cast(Tensor, eager.grad)) <= 1e-11, name


def test_updates_of_cached_parametrizations_are_refused() -> None:
    model = seeded(lambda: chain(_PARAMETRIZATIONS.spectral_norm(nn.Conv2d(3, 4, 3))))
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.nn.utils.parametrize.cached():
        with pytest.raises(sft.UnsupportedError, match=r"0\.parametrizations\.weight\.0: updates its buffers.*outside of cached\(\)"):
            net(image(*_SHAPE))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        net.eval()(image(*_SHAPE))
    net.train()(image(*_SHAPE))
