"""Checkpointing and offloading solvers on an abstract chain of stages: times and bytes in, an explicit schedule out.

No tensors and no devices. `chain` is the model of a network, `schedule` the result of a solver, `simulate` the cost of a schedule. The
published methods are in `simple`, `optimal`, `acg` and `offloading`; the search over all of their means is in `joint`. `registry` finds
a solver by name.
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
