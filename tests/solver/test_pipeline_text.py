"""The texts, files, trace and page of a plan in stages, against a simulation by hand and the labels of its graph."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from importlib import resources
from itertools import pairwise

import jsonschema
import pytest
import torch

import autopar
from autopar import Plan
from autopar.commands.exports.exported import Exported
from autopar.commands.exports.hf import hf
from autopar.commands.exports.titan import torchtitan_toml
from autopar.graph.graph import info
from autopar.letters import BadPlan
from autopar.plan_cache import words_of
from autopar.report import data_of
from autopar.request import Request
from autopar.solver.staged import stages_of, strip_of
from autopar.solver.summary import parts_of_step
from autopar.stages.cuts import labels_of
from autopar.tracer import ColoTracer
from tests.stages.models import Decoder

MESH = autopar.DeviceMesh((4, 2), ("pp", "dp"))
TURNS = 8


def model_and_batch():
    torch.manual_seed(0)
    return Decoder(6, 32, 48), {"ids": torch.randint(48, (16, 12)), "labels": torch.randint(48, (16, 12))}


@pytest.fixture(scope="module")
def plan():
    pipeline = {"schedule": "zero-bubble", "cuts": ["blocks.1", "blocks.3", "blocks.5"]}
    return autopar.plan(*model_and_batch(), mesh=MESH, microbatches=TURNS, pipeline=pipeline)


@pytest.fixture(scope="module")
def moved():
    """The plan with the cut before the second stage one block later, in the same order."""
    pipeline = {"schedule": "zero-bubble", "cuts": ["blocks.2", "blocks.3", "blocks.5"]}
    return autopar.plan(*model_and_batch(), mesh=MESH, microbatches=TURNS, pipeline=pipeline)


def ends_by_hand(plan, transfer=1.0):
    """When each action ends: a pass over the orders until nothing moves, from the table's own figures."""
    stages = plan.pipeline.stages
    price = {
        kind: [getattr(s, f"{name}_s") for s in stages] for kind, name in zip("FIW", ("forward", "inward", "weights"))
    }
    orders = [[(a[1], int(a[0]), int(a[2:])) for a in order.split()] for order in plan.pipeline.orders]
    ends, now = {}, [0] * len(orders)
    while any(k < len(order) for k, order in zip(now, orders)):
        for r, order in enumerate(orders):
            while now[r] < len(order):
                kind, stage, turn = order[now[r]]
                near = {"F": stage - 1, "I": stage + 1}.get(kind, -1)
                waits = [] if not 0 <= near < len(stages) else [(kind, near, turn)]
                if any(w not in ends for w in waits):
                    break
                hop = transfer * stages[min(stage, near)].transfer_s if waits else 0.0
                free = ends[order[now[r] - 1]] if now[r] else 0.0
                start = max([free, *(ends[w] + hop for w in waits)])
                ends[kind, stage, turn] = start + price[kind][stage]
                now[r] += 1
    return ends


def test_a_summary_has_the_stages_and_shares_that_add_up(plan):
    lines = str(plan).splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 100
    assert "8 x generic accelerator (cluster generic), 4 stages of mesh (dp=2)" in lines[1]
    said = " ".join(line.strip() for line in lines[2:4])
    # The residual stream of 2 rows, 12 x 32 float32 each, is whole on both devices of a stage.
    assert "4 stages of 1, 2, 2, 1 blocks, zero bubble, 8 micro-batches" in said and "3.00 KiB a transfer" in said
    assert "most in flight 4" in said and "fullest at the devices of stage 1" in str(plan)
    parts = parts_of_step(plan)
    assert sum(parts.values()) == pytest.approx(plan.step_time_s, rel=1e-9) and min(parts.values()) > -1e-12
    step = max(ends_by_hand(plan).values())
    busy = sum(TURNS * (s.forward_s + s.inward_s + s.weights_s) for s in plan.pipeline.stages) / 4
    assert parts["compute"] + sum(v for k, v in parts.items() if "comm" in k) == pytest.approx(busy, rel=1e-6)
    assert plan.step_time_s - step == pytest.approx(4 * parts["optimizer"], abs=3 * parts["optimizer"])
    assert parts["idle for transfers"] == pytest.approx(step - max(ends_by_hand(plan, 0.0).values()), rel=1e-6)
    assert plan.pipeline.idle == pytest.approx(1 - busy / step, abs=1e-3)


