"""The meter counts exactly the allocations of a block: all sizes are odd, to detect any rounding."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sft.common.errors import InputError, SftError
from sft.common.memory import measure_peak
from sft.common.torch_internals import FakeTensorMode

FLOAT = 4  # bytes


def test_counts_each_output_and_each_release() -> None:
    with measure_peak() as peak:
        first = torch.empty(37, 11)
        assert (peak.current_bytes, peak.num_bytes) == (37 * 11 * FLOAT, 37 * 11 * FLOAT)
        second = first + 1
        assert peak.current_bytes == 2 * 37 * 11 * FLOAT
        del first
        assert peak.current_bytes == 37 * 11 * FLOAT
        third = torch.empty(13, dtype=torch.uint8)
        assert peak.current_bytes == 37 * 11 * FLOAT + 13
        del second, third
        assert peak.current_bytes == 0
    assert peak.num_bytes == 2 * 37 * 11 * FLOAT


def test_reading_follows_releases_after_the_block() -> None:
    with measure_peak() as peak:
        ones = torch.ones(101)
    assert peak.current_bytes == 101 * FLOAT
    later = ones + 1  # not in the block
    assert peak.current_bytes == peak.num_bytes == 101 * FLOAT
    del ones, later
    assert peak.current_bytes == 0
    assert peak.num_bytes == 101 * FLOAT


def test_empty_block_and_empty_tensors_count_nothing() -> None:
    with measure_peak() as peak:
        pass
    assert peak.num_bytes == 0
    with measure_peak() as peak:
        empty = torch.empty(0, 5) + 1
    assert (peak.num_bytes, peak.current_bytes) == (0, 0)
    assert empty.numel() == 0


@pytest.mark.usefixtures("frozen_objects")
def test_view_counts_no_bytes_but_keeps_its_base() -> None:
    with measure_peak() as peak:
        base = torch.empty(7, 3, 5)
        view = base[1:, :, 2].transpose(0, 1)
        assert peak.num_bytes == 105 * FLOAT
        del base
        gc.collect()
        assert peak.current_bytes == 105 * FLOAT
        del view
        assert peak.current_bytes == 0


def test_storage_counts_whole_when_only_a_view_is_returned() -> None:
    with measure_peak() as peak:
        row = torch.empty(19, 3)[4]
        assert row.numel() == 3
        assert peak.current_bytes == 19 * 3 * FLOAT


def test_operator_with_several_outputs() -> None:
    older = torch.randn(9, 7)
    with measure_peak() as peak:
        values, indices = older.max(dim=0)
        pieces = older.split(2)
        copies = torch._foreach_add([older, values], 1.0)
    assert peak.num_bytes == 7 * FLOAT + 7 * 8 + (63 + 7) * FLOAT
    assert len(pieces) == 5
    assert len(copies) == 2
    assert indices.shape == (7,)


def test_older_tensors_do_not_count() -> None:
    older = torch.zeros(53)
    parameter = nn.Parameter(torch.zeros(5))
    with measure_peak() as peak:
        older.add_(1).mul_(2)
        older[3:].relu_()
        alias = older.view(53, 1).expand(53, 1000)
        torch._foreach_add_([older], 1.0)
        _ = parameter.detach()
        torch.from_numpy(np.zeros(999))
        assert peak.num_bytes == 0
        del older, alias
    assert (peak.num_bytes, peak.current_bytes) == (0, 0)


def test_out_variant_into_older_tensor_counts_nothing_unless_it_grows() -> None:
    operand = torch.ones(31)
    fits, grows = torch.empty(31), torch.empty(0)
    with measure_peak() as peak:
        torch.add(operand, 1, out=fits)
        assert peak.num_bytes == 0
        torch.add(operand, 1, out=grows)
        assert peak.current_bytes == 31 * FLOAT
        del grows
        assert peak.current_bytes == 0


def test_out_variant_into_new_tensor() -> None:
    operand = torch.ones(31)
    with measure_peak() as peak:
        out = torch.empty(31)
        torch.mul(operand, 2, out=out)
        torch.mul(operand, 3, out=out)
        assert peak.num_bytes == peak.current_bytes == 31 * FLOAT


def test_resize_counts_the_new_size() -> None:
    older = torch.empty(10)
    with measure_peak() as peak:
        made = torch.empty(3)
        made.resize_(17)
        assert peak.current_bytes == 17 * FLOAT
        made.resize_as_(torch.empty(29))  # the template is freed
        assert peak.current_bytes == 29 * FLOAT
        assert peak.num_bytes == (17 + 29 - 17) * FLOAT + 29 * FLOAT
        older.resize_(13)
        assert peak.current_bytes == (29 + 3) * FLOAT
        older.resize_(7)  # PyTorch keeps the storage
        assert peak.current_bytes == (29 + 3) * FLOAT
        del made, older
        assert peak.current_bytes == 0


@pytest.mark.usefixtures("frozen_objects")
def test_a_tensor_of_autograd_alone_counts() -> None:
    weight = torch.ones(41, requires_grad=True)
    with measure_peak() as peak:
        saved = weight.exp()  # its backward needs its own result
        loss = saved.sum()
        del saved
        gc.collect()
        assert peak.current_bytes == 41 * FLOAT + FLOAT
        del loss
        assert peak.current_bytes == 0


def test_backward_is_metered_to_the_byte() -> None:
    weight = torch.ones(41, requires_grad=True)
    with measure_peak() as peak:
        loss = weight.exp().exp().sum()
        assert peak.current_bytes == 2 * 41 * FLOAT + FLOAT
        loss.backward()
        # the seed gradient and the sum's expanded gradient add one float; each exp adds a gradient while both its
        # saved result and the incoming gradient are alive
        assert peak.current_bytes == FLOAT + 41 * FLOAT  # the loss and weight.grad
    assert weight.grad is not None
    assert peak.num_bytes == (2 * 41 + 1) * FLOAT + FLOAT + 41 * FLOAT
    weight.grad = None
    assert peak.current_bytes == FLOAT


def test_checkpointed_backward_is_metered() -> None:
    weight = torch.ones(1001, requires_grad=True)

    def chain(value: Tensor) -> Tensor:
        for _ in range(8):
            value = value.sin()
        return value

    def run(checkpointed: bool) -> int:
        with measure_peak() as peak:
            out = checkpoint(chain, weight, use_reentrant=False) if checkpointed else chain(weight)
            assert isinstance(out, Tensor)
            forward_bytes = peak.current_bytes
            out.sum().backward()
        weight.grad = None
        return forward_bytes

    # sin saves its input: 7 inner values of the chain and the result are alive
    assert run(checkpointed=False) == 8 * 1001 * FLOAT
    assert run(checkpointed=True) == 1001 * FLOAT


def test_convolution_step_counts_gradients() -> None:
    model = nn.Conv2d(3, 5, 3)
    image = torch.randn(1, 3, 11, 13)
    with measure_peak() as peak:
        loss = model(image).sum()
        loss.backward()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert peak.current_bytes == (num_parameters + 1) * FLOAT


def test_optimizer_state_counts() -> None:
    parameter = nn.Parameter(torch.ones(67))
    parameter.grad = torch.ones(67)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    with measure_peak() as peak:
        optimizer.step()
    assert peak.current_bytes == 67 * FLOAT


def test_nested_blocks_each_count_from_their_start() -> None:
    with measure_peak() as outer:
        first = torch.empty(11)
        with measure_peak() as inner:
            second = torch.empty(7)
            first.add_(1)
            del second
        assert (inner.num_bytes, inner.current_bytes) == (7 * FLOAT, 0)
        third = torch.empty(5)
        assert inner.num_bytes == 7 * FLOAT
    assert outer.num_bytes == 18 * FLOAT
    assert outer.current_bytes == 16 * FLOAT
    del first, third
    assert outer.current_bytes == 0


def test_error_inside_the_block_passes_and_stops_the_meter() -> None:
    with pytest.raises(ZeroDivisionError), measure_peak() as peak:
        lost = torch.empty(23)
        raise ZeroDivisionError
    after = torch.empty(1000)
    assert peak.num_bytes == peak.current_bytes == 23 * FLOAT
    del lost, after
    assert peak.current_bytes == 0


def test_failing_operator_counts_nothing() -> None:
    with measure_peak() as peak, pytest.raises(RuntimeError, match="must match"):
        torch.ones(3) + torch.ones(5)
    assert peak.num_bytes == 8 * FLOAT
    assert peak.current_bytes == 0


def test_meter_keeps_no_tensor_alive() -> None:
    with measure_peak() as peak:
        torch.empty(1001)
    assert (peak.num_bytes, peak.current_bytes) == (1001 * FLOAT, 0)


def test_possible_copies_are_inspected_and_views_cost_no_time() -> None:
    base = torch.ones(6, 9)
    with torch.inference_mode(), measure_peak() as peak:  # composites arrive undecomposed
        views = base[1:].relu_(), base.t(), base.contiguous(), base.reshape(9, 6)
        assert peak.current_bytes == 0
        copies = base.t().contiguous(), base.t().reshape(6, 9)
    assert peak.num_bytes == 2 * base.numel() * FLOAT
    assert all(view.untyped_storage().data_ptr() == base.data_ptr() for view in views) and len(copies) == 2


def test_meta_and_cpu_are_metered_separately() -> None:
    with measure_peak("meta") as meta, measure_peak("cpu") as cpu:
        on_meta = torch.empty(100_000, 100_000, 3, device="meta")
        small = torch.empty(3)
    assert meta.num_bytes == 3 * 10**10 * FLOAT
    assert cpu.num_bytes == 3 * FLOAT
    assert on_meta.is_meta
    assert small.numel() == 3


def test_a_dry_run_measures_the_bytes_of_a_real_run() -> None:
    def step(model: nn.Module, image: Tensor) -> None:
        model(image).square().mean().backward()

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3, stride=2), nn.Flatten(), nn.Linear(392, 3))

    image = torch.randn(1, 3, 17, 19)
    real = make()
    with measure_peak() as measured:
        step(real, image)
    fake_mode = FakeTensorMode()
    with fake_mode:
        dry = make()
        fake_image = torch.empty(1, 3, 17, 19)
    for _ in range(2):  # the second run hits the fake mode's cache
        dry.zero_grad()
        with fake_mode, measure_peak("meta") as projected, measure_peak("cpu") as on_cpu:
            step(dry, fake_image)
        assert projected.num_bytes == measured.num_bytes
        assert projected.current_bytes == measured.current_bytes
        assert on_cpu.num_bytes == 0


def test_works_under_other_modes_and_inference_mode() -> None:
    operand = torch.ones(9, 9)
    with FlopCounterMode(display=False), measure_peak() as inside:
        _ = operand @ operand
    with measure_peak() as outside, FlopCounterMode(display=False) as flops:
        _ = operand @ operand
    with torch.inference_mode(), measure_peak() as inference:
        _ = (operand @ operand).reshape(3, 27)
    assert inside.num_bytes == outside.num_bytes == inference.num_bytes == 81 * FLOAT
    assert flops.get_total_flops() == 2 * 9**3


def test_wrapper_subclass_counts_its_inner_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(2, 5)], layout=torch.jagged)
    with measure_peak() as peak:
        doubled = nested * 2
    assert peak.num_bytes == 25 * FLOAT
    assert doubled.shape[0] == 2


def test_sparse_tensors_do_not_disturb() -> None:
    with measure_peak() as peak:
        sparse = torch.eye(5).to_sparse()
        dense = (sparse + sparse).to_dense()
    assert dense.sum() == 10
    assert peak.num_bytes >= 25 * FLOAT


def test_other_threads_do_not_count() -> None:
    made: list[Tensor] = []
    with measure_peak() as peak:
        thread = threading.Thread(target=lambda: made.append(torch.empty(77)))
        thread.start()
        thread.join()
        values = torch.empty(3)
    assert peak.num_bytes == values.numel() * FLOAT


@given(
    st.lists(st.tuples(st.sampled_from(["make", "view", "add_", "copy", "drop", "resize"]), st.integers(0, 40))),
)
def test_any_sequence_of_operations_agrees_with_a_ledger(actions: list[tuple[str, int]]) -> None:
    """Against a ledger of (storage -> bytes) recomputed from the live tensors after every action."""
    live: list[Tensor] = []
    older = torch.empty(5)
    peak_bytes = 0
    with measure_peak() as peak:
        for action, number in actions:
            chosen = live[number % len(live)] if live else older
            if action == "make":
                live.append(torch.empty(number, dtype=torch.int16))
            elif action == "view":
                live.append(chosen.view(-1)[number % (chosen.numel() + 1) :])
            elif action == "add_":
                chosen.add_(1)
            elif action == "copy":
                live.append(chosen.clone())
            elif action == "drop" and live:
                live.pop(number % len(live))
            elif action == "resize" and chosen is not older:
                chosen.resize_(number)
            del chosen
            ledger = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in live}
            grown_bytes = older.untyped_storage().nbytes() - 5 * FLOAT
            ledger[older.untyped_storage()._cdata] = grown_bytes  # an older tensor counts what it grows by
            assert peak.current_bytes == sum(ledger.values())
            peak_bytes = max(peak_bytes, peak.current_bytes)
        assert peak.num_bytes == peak_bytes


def test_reading_is_read_only_and_prints_its_numbers() -> None:
    with measure_peak() as peak:
        torch.empty(3)
    with pytest.raises(AttributeError):
        peak.device = torch.device("meta")  # type: ignore[misc]
    assert repr(peak) == "Peak(num_bytes=12, current_bytes=0, device='cpu')"


@pytest.mark.parametrize("device", ["xpu", "tpu", "", "cuda:99"])
def test_device_without_a_meter_is_refused(device: str) -> None:
    with pytest.raises(InputError, match=r"cannot measure on .*use") as caught, measure_peak(device):
        pytest.fail("the block ran")
    assert isinstance(caught.value, SftError)
