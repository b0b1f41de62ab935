"""Kernel tables and the tuning loop, with a benchmarker that takes its results from a list."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import sft
from sft.backends.autotune.benchmark import CudaBenchmarker, RelativeErrors, compiler_version, relative_error
from sft.backends.autotune.cases import TuningCase
from sft.backends.autotune.loop import tune
from sft.backends.autotune.table import (
    KernelTable,
    TableEntry,
    TableSelector,
    _truncation_error,
    error_limit,
    find_table,
    known_table,
    table_name,
)
from sft.backends.kernel_call import kernel_call_of
from sft.backends.selector import ShapeClass, launch_variants
from sft.cli.main import main
from sft.cli.tune import TuneRequest, collect_tuning_cases, show_tune
from tests.helpers.triton_process import needs_triton

_CLASS = ShapeClass(
    operator="conv2d",
    fused=("bias", "relu"),
    numbers="bfloat16",
    channels=(64, 64),
    kernel=(3, 3),
    stride=(1, 1),
    dilation=(1, 1),
    pixels=4**10,
)
_ENTRY = TableEntry(shape_class=_CLASS, error=1e-3, aten_error=1e-3, triton_seconds=1e-3, aten_seconds=2e-3)
_TABLE = KernelTable(device="NVIDIA Test", triton="3.9.0", torch="2.13.0", entries=(_ENTRY,))


def test_a_table_survives_json() -> None:
    other = replace(_ENTRY, shape_class=replace(_CLASS, operator="max pool", fused=()), triton_seconds=3e-3)
    table = _TABLE.including([other])
    assert KernelTable.from_json(table.to_json()) == table
    assert [entry.fastest for entry in table.entries] == ["triton", "aten"]


def test_tf32_is_a_format_of_products_alone() -> None:
    """An operation without products runs the same kernel whether or not TF32 is allowed; older tables had two names for it."""
    pool = replace(_ENTRY, shape_class=replace(_CLASS, operator="max pool", fused=(), numbers="tf32"))
    product = replace(_ENTRY, shape_class=replace(_CLASS, numbers="tf32"), error=1e-4)
    table = KernelTable.from_json(_TABLE.including([pool, product]).to_json())
    assert [entry.shape_class.numbers for entry in table.entries] == ["bfloat16", "float32", "tf32"]
    for allows_tf32 in (True, False):
        selector = TableSelector(table=table, allows_tf32=allows_tf32)
        numbers = selector.number_format_of(torch.float32)
        assert numbers is not None
        assert selector.selects_kernel(replace(pool.shape_class, numbers=numbers))
        assert selector.number_format_of(torch.float32, multiplies=True) == ("tf32" if allows_tf32 else "float32")


def test_lookup_takes_the_nearest_number_of_pixels_within_a_limit() -> None:
    slow = replace(_ENTRY, shape_class=replace(_CLASS, pixels=4**7), triton_seconds=9e-3)
    selector = TableSelector(table=_TABLE.including([slow]))
    assert [selector.selects_kernel(replace(_CLASS, pixels=4**power)) for power in (4, 5, 7, 8, 9, 10, 12, 13)] == [
        False,  # no measurement of a similar size
        False,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert not selector.selects_kernel(replace(_CLASS, numbers="float16"))
    assert not selector.selects_kernel(replace(_CLASS, fused=("relu",)))
    assert selector.number_format_of(torch.float64) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 0.5}, "a wrong kernel gets no entry"),
        ({"error": float("nan")}, "a wrong kernel gets no entry"),
        ({"triton_seconds": 0.0}, "are not times"),
        ({"aten_seconds": float("inf")}, "are not times"),
    ],
)
def test_an_entry_that_cannot_be_trusted_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(sft.InputError, match=message):
        replace(_ENTRY, **change)
    data = json.loads(_TABLE.to_json())
    data["entries"][0] |= change
    with pytest.raises(sft.InputError, match=f"{message}|expected a finite number"):
        KernelTable.from_json(json.dumps(data))


@pytest.mark.parametrize(("num_bits", "is_right"), [(9, False), (10, True), (11, True)])
def test_truncated_operands_of_ten_bits_are_right(num_bits: int, is_right: bool) -> None:
    """Matrix instructions keep ten bits of fp32 operands; the error is the expected one, and one bit less is refused."""
    generator = torch.Generator().manual_seed(num_bits)
    operands = [torch.randn(shape, generator=generator) for shape in ((64, 72), (72, 512))]
    truncated = [(each.view(torch.int32) >> (23 - num_bits) << (23 - num_bits)).view(torch.float32) for each in operands]
    exact, ours = (a.double() @ b.double() for a, b in (operands, truncated))
    error = relative_error([ours], [exact])
    assert error == pytest.approx(_truncation_error(num_bits), rel=0.05)
    assert (error <= error_limit("tf32", 1e-6)) == is_right
    assert error > error_limit("float32", 1e-6)


def test_a_kernel_runs_if_it_gains_more_than_five_per_cent() -> None:
    entries = [replace(_ENTRY, triton_seconds=share * _ENTRY.aten_seconds) for share in (0.94, 0.96, 1.0)]
    assert [entry.fastest for entry in entries] == ["triton", "aten", "aten"]


def test_a_kernel_may_have_the_error_of_aten() -> None:
    assert replace(_ENTRY, error=0.1, aten_error=0.095).fastest == "triton"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("format"),
        lambda data: data.update(format=99),
        lambda data: data.pop("entries"),
        lambda data: data.update(more=1),
        lambda data: data["entries"][0].pop("error"),
        lambda data: data["entries"][0]["shape_class"].update(numbers="int4"),
        lambda data: data["entries"][0]["shape_class"].update(pixels="many"),
        lambda data: data.update(device=3),
        lambda data: data["entries"].append(data["entries"][0]),
        lambda data: data.update(entries=[None]),
    ],
)
def test_a_file_without_a_table_is_refused(spoil: Any, tmp_path: Path) -> None:
    data = json.loads(_TABLE.to_json())
    spoil(data)
    path = tmp_path / table_name(_TABLE.device, _TABLE.triton)
    path.write_text(json.dumps(data))
    with pytest.raises(sft.InputError, match="table"):
        find_table([tmp_path], _TABLE.device, _TABLE.triton)


def test_tables_are_selected_by_device_and_version(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _TABLE.save(second / table_name(_TABLE.device, _TABLE.triton))
    assert find_table([first, second], _TABLE.device, _TABLE.triton) == _TABLE
    assert find_table([first, second], _TABLE.device, "3.8.0") is None
    assert find_table([first], _TABLE.device, _TABLE.triton) is None
    (second / table_name("NVIDIA Other", "3.9.0")).write_text(_TABLE.to_json())
    with pytest.raises(sft.InputError, match="is for NVIDIA Test"):
        find_table([second], "NVIDIA Other", "3.9.0")
    (second / table_name(_TABLE.device, _TABLE.triton)).write_bytes(b"\xff\xfe")
    with pytest.raises(sft.InputError, match="cannot read"):
        find_table([second], _TABLE.device, _TABLE.triton)


def test_entries_of_this_machine_replace_those_that_come_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, other = table_name(_TABLE.device, _TABLE.triton), replace(_ENTRY.shape_class, channels=(7, 9))
    provided, measured = tmp_path / "provided", tmp_path / "measured"
    monkeypatch.setattr("sft.backends.autotune.table._PROVIDED_FOLDER", provided)

    def known() -> KernelTable | None:
        return known_table([measured], _TABLE.device, _TABLE.triton)

    assert known() is None
    slow = replace(_ENTRY, triton_seconds=2 * _ENTRY.aten_seconds)
    KernelTable(device=_TABLE.device, triton=_TABLE.triton, torch="2.11.0", entries=(slow, replace(slow, shape_class=other))).save(
        provided / name
    )
    assert (table := known()) is not None and not TableSelector(table=table).selects_kernel(_ENTRY.shape_class)
    KernelTable(device=_TABLE.device, triton=_TABLE.triton, torch="2.11.0", entries=(_ENTRY,)).save(measured / name)
    assert (table := known()) is not None and table.entry(_ENTRY.shape_class) == _ENTRY
    assert table.entry(other) == replace(slow, shape_class=other)
    (provided / name).unlink()
    assert (table := known()) is not None and table.entry(other) is None


def test_provided_tables_are_committed_results() -> None:
    root = Path(__file__).resolve().parents[3]
    results = {path: json.loads(path.read_text()) for path in (root / "benchmarks" / "results").glob("*-gpu-table.json")}
    provided = sorted((root / "sft" / "backends" / "autotune" / "tables").iterdir())
    assert provided, "the library comes with a table of an H200"
    for path in provided:
        table = json.loads(path.read_text())
        assert any(result["table"] == table for result in results.values()), path.name
        read = known_table([], table["device"], table["triton"])
        assert read is not None and path.name == table_name(read.device, read.triton)
        assert any(entry.fastest == "triton" for entry in read.entries)


def _variant(case: TuningCase) -> str:
    calls = [kernel_call_of(call.function) for call in case.kernels]
    variants: set[str] = {getattr(call, "variant", "default") for call in calls} - {"default"}
    return next(iter(variants), "default")


@needs_triton
def test_a_table_is_for_one_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct products of computed operands depend on the assembler, not on Triton; another one may be named."""
    from sft.kernels import common_triton as blocks_triton  # here, because it imports Triton

    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    device = torch.device("cuda", 0)
    assert re.fullmatch(r"3\.\d+\.\d+-ptxas-\d+\.\d+", compiler_version(device))
    for version, is_right in (("12.8", False), ("12.9", False), ("13.1", False), ("13.3", True), ("14.0", True)):
        monkeypatch.setattr(blocks_triton, "assembler_version", lambda capability, version=version: version)
        assert blocks_triton.can_compute_operands(device) == is_right, version
        assert blocks_triton.safe_precision("bf16x3", device) == ("bf16x3" if is_right else "ieee")
        assert compiler_version(device).endswith(f"-ptxas-{version}")
    capability[:] = [8, 0]
    monkeypatch.setattr(blocks_triton, "assembler_version", lambda capability: "12.8")
    assert blocks_triton.can_compute_operands(device) and blocks_triton.safe_precision("bf16x3", device) == "bf16x3"


