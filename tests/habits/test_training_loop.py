"""Training loops of users: accumulate, clip, freeze, checkpoint, convert, evaluate. Plain PyTorch is the reference."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sft
from tests.helpers.eager_pairs import OPTIONS, SHAPE, assert_same_grads, assert_same_state, pair
from tests.helpers.exactness import assert_exact, gradient_errors, plan_of, relative_error
from tests.helpers.models import Around, TinyUNet, chain, image, seeded


class TwoHeads(nn.Module):
    """Two outputs; the second gates the first, which is therefore an output and a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.gate = nn.Linear(4, 4)
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(x)
        gate = torch.sigmoid(self.gate(features.mean((2, 3))))
        return features, self.head(features * gate[:, :, None, None])


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_retain_graph() -> None:
    model, net = pair()
    for module in (model, net):
        loss = module(image(*SHAPE)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_grads(net, model)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_the_loss_leaves_out_gives_no_gradient(used: int) -> None:
    """Not zeros: an optimizer with momentum or weight decay changes a parameter with a gradient of zeros."""
    model, net = pair(TwoHeads)
    for module in (model, net):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.3)
        for _ in range(2):
            optimizer.zero_grad()
            module(image(*SHAPE))[used].square().sum().backward()
            optimizer.step()
    assert (net.get_parameter("head.weight").grad is None) == (used == 0)
    assert_same_grads(net, model)
    assert_same_state(net, model)


def test_gradient_penalty_is_refused() -> None:
    """Eager PyTorch differentiates the gradient; a compiled model must not let it pass as a constant."""
    model, net = pair()
    for module, works in ((model, True), (net, False)):
        x = image(*SHAPE).requires_grad_()
        loss = module(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert gradient.requires_grad
        penalised = loss + gradient.square().sum()
        if works:
            penalised.backward()
        else:
            with pytest.raises(sft.UnsupportedError, match="cannot be differentiated again"):
                penalised.backward()


def test_create_graph_alone_gives_the_gradients() -> None:
    model, net = pair()
    gradients = []
    for module in (model, net):
        grads = torch.autograd.grad(module(image(*SHAPE)).square().sum(), list(module.parameters()), create_graph=True)
        gradients.append(dict(zip(dict(module.named_parameters()), grads, strict=True)))
    assert max(gradient_errors(gradients[1], gradients[0]).values()) <= 1e-11


def test_a_changed_output_that_the_backward_pass_reads() -> None:
    model, net = pair(TwoHeads)
    for module in (model, net):
        features, y = module(image(*SHAPE))
        with torch.no_grad():
            features.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            y.sum().backward()
    for module in (model, net):
        module.zero_grad()
        features, y = module(image(*SHAPE))
        y.mul_(2)  # this one is not read
        (y.square().sum() + features.sum()).backward()
    assert_same_grads(net, model)


def test_a_forgotten_result_frees_its_graph() -> None:
    """Without a reference cycle that would keep the states of a step until a garbage collection."""
    _, net = pair(TwoHeads)
    gc.disable()
    try:
        outputs = net(image(*SHAPE))
        graph = weakref.ref(cast(Any, outputs[0].grad_fn))
        with sft.measure_peak("cpu") as peak:
            again = net(image(*SHAPE))
            del again
        assert peak.current_bytes == 0
        del outputs
        assert graph() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant: bool) -> None:
    model, net = pair(TinyUNet)
    after = seeded(lambda: nn.Conv2d(2, 2, 3))
    gradients = []
    for module in (model, net):
        x = image(*SHAPE).requires_grad_()
        checkpoint(lambda value, module=module: after(module(value)), x, use_reentrant=use_reentrant).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert relative_error(gradients[1], gradients[0]) <= 1e-11
    assert_same_grads(net, model)


def test_saved_tensors_on_the_host() -> None:
    model, net = pair()
    for module in (model, net):
        with torch.autograd.graph.save_on_cpu():
            loss = module(image(*SHAPE)).square().sum()
        loss.backward()
    assert_same_grads(net, model)


def test_a_step_before_the_backward_is_noticed() -> None:
    for module in pair():
        loss = module(image(*SHAPE)).square().sum()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulate_clip_step(set_to_none: bool) -> None:
    """Three calls a step, the norm clipped, two groups with their own rates and a schedule, batches of a new size."""
    model, net = pair()
    norms: list[list[float]] = []
    for module in (model, net):
        head = [p for name, p in module.named_parameters() if name.startswith("head")]
        body = [p for name, p in module.named_parameters() if not name.startswith("head")]
        groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": 1e-3}]
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step_norms = []
        for step in range(3):
            for call, batch in enumerate((2, 1, 3)):
                (module(image(batch, *SHAPE[1:], seed=3 * step + call)).square().mean() / 3).backward()
            step_norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == set_to_none for p in module.parameters())
        norms.append(step_norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    assert_same_state(net, model)


def test_optimizer_in_the_backward() -> None:
    """A step for each parameter as soon as its gradient exists, which is then freed."""
    model, net = pair()
    for module in (model, net):

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(2):
            module(image(*SHAPE, seed=seed)).square().sum().backward()
        assert all(p.grad is None for p in module.parameters())
    assert_same_state(net, model)


def test_a_frozen_prefix_costs_nothing() -> None:
    model, net = pair()
    x = image(*SHAPE)
    training = plan_of(net, x)
    for module in (model, net):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("body"))
    frozen = plan_of(net, x)
    with torch.no_grad():
        inference = plan_of(net, x)
    # The body runs once, forward, and keeps nothing; the backward pass adds the gradient of the classifier's weight.
    gradient_flops = 2 * 2 * 6 * 5
    assert frozen.flops == inference.flops + gradient_flops < training.flops
    assert frozen.projected_peak_bytes < inference.projected_peak_bytes + 1024 < training.projected_peak_bytes
    for module in (model, net):
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
        module(x).square().sum().backward()
        optimizer.step()
    assert_same_grads(net, model)
    assert_same_state(net, model)


