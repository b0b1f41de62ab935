"""Errors survive pickling, so worker processes can deliver them."""

from __future__ import annotations

import pickle

import pytest

from sft.common.errors import BudgetError, InputError, RankError, SftError, UnsupportedError


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("too small; raise the budget", needed_bytes=1234),
        UnsupportedError(["a.b: fft: no", "c: sort: no"]),
        RankError("rank 1 failed; start again", "rank 1 failed"),
        InputError("wrong"),
    ],
)
def test_errors_survive_pickling(error: SftError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