@dataclass
class ListBenchmarker:
    """Benchmarker with errors and times from a table by operator."""

    errors: dict[str, float] = field(default_factory=dict)
    slow: frozenset[str] = frozenset()
    fails: str = ""
    stops: str = ""
    fast: str = ""
    """A variant that takes half the time."""
    wrong: str = ""
    """A variant that is wrong."""
    verified: list[tuple[str, str]] = field(default_factory=list)
    """Operators and variants."""
    timed: list[tuple[str, str]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_name: str = "NVIDIA Test"
    triton_version: str = "3.9.0"
    torch_version: str = "2.13.0"

    def verify(self, case: TuningCase) -> RelativeErrors:
        operator = case.shape_class.operator
        self.verified.append((operator, _variant(case)))
        if operator == self.stops:
            raise KeyboardInterrupt
        if operator == self.fails:
            raise RuntimeError("out of registers")
        if _variant(case) == self.wrong:
            return RelativeErrors(kernels=0.5, aten=1e-7)
        return RelativeErrors(kernels=self.errors.get(operator, 1e-7), aten=1e-7)

    def time(self, case: TuningCase) -> tuple[float, float]:
        self.timed.append((case.shape_class.operator, _variant(case)))
        seconds = 2e-3 if case.shape_class.operator in self.slow else 1e-3
        return (seconds / 2 if _variant(case) == self.fast else seconds), 3e-3 - seconds


def _model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _request(folder: Path | None, **changes: Any) -> TuneRequest:
    options = sft.Options(tile=(16, None))
    return TuneRequest(
        models=[(_model(), ((1, 3, 64, 64),))], dtypes=("float32",), options=options, budget="1GiB", folder=folder, **changes
    )


def test_every_class_is_verified_then_timed_once(tmp_path: Path) -> None:
    cases = collect_tuning_cases(_request(None), torch.device("cpu"))
    assert len({case.shape_class for case in cases}) == len(cases)
    benchmarker = ListBenchmarker(slow=frozenset({"max pool"}))
    seen: list[str] = []
    result = tune(cases, benchmarker, tmp_path, advance=seen.append)
    assert seen == [case.shape_class.label for case in cases]
    ways = [(case.shape_class.operator, variant) for case in cases for variant in launch_variants(case.shape_class)]
    assert benchmarker.verified == benchmarker.timed == ways
    assert find_table([tmp_path], "NVIDIA Test", "3.9.0") == result.table
    selector = TableSelector(table=result.table)
    assert all(selector.selects_kernel(case.shape_class) == (case.shape_class.operator != "max pool") for case in cases)


def test_the_fastest_correct_kernel_is_selected(tmp_path: Path) -> None:
    cases = collect_tuning_cases(_request(None), torch.device("cpu"))
    table = tune(cases, ListBenchmarker(fast="deep"), tmp_path).table
    convolutions = [case for case in cases if "deep" in launch_variants(case.shape_class)]
    assert {TableSelector(table=table).launch_variant_of(case.shape_class) for case in convolutions} == {"deep"}
    assert find_table([tmp_path], "NVIDIA Test", "3.9.0") == table
    result = tune(cases, ListBenchmarker(fast="deep", wrong="deep"), tmp_path, again=True)
    assert {entry.variant for entry in result.table.entries} == {"default"}
    assert len(result.table.entries) == len(cases)
    assert len(result.refused) == len(convolutions) and all(", deep: wrong" in line for line in result.refused)
    assert TableSelector(table=result.table).launch_variant_of(replace(convolutions[0].shape_class, channels=(5, 5))) == "default"


def test_splits_by_class() -> None:
    assert launch_variants(_CLASS) == ("default", "deep", "small", "rows")
    assert launch_variants(replace(_CLASS, channels=(128, 64))) == ("default", "deep", "small")
    assert launch_variants(replace(_CLASS, operator="conv2d data gradient", channels=(128, 64)))[-1] == "rows"
    assert launch_variants(replace(_CLASS, stride=(2, 1)))[-1] == "small"
    assert launch_variants(replace(_CLASS, numbers="tf32")) == ("default", "deep", "tall", "wide")
    assert launch_variants(replace(_CLASS, operator="conv2d data gradient", channels=(3, 64))) == ("default", "deep", "small", "rows")
    assert launch_variants(replace(_CLASS, operator="conv2d weight gradient")) == ("default", "deep")
    few = {"channels": (3, 64)}
    for change in ({"operator": "conv3d"}, {"operator": "max pool"}, {"groups": 64}, few, few | {"operator": "conv2d weight gradient"}):
        assert launch_variants(replace(_CLASS, **change)) == ("default",), change


def test_a_wrong_or_failing_kernel_gets_no_entry(tmp_path: Path) -> None:
    cases = collect_tuning_cases(_request(None), torch.device("cpu"))
    benchmarker = ListBenchmarker(errors={"conv2d data gradient": 0.3, "carried rows": float("nan")}, fails="conv2d weight gradient")
    result = tune(cases, benchmarker, tmp_path)
    bad = {"conv2d data gradient", "carried rows", "conv2d weight gradient"}
    assert bad.isdisjoint(operator for operator, _ in benchmarker.timed)
    assert bad.isdisjoint(entry.shape_class.operator for entry in result.table.entries)
    wrong = [t for t in cases if t.shape_class.operator in bad - {benchmarker.fails}]
    assert sum("wrong, error" in line for line in result.refused) == sum(len(launch_variants(t.shape_class)) for t in wrong)
    assert any("out of registers" in line for line in result.refused)


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    cases = collect_tuning_cases(_request(None), torch.device("cpu"))
    last = cases[-1].shape_class.operator
    first = ListBenchmarker(stops=last)
    with pytest.raises(KeyboardInterrupt):
        tune(cases, first, tmp_path)
    interrupted = find_table([tmp_path], "NVIDIA Test", "3.9.0")
    assert interrupted is not None
    begun = next(place for place, case in enumerate(cases) if case.shape_class.operator == last)
    assert len(interrupted.entries) == begun > 0
    second = ListBenchmarker()
    result = tune(cases, second, tmp_path)
    assert result.num_known == len(interrupted.entries)
    assert len(result.table.entries) == len(cases)
    assert len(second.timed) == sum(len(launch_variants(case.shape_class)) for case in cases[begun:])
    third = ListBenchmarker()
    assert tune(cases, third, tmp_path).num_known == len(cases)
    assert third.verified == []
    assert len(tune(cases, third, tmp_path, again=True).measured) == len(cases)


def test_tuning_with_little_time(tmp_path: Path) -> None:
    cases = collect_tuning_cases(_request(None), torch.device("cpu"))
    result = tune(cases, ListBenchmarker(), tmp_path, limit_seconds=-1.0)
    assert result.num_left == len(cases) and not result.measured and not result.table.entries
    console = Console(record=True, width=200)
    show_tune(_request(tmp_path, limit_seconds=-1.0), console, as_json=False, benchmarker=ListBenchmarker())
    text = console.export_text()
    assert f"1 of {len(cases)}: {cases[0].shape_class.label}" in text, "a line for each where there is no terminal"
    assert f"no time for {len(cases)} more" in text
    for number in ("0", "nan", "-3", "soon"):
        for option in ("--seconds", "--minutes"):
            with pytest.raises(SystemExit):
                main(["tune", option, number])
    with pytest.raises(SystemExit):
        main(["tune", "--seconds", "1", "--minutes", "1"])


def test_planning_counts_in_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def plan_slowly(request: TuneRequest, device: torch.device) -> list[TuningCase]:
        clock[0] += 61.0
        return collect_tuning_cases(request, device)

    monkeypatch.setattr("sft.cli.tune.collect_tuning_cases", plan_slowly)
    console = Console(record=True, width=200)
    show_tune(_request(tmp_path, limit_seconds=60.0), console, as_json=True, benchmarker=ListBenchmarker())
    data = json.loads(console.export_text())
    assert not data["measured"] and data["num_left"] > 0


def test_exact_results_are_computed_once_for_all_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in collect_tuning_cases(_request(None), torch.device("cpu")) if len(launch_variants(case.shape_class)) > 1]
    benchmarker = object.__new__(CudaBenchmarker)
    benchmarker.device, benchmarker._reference = torch.device("cpu"), None
    calls: list[str] = []
    run = TuningCase.run_float64

    def counted(case: TuningCase, device: torch.device) -> list[torch.Tensor]:
        calls.append(case.shape_class.label)
        return run(case, device)

    monkeypatch.setattr(TuningCase, "run_float64", counted)
    monkeypatch.setattr(TuningCase, "run_kernels", TuningCase.run_aten)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for case in cases:
        errors = [benchmarker.verify(case.with_variant(variant)) for variant in launch_variants(case.shape_class)]
        assert all(0 < each.kernels == each.aten < 1e-5 for each in errors)
    assert len(cases) > 1 and calls == [case.shape_class.label for case in cases]


