"""One image over several ranks: computation, memory and messages of each, projected, or measured on devices.

Without processes: plans for meshes of 1, 2, 4, ... bands, with FLOPs that two neighbours compute, the highest rank's bytes, and bytes sent
next to the bytes of all activations. With ``--measure``, under ``torchrun``, the same step is run and timed on the ranks of torchrun, one
band each; `benchmarks/scaling.sh` does so for every number of devices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.common.byte_units import parse_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, or a measured step."""

    bands: int
    mode: str
    halo_share: float
    balance: float
    peak_bytes: int
    sent_bytes: int
    activation_bytes: int
    link_seconds: float
    flops_over_plain: float
    plan_seconds: float

    def cells(self) -> list[str]:
        """For the table."""
        return [
            str(self.bands),
            self.mode,
            f"{100 * self.halo_share:.3f} %",
            f"{100 * self.balance:.1f} %",
            mib(self.peak_bytes),
            mib(self.sent_bytes),
            f"{100 * self.sent_bytes / self.activation_bytes:.4f} %",
            f"{1e3 * self.link_seconds:.2f}",
            f"{self.flops_over_plain:.4f}",
            f"{self.plan_seconds:.1f}",
        ]


HEADERS = (
    "bands",
    "norms",
    "FLOPs at borders",
    "balance",
    "highest peak, MiB",
    "sent, MiB",
    "sent / activations",
    "messages, ms",
    "FLOPs / plain",
    "planned in, s",
)


def build(name: str, *, frozen: bool) -> nn.Module:
    """The network, norms in training or frozen."""
    models = load_models()
    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)(2)
    return models.freeze_norm(model) if frozen else model


def activation_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes of the layers' outputs in one forward pass: a lower bound of the residuals of plain PyTorch."""
    total = 0

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += output.numel() * output.element_size()

    handles = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    with torch.no_grad():
        model(torch.empty(shape, device="meta"))
    for handle in handles:
        handle.remove()
    return total


def planned(args: argparse.Namespace, bands: int, *, frozen: bool) -> Row:
    """Plan a step."""
    shape = (1, 3, args.size, args.size)
    with torch.device("meta"):
        model = build(args.model, frozen=frozen)
    started = time.perf_counter()
    plan = sft.plan(model, shape, mesh=(1, bands), budget=args.budget)
    seconds = time.perf_counter() - started
    mesh = plan.mesh
    assert mesh is not None
    return Row(
        bands=bands,
        mode="frozen" if frozen else "training",
        halo_share=mesh.halo_share,
        balance=mesh.balance,
        peak_bytes=plan.projected_peak_bytes,
        sent_bytes=mesh.sent_bytes,
        activation_bytes=activation_bytes(model, shape),
        link_seconds=mesh.link_seconds(parse_rate(args.link)),
        flops_over_plain=plan.redundancy,
        plan_seconds=seconds,
    )


def measure(args: argparse.Namespace) -> int:
    """Time steps on the ranks that torchrun started; the first one prints."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(args.threads)
    mesh = init_device_mesh(kind, (1, int(os.environ["WORLD_SIZE"])), mesh_dim_names=("replica", "band"))
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    model = build(args.model, frozen=False).to(device)
    shape = (1, 3, args.size, args.size)
    net: Any = sft.compile(model, shape, mesh=mesh, budget=args.budget)
    image = torch.rand(shape, device=device).to(memory_format=torch.channels_last)
    label = torch.tensor([1], device=device)
    times = []
    with sft.measure_peak(device) as peak:
        for _ in range(args.rounds + 1):
            dist.barrier()
            started = time.perf_counter()
            nn.functional.cross_entropy(net(image), label).backward()
            if kind == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            times.append(time.perf_counter() - started)
            net.zero_grad(set_to_none=True)
    rank = net.plan.mesh.ranks[dist.get_rank()]
    if kind == "cpu":  # plans for a mesh do not count a GPU's bytes other than tensors yet
        assert peak.num_bytes <= rank.projected_peak_bytes, f"measured {peak.num_bytes}, projected {rank.projected_peak_bytes}"
    if dist.get_rank() == 0:
        step = statistics.median(times[1:])
        print(
            f"{args.model} {args.size} px, {mesh.size()} band(s) on {kind}: {step:.3f} s a step, peak {mib(peak.num_bytes)} MiB, "
            f"projected {mib(rank.projected_peak_bytes)} MiB"
        )
    dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="One image over several ranks.")
    parser.add_argument("--model", default="resnet18", help="of examples/models.py")
    parser.add_argument("--size", type=positive_int, default=8192, help="rows and columns of the image, pixels")
    parser.add_argument("--bands", type=positive_int, nargs="+", default=[1, 2, 4], help="numbers of ranks to plan for")
    parser.add_argument("--budget", default="11GiB", help="of each rank")
    parser.add_argument("--link", default="400Gbit", help="of a rank to the others, a second")
    parser.add_argument("--measure", action="store_true", help="run and time steps instead, under torchrun")
    parser.add_argument("--rounds", type=positive_int, default=3, help="steps to time, after one that is not")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 if 4 bands miss their targets."""
    args = parse_arguments()
    if args.measure:
        return measure(args)
    console = Console()
    rows = [planned(args, bands, frozen=frozen) for frozen in (False, True) for bands in args.bands]
    table = Table(title=f"{args.model}, {args.size:,} px", headers=HEADERS, rows=[row.cells() for row in rows])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "rows": [asdict(row) for row in rows],
    }
    notes = (
        f"Planned, not run: training steps of {args.model} on one image of {args.size:,} x {args.size:,} px in float32, "
        f"{args.budget} a rank, links of {args.link} a second. FLOPs at borders: computed by two neighbours, over what is computed once. "
        "Sent: by all ranks in a step, rows, global values and parameters' gradients. Activations: outputs of the layers in one "
        "forward pass."
    )
    console.print(write_results(result_stem(args.out, "scaling"), raw, [table], notes, None))
    console.print(table.terminal())
    at_four = [row for row in rows if row.bands == 4]
    return int(any(row.halo_share >= 0.02 or row.sent_bytes >= 0.01 * row.activation_bytes for row in at_four))


if __name__ == "__main__":
    raise SystemExit(main())
