"""Calls of attention with documents, padding and sinks, and eager torch on them."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist

from autopar.runtime.collectives import Axis
from autopar.runtime.sees import Sees

BATCH, HEADS, GROUPS, WIDTH, OF_VALUES = 2, 4, 2, 8, 6
ENDS = (7, 40, 41, 90)  # of documents in the first row of a batch


def drawn(rows: int, given) -> list[torch.Tensor | None]:
    """Queries, keys, values, documents, counts, sinks, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, OF_VALUES), (HEADS, OF_VALUES))
    *tensors, gradient = (normal(BATCH, n, rows, width) for n, width in heads)
    first = torch.bucketize(torch.arange(rows), torch.tensor(ENDS), right=True)
    documents = torch.stack([first, first.flip(0)])
    counts = torch.ones(BATCH, rows, dtype=torch.int64)
    counts[0, -rows // 3 :] = 0
    counts[1, : rows // 2] = 0
    told = [x if has else None for x, has in zip((documents, counts, normal(HEADS)), given, strict=True)]
    return [*tensors, *told, gradient]


def eager(query, key, value, documents, counts, sinks, sees: Sees):
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    rows = query.shape[2]
    i, j = torch.arange(rows)[:, None], torch.arange(rows)
    seen = torch.ones(1, 1, rows, rows, dtype=torch.bool)
    if sees.left is not None:
        seen = seen & (i - j <= sees.left)
    if sees.right is not None:
        seen = seen & (j - i <= sees.right)
    if sees.chunk is not None:
        seen = seen & (i // sees.chunk == j // sees.chunk)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    if counts is not None:
        seen = seen & counts[:, None, None].bool()
    scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH)
    if sees.softcap is not None:
        scores = sees.softcap * torch.tanh(scores / sees.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    is_blind = scores.isinf().all(-1, keepdim=True)
    weights = torch.where(is_blind, 0.0, scores.masked_fill(is_blind, 0.0).softmax(-1))
    return weights[..., :rows] @ value


def axes_of(mesh: tuple[int, ...], rank: int) -> dict[str, Axis]:
    """The axes of a mesh of the first ranks, at one of them; every rank makes all groups."""
    ranks, axes = np.arange(math.prod(mesh)).reshape(mesh), {}
    for i, size in enumerate(mesh):
        for line in np.moveaxis(ranks, i, -1).reshape(-1, size).tolist():
            group = dist.new_group(line)
            if rank in line:
                axes["ab"[i]] = Axis("ab"[i], size, line.index(rank), group)
    return axes
