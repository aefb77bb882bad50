"""Tensors handed over to another sharding: bytes and seconds as predicted, and beside gathering them on CPU ranks.

python -m benchmarks.hand_over [predicted] [ran]

predicted    LLaMA-8B, stored in as many parts as there are H100, for three generators; no device is used
ran          a model of 107 million parameters on four gloo ranks: beside gathering each tensor and cutting it anew
"""

from __future__ import annotations

import logging
import statistics
import sys
import time

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.sharding.cluster import Cluster
from autopar.sharding.handing import Cells, Holding, loads, route, seconds
from autopar.sharding.placement import R, S, Sharding
from autopar.testing import on_processes

GIB = 2**30
WORLDS = (64, 256, 1024)
ROUNDS = 7


def llama(layers: int, width: int, inner: int, heads: int, vocabulary: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": width, "intermediate_size": inner, "vocab_size": vocabulary}
    shared = {"num_attention_heads": heads, "num_key_value_heads": heads // 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes, **shared))


def generators(world: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Ranks, shape and axis sizes of meshes of generators by name; the last axis cuts rows."""
    everyone = tuple(range(world))
    return {
        "tensor parallel in every node": (everyone, (world // 8, 8), (1,)),
        "tensor parallel in the first node": (tuple(range(8)), (8,), (0,)),
        "whole on every device": (everyone, (world,), ()),
    }


def print_predicted() -> None:
    with torch.device("meta"):
        model = llama(32, 4096, 14336, 32, 128256)
    sizes = [tuple(p.shape) for p in model.parameters()]
    print("| H100 | generator | fullest rank sends, GiB | receives, GiB | between nodes, ms | in all, ms | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for world in WORLDS:
        cluster = Cluster.of(f"h100-8x{world // 8}")
        source = Holding(tuple(range(world)), (world // 8, 8), Sharding((S(0), S(0))))
        for name, (ranks, shape, cuts) in generators(world).items():
            target = Holding(ranks, shape, Sharding(tuple(S(0) if axis in cuts else R for axis in range(len(shape)))))
            began = time.process_time()
            known: dict[tuple[int, ...], np.ndarray] = {}
            for size in sizes:
                if size not in known:
                    cells = Cells(size, source, target, 8)
                    known[size] = 2 * loads(route(cells, world, 8), cells.elements, world)  # bfloat16
            nbytes = sum((known[size] for size in sizes), np.zeros((2, 2, world)))
            took = time.process_time() - began
            between = nbytes * np.array([1, 0]).reshape(2, 1, 1)
            sent, received = nbytes.sum(0).max(1) / GIB
            cells_of = f"{seconds(between, cluster) * 1e3:.1f} | {seconds(nbytes, cluster) * 1e3:.1f} | {took:.2f}"
            print(f"| {world} | {name} | {sent:.2f} | {received:.2f} | {cells_of} |", flush=True)


def both_ways(rank: int) -> list[tuple[float, float]]:
    """Seconds of handing a model over, and of gathering each of its tensors and cutting it, in turn."""
    logging.getLogger("autopar").setLevel(logging.WARNING)
    batch = {name: torch.zeros(4, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    model = autopar.autoparallelize(llama(8, 1024, 2816, 16, 8192), batch, mesh=(2, 2), parallel="zero3")
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
    found = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        for _name, _tensor in model.hand_over(mesh, {"*": "S(0)"}):
            pass
        middle = time.monotonic()
        with torch.no_grad():
            for parameter in model.parameters():
                distribute_tensor(parameter.full_tensor(), mesh, [Shard(0)], src_data_rank=None)
        found.append((middle - began, time.monotonic() - middle))
    return found


def print_ran() -> None:
    rounds = on_processes(4, both_ways, timeout_s=500)[0]
    handed, gathered = zip(*rounds[1:], strict=True)
    print("| way | median s | least | most |")
    print("|---|---|---|---|")
    for name, times in (("handed over", handed), ("gathered, then cut", gathered)):
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    for _name in sys.argv[1:] or ("predicted", "ran"):
        {"predicted": print_predicted, "ran": print_ran}[_name]()
