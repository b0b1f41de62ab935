"""Programs for a GPU run attention in half precision as one operator, and its derivative as another one."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.common.torch_internals import FakeTensorMode
from sft.lower.custom_ops import attention
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward

_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))
_aten = torch.ops.aten


class _Block(nn.Module):
    """Patches, and attention between them."""

    def __init__(self, *, channels: int = 16, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.patches, self.heads, self.options = nn.Conv2d(3, channels, 4, stride=4), heads, options
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        samples, length, channels = tokens.shape
        q, k, v = self.qkv(tokens).reshape(samples, length, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        y: Tensor = tokens + self.out(mixed.transpose(1, 2).reshape(samples, length, channels))
        return y


def _compiled(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Counter[Any]]:
    """The compiled network, and the functions of its programs after a step."""
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    net: Any = sft.compile(model, x, budget="1GiB", options=sft.Options(**options))
    net(x).float().square().sum().backward()
    prepared = next(iter(net._sft_engine.plan_cache.prepared.values()))
    programs = (program for segment in prepared.region.segments for program in segment.lowered_programs)
    return net, Counter(instruction.function for program in programs for instruction in program.instructions)


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"batch_tile": 1}], ids=["whole", "chunks of samples"])
@pytest.mark.parametrize("attention", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_those_of_the_model(
    options: dict[str, Any], attention: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = _Block(**attention).to(dtype), torch.randn(3, 3, 16, 12).to(dtype)
    exact, rounded = _Block(**attention).double(), _Block(**attention).to(dtype)
    for other in (exact, rounded):
        other.load_state_dict(model.state_dict())
        other(x.to(next(other.parameters()).dtype)).float().square().sum().backward()
    _, calls = _compiled(model, x, monkeypatch, **options)
    assert calls[fused_attention] and calls[fused_attention_backward]
    assert not calls[_aten._scaled_dot_product_flash_attention_for_cpu.default] and not calls[_aten._softmax.default]
    for name, parameter in model.named_parameters():
        truth, eager = exact.get_parameter(name).grad, rounded.get_parameter(name).grad
        assert parameter.grad is not None and truth is not None and eager is not None
        error, eager_error = (float((each.double() - truth).norm() / truth.norm()) for each in (parameter.grad, eager))
        assert error <= 2 * eager_error + 1e-3, name


class _Latents(nn.Module):
    """Attention of latent vectors to the patches of an image (Perceiver)."""

    def __init__(self, channels: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.patches, self.heads = nn.Conv2d(3, channels, 4, stride=4), heads
        self.latents = nn.Parameter(torch.randn(1, 5, channels))
        self.query, self.key, self.value = (nn.Linear(channels, channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens, latents = self.patches(x).flatten(2).transpose(1, 2), self.latents.expand(x.shape[0], -1, -1)
        operands = (self.query(latents), self.key(tokens), self.value(tokens))
        q, k, v = (each.reshape(*each.shape[:2], self.heads, -1).transpose(1, 2) for each in operands)
        y: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + latents
        return y


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"batch_tile": 1}, {"tile": (4, None)}], ids=["whole", "chunks", "strips"])
def test_queries_from_another_segment(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries are channels last, so channels of a head are not adjacent."""
    torch.manual_seed(0)
    model, x = _Latents().bfloat16(), torch.randn(3, 3, 16, 12).bfloat16()
    exact = copy.deepcopy(model).double()
    expected = exact(x.double())
    expected.square().sum().backward()
    net, calls = _compiled(model, x, monkeypatch, **options)
    assert calls[fused_attention] and calls[fused_attention_backward]
    pairs = [
        (net(x).detach(), expected.detach()),
        *((each.grad, truth.grad) for each, truth in zip(model.parameters(), exact.parameters(), strict=True)),
    ]
    largest = max(float(truth.norm()) for _, truth in pairs[1:])
    for ours, truth in pairs:
        assert float((ours.double() - truth).norm()) <= 2e-2 * max(float(truth.norm()), 1e-2 * largest)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"channels": 12}),
        (torch.bfloat16, {"attn_mask": torch.zeros(12, 12, dtype=torch.bfloat16)}),
    ],
    ids=["single precision", "six channels a head", "mask"],
)
def test_other_attention_is_traced(dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = _compiled(_Block(**options).to(dtype), torch.randn(2, 3, 16, 12).to(dtype), monkeypatch, strategy="none")
    assert not calls[fused_attention]


@settings(max_examples=12)
@given(
    samples=st.integers(1, 3),
    heads=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.sampled_from([8, 16]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.5]),
)
def test_the_operator_equals_attention(
    samples: int, heads: int, lengths: tuple[int, int], channels: int, is_causal: bool, scale: float | None
) -> None:
    """On a CPU in double precision; the kernels of a GPU are compared in half precision (``test_attention_on_a_gpu``)."""
    is_causal = is_causal and lengths[0] == lengths[1]
    query, key, value = (
        torch.randn(samples, heads, n, channels, dtype=torch.float64, requires_grad=True) for n in (lengths[0], *lengths[1:] * 2)
    )
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), grad)
    with torch.no_grad():
        out, logsumexp = fused_attention(query, key, value, is_causal, scale)
        ours = fused_attention_backward(grad, query, key, value, out, logsumexp, is_causal, scale)
    for mine, truth in zip((out, *ours), (expected, *gradients), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-6, atol=1e-6)


