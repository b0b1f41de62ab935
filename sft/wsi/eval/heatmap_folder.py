"""Folder of heatmaps: each slide has a folder of its own with ``heatmap.json``, which names the weights of each map."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft.wsi.eval.heatmap import Heatmap, write_map_table
from sft.wsi.run.files import write_json
from sft.wsi.run.results import as_weights_id, publish_files, results_lock
from sft.wsi.train.checkpoint import WeightsId

__all__ = ["HEATMAP_FILE", "HeatmapFolder", "read_heatmaps"]

HEATMAP_FILE = "heatmap.json"


class HeatmapFolder:
    """Folder of heatmaps of one model.

    Args:
        run: folder of the run.
        folder: for the maps. If a slide there has maps of newer weights of this run, these stay, and a folder next to it is used.
        weights: of the model.
    """

    def __init__(self, run: Path, folder: Path, weights: WeightsId) -> None:
        self._folder, self._weights = folder, weights
        #: True if the maps are among the results of the run
        self.is_in_run = os.path.realpath(folder.parent) == os.path.realpath(run)
        #: folder that is locked while files are replaced, and that maps are staged in
        self.root = folder.parent if self.is_in_run else folder

    def publish(self, staged: Path, heatmaps: Sequence[Heatmap]) -> list[Heatmap]:
        """Move the maps of one slide from their staging folder to their place; maps of other classes stay.

        Returns:
            The maps, with their new paths.

        Raises:
            RunFolderError: they cannot be moved.
        """
        slide = heatmaps[0].slide
        with results_lock(self.root):
            target = self._place(slide)
            outputs = read_heatmaps(target)
            for heatmap in heatmaps:
                names = [path.name for path in heatmap.files]
                for old in outputs.get(heatmap.output, {}).get("files", []):
                    if old not in names and Path(old).name == old:  # such as crops of a call that wanted more of them
                        (target / old).unlink(missing_ok=True)
                note = {"note": heatmap.note} if heatmap.note else {}
                outputs[heatmap.output] = {"score": heatmap.score, **note, "files": names, "weights": self._weights.as_dict()}
            write_json(staged / slide / HEATMAP_FILE, {"slide": slide, "outputs": outputs})
            publish_files(staged / slide, target, label=HEATMAP_FILE)
            published = [replace(heatmap, files=tuple(target / path.name for path in heatmap.files)) for heatmap in heatmaps]
            for heatmap in published:
                write_map_table(target.parent, heatmap, self._weights.text)
        return published

    def _place(self, slide: str) -> Path:
        weights = self._weights
        for entry in read_heatmaps(self._folder / slide).values() if self.is_in_run else ():
            with suppress(KeyError, TypeError, ValueError):
                other = as_weights_id(entry["weights"])
                if other.checkpoint == weights.checkpoint and (other.epoch, other.step or 0) > (weights.epoch, weights.step or 0):
                    return self._folder.with_name(f"{self._folder.name}-epoch{weights.epoch}") / slide
        return self._folder / slide


def read_heatmaps(folder: Path) -> dict[str, Any]:
    """Maps in a slide's folder by output: score, file names and weights; empty for a folder of an earlier version."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return dict(json.loads((folder / HEATMAP_FILE).read_text(encoding="utf-8"))["outputs"])
    return {}