def test_a_file_has_the_stages_and_tells_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    schema = json.loads(resources.files("autopar.solver").joinpath("plan.schema.json").read_text())
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.pipeline == plan.pipeline and plan.diff(again) == "the plans are the same"
    assert again.table() == plan.table() and again.explain("pipeline") == plan.explain("pipeline")
    assert data_of(again)["pipeline"] == data_of(plan)["pipeline"]


def _order(pipeline, change):
    orders = list(pipeline["orders"])
    orders[1] = change(orders[1])
    return {**pipeline, "orders": orders}


EDITS = {
    "loses": lambda p: _order(p, lambda text: text.replace(" 1F3", "")),
    "doubles": lambda p: _order(p, lambda text: text.replace("1F3", "1F3 1F3")),
    "waits for ever": lambda p: _order(
        p, lambda text: "1F0 1I0 1W0 " + text.replace("1F0 ", "").replace("1I0 ", "").replace("1W0 ", "")
    ),
    "is no order": lambda p: _order(p, lambda text: text.replace("1F3", "F3")),
    "other place": lambda p: {**p, "place": [0, 1, 2, 2]},
    "fewer cuts": lambda p: {**p, "firsts": p["firsts"][:2]},
    "fewer figures": lambda p: {**p, "stages": p["stages"][:3]},
    "unknown block": lambda p: {**p, "firsts": ["blocks.9", *p["firsts"][1:]]},
    "unknown schedule": lambda p: {**p, "schedule": "2f2b"},
    "other mesh": lambda p: {**p, "mesh": {**p["mesh"], "shape": [4, 4]}},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_pipeline_is_refused(plan, edit):
    data = plan.to_dict()
    with pytest.raises(BadPlan):
        Plan.from_dict({**data, "pipeline": edit(data["pipeline"])})


def test_a_cut_that_is_moved_takes_what_the_plan_cut_there_takes(plan, moved):
    said = {(stage, by): seconds for stage, by, seconds in plan.search.moved()}
    assert len(said) == 4  # stages of one block lose none
    assert said[1, 1] == pytest.approx(moved.step_time_s, rel=1e-9)
    assert plan.search.moved()[0][0] == 1 and "stage 1 one block later: +" in plan.explain("pipeline")
    assert (
        plan.diff(moved)
        .splitlines()[0]
        .startswith("stages  4 stages of 1, 2, 2, 1 blocks, zero bubble | 4 stages of 2, 1")
    )


def test_places_have_the_stages_of_the_program(plan):
    graph = ColoTracer().trace(*model_and_batch())
    labels = labels_of(list(graph.nodes), plan.pipeline.firsts)
    found = stages_of(plan)
    named = {info(node).key: stage for node, stage in labels.stage.items() if info(node).key in found}
    assert len(named) > 50 and all(found[name] == (stage,) for name, stage in named.items())
    assert found["table.weight"] == (0, 3)  # the head reads the table
    assert "    in stages 0, 3" in plan.explain("table.weight") and "in stage 3" in plan.explain("head/linear")


def test_an_op_of_no_block_stands_with_its_first_reader(plan):
    """Skips that a later stage reads, too: every op but these is in a block."""
    kept = plan.decisions
    weight, ids = "table.weight", "ids"
    op = next(d for d in plan.decisions.values() if d.kind == "op")
    made = {
        ids: kept[ids],
        weight: kept[weight],
        "/skip": replace(op, reads=(weight, ids)),
        "/mask": replace(op, reads=(ids,)),
        "blocks.3/add": replace(op, reads=("/skip", "/mask")),
        "blocks.1/add": replace(op, reads=("/skip", "/mask")),
    }
    found = stages_of(replace(plan, decisions=made))
    assert found["/skip"] == (1,) and found["/mask"] == (1, 2)
    assert found[weight] == (1,) and found[ids] == (1, 2) and found["blocks.3/add"] == (2,)


def test_a_trace_has_lanes_of_each_coordinate(plan, tmp_path):
    records = json.loads(plan.timeline().save(tmp_path / "step.json").read_text())["traceEvents"]
    names = [r["args"]["name"] for r in records if r["name"] == "process_name"]
    assert names == ["pp 0", "pp 1", "pp 2", "pp 3"]
    ends, spans = ends_by_hand(plan), defaultdict(list)
    for r in (r for r in records if r["ph"] == "X"):
        spans[r["pid"], r["tid"]].append((r["ts"], r["ts"] + r["dur"]))
    assert len(spans) == 8 and sum(len(spans[pid, 1]) for pid in range(1, 5)) == 4 * 3 * TURNS
    assert max(end for at in spans.values() for _, end in at) == pytest.approx(1e6 * max(ends.values()))
    for pid in range(1, 5):
        rows = sorted(spans[pid, 1])
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(rows))
    held = [max(sum(r["args"].values()) for r in records if r["ph"] == "C" and r["pid"] == pid) for pid in range(1, 5)]
    assert [row["held"] and max(row["held"]) for row in data_of(plan)["pipeline"]["rows"]] == held


