"""``python -m sft``, called as a function: its output, files and exit codes."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.cli import plans
from sft.cli.main import escape_unencodable_output, main, output_problem
from sft.cli.parser import UsageError, build_parser, parse_command_line
from sft.cli.plans import load_model
from sft.common.errors import SourceError
from sft.common.installation import unread_variables
from sft.planner.options import STRATEGIES

_NET = ("examples.models:unet", "--model-args", "num_classes=2", "width=4", "levels=2", "--input", "1x3x96x64")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Refused(nn.Module):
    """A module with its own gradient; the command line builds it by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = _Doubled.apply(x)  # type: ignore[no-untyped-call]  # as torch leaves it
        return doubled


def _lines(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_doctor_checks_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unread_variables():  # of the tests
        monkeypatch.delenv(name)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"] == torch.__version__
    assert all(device["self_check"]["ok"] for device in report["devices"])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "an H100 and an H200 with torch 2.11" in text and set(report["verified"]) == {"cpu", "cuda"}
    assert "self-check" in text and " free of " in text and "imported from" in text and "WARNING" not in text


def test_doctor_names_variables_that_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unread_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("SFT_CACHE_DIR", "")
    monkeypatch.setenv("SFT_CACHEDIR", "/tmp")
    assert unread_variables() == ["SFT_CACHEDIR"]


def test_doctor_names_a_folder_that_hides_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An import hook installs the package, and the current folder contains a clone of the same name."""
    (tmp_path / "sft").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and not (Path(entry) / "sft" / "__init__.py").exists()])
    sys.path_importer_cache.clear()
    assert main(["doctor"]) == 0
    assert "which is not a package, as sft; install again: pip install" in capsys.readouterr().out


def test_doctor_fails_if_a_step_is_not_exact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.cli.doctor.compile", lambda model, *_, **__: nn.Sequential(model, nn.Identity()).half())
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_plan_is_that_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", *_NET, "--budget", "4MiB", "--tile", "32", "--device", "cpu"]
    assert main([*arguments, "--json", "--out", str(file)]) == 0
    printed = sft.Plan.from_json(capsys.readouterr().out)
    model = load_model("examples.models:unet", {"num_classes": 2, "width": 4, "levels": 2})
    assert printed == sft.plan(model, (1, 3, 96, 64), budget="4MiB", options=sft.Options(tile=(32, None)), device="cpu")
    assert sft.Plan.from_json(file.read_text()) == printed
    assert main(arguments) == 0
    assert "training step" in capsys.readouterr().out


def test_inference_plans_no_backward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_NET, "--json", "--inference"]) == 0
    assert not sft.Plan.from_json(capsys.readouterr().out).training


def test_a_plan_may_stream_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_NET, "--json", "--weights", "stream"]) == 0
    assert json.loads(_lines(capsys)[0])["streamed_weights"] > 0


class Labelled(nn.Module):
    """Token ids, an image and labels, reduced to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.conv, self.head = nn.Embedding(10, 4), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, ids: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.tokens(ids).mean(1) + self.conv(image).mean((2, 3)))
        return nn.functional.cross_entropy(scores, labels)


