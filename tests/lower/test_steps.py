"""Steps read the arguments of instructions: tensors, lists of tensors, constants, and the device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sft
from sft.lower.builder import ProgramBuilder
from sft.lower.program import DEVICE, Slot
from sft.lower.steps import prepared_program
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.models import TinyUNet, seeded

_SLOTS = [Slot(number, (2,), torch.float32, number) for number in range(4)]
_TENSORS = {slot.number: torch.full((2,), float(slot.number)) for slot in _SLOTS}
_CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(0, 1), st.sampled_from(["zeros", torch.float32]))
_ITEMS = st.one_of(st.sampled_from(_SLOTS), st.just(DEVICE), _CONSTANTS)
_SIZES = st.lists(st.lists(st.integers(0, 3), max_size=2).map(tuple), max_size=2).map(tuple)
_ARGUMENTS = st.one_of(_ITEMS, st.lists(_ITEMS, max_size=4).map(tuple), _SIZES)


def _resolved(value: Any) -> Any:
    """An argument as a call receives it."""
    if type(value) is Slot:
        return _TENSORS[value.number]
    if type(value) is tuple:
        return [_resolved(item) for item in value]
    return torch.device("cpu") if value is DEVICE else value


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return value is other if isinstance(value, torch.Tensor) else type(value) is type(other) and value == other


@given(arguments=st.lists(_ARGUMENTS, max_size=4), keywords=st.dictionaries(st.sampled_from("abc"), _ARGUMENTS))
def test_calls_receive_their_arguments(arguments: list[Any], keywords: dict[str, Any]) -> None:
    """Twice from the same steps."""
    calls = []

    def function(*values: Any, **named: Any) -> torch.Tensor:
        calls.append((values, named))
        return torch.zeros(2)

    builder = ProgramBuilder(torch.float32)
    ports = [builder.port("side", str(number), (2,)) for number in range(4)]
    assert ports == _SLOTS
    builder.result("out", "y", builder.call(function, *arguments, shape=(2,), dtype=torch.float32, keywords=keywords))
    program, machine = builder.finish(), TorchMachine(torch.device("cpu"))
    bindings = {port: _TENSORS[slot.number] for port, slot in program.ports.items()}
    for _ in range(2):
        machine.run(program, bindings)
    assert len(calls) == 2
    for values, named in calls:
        assert _is_same([*values], [_resolved(value) for value in arguments])
        assert named.keys() == keywords.keys() and all(_is_same(named[key], _resolved(value)) for key, value in keywords.items())


def test_an_unbound_port_is_an_error() -> None:
    builder = ProgramBuilder(torch.float32)
    x = builder.port("side", "x", (2,))
    builder.result("out", "y", builder.call(torch.neg, x, shape=(2,)))
    with pytest.raises(KeyError):
        TorchMachine(torch.device("cpu")).run(builder.finish(), {})


def test_a_model_that_has_run_is_copied_and_pickled_as_before() -> None:
    model: Any = sft.compile(seeded(TinyUNet).float(), (1, 3, 32, 32), budget="1GiB")
    x = torch.randn(1, 3, 32, 32)
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    (prepared,) = model._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in prepared.region.segments for program in segment.lowered_programs]
    assert any(program.prepared is not None for program in programs)
    assert prepared_program(programs[0]) is prepared_program(programs[0])