def test_memory_over_the_step_is_that_of_the_fullest_stage(plan):
    times, held = plan.line()
    whole = [sum(column) for column in zip(*held.values())]
    # the bytes beside what is saved are those of the fullest moment, which another action may have
    assert len(times) == 3 * TURNS and 0.99 * plan.peak_bytes <= max(whole) <= plan.peak_bytes + 8
    with pytest.raises(BadPlan, match="curve"):
        plan.curve()


def test_a_page_draws_the_coordinates(plan, tmp_path):
    page = plan.report(tmp_path / "plan.html").read_text()
    rows = data_of(plan)["pipeline"]["rows"]
    assert len(page) < 2 * 2**20 and 'id="gantt"' in page and [len(row["actions"]) for row in rows] == [3 * TURNS] * 4
    ends = ends_by_hand(plan)
    assert all(
        end == pytest.approx(ends[tuple(action)], rel=1e-5)
        for row in rows
        for action, (_, end) in zip(row["actions"], row["times"])
    )
    strip = strip_of(plan)
    assert len(strip) == 4 and len(set(map(len, strip))) == 1
    waits = sum(line.count(".") for line in strip) / sum(len(line.split("  ")[1]) for line in strip)
    assert waits == pytest.approx(plan.pipeline.idle, abs=0.03)


def test_other_systems_are_told_degrees_or_refuse(plan):
    said = torchtitan_toml(Exported.of(plan))
    assert "pipeline_parallel_degree = 4" in said.text and "local_batch_size = 8" in said.text
    assert any("zero-bubble" in one.what for one in said.unsaid)
    with pytest.raises(BadPlan, match="has no pipelines"):
        hf(Exported.of(plan))


def test_a_kept_plan_is_of_one_pipeline():
    keys = [repr(words_of(Request(mesh=8, pipeline=p))) for p in (None, 2, {"size": 2, "schedule": "gpipe"}, 4, 2)]
    assert len(set(keys)) == 4 and keys[1] == keys[4]


def test_presets_beside_it_have_all_devices(plan):
    found = {rival.name: rival for rival in plan.beside()}
    ddp = autopar.plan(*model_and_batch(), mesh=autopar.DeviceMesh((8,)), parallel="ddp", microbatches=1)
    assert found["ddp"].step_time_s == pytest.approx(ddp.step_time_s) and set(found) == {"ddp", "fsdp", "megatron"}
    assert "ddp takes" in str(plan) and len(str(plan).splitlines()) <= 16
