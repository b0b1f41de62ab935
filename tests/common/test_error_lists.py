"""Lists in error messages: twenty items, and a count of the others."""

from __future__ import annotations

import pickle

import pytest

from sft.common.errors import InputError, UnsupportedError, first_problems, some_names
from sft.wsi.config import DataConfig
from sft.wsi.errors import DatasetError


@pytest.mark.parametrize(("count", "last"), [(1, "p0"), (20, "p19"), (21, "and 1 more"), (3000, "and 2,980 more")])
def test_the_first_twenty_and_a_count(count: int, last: str) -> None:
    problems = [f"p{number}" for number in range(count)]
    shown = first_problems(problems)
    assert shown[:20] == problems[:20] and shown[-1] == last and len(shown) == min(count, 21)
    assert some_names(problems) == ", ".join(shown)


def test_errors_show_twenty_problems_and_keep_all() -> None:
    problems = [f"p{number}" for number in range(3000)]
    for error in (DatasetError("t.csv", problems), UnsupportedError(problems)):
        lines = str(error).splitlines()
        assert len(lines) == 22 and lines[-1] == "  - and 2,980 more" and error.problems == tuple(problems)
        copied = pickle.loads(pickle.dumps(error))
        assert str(copied) == str(error) and copied.problems == error.problems
    assert "t.csv: 3,000 problems" in str(DatasetError("t.csv", problems))


def test_a_configuration_with_few_problems_shows_them_all() -> None:
    with pytest.raises(InputError, match=r"data\.mpp 0.*; .*data\.num_folds 1"):
        DataConfig(csv="t.csv", mpp=0, num_folds=1)  # type: ignore[arg-type]  # a text does here
