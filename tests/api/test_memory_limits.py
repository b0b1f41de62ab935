"""``budget="auto"`` and limits of the host's memory, with free memory of any size."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.api import memory_limits
from sft.common.free_memory import FreeMemory, free_host_memory

_SHAPE = (1, 3, 256, 64)
Probe = Callable[..., None]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Fixture that sets the free memory of the host, and of the disk."""

    def set_free(host: str, disk: str = "1TiB") -> None:
        monkeypatch.setattr(memory_limits, "free_host_memory", lambda: _memory(host))
        monkeypatch.setattr(memory_limits, "free_disk", lambda folder: _memory(disk))

    return set_free


def _memory(text: str) -> FreeMemory:
    return FreeMemory(free_bytes=sft.parse_bytes(text), total_bytes=2 * sft.parse_bytes(text))


def _model() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def test_the_default_is_the_free_memory_less_a_margin(probe: Probe) -> None:
    probe("10.8GiB")
    plan = sft.plan(_model(), _SHAPE)
    assert plan.budget_bytes == sft.parse_bytes("9.5GiB")
    assert plan == sft.plan(_model(), _SHAPE, budget="auto") == sft.compile(_model(), _SHAPE).plan
    assert "budget auto: 9.50 GiB of 10.80 GiB free on the host" in " ".join(plan.explain().split())
    assert "auto" not in sft.plan(_model(), _SHAPE, budget="9.5GiB").explain()


def test_little_memory_plans_strips(probe: Probe) -> None:
    probe("276MiB")
    plan = sft.plan(_model().eval(), (1, 3, 4096, 256))
    assert plan.total_bytes <= plan.budget_bytes == 20 * 2**20
    assert any(segment.mode == "tiled" for segment in plan.segments)


def test_no_memory_is_an_error_with_numbers(probe: Probe) -> None:
    probe("100MiB")
    with pytest.raises(sft.BudgetError, match=r"of 200\.00 MiB on the host 100\.\d\d MiB are free.*in bytes"):
        sft.compile(_model(), _SHAPE)


def test_small_changes_of_the_free_memory_give_the_same_budget(probe: Probe) -> None:
    budgets = set()
    for free in ("20.1GiB", "20.2GiB", "20.4GiB", "20.9GiB"):
        probe(free)
        budgets.add(sft.plan(_model(), _SHAPE).budget_bytes)
    assert budgets == {18 * 2**30}


def test_memory_of_the_model_counts_as_free(probe: Probe) -> None:
    """Parameters are allocated already, and are part of the budget."""
    probe("448MiB")
    large = nn.Conv2d(2**12, 2**12, 1, bias=False)  # 64 MiB
    assert sft.plan(large, (1, 2**12, 2, 2)).budget_bytes == 2**28
    assert sft.plan(_model(), _SHAPE).budget_bytes == 192 * 2**20


def test_the_budget_is_read_once(probe: Probe) -> None:
    probe("10.8GiB")
    net: Any = sft.compile(_model(), (1, 3, None, None))
    probe("5GiB")
    first, second = net.plan_for(_SHAPE), net.plan_for((1, 3, 128, 64))
    assert {first.budget_bytes, second.budget_bytes} == {sft.parse_bytes("9.5GiB")}
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        plan = copied.plan_for(_SHAPE)
        assert plan == first and plan.budget_note == first.budget_note


