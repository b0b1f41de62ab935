"""Suffix peaks of one program, against a direct count of each suffix's storages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sft.analysis.passes.pipeline import run_passes
from sft.lower.program import Instruction
from sft.planner.cost.strip_memory import suffix_peaks
from sft.planner.projection import plain_programs
from tests.helpers.dag_nets import Dag, DagNet
from tests.helpers.dags import dags
from tests.helpers.examples import at_most
from tests.helpers.problems import problem_of


def _peak(instructions: Sequence[Instruction], inside: frozenset[str]) -> int:
    """Peak bytes of the storages that these operators make, at their own instructions."""
    own: dict[int, int] = {}
    now = most = 0
    for instruction in instructions:
        made = [out for out in instruction.outputs if out is not None and out.root == out.number]
        if instruction.owner in inside:
            own |= {out.number: out.num_bytes for out in made}
            now += sum(out.num_bytes for out in made)
            most = max(most, now)
        now -= sum(own.pop(number, 0) for number in instruction.frees)
    return most


@at_most(5, one_in=4)
@given(dag=dags(), training=st.booleans(), data=st.data())
def test_any_suffix_of_any_network(dag: Dag, training: bool, data: st.DataObject) -> None:
    shape = tuple(dag.image().shape)
    assert len(shape) == 4
    problem = problem_of(DagNet(dag).float(), shape, training=training, passes=run_passes)
    order = problem.sized.operators
    cuts = data.draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=6))
    listed = [instruction for program in plain_programs(problem) for instruction in program.instructions]
    peaks = suffix_peaks(listed, {name: place for place, name in enumerate(order)}, cuts)
    np.testing.assert_array_equal(peaks, [_peak(listed, frozenset(order[cut:])) for cut in cuts])


def test_an_empty_program_has_no_bytes() -> None:
    np.testing.assert_array_equal(suffix_peaks([], {}, [0, 0]), [0.0, 0.0])
