"""What a plan says of values that wait on the host: its row, its lane, its states, and its curve."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import pytest
from torch import nn, zeros

import autopar
from autopar.cli import main
from autopar.letters import BadBudget
from autopar.report import data_of
from autopar.sharding.cluster import Cluster
from autopar.sharding.host import Host
from autopar.solver.by_block import by_block
from autopar.solver.lanes import BACKWARD, COMPUTE, FORWARD, HOST
from autopar.stages.blocks import Units

LINK = Host("a link", 100e9, 50e9, 1e-6, 2**36)
SLOW = Host("a slow link", 8e9, 8e9, 1e-6, 2**36)
ROWS, WIDTH = 512, 64
WIDE = ROWS * 4 * WIDTH * 4  # bytes of what is between the products of a block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu().tanh())


@functools.cache
def planned(share=0.6, host_budget="64MiB", microbatches=1, link=LINK):
    """The plan of six blocks on one device with a link, at a share of the memory that the fastest plan takes."""
    cluster = dataclasses.replace(Cluster.of("generic"), host=link)
    budget = "inf" if share is None else int(share * planned(None, 0, microbatches).peak_bytes)
    return autopar.plan(
        nn.Sequential(*(Block() for _ in range(6))),
        (zeros(ROWS, WIDTH),),
        loss=lambda out, inputs: out.square().mean(),
        mesh=(1,),
        cluster=cluster,
        memory_budget=budget,
        host_budget=host_budget,
        microbatches=microbatches,
        chunks=1,
    )


def row(plan, label):
    lines = str(plan).splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 100
    return [line for line in lines if line.startswith(label)]


def readers(plan, value):
    """The ops that read a value, through the place that several of them share; the op itself among them."""
    found = {name for name, d in plan.decisions.items() if value in d.reads}
    shared = f"{value}:shared"
    more = readers(plan, shared) if shared in found else set()
    return (found | more | {value}) - {shared}


def on_host(plan):
    return [e for e in plan.timeline().events if e.lane == HOST]


def test_a_summary_says_what_waits_on_the_host():
    plan = planned()
    mib = plan.host_bytes / 2**20
    assert plan.offloaded and not plan.recomputed
    (said,) = row(plan, "host")
    assert said.startswith(f"host      {mib:.2f} MiB of 64.00 MiB: {len(plan.offloaded)} values there, and no op waits")
    assert row(planned(None), "host") == ["host      none of 64.00 MiB is used: no value has to wait there"]
    assert not row(planned(host_budget=0), "host")
    by_hand = planned(None, 0).offloading(dict(list(plan.offloaded.items())[:1]))
    assert row(by_hand, "host")[0].startswith("host      1 value there: ")  # No search says that nothing waits.
    assert sum(plan.memory.values()) == plan.peak_bytes == max(map(sum, zip(*plan.line()[1].values(), strict=True)))


def test_a_place_says_when_it_is_gone_and_a_table_what_state_it_is_in(tmp_path):
    plan = planned()
    name = next(name for name in plan.offloaded if name.endswith("relu"))
    gone, comes = plan.offloaded[name]
    told = f"    waits on the host: gone behind {gone}, returns before the backward of {comes}; {WIDE / 2**10:.2f} KiB"
    down, up = (1e6 * (1e-6 + WIDE / rate) for rate in (100e9, 50e9))
    assert f"{told}, {down:.1f} us of the link down and {up:.1f} us up a step" in plan.explain(name).splitlines()
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert told in read.explain(name).splitlines()  # A file knows of no link.
    assert f"no recompute, {len(plan.offloaded)} values on the host" in read.table()
    rows = [line for line in read.table().splitlines() if "  on the host  " in line]
    assert rows and any("  saved  " in line for line in read.table().splitlines())
    places = [place["name"] for place in data_of(read)["places"] if place["offloaded"]]
    assert places == [place["name"] for place in data_of(plan)["places"] if place["offloaded"]] and places
    assert "waits on the host" in [tile["name"] for tile in data_of(read)["tiles"]]


def test_plans_differ_in_what_waits_and_when():
    plan, without = planned(), planned(host_budget=0)
    rows = [line.split() for line in without.diff(plan).splitlines()]
    assert [r[1:] for r in rows if r[:1] == ["host_budget"]] == [["0", "B", "64.00", "MiB"]]
    ends = {(*r[1:],) for r in rows if r and r[-3:] == ["on", "the", "host"]}
    assert {e[-4] for e in ends} == {"recomputed", "saved"}
    name, (gone, comes) = next(iter(plan.offloaded.items()))
    later = next(n for n, d in reversed(plan.decisions.items()) if d.kind == "op" and n != gone)
    moved = plan.offloading({**plan.offloaded, name: (later, comes)})
    assert "times on the host" in plan.diff(moved) and name not in plan.diff(moved)
    assert plan.diff(plan.offloading(plan.offloaded)) == "the plans are the same"


@pytest.mark.parametrize("turns", [1, 2])
def test_copies_are_a_lane_of_their_own(turns):
    """Behind what reads a value in forward, home before its own op goes back, one at a time, in no op's way."""
    plan = planned(microbatches=turns)
    events = plan.timeline().events
    assert max(e.begins_s + e.seconds for e in events) == pytest.approx(plan.step_time_s)
    begins = {(e.place, e.part): e.begins_s for e in events if e.lane == COMPUTE}
    ends = {(e.place, e.part): e.begins_s + e.seconds for e in events if e.lane == COMPUTE}
    for part in (FORWARD, BACKWARD):
        copies = [e for e in on_host(plan) if e.part == part]
        assert {e.place for e in copies} == plan.offloaded.keys() and len(copies) == len(plan.offloaded)
        for one, following in itertools.pairwise(copies):
            assert following.begins_s >= one.begins_s + one.seconds - 1e-12
        for e in copies:
            gone, comes = plan.offloaded[e.place]
            if part == FORWARD:
                read = max(ends[name, FORWARD] for name in readers(plan, e.place))
                assert read - 1e-12 <= e.begins_s and e.begins_s + e.seconds <= ends[gone, FORWARD] + 1e-12
            else:
                assert begins[comes, BACKWARD] - 1e-12 <= e.begins_s
                needs = max(begins.get((name, BACKWARD), 0.0) for name in readers(plan, e.place))
                assert e.begins_s + e.seconds <= needs + 1e-12
    for e in on_host(plan):
        if e.place.endswith(("relu", "tanh")):  # a copy for each micro-batch
            rate = LINK.down_bytes_per_s if e.part == FORWARD else LINK.up_bytes_per_s
            assert e.seconds == pytest.approx(turns * (1e-6 + WIDE / turns / rate))
    down_s = sum(e.seconds for e in on_host(plan) if e.part == FORWARD)
    assert down_s == pytest.approx(turns * (len(plan.offloaded) * 1e-6 + plan.host_bytes / 100e9))


