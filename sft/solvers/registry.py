"""Solvers by name.

| name | recomputes | offloads | source |
| --- | --- | --- | --- |
| ``none`` | | | plain training |
| ``sqrt`` | once | | Chen et al. 2016 |
| ``revolve`` | often | | Griewank and Walther 2000 |
| ``bisect`` | often | | Siskind and Pearlmutter 2018; the Scorch thesis |
| ``optimal`` | often | | Butt's thesis; Beaumont, Herrmann et al. 2019 |
| ``acg`` | once | | Feng and Huang 2021 |
| ``offload-greedy`` | | yes | Beaumont, Eyraud-Dubois and Shilova 2020 |
| ``offload-dp`` | | yes | the same |
| ``vdnn`` | | yes | Rhu et al. 2016; Shriram et al. 2019 |
| ``auto`` | often, and tiles | yes, and streams | all of these |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sft.common.errors import InputError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.joint import RESTRICTED_SOLVERS, solve_joint
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.solver import Solver, fastest_fitting

__all__ = ["SOLVERS", "get_solver"]


def _solve_none(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Plain training: all values are kept."""
    return fastest_fitting(chain, "none", _plain_operations, budget_bytes, link)


def _plain_operations(chain: StageChain) -> list[Callable[[], tuple[Operation, ...]]]:
    return [partial(reversal, chain, keep_all)]


SOLVERS: dict[str, Solver] = {"none": _solve_none, **RESTRICTED_SOLVERS, "auto": solve_joint}


def get_solver(name: str) -> Solver:
    """Return the solver of that name.

    Raises:
        InputError: no solver has that name.
    """
    if name not in SOLVERS:
        raise InputError(f"no strategy is called {name!r}; choose one of {', '.join(SOLVERS)}")
    return SOLVERS[name]
