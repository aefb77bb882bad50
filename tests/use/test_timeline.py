"""The predicted step as events, and a profile of the emitted program beside it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import autopar
from autopar import Assume
from autopar.cli import main
from autopar.letters import BadPlan
from autopar.solver.lanes import COMMUNICATION, COMPUTE
from autopar.solver.profiled import Range
from tests.language import drawn, gpt2
from tests.shares import by_day, one_in

ASSUMED = Assume(no_padding=True)
HOW = {
    "free": {"mesh": (2, 2)},
    "zero3": {"mesh": (4,), "parallel": "zero3"},
    "zero3 of four calls": {"mesh": (4,), "parallel": "zero3", "accumulation": 4},
    "zero1 of four calls": {"mesh": (4,), "parallel": "zero1", "accumulation": 4},
    "hsdp where links hinder compute": {"mesh": (2, 4), "cluster": "a100-8x1", "parallel": "hsdp"},
    "two micro-batches": {"mesh": (2,), "microbatches": 2},
    "keys in a ring": {"mesh": (4,), "parallel": "ring"},
    "recompute": {"mesh": (2,), "recompute": "full", "memory_budget": "64GiB"},
    "recompute in passing": {"mesh": (1,), "recompute": "rotor", "memory_budget": "3.9MiB"},
}


def model():
    return gpt2(layers=3, vocabulary=128, dropout=0.0).train()


def planned(**how):
    return autopar.plan(model(), drawn(16, 16, 128), assume=ASSUMED, **{"memory_budget": "inf", **how})


@pytest.mark.parametrize("how", one_in(2, HOW))
def test_events_make_up_the_step(how):
    """They end with the step, compute is one thing at a time, and each op is computed for its seconds."""
    plan = planned(**HOW[how])
    events = plan.timeline().events
    assert max(e.begins_s + e.seconds for e in events) == pytest.approx(plan.step_time_s, rel=1e-9)
    computing = [e for e in events if e.lane == COMPUTE]
    for one, following in itertools.pairwise(computing):
        assert following.begins_s >= one.begins_s + one.seconds - 1e-12
    for name, decision in plan.decisions.items():
        own = sum(e.seconds - (e.hidden_s or 0.0) for e in events if e.place == name and e.part != "recompute")
        assert own == pytest.approx(decision.seconds, rel=1e-9), name
    moved = sum(e.seconds for e in events if e.lane == COMMUNICATION and " to " in e.place)
    assert moved == pytest.approx(sum(c.seconds for c in plan.conversions), rel=1e-6)
    assert sum(e.seconds for e in events if e.part == "recompute") == pytest.approx(plan.recompute_s)
    assert not plan.passing or how == "recompute in passing"  # no budget was found under which rotor needs it
    assert bool(plan.recompute_s) == how.startswith("recompute")


def test_the_steps_of_a_ring_are_events_beside_their_attention():
    """One for each of three neighbours' keys, none before the attention begins; on the way back one more goes home."""
    plan = planned(**HOW["keys in a ring"])
    name = next(name for name, d in plan.decisions.items() if d.op == "scaled_dot_product_attention")
    for part, count in (("forward", 3), ("backward", 6)):
        (computed,) = [e for e in plan.timeline().events if e[:3] == (name, COMPUTE, part)]
        sent = [e for e in plan.timeline().events if e[:3] == (name, COMMUNICATION, part) and e.hidden_s]
        assert len(sent) == count and sent[0].begins_s == computed.begins_s
        assert sum(e.hidden_s for e in sent) <= computed.seconds
        for one, following in itertools.pairwise(sent):
            assert following.begins_s >= one.begins_s + one.seconds - 1e-12


