"""Outputs on the host: eager PyTorch's values in host memory, without device memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.torch_internals import pytree
from sft.torch_runtime.host.host_outputs import HostOutput, allocate_host_output
from tests.helpers.capture_cache import remembered_captures
from tests.helpers.exactness import gradient_errors, relative_error
from tests.helpers.models import Branches, TinyUNet, chain, image, seeded
from tests.helpers.poison import poisoned
from tests.helpers.sources import Watched
from tests.helpers.tilings import tiled_options

pytestmark = pytest.mark.usefixtures("without_proposals")

TOLERANCE = 1e-10


@pytest.fixture(scope="module", autouse=True)
def poisoned_hosts() -> Iterator[None]:
    """Poison the output, so that an element that no strip writes cannot be right by chance."""

    def make(*arguments: Any, is_dry: bool, **keywords: Any) -> HostOutput:
        output = allocate_host_output(*arguments, is_dry=is_dry, **keywords)
        if output.tensor.is_floating_point() and not is_dry:
            output.tensor.fill_(float("nan"))
        return output

    with pytest.MonkeyPatch.context() as patches, remembered_captures():
        patches.setattr("sft.api.outputs.allocate_host_output", make)
        yield


class Supervised(nn.Module):
    """Deep supervision with a norm over the image in between: a later segment reads ``early`` and no other output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.early, self.late = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = torch.relu(self.early(torch.relu(self.stem(x))))
        late = self.late(self.norm2(early))
        return {"early": early, "late": [late, late.mean((2, 3))], "winner": late.argmax(1)}

    def norm2(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.norm(x[:, :4]).mean((2, 3), keepdim=True).mean(1, keepdim=True)
        return y


class Returned(nn.Module):
    """An output that is the input, one that is a parameter, one value twice, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.layer(x)
        return y, x, self.layer.weight, y, (y > 0).to(y.dtype).detach()


class ByPixel(nn.Module):
    """Model with a final permutation that does not stream: the output is computed untiled, then copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.layer(x).permute(0, 2, 3, 1))
        return y


