"""Numbers of published planners next to those of our solvers on the same networks. No GPU: bytes are counted on meta tensors, and times
come from a roofline model.

1. Feng and Huang, CVPR 2021, Table 2: peak memory of a step, plain and with their checkpoints. Ours runs the step of torchvision's
   networks on meta tensors, with `acg`'s checkpoints, and meters it.
2. Butt's thesis, section 4.1: recomputation against memory on equal layers, and section 4.2: the solver's time on DenseNet-121.
3. Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, section 6: offloading schedules against their lower bound.
4. All strategies on the same chains: the gain of joint decisions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from harness.butt import algorithm_3_4
from harness.networks import Network, Roofline, trace
from harness.report import Table, add_common_arguments, environment, mib, result_stem, write_results
from rich.console import Console
from rich.progress import track
from torch import nn

import sft
from sft.api.pareto import PlanningSession
from sft.common.errors import BudgetError
from sft.common.model_zoo import ModelName
from sft.solvers import acg, offloading, optimal
from sft.solvers.chain import HostLink, Stage, StageChain
from sft.solvers.lower_bounds import offload_bound_seconds
from sft.solvers.offloading import min_offload_bytes, plain_peak_bytes
from sft.solvers.registry import SOLVERS, get_solver
from sft.solvers.simulate import simulate

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of Feng and Huang's Table 2, memory in MiB."""

    name: str
    batch: int
    plain_mib: int
    best_mib: int
    size: int = 224


#: NASNet, AmoebaNet and DARTS are left out: torchvision has none of them.
TABLE_2 = (
    Published(name="alexnet", batch=1024, plain_mib=4955, best_mib=3287),
    Published(name="vgg11", batch=64, plain_mib=3577, best_mib=2781),
    Published(name="vgg13", batch=64, plain_mib=5136, best_mib=3565),
    Published(name="vgg16", batch=64, plain_mib=5136, best_mib=3565),
    Published(name="vgg19", batch=64, plain_mib=5189, best_mib=3565),
    Published(name="resnet18", batch=256, plain_mib=5635, best_mib=3677),
    Published(name="resnet34", batch=128, plain_mib=4079, best_mib=1838),
    Published(name="resnet50", batch=64, plain_mib=5323, best_mib=1973),
    Published(name="resnet101", batch=32, plain_mib=3934, best_mib=1024),
    Published(name="resnet152", batch=16, plain_mib=2767, best_mib=526),
    Published(name="densenet121", batch=32, plain_mib=4027, best_mib=898),
    Published(name="densenet161", batch=16, plain_mib=3751, best_mib=666),
    Published(name="densenet169", batch=32, plain_mib=4862, best_mib=897),
    Published(name="densenet201", batch=16, plain_mib=3146, best_mib=474),
    Published(name="inception_v3", batch=32, plain_mib=3074, best_mib=881, size=300),
)

