"""Selection of a time model for a GPU: shipped ones by name, scaled ones by properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.planner.cost.gpu_models import H100, H200, SHIPPED_MODELS, GpuPeaks, model_of_peaks, model_of_properties


def _properties(name: str, capability: tuple[int, int] = (9, 0), multiprocessors: int = 132, **more: int) -> Any:
    return SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=multiprocessors, **more)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "an H100"),
        ("NVIDIA H200", "an H200"),
        ("NVIDIA A100-SXM4-80GB", "an A100 (data sheet)"),
        ("NVIDIA GeForce RTX 4090", "an RTX 4090 (data sheet)"),
        ("NVIDIA GH200 480GB", "an H200"),
        ("NVIDIA L40S", "the NVIDIA L40S (its properties)"),
        ("NVIDIA RTX A1000", "the NVIDIA RTX A1000 (its properties)"),
    ],
)
def test_shipped_models_are_selected_by_name(name: str, expected: str) -> None:
    assert model_of_properties(_properties(name)).name == expected


def test_models_of_data_sheets_keep_the_order_of_the_gpus() -> None:
    models = {words: model for words, model in SHIPPED_MODELS}
    half = {words: model.flops_per_second(torch.bfloat16, 256) for words, model in models.items()}
    assert half["RTX 4090"] < half["A100"] < half["H100"] < 1.05 * half["H200"]
    assert [models[words].bytes_per_second for words in ("RTX 4090", "A100", "H100", "H200")] == sorted(
        model.bytes_per_second for model in models.values()
    )
    # A pass over an image is bound by the memory of a consumer card, not by its threads.
    assert models["RTX 4090"].biases_per_second == pytest.approx(models["RTX 4090"].bytes_per_second / 4)
    assert models["RTX 4090"].flops_per_second(torch.float64) < 0.02 * half["RTX 4090"]


def test_an_unknown_gpu_is_scaled_by_its_properties() -> None:
    """An L40S by its clock, 142 multiprocessors, and 384 bits of memory at 9 GHz: 362 TFLOP/s and 864 GB/s in its data sheet."""
    properties = _properties("NVIDIA L40S", (8, 9), 142, clock_rate=2_520_000, memory_clock_rate=9_001_000, memory_bus_width=384)
    model = model_of_properties(properties)
    share = model.flops_per_second(torch.bfloat16, 256) / H100.flops_per_second(torch.bfloat16, 256)
    assert share == pytest.approx(362e12 / 989e12, rel=0.05)
    assert model.bytes_per_second == pytest.approx(864e9 / 3.35e12 * H100.bytes_per_second, rel=0.02)
    assert model.num_multiprocessors == 142
    card = model_of_properties(_properties("NVIDIA GeForce RTX 4080", (8, 9), 142, clock_rate=2_520_000))
    assert card.flops_per_second(torch.bfloat16) == pytest.approx(model.flops_per_second(torch.bfloat16) / 2)


def test_a_gpu_without_known_properties_has_a_model() -> None:
    model = model_of_properties(_properties("AMD Instinct MI300X", (9, 4), 304))
    rates = [
        model.bytes_per_second,
        model.flops_per_second(torch.float16),
        model.flops_per_second(torch.float64),
        model.link_bytes_per_second,
    ]
    assert all(0 < rate < float("inf") for rate in rates)


def test_the_peaks_of_an_h100_give_its_model() -> None:
    peaks = GpuPeaks(
        half_flops_per_second=989e12,
        double_flops_per_second=67e12,
        bytes_per_second=3.35e12,
        link_bytes_per_second=64e9,
        num_multiprocessors=132,
        clock_hertz=1.83e9,
    )
    model = model_of_peaks("an H100", peaks)
    assert model.convolutions == H100.convolutions and model.bytes_per_second == H100.bytes_per_second
    assert model.biases_per_second == H100.biases_per_second and model.link_bytes_per_second == H100.link_bytes_per_second
    assert H200.bytes_per_second > H100.bytes_per_second
