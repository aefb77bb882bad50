"""Attention by parts on processes: any mask, any way of dealing queries and of bringing keys, against eager torch."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.attention import attention_backward, attention_forward, deal
from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import HALVES, WORK, Cutting, Deal, Setup, owners_of
from autopar.runtime.halos import halo, has_halo
from autopar.runtime.sees import Places, Sees, all_pairs
from autopar.testing import on_processes, on_threads
from tests.attended import BATCH, GROUPS, HEADS, OF_VALUES, WIDTH, axes_of, drawn, eager

RANKS = 4
LENGTHS = (128, 121)
# name: what queries see by places, whether there are documents, counts and sinks, and whether rows are worth dealing
MASKS = {
    "causal": (Sees(right=0), (False, False, False), HALVES),
    "full": (Sees(), (False, False, False), ""),
    "window": (Sees(19, 0), (False, False, False), ""),
    "wide window": (Sees(50, 0), (False, False, False), ""),
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

    def moved(given, of_keys, is_back):
        own = of_rings if of_keys else of_cuts
        return deal(given, own, told, text, of_keys, is_back) if setup.dealt and own else given

    def moved_keys(given, is_back):
        if has_halo(setup):
            return halo(given, of_rings, text, is_back)
        return moved(given, True, is_back) if setup.rings else given

    (query,) = moved([query], False, False)
    key, value = moved_keys([key, value], False)
    given = [x for x in (query, key, value, documents, counts, sinks) if x is not None]
    out, log_sum = attention_forward(given, of_rings, text)
    (g,) = moved([gradient], False, False)
    of_query, of_key, of_value, *of_sinks = attention_backward(given, of_rings, [out, log_sum], g, text)
    (out,), (of_query,) = moved([out], False, True), moved([of_query], False, True)
    of_key, of_value = moved_keys([of_key, of_value], True)
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


def on_a_rank(rank: int, meshes=MESHES, masks=tuple(MASKS)) -> dict[tuple, float]:
    """The largest error of each case on this rank."""
    found = {}
    for mesh, ways in meshes.items():
        axes = axes_of(mesh, rank)
        if not axes:
            continue
        place = tuple(axis.index for axis in axes.values())
        for name, rows, rings in itertools.product(masks, LENGTHS, ways):
            if rows != LENGTHS[-1] and mesh != (4,):
                continue
            for way, setup in setups(name, rows, mesh, rings, place).items():
                found[mesh, name, rows, rings, way] = error_of(setup, axes, name, rows)
    return found


@pytest.mark.machines
@pytest.mark.timeout(300)
def test_each_mask_each_way_equals_eager():
    found = on_processes(RANKS, on_a_rank, timeout_s=300)
    wrong = {case: error for of in found for case, error in of.items() if not error < 1e-12}
    assert not wrong
    assert len(found[0]) > 200


def test_keys_are_gathered_in_each_of_three_steps():
    """Three devices pass keys on, and each pair gathers them: the first step's are there, the next one's come."""
    masks = ("causal", "documents", "wide window")
    for of in on_threads(6, on_a_rank, {(3, 2): ("ab",)}, masks):
        assert len(of) == 5 and max(of.values()) < 1e-12


def pairs_of_ranks(sees: Sees, rows: int, dealt: str, documents=None, n: int = RANKS) -> list[int]:
    """The pairs of a query and a key that see each other, by the device that has the query: counted one by one."""
    found = []
    numbers = torch.zeros(1, rows) if documents is None else documents
    for place in range(n):
        setup = Setup(
            sees.text(), rows, rows, (Cutting("a", n, place),), (), dealt, (documents is not None, False, False)
        )
        places = Places.of(sees, (rows, rows), documents, None)
        owners = owners_of(setup, lambda places=places: places) if dealt else None
        own = torch.from_numpy(Deal(setup, owners, False).here)[:, None]
        keys = torch.arange(rows)
        seen = numbers[:, own[:, 0], None] == numbers[:, None]
        if sees.right is not None:
            seen = seen & (keys <= own + sees.right)
        if sees.left is not None:
            seen = seen & (keys >= own - sees.left)
        found.append(int(seen.sum()))
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [2048, 2039])
def test_devices_have_as_many_pairs(n, rows):
    causal = pairs_of_ranks(Sees(right=0), rows, HALVES, n=n)
    assert sum(causal) == rows * (rows + 1) // 2
    assert max(causal) <= 1.01 * np.mean(causal)
    for seed in range(6):  # five documents of drawn lengths
        ends = torch.rand(4, generator=torch.Generator().manual_seed(seed)).mul(rows).long().sort().values
        documents = torch.bucketize(torch.arange(rows), ends, right=True)[None]
        drawn_lengths = pairs_of_ranks(Sees(right=0), rows, WORK, documents, n)
        assert max(drawn_lengths) <= 1.02 * np.mean(drawn_lengths)
    plain = pairs_of_ranks(Sees(right=0), rows, "", n=n)
    assert max(plain) > (1.9 - 1 / n) * np.mean(plain)  # as they lie, the last device has nearly twice the mean


SENT: dict[int, list[int]] = {}  # by rank, which is a thread


def sent_by_a_rank(rank: int, name: str, rings: str, dtype: torch.dtype):
    """Bytes that a rank sends to others, message by message, forward and then backward; results and gradients."""
    sent = SENT[rank] = []
    rows = 96
    (setup,) = [s for way, s in setups(name, rows, (RANKS,), rings, (rank,)).items() if way == MASKS[name][2]]
    axes = {"a": Axis("a", RANKS, rank, dist.group.WORLD)}
    *tensors, gradient = (
        x if x is None or not x.is_floating_point() else x.to(dtype) for x in drawn(rows, setup.given)
    )
    own = {of: Deal(setup, None, of).here for of in (False, True)}
    mine = [x[:, :, own[k > 0]] if k < 3 else x for k, x in enumerate(tensors)]
    found = ran(setup, axes, mine, gradient[:, :, own[False]])
    return sent, found


@pytest.fixture
def counted(monkeypatch):
    """What each rank sends to others is counted."""
    send = dist.all_to_all_single

    def counted(made, given, comes, sends, **how):
        others = sum(n for i, n in enumerate(sends) if i != dist.get_rank())
        SENT[dist.get_rank()].append(others * given[:1].numel() * given.element_size())
        return send(made, given, comes, sends, **how)

    monkeypatch.setattr(dist, "all_to_all_single", counted)


@pytest.mark.parametrize("name, rings", [("causal", "a"), ("causal", ""), ("full", "a")])
def test_what_is_sent_is_what_has_to_be(name, rings, counted):
    by_rank = on_threads(RANKS, sent_by_a_rank, name, rings, torch.float32)
    rows = 96 // RANKS
    keys = 4 * BATCH * GROUPS * rows * 2 * WIDTH  # of keys and values of a device, of one width in a ring
    steps = RANKS - 1 if rings else 0
    for sent, _ in by_rank:
        deals = 4 + 2 * bool(rings) if MASKS[name][2] else 0  # queries, results and their gradients; keys and values
        ring = steps + 2 * steps + bool(steps)
        assert len(sent) == deals + ring
        assert sorted(sent)[-ring:] == [keys] * ring if ring else True
        widths = (WIDTH, OF_VALUES, OF_VALUES, WIDTH, *([0.5 * (WIDTH + OF_VALUES)] * 2 if rings else []))
        most = sum(4 * BATCH * HEADS * rows * width for width in widths) if deals else 0
        assert sum(sent) - ring * keys <= most  # a row is dealt once there and once back


@pytest.mark.parametrize("name, left", [("window", 19), ("wide window", 50)])
def test_of_keys_in_a_window_those_alone_are_sent_that_are_seen(name, left, counted):
    by_rank = on_threads(RANKS, sent_by_a_rank, name, "a", torch.float32)
    rows, row = 96 // RANKS, 4 * BATCH * GROUPS * (WIDTH + OF_VALUES)
    for rank, (sent, _) in enumerate(by_rank):
        behind = 96 - (rank + 1) * rows  # places of the devices behind it, as far as their windows reach
        wanted = sum(max(0, min(rows, left - first)) for first in range(0, behind, rows))
        assert sent == [row * wanted, row * min(left, rank * rows)]  # gradients return to whence keys came


@pytest.mark.parametrize("rings", ["", "a"])
@pytest.mark.parametrize("name", ["causal", "wide window"])
def test_in_half_precision_it_is_as_near_as_eager(name, rings):
    rows = 96
    by_rank = on_threads(RANKS, sent_by_a_rank, name, rings, torch.bfloat16)
    *exact, gradient = drawn(rows, MASKS[name][1])
    out, gradients = {}, {}
    for dtype in (torch.float64, torch.bfloat16):
        given = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in exact[:3]]
        key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in given[1:])
        seen = all_pairs(MASKS[name][0], rows, rows)
        out[dtype] = torch.nn.functional.scaled_dot_product_attention(given[0], key, value, seen)
        gradients[dtype] = torch.autograd.grad(out[dtype], given, gradient.to(torch.bfloat16).to(dtype))
    found = [[made[k] for _, made in by_rank] for k in range(4)]
    whole = [torch.cat(found[0], 2), torch.cat(found[1], 2)]
    whole += [torch.cat(x, 2) if rings else sum(x[1:], x[0]) for x in found[2:]]
    right, eagerly = ([out[d].detach(), *gradients[d]] for d in (torch.float64, torch.bfloat16))
    for x, exactly, torchs in zip(whole, right, eagerly, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - exactly).norm() <= 2 * (torchs.double() - exactly).norm()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = (
            x.numel() for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor)
        )
        self.most = max(self.most, *sizes, 0)
        return made


SQUARES = [Sees(right=0), Sees(255, 0), Sees(right=0, chunk=512)]
SLOW = pytest.param(Sees(right=0, softcap=2.0), marks=pytest.mark.nightly)


@pytest.mark.parametrize("sees", [*SQUARES, SLOW], ids=str)
def test_no_tensor_inside_is_a_square(sees):
    rows = 8192
    query, key, value, gradient = torch.randn(4, 1, 1, rows, 8)
    setup = Setup(sees.text(), rows, rows).text()
    with Largest() as seen:
        made = attention_forward([query, key, value], (), setup)
        attention_backward([query, key, value], (), made, gradient, setup)
    assert seen.most <= rows * rows / 4
