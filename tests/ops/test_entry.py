"""An op is one entry: what is said there is in the plan, the memory, the program and the proof."""

from __future__ import annotations

import ast
import copy
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen import lower
from autopar.letters import BadRule
from autopar.ops.entry import FACTS, OPS, SPELLINGS, op
from autopar.ops.local import cuts
from autopar.runtime.forms import embedding_part
from autopar.sharding.notation import parse
from autopar.space.saved import saved
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.training import whole

TWO = autopar.DeviceMesh((2,), ("tp",))


@torch.library.custom_op("autopar_tests::rows", mutates_args=())
def rows(input: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[input]


@rows.register_fake
def _(input, table):
    return table.new_empty(*input.shape, table.shape[1])


def _backward(ctx, gradient):
    input, size = ctx.saved_tensors[0], ctx.size
    return None, gradient.new_zeros(size, gradient.shape[-1]).index_add(0, input.flatten(), gradient.flatten(0, -2))


def _set_up(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.size = inputs[1].shape[0]


rows.register_autograd(_backward, setup_context=_set_up)


def rows_of_part(here, call, kwargs):
    """Rows that lie on this device, zero for others."""
    lies = here.lies(1)
    if 0 not in lies.cuts:
        return None
    return embedding_part, {
        "input": kwargs["input"],
        "weight": kwargs["table"],
        "cuts": cuts(here, call.arguments["table"].shape, lies, 0),
    }


FUNCTION = torch.ops.autopar_tests.rows
ENTRY = dict(
    rule="n, v~ d -> n d",
    linear="y",
    serves="~",
    form=rows_of_part,
    counts="v",
    keeps="input",
    makes=dict(cpu="7*points", cuda="7*points"),
    flops=(3, "v"),
)


@pytest.fixture
def described():
    """An entry for the op, as long as the test."""

    def describe(**facts):
        op("rows", FUNCTION, "input:T, table:T", FUNCTION.default, **facts)

    yield describe
    for table, keys in ((OPS, ["rows"]), (FACTS, ["rows"]), (SPELLINGS, [FUNCTION, FUNCTION.default])):
        for key in keys:
            table.pop(key, None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(10, 6, dtype=torch.float64))

    def forward(self, x):
        return {"loss": FUNCTION(x, self.table).square().sum()}


BATCH = {"x": torch.tensor([3, 9, 0, 3, 7, 5, 5, 1])}


def trained(model):
    model(**BATCH)["loss"].backward()
    return {"gradient": whole(model.table.grad)}


def test_an_op_that_one_file_describes_is_cut_as_it_says(described, threads):
    described(**ENTRY)
    graph = ColoTracer().trace(Model(), BATCH)
    plan = autopar.plan(Model(), BATCH, mesh=TWO, cluster=eager_links(), constraints={"table": "S(0)"})
    decision = next(d for d in plan.decisions.values() if d.op == "rows")
    assert repr(decision.choice.strategies[0]).endswith("S(0) -> P(sum)") and not plan.without_rule
    kept = {row.what: row.nbytes for row in saved(graph) if "rows" in row.what}
    assert kept == {"besides, rows": 7 * 8}  # and its input, which is there anyway
    code = lower(graph, plan, (1,)).program
    assert any(n.target is embedding_part for n in code.fx.nodes)
    expected, model = trained(Model()), Model()  # made once: threads share torch's random numbers
    for result in threads(2, lambda rank: trained(autopar.autoparallelize(copy.deepcopy(model), BATCH, plan=plan))):
        Equality.in_float64("rows", result, expected, 1e-9).check()


def test_a_mark_without_a_form_is_an_error(described):
    with pytest.raises(BadRule, match="no local form for v~"):
        described(rule=ENTRY["rule"], linear="y")


def test_a_mark_that_a_function_gives_without_a_form_is_an_error(described):
    described(rule=lambda arguments: parse("n, v~ d -> n d", "y"))
    with pytest.raises(BadRule, match="no local form for v~"):
        autopar.plan(Model(), BATCH, mesh=TWO, cluster=eager_links())


def test_an_op_is_named_in_few_files():
    """Facts of an op stand in its entry; what else names ops are passes that rewrite them.

    Loops over experts, and functions of places that make up a mask, are read by what they call: the average of two did
    not count with these.
    """
    names = {n for n, made in OPS.items() if made.signature is not None and not n.endswith("_updating")}
    files = defaultdict(set)
    for path in Path(autopar.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.split()
                if words and names.issuperset(words):
                    for word in words:
                        files[word].add(path)
    assert statistics.mean(len(files[n]) for n in names) <= 2.5
