"""Row gathers equal index_select, and their adjoint index_add, in every memory layout of a strip."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import sft
from sft.lower.row_gather import RowGather
from sft.torch_runtime.cuda_graphs import recordable_programs
from sft.torch_runtime.profiling import program_hash
from tests.helpers.models import seeded


@given(
    index=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    dim=st.sampled_from([2, 3, -1]),
    channels=st.sampled_from([1, 3]),
    is_last=st.booleans(),
)
def test_a_gather_equals_index_select_and_its_adjoint_index_add(index: list[int], dim: int, channels: int, is_last: bool) -> None:
    gather = RowGather.of(index)
    assert [run.first + run.step * at for run in gather.runs for at in range(run.count)] == index
    assert gather.is_identity(6) == (index == list(range(6)))
    value = torch.randn(2, channels, 6, 6, dtype=torch.float64)
    value = value.to(memory_format=torch.channels_last) if is_last else value
    dim %= 4
    made = gather.gather(value, dim)
    assert torch.equal(made, value.index_select(dim, torch.tensor(index)))
    assert made.is_contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
    grad = torch.randn_like(made)
    back = gather.adjoint(grad, dim, 6)
    torch.testing.assert_close(back, torch.zeros_like(value).index_add_(dim, torch.tensor(index), grad), rtol=1e-14, atol=1e-14)
    assert back.is_contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def test_programs_with_paddings_have_a_name_and_upload_nothing() -> None:
    """So their times are cached, and CUDA graphs can record them."""
    model = seeded(lambda: torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    net: Any = sft.compile(model, (1, 3, 64, 24), budget="1GiB", options=sft.Options(tile=(4, None)))
    net(torch.randn(1, 3, 64, 24, dtype=torch.float64)).sum().backward()
    (ready,) = net._sft_engine.plan_cache.prepared.values()
    programs = recordable_programs(ready.region, training=True)
    assert programs and all(program_hash(program) for program in programs)
    gathers = [each.function for program in programs for each in program.instructions if isinstance(_owner(each.function), RowGather)]
    assert gathers


def _owner(function: object) -> object:
    return getattr(function, "__self__", None)
