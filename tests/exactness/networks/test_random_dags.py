"""Random networks under random tilings are exact, inside their projected bytes, at their planned FLOPs."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import sft
from tests.helpers.dag_nets import Dag, DagNet
from tests.helpers.dags import dags, tilings
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Dag, sft.Options]:
    dag = draw(dags(measuring=True))
    return dag, draw(tilings(dag))


@at_most(10, one_in=2)
@given(case=_cases())
def test_any_dag_any_tiling(case: tuple[Dag, sft.Options]) -> None:
    dag, options = case
    report = assert_exact(DagNet(dag), dag.image(), options=options, input_grad=dag.input_grad)
    note(str(report.plan))
