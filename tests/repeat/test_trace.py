"""Joint traces of blocks: writes in place, constants, and a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import OpOverload, op_schema
from sft.repeat.trace import BlockTrace, TensorMeta, trace_block


class _WritesInPlace(nn.Module):
    """A block that writes in place through a view and into a buffer, and multiplies by a Python constant."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.tensor(0.5)
        y.view(-1, 4)[:, :2].mul_(3)
        self.count.add_(1)
        return torch.sin(y).add_(x)


def _trace(block: nn.Module, shape: tuple[int, ...] = (3, 2, 4)) -> BlockTrace:
    params = {name: TensorMeta.of(parameter) for name, parameter in block.named_parameters()}
    buffers = {name: TensorMeta.of(buffer) for name, buffer in block.named_buffers()}
    return trace_block(block, TensorMeta(shape=shape, dtype=torch.float32), params, buffers, device=torch.device("cpu"), autocast=None)


def test_a_trace_writes_no_value_in_place() -> None:
    trace = _trace(_WritesInPlace())
    calls = (*trace.calls.forward, *trace.calls.backward)
    functions = [call.function for call in calls]
    assert not [function for function in functions if isinstance(function, OpOverload) and op_schema(function).is_mutable]
    indices = [result.index for call in calls for result in call.results if result is not None]
    assert len(set(indices)) == len(indices)
    assert len(trace.next_values) == 1 and len(trace.grads) == 3 and None not in trace.grads
    assert [value.item() for value in trace.calls.constants.values()] == [0.5]


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_blocks_that_write_in_place_have_the_gradients_of_eager_pytorch(num_blocks: int) -> None:
    torch.manual_seed(0)
    blocks = [_WritesInPlace() for _ in range(num_blocks)]
    torch.manual_seed(0)
    net, x = sft.nn.Repeat(_WritesInPlace, num_blocks), torch.randn(3, 2, 4)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, result = nn.Sequential(*blocks)(inputs[0]), net(inputs[1])
    torch.testing.assert_close(result, expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name, parameter in net.block.named_parameters():
        stacked = torch.stack([block.get_parameter(name).grad for block in blocks])  # type: ignore[misc]  # each has one
        torch.testing.assert_close(parameter.grad, stacked)
    assert net.block.get_buffer("count").tolist() == [1.0] * num_blocks


def test_an_attribute_that_is_no_buffer_is_refused() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = [torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale[0]

    with pytest.raises(sft.UnsupportedError, match="registered parameters and buffers"):
        _trace(Loose())