def test_gradient_with_respect_to_parameters_and_input() -> None:
    model, net = pair(TwoHeads)
    gradients = []
    for module in (model, net):
        x = image(*SHAPE).requires_grad_()
        _, y = module(x)
        gradients.append(torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y)))
        assert all(p.grad is None for p in (x, *module.parameters()))
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(gradients[1], gradients[0], strict=True))


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TinyUNet, TwoHeads, lambda: Around(nn.BatchNorm2d(4))], ids=["unet", "two heads", "norm"])
@pytest.mark.parametrize("last", ["input", "weights", "both"])
def test_channels_last(last: str, make: Callable[[], nn.Module]) -> None:
    model = seeded(make)
    if last != "input":
        cast(Any, model).to(memory_format=torch.channels_last)
    net = sft.compile(copy.deepcopy(model), SHAPE, options=OPTIONS)
    results = []
    for module in (model, net):
        x = image(*SHAPE)
        x = (x if last == "weights" else x.contiguous(memory_format=torch.channels_last)).requires_grad_()
        outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward([y.square().sum() for y in outputs])
        assert x.grad is not None
        results.append([*outputs, x.grad])
    for ours, eager in zip(results[1], results[0], strict=True):
        assert relative_error(ours, eager) <= 1e-10
        assert ours.stride() == eager.stride()
    assert_same_grads(net, model)
    for p, q in zip(net.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.stride() == q.grad.stride()


class _PixelwiseHead(nn.Module):
    """A linear map of every pixel's channels, as in transformers: its result is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


def test_results_of_permuted_models_have_the_layout_of_eager_pytorch() -> None:
    """Otherwise a caller could not view them as rows of pixels without a copy."""
    model, x = seeded(_PixelwiseHead), image(*SHAPE)
    net, y = sft.compile(model, SHAPE, options=sft.Options(tile=(5, None))), model(x)
    assert net(x).stride() == y.stride() != y.contiguous().stride()
    net(x).permute(0, 2, 3, 1).view(-1, 5).sum().backward()
    assert_exact(model, x, options=sft.Options(tile=(5, None)))


def test_converted_after_compile() -> None:
    """``.to(memory_format=...)`` on the compiled model: the earlier plan is not used again."""
    model, net = pair(TinyUNet)
    for module in (model, net):
        assert module(image(*SHAPE)).is_contiguous()
        cast(Any, module).to(memory_format=torch.channels_last)
    ours, eager = net(image(*SHAPE)), model(image(*SHAPE))
    assert relative_error(ours, eager) <= 1e-12
    assert ours.stride() == eager.stride()


# -- inference ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps(context: Callable[[], Any]) -> None:
    """The first call may be one for inference, and must have no effect on later steps."""
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.SiLU()))
    shape = (1, 3, 128, 16)
    net = sft.compile(copy.deepcopy(model), (1, 3, None, 16), options=sft.Options(tile=(8, 16)))
    for seed in range(2):
        outputs = []
        peaks: dict[str, int] = {}
        for module in (model, net):
            module.eval()
            with context():
                x = image(*shape, seed=seed)
                module(x)  # plans, which is not measured
                with sft.measure_peak("cpu") as peak:
                    y = module(x)
                assert y.is_inference() == (context is torch.inference_mode)
                assert not y.requires_grad
                outputs.append(y.clone())
                peaks["inference"] = peak.num_bytes
        assert relative_error(outputs[1], outputs[0]) <= 1e-10
        for module in (model, net):
            module.train()
            module.zero_grad()
            x = image(*shape, seed=seed)
            plan = plan_of(net, x)
            with sft.measure_peak("cpu") as peak:
                loss = module(x)
                loss.sum().backward()
                del loss
            peaks["training"] = peak.num_bytes
        assert_same_grads(net, model)
        assert_same_state(net, model)
        # Inference stores the output and a strip; a training step its cut, states and gradients as well.
        assert peaks["inference"] < peaks["training"] / 2
        assert sum(segment.state_bytes for segment in plan.segments) > 0


def test_inference_tensors() -> None:
    """As in eager PyTorch: accepted for inference, refused by autograd in training."""
    with torch.inference_mode():
        x = image(*SHAPE)
    model, net = pair()
    with torch.no_grad():
        assert relative_error(net(x), model(x)) <= 1e-12
    for module in (model, net):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            module(x)
