"""What the zoo makes of its outcomes; the zoo itself runs elsewhere (`make test-zoo`)."""

from __future__ import annotations

import time

import pytest
from harness.workers import WorkerError, call_in_process

from tests.zoo.blockers import blocker_of, blockers
from tests.zoo.models import CASES
from tests.zoo.outcome import Outcome, TilingOutcome


def _refused(name: str, *operators: str) -> Outcome:
    problems = tuple(f"layer.{i}: {operator} has no exact rule; replace it" for i, operator in enumerate(operators))
    tiling = TilingOutcome(tiling="strips", kind="refused", problems=problems)
    return Outcome(package="timm", name=name, shape=(1, 3, 8, 8), kind="refused", tilings=(tiling,))


def test_labels_are_unique() -> None:
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)


def test_what_helps_most_comes_first() -> None:
    outcomes = [
        _refused("a", "pad", "pad"),
        _refused("b", "pad", "chunk"),
        _refused("c", "chunk", "roll"),
        Outcome(package="timm", name="d", shape=(1, 3, 8, 8), kind="exact"),
    ]
    found = [(blocker.reason, blocker.models, blocker.num_alone, blocker.num_unblocked) for blocker in blockers(outcomes)]
    assert found == [
        ("pad", ("timm/a", "timm/b"), 1, 1),
        ("chunk", ("timm/b", "timm/c"), 0, 2),
        ("roll", ("timm/c",), 0, 3),
    ]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("Net: torch.export cannot follow the model (TypeError: unhashable); control flow must move out", "torch.export: TypeError"),
        ("input_shape (1, 1, 8, 8, 8): 5 extents, expected 4, (N, C, H, W)", "an input of 5 extents, expected 4"),
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