@pytest.mark.parametrize("how", by_day(["free", "two micro-batches", "recompute"], "free"))
def test_a_profile_names_places_of_the_plan(how, tmp_path):
    """While a profiler runs every op is a range with its name in the plan; what is computed stays the same."""
    batch = drawn(16, 16, 128)
    plan = planned(**{**HOW[how], "mesh": (1,)})
    timeline = plan.timeline()
    parallel = autopar.autoparallelize(model(), batch, plan=plan)

    def step():
        parallel.zero_grad(set_to_none=True)
        loss = parallel(**batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in parallel.parameters())]

    right = step()
    with torch.profiler.profile() as profile:
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    ranges = [r for r in (Range.read(e.name) for e in profile.events()) if r is not None]
    priced = {name for name, d in plan.decisions.items() if d.kind == "op" and d.seconds and ":shared" not in name}
    for part in ("forward", "backward"):
        missing = priced - {r.place for r in ranges if r.part == part}
        assert not [name for name in missing if plan.decisions[name].op in ("linear", "layer_norm", "tanh")], part
    assert set(plan.recomputed) & priced <= {r.place for r in ranges if r.part == "recompute"}
    assert bool({r.part for r in ranges} - {"forward", "backward"}) == (how == "recompute")

    kinds = timeline.by_kind(profile)
    assert all(min(kinds[kind]) > 0 for kind in ("linear", "layer_norm", "scaled_dot_product_attention"))
    assert "predicted over measured" in timeline.compare(profile)
    data = json.loads(timeline.save(tmp_path / "step.json", profile).read_text())["traceEvents"]
    ends = {pid: max(e["ts"] + e["dur"] for e in data if e["ph"] == "X" and e["pid"] == pid) for pid in (1, 2)}
    assert ends[1] == pytest.approx(1e6 * plan.step_time_s) and ends[2] > 0
    assert sum(e["ph"] == "X" for e in data if e["pid"] == 2) == len(ranges)


def test_a_trace_has_memory_arrows_and_shardings(tmp_path):
    plan = planned(**HOW["zero3"])
    data = json.loads(plan.timeline().save(tmp_path / "step.json").read_text())["traceEvents"]
    held = [e for e in data if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in held) == pytest.approx(plan.peak_bytes, abs=9)
    assert [e["ts"] for e in held] == sorted(e["ts"] for e in held) and held[-1]["ts"] <= 1e6 * plan.step_time_s
    slices = {(e["tid"], e["ts"]): e for e in data if e["ph"] == "X"}
    ends = {kind: {e["id"]: slices[e["tid"], e["ts"]] for e in data if e["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys() and ends["s"]
    for number, sent in ends["s"].items():
        source, _, target = sent["name"].partition(" to ")
        read = ends["f"][number]
        assert read["name"] == (target if sent["cat"] == "forward" else source) and read["ts"] > sent["ts"]
    gathered = next(e for e in slices.values() if "all_gather" in e["args"].get("forward", ""))
    parameter = gathered["name"].partition(" to ")[0]
    assert gathered["args"]["bytes in full"] == plan.parameter_bytes[parameter]
    op = next(e for e in slices.values() if e["name"] in plan.decisions and e["args"]["op"] == "linear")
    assert op["args"]["sharding"] == repr(plan.decisions[op["name"]].choice)


def test_without_a_space_or_a_step_there_is_a_letter(tmp_path):
    plan = planned(mesh=(1,))
    with torch.profiler.profile() as nothing:
        pass
    with pytest.raises(BadPlan, match="no step of a parallel model"):
        plan.timeline().compare(nothing)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(BadPlan, match="the space that this plan was chosen from is gone"):
        autopar.Plan.load(tmp_path / "plan.json").timeline()


@pytest.mark.machines
def test_a_command_writes_a_step_beside_the_predicted_one(tmp_path, capsys):
    out = str(tmp_path / "step.json")
    assert main(["timeline", "tests/use/made.py:with_inputs", "--mesh", "2", "--measure", "-o", out, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["timeline"] == out and min(said["seconds"]["linear"].values()) > 0
    data = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in data if e["name"] == "process_name"} == {"predicted", "measured"}
