"""`Sees`: which keys a query of an attention sees, as a few numbers; no tensor of queries by keys is ever made.

left, right    keys from so many places before a query up to so many behind it; None: no end. right=0 is causal
chunk          only keys of the query's own chunk of so many places
documents      an operand: a number for each place, and a query sees keys of its own number
counts         an operand: which keys count, as in a batch that is padded
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sees:
    """What a query sees by places alone, and how scores become weights; as text it is an argument of the op."""

    left: int | None = None  # keys before a query that it sees; None: all of them
    right: int | None = None  # keys behind a query that it sees; 0: causal
    chunk: int | None = None  # only keys of the query's own chunk of so many places
    softcap: float | None = None  # scores pass through softcap * tanh(. / softcap)
    scale: float | None = None  # None: by the width of queries
    length: int | None = None  # of documents, by which a call is priced; it changes no value

    def text(self) -> str:
        """Text such as `left=4095 right=0`."""
        said = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value!r}" for name, value in said if value is not None)

    @staticmethod
    @functools.cache
    def of(text: str) -> Sees:
        """What `text` says."""
        pairs = (pair.split("=") for pair in text.split())
        return Sees(**{name: float(value) if name in ("softcap", "scale") else int(value) for name, value in pairs})


def seen_pairs(
    sees: Sees, queries: int, keys: int, documents: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The pairs that see each other, as a tensor of queries by keys: for small parts only."""
    like = documents if documents is not None else counts
    device = None if like is None else like.device
    i = torch.arange(queries, device=device)[:, None]
    j = torch.arange(keys, device=device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if sees.left is not None:
        seen &= j >= i - sees.left
    if sees.right is not None:
        seen &= j <= i + sees.right
    if sees.chunk is not None:
        seen &= i // sees.chunk == j // sees.chunk
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    if counts is not None:
        seen = seen & counts[:, None].bool()
    return seen if seen.dim() == 2 else seen[:, None]
