"""Bytes of attentions that planning counts on meta, beside those that ranks of gloo hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.attention import attention_backward, attention_forward
from autopar.runtime.attention_bytes import Shapes, bytes_of_attention
from autopar.runtime.dealing import HALVES, Cutting, Deal, Setup, room_of
from autopar.runtime.halos import has_halo, rows_of_halo
from autopar.runtime.sees import Sees
from autopar.testing import on_processes
from benchmarks.memory import Live
from tests.attended import axes_of

MASKS = [
    (Sees(right=0), HALVES),
    (Sees(), ""),
    (Sees(left=299, right=0), ""),
    (Sees(right=0, softcap=3.0), HALVES),
]
MESHES = {4: [(4,), (2, 2)], 6: [(6,), (3, 2), (2, 3)], 8: [(8,), (4, 2), (2, 4)]}
RINGS = {1: ["", "a", "a"], 2: ["a", "b", "ab", "ab"]}


def drawn(seed: int, ranks: int, count: int) -> list[tuple]:
    """Calls: a setup on a mesh, without places, and shapes of queries and keys of the whole."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        mesh = rng.choice(MESHES[ranks])
        rings = rng.choice(RINGS[len(mesh)])
        sees, dealt = rng.choice(MASKS)
        rows = rng.choice([777, 1024, 1025, 2001, 2048])
        cuts = tuple(Cutting(axis, n, 0) for axis, n in zip("ab", mesh, strict=False))
        own = tuple(cut for cut in cuts if cut.axis in rings)
        how = Setup(sees.text(), rows, rows, cuts, own, dealt, (False, False, rng.random() < 0.2))
        groups = rng.choice([1, 2, 4])
        sizes = rng.choice([1, 2]), groups * rng.choice([1, 4]), groups, rng.choice([16, 64])
        found.append((mesh, how, sizes, rng.choice([torch.float32, torch.bfloat16])))
    return found


def on_device(how: Setup, axes) -> Setup:
    """The setup of this rank."""

    def here(cut: Cutting) -> Cutting:
        return cut._replace(place=axes[cut.axis].index)

    return replace(how, cuts=tuple(map(here, how.cuts)), rings=tuple(map(here, how.rings)))


def rows_of(how: Setup) -> tuple[int, int]:
    text = how.text()
    if how.dealt:
        return room_of(text, False, False), room_of(text, True, False) if how.rings else how.keys
    keys = rows_of_halo(text, False) if has_halo(how) else len(Deal(how, None, True).here)
    return len(Deal(how, None, False).here), keys


def held_by(rank, cases):
    """What a rank holds in forward and in backward of each call beyond its results, and the bytes of an output."""
    found, by_mesh = [], {}
    for mesh, how, (batch, heads, groups, width), dtype in cases:
        if mesh not in by_mesh:
            by_mesh[mesh] = axes_of(mesh, rank)
        axes = by_mesh[mesh]
        here = on_device(how, axes)
        queries, keys = rows_of(here)
        shapes = (queries, heads), (keys, groups), (keys, groups), (queries, heads)
        *given, gradient = (torch.randn(batch, n, h, width).to(dtype).transpose(1, 2) for n, h in shapes)
        given += [torch.randn(heads).to(dtype)] if how.given[2] else []
        of_rings, text = [axes[ring.axis] for ring in here.rings], here.text()
        live = Live([*given, gradient])
        before = live.now
        with live:
            out, log_sum = attention_forward(given, of_rings, text)
        forward = live.peak - before - out.nbytes - log_sum.nbytes
        dist.barrier()
        live = Live([*given, gradient, out, log_sum])
        before = live.now
        with live:
            made = attention_backward(given, of_rings, [out, log_sum], gradient, text)
        found.append((max(0, forward), live.peak - before - sum(x.nbytes for x in made), out.nbytes))
        dist.barrier()
    return found


def ratios(seed: int, ranks: int, count: int) -> dict[str, tuple[float, float]]:
    """Counted over held bytes, an output included, forward and backward of drawn calls."""
    cases = drawn(seed, ranks, count)
    by_rank = on_processes(ranks, held_by, cases, timeout_s=300)
    found = {}
    for i, ((mesh, how, (batch, heads, groups, width), dtype), *held) in enumerate(zip(cases, *by_rank, strict=True)):
        kernel = "" if Sees.of(how.sees).softcap else "cpu"
        rows = -(-how.queries // math.prod(mesh))
        key = batch, groups, rows, width
        counted = bytes_of_attention(Shapes((batch, heads, rows, width), key, key), dtype, how, kernel)
        out = max(o for *_, o in held)
        most = max(f for f, *_ in held), max(b for _, b, _ in held)
        both = tuple((c + out) / (h + out) for c, h in zip(counted, most, strict=True))
        found[f"{i} {mesh} {how.text()} {batch, heads, groups, width} {dtype}"] = both
    return found


@pytest.mark.machines
@pytest.mark.timeout(120)
def test_counted_bytes_are_those_that_the_fullest_rank_holds():
    for case, both in ratios(1, 4, 10).items():
        assert all(0.97 <= ratio <= 1.03 for ratio in both), (case, both)


@pytest.mark.nightly
@pytest.mark.machines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_counted_bytes_of_more_calls_are_those_that_the_fullest_rank_holds(ranks):
    for case, both in ratios(ranks, ranks, 40).items():
        assert all(0.97 <= ratio <= 1.05 for ratio in both), (case, both)