def test_results_of_the_kernels_of_a_gpu_have_the_projected_shapes() -> None:
    """Fake tensors of CUDA run ATen's rules for the kernels that the operators call."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key = (torch.empty(2, n, 3, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in (5, 7))
        out, logsumexp, *_ = _aten._scaled_dot_product_flash_attention.default(query, key, key, 0.0, False, False, scale=0.5)
        state = torch.empty(2, dtype=torch.int64, device="cuda")
        lengths = (None, None, 5, 7)
        gradients = _aten._scaled_dot_product_flash_attention_backward.default(
            out, query, key, key, out, logsumexp, *lengths, 0.0, False, state, state, scale=0.5
        )
        fake = (*fused_attention(query, key, key, False, 0.5), *fused_attention_backward(out, query, key, key, out, logsumexp, False, 0.5))
    for real, ours in zip((out, logsumexp, *gradients), fake, strict=True):
        assert (real.shape, real.dtype, real.device) == (ours.shape, ours.dtype, ours.device)
        assert real.stride(-1) == ours.stride(-1) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_on_a_gpu(dtype: torch.dtype, is_causal: bool) -> None:
    device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    shape = (2, 197, 3, 4, 64)
    qkv = torch.randn(shape, device=device, dtype=dtype, generator=generator)
    query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
    grad = torch.randn(2, 4, 197, 64, device=device, dtype=dtype, generator=generator)
    out, logsumexp = fused_attention(query, key, value, is_causal, None)
    ours = (out, *fused_attention_backward(grad, query, key, value, out, logsumexp, is_causal, None))

    def reference(kind: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = operands = [each.detach().to(kind).requires_grad_() for each in (query, key, value)]
        result = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return result.detach(), *torch.autograd.grad(result, operands, grad.to(kind))

    for mine, eager, exact in zip(ours, reference(dtype), reference(torch.float64), strict=True):
        error, eager_error = (float((each.double() - exact).norm() / exact.norm()) for each in (mine, eager))
        assert error <= 1.2 * eager_error + 1e-4
        assert (mine.shape, mine.dtype) == (eager.shape, eager.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_vision_transformer_on_a_gpu() -> None:
    """The compiled block has the error of eager PyTorch, and no more memory than projected."""
    torch.manual_seed(0)
    model = _Block(channels=128).cuda().bfloat16()
    x = torch.randn(8, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    net: Any = sft.compile(model, x, budget="256MiB", options=sft.Options(batch_tile=2))
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        with sft.measure_peak("cuda") as peak:
            net(x).float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    exact = _Block(channels=128).cuda().double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).float().square().sum().backward()
    for name, gradient in gradients.items():
        truth = exact.get_parameter(name).grad
        assert gradient is not None and truth is not None
        assert float((gradient.double() - truth).norm() / truth.norm()) <= 2e-2, name
    assert peak.num_bytes <= net.plan.projected_peak_bytes + 2**20  # the loss


def test_the_result_has_the_order_of_its_queries() -> None:
    """Also where a kernel returns another one."""
    by_token, by_head = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 3, 5, 8)
    assert attention._in_order_of(by_token, by_head).transpose(1, 2).is_contiguous()
    assert torch.equal(attention._in_order_of(by_token, by_head), by_head)
    for output in (by_token, by_head):
        assert attention._in_order_of(by_head, output) is output