#: Networks that are planned in tiles as well: some with a published number that the first layers determine, and some others.
TILED = ("alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "resnet18", "resnet34", "resnet50", "densenet121", "inception_v3")

#: Networks of the offloading paper, batch 32.
OFFLOADED = ("resnet50", "resnet101", "resnet152", "densenet121", "densenet201", "inception_v3")

#: The link of the offloading paper: 12.2 GB/s, one way at a time.
LINK = HostLink(down_bytes_per_second=12.2e9, up_bytes_per_second=12.2e9, full_duplex=False)


def make_model(name: str) -> nn.Module:
    """A network of torchvision on the meta device, in training mode."""
    arguments = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    maker = ModelName(text=f"torchvision:{name}", place="network", options_place="make_network").factory()
    with torch.device("meta"):
        return maker.make(arguments).train()


def make_network(name: str, batch: int, size: int) -> Network:
    """A network of torchvision, traced at a size."""
    return trace(make_model(name), (batch, 3, size, size))


def tiled_row(row: Published) -> dict[str, Any]:
    """Smallest budget of our planner for the same step, and the FLOPs of that plan; plans of whole values need more."""
    if row.name not in TILED:
        return {}
    model = make_model(row.name)
    asking = PlanningSession(model, (row.batch, 3, row.size, row.size))
    try:
        least = asking.plan(1, sft.Options())
    except BudgetError as error:
        assert error.needed_bytes is not None
        least = asking.plan(error.needed_bytes, sft.Options())
    half = asking.plan(max(least.total_bytes, least.resident_bytes + row.best_mib * _MIB // 2), sft.Options())
    return {
        "tiled_gradient_bytes": sum(p.nbytes for p in model.parameters()),
        "tiled_least_bytes": least.projected_peak_bytes,
        "tiled_least_redundancy": least.redundancy,
        "tiled_half_bytes": half.projected_peak_bytes,
        "tiled_half_redundancy": half.redundancy,
    }


def table_2_row(row: Published, num_tries: int) -> dict[str, Any]:
    """Our plain peak; the peak of the best sum's checkpoints; the least peak of the best few sums'."""
    network = make_network(row.name, row.batch, row.size)
    best = acg.optimal_checkpoints(network.dag)
    others = sorted(islice(acg.solutions(network.dag), 400), key=lambda solution: solution.total_bytes)[:num_tries]
    noted = sum(network.dag.edge_bytes.values())
    return {
        "network": row.name,
        "batch": row.batch,
        "published_plain_mib": row.plain_mib,
        "plain_bytes": network.step_peak_bytes(),
        "published_best_mib": row.best_mib,
        "objective_bytes": best.total_bytes,
        "best_bytes": network.step_peak_bytes(best.checkpoints),
        "least_bytes": min(network.step_peak_bytes(solution.checkpoints) for solution in (best, *others)),
        "num_checkpoints": len(best.checkpoints),
        "num_vertices": len(network.groups),
        "input_bytes": network.dag.sizes_bytes[0],
        "index_bytes": noted,
        "largest_bytes": max(network.dag.sizes_bytes[1:]),
    }


def table_2(rows: list[dict[str, Any]]) -> Table:
    """The rows as text."""

    def cells(row: dict[str, Any]) -> list[str]:
        ours = row["least_bytes"] + row["input_bytes"]
        return [
            f"{row['network']} b{row['batch']}",
            f"{row['published_plain_mib']:,}",
            mib(row["plain_bytes"] + row["input_bytes"]),
            f"{row['published_best_mib']:,}",
            mib(row["best_bytes"] + row["input_bytes"]),
            mib(ours),
            f"{ours / _MIB / row['published_best_mib']:.2f}",
            mib(row["objective_bytes"]),
            f"{row['least_bytes'] / row['largest_bytes']:.2f}",
            *tiled_cells(row),
        ]

    def tiled_cells(row: dict[str, Any]) -> list[str]:
        if "tiled_least_bytes" not in row:
            return ["", "", "", "", ""]
        half, least = ([mib(row[f"tiled_{which}_bytes"]), f"{row[f'tiled_{which}_redundancy']:.2f}"] for which in ("half", "least"))
        return [*half, *least, mib(row["tiled_gradient_bytes"])]

    headers = (
        "network",
        "plain, published",
        "plain, ours",
        "checkpoints, published",
        "best sum, ours",
        "least peak, ours",
        "ours / published",
        "best sum itself",
        "peak / largest value",
        "ours tiled, half of the published",
        "FLOPs / plain",
        "ours tiled, least",
        "FLOPs / plain",
        "gradients in both",
    )
    return Table(title="Feng and Huang's Table 2 (MiB)", headers=headers, rows=[cells(row) for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Increase in time for a decrease in memory, as the thesis reads it from figure 4.1, approximately."""

    num_layers: int
    more: int
    less: int
    said: str


#: Section 4.1. "Just over 10" is 11.
READINGS = (
    Reading(num_layers=20, more=40, less=10, said="38 %"),
    Reading(num_layers=40, more=60, less=11, said="30 %"),
    Reading(num_layers=100, more=60, less=24, said="hardly any visible effect"),
    Reading(num_layers=100, more=60, less=10, said="40 %"),
)


def trade_off_rows() -> list[dict[str, Any]]:
    """Butt's equal layers: forward, backward, activation and gradient of 1 each; our solver and the printed algorithm."""
    stage = Stage(forward_seconds=1.0, backward_seconds=1.0, output_bytes=1, grad_bytes=1)

    def seconds(num_layers: int, memory: int) -> float:
        chain = StageChain(input_bytes=1, input_grad_bytes=1, stages=(stage,) * num_layers)
        return simulate(chain, optimal.solve_optimal(chain, budget_bytes=memory, bucket_bytes=1)).seconds

    rows = []
    for reading in READINGS:
        row: dict[str, Any] = asdict(reading)
        for end in ("more", "less"):
            memory = row[end]
            row[f"{end}_seconds"] = seconds(reading.num_layers, memory)
            row[f"{end}_printed_seconds"] = algorithm_3_4(reading.num_layers, memory, corrected=False)
            row[f"{end}_corrected_seconds"] = algorithm_3_4(reading.num_layers, memory, corrected=True)
        rows.append(row)
    return rows


def trade_off(rows: list[dict[str, Any]]) -> Table:
    """The rows as text, with the values that the thesis reads from its plot."""

    def pair(row: dict[str, Any], kind: str) -> list[str]:
        more, less = row[f"more_{kind}seconds"], row[f"less_{kind}seconds"]
        return [f"{more:.0f} to {less:.0f}", f"{less / more - 1:.1%}"]

    cells = [
        [
            str(row["num_layers"]),
            f"{row['more']} to {row['less']}",
            *pair(row, ""),
            *pair(row, "printed_"),
            pair(row, "corrected_")[1],
            row["said"],
        ]
        for row in rows
    ]
    headers = ("layers", "memory", "our time", "more", "algorithm 3.4", "more", "with two lines corrected", "read from the figure")
    return Table(title="Equal layers (Butt, section 4.1)", headers=headers, rows=cells)


def solver_rows(chain: StageChain) -> list[dict[str, Any]]:
    """The optimal solver on DenseNet-121 with buckets of 1, 5 and 25 MB, at half of plain training's memory."""
    budget = plain_peak_bytes(chain) // 2
    rows = []
    for megabytes in (1, 5, 25):
        started = time.process_time()
        schedule = optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=megabytes * 10**6)
        cpu_seconds = time.process_time() - started
        result = simulate(chain, schedule)
        rows.append(
            {
                "bucket_mb": megabytes,
                "num_stages": chain.num_stages,
                "num_buckets": budget // (megabytes * 10**6),
                "budget_bytes": budget,
                "cpu_seconds": cpu_seconds,
                "step_over_plain": result.seconds / chain.compute_seconds,
                "peak_bytes": result.peak_bytes,
            }
        )
    return rows


def solver_table(rows: list[dict[str, Any]]) -> Table:
    """The rows as text."""
    published = {1: "26 min", 5: "7 min", 25: "under 1 min"}
    cells = [
        [
            f"{row['bucket_mb']} MB",
            str(row["num_stages"]),
            str(row["num_buckets"]),
            f"{row['cpu_seconds']:.2f}",
            published[row["bucket_mb"]],
            f"{row['step_over_plain']:.4f}",
        ]
        for row in rows
    ]
    headers = ("bucket", "stages", "buckets", "solver, CPU s", "thesis's solver", "step / plain")
    return Table(title="Solving DenseNet-121, batch 32, at half of its memory (Butt, section 4.2)", headers=headers, rows=cells)


def offload_rows(name: str, chain: StageChain, num_budgets: int) -> list[dict[str, Any]]:
    """Step time over the lower bound, for budgets from the least that works up to plain's."""
    low, top = min_offload_bytes(chain), plain_peak_bytes(chain)
    rows = []
    for step in range(num_budgets):
        budget = low + (top - low) * step // num_budgets
        bound = offload_bound_seconds(chain, budget_bytes=budget, link=LINK)
        fluid = offloading.fluid_optima(chain, budget_bytes=budget, link=LINK)
        row: dict[str, Any] = {"network": name, "budget_bytes": budget, "share": step / num_budgets, "bound_seconds": bound}
        row["fluid"] = fluid[0].seconds / bound if fluid else None
        for solver in ("offload-dp", "offload-greedy", "vdnn"):
            row[solver] = _ratio(chain, solver, budget, bound)
        rows.append(row)
    return rows


def _ratio(chain: StageChain, name: str, budget_bytes: int, unit_seconds: float) -> float | None:
    try:
        return simulate(chain, get_solver(name)(chain, budget_bytes=budget_bytes, link=LINK), link=LINK).seconds / unit_seconds
    except BudgetError:
        return None


def offload_table(rows: list[dict[str, Any]]) -> Table:
    """The largest ratio of each network."""
    cells = []
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        by_solver = [
            [row[solver] for row in mine if row[solver] is not None] for solver in ("fluid", "offload-dp", "offload-greedy", "vdnn")
        ]
        cells.append([name, str(len(mine)), *(f"{max(ratios):.3f}" if ratios else "" for ratios in by_solver)])
    headers = ("network", "budgets", "fluid model", "offload-dp", "offload-greedy", "vdnn")
    title = "Largest step time over the lower bound (Beaumont et al., section 6: at most 1.2 for their dynamic programme)"
    return Table(title=title, headers=headers, rows=cells)


def joint_rows(name: str, chain: StageChain) -> list[dict[str, Any]]:
    """Every strategy at shares of plain's memory, as multiples of plain's time."""
    top = plain_peak_bytes(chain)
    rows = []
    for percent in (60, 40, 25, 15):
        row: dict[str, Any] = {"network": name, "percent": percent}
        for solver in SOLVERS:
            started = time.process_time()
            row[solver] = _ratio(chain, solver, top * percent // 100, chain.compute_seconds)
            row[f"{solver} cpu_seconds"] = time.process_time() - started
        rows.append(row)
    return rows


def joint_table(rows: list[dict[str, Any]]) -> Table:
    """The rows as text."""
    names = [name for name in SOLVERS if name != "none"]
    cells = [
        [
            row["network"],
            f"{row['percent']} %",
            *("" if row[name] is None else f"{row[name]:.3f}" for name in names),
            f"{row['auto cpu_seconds']:.1f}",
        ]
        for row in rows
    ]
    headers = ("network", "of plain's memory", *names, "auto, CPU s")
    return Table(title="Step time over plain's, by strategy (blank: does not fit)", headers=headers, rows=cells)


_NOTES = """\
Bytes: the training step of torchvision's networks on meta tensors (loss = sum), metered above parameters and their gradients, the input
added. Operator scratch is not in it; the published numbers are of PyTorch 1.5 on a GPU and include it. *Best sum* has the checkpoints that
are optimal for the published objective (checkpoints plus largest segment); *least peak* is the lowest metered peak among the best
{num_tries} sums, since the objective knows neither gradients nor that late checkpoints are gone when early segments run backward. DenseNet
is traced with concatenations made step by step.

*Peak / largest value* shows a floor that no choice of checkpoints goes below: around the first layers of VGG and ResNet-18 four values of
the largest size are alive at once. For VGG-13 to 19 and ResNet-18 the published number is that floor plus the pooling indices and the input
(seen from the sizes; not said in the paper). *Ours tiled* does: plans of `sft.plan` for half of the published bytes, and for the least
that it has one for; projected, the input and the new gradients of the parameters in it, and what their steps compute. For ResNet-152 the
published number is below the least of its own objective on torchvision's network (*best sum itself*), so networks or meters differ.

Equal layers: the thesis reads from a figure, approximately, how much more time less memory takes than more. Its algorithm has the
targets' gradient as one backward more, else its times are ours; two lines of the print cannot be meant (`harness/butt.py`), and change
nothing here.

Times are simulated on a roofline of {flops:.1f} TFLOP/s, {bandwidth:.2f} TB/s and {start:.0f} us an operator (no device was timed), the
link is {link:.1f} GB/s, one way at a time. Chains are cut at single values; what lies between two cuts is saved by the stage. CPU seconds
of solvers are of one thread of a machine shared with other work."""


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description="Published numbers next to ours.")
    parser.add_argument("--tries", type=int, default=12, help="sums whose peak is metered (default 12)")
    parser.add_argument("--budgets", type=int, default=12, help="budgets of the offloading comparison (default 12)")
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, device = Console(), Roofline()

    def shown(items: Any, what: str) -> Iterator[Any]:
        return iter(track(items, description=what, console=console))

    checkpoint_rows = [{**table_2_row(row, args.tries), **tiled_row(row)} for row in shown(TABLE_2, "checkpoints")]
    chains = {name: make_network(name, 32, 300 if name == "inception_v3" else 224).chain(device) for name in OFFLOADED}
    solving = solver_rows(chains["densenet121"])
    offloading = [row for name in shown(OFFLOADED, "offloading") for row in offload_rows(name, chains[name], args.budgets)]
    together = [row for name in shown(("resnet50", "densenet121", "inception_v3"), "strategies") for row in joint_rows(name, chains[name])]
    equal = trade_off_rows()
    tables = [
        table_2(checkpoint_rows),
        trade_off(equal),
        solver_table(solving),
        offload_table(offloading),
        joint_table(together),
    ]
    raw = {
        "environment": {**environment(args.threads), "torchvision": importlib.metadata.version("torchvision")},
        "checkpoints": checkpoint_rows,
        "equal_layers": equal,
        "solver": solving,
        "offloading": offloading,
        "strategies": together,
    }
    notes = _NOTES.format(
        num_tries=args.tries,
        flops=device.flops_per_second / 1e12,
        bandwidth=device.bytes_per_second / 1e12,
        start=device.start_seconds * 1e6,
        link=LINK.down_bytes_per_second / 1e9,
    )
    written = write_results(result_stem(args.out, "published"), raw, tables, notes, None)
    for table in tables:
        console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
