"""Operator targets that several packages of the analysis name: random operators, elementwise losses, cumulative momentum."""

from __future__ import annotations

__all__ = ["ATTENTION", "CAUSAL_ATTENTION", "CUMULATIVE_MOMENTUM", "ELEMENTWISE_LOSSES", "RANDOM_TARGETS"]

ATTENTION = "aten.scaled_dot_product_attention.default"
#: Causal attention of consecutive queries, of which the first has a position.
CAUSAL_ATTENTION = "sft.causal_attention"

#: Momentum that marks a BatchNorm with ``momentum=None`` (cumulative average) in a captured program. Its factor is one over the number of
#: batches so far, which a buffer counts. No user sets this value.
CUMULATIVE_MOMENTUM = -1.2345e30
#: Random operators with counter-based generators.
RANDOM_TARGETS = frozenset({"sft.dropout", "sft.mask", "sft.noise"})

#: Elementwise losses; their operands broadcast.
ELEMENTWISE_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "soft_margin_loss",
        "poisson_nll_loss",
    )
)
