"""Solvers on an abstract chain of stages: times and bytes in, an explicit schedule out. No tensors, no devices.

The model (`chain`), what a solver returns (`schedule`), the judge of all of them (`simulate`), one module for each published method,
and `strategies`, where they are found by name.
"""

from sft.solvers.chain import Alternative as Alternative
from sft.solvers.chain import HostLink as HostLink
from sft.solvers.chain import Stage as Stage
from sft.solvers.chain import StageChain as StageChain
from sft.solvers.schedule import Operation as Operation
from sft.solvers.schedule import Schedule as Schedule
from sft.solvers.simulate import Simulation as Simulation
from sft.solvers.simulate import simulate as simulate

__all__ = ["Alternative", "HostLink", "Operation", "Schedule", "Simulation", "Stage", "StageChain", "simulate"]
