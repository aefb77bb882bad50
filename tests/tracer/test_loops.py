"""A graph does not depend on the order in which a set was walked, and follows the program in all else."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.graph.graph import Graph, info
from autopar.testing import Equality
from autopar.tracer import ColoTracer, loops
from tests.tracer.cases import ops
from tests.training import whole

NAMES = ("a", "b", "c")


class Walks(nn.Module):
    """A model that walks over names in a given order, as a set gives it."""

    def __init__(self, walk, order=NAMES):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.walk, self.order = walk, order
        self.parts = nn.ModuleDict({n: nn.Linear(4, 4, dtype=torch.float64) for n in NAMES})
        for name, part in self.parts.items():
            part.weight.data, part.bias.data = normal(4, 4), normal(4)
            self.register_buffer(f"{name}_table", normal(4))

    def forward(self, x):
        return self.walk(self, x)


def read(found, x):
    """All that a walk has found, read in an order of its own."""
    for name in ("b", "a", "b", "c"):
        x = torch.tanh(x * found[name])
    return x.sum()


def of_one_function(m, x):
    def table(name):
        return torch.cos(getattr(m, f"{name}_table") * 2).exp()

    found = {}
    for name in m.order:
        found[name] = table(name)
    return read(found, x)


def of_modules(m, x):
    return read({name: m.parts[name](x) for name in m.order}, x)


def of_one_op(m, x):
    found = {}
    for name in m.order:
        found[name] = torch.sin(getattr(m, f"{name}_table"))
    return read(found, x)


def of_other_functions(m, x):
    how = {"a": lambda: torch.sin(x).exp(), "b": lambda: x.cumsum(0), "c": lambda: torch.ones(4, dtype=x.dtype) * x}
    return read({name: how[name]() for name in m.order}, x)


def of_branches(m, x):
    found = {}
    for name in m.order:
        if name == "a":
            found[name] = torch.sin(x).exp()
        elif name == "b":
            found[name] = x.cumsum(0)
        else:
            found[name] = m.c_table + x
    return read(found, x)


def of_branches_in_a_function(m, x):
    def table(name):
        if name == "a":
            return torch.sin(x).exp()
        if name == "b":
            return x.cumsum(0)
        return m.c_table + x

    found = {}
    for name in m.order:
        found[name] = table(name)
    return read(found, x)


def of_a_generator(m, x):
    def tables():
        for name in m.order:
            yield name, torch.cos(getattr(m, f"{name}_table")) * x

    return read({name: table.exp() for name, table in tables()}, x)


def of_a_map(m, x):
    def table(name):
        return m.parts[name](x).exp()

    return read(dict(zip(m.order, map(table, m.order), strict=True)), x)


def of_a_set_that_shrinks(m, x):
    left, found = list(m.order), {}
    while left:
        name = left.pop()
        found[name] = torch.cos(getattr(m, f"{name}_table")) * x
    return read(found, x)


def of_two_loops(m, x):
    found = {name: torch.cos(getattr(m, f"{name}_table")) for name in m.order}
    for name in m.order:
        for _ in range(2):
            found[name] = F.gelu(m.parts[name](found[name]))
    return read(found, x)


def of_a_loop_inside(m, x):
    found = {}
    for name in m.order:
        y = x
        for step in range(NAMES.index(name) + 1):
            y = m.parts[name](y) if step else torch.sin(y)
        if name != "b":
            y = y + torch.exp(x)
        found[name] = y
    return read(found, x)


def of_layers_with_a_walk_each(m, x):
    for _ in range(3):
        found = {name: m.parts[name](x).sin() for name in m.order}
        x = x + read(found, x)
    return x.sum()


def of_draws(m, x):
    return read({name: F.dropout(m.parts[name](x), 0.5) for name in m.order}, x)


def of_checkpoints(m, x):
    return read({name: checkpoint(m.parts[name], x, use_reentrant=False) for name in m.order}, x)


def of_several_results(m, x):
    return read({name: m.parts[name](x).split(2, -1)[0].repeat(1, 2) for name in m.order}, x)


def of_masks_and_tables(m, x):
    masks, tables = {}, {}
    for name in m.order:
        masks[name] = torch.arange(4) > len(name)
        if name != "a":
            tables[name] = getattr(m, f"{name}_table").cos()
    tables["a"] = x
    return read({name: torch.where(masks[name], tables[name], 0.0) for name in NAMES}, x)


def of_draws_that_nothing_reads(m, x):
    for name in m.order:
        F.dropout(m.parts[name](x), 0.5)
    return x.sum() + sum(p.bias.sum() for p in m.parts.values())


WALKS = (
    of_one_function,
    of_modules,
    of_one_op,
    of_other_functions,
    of_branches,
    of_branches_in_a_function,
    of_a_generator,
    of_a_map,
    of_a_set_that_shrinks,
    of_two_loops,
    of_a_loop_inside,
    of_layers_with_a_walk_each,
    of_draws,
    of_checkpoints,
    of_several_results,
    of_masks_and_tables,
    of_draws_that_nothing_reads,
)
X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def graph_of(walk, order) -> Graph:
    return ColoTracer().trace(Walks(walk, order), (X,))


@pytest.mark.parametrize("walk", WALKS)
def test_the_order_of_a_set_leaves_no_trace(walk):
    assert len({graph_of(walk, order).digest for order in itertools.permutations(NAMES)}) == 1


def _as_recorded(patch):
    patch.setattr(loops.Order, "_last_first", lambda self, iterations: reversed(iterations))


def _by_module_alone(patch):
    patch.setattr(loops.Order, "_first_use", lambda self, ops: (0, 0, loops._text(ops[0]).split()[0]))


@pytest.mark.parametrize("mutant, walk", [(_as_recorded, of_modules), (_by_module_alone, of_one_op)])
def test_a_broken_order_is_noticed(mutant, walk, monkeypatch):
    mutant(monkeypatch)
    assert len({graph_of(walk, order).digest for order in itertools.permutations(NAMES)}) > 1


@pytest.mark.parametrize("walk", [w for w in WALKS if w is not of_draws])
def test_the_graph_computes_what_the_program_does(walk):
    for order in (NAMES, NAMES[::-1]):
        model = Walks(walk, order)
        graph = ColoTracer().trace(model, (X,))
        torch.testing.assert_close(graph.module(model)(X), model(X))


def test_draws_have_the_same_numbers_in_every_order():
    def drawn(order):
        return [(info(n).module, info(n).random) for n in graph_of(of_draws, order).nodes if info(n).random >= 0]

    assert len(drawn(NAMES)) == 3 and all(drawn(o) == drawn(NAMES) for o in itertools.permutations(NAMES))


def test_what_is_read_first_is_computed_first():
    modules = [info(n).module for n in graph_of(of_modules, NAMES).nodes if info(n).kind == "op"]
    assert list(dict.fromkeys(m for m in modules if m)) == ["parts.b", "parts.a", "parts.c"]


def test_a_program_without_free_loops_stays_as_it_was_recorded(monkeypatch):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            late, early = x.cos(), x.sin()  # straight code keeps its order, whatever reads it first
            for block in self.blocks:
                x = x + block(x)
            return (x * early).sum() + late.sum()

    def graph():
        return str(ColoTracer().trace(Layers(), (torch.randn(2, 4),)))

    arranged = graph()
    monkeypatch.setattr(loops.Order, "_place", lambda self, run, *_: [self._put(op) for op in reversed(run)])
    assert graph() == arranged


def test_sums_in_another_order_are_other_programs():
    def total(m, x):
        found = x
        for name in m.order:
            found = found + m.parts[name](x)
        return found.sum()

    assert str(graph_of(total, NAMES)) != str(graph_of(total, NAMES[::-1]))


def test_ops_of_a_users_own_are_named_alike():
    def own(name):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * len(name)

            @staticmethod
            def backward(ctx, g):
                return g

        return Doubled.apply

    def walk(m, x):
        return read({name: own(name)(m.parts[name](x)) for name in m.order}, x)

    graphs = [graph_of(walk, order) for order in itertools.permutations(NAMES)]
    assert len({str(g) for g in graphs}) == 1 and any("Doubled''" in op for op in ops(graphs[0]))


def test_a_numbered_list_of_modules_runs_in_its_order():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))

        def forward(self, x):
            outs = [head(x).tanh() for head in self.heads]
            return sum(out.sum() for out in reversed(outs))

    graph = ColoTracer().trace(Heads(), (torch.randn(2, 4),))
    modules = dict.fromkeys(info(n).module for n in graph.nodes if info(n).kind == "op" and info(n).module)
    assert list(modules) == [f"heads.{i}" for i in range(11)]


def test_ranks_that_walk_in_other_orders_train_as_one_device(threads):
    """Each rank plans by itself: on graphs that differ this is a letter."""
    batch = X.repeat(2, 1)
    reference = Walks(of_two_loops)
    loss = reference(batch)
    loss.backward()

    def body(rank):
        model = Walks(of_two_loops, NAMES if rank else NAMES[::-1])
        mine = autopar.autoparallelize(model, (batch,), mesh=2, parallel="zero3", memory_budget="inf")
        loss = mine(batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}
    for found in threads(2, body):
        Equality.in_float64("two orders", found, expected, 1e-12).check()


FAMILIES = """
import torch, transformers as T
from autopar.tracer import ColoTracer

