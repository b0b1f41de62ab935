"""The benchmark of a call's host time reports its rounds in turns."""

from __future__ import annotations

import call_overhead


def test_rows_have_the_median_and_the_bounds_of_each_checkout() -> None:
    results = {"before": [{"forward call": 2.0}, {"forward call": 4.0}, {"forward call": 3.0}], "after": [{"forward call": 1.0}]}
    assert call_overhead.rows(results) == [
        ["forward call", "before", "3.00", "2.00", "4.00"],
        ["forward call", "after", "1.00", "1.00", "1.00"],
    ]


def test_replays_of_all_kinds_of_calls_are_timed() -> None:
    measured = call_overhead.measure(num_calls=2)
    calls = ["forward call", "backward call", "inference call"]
    assert sorted(measured) == sorted([*calls, *(f"{call}, until its replay" for call in calls)])
    assert all(0 < measured[f"{call}, until its replay"] < measured[call] for call in calls)
