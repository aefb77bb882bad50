"""What the server that forks test processes imports and warms once, so that no rank does.

A rank then starts in milliseconds.

It runs no backward: where torch is built for GPUs, that starts threads, and a process that has them cannot be forked.
"""

import torch
import torch.distributed.tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autopar.api
import autopar.testing.ranks

torch.set_num_threads(1)
with FakeTensorMode():
    make_fx(lambda x: torch.nn.functional.gelu(x) @ x)(torch.ones(2, 2))

__all__ = ["autopar"]
