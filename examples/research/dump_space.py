"""Write the space of a model as tables: arrays of seconds, and the names of what they are of. Solve it elsewhere."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.solver.program import solve
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer


def tables(space) -> dict[str, np.ndarray]:
    """Of each site its seconds by choice; of each edge its two sites and its seconds by the choices of both."""
    found = {f"site {i}": site.seconds for i, site in enumerate(space.sites)}
    for k, edge in enumerate(space.edges):
        found[f"edge {k}"] = edge.seconds[np.ix_(edge.given_by, edge.taken_by)]
    found["ends"] = np.array([(edge.source, edge.target) for edge in space.edges])
    names = [{"name": site.name, "op": site.op, "choices": [repr(c) for c in site.choices]} for site in space.sites]
    found["names"] = np.array(json.dumps(names))
    return found


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "space.npz"
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=64)).train()
        ids = torch.zeros(16, 64, dtype=torch.int64)
    assume = autopar.Assume(no_padding=True)
    graph = ColoTracer().trace(model, {"input_ids": ids, "labels": ids}, assume=assume)
    space = shardings(graph, Setting(autopar.DeviceMesh((4,)), autopar.Cluster.of("h100-8x1")))
    plan = solve(space)  # its seconds, for who solves the tables elsewhere; communication in windows comes less
    found = tables(space)
    np.savez_compressed(path, **found, best=np.array(plan.step_time_s + plan.hidden_s))
    print(f"{path}: {len(space.sites)} sites, {len(space.edges)} edges, best {plan.step_time_s * 1e3:.4f} ms")
