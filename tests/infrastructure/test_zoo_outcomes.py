"""Outcomes of the zoo in its report; the zoo itself runs with `make test-zoo`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from harness.workers import WorkerError, call_in_process

from tests.zoo.blockers import blocker_of, blockers
from tests.zoo.models import CASES
from tests.zoo.outcome import Outcome, TilingOutcome
from tests.zoo.suite import known_outcomes


def _refused(name: str, *operators: str) -> Outcome:
    problems = tuple(f"layer.{i}: {operator} has no exact rule; replace it" for i, operator in enumerate(operators))
    tiling = TilingOutcome(tiling="strips", kind="refused", problems=problems)
    return Outcome(package="timm", name=name, shape=(1, 3, 8, 8), kind="refused", tilings=(tiling,))


def test_labels_are_unique() -> None:
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)


def test_reasons_are_in_greedy_order() -> None:
    outcomes = [
        _refused("a", "pad", "pad"),
        _refused("b", "pad", "chunk"),
        _refused("c", "chunk", "roll"),
        Outcome(package="timm", name="d", shape=(1, 3, 8, 8), kind="exact"),
    ]
    rows = [(blocker.reason, blocker.models, blocker.num_alone, blocker.num_unblocked) for blocker in blockers(outcomes)]
    assert rows == [
        ("pad", ("timm/a", "timm/b"), 1, 1),
        ("chunk", ("timm/b", "timm/c"), 0, 2),
        ("roll", ("timm/c",), 0, 3),
    ]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("Net: torch.export cannot follow the model (TypeError: unhashable); control flow must move out", "torch.export: TypeError"),
        (
            "gate: mul: operand mean_3 of shape (2, 16, 1, s77) varies along the image; make",
            "mean, whole, meets a strip",
        ),
    ],
)
def test_reasons_have_no_names_and_sizes(problem: str, reason: str) -> None:
    assert blocker_of(problem) == reason


def test_a_worker_that_takes_too_long_is_killed() -> None:
    with pytest.raises(WorkerError, match=r"no answer after 0\.5 s") as raised:
        call_in_process(time.sleep, 60, timeout_seconds=0.5)
    assert raised.value.kind == "timed out"


def test_an_interrupted_suite_continues(tmp_path: Path) -> None:
    exact = TilingOutcome(tiling="strips", kind="exact", num_segments=2, left_strips={"mean": 1})
    outcomes = [
        Outcome(package="timm", name="a", shape=(1, 3, 8, 8), kind="exact", tilings=(exact,), commit="1234567"),
        _refused("b", "pad"),
    ]
    file = tmp_path / "zoo.json"
    file.write_text(json.dumps({"results": [outcome.to_json() for outcome in outcomes]}))
    assert known_outcomes(file, ()) == {"timm/a": outcomes[0], "timm/b": outcomes[1]}
    assert known_outcomes(file, ("refused",)) == {"timm/a": outcomes[0]}
    assert known_outcomes(None, ()) == {}
