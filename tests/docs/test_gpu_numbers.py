"""Numbers of pages about GPUs are those of the newest committed results of an H100 and an H200."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
#: Steps of the first session on an H200, on which decisions of the source and the changelog are based.
_FIRST_H200_STEPS = json.loads((_ROOT / "benchmarks/results/2026-11-26-h200-gpu-steps.json").read_text())["steps"]


def _newest(kind: str) -> tuple[str, dict[str, Any]]:
    """Name and content of the newest result of a kind."""
    path = max((_ROOT / "benchmarks" / "results").glob(f"*-h100-gpu-{kind}.json"))
    return path.stem, json.loads(path.read_text())


def _link(text: str, name: str, folder: str) -> str:
    return f"[{text}]({folder}benchmarks/results/{name}.md)"


@pytest.mark.parametrize(("page", "folder"), [("docs/gpu.md", "../"), ("kernels/README.md", "../")])
def test_counts_of_tests(page: str, folder: str) -> None:
    name, results = _newest("tests")
    text = (_ROOT / page).read_text()
    runs = {kind: (run["passed"], run["passed"] + run.get("failed", 0)) for kind, run in results["tests"].items()}
    passed, total = runs["kernels, compiled"]
    assert f"[{passed} of {total} tests" in text and f"{folder}benchmarks/results/{name}.md" in text
    if page == "docs/gpu.md":
        passed, total = runs["marked gpu"]
        assert _link(f"{passed} of {total} pass", name, folder) in text


def test_cases_of_the_smoke_test() -> None:
    name, results = _newest("smoke")
    right = [case for case in results["cases"] if case["status"] == "ok"]
    text = (_ROOT / "docs" / "gpu.md").read_text()
    assert _link(f"{len(right)} of {len(results['cases'])} cases right", name, "../") in text
    errors = [case["error"] for case in right]
    assert f"errors {min(errors):.1e} to {max(errors):.1e}" in text
    assert f"in all {len(right)} cases" in text
    assert all(case["allocated_bytes"] <= case["projected_bytes"] for case in right)
    assert all(case["reserved_bytes"] <= case["projected_reserved_bytes"] for case in right)
    exactness = (_ROOT / "docs" / "exactness.md").read_text()
    assert _link(f"{len(right)} steps that ran", name, "../") in exactness


def test_rates_of_the_time_model() -> None:
    name, _ = _newest("rates")
    assert _link("measured rates", name, "../") in (_ROOT / "docs" / "gpu.md").read_text()


def test_shares_of_kernels() -> None:
    name, results = _newest("kernels")
    text = (_ROOT / "docs" / "gpu.md").read_text()

    def share(step: str, *words: str) -> tuple[float, float]:
        total, *kernels = results["kernels"][step]
        return sum(each["ms"] for each in kernels if any(word in each["kernel"] for word in words)), total["ms"]

    norms, total = share("resnet18-frozen-large-norms-apart", "batch_norm_elementwise_backward_eval")
    assert _link(f"{norms:.0f} of {total:,.0f} ms", name, "../") in text
    assert f"{norms:.0f} of {total:,.0f} ms" in (_ROOT / "sft" / "backends" / "library_fusion.py").read_text()


def test_steps_with_more_memory_than_projected() -> None:
    name, results = _newest("steps")
    wrong = [step for step in results["steps"] if step["status"] == "wrong"]
    text = (_ROOT / "docs" / "gpu.md").read_text()
    link = _link(f"{len(results['steps'])} larger steps", name, "../")
    assert len(wrong) == 3 and f"Of {link} three reserved more" in text


def test_times_of_graphs() -> None:
    name, results = _newest("steps")
    steps, text = {step["name"]: step for step in results["steps"]}, (_ROOT / "docs" / "gpu.md").read_text()

    def milliseconds(case: str, key: str = "seconds") -> str:
        return f"{1e3 * steps[case][key][1]:.1f} ms"

    graphs = f"{milliseconds('resnet18 frozen strips')} a step without graphs, and "
    assert _link(f"{graphs}{milliseconds('resnet18 frozen strips, CUDA graphs')} with them", name, "../") in text


def _newest_h200(kind: str) -> tuple[str, dict[str, Any]]:
    path = max((_ROOT / "benchmarks" / "results").glob(f"*-h200-gpu-{kind}.json"))
    return path.stem, json.loads(path.read_text())


def _row(steps: dict[tuple[str, str], dict[str, Any]], case: str, words: str, budget: str) -> str:
    """The row of a step in the table of times: ours with PyTorch's operators and with kernels, and eager PyTorch's."""
    aten = steps[case, "aten"]
    times = (aten["seconds"], steps.get((case, "auto"), {}).get("seconds"), aten["plain_seconds"])
    return "|".join(("", f" {words} ", f" {budget} ", *(f" {1e3 * seconds[1]:.1f} " if seconds else " " for seconds in times), ""))


def test_steps_on_an_h200() -> None:
    name, results = _newest_h200("steps")
    text = (_ROOT / "docs" / "gpu.md").read_text()
    steps = {(step["name"], step["backend"]): step for step in results["steps"]}
    small, large = ", 2048 x 2048 px", ", 20,480 x 20,480 px"
    rows = (
        ("VGG-16" + small, "1.2 GiB", "vgg16 step in 1.2 GiB"),
        ("ResNet-18, frozen norms" + small, "400 MiB", "resnet18 frozen step in 400 MiB"),
        ("ResNet-18, frozen norms" + small, "250 MiB", "resnet18 frozen step in 250 MiB"),
        ("ResNet-18 in training" + small, "8 GiB (untiled)", "resnet18 training step in 8 GiB"),
        ("ResNet-18 in training" + small, "500 MiB", "resnet18 training step in 500 MiB"),
        ("ResNet-18 in training" + small, "450 MiB", "resnet18 training step in 450 MiB, cuts on the host"),
        ("ResNet-18 in training" + small, "300 MiB", "resnet18 training step in 300 MiB, cuts on the host"),
        ("U-Net" + small, "1 GiB", "u-net step in 1 GiB"),
        ("U-Net" + small, "700 MiB", "u-net step in 700 MiB"),
        ("ViT-S with adapters, 512 tiles", "2 GiB", "ViT-S adapters, 512 tiles"),
        ("VGG-16" + large, "11 GiB", "vgg16 large"),
        ("ResNet-18, frozen norms" + large, "11 GiB", "resnet18 frozen large"),
        ("ResNet-18 in training" + large, "40 GiB", "resnet18 training large"),
        ("ResNet-18 in training" + large, "28 GiB", "resnet18 training large in 28 GiB, cuts on the host"),
        ("U-Net" + large, "28 GiB", "u-net large"),
    )
    for words, budget, case in rows:
        assert _row(steps, case, words, budget) in text, case
    wrong = {
        step["name"]: round(100 * (step["reserved_bytes"] / step["projected_reserved_bytes"] - 1), 1)
        for step in results["steps"]
        if step["status"] == "wrong"
    }
    total = len(results["steps"])
    assert f"[{total - len(wrong)} of {total} larger steps](../benchmarks/results/{name}.md)" in text
    assert wrong == {"ViT-S adapters, 4,096 tiles": 0.1}
    assert "4,096 tiles of a ViT 0.1 % more" in text


def test_a_kernel_of_a_first_layer() -> None:
    name, results = _newest_h200("table")
    (entry,) = (
        entry
        for entry in results["table"]["entries"]
        if (entry["shape_class"]["channels"], entry["shape_class"]["kernel"], entry["shape_class"]["pixels"]) == ([3, 64], [3, 3], 4194304)
        and entry["shape_class"]["operator"] == "conv2d"
    )
    kernel, aten = (f"{1e6 * entry[key]:.0f}" for key in ("triton_seconds", "aten_seconds"))
    text = (_ROOT / "docs" / "gpu.md").read_text()
    assert _link("faster", name, "../") + f": {kernel} instead of {aten} µs for 3 x 3 taps, 64 channels" in text


def test_a_step_in_the_readme() -> None:
    """Plain PyTorch's allocated bytes above the start of a step, and our reserved bytes with everything resident."""
    (step,) = (step for step in _newest_h200("steps")[1]["steps"] if step["name"] == "vgg16 step in 1.2 GiB" and step["backend"] == "auto")
    plain, ours = (f"{step[key] / 2**30:.1f} GiB" for key in ("plain_allocated_bytes", "reserved_bytes"))
    ratio = step["seconds"][1] / step["plain_seconds"][1]
    assert f"| VGG-16, 2048², H200 | {plain} | | {ours}, {ratio:.2f} x time |" in (_ROOT / "README.md").read_text()