def test_the_largest_part_of_the_time_is_measured_first(capsys: pytest.CaptureFixture[str]) -> None:
    work = [case.estimated_work for case in collect_tuning_cases(_request(None), torch.device("cpu"))]
    assert work == sorted(work, reverse=True) and work[0] > 10 * work[-1]
    command = ["tune", "tests.backends.autotune.test_autotune_table:_model", "--input", "1x3x64x64", "--dry-run"]
    assert main([*command, "--tile", "16", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "conv2d" in lines[0] and lines[-1].startswith(f"{len(work)} classes, ")
    assert main([*command, "--tile", "16", "--dtype", "float32", "--json"]) == 0
    assert [each["share"] for each in json.loads(capsys.readouterr().out)["cases"]] == pytest.approx([each / sum(work) for each in work])


def test_a_plan_gets_entries_for_the_shapes_of_its_strips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Strips of a plan may be too small for the entries of untiled layers, so that PyTorch's operators would run."""
    shape, options = (1, 3, 2048, 2048), sft.Options(tile=(4, None))
    plan = sft.plan(_model(), shape, budget="1GiB", options=options)
    strips = TuneRequest(models=[(_model(), (shape,))], dtypes=("float32",), options=sft.Options(), budget=plan.total_bytes, plan=plan)
    planned = [case.shape_class for case in collect_tuning_cases(strips, torch.device("cpu"))]
    whole = TuneRequest(models=strips.models, dtypes=("float32",), options=sft.Options(strategy="none"), budget="64GiB")

    def lacking(request: TuneRequest) -> list[ShapeClass]:
        table = tune(collect_tuning_cases(request, torch.device("cpu")), ListBenchmarker(), tmp_path, again=True).table
        return [each for each in planned if table.entry(each) is None]

    assert any(each.operator.startswith("conv2d") for each in lacking(whole))
    assert planned and not lacking(strips)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    command = ["tune", "tests.backends.autotune.test_autotune_table:_model", "--plan", str(path), "--dry-run"]
    assert main([*command, "--input", "1x3x2048x2048"]) == 0
    assert {line.split(": ")[0].split("  ")[-1] for line in capsys.readouterr().out.splitlines()[:-1]} == {each.label for each in planned}
    for changed, message in (
        (["--input", "1x3x64x64"], "it is for inputs of shape"),
        (["--input", "1x3x2048x2048", "--tile", "4"], "leave one of them out"),
    ):
        assert main([*command, *changed]) == 1
        assert message in capsys.readouterr().err
    assert main(["tune", "--plan", str(path), "--dry-run"]) == 1
    assert "need a model" in capsys.readouterr().err
    path.write_text("{}")
    assert main([*command, "--input", "1x3x2048x2048"]) == 1


def test_output_of_the_command(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    assert show_tune(_request(tmp_path), console, as_json=False, benchmarker=ListBenchmarker()) == 0
    text = console.export_text()
    assert "conv2d + bias + relu" in text
    assert "0 refused" in text
    console = Console(record=True, width=200)
    wrong = ListBenchmarker(errors={"max pool": 1.0})
    assert show_tune(_request(tmp_path, again=True), console, as_json=True, benchmarker=wrong) == 1
    data = json.loads(console.export_text())
    assert data["table"] == str(tmp_path / table_name("NVIDIA Test", "3.9.0"))
    assert data["refused"]
    assert all(line.startswith("max pool, ") for line in data["refused"])
    assert all(item["speedup"] == 2.0 for item in data["measured"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 1
    assert "run this on a machine with a GPU" in capsys.readouterr().err
    assert main(["tune", "sft.cli.tune:_UNet"]) == 1
    assert "give the shape of its input" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_table_of_this_gpu(tmp_path: Path) -> None:
    console = Console(record=True)
    assert show_tune(_request(tmp_path), console, as_json=True) == 0