def directions(outputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Gradients for outputs, in memory that `sft.measure_peak` does not count."""
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.standard_normal(tuple(y.shape))).to(y.dtype) for y in outputs]


def backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def check(model: nn.Module, x: Tensor, **keywords: Any) -> Any:
    """Two training steps and inference, at a size planned on first use: eager PyTorch's results in the projected bytes.

    Args:
        model: in float64.
        x: the input.
        keywords: of ``sft.compile``.

    Returns:
        The compiled model.
    """
    eager = copy.deepcopy(model)
    net = sft.compile(copy.deepcopy(model), (None,) * x.dim(), output="host", **keywords)
    for step in range(2):
        x_eager, x_ours = (x.clone().requires_grad_() for _ in range(2))
        tree = eager(x_eager)
        with poisoned():
            ours = net(x_ours)
        assert pytree.tree_structure(ours) == pytree.tree_structure(tree)
        expected, results = pytree.tree_leaves(tree), pytree.tree_leaves(ours)
        assert all(y.device.type == "cpu" for y in results)
        assert [y.requires_grad for y in results] == [y.requires_grad for y in expected]
        assert all(a.is_contiguous() for a, b in zip(results, expected, strict=True) if b.is_contiguous())
        assert max(relative_error(a, b) for a, b in zip(results, expected, strict=True)) <= TOLERANCE
        gradients = directions(expected, step)
        backward(expected, gradients)
        with poisoned():
            backward(results, gradients)
        errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in eager.named_parameters()})
        assert max(errors.values(), default=0.0) <= TOLERANCE, errors
        assert x_ours.grad is not None and x_eager.grad is not None
        assert relative_error(x_ours.grad, x_eager.grad) <= TOLERANCE
        buffers = dict(net.named_buffers())
        assert all(relative_error(buffers[name], b) <= TOLERANCE for name, b in eager.named_buffers())
        for module in (net, eager):
            module.zero_grad(set_to_none=True)
    check_budget(net, x, gradients)
    with torch.no_grad():
        expected, results = pytree.tree_leaves(eager(x)), pytree.tree_leaves(net(x))
        assert max(relative_error(a, b) for a, b in zip(results, expected, strict=True)) <= TOLERANCE
    return net


def check_budget(net: Any, x: Tensor, gradients: list[Tensor]) -> None:
    """Measured <= projected, tight, within the budget."""
    plan: sft.Plan = net.plan_for(x.clone().requires_grad_())
    with sft.measure_peak("cpu") as peak:
        backward(pytree.tree_leaves(net(x.clone().requires_grad_())), gradients)
    net.zero_grad(set_to_none=True)
    measured, projected = peak.num_bytes, plan.projected_peak_bytes
    assert 0 < measured <= projected <= measured + max(measured // 100, 64 * 1024), (measured, projected)
    assert plan.total_bytes <= plan.budget_bytes


# --- the numbers ----------------------------------------------------------------------------------------------------


@settings(max_examples=3)
@given(data=st.data(), batch=st.integers(1, 2))
def test_unet(data: st.DataObject, batch: int) -> None:
    """Full resolution out, skips over many strips; strips, panels, batch tiles, independent tiles, restarts, kept states."""
    options = data.draw(tiled_options((16, 12)))
    net = check(seeded(TinyUNet), image(batch, 3, 16, 12), options=options)
    assert net.plan.output_placements == ("host",)
    assert [segment.placement for segment in net.plan.segments] == ["host"], "nothing is whole on the device"


def _volume() -> nn.Module:
    return chain(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(3, 2, 2, stride=2))


def _signal() -> nn.Module:
    return chain(nn.Conv1d(2, 3, 5, padding=2), nn.Tanh(), nn.Upsample(scale_factor=2), nn.Conv1d(3, 4, 3))


_OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], sft.Options]] = {
    "signal": (_signal, (2, 2, 33), sft.Options(tile=(4, None))),
    "volume": (_volume, (2, 2, 6, 5, 7), sft.Options(tile=(2, 3), batch_tile=1)),
    "volume of independent tiles": (_volume, (1, 2, 6, 5, 7), sft.Options(tile=(4, 2), halo="recompute")),
    "restarts": (TinyUNet, (1, 3, 16, 12), sft.Options(tile=(4, 6), state_slots=2)),
    "supervised": (Supervised, (2, 3, 17, 14), sft.Options(tile=(4, None))),
    "supervised in panels": (Supervised, (1, 3, 17, 14), sft.Options(tile=(5, 4))),
    "supervised and whole": (Supervised, (2, 3, 17, 14), sft.Options(strategy="none")),
    "nested": (Branches, (1, 3, 15, 12), sft.Options(tile=(4, None))),
    "made whole": (ByPixel, (1, 3, 12, 10), sft.Options(tile=(4, None))),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_other_shapes_and_nets(name: str) -> None:
    make, shape, options = _OTHERS[name]
    net = check(seeded(make), image(*shape), options=options)
    placements = {segment.placement for segment in net.plan.segments}
    if name.startswith("supervised") and options.tile:
        assert "device" in placements, "the output that a later segment reads is a cut"
        assert placements & {"host", "device and host"}, "the others are never whole on the device"


def test_outputs_that_are_inputs_and_values_returned_twice() -> None:
    net = check(seeded(Returned), image(1, 3, 12, 10), options=sft.Options(tile=(4, None)))
    x = image(1, 3, 12, 10).requires_grad_()
    y, same, weight, again, positive = net(x)
    assert y is again and same is x and weight is net.layer.weight and not positive.requires_grad


def test_channels_last_is_kept() -> None:
    x = image(2, 3, 24, 12).to(memory_format=torch.channels_last)
    model = _segmenting().double()
    net = sft.compile(model, tuple(x.shape), output="host", options=sft.Options(tile=(4, None)))
    y, expected = net(x), model(x)
    assert y.stride() == expected.stride() and relative_error(y, expected) <= TOLERANCE


def test_autocast() -> None:
    model, x = chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), image(1, 3, 16, 12).float()
    net = sft.compile(model, tuple(x.shape), output="host", options=sft.Options(tile=(4, None)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = net(x), model(x)
    assert y.dtype == torch.bfloat16 and relative_error(y, expected) <= 0.05
    y.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_image_that_is_read_its_gradient_and_the_output_are_all_in_strips() -> None:
    """As for a slide: no tensor as large as the image or the output is ever on the device."""
    pixels, target = image(1, 3, 96, 40), np.empty((1, 3, 96, 40))
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 16, 3, padding=1)))
    net: Any = sft.compile(copy.deepcopy(model), Watched(pixels), output="host", options=sft.Options(tile=(4, None), state_every=4))
    plan = net.plan_for(Watched(pixels), input_grad=target)
    (gradient,) = directions([torch.empty(1, 16, 96, 40, device="meta")])
    gradient = gradient.double()
    with sft.measure_peak("cpu") as peak:
        y = net(Watched(pixels), input_grad=target)
        y.backward(gradient)
    measured, projected = peak.num_bytes, plan.projected_peak_bytes
    assert measured <= projected <= measured + max(measured // 100, 64 * 1024)
    assert projected < y.numel() * 8 / 2 and projected < pixels.numel() * 8 * 2
    x = pixels.clone().requires_grad_()
    expected = model(x)
    expected.backward(gradient)
    assert x.grad is not None and relative_error(torch.from_numpy(target), x.grad) <= TOLERANCE
    assert relative_error(y, expected) <= TOLERANCE
    errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})
    assert max(errors.values()) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tile", [(4, None), (5, 6)])
def test_on_a_cuda_device(tile: tuple[int, int | None]) -> None:
    """Copies in both directions, including an input that is returned."""
    model, x = seeded(Returned).cuda(), image(2, 3, 12, 10).cuda()
    net = sft.compile(copy.deepcopy(model), tuple(x.shape), output="host", options=sft.Options(tile=tile))
    x_eager, x_ours = (x.clone().requires_grad_() for _ in range(2))
    expected, outputs = model(x_eager), net(x_ours)
    assert all(y.device.type == "cpu" for y in outputs)
    assert max(relative_error(a, b.cpu()) for a, b in zip(outputs, expected, strict=True)) <= TOLERANCE
    gradients = directions(outputs)
    backward(list(expected), [gradient.cuda() for gradient in gradients])
    backward(list(outputs), gradients)
    errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})
    assert max(errors.values()) <= TOLERANCE
    assert x_ours.grad is not None and x_eager.grad is not None and relative_error(x_ours.grad, x_eager.grad) <= TOLERANCE


# --- autograd ---------------------------------------------------------------------------------------------------------


def _supervised() -> tuple[Any, Any, Tensor]:
    model = seeded(Supervised)
    net = sft.compile(copy.deepcopy(model), (1, 3, 17, 14), output="host", options=sft.Options(tile=(4, None)))
    return model, net, image(1, 3, 17, 14)


def test_losses_run_on_the_host_and_unused_outputs_have_no_gradient() -> None:
    eager, net, x = _supervised()
    for model in (eager, net):
        model(x)["late"][1].square().sum().backward()
    ours, expected = ({n: p.grad for n, p in model.named_parameters()} for model in (net, eager))
    assert max(gradient_errors(ours, expected).values()) <= TOLERANCE
    _, net, _ = _supervised()
    net(x)["early"].sum().backward()  # an expanded gradient
    assert net.late.weight.grad is None and net.early.weight.grad is not None


def test_retain_graph() -> None:
    _, net, x = _supervised()
    y = net(x)
    loss = y["early"].square().sum() + y["late"][0].sum()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    loss.backward()
    assert all(torch.equal(p.grad, first[name]) for name, p in net.named_parameters() if p.grad is not None)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_outputs_changed_in_place() -> None:
    """The backward pass reads its own copies, so outputs may be changed even if it needs their values."""
    eager, net, x = _supervised()
    for model, is_ours in ((eager, False), (net, True)):
        y = model(x)
        early = y["early"].mul_(2.0) if is_ours else y["early"] * 2.0
        (early.sum() + y["late"][0].square().sum()).backward()
    ours, expected = ({n: p.grad for n, p in model.named_parameters()} for model in (net, eager))
    assert max(gradient_errors(ours, expected).values()) <= TOLERANCE


def test_results_die_with_their_last_reference() -> None:
    """No reference cycle keeps an output, which may be larger than the device's memory."""
    _, net, x = _supervised()
    y = net(x)
    dead = [weakref.ref(tensor) for tensor in pytree.tree_leaves(y)]
    gc.disable()
    try:
        del y
        assert all(ref() is None for ref in dead)
    finally:
        gc.enable()


def test_copies_keep_the_setting() -> None:
    _, net, x = _supervised()
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert clone.plan_for(x).output_placements == ("host",) * 4
        assert torch.equal(clone(x)["early"], net(x)["early"])


# --- memory -----------------------------------------------------------------------------------------------------------


def _segmenting() -> nn.Module:
    """32 classes for each pixel: the output is larger than all other tensors."""
    return seeded(
        lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 32, 1))
    ).float()


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_budget_below_the_output(with_grad: bool) -> None:
    x = image(1, 3, 256, 192).float()
    output_bytes = 32 * 256 * 192 * 4
    with torch.set_grad_enabled(with_grad):
        with pytest.raises(sft.BudgetError, match="output='host'"):
            sft.compile(_segmenting(), tuple(x.shape), budget=output_bytes)
        net: Any = sft.compile(_segmenting(), tuple(x.shape), budget=output_bytes // 2, output="host")
        plan = net.plan_for(x)
        gradient = directions([torch.empty(1, 32, 256, 192, device="meta")])[0].float()
        with sft.measure_peak("cpu") as peak:
            y = net(x.clone())
            if with_grad:
                y.backward(gradient)
    measured, projected = peak.num_bytes, plan.projected_peak_bytes
    assert measured <= projected <= measured + max(measured // 100, 64 * 1024)
    assert plan.total_bytes <= output_bytes // 2 and measured < output_bytes / 2
    assert relative_error(y, _segmenting()(x)) <= 1e-5


def test_the_smallest_budget_works() -> None:
    with pytest.raises(sft.BudgetError) as refused:
        sft.compile(_segmenting(), (1, 3, 128, 96), budget=1000, output="host")
    net: Any = sft.compile(_segmenting(), (1, 3, 128, 96), budget=refused.value.needed_bytes, output="host")
    assert net.plan.total_bytes <= refused.value.needed_bytes < 32 * 128 * 96 * 4


def test_no_more_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sft.compile(_segmenting(), (1, 3, 64, 48), output="host")

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "empty", fail)
    with pytest.raises(sft.InputError, match=r"\(1, 32, 64, 48\) needs 384.00 KiB of host memory.*output='name.npy'"):
        net(image(1, 3, 64, 48).float())


def test_a_dry_run_on_the_meta_device() -> None:
    net: Any = sft.compile(_segmenting().to("meta"), (1, 3, 256, 192), output="host", budget="8MiB")
    with sft.measure_peak("meta") as peak:
        y = net(torch.empty(1, 3, 256, 192, device="meta"))
        y.sum().backward()
    assert (y.device.type, y.shape) == ("cpu", (1, 32, 256, 192))
    assert 0 < peak.num_bytes <= net.plan.projected_peak_bytes < 8 * 2**20


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_destination_of_outputs() -> None:
    model = seeded(Supervised)
    plan = sft.plan(model, (1, 3, 17, 14), output="host", options=sft.Options(tile=(4, None)))
    assert plan.output_placements == ("host",) * 4 and "4 output(s) on the host" in " ".join(plan.explain().split())
    assert sft.Plan.from_json(plan.to_json()) == plan
    assert sft.compile(model, (1, 3, 17, 14), output="host", plan=plan).plan == plan
    # A plan for outputs on the device does not apply to this call.
    other = sft.plan(model, (1, 3, 17, 14), options=sft.Options(tile=(4, None)))
    assert other.output_placements == ("device",) * 4
    made = sft.of(sft.compile(model, (1, 3, 17, 14), output="host", plan=other)).plan
    assert made.output_placements == ("host",) * 4
    assert [segment.nodes for segment in made.segments] != [segment.nodes for segment in plan.segments]
