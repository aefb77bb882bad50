"""Attention by parts on processes: any mask, any way of dealing queries and of bringing keys, against eager torch."""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.distributed as dist

from autopar.runtime.attention import attention_backward, attention_forward, deal
from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import HALVES, WORK, Cutting, Deal, Setup
from autopar.runtime.sees import Sees
from autopar.testing import on_processes

BATCH, HEADS, GROUPS, WIDTH, OF_VALUES = 2, 4, 2, 8, 6
RANKS = 4
LENGTHS = (128, 121)
ENDS = (7, 40, 41, 90)  # of documents in the first row of a batch
# name: what queries see by places, whether there are documents, counts and sinks, and whether rows are worth dealing
MASKS = {
    "causal": (Sees(right=0), (False, False, False), HALVES),
    "full": (Sees(), (False, False, False), ""),
    "window": (Sees(19, 0), (False, False, False), ""),
    "both ways": (Sees(9, 12), (False, False, False), ""),
    "documents": (Sees(right=0), (True, False, False), WORK),
    "documents, window": (Sees(15, 0), (True, False, False), WORK),
    "sinks": (Sees(right=0), (False, False, True), HALVES),
    "softcap": (Sees(right=0, softcap=1.5), (False, False, False), HALVES),
    "padded": (Sees(right=0), (False, True, True), WORK),
    "chunks": (Sees(right=0, chunk=48), (False, False, False), WORK),
}
# the axes of a mesh, and which of them are rings
MESHES = {(2,): ("", "a"), (3,): ("", "a"), (4,): ("", "a"), (2, 2): ("", "a", "b", "ab")}


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


@functools.cache
def wanted(name: str, rows: int):
    """The result of eager torch, and the gradients of all that has any."""
    sees, given, _ = MASKS[name]
    *tensors, gradient = drawn(rows, given)
    trained = [x.requires_grad_() for x in tensors if x is not None and x.is_floating_point()]
    out = eager(*tensors, sees)
    return out.detach(), torch.autograd.grad(out, trained, gradient)


def setups(name: str, rows: int, mesh, rings: str, place) -> dict[str, Setup]:
    """Each way of a call on a device: rows as they lie, and dealt."""
    sees, given, how = MASKS[name]
    cuts = tuple(Cutting(axis, n, at) for axis, n, at in zip("ab", mesh, place, strict=False))
    own = tuple(cut for cut in cuts if cut.axis in rings)
    ways = dict.fromkeys(("", how))
    return {way: Setup(sees.text(), rows, rows, cuts, own, way, given) for way in ways}


def ran(setup: Setup, axes, tensors, gradient):
    """Results and gradients of one device, from its plain rows to its plain rows."""
    query, key, value, documents, counts, sinks = tensors
    told, text = [x for x in (documents, counts) if x is not None], setup.text()
    of_rings = [axes[ring.axis] for ring in setup.rings]
    of_cuts = [axes[cut.axis] for cut in setup.cuts]
    is_ring = bool(setup.rings)

    def moved(given, of_keys, is_back):
        own = of_rings if of_keys else of_cuts
        return deal(given, own, told, text, of_keys, is_back) if setup.dealt and own else given

    (query,) = moved([query], False, False)
    key, value = moved([key, value], True, False) if is_ring else (key, value)
    given = [x for x in (query, key, value, documents, counts, sinks) if x is not None]
    out, log_sum = attention_forward(given, of_rings, text)
    (g,) = moved([gradient], False, False)
    of_query, of_key, of_value, *of_sinks = attention_backward(given, of_rings, [out, log_sum], g, text)
    (out,), (of_query,) = moved([out], False, True), moved([of_query], False, True)
    of_key, of_value = moved([of_key, of_value], True, True) if is_ring else (of_key, of_value)
    return out, of_query, of_key, of_value, *of_sinks


def error_of(setup: Setup, axes, name: str, rows: int) -> float:
    """The largest difference from eager torch on this device; parts of sums are summed."""
    *tensors, gradient = drawn(rows, setup.given)
    own = {of: Deal(setup, None, of).here for of in (False, True)}
    mine = [x[:, :, own[k > 0]] if k < 3 else x for k, x in enumerate(tensors)]
    found = list(ran(setup, axes, mine, gradient[:, :, own[False]]))
    summed_over = [cut.axis for cut in setup.cuts if cut.axis not in {ring.axis for ring in setup.rings}]
    for k in range(2, len(found)):
        for axis in [cut.axis for cut in setup.cuts] if k == 4 else summed_over:
            dist.all_reduce(found[k], group=axes[axis].group)
    out, gradients = wanted(name, rows)
    whole = [out[:, :, own[False]], *(g[:, :, own[k > 0]] if k < 3 else g for k, g in enumerate(gradients))]
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, whole, strict=True))


def on_a_rank(rank: int) -> dict[tuple, float]:
    """The largest error of each case on this rank."""
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3, 4)}
    pairs = {by: [dist.new_group(list(of)) for of in of_by] for by, of_by in
             {"a": ((0, 2), (1, 3)), "b": ((0, 1), (2, 3))}.items()}  # fmt: skip
    found = {}
    for mesh, ways in MESHES.items():
        if rank >= math.prod(mesh):
            continue
        place = (rank,) if len(mesh) == 1 else divmod(rank, 2)
        of = {"a": groups[mesh[0]]} if len(mesh) == 1 else {"a": pairs["a"][place[1]], "b": pairs["b"][place[0]]}
        axes = {name: Axis(name, mesh["ab".index(name)], place["ab".index(name)], group) for name, group in of.items()}
        for name, rows, rings in itertools.product(MASKS, LENGTHS, ways):
            if rows != LENGTHS[-1] and mesh != (4,):
                continue
            for way, setup in setups(name, rows, mesh, rings, place).items():
                found[mesh, name, rows, rings, way] = error_of(setup, axes, name, rows)
    return found


def test_each_mask_each_way_equals_eager():
    found = on_processes(RANKS, on_a_rank, timeout_s=300)
    wrong = {case: error for of in found for case, error in of.items() if not error < 1e-12}
    assert not wrong
    assert len(found[0]) > 200
