"""Triton kernels of convolutions, norms, pools, resampling, row moves, dropout and optimizer steps, imported as ``sft.kernels``.

Importing this package imports no Triton. Each module ``*_triton.py`` has kernels and their launches; programs import it at the first
launch. The remaining modules have no kernels: geometries, block sizes, and the random masks, which also run in plain PyTorch.
"""
