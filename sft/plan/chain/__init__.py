"""Solvers on an abstract chain of stages: times and bytes in, an explicit schedule out. No tensors, no devices.

The model (`chain`), what a solver returns (`schedule`), the judge of all of them (`simulate`), one module for each published method,
and `strategies`, where they are found by name.
"""

from sft.plan.chain.chain import Alternative as Alternative
from sft.plan.chain.chain import StageChain as StageChain
from sft.plan.chain.chain import Stage as Stage
from sft.plan.chain.link import HostLink as HostLink
from sft.plan.chain.schedule import Operation as Operation
from sft.plan.chain.schedule import Schedule as Schedule
from sft.plan.chain.simulate import Simulation as Simulation
from sft.plan.chain.simulate import simulate as simulate

__all__ = ["Alternative", "StageChain", "HostLink", "Operation", "Schedule", "Simulation", "Stage", "simulate"]
