"""Symbolic analysis of a model's graph, imported as ``sft.analysis``."""
