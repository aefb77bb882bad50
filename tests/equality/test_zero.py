"""The preset zero3 is ZeRO-3 as torch's FSDP2 runs it.

The same collectives, dtypes and bytes, counted on four ranks, and the gradients of the single-device program.
"""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Precision
from autopar.testing import Equality
from autopar.tracer.precision import reference
from tests.training import whole

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, LAYERS = 32, 4, 64, 16, 8, 3


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o, self.a, self.b = (
            nn.Linear(n * width, m * width, bias=False) for n, m in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(self.l1(x)).split(x.shape[-1], 2))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.b(F.gelu(self.a(self.l2(x))))


class Words(nn.Module):
    def __init__(self, width=WIDTH, vocabulary=VOCABULARY):
        super().__init__()
        self.te, self.pe = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, target):
        h = self.te(x) + self.pe(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.ln(h)).flatten(0, 1).float(), target.flatten())


def words(**how):
    vocabulary = how.get("vocabulary", VOCABULARY)
    return Words(**how), {
        "x": torch.randint(0, vocabulary, (BATCH, LENGTH)),
        "target": torch.randint(0, vocabulary, (BATCH, LENGTH)),
    }


class Counted(TorchDispatchMode):
    """Of each kind of collective and dtype the messages and the elements of the whole, but for sums of single numbers
    (of the loss and its count) and what compares batches.
    """

    KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}

    def __init__(self):
        super().__init__()
        self.messages, self.elements = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            most = max(tensors, key=torch.Tensor.numel)
            if most.is_floating_point() and most.numel() > 2:
                kind = self.KINDS.get(function._opname, function._opname), str(most.dtype).removeprefix("torch.")
                self.messages[kind] += 1
                self.elements[kind] += most.numel()
        return result


def fsdp(model):
    """Each block by itself; what stands before and after them too.

    What backward does not read again, or reads at once, stays.
    """
    how = dict(
        mesh=init_device_mesh("cpu", (4,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    fully_shard([model.te, model.pe], reshard_after_forward=False, **how)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard([model.ln, model.head], reshard_after_forward=False, **how)
    return fully_shard(model, **how)


def step(model, batch):
    with Counted() as counted:
        model(**batch).backward()
    return counted.messages, counted.elements


def both(rank, model, batch, plan):
    ours, theirs = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan), fsdp(copy.deepcopy(model))
    mine, twin = step(ours, batch), step(theirs, {name: t.chunk(4)[rank] for name, t in batch.items()})
    shards = (
        {name: p.to_local().shape for name, p in ours.named_parameters()},
        {name: p.to_local().shape for name, p in theirs.named_parameters()},
    )
    return (
        mine,
        twin,
        shards,
        {n: whole(p.grad) for n, p in ours.named_parameters()},
        {n: whole(p.grad) for n, p in theirs.named_parameters()},
    )


@pytest.mark.parametrize("vocabulary", [VOCABULARY])
def test_zero3_moves_what_fsdp2_moves(vocabulary, processes):
    model, batch = words(vocabulary=vocabulary)
    precision = Precision("bfloat16", "float32")
    plan = autopar.plan(model, batch, mesh=4, parallel="zero3", precision=precision)
    exact = copy.deepcopy(model)
    reference(exact, precision)(**batch).backward()

    for mine, twin, (shards, same), ours, theirs in processes(4, both, model, batch, plan):
        (messages, elements), (their_messages, their_elements) = mine, twin
        assert elements == their_elements and set(elements) == {
            ("all_gather", "bfloat16"),
            ("reduce_scatter", "float32"),
        }
        assert messages["all_gather", "bfloat16"] == their_messages["all_gather", "bfloat16"]
        assert (
            messages["reduce_scatter", "float32"] <= their_messages["reduce_scatter", "float32"]
        )  # small blocks share a bucket
        assert shards == same
        for name, p in exact.named_parameters():  # a few roundings to eight bits
            assert ours[name].dtype == torch.float32
            assert all((found[name] - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-6 for found in (ours, theirs)), name


class Neighbours(nn.Module):
    """Messages along edges: an input that has other rows than the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x, edges, y):
        h = self.first(x).relu()
        return F.cross_entropy(self.last(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])), y)


@pytest.mark.parametrize("parallel, ranks", [("zero3", 3), ("dp", 2)])
def test_an_input_without_the_rows_of_the_batch_stays_whole(parallel, ranks, threads):
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 6).double(), "edges": torch.randint(0, 12, (2, 31)), "y": torch.randint(0, 4, (12,))}
    model = Neighbours().double()
    alone = copy.deepcopy(model)
    alone(**batch).backward()
    plan = autopar.plan(model, batch, mesh=ranks, parallel=parallel)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return {name: whole(p.grad) for name, p in mine.named_parameters()}

    expected = {name: p.grad for name, p in alone.named_parameters()}
    for found in threads(ranks, body):
        Equality.in_float64(f"{parallel} on {ranks}", found, expected, 1e-9).check()
