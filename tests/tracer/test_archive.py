"""A graph is data: it is written, read back, and a hostile text is a letter."""

from __future__ import annotations

import collections
import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from autopar.graph.graph import Graph, info
from autopar.letters import BadGraph
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, check, traced


def rich(m, x):
    h = x @ m.weight
    m.steps += 1
    h = (
        h.masked_fill(x > 1, float("-inf")).clamp(min=-2.0)[:, torch.tensor([0, 1])]
        + torch.tensor([1.0, float("nan")]).nan_to_num()
    )
    return {"loss": F.dropout(h, 0.1).sum(), "more": (h[..., None, 1:], None, "text", 3, float("inf"))}


def test_a_graph_reads_back_as_it_was():
    graph = traced(rich)
    again = Graph.from_json(graph.to_json())
    assert again == graph and again.digest == graph.digest and again.to_json() == graph.to_json()
    assert [info(n) for n in again.nodes] == [info(n) for n in graph.nodes]
    for name in (
        "input_spec",
        "input_leaves",
        "output_spec",
        "output_leaves",
        "output_names",
        "updates",
        "assumptions",
        "training",
    ):
        assert getattr(again, name) == getattr(graph, name)


def test_a_graph_that_was_read_back_computes():
    model, x = Of(rich), torch.randn(4, 4)
    graph = Graph.from_json(traced(rich).to_json())
    torch.manual_seed(1)
    replayed = graph.module(model)(x)
    assert float(model.steps) == 1
    torch.manual_seed(1)
    torch.testing.assert_close(replayed["loss"], model(x)["loss"])
    assert replayed["more"][1:] == (None, "text", 3, float("inf"))


HOSTILE = [
    "hub.load",
    "load",
    "os.system",
    "__init__",
    "ops.load_library",
    "_C._jit_set_profiling_executor",
    "function os.system",
    "function subprocess.Popen",
    "utils.data.DataLoader",
    "nn.Linear",
    "serialization.load on a copy",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_reads_back_only_as_what_a_tracer_meets(name):
    data = json.loads(traced(lambda m, x: torch.linalg.eigvals((x @ m.weight).T @ x).abs().sum()).to_json())
    entry = next(n for n in data["nodes"] if isinstance(n["target"], dict) and "function" in n["target"])
    entry["target"]["function"] = name
    with pytest.raises(BadGraph):
        Graph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"autopar_graph": 99}',
        '{"autopar_graph": 1, "nodes": [{}]}',
        '{"autopar_graph": 1, "nodes": 3}',
    ],
)
def test_what_is_no_graph_is_a_letter(text):
    with pytest.raises(BadGraph, match="graph"):
        Graph.from_json(text)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.update(training="yes"), "'yes' is not true or false, at training"),
        (lambda d: d.update(turns=0.5), "0.5 is not a whole number .*, at turns"),
        (lambda d: d["nodes"][0]["info"]["outputs"][0].update(shape=[-1]), "-1 is not .*, at outputs.0.shape.0"),
        (lambda d: d["nodes"][0]["info"].pop("kind"), "'kind'"),
    ],
)
def test_a_graph_that_was_edited_wrongly_says_where(change, words):
    data = json.loads(traced(lambda m, x: (x @ m.weight).sum()).to_json())
    change(data)
    with pytest.raises(BadGraph, match=words):
        Graph.from_json(json.dumps(data))


def test_a_parameter_may_have_any_name():
    """As that of a department, which names a part of a value if it is read as one."""
    model = Of(lambda m, x: m.weight * m.department * x)
    model.department = torch.nn.Parameter(torch.ones(4))
    graph = ColoTracer().trace(model, (torch.ones(4, 4),))
    assert Graph.from_json(graph.to_json()) == graph


def test_what_json_has_no_word_for_is_a_letter():
    class Opaque:
        pass

    graph = check(lambda m, x: (x @ m.weight).sum())
    for node in graph.nodes:
        if info(node).kind == "op":
            node.kwargs = {**node.kwargs, "extra": Opaque()}
    with pytest.raises(BadGraph, match="Opaque cannot be written"):
        graph.to_json()


def test_graphs_whose_gradients_differ_are_not_equal():
    def without(m, x):
        with torch.no_grad():
            k = (x @ m.weight) * 2
        return (k + x @ m.weight).sum()

    assert traced(without) != traced(lambda m, x: ((x @ m.weight) * 2 + x @ m.weight).sum())
    assert "no gradient" in str(traced(without))


def test_a_hostile_structure_imports_nothing():
    data = json.loads(traced(lambda m, x: {"a": x @ m.weight}).to_json())
    spec = json.loads(pytree.treespec_dumps(pytree.tree_structure(collections.defaultdict(list, a=1))))
    spec[1]["context"] |= {"default_factory_module": "this", "default_factory_name": "s"}
    data["output_spec"] = json.dumps(spec)
    with pytest.raises(BadGraph, match="not read"):
        Graph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "name", ["from_file", "set_num_threads", "frombuffer", "fork", "import_ir_module", "_from_blob"]
)
def test_a_hostile_function_is_not_read(name):
    data = json.loads(traced(lambda m, x: torch.linalg.eigvals((x @ m.weight).T @ x).abs().sum()).to_json())
    next(n for n in data["nodes"] if isinstance(n["target"], dict) and "function" in n["target"])["target"][
        "function"
    ] = name
    with pytest.raises(BadGraph):
        Graph.from_json(json.dumps(data))
