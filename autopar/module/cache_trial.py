"""`CacheTrial`: whether a model of transformers may be given a cache that is longer than the tokens in it.

Some models read the number of tokens off the cache: their logits are then those of another place. A class that says
that its calls can be compiled as they are has been written for such caches. Of any other, the first call that reads
tokens from a cache is compared with a call without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.letters import NotServed
from autopar.module.limits import LIMITS


class CacheTrial:
    """The logits that the next call with a cache should give, until one has given them."""

    def __init__(self, model: Any) -> None:
        self.name: str = model.original.__name__
        self.is_open = not getattr(model.original, "_can_compile_fullgraph", True)
        self._expected: Tensor | None = None

    def expect(self, outputs: Any) -> None:
        """Note the outputs of a call without a cache; None where the next call is not compared."""
        self._expected = None if outputs is None else _last(outputs)

    def compare(self, outputs: Any) -> None:
        """Raise a letter where the outputs of the same call with a cache are others."""
        if self._expected is None:
            return
        off = float((_last(outputs) - self._expected).abs().max())
        largest = float(self._expected.abs().max())
        self._expected = None
        if not off <= LIMITS.cache_error * largest:
            raise NotServed(
                f"{self.name} with a cache that is longer than the tokens in it: its logits are others than without a "
                "cache",
                seen=f"they differ by up to {off:.3g}, and the largest is {largest:.3g}",
                advice="generate(..., use_cache=False), or autopar.gather(model)",
            )
        self.is_open = False


def _last(outputs: Any) -> Tensor:
    """The logits of the last token."""
    logits = outputs.logits[:, -1].detach()
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits).to(torch.float32)
