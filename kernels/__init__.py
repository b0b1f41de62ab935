"""Kernels, imported as ``sft.kernels``: each in Triton, with a plain PyTorch reference beside it. Random masks and pools have the same bits
in both; of a convolution the reference differs by the order of summation.

Importing this package imports no Triton. A file ``x_triton.py`` holds the kernels and launches of ``x.py``, which
imports it the first time that a CUDA tensor needs it; on a machine without Triton the references run.
"""

from sft.kernels import adamw as adamw
from sft.kernels import conv2d as conv2d
from sft.kernels import conv2d_pool as conv2d_pool
from sft.kernels import conv3d as conv3d
from sft.kernels import dropout as dropout
from sft.kernels import geometry as geometry
from sft.kernels import norm as norm
from sft.kernels import philox as philox
from sft.kernels import pool as pool
from sft.kernels import resize as resize
from sft.kernels import rows as rows
from sft.kernels import sgd as sgd
from sft.kernels import stem as stem
from sft.kernels import volume as volume
