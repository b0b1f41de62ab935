"""Strategy ``offload-dp``: which activations to offload, by dynamic programming.

Source: DYNPROG of Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, section 5, with two corrections (see `fluid`, which holds the
recurrence and says what it is optimal for). All stages are kept; each one's input and saved values leave or stay. The best few offload sets
of the fluid model become schedules with whole copies, and the simulator picks the fastest.

Complexity: labels are triples of slots, so O(n S^3) in the worst case for S slots; after dropping dominated ones, a few hundred at a cut.
"""

from __future__ import annotations

from sft.plan.chain.chain import StageChain
from sft.plan.chain.fluid import FluidPath, search_paths
from sft.plan.chain.link import HostLink
from sft.plan.chain.offloading import best_offload, kept_edge, min_offload_bytes, loss_edge, plain_peak_bytes
from sft.plan.chain.schedule import Schedule
from sft.plan.chain.solver import budget_error

__all__ = ["fluid_optima", "solve_offload_dp"]

_NUM_SLOTS = 500
_NUM_PATHS = 12


def fluid_optima(
    chain: StageChain,
    *,
    budget_bytes: int,
    link: HostLink,
    host_budget_bytes: int | None = None,
    slot_bytes: int | None = None,
    num_paths: int = 1,
) -> list[FluidPath]:
    """The fastest offload sets of the fluid model, best first; empty if none fits.

    Args:
        chain: the chain.
        budget_bytes: most bytes on the device, resident weights included.
        link: the link.
        host_budget_bytes: most bytes on the host.
        slot_bytes: what memory is counted in; by default a 500th of the budget.
        num_paths: how many.
    """
    n, room = chain.num_stages, budget_bytes - chain.resident_bytes
    if room < chain.input_bytes:
        return []
    edges = [*(kept_edge(chain, i) for i in range(1, n + 1)), loss_edge(chain, n, n + 1)]
    return search_paths(
        edges,
        start=0,
        end=n + 1,
        start_bytes=chain.input_bytes,
        budget_bytes=room,
        link=link,
        host_budget_bytes=host_budget_bytes,
        slot_bytes=slot_bytes or max(1, room // _NUM_SLOTS),
        num_paths=num_paths,
    )


def solve_offload_dp(
    chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
) -> Schedule:
    """The fastest schedule found that offloads and never recomputes.

    Raises:
        BudgetError: it does not fit even if everything leaves, or the host has no room.
    """
    link = link or HostLink()
    if plain_peak_bytes(chain) <= budget_bytes:
        return best_offload(chain, "offload-dp", [()], budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link)
    if min_offload_bytes(chain) > budget_bytes:
        raise budget_error("offload-dp", budget_bytes, min_offload_bytes(chain))
    paths = fluid_optima(chain, budget_bytes=budget_bytes, link=link, host_budget_bytes=host_budget_bytes, num_paths=_NUM_PATHS)
    sets: list[tuple[int, ...]] = [tuple(i for i, step in enumerate(path.steps, start=1) if step.leaves) for path in paths]
    sets.append(tuple(range(1, chain.num_stages + 1)))  # fits whenever anything does: rounding may hide that
    return best_offload(chain, "offload-dp", sets, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link)
