"""Imports and first runs of the server that forks test processes, so that a rank starts in milliseconds.

It runs no backward: where torch is built for GPUs, that starts threads, and a process that has them cannot be forked.
"""

import torch
import torch.distributed.tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autopar.api
import autopar.testing.ranks
from autopar.runtime.private import FakeTensorMode

torch.set_num_threads(1)
with FakeTensorMode():
    make_fx(lambda x: torch.nn.functional.gelu(x) @ x)(torch.ones(2, 2))

__all__ = ["autopar"]