def test_recorded_passes_are_preferred_by_measured_differences() -> None:
    steps = {step["name"]: step for step in _FIRST_H200_STEPS}
    recorded, plain = steps["vgg16 step in 1.2 GiB, recorded passes"], steps["vgg16 step in 1.2 GiB"]
    differences = [round(1e3 * (step["seconds"][1] - step["modelled_seconds"]), 1) for step in (recorded, plain)]
    source = (_ROOT / "sft" / "api" / "plan_search.py").read_text()
    assert f"VGG-16 in 1.2 GiB takes {differences[0]} ms more" in source and f"and {differences[1]} ms without" in source


def test_times_in_the_changelog() -> None:
    steps = {step["name"]: 1e3 * step["seconds"][1] for step in _FIRST_H200_STEPS}
    before, after = steps["ViT-S adapters, 512 tiles, attention by products"], steps["ViT-S adapters, 512 tiles"]
    assert f"512 tiles of a ViT-S {before:.0f} to {after:.0f} ms on an H200" in (_ROOT / "CHANGELOG.md").read_text()


def test_smoke_test_and_tests_on_an_h200() -> None:
    text = (_ROOT / "docs" / "gpu.md").read_text()
    (name, smoke), (tests_name, tests) = _newest_h200("smoke"), _newest_h200("tests")
    right = sum(case["status"] == "ok" for case in smoke["cases"])
    assert _link(f"{right} of {len(smoke['cases'])}", name, "../") in text
    assert tests["tests"]["kernels, compiled"]["passed"] == 26 and not tests["tests"]["kernels, compiled"].get("failed")
    run = tests["tests"]["marked gpu"]
    assert _link(f"{run['passed']} of {run['passed'] + run.get('failed', 0)}", tests_name, "../") in text


def test_sums_of_wide_rows() -> None:
    """The sums of 128 channels of 64 x 512 pixels: by ATen, and by wide rows of 128 pixels."""
    name = "2026-11-28-h200-gpu-row-sums.md"
    rows = [line.split(" | ") for line in (_ROOT / "benchmarks" / "results" / name).read_text().splitlines() if line.startswith("| 1x")]
    (row,) = (row for row in rows if row[0] == "| 1x128x64x512")
    (narrow, narrow_bytes), (wide, wide_bytes) = (re.findall(r"[0-9.]+", cell) for cell in (row[1], row[-1]))
    most = max(float(re.findall(r"[0-9.]+", cell)[1]) for row in rows for cell in row[1:] if "MiB" in cell)
    text = (_ROOT / "sft" / "lower" / "custom_ops" / "row_reductions.py").read_text()
    assert f"it takes {float(narrow):.0f} microseconds and {float(narrow_bytes):.0f} MiB" in text and name in text
    assert f"{float(wide):.0f} microseconds and {float(wide_bytes):.1f} MiB" in text and f"{most:.0f} MiB" in text
