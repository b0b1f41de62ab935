"""Kernels, imported as ``sft.kernels``: each in Triton, with a plain PyTorch reference beside it. Random masks and pools have the same bits
in both; of a convolution the reference differs by the order of summation.

Importing this package imports no Triton. A file ``x_triton.py`` holds the kernels and launches of ``x.py``, which
imports it the first time that a CUDA tensor needs it; on a machine without Triton the references run.
"""