def test_inputs_may_be_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    net = (f"{__name__}:Labelled", "--input", "2x7:int64", "2x3x32x24", "2:int64")
    assert main(["check", *net]) == 0
    capsys.readouterr()
    assert main(["plan", *net, "--json", "--device", "cpu"]) == 0
    printed = sft.Plan.from_json(capsys.readouterr().out)
    whole = [torch.zeros(shape, dtype=torch.int64) for shape in ((2, 7), (2,))]
    assert printed == sft.plan(load_model(f"{__name__}:Labelled", {}), [whole[0], (2, 3, 32, 24), whole[1]], device="cpu")
    assert main(["plan", *net, "--compare", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert not next(row for row in rows if row["strategy"] == "auto")["error"]
    apart = (net[0], *(word for shape in net[2:] for word in ("--input", shape)))
    assert main(["plan", *apart, "--json", "--device", "cpu"]) == 0
    assert sft.Plan.from_json(capsys.readouterr().out) == printed


def test_compare_has_a_line_for_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    # The smallest budget of untiled plans is above this one, and that of strips is not.
    assert main(["plan", *_NET, "--budget", "750KiB", "--compare", "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(rows) == STRATEGIES
    assert rows["none"]["error"] and rows["none"]["total_bytes"] > 750 * 1024
    assert rows["auto"]["estimated_seconds"] > 0 and rows["auto"]["projected_seconds"] is None
    assert not rows["auto"]["error"] and rows["auto"]["total_bytes"] <= 750 * 1024 and rows["auto"]["redundancy"] > 1
    assert main(["plan", *_NET, "--budget", "750KiB", "--compare"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line and line[0] in rows] == [[name, "no" if rows[name]["error"] else "yes"] for name in rows]


def test_many_segments_are_summarized(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with more than a hundred segments is 40 lines, and a line for each segment with --costs."""
    made: list[sft.Plan] = []
    make = plans._plan_request

    def once(request: plans.PlanRequest) -> sft.Plan:
        made.extend([] if made else [make(replace(request, options=replace(request.options, cuda_graphs=False)))])
        return made[0]

    monkeypatch.setattr(plans, "_plan_request", once)  # the same plan four times, from one search
    command = ["plan", "examples.models:resnet50", "--model-args", "num_classes=2", "width=8", "--input", "1x3x512x512", "--device", "cuda"]
    command += ["--budget", "70MiB"]
    assert main([*command, "--json"]) == 0
    num_segments = len(sft.Plan.from_json(capsys.readouterr().out).segments)
    assert num_segments > 40
    assert main(command) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and "more with smaller working sets" in text and "by the rates of an H100" in text
    assert main([*command, "--costs"]) == 0
    costs = capsys.readouterr().out
    assert num_segments + 10 <= len(costs.splitlines()) <= num_segments + 20 and "more with" not in costs
    assert main([*command, "--full"]) == 0
    assert capsys.readouterr().out.count("Segment ") == num_segments


def test_compare_lists_the_needed_bytes_if_no_strategy_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", *_NET, "--budget", "200KiB", "--compare", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.split()[:1] and line.split()[0] in STRATEGIES]
    assert len(rows) == len(STRATEGIES) and all(line.split()[1] == "no" for line in rows)
    assert sum("needs " in line and " of 200.00 KiB" in line for line in rows) >= 8
    assert "No strategy fits: the budget is 200.00 KiB" in text and "--budget " in text


def test_a_plan_may_be_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *_NET, "--json"]) == 0
    assert sft.Plan.from_json(capsys.readouterr().out).projected_seconds is None
    assert main(["plan", *_NET, "--json", "--time"]) == 0
    seconds = sft.Plan.from_json(capsys.readouterr().out).projected_seconds
    assert seconds is not None and seconds > 0


def test_a_plan_is_drawn_and_its_costs_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", *_NET, "--tile", "32", "--costs", "--plot", str(tmp_path / "plan.png")]) == 0
    text = capsys.readouterr().out
    assert "Seconds of a step, estimated" in text and "on the CPU" not in text and text.count("Segment ") == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_time_is_drawn_against_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["plan", *_NET, "--strategy", "optimal", "--pareto", str(tmp_path / "front.png"), "--budgets", "64MiB", "1500KiB"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["strategy"] for row in rows} == {"optimal", "none"} and all(row["total_bytes"] <= row["budget_bytes"] for row in rows)
    assert main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("optimal", "none")] == [row["strategy"] for row in rows]
    assert lines[1][-2].startswith("~") and lines[1][-1] == "s" and any("estimated" in line for line in lines)
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


class Strided(nn.Module):
    """A model that reads a number from a buffer, which it lacks on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("stride", torch.tensor([8.0]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) / float(self.get_buffer("stride")[0])
        return y


def test_models_that_read_buffers_are_built_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "check"):
        assert main([command, f"{__name__}:Strided", "--input", "1x3x64x64"]) == 0
    assert "exact" in capsys.readouterr().out
    with torch.device("meta"):
        model = Strided()
    with pytest.raises(sft.UnsupportedError, match=r"stride: .*reads values of this tensor at cli/test_cli\.py:\d+ .*meta device"):
        sft.plan(model, (1, 3, 64, 64))


def test_check_lists_unsupported_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *_NET]) == 0
    assert "exact" in capsys.readouterr().out
    assert main(["check", f"{__name__}:Refused", "--input", "1x3x64x64", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and "autograd.Function" in report["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "no_such_model", "--input", "1x3x64x64"], ["no_such_model", "package.module:callable"]),
        (["plan", "./my_net.py", "--input", "1x3x64x64"], ["it is a file", "my_net:NAME"]),
        (["plan", "torch.nn:Conv2D", "--input", "1x3x64x64"], ["Did you mean Conv2d?"]),
        (["plan", "torch.nn:Conv2d", "--model-args", "in_channels=3", "out_channels=4", "kernel_size=3", "--input", "9x8"], ["1x3x9x8"]),
        (["plan", "no_such_module:net", "--input", "1x3x64x64"], ["no_such_module", "PYTHONPATH"]),
        (["plan", "torch.nn:NoSuch", "--input", "1x3x64x64"], ["NoSuch"]),
        (["plan", "torch.nn:Conv2d", "--input", "1x3x64x64"], ["TypeError", "--model-args"]),
        (["plan", "torch:zeros", "--model-args", "size=(1,)", "--input", "1x3x64x64"], ["Tensor", "nn.Module"]),
        (["plan", "torch.nn:ReLU", "--input", "64"], ["64", "1x3x20480x20480"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x0x64"], ["1x3x0x64"]),
        (["plan", "torch.nn:ReLU", "--input", f"1x3x64x{10**25}"], ["1x3x20480x20480"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64:float16"], ["float16", "int64"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64:int"], ["int64"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--budget", "much"], ["--budget much", "11GiB"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--link", "x", "--ranks", "2"], ["--link x", "11GiB"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--model-args", "inplace=True", "inplace=False"], ["inplace is given twice"]),
        (["plan", "my_net.py:build", "--input", "1x3x64x64"], ["without its ending: my_net:build"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--budget", "1KiB"], ["1.00 KiB", "Raise the budget"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--tile", "0"], ["--tile", "512x1024"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--model-args", "inplace"], ["inplace", "name=value"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--plot", "plan.strange"], ["plan.strange"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--plot", "no/such/folder/plan.png"], ["no/such/folder/plan.png"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--pareto", "front.png", "--budgets", "1KiB"], ["1.00 KiB", "Raise the budget"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--out", "no/such/folder/plan.json"], ["no/such/folder/plan.json"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--host-budget", "\N{SUPERSCRIPT TWO}"], ["--host-budget", "11GiB"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--budgets", "1MiB"], ["--budgets", "--pareto"]),
        (
            ["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--compare", "--out", "plan.json", "--costs"],
            ["--out and --costs", "--compare"],
        ),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--pareto", "front.png", "--plot", "plan.png"], ["--plot", "--pareto"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--compare", "--html", "plan.html"], ["--html", "--compare"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--out", "plan.json", "--html", "plan.pdf"], ["plan.pdf", ".html"]),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--html", "no/such/folder/plan.html"], ["no/such/folder/plan.html"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    out, err = _lines(capsys)
    assert not out and len(err.splitlines()) == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("arguments", [["--debug"], ["plna"], ["plan"], ["plan", "x", "--budget", "-1GiB"], ["doctor", "--nope"]])
def test_a_wrong_command_line_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = _lines(capsys)
    assert ended.value.code == 2 and not out and err.startswith("error: ") and len(err.splitlines()) == 1 and "--help" in err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["plan"], "Example: python -m sft plan resnet18 --input 1x3x4096x4096 --budget 2GiB --frozen-norms"),
        (["check"], "Example: python -m sft check resnet18 --input 1x3x4096x4096"),
        (["plan", "x", "--input", "1x3x8x8", "--json", "plan.json"], "--json prints to standard output and takes no file"),
        (["plan", "x", "--input", "1x3x8x8", "--nope"], "python -m sft plan --help"),
    ],
)
def test_a_wrong_command_line_names_its_remedy(arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert remedy in _lines(capsys)[1]


@pytest.mark.parametrize("text", ["raise SystemExit(7)", "import sys\ndef net(): sys.exit('bye')"])
def test_a_module_that_ends_the_process_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"sft_test_ends{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", f"{name}:net", "--input", "1x3x8x8"]) == 1
    assert "SystemExit" in _lines(capsys)[1]


def test_ctrl_c_during_an_import_ends_the_process_without_a_traceback() -> None:
    code = (
        "import os, signal\nfrom sft.cli.main import exit_on_interrupt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it\n"
        "with exit_on_interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr == ""


def test_a_failure_to_write_standard_output_is_reported() -> None:
    assert output_problem(OSError(errno.ENOSPC, "No space left on device")) == "cannot write standard output: No space left on device"
    assert not output_problem(OSError(errno.ENOSPC, "No space left on device", "plan.json"))
    assert not output_problem(SourceError("cannot write plan.json"))


def test_a_terminal_without_width_shows_the_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["check", "torch.nn:ReLU", "--input", "1x3x8x8"]) == 0
    assert "exact" in capsys.readouterr().out


def test_no_command_shows_five_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = _lines(capsys)
    examples = [line.split() for line in out.splitlines() if line.startswith("  python -m sft ")]
    assert len(examples) == 5 and not err
    for words in examples:
        assert build_parser().parse_args(words[3:]).command == words[3]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["plan", "no_such_model", "--input", "1x3x64x64", "--json"], 1, "InputError"),
        (["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--budget", "1KiB", "--json"], 1, "BudgetError"),
        (["plan", f"{__name__}:Refused", "--input", "1x3x64x64", "--json"], 1, "UnsupportedError"),
        (["check", "torch.nn:ReLU", "--json"], 2, "UsageError"),
        (["tune", "--json", "--minutes", "-1"], 2, "UsageError"),
        (["doctor", "--json", "--nope"], 2, "UsageError"),
    ],
)
def test_an_error_as_json(arguments: list[str], code: int, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(arguments) == code
    except SystemExit as ended:
        assert ended.code == code
    out, err = _lines(capsys)
    assert json.loads(out)["type"] == kind
    assert err.startswith("error: ")


def test_errors_end_with_the_line_to_try_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "torch.nn:ReLU", "--input", "1x3x64x64", "--budget", "1KiB"]) == 1
    assert re.search(r" Try: --budget [\d.]+KiB$", _lines(capsys)[1].strip())
    assert main(["plan", f"{__name__}:Refused", "--input", "1x3x64x64", "--inference"]) == 1
    assert _lines(capsys)[1].strip().splitlines()[-1] == f"Try: python -m sft check {__name__}:Refused --input 1x3x64x64 --inference"
    with pytest.raises(sft.BudgetError, match=r"\nTry: budget='[\d.]+KiB'$"):
        sft.compile(torch.nn.ReLU(), (1, 3, 64, 64), budget="1KiB")
    with pytest.raises(sft.UnsupportedError, match=r"\nTry: print\(sft\.check\(model, \(1, 3, 64, 64\)\)\)$"):
        sft.compile(Refused(), (1, 3, 64, 64), budget="1MiB")


def test_debug_prints_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sft.InputError):
        main(["--debug", "plan", "no_such_model", "--input", "1x3x64x64"])


def test_python_m_sft_runs() -> None:
    completed = subprocess.run([sys.executable, "-m", "sft", "--help"], capture_output=True, text=True, check=True)
    assert all(command in completed.stdout for command in ("doctor", "check", "plan"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w", buffering=2**16)  # noqa: SIM115  # holds the whole text, so closing it fails, too
    monkeypatch.setattr(sys, "stdout", full)
    assert main(["plan", *_NET, "--json"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "No space left" in message
    with pytest.raises(OSError):
        full.close()


def test_output_of_any_encoding_takes_all_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    escape_unencodable_output()
    print("Gewebe ä", flush=True)
    assert raw.getvalue() == b"Gewebe \\xe4\n"


@pytest.mark.parametrize(
    ("arguments", "close"),
    [
        (["plan", "m:f", "--inptu", "1x3x8x8"], "unrecognized option --inptu; did you mean --input?"),
        (["plan", "m:f", "--input", "1x3x8x8", "--buget=1GiB"], "unrecognized option --buget; did you mean --budget?"),
        (["--debg", "doctor"], "unrecognized option --debg; did you mean --debug?"),
        (["doctor", "--zzz"], "unrecognized arguments: --zzz;"),
    ],
)
def test_a_misspelt_option_is_an_error_with_the_one_that_it_resembles(arguments: list[str], close: str) -> None:
    with pytest.raises(UsageError, match=re.escape(close)):
        parse_command_line(arguments)
