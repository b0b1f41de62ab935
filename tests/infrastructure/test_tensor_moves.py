"""Moves of the tensors of kernel tests to a GPU: the traversal with a counting move, and copies of storages on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sft.kernels.resize.tile_axis import BandTable
from tests.helpers.tensor_moves import StorageMoves, map_tensors


@dataclass(frozen=True, slots=True)
class _Rows:
    table: BandTable
    count: int


class _Pair(NamedTuple):
    first: Tensor
    second: int


def _table() -> BandTable:
    return BandTable(first=torch.zeros(2), count=torch.ones(2), weights=torch.ones(2, 1))


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: torch.ones(1), 1),
        (lambda: [(torch.ones(1), torch.zeros(1), True), (torch.ones(1), torch.zeros(1), False)], 4),
        (lambda: {"state": {"mean": torch.ones(1), "step": 3}, "rows": (4, 5)}, 1),
        (_table, 3),
        (lambda: {"moves": [_Rows(_table(), 2)], "block": None}, 3),
        (lambda: _Pair(torch.ones(1), 2), 1),
    ],
    ids=["tensor", "list of tuples", "dict of dicts", "frozen dataclass", "all of them", "named tuple"],
)
def test_nested_tensors_are_moved(make: Any, count: int) -> None:
    moved: list[Tensor] = []
    visited: list[Tensor] = []

    def move(tensor: Tensor) -> Tensor:
        moved.append(tensor + 1)
        return moved[-1]

    def visit(tensor: Tensor) -> Tensor:
        visited.append(tensor)
        return tensor

    value = make()
    result = map_tensors(value, move)
    assert type(result) is type(value) and len(moved) == count
    assert map_tensors(result, visit) is result
    assert [id(tensor) for tensor in visited] == [id(tensor) for tensor in moved]


def test_values_without_tensors_are_the_same_objects() -> None:
    value = {"block": (4, 4), "table": [1, None], "shape": torch.Size([2, 3])}
    assert map_tensors(value, lambda tensor: tensor + 1) is value


def test_views_of_a_storage_share_its_copy() -> None:
    buffer, moves = torch.arange(12.0), StorageMoves("cpu")
    views: Any = map_tensors([buffer[2:6], (buffer[4:8], buffer.view(3, 4)[:, 1])], moves.move)
    views[0][3] = -1
    assert views[1][0][1] == -1 and torch.equal(views[1][1], torch.tensor([1.0, -1, 9])) and buffer[5] == 5
    moves.copy_back()
    assert buffer[5] == -1
