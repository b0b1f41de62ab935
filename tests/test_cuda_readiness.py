"""What programs must not hold, since only CUDA's operators mind it: no GPU is needed to see that it is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import sft
from sft.bands.link import _together
from sft.lower import traces
from tests.helpers.models import seeded

_SHAPE = (1, 3, 24, 20)


class _Network(nn.Sequential):
    def __init__(self) -> None:
        upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), upsample, nn.Conv2d(4, 2, 3))


def _calls(model: nn.Module, name: str, **options: Any) -> list[tuple[Any, ...]]:
    """The arguments of all calls of an operator in the programs of a step."""
    net = sft.compile(model, _SHAPE, options=sft.Options(**options))
    net(torch.randn(_SHAPE, dtype=torch.float64)).sum().backward()
    found = []
    for segment in next(iter(net._sft_engine.preparation.ready.values())).region.segments:
        for program in segment.lowered:
            found += [each.arguments for each in program.instructions if name in str(each.function)]
    return found


def test_statistics_that_were_not_saved_are_empty_tensors() -> None:
    """CUDA's derivative of a norm with running statistics asserts that these are tensors; the CPU takes None for them."""
    found = _calls(seeded(_Network).eval(), "native_batch_norm_backward", tile=(8, None))
    assert found
    for arguments in found:
        assert all(arguments[place].shape == (0,) for place in (5, 6))


def test_interpolation_is_given_no_scale_of_axes_that_are_done() -> None:
    """Rows are gathered first; CUDA would take a scale for theirs once more, and read row r of the result at r / 2."""
    for name in ("upsample_bilinear2d.", "upsample_bilinear2d_backward."):
        found = _calls(seeded(_Network), name, tile=(8, None))
        assert found
        for arguments in found:
            assert arguments[-2:] == (None, 2.0)


def test_messages_of_one_group_are_posted_together() -> None:
    """NCCL's groups, as they are made here, take no device."""

    class Group:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def _start_coalescing(self) -> None:
            self.calls.append("start")

        def _end_coalescing(self) -> str:
            self.calls.append("end")
            return "work"

    group = Group()
    with _together(group, torch.device("cuda")) as batch:
        assert group.calls == ["start"]
    assert group.calls == ["start", "end"]
    assert batch.work == "work"


def test_attention_is_traced_into_calls_that_gpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces run on fake tensors of the CPU, where attention is a call that no other device has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shapes = [(1, 2, 5, 4)] * 3
    trace = traces._trace(functional.scaled_dot_product_attention, shapes, [torch.float32] * 3, [True] * 3)
    names = [str(call.function) for call in (*trace.forward, *trace.backward)]
    assert any("bmm" in name for name in names)
    assert not any("cpu" in name or "attention" in name for name in names)
