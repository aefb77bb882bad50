"""Messages between two ways to hold a tensor: everyone has its part in the end, and nobody receives what it has."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from autopar.sharding.cluster import Cluster
from autopar.sharding.handing import Cells, Holding, loads, route, seconds
from autopar.sharding.placement import R, S, Sharding

NODE = 4


def elements(size, holding: Holding) -> dict[int, torch.Tensor]:
    """The part of a tensor of consecutive numbers that each rank holds, cut by torch.chunk."""
    found = {}
    for rank, at in zip(holding.ranks, itertools.product(*map(range, holding.shape)), strict=True):
        part = torch.arange(int(np.prod(size))).view(size)
        for axis, placement in enumerate(holding.sharding.placements):
            if placement.is_shard:
                blocks = part.chunk(max(len(placement.blocks), 1), placement.dim)
                rows = [chunks(block, holding.shape[axis], placement.dim)[at[axis]] for block in blocks]
                part = torch.cat(rows, placement.dim)
        found[rank] = part
    return found


def chunks(whole, count: int, dim: int):
    """The parts of torch.chunk, of which it leaves out those without rows."""
    found = list(whole.chunk(count, dim))
    return [*found, *[whole.narrow(dim, 0, 0)] * (count - len(found))]


def holding_of(rng: random.Random, size, world: int) -> Holding:
    shape = rng.choice([(world,), (2, world // 2), (world // 2, 2), (world // 2,), (1,)])
    ranks = rng.sample(range(world), int(np.prod(shape)))
    placements = [rng.choice([R, *(S(dim) for dim in range(len(size)))]) for _ in shape]
    if len(shape) == 1 and size and size[0] in (6, 9) and rng.random() < 0.3:
        placements = [S(0, blocks=(size[0] // 3,) * 3)]
    return Holding(tuple(ranks), shape, Sharding(tuple(placements)))


@pytest.mark.parametrize("seed", range(60))
def test_everyone_has_its_part_and_each_cell_comes_to_a_node_once(seed):
    rng = random.Random(seed)
    world = rng.choice([4, 8, 12])
    size = rng.choice([(), (6,), (9, 5), (13, 8), (3, 4, 5), (0, 4)])
    source, target = (holding_of(rng, size, world) for _ in range(2))
    cells = Cells(size, source, target, NODE)
    waves = route(cells, world, NODE)
    has, wants = elements(size, source), elements(size, target)
    parts = {rank: torch.full(part.shape, -1) for rank, part in wants.items()}
    for rank in wants:
        kept = np.flatnonzero(cells.held(cells.source, world)[rank] & cells.held(cells.target, world)[rank])
        if rank in has:
            here = zip(cells.places(cells.source[rank], kept), cells.places(cells.target[rank], kept), strict=True)
            for there, to in here:
                parts[rank][to] = has[rank][there]
    came = dict.fromkeys(range(world), 0)
    crossed = set()
    for wave in waves:
        for cell, sender, receiver in zip(*wave, strict=True):
            (to,) = cells.places(cells.target[receiver], np.array([cell]))
            of_source = sender in has and cells.held(cells.source, world)[sender][cell]
            held, side = (has, cells.source) if of_source else (parts, cells.target)
            (there,) = cells.places(side[sender], np.array([cell]))
            assert (held[sender][there] >= 0).all(), "sent before it came"
            parts[receiver][to] = held[sender][there]
            came[receiver] += int(cells.elements[cell])
            if sender // NODE != receiver // NODE:
                assert (cell, receiver // NODE) not in crossed, "came to the node before"
                crossed.add((cell, receiver // NODE))
    for rank, part in wants.items():
        assert torch.equal(parts[rank], part)
        known = set(has[rank].flatten().tolist()) if rank in has else set()
        assert came[rank] == len(set(part.flatten().tolist()) - known), "received what it has"


def test_ranks_share_the_work():
    """From ZeRO-3 on 16 ranks to tensor parallelism inside each node: all links carry the same."""
    size = (512, 64)
    source = Holding(tuple(range(16)), (16,), Sharding((S(0),)))
    target = Holding(tuple(range(16)), (4, 4), Sharding((R, S(1))))
    cells = Cells(size, source, target, NODE)
    between, inside = loads(route(cells, 16, NODE), cells.elements, 16)
    whole = 512 * 64
    assert between[1].sum() == 4 * whole * 3 / 4, "each node lacks three quarters"
    assert between.max() == between.min() == whole / 4 * 3 / 4
    assert inside.max() <= 1.01 * inside.mean()
    alone = Cells((4096,), Holding((0,), (1,), Sharding((R,))), Holding((4, 5, 6, 7), (4,), Sharding((R,))), NODE)
    between, inside = loads(route(alone, 8, NODE), alone.elements, 8)
    assert between[1].tolist() == [0, 0, 0, 0, 1024, 1024, 1024, 1024], "a tensor without cuts is shared out as well"
    assert inside[0].tolist() == [0, 0, 0, 0, 3072, 3072, 3072, 3072]


def test_the_fullest_link_decides_the_seconds():
    cluster = Cluster.of("h100-8x2")
    nbytes = np.zeros((2, 2, 16))
    assert seconds(nbytes, cluster) == 0
    nbytes[1, 0, 3] = 3e9
    inner, outer = cluster.links[0], cluster.links[-1]
    assert seconds(nbytes, cluster) == pytest.approx(inner.latency_s + 3e9 / inner.wire("all_to_all", 8))
    nbytes[0, 1, 9] = 1e9
    alone = outer.latency_s + 1e9 / outer.wire("all_to_all", 2)
    assert seconds(nbytes, cluster) == pytest.approx(alone + inner.latency_s + 3e9 / inner.wire("all_to_all", 8))
