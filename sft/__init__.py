"""Exact training of convolutional networks on images that do not fit the device, inside a byte budget.

>>> import torch, sft
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
>>> net = sft.compile(model, (1, 3, 64, 64), budget="4MiB")
>>> net(torch.zeros(1, 3, 64, 64)).shape
torch.Size([1, 8, 64, 64])
"""

from sft import nn as nn
from sft.check import CheckReport as CheckReport
from sft.check import check as check
from sft.compile import compile as compile
from sft.compile import plan as plan
from sft.errors import BudgetError as BudgetError
from sft.errors import InputError as InputError
from sft.errors import InternalError as InternalError
from sft.errors import RankError as RankError
from sft.errors import SftError as SftError
from sft.errors import SkipSlideError as SkipSlideError
from sft.errors import SourceError as SourceError
from sft.errors import UnsupportedError as UnsupportedError
from sft.execute.reading import PassReading as PassReading
from sft.execute.reading import Reading as Reading
from sft.execute.skipping import PassSkipping as PassSkipping
from sft.execute.skipping import Skipping as Skipping
from sft.memory import Peak as Peak
from sft.memory import measure_peak as measure_peak
from sft.optim.streamed import StreamedOptimizer as StreamedOptimizer
from sft.options import Options as Options
from sft.plan.mesh import MeshPlan as MeshPlan
from sft.plan.mesh import RankPlan as RankPlan
from sft.plan.timeline import Timeline as Timeline
from sft.plan.timeline import TimelineEntry as TimelineEntry
from sft.plan.types import Plan as Plan
from sft.plan.types import SegmentPlan as SegmentPlan
from sft.tradeoff import TradeoffRow as TradeoffRow
from sft.tradeoff import pareto as pareto
from sft.units import format_bytes as format_bytes
from sft.units import parse_bytes as parse_bytes
from sft.weights.file import WeightsFile as WeightsFile