def test_whoever_reads_events_knows_the_lane(tmp_path):
    plan = planned()
    for one, lanes in ((plan, ["compute", "communication", "host"]), (planned(None, 0), ["compute", "communication"])):
        found = json.loads(one.timeline().save(tmp_path / "step.json").read_text())["traceEvents"]
        assert [e["args"]["name"] for e in found if e["name"] == "thread_name"] == lanes
    assert len(on_host(plan)) == sum(e["tid"] == 3 for e in _trace(plan, tmp_path) if e["ph"] == "X")
    computed = sum(e.seconds for e in plan.timeline().events if e.lane == COMPUTE and e.part != "optimizer")
    assert sum(p for p, _ in plan.timeline().by_kind([]).values()) == pytest.approx(computed)
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    for one in (plan, read):
        kinds = [(lane, kind) for _, lane, kind, *_ in data_of(one)["step"]["events"]]
        assert {kind for lane, kind in kinds if lane == HOST} == {"down", "up"}
    units = Units(("all",), {}, {}, (), 0, {}, frozenset())
    found = by_block(plan.search.counted.space, plan.search.point, units)
    assert sum(s.sum() for s in (found.forward, found.inward, found.weights)) == pytest.approx(computed)


def _trace(plan, folder):
    return json.loads(plan.timeline().save(folder / "step.json").read_text())["traceEvents"]


def test_a_curve_has_the_host_or_not():
    plan = planned()
    free = planned(None, 0)
    budgets = [int(share * free.peak_bytes) for share in (1.0, 0.8, 0.6, 0.3)]
    there, without = plan.curve(budgets), plan.curve(budgets, host=False)
    assert [dataclasses.astuple(p) for p in without] == [dataclasses.astuple(p) for p in free.curve(budgets)]
    assert all(p.step_time_s <= q.step_time_s for p, q in zip(there, without, strict=True))
    assert there[2].step_time_s < without[2].step_time_s and not any(p.offloaded for p in without)
    assert all(p.peak_bytes <= p.budget and p.host_bytes <= 2**26 for p in there)
    assert all(p.lower_bound_s <= p.step_time_s * (1 + 1e-9) for p in there)
    assert all(p.lower_bound_s <= q.lower_bound_s for p, q in itertools.pairwise(there))
    for share, point in ((0.8, there[1]), (0.6, there[2])):
        alone = planned(share)
        assert point.lower_bound_s <= alone.step_time_s * (1 + 1e-9)
        assert point.step_time_s == pytest.approx(alone.step_time_s, rel=0.05)
    assert str(there).splitlines()[0].endswith("values  host      there") or "there" in str(there).splitlines()[0]
    assert str(there).splitlines()[3].split()[-1] == str(there[2].offloaded) and "there" not in str(without)
    with pytest.raises(BadBudget, match="64GiB"):
        plan.curve(host="64GiB")


def test_bounds_of_a_curve_count_what_a_slow_link_carries():
    """Where some values travel and others are recomputed, less bounds a step than with all on the device."""
    plan = planned(0.6, link=SLOW)
    budgets = [int(share * planned(None, 0).peak_bytes) for share in (0.8, 0.7, 0.6)]
    there, without = plan.curve(budgets), plan.curve(budgets, host=False)
    assert all(p.offloaded and p.recomputed for p in there)
    for p, q in zip(there, without, strict=True):
        assert p.lower_bound_s <= p.step_time_s * (1 + 1e-9) and p.step_time_s < q.step_time_s
        assert p.lower_bound_s < q.lower_bound_s


def test_a_command_line_gives_the_host(capsys, tmp_path):
    (tmp_path / "small.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(8, 8), (torch.zeros(8, 8),)\n"
    )
    model = f"{tmp_path / 'small.py'}:build"
    how = ["--mesh", "2", "--cluster", "h100-2x1", "--host-budget", "2GiB", "--quiet"]
    assert main(["plan", model, *how]) == 0 and "host      none of 2.00 GiB" in capsys.readouterr().out
    assert main(["plan", model, *how, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_budget"] == 2**31
    planned().save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "fsdp2", "-o", str(tmp_path / "out.py")]) == 0
    assert f"{len(planned().offloaded)} values that wait on the host" in capsys.readouterr().out
