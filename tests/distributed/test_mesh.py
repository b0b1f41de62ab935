"""Bands of random networks, of sources, with ``DistributedDataParallel`` around them, and plans for meshes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sft
from sft.common.torch_internals import pytree
from tests.helpers.band_checks import check_bands, mesh_of
from tests.helpers.dag_nets import Conv, Dag, DagNet, MaxPool
from tests.helpers.dags import dags
from tests.helpers.exactness import gradient_errors
from tests.helpers.examples import at_most
from tests.helpers.models import ConvNet, Residual, image, seeded
from tests.helpers.poison import poisoned
from tests.helpers.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Dag, sft.Options, str]:
    dag = draw(dags(max_nodes=7, measuring=True))
    batch, _, height, width = dag.shape
    options = sft.Options(
        tile=(draw(st.integers(1, height)), draw(st.just(width) | st.integers(-(-width // 3), width))),
        state_every=draw(st.none() | st.integers(1, 3)),
        batch_tile=draw(st.none() | st.integers(1, batch)),
    )
    sizes = [y.shape for y in pytree.tree_leaves(DagNet(dag)(torch.zeros(dag.shape, dtype=torch.float64)))]
    # An image of a single pixel stays with its band, and a global value does not; their shapes are equal.
    is_plain = all(len(size) != len(dag.shape) or size[2:].numel() > 1 for size in sizes)
    return dag, options, draw(st.sampled_from(["device", "band"] if is_plain else ["device"]))


#: Its last image has one row, which only one of two bands owns.
_ONE_ROW = Dag(
    shape=(2, 3, 9, 16),
    nodes=(
        Conv(source=0, channels=4, kernel=(4, 3), stride=(3, 1), padding=(1, 3), dilation=(2, 1), groups=1, bias=True, frozen=False),
        MaxPool(source=1, kernel=(2, 1), stride=(1, 3), padding=(0, 0), dilation=(1, 2), ceil_mode=True),
    ),
    outputs=(2,),
    head=None,
    training=True,
)


@at_most(5, one_in=5)
@example(case=(_ONE_ROW, sft.Options(tile=(5, 16)), "band"))
@given(case=_cases())
def test_any_dag_on_two_bands(pair: Ranks, case: tuple[Dag, sft.Options, str]) -> None:
    dag, options, output = case
    assume(not pair.is_broken)  # otherwise a failure would be followed by meaningless ones
    pair.run(_check_dag, dag, options, output)


def _check_dag(rank: int, dag: Dag, options: sft.Options, output: str) -> None:
    def make() -> nn.Module:
        return DagNet(dag)

    check_bands(rank, 1, make, dag.shape, options, training=dag.training, output=output, input_grad=dag.input_grad, steps=1, tolerance=1e-9)


def _reads_padding(rank: int, options: sft.Options) -> None:
    def make() -> nn.Module:
        return nn.Conv2d(2, 2, 1, stride=(3, 2), padding=1)

    with poisoned():
        check_bands(rank, 1, make, (2, 2, 2, 3), options, steps=1)
        check_bands(rank, 1, lambda: nn.Sequential(nn.Conv2d(2, 2, 3, 3, 1), nn.Tanh(), make()), (2, 2, 5, 6), options, steps=1)


@pytest.mark.parametrize("tile", [None, (1, None)])
def test_a_band_of_padding_only(pair: Ranks, tile: tuple[int, None] | None) -> None:
    """Regression: rows that depend on no row of the image were uninitialized, since no strip ran."""
    pair.run(_reads_padding, sft.Options(tile=tile))


class Rows:
    """A source that records the rows read."""

    dtype = torch.float64

    def __init__(self, pixels: Tensor) -> None:
        self.pixels, self.read = pixels, set[int]()
        self.shape = tuple(pixels.shape)

    def rows(self, interval: Any, out: Tensor) -> None:
        self.read.update(range(interval.start, interval.stop))
        out.copy_(self.pixels[:, :, interval.start : interval.stop])


def _reads_its_own(rank: int) -> None:
    x = image(1, 3, 48, 9)
    eager = seeded(ConvNet)
    net: Any = sft.compile(copy.deepcopy(eager), Rows(x), mesh=mesh_of(1, 2), options=sft.Options(tile=(4, None)))
    source = Rows(x)
    y = net(source)
    y.square().sum().backward()
    expected = eager(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grads = [{name: p.grad for name, p in module.named_parameters()} for module in (net, eager)]
    assert max(gradient_errors(*grads).values()) <= 1e-10
    # Rows 0..5 and 6..11 of the last image: through a strided convolution, a convolution, a strided pool and a convolution.
    assert [each.rows for each in net.plan.mesh.ranks] == [(0, 24), (24, 48)]
    assert source.read == set((range(27), range(18, 48))[rank])


def test_a_source_is_read_for_the_own_band_and_its_halo(pair: Ranks) -> None:
    pair.run(_reads_its_own)


def _in_ddp(rank: int, num_slides: tuple[int, ...]) -> None:
    """A replica is one rank here: its band mesh has one band, and DDP averages over replicas."""
    mesh = mesh_of(2, 1)
    eager = seeded(Residual)
    net = sft.compile(copy.deepcopy(eager), (1, 3, None, 10), mesh=mesh["band"], options=sft.Options(tile=(4, None)))
    grads = []
    for module in (eager, net):
        wrapped = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        with wrapped.join():
            for slide in range(num_slides[rank]):
                optimizer.zero_grad()
                wrapped(image(1, 3, 12 + 5 * rank + 3 * slide, 10, seed=slide + 10 * rank)).square().sum().backward()
                optimizer.step()
        grads.append(dict(module.named_parameters()))
    assert max(gradient_errors(grads[1], grads[0]).values()) <= 1e-10
    for parameter in net.parameters():
        both = [torch.zeros_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.detach().contiguous())
        assert torch.equal(*both)


def test_ddp_over_replicas_with_uneven_slides(pair: Ranks) -> None:
    pair.run(_in_ddp, (3, 1))


def test_a_plan_for_a_mesh_needs_no_processes() -> None:
    with torch.device("meta"):
        model = Residual()
    plans = [sft.plan(model, (1, 3, 512, 64), mesh=(1, bands), budget="8MiB") for bands in (1, 2, 8)]
    for plan in plans:
        assert plan.mesh is not None
        assert plan.mesh.ranks[0].rows[0] == 0 and plan.mesh.ranks[-1].rows[1] == 512
        assert max(rank.projected_peak_bytes for rank in plan.mesh.ranks) == plan.projected_peak_bytes
        assert sum(rank.flops for rank in plan.mesh.ranks) == plan.flops
        assert sum(rank.received_bytes for rank in plan.mesh.ranks) == plan.mesh.sent_bytes
        assert plan == sft.Plan.from_json(plan.to_json())
        assert json.loads(plan.to_json())["mesh"]["num_replicas"] == 1
    alone, two, eight = (plan.mesh for plan in plans)
    assert alone is not None and two is not None and eight is not None
    assert alone.sent_bytes == 0 and alone.halo_flops == 0
    assert 0 < two.halo_share < eight.halo_share
    text = plans[2].explain()
    assert "8 band(s)" in text and "parameters" in text and all(len(line) <= 80 for line in text.splitlines())


def test_a_budget_too_small_for_any_band_is_refused() -> None:
    with pytest.raises(sft.BudgetError, match="on 2 bands needs") as caught:
        sft.plan(seeded(Residual), (1, 3, 512, 64), mesh=(1, 2), budget="128KiB")
    plan = sft.plan(seeded(Residual), (1, 3, 512, 64), mesh=(1, 2), budget=caught.value.needed_bytes)
    assert plan.total_bytes <= caught.value.needed_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": (1, 0)}, "both numbers must be positive"),
        ({"mesh": "2x2"}, "give a DeviceMesh"),
        ({"mesh": (1, 2), "output": "host"}, "output='host' and output files are for one device"),
        ({"mesh": (1, 2), "options": sft.Options(halo="recompute")}, "are for one device"),
        ({"mesh": (1, 2), "options": sft.Options(host_budget="1GiB")}, "host_budget is for one device"),
        ({"mesh": (1, 2), "options": sft.Options(cuda_graphs=True)}, "cuda_graphs is for one device"),
        ({"mesh": (1, 65)}, "use at most 64 bands"),
        ({"output": "band"}, "give a mesh"),
    ],
)
def test_unsupported_options_of_a_mesh_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sft.InputError, match=message):
        sft.compile(seeded(Residual), (1, 3, 64, 32), **arguments)


def test_a_mesh_without_processes_only_plans() -> None:
    net = sft.compile(seeded(Residual), (1, 3, 64, 32), mesh=(1, 2))
    with pytest.raises(sft.InputError, match="it only plans"):
        net(image(1, 3, 64, 32))
