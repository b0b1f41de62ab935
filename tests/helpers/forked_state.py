"""Modules and caches that the forks of :mod:`tests.helpers.fork_server` share; the server imports this module."""

from __future__ import annotations

import gc

import torch
import torch.distributed.device_mesh

import tests.helpers.band_checks
import tests.helpers.wsi  # noqa: F401
from tests.helpers.script_forks import train_one_step

__all__: list[str] = []

torch.set_num_threads(1)
train_one_step()
gc.collect()
gc.freeze()  # a collection in a fork would write to the pages of all objects, and so copy them
