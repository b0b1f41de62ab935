"""Work of a run before it starts: the slides of all epochs, and the seconds and the host memory that the plan estimates for them."""

from __future__ import annotations

from typing import Any

from sft.common.byte_units import format_bytes, parse_bytes
from sft.planner.plan import Plan
from sft.wsi.config import Config
from sft.wsi.model.layers import lr_scales
from sft.wsi.run.estimate import RunWork, about_text
from sft.wsi.run.files import counted
from sft.wsi.train.distributed import Ranks
from sft.wsi.train.experiment import Experiment

__all__ = ["estimate_text", "plain_estimate", "plain_training", "run_work", "step_text", "training_text"]


def run_work(experiment: Experiment, plan: Plan, ranks: Ranks) -> RunWork:
    """Work of a run.

    Args:
        experiment: with the sizes of its slides.
        plan: of the largest training slide.
        ranks: that share the work.
    """
    training = experiment.records("train")
    largest = max(map(experiment.work_of, training), default=0.0)
    predicted = {split: sum(experiment.work_of(record, predicts=True) for record in experiment.records(split)) for split in ("val", "test")}
    config = experiment.config
    seconds = _seconds(plan)
    return RunWork(
        num_epochs=config.train.epochs,
        num_slides=len([record for record in training if record.name in experiment.feed.sizes]),
        epoch_work=sum(map(experiment.work_of, training)) + predicted["val"],
        final_work=predicted["val"] + predicted["test"],
        num_replicas=ranks.shape.num_replicas,
        planned_seconds=seconds / largest if largest else 0.0,
        host_bytes=_host_bytes(config, plan),
    )


def step_text(plan: Plan, config: Config) -> str:
    """Text of the duration and memory of a training step on one slide."""
    seconds = _seconds(plan)
    return (
        f"a training step on such a slide: {about_text(seconds)} ({_source(plan, config.train.device)}); "
        f"{format_bytes(_host_bytes(config, plan))} of host memory"
    )


def _seconds(plan: Plan) -> float:
    return plan.estimated_seconds if plan.projected_seconds is None else plan.projected_seconds


def _source(plan: Plan, device: str) -> str:
    return "measured on this device" if plan.projected_seconds is not None else f"from the plan, at the rates of a typical {device} device"


def _host_bytes(config: Config, plan: Plan) -> int:
    """Values that leave the device, cached rows of slides, and all of the plan where the host is the device."""
    cached_bytes = 0 if config.data.host_budget is None else parse_bytes(config.data.host_budget)
    return plan.host_bytes + cached_bytes + (plan.total_bytes if config.train.device == "cpu" else 0)


def estimate_text(work: RunWork, plan: Plan, device: str) -> str:
    """Text of the duration and memory of a run.

    Args:
        work: of the run.
        plan: of the largest slide.
        device: that it trains on.
    """
    epochs, slides = counted(work.num_epochs, "epoch", "epochs"), counted(work.num_slides, "slide", "slides")
    return (
        f"{epochs} x {slides}: {about_text(work.seconds)} ({_source(plan, device)}; measured after the first slides); "
        f"{format_bytes(work.host_bytes)} of host memory"
    )


def plain_estimate(work: RunWork, plan: Plan) -> dict[str, Any]:
    """Estimate for JSON."""
    return {
        "seconds": work.seconds,
        "source": "measured" if plan.projected_seconds is not None else "plan",
        "epochs": work.num_epochs,
        "slides": work.num_slides,
        "host_bytes": work.host_bytes,
    }


def training_text(experiment: Experiment) -> list[str]:
    """Lines of text about frozen modules and layer-wise learning rates; none if all parameters train at one rate."""
    facts, config = plain_training(experiment), experiment.config.train
    lines = []
    if facts["frozen"]:
        share = facts["trained_parameters"] / max(1, facts["parameters"])
        lines.append(f"frozen: {', '.join(facts['frozen'])}; {100 * share:.1f} % of the parameters train")
    if facts["lr_scales"]:
        scales = facts["lr_scales"]
        span = f"{scales[0]:.4g} to {scales[-1]:.4g}" if len(scales) > 1 else f"{scales[0]:.4g}"
        lines.append(f"layer decay {config.layer_decay:g}: {counted(len(scales), 'depth', 'depths')}, learning rates of {span} times lr")
    return lines


def plain_training(experiment: Experiment) -> dict[str, Any]:
    """Frozen modules, numbers of parameters, and factors of the learning rate by depth, for JSON."""
    model, decay = experiment.model, experiment.config.train.layer_decay
    scales = lr_scales(model, decay) if decay != 1 else {}
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        "frozen": list(model.frozen_modules),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(trained.values()),
        "lr_scales": sorted({scales[name] for name in trained if name in scales}),
    }