kinds = ["sliding_attention", "full_attention", "sliding_attention"]
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=4, layer_types=kinds)
size = dict(vocab_size=32, hidden_size=16, num_hidden_layers=3, intermediate_size=16, use_cache=False, **heads)
experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
ids = torch.zeros(2, 8, dtype=torch.int64)
for name, more in {
    "Gemma3TextConfig Gemma3ForCausalLM": {},
    "Olmo3Config Olmo3ForCausalLM": {},
    "ModernBertDecoderConfig ModernBertDecoderForCausalLM": dict(local_attention=4, **ends),
    "ModernBertConfig ModernBertForMaskedLM": dict(local_attention=4, **ends),
    "MellumConfig MellumForCausalLM": experts,
    "LagunaConfig LagunaForCausalLM": experts,
    "MiMoV2FlashConfig MiMoV2FlashForCausalLM": {},
}.items():
    config, model = (getattr(T, n) for n in name.split())
    with torch.device("meta"):
        built = model(config(**size, **more))
    graph = ColoTracer().trace(built, dict(input_ids=ids, labels=ids))
    print(name, graph.digest, len(list(graph.nodes)))
"""


@pytest.mark.nightly
def test_processes_of_other_hash_seeds_hold_one_graph_of_each_family():
    """Families of transformers that walk over `set(config.layer_types)`; ranks of torchrun have other seeds each."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FAMILIES],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("0", "1")  # a set of both kinds is walked in either order
    ]
    said = {process.communicate(timeout=900)[0] for process in running}
    assert all(process.returncode == 0 for process in running) and len(said) == 1
    assert len(said.pop().splitlines()) == 7
