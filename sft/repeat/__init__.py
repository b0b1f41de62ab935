"""Chains of equal blocks: one block traced once, run many times under a checkpointing schedule."""
