"""Old module names in pickles: lazy stand-ins for modules that have moved.

A pickle names a class by its module. ``import sft`` puts a stand-in for each old module into ``sys.modules``. A stand-in imports the new
module at the first access to a name, and no module earlier. It is not set as an attribute of a package: ``sft.plan`` is a function now and
was a package as well.

The table lists classes and functions that users pickle, and the classes pickled inside them. Lines are never removed. A module that still
exists and renamed a class calls :func:`renamed` from its own ``__getattr__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any

__all__ = ["install", "moved", "renamed", "restore_fields"]

#: Old module -> new module -> names. A renamed class is written ``Old=New``.
_MOVED: dict[str, dict[str, str]] = {
    "sft.analysis.interval": {"sft.common.interval": "Interval"},
    "sft.backends.choice": {"sft.backends.selector": "ShapeClass"},
    "sft.backends.table": {"sft.backends.autotune.table": "KernelTable TableEntry"},
    "sft.bands.mesh": {"sft.distributed.mesh": "LiveMesh MeshShape"},
    "sft.check": {"sft.api.check": "CheckReport check"},
    "sft.compile": {"sft.api.compile": "compile plan"},
    "sft.compiled": {"sft.api.compiled_module": "_rebuild"},
    "sft.deep.plan": {"sft.repeat.plan": "DeepPlan=RepeatPlan"},
    "sft.errors": {
        "sft.common.errors": "BudgetError InputError InternalError RankError SftError SkipSlideError SourceError UnsupportedError"
    },
    "sft.execute.reading": {"sft.torch_runtime.pass_statistics": "PassReading Reading"},
    "sft.execute.skipping": {"sft.torch_runtime.pass_statistics": "PassSkipping Skipping"},
    "sft.memory": {"sft.common.memory": "Peak measure_peak"},
    "sft.nn.dice": {"sft.nn.losses": "DiceLoss"},
    "sft.nn.with_loss": {"sft.nn.losses": "WithLoss"},
    "sft.optim.adamw": {"sft.optim.update": "AdamWUpdate"},
    "sft.optim.sgd": {"sft.optim.update": "SGDUpdate"},
    "sft.options": {"sft.planner.options": "Options"},
    "sft.outputs": {"sft.api.outputs": "Destination=OutputDestination"},
    "sft.plan.chain.chain": {"sft.solvers.chain": "Alternative Chain=StageChain Stage"},
    "sft.plan.chain.link": {"sft.solvers.chain": "Link=HostLink"},
    "sft.plan.chain.schedule": {"sft.solvers.schedule": "Operation Schedule"},
    "sft.plan.chain.simulate": {"sft.solvers.simulate": "Event=SimulationEvent Simulation"},
    "sft.plan.mesh": {"sft.planner.mesh_plan": "MeshPlan RankPlan"},
    "sft.plan.timeline": {"sft.planner.timeline": "SegmentCost Timeline TimelineEntry"},
    "sft.plan.types": {"sft.planner.plan": "Plan SegmentChoice SegmentPlan"},
    "sft.sources.array": {"sft.sources.arrays": "ArraySource _rebuild=_rebuild_source"},
    "sft.sources.array_image": {"sft.sources.arrays": "ArrayImage _rebuild=_rebuild_image"},
    "sft.sources.blocks": {"sft.sources.row_blocks": "RowBlocks"},
    "sft.sources.damage": {"sft.sources.error_policy": "BadTile Tolerant"},
    "sft.sources.load": {"sft.sources.normalize": "load_tensor"},
    "sft.sources.nifti": {"sft.sources.readers.nifti": "NiftiVolume"},
    "sft.sources.normalized": {"sft.sources.normalize": "Normalized"},
    "sft.sources.openslide": {"sft.sources.readers.openslide": "Slide _SlideFacts"},
    "sft.sources.raster": {"sft.sources.file_image": "FileImage", "sft.sources.image": "ImageFacts Raster"},
    "sft.sources.repeating": {"sft.sources.source": "RepeatingImage"},
    "sft.sources.slide": {"sft.sources.readers.openslide": "Slide _Facts=_SlideFacts"},
    "sft.sources.strips": {"sft.sources.strip_reader": "StripReader"},
    "sft.sources.volume": {"sft.sources.readers.nifti": "NiftiVolume"},
    "sft.sources.zarr": {"sft.sources.readers.zarr": "ZarrImage"},
    "sft.sources.zarr_image": {"sft.sources.readers.zarr": "ZarrImage"},
    "sft.tissue.masked": {"sft.tissue.mask": "Masked crop_to_tissue"},
    "sft.tissue.regions": {"sft.tissue.polygons": "Regions"},
    "sft.tradeoff": {"sft.api.pareto": "TradeoffRow pareto"},
    "sft.units": {"sft.common.byte_units": "format_bytes parse_bytes"},
    "sft.weights.disk": {"sft.weights.disk_store": "DiskStore"},
    "sft.weights.file": {"sft.weights.disk_store": "WeightsFile check_resumed=check_resume"},
    "sft.weights.layout": {"sft.weights.record": "Field=RecordField Layout=RecordLayout TensorSpec"},
    "sft.weights.single": {"sft.weights.unbuffered_stream": "SingleReading=UnbufferedPass SingleStream=UnbufferedStream"},
    "sft.wsi.augment": {"sft.wsi.data.augment": "Augmentation draw_augmentation"},
    "sft.wsi.backbones": {"sft.wsi.model.backbones": "cut_before_pooling load_backbone"},
    "sft.wsi.checkpoint": {"sft.wsi.train.checkpoint": "CheckpointFolder"},
    "sft.wsi.experiment": {"sft.wsi.train.experiment": "Experiment load_experiment"},
    "sft.wsi.heads": {"sft.wsi.model.heads": "AttentionHead Evidence MaximumHead PooledHead SegmentationHead SlideModel build_model"},
    "sft.wsi.heatmap": {"sft.wsi.eval.heatmap": "HeatmapMaker"},
    "sft.wsi.inference": {"sft.wsi.eval.predict": "Predictor"},
    "sft.wsi.interruption": {"sft.wsi.train.signals": "Interruption"},
    "sft.wsi.metrics": {"sft.wsi.eval.metrics": "Estimate Prediction evaluate_predictions"},
    "sft.wsi.ranks": {"sft.wsi.train.distributed": "joined"},
    "sft.wsi.runfolder": {"sft.wsi.run.folder": "RunFolder"},
    "sft.wsi.splits": {"sft.wsi.data.splits": "assign_splits"},
    "sft.wsi.table": {"sft.wsi.data.table": "SlideRecord SlideTable read_table"},
    "sft.wsi.tasks": {"sft.wsi.model.tasks": "Task"},
    "sft.wsi.training": {"sft.wsi.train.trainer": "Trainer"},
    "sft.wsi.views": {"sft.wsi.data.transforms": "Affine=ColourAffine Recoloured Turned"},
}

#: Renamed classes of modules that still exist, in the same form.
_RENAMED: dict[str, dict[str, str]] = {
    "sft.nn.repeat": {"sft.nn.repeat": "_Known=_BlockCache"},
    "sft.weights.stream": {"sft.weights.stream": "Counters=StreamCounters Reading=StreamPass"},
}

#: Removed packages. Unpickling imports the parents of a module first.
_PACKAGES = ("sft.bands", "sft.deep", "sft.execute", "sft.plan", "sft.plan.chain")


class _Moved(ModuleType):
    """Stand-in for a module that has moved.

    Args:
        name: old name of the module.
        places: new module and new name by old name.
    """

    def __init__(self, name: str, places: dict[str, tuple[str, str]]) -> None:
        super().__init__(name, f"Stand-in for {name}, which has moved.")
        self._places = places

    def __getattr__(self, name: str) -> Any:
        # Tools probe every module for names such as __file__: a name outside the table must import no module.
        place = self.__dict__.get("_places", {}).get(name)
        if place is None:
            raise AttributeError(f"module {self.__name__!r}, kept for old pickles, has no attribute {name!r}")
        value = getattr(importlib.import_module(place[0]), place[1])
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._places})


def install() -> None:
    """Put the stand-ins into ``sys.modules``."""
    for name, places in moved().items():
        sys.modules.setdefault(name, _Moved(name, places))


def moved() -> dict[str, dict[str, tuple[str, str]]]:
    """New module and new name, by old module and old name."""
    return {**{name: {} for name in _PACKAGES}, **{name: _places(targets) for name, targets in _MOVED.items()}}


def renamed(module: str, name: str) -> Any:
    """Value of an old name of a module that still exists, for its ``__getattr__``.

    Raises:
        AttributeError: the module never had this name.
    """
    place = _places(_RENAMED.get(module, {})).get(name)
    if place is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(place[0]), place[1])


def _places(targets: dict[str, str]) -> dict[str, tuple[str, str]]:
    places = {}
    for module, names in targets.items():
        for pair in names.split():
            old, _, new = pair.partition("=")
            places[old] = module, new or old
    return places


def restore_fields(record: Any, state: Sequence[Any]) -> None:
    """Set the fields of a frozen dataclass with slots from its pickle, which lists their values.

    A pickle of an older release has fewer values; the last fields then have their defaults. Called from ``__setstate__``.
    """
    members = fields(record)
    for member, value in zip(members, state, strict=False):
        object.__setattr__(record, member.name, value)
    for member in members[len(state) :]:
        object.__setattr__(record, member.name, member.default if member.default_factory is MISSING else member.default_factory())
