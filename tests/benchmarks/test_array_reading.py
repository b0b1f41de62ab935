"""Benchmark of reading arrays: every reader reads all tiles, in both conditions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from array_reading import measure


def test_every_reader_is_measured(tmp_path: Path) -> None:
    np.save(tmp_path / "tiles.npy", np.zeros((3, 224, 224, 3), np.uint8))
    speeds = measure(tmp_path / "tiles.npy", 3, 2, 2)
    assert {name: [len(each[condition]) for condition in ("alone", "issuing")] for name, each in speeds.items()} == {
        "NumPy's copy": [2, 2],
        "pixels": [2, 2],
        "numbers in float32": [2, 2],
        "numbers in bfloat16": [2, 2],
    }