def test_a_plan_keeps_its_origin_in_json_and_pickles(probe: Probe) -> None:
    probe("10.8GiB")
    plan = sft.plan(_model(), _SHAPE)
    for copied in (sft.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert copied == plan and copied.explain() == plan.explain() and copied.device_type == "cpu"
    explicit = sft.plan(_model(), _SHAPE, budget="9.5GiB")
    assert explicit == plan  # notes are not compared
    assert "budget_note" not in json.loads(explicit.to_json())


def test_a_supplied_plan_determines_the_budget(probe: Probe) -> None:
    probe("10.8GiB")
    plan = sft.plan(_model(), _SHAPE, budget="64MiB")
    assert sft.of(sft.compile(_model(), _SHAPE, plan=plan)).plan.budget_bytes == 64 * 2**20


def test_host_memory_of_the_options_is_left_for_the_host(probe: Probe) -> None:
    """On the CPU both budgets refer to one memory."""
    probe("10GiB")
    both = sft.plan(_model(), _SHAPE, options=sft.Options(host_budget="4GiB"))
    assert both.budget_bytes == 5 * 2**30


def test_a_plan_takes_no_more_of_the_host_than_is_free(probe: Probe, tmp_path: Path) -> None:
    model, shape, options = _model(), (1, 3, 1024, 256), sft.Options(host_folder=str(tmp_path))
    probe("8GiB")
    free = sft.plan(model, shape, budget="5MiB", options=options)
    assert free.host_bytes > 2**20 and "free on the disk" in " ".join(free.explain().split())
    probe("8GiB", disk=str(256 * 2**20 + free.host_bytes - 1))
    assert sft.plan(model, shape, budget="5MiB", options=options).host_bytes < free.host_bytes
    probe("8GiB", disk=str(256 * 2**20 + 1))
    with pytest.raises(sft.BudgetError) as refusal:
        sft.plan(model, shape, budget="5MiB", options=options)
    assert "host" in str(refusal.value)
    probe("8GiB", disk=str(256 * 2**20 + free.host_bytes))
    assert sft.plan(model, shape, budget="5MiB", options=options) == free


def test_a_host_budget_that_the_host_does_not_have_is_refused(probe: Probe) -> None:
    model, shape = _model(), (1, 3, 1024, 256)
    probe("8GiB")
    plan = sft.plan(model, shape, budget="5MiB", options=sft.Options(host_budget="1GiB"))
    probe(str(256 * 2**20 + plan.host_bytes - 1))
    with pytest.raises(sft.BudgetError, match=r"of the host's memory .* can be used \(.* are free on the host\)"):
        sft.plan(model, shape, budget="5MiB", options=sft.Options(host_budget="1GiB"))


def test_a_model_on_the_meta_device_is_planned_for_an_absent_device(probe: Probe) -> None:
    probe("4GiB")
    with torch.device("meta"):
        model = _model()
    shape = (1, 3, 2**14, 2**13)
    on_gpu = sft.plan(model, shape, budget="2GiB", device="cuda")
    assert on_gpu.device_type == "cuda" and on_gpu.host_bytes > 4 * 2**30  # of the other machine
    with pytest.raises(sft.BudgetError):
        sft.plan(model, shape, budget="2GiB", device="cpu")  # values have no second memory
    on_cpu = sft.plan(model, _SHAPE, budget="2GiB", device="cpu")
    assert on_cpu.device_type == "cpu" and on_cpu.estimated_seconds > 0
    if not torch.cuda.is_available():
        with pytest.raises(sft.InputError, match="no CUDA device; give bytes"):
            sft.plan(model, _SHAPE, device="cuda")
    with pytest.raises(sft.InputError, match="write 'cpu' or 'cuda'"):
        sft.plan(model, _SHAPE, device="gpu")


def test_free_memory_of_a_gpu_is_that_of_the_driver_and_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (6 * 2**30, 12 * 2**30))
    statistics = {"reserved_bytes.all.current": 5 * 2**30, "allocated_bytes.all.current": 2**30}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: statistics)
    budget_bytes, note = memory_limits.automatic_budget(torch.device("cuda", 1), sft.Options(), own_bytes=2**30)
    assert budget_bytes == sft.parse_bytes("10GiB") and note == "budget auto: 10.00 GiB of 11.00 GiB free on cuda:1"


def test_ranks_of_one_machine_share_its_memory(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    probe("40GiB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert sft.plan(_model(), _SHAPE).budget_bytes == 9 * 2**30


def test_this_machine_has_memory() -> None:
    memory = free_host_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


_MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


@pytest.mark.parametrize(
    ("files", "free_gib", "total_gib"),
    [
        ({}, 8.0, 16.0),
        # A container of cgroup v2 sees its own group as the root.
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "1"}, 8.0, 16.0),
        (
            {
                "proc/self/cgroup": "0::/job",
                "sys/fs/cgroup/job/memory.max": str(4 * 2**30),
                "sys/fs/cgroup/job/memory.current": str(3 * 2**30),
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2**30}\n",
            },
            2.0,
            4.0,
        ),
        # A limit of a parent group, and a limit above the machine's memory.
        (
            {
                "proc/self/cgroup": "0::/batch/job",
                "sys/fs/cgroup/batch/memory.max": str(6 * 2**30),
                "sys/fs/cgroup/batch/memory.current": str(5 * 2**30),
                "sys/fs/cgroup/batch/job/memory.max": str(2**40),
                "sys/fs/cgroup/batch/job/memory.current": str(2**30),
            },
            1.0,
            6.0,
        ),
        # cgroup v1; used more than the limit.
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * 2**30),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * 2**30),
                "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 0\n",
            },
            0.0,
            2.0,
        ),
    ],
)
def test_limits_of_containers(files: dict[str, str], free_gib: float, total_gib: float, tmp_path: Path) -> None:
    for name, text in {"proc/meminfo": _MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = free_host_memory(tmp_path)
    assert (memory.free_bytes / 2**30, memory.total_bytes / 2**30) == (free_gib, total_gib)


def test_a_system_without_proc(tmp_path: Path) -> None:
    memory = free_host_memory(tmp_path)
    assert memory.free_bytes == memory.total_bytes // 2 > 0
