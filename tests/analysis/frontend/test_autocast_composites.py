"""Autocast on GPUs, which differs from autocast on the CPU. Captures need no GPU: their tensors are fake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from sft.analysis.frontend.autocast import autocast_composites
from sft.analysis.frontend.capture import capture
from sft.analysis.frontend.trace_context import COMPUTE_DEVICES
from sft.common.torch_internals import FakeTensorMode

_DEVICE = torch.device("cuda", 0)


class _BetweenConvolutions(nn.Module):
    """A convolution, a function, and optionally a second convolution."""

    def __init__(self, inner: Callable[[Tensor], Tensor], *, again: bool = True) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Conv2d(3, 4, 3), inner, nn.Conv2d(4, 2, 1) if again else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.inner(self.first(x)))
        return output


def _up(mode: str, **options: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.interpolate(x, scale_factor=2, mode=mode, **options)


_CASES: dict[str, Callable[[Tensor], Tensor]] = {
    **{mode: _up(mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")},
    "antialiased": _up("bilinear", antialias=True),
    "softmax": lambda x: x.softmax(1),
    "pool": lambda x: functional.max_pool2d(x, 2),
}
#: Functions with a result that is not an image.
_LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "volume": lambda x: _up("trilinear")(x.unsqueeze(2)),
    "signal": lambda x: _up("linear")(x.flatten(2)),
    "cross-entropy": lambda x: functional.cross_entropy(x, x.argmax(1)),
    "log-softmax": lambda x: functional.nll_loss(x.log_softmax(1), x.argmax(1)),
    "squares": lambda x: functional.mse_loss(x, x.detach() * 2),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that autocast for GPUs is available; PyTorch switches it off on machines without one."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*_CASES, *_LAST])
def test_dtypes_are_those_of_eager_pytorch(name: str, dtype: torch.dtype) -> None:
    with torch.device("cpu"):
        models = (
            [_BetweenConvolutions(_CASES[name], again=again) for again in (False, True)]
            if name in _CASES
            else [_BetweenConvolutions(_LAST[name], again=False)]
        )
    for model in models:
        for parameter in model.requires_grad_(False).parameters():  # a PyTorch without CUDA has no gradients there, even fake ones
            COMPUTE_DEVICES[parameter] = _DEVICE
        graph = capture(model, ((1, 3, 16, 16),), (torch.float32,), _DEVICE, autocast=dtype).graph
        with FakeTensorMode(), torch.no_grad(), torch.autocast("cuda", dtype):
            weights = {key: torch.empty(parameter.shape, device=_DEVICE) for key, parameter in model.named_parameters()}
            wanted = functional_call(model, weights, (torch.empty(1, 3, 16, 16, device=_DEVICE),)).dtype
        assert [graph[output].dtype for output in graph.outputs] == [str(wanted).removeprefix("torch.")]
        for node in graph.operators:  # operands of a convolution have one type
            if node.target == "aten.conv2d.default":
                assert {graph[operand].dtype for operand in node.operands} == {str(dtype).removeprefix("torch.")}


def test_without_autocast_nothing_is_patched() -> None:
    before = torch._C._nn.upsample_bilinear2d
    with autocast_composites(_DEVICE):
        assert torch._C._nn.upsample_bilinear2d is before
    with torch.autocast("cuda", torch.bfloat16), autocast_composites(_DEVICE):
        assert torch._C._nn.upsample_bilinear2d is not before
    with torch.autocast("cpu", torch.bfloat16), autocast_composites(torch.device("cpu")):
        assert torch._C._nn.upsample_bilinear2d is before  # the CPU interpolates in half precision
    assert torch._C._nn.upsample_bilinear2d is before
