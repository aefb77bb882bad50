"""Files of plans: layers that are alike stand once, a schema says what is in them, and older ones are read."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from importlib import resources

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Assume, Plan
from autopar.graph.nodes import info
from autopar.letters import BadPlan
from autopar.solver.folding import _folded, _unfolded
from autopar.tracer import ColoTracer
from tests.host import with_host
from tests.kernels.sites import SITES
from tests.language import drawn, meta_gpt2, meta_llama_8b
from tests.models import eager_links
from tests.shares import by_day

ASSUMED = Assume(no_padding=True)
HOW = {
    "gpt2": {"mesh": (2, 2), "memory_budget": "3MiB"},
    "llama": {"mesh": (2, 2), "parallel": {"data": 2, "tensor": 2}, "precision": "bf16"},
    "t5 1.1": {"mesh": 4, "kernels": ("rms_norm",)},
    "llama on host": {
        "mesh": (2,),
        "parallel": "zero3",
        "cluster": with_host(eager_links()),
        "optimizer": "autopar-adamw",
        "memory_budget": "900KiB",
        "host_budget": "1GiB",
    },
    "gpt_neox": {"mesh": (4,), "recompute": "full", "memory_budget": "64GiB", "accumulation": 2},
}


def schema():
    return json.loads(resources.files("autopar.solver").joinpath("plan.schema.json").read_text())


@functools.cache
def planned(name):
    build, config = SITES[name.partition(" on ")[0]]
    return autopar.plan(
        build(config).train(), drawn(16, 16, 128), assume=ASSUMED, **{"memory_budget": "inf", **HOW[name]}
    )


@pytest.mark.parametrize("name", by_day(HOW, "llama on host", "gpt_neox"))
def test_a_file_is_what_its_schema_says_and_gives_the_plan(name, tmp_path):
    plan, path = planned(name), tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(data, schema(), jsonschema.Draft202012Validator)
    assert data["version"] == 6 and data["autopar"] == autopar.__version__
    again = Plan.load(path)
    assert again == plan and Plan.from_dict(data) == plan
    assert list(again.decisions) == list(plan.decisions) and again.conversions == plan.conversions
    assert again.table() == plan.table()


@pytest.mark.nightly
def test_many_layers_take_no_more_room_than_few(tmp_path):
    """A file of LLaMA-8B is under 100 KB; another eight layers of GPT-2 add a twentieth to what is decided."""
    model, inputs = meta_llama_8b(32, 64)
    autopar.plan(model, inputs, mesh=(8, 8), cluster="h100-8x8", parallel="fsdp", memory_budget="inf").save(
        tmp_path / "llama.json"
    )
    assert (tmp_path / "llama.json").stat().st_size < 100_000
    sizes = []
    for layers in (4, 12):
        model, inputs = meta_gpt2(layers)
        autopar.plan(model, inputs, mesh=(2,), memory_budget="inf").save(tmp_path / "gpt2.json")
        file = (tmp_path / "gpt2.json").read_text()
        record = json.loads(file)["record"]  # Its events are of blocks, so that it grows with these.
        sizes.append(len(file) - len(json.dumps(record)))
    assert sizes[1] < 1.05 * sizes[0]


def test_a_file_of_an_older_release_is_read(tmp_path):
    plan = planned("llama")
    (tmp_path / "old.json").write_text(json.dumps(plan.to_dict()))
    assert plan.to_dict()["version"] == 4 and Plan.load(tmp_path / "old.json") == plan


def test_a_file_of_the_release_before_is_read_without_shapes(tmp_path):
    plan, path = planned("gpt2"), tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    data["version"] = 5
    for record in data["decisions"]:
        del record["outputs"], record["names"][1:]
    path.write_text(json.dumps(data))
    jsonschema.validate(data, schema(), jsonschema.Draft202012Validator)
    before = Plan.load(path)
    assert {name: replace(d, outputs=(), reads=()) for name, d in plan.decisions.items()} == before.decisions
    assert before.conversions == plan.conversions and before.table() == plan.table()


def test_a_file_says_shapes_and_who_reads_whom():
    """As a trace of the same model has them: of every node its tensors, and the nodes that give its operands."""
    build, config = SITES["gpt2"]
    graph = ColoTracer().trace(build(config).train(), drawn(16, 16, 128))
    plan = planned("gpt2")
    ops = {info(node).key: node for node in graph.nodes if info(node).kind == "op"}
    assert len(ops) > 50 and ops.keys() <= plan.decisions.keys()
    for name, node in ops.items():
        outputs = [f"{t.dtype}{list(t.shape)}" for t in info(node).outputs]
        given = [info(one.args[0] if info(one).kind == "part" else one).key for one in node.all_input_nodes]
        read = {*map(_behind, plan.decisions[name].reads)}
        assert list(plan.decisions[name].outputs) == outputs and read == {*map(_behind, given)}, name


def _behind(name):
    """The value behind a place of its own: `wte.weight:shared`."""
    return name.removesuffix(":used").removesuffix(":shared")


def test_a_file_that_was_edited_wrongly_is_a_letter(tmp_path):
    plan, path = planned("gpt2"), tmp_path / "plan.json"
    plan.save(path)
    right = json.loads(path.read_text())

    def edited(change):
        data = json.loads(json.dumps(right))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(BadPlan):
            Plan.load(path)

    layer = next(i for i, d in enumerate(right["decisions"]) if "layer" in d)
    for change in (
        lambda d: d["decisions"][layer].update(count=3),  # a layer that is elsewhere too
        lambda d: d["decisions"][layer].update(at=10_000),
        lambda d: d["decisions"][layer].update(every=-1),
        lambda d: d["decisions"][layer].update(names=["h.{"]),
        lambda d: d["decisions"][layer].update(choice=10_000),
        lambda d: d["decisions"].pop(layer),
        lambda d: d["choices"].clear(),
        lambda d: d["conversions"][0].update(names=["one"]),
        lambda d: d["parameter_bytes"][0].pop("bytes"),
        lambda d: d.pop("choices"),
        lambda d: d.update(version=7),
        lambda d: d["decisions"][layer].update(outputs=[3]),
        lambda d: d.update(decisions=3),
        lambda d: d["decisions"][layer].update(count=10**12),
    ):
        edited(change)
    path.write_text(json.dumps(right))
    assert Plan.load(path) == plan


_NAMES = st.builds(
    lambda before, n, behind: f"{before}{n}{behind}",
    st.sampled_from(["h.", "enc.block.", "x", "", "layers.0", "a{b}."]),
    st.integers(0, 12),
    st.sampled_from([".up", "/add", ".mlp.0/linear", "", ":shared"]),
)
_RECORDS = st.lists(
    st.tuples(st.tuples(_NAMES, _NAMES), st.fixed_dictionaries({"seconds": st.sampled_from([0.0, 1.5])})), max_size=30
)


def test_a_letter_quotes_what_no_stream_can_encode():
    model, batch = nn.Linear(4, 4), {"input": torch.ones(2, 4)}
    data = autopar.plan(model, batch, mesh=1).to_dict()
    next(iter(data["decisions"].values()))["kind"] = "\ud800"
    with pytest.raises(BadPlan, match=r"a \\ud800") as letter:
        Plan.from_dict(data).validate(model, batch)
    assert str(letter.value).encode() and str(letter.value.but(seen="\udfff")).endswith("\\udfff")


@settings(max_examples=60, deadline=None)
@given(_RECORDS)
def test_records_come_back_as_they_were(records):
    found = _unfolded(json.loads(json.dumps(_folded(records))))
    assert [(tuple(names), said) for names, said in found] == [(names, dict(said)) for names, said in records]
