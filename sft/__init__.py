"""Exact training of convolutional networks on images that exceed the device's memory, inside a byte budget.

>>> import torch, sft
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
>>> net = sft.compile(model, (1, 3, 64, 64), budget="4MiB")
>>> net(torch.zeros(1, 3, 64, 64)).shape
torch.Size([1, 8, 64, 64])
"""

from typing import TYPE_CHECKING

from sft.common.lazy_exports import lazy_exports as _lazy_exports
from sft.common.legacy_names import install as _install_legacy_names

#: Version of the package; pyproject.toml reads it from here.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from sft import nn as nn
    from sft import prediction as prediction
    from sft import sources as sources
    from sft import tissue as tissue
    from sft.analysis.tiling.position_grid import PositionGrid as PositionGrid
    from sft.api.check import CheckReport as CheckReport
    from sft.api.check import check as check
    from sft.api.check import position_grids as position_grids
    from sft.api.compile import compile as compile
    from sft.api.compile import plan as plan
    from sft.api.compiled_handle import CompiledHandle as CompiledHandle
    from sft.api.compiled_handle import of as of
    from sft.api.pareto import TradeoffRow as TradeoffRow
    from sft.api.pareto import pareto as pareto
    from sft.common.byte_units import format_bytes as format_bytes
    from sft.common.byte_units import parse_bytes as parse_bytes
    from sft.common.errors import BudgetError as BudgetError
    from sft.common.errors import InputError as InputError
    from sft.common.errors import InternalError as InternalError
    from sft.common.errors import RankError as RankError
    from sft.common.errors import SftError as SftError
    from sft.common.errors import SkipSlideError as SkipSlideError
    from sft.common.errors import SourceError as SourceError
    from sft.common.errors import UnsupportedError as UnsupportedError
    from sft.common.memory import Peak as Peak
    from sft.common.memory import measure_peak as measure_peak
    from sft.optim.streamed import StreamedOptimizer as StreamedOptimizer
    from sft.planner.mesh_plan import MeshPlan as MeshPlan
    from sft.planner.mesh_plan import RankPlan as RankPlan
    from sft.planner.options import Options as Options
    from sft.planner.plan import Plan as Plan
    from sft.planner.plan import SegmentPlan as SegmentPlan
    from sft.planner.timeline import Timeline as Timeline
    from sft.planner.timeline import TimelineEntry as TimelineEntry
    from sft.prediction.predict import predict as predict
    from sft.torch_runtime.pass_statistics import PassReading as PassReading
    from sft.torch_runtime.pass_statistics import PassSkipping as PassSkipping
    from sft.torch_runtime.pass_statistics import Reading as Reading
    from sft.torch_runtime.pass_statistics import Skipping as Skipping
    from sft.weights.disk_store import WeightsFile as WeightsFile
else:
    __all__, __getattr__, __dir__ = _lazy_exports(
        "sft",
        {
            "sft.analysis.tiling.position_grid": "PositionGrid",
            "sft.api.check": "CheckReport check position_grids",
            "sft.api.compile": "compile plan",
            "sft.api.compiled_handle": "CompiledHandle of",
            "sft.api.pareto": "TradeoffRow pareto",
            "sft.common.byte_units": "format_bytes parse_bytes",
            "sft.common.errors": "BudgetError InputError InternalError RankError SftError SkipSlideError SourceError UnsupportedError",
            "sft.common.memory": "Peak measure_peak",
            "sft.optim.streamed": "StreamedOptimizer",
            "sft.planner.mesh_plan": "MeshPlan RankPlan",
            "sft.planner.options": "Options",
            "sft.planner.plan": "Plan SegmentPlan",
            "sft.planner.timeline": "Timeline TimelineEntry",
            "sft.prediction.predict": "predict",
            "sft.torch_runtime.pass_statistics": "PassReading PassSkipping Reading Skipping",
            "sft.weights.disk_store": "WeightsFile",
        },
        submodules=("nn", "prediction", "sources", "tissue"),
        internal=(
            "analysis", "api", "backends", "common", "distributed", "kernels", "lower", "optim", "planner", "repeat", "runtime", "solvers",
            "torch_runtime", "weights",
        ),
    )  # fmt: skip

_install_legacy_names()
