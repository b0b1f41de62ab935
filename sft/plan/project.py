"""Projected bytes and FLOPs: the region's own code on the phantom machine."""

from __future__ import annotations

from dataclasses import dataclass

from sft.plan.problem import Problem
from sft.walk.machine import Phantom, PhantomMachine
from sft.walk.region import Region

__all__ = ["Projection", "project"]


@dataclass(frozen=True, slots=True)
class Projection:
    """What a step costs.

    Attributes:
        peak_bytes: most bytes alive: inputs, outputs and their gradients, cuts, states, strips, new parameter gradients.
        flops: counted floating-point operations.
    """

    peak_bytes: int
    flops: int


def project(problem: Problem, region: Region) -> Projection:
    """Run a step of byte counts: inputs arrive, outputs and their gradients exist, gradients of inputs and parameters come out."""
    machine = PhantomMachine()
    meter = machine.meter
    inputs = set(problem.graph.inputs)
    given = {
        node.name: Phantom(meter, problem.value_bytes(node.name) if node.name in inputs else 0)
        for node in problem.graph.nodes
        if node.kind != "operator"
    }
    outputs, tape = region.forward(machine, given, keep=problem.training)
    if problem.training:
        wanted = [name for name in region.outputs if name in problem.requires_grad]
        grads = {name: machine.allocate(problem.shapes[name], problem.dtypes[name], zero=False) for name in wanted}
        region.backward(machine, tape, grads)
    del outputs, given
    return Projection(peak_bytes=meter.peak_bytes, flops=meter.flops)


