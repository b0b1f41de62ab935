"""Numbers of pages about GPUs are those of the newest committed results of an H100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


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


def test_time_of_a_step() -> None:
    name, results = _newest("steps")
    (step,) = (step for step in results["steps"] if (step["name"], step["dtype"], step["backend"]) == ("vgg16 step", "bf16", "aten"))
    sentence = f"{1e3 * step['seconds'][1]:.1f} ms a step, and eager PyTorch {1e3 * step['plain_seconds'][1]:.1f} ms"
    assert _link(sentence, name, "../") in (_ROOT / "docs" / "gpu.md").read_text()


def test_rates_of_the_time_model() -> None:
    name, _ = _newest("rates")
    assert _link("measured rates", name, "../") in (_ROOT / "docs" / "gpu.md").read_text()


def test_times_of_other_steps() -> None:
    name, results = _newest("steps")
    steps, text = {step["name"]: step for step in results["steps"]}, (_ROOT / "docs" / "gpu.md").read_text()

    def milliseconds(case: str, key: str = "seconds") -> str:
        return f"{1e3 * steps[case][key][1]:.1f} ms"

    for case in ("vgg16 large", "resnet18 frozen large"):
        assert _link(f"{steps[case]['seconds'][1]:.2f} s", name, "../") in text
    assert f"With its norms as operators it took {steps['resnet18 frozen large, norms apart']['seconds'][1]:.2f} s" in text
    assert _link(milliseconds("vgg16 step in 1.2 GiB"), name, "../") in text
    assert _link(f"{milliseconds('u-net step')}, and eager PyTorch {milliseconds('u-net step', 'plain_seconds')}", name, "../") in text


def test_shares_of_kernels() -> None:
    name, results = _newest("kernels")
    text = (_ROOT / "docs" / "gpu.md").read_text()

    def share(step: str, *words: str) -> tuple[float, float]:
        total, *kernels = results["kernels"][step]
        return sum(each["ms"] for each in kernels if any(word in each["kernel"] for word in words)), total["ms"]

    norms, total = share("resnet18-frozen-large-norms-apart", "batch_norm_elementwise_backward_eval")
    assert _link(f"{norms:.0f} of {total:,.0f} ms", name, "../") in text
    assert f"{norms:.0f} of {total:,.0f} ms" in (_ROOT / "sft" / "backends" / "library_fusion.py").read_text()
    interpolation, total = share("u-net-step", "EmbeddingBag", "upsample_bilinear2d")
    share_link = _link("kernels' time", name, "../")
    assert abs(interpolation / total - 1 / 3) < 0.03 and f"a third of its\n  {share_link} is interpolation" in text


def test_steps_with_more_memory_than_projected() -> None:
    name, results = _newest("steps")
    wrong = [step for step in results["steps"] if step["status"] == "wrong"]
    text = (_ROOT / "docs" / "gpu.md").read_text()
    link = _link(f"{len(results['steps'])} larger steps", name, "../")
    assert len(wrong) == 3 and f"Of {link} three reserved more" in text
    shares = {step["name"]: step["reserved_bytes"] / step["projected_reserved_bytes"] for step in wrong}
    assert shares["ViT-S adapters, 512 tiles"] < 1.0045 and "512 tiles of a ViT (0.4 %)" in text


def test_times_of_graphs() -> None:
    name, results = _newest("steps")
    steps, text = {step["name"]: step for step in results["steps"]}, (_ROOT / "docs" / "gpu.md").read_text()

    def milliseconds(case: str, key: str = "seconds") -> str:
        return f"{1e3 * steps[case][key][1]:.1f} ms"

    graphs = f"{milliseconds('resnet18 frozen strips')} a step without graphs, and "
    assert _link(f"{graphs}{milliseconds('resnet18 frozen strips, CUDA graphs')} with them", name, "../") in text
    small = f"{milliseconds('resnet18 frozen step')}, and eager PyTorch {milliseconds('resnet18 frozen step', 'plain_seconds')}"
    assert _link(small, name, "../") in text


def _newest_h200(kind: str) -> tuple[str, dict[str, Any]]:
    path = max((_ROOT / "benchmarks" / "results").glob(f"*-h200-gpu-{kind}.json"))
    return path.stem, json.loads(path.read_text())


def test_steps_on_an_h200() -> None:
    name, results = _newest_h200("steps")
    steps, text = {step["name"]: step for step in results["steps"]}, " ".join((_ROOT / "docs" / "gpu.md").read_text().split())
    for words, case in (
        ("VGG-16 in an eighth of the activations' memory {}", "vgg16 step"),
        ("in 1.2 GiB {};", "vgg16 step in 1.2 GiB, recorded passes"),
        ("ResNet-18 with frozen norms in 400 MiB {},", "resnet18 frozen step in 400 MiB"),
        ("in training untiled {};", "resnet18 training step in 8 GiB"),
        ("a U-Net in an eighth {}.", "u-net step"),
        ("512 tiles of a ViT-S with adapters in 2 GiB {} (", "ViT-S adapters, 512 tiles"),
    ):
        ours, eager = (1e3 * steps[case][key][1] for key in ("seconds", "plain_seconds"))
        assert words.format(f"{ours:.1f} and {eager:.1f}") in text, case
    wrong = {
        step["name"]: step["reserved_bytes"] / step["projected_reserved_bytes"] - 1
        for step in results["steps"]
        if step["status"] == "wrong"
    }
    assert f"[{len(steps) - len(wrong)} of {len(steps)} larger steps](../benchmarks/results/{name}.md)" in text
    assert {case: round(100 * share) for case, share in wrong.items()} == {"ViT-S adapters, 512 tiles": 15, "resnet18 frozen large": 18}
    recorded, plain = steps["vgg16 step in 1.2 GiB, recorded passes"], steps["vgg16 step in 1.2 GiB"]
    differences = [round(1e3 * (step["seconds"][1] - step["modelled_seconds"]), 1) for step in (recorded, plain)]
    source = (_ROOT / "sft" / "api" / "plan_search.py").read_text()
    assert f"VGG-16 in 1.2 GiB takes {differences[0]} ms more" in source and f"and {differences[1]} ms without" in source


def test_times_in_the_changelog() -> None:
    _, results = _newest_h200("steps")
    steps = {step["name"]: 1e3 * step["seconds"][1] for step in results["steps"]}
    before, after = steps["ViT-S adapters, 512 tiles, attention by products"], steps["ViT-S adapters, 512 tiles"]
    assert f"512 tiles of a ViT-S {before:.0f} to {after:.0f} ms on an H200" in (_ROOT / "CHANGELOG.md").read_text()


def test_smoke_test_and_tests_on_an_h200() -> None:
    text = (_ROOT / "docs" / "gpu.md").read_text()
    (name, smoke), (tests_name, tests) = _newest_h200("smoke"), _newest_h200("tests")
    right = sum(case["status"] == "ok" for case in smoke["cases"])
    assert _link(f"{right} of {len(smoke['cases'])}", name, "../") in text
    run = tests["tests"]["marked gpu"]
    assert _link(f"{run['passed']} of {run['passed'] + run.get('failed', 0)}", tests_name, "../") in text


def test_sums_of_wide_rows() -> None:
    name, results = _newest_h200("rates")
    rate = results["rates"]["bf16 128 -> 128, 512 x 1024"]
    narrow, wide = (round(rate[key]["microseconds"]) for key in ("bias", "bias, wide rows"))
    text = (_ROOT / "sft" / "lower" / "custom_ops" / "statistics.py").read_text()
    assert f"in 128 channels take {wide} instead of {narrow}" in text and name.endswith("-h200-gpu-rates")
