"""All strategies by name.

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

from sft.errors import InputError
from sft.plan.chain import joint
from sft.plan.chain.chain import Chain
from sft.plan.chain.link import Link
from sft.plan.chain.reversal import keep_all, reversal
from sft.plan.chain.schedule import Operation, Schedule
from sft.plan.chain.solver import Solver, fastest_that_fits

__all__ = ["STRATEGIES", "strategy"]


def _solve_none(chain: Chain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: Link | None = None) -> Schedule:
    """Plain training: everything is kept."""
    return fastest_that_fits(chain, "none", _plain, budget_bytes, link)


def _plain(chain: Chain) -> list[Callable[[], tuple[Operation, ...]]]:
    return [partial(reversal, chain, keep_all)]


STRATEGIES: dict[str, Solver] = {"none": _solve_none, **joint.RESTRICTED, "auto": joint.solve}


def strategy(name: str) -> Solver:
    """The solver of that name.

    Raises:
        InputError: there is none.
    """
    if name not in STRATEGIES:
        raise InputError(f"there is no strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
