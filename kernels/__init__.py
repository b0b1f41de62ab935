"""Triton kernels, imported as ``sft.kernels``."""
