"""World of the environment: numbers of torchrun, and invalid ones."""

from __future__ import annotations

import pytest
import torch

from sft.api.memory_limits import automatic_budget
from sft.common.errors import InputError
from sft.planner.options import Options
from sft.wsi.run.world import World
from tests.helpers.wsi import run_wsi as main

_NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for assignment in text.split():
        name, _, value = assignment.partition("=")
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("", World()),
        ("WORLD_SIZE= RANK=", World()),
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", World(num_ranks=4, rank=3, local_rank=1, num_local=2)),
        ("WORLD_SIZE=2 RANK=1", World(num_ranks=2, rank=1, local_rank=1, num_local=2)),
    ],
)
def test_the_world_is_that_of_torchrun(text: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, text)
    assert World.here() == world


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RANK=x", "the environment variable RANK is 'x': set it to an integer of at least 0"),
        ("WORLD_SIZE=1.5", "WORLD_SIZE is '1.5': set it to an integer of at least 1"),
        ("WORLD_SIZE=0", "WORLD_SIZE is '0'"),
        ("RANK=-1", "RANK is '-1'"),
        ("LOCAL_RANK=one", "LOCAL_RANK is 'one'"),
        ("LOCAL_WORLD_SIZE=-2", "LOCAL_WORLD_SIZE is '-2'"),
        ("RANK=5 WORLD_SIZE=2", "RANK 5, WORLD_SIZE 2, LOCAL_RANK 5 and LOCAL_WORLD_SIZE 2 contradict each other"),
        ("RANK=3", "contradict each other: start all ranks with torchrun"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1", "contradict each other"),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2", "contradict each other"),
    ],
)
def test_other_numbers_are_an_error_on_all_ranks(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _set(monkeypatch, text)
    with pytest.raises(InputError, match=words):
        World.here()
    assert main(["slide-info", "none.svs"]) == 1
    assert words in capsys.readouterr().err


def test_a_number_of_local_ranks_that_is_none_is_an_error_of_budgets_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, "LOCAL_WORLD_SIZE=x")
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE is 'x'"):
        automatic_budget(torch.device("cpu"), Options())
