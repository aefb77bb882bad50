"""Optimizer states on the host, as a policy of parameters: where it saves what fits nowhere else, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import DeviceMesh
from autopar.letters import BadConstraint, BadPlan, Infeasible
from autopar.sharding.costs import DURING_BACKWARD, STEPS_ON_HOST
from autopar.solver import fewer_on_host
from tests import language
from tests.host import with_host
from tests.models import eager_links, mlp_case
from tests.stages.models import case

DP = DeviceMesh((2,), ("dp",))


def planned(budget, host="1GiB", cluster=None, **how):
    model, batch = mlp_case()
    how = {"mesh": DP, "parallel": "zero3", "optimizer": "autopar-adamw", **how}
    return autopar.plan(
        model, batch, memory_budget=budget, host_budget=host, cluster=cluster or with_host(eager_links()), **how
    )


def states_of(plan, names):
    """Bytes of two states in the parameters' own precision, in the parts that a device has."""
    parts = {name: 2 if "S(" in str(plan.parameters[name]) else 1 for name in names}
    return sum(2 * plan.parameter_bytes[name] // parts[name] for name in names)


def test_without_need_states_stay_and_under_need_they_go():
    free = planned("inf")
    assert not free.hosted and not free.host_bytes
    least = planned("inf", host=0)
    with pytest.raises(Infeasible) as letter:
        planned(1, host=0)
    budget = int(letter.value.smallest) - states_of(least, least.parameters) // 2
    with pytest.raises(Infeasible):
        planned(budget, host=0)
    slow = with_host(eager_links(), rate=1e3)  # Nothing that is saved could travel in time.
    tight = planned(budget, cluster=slow)
    assert tight.hosted and tight.peak_bytes <= budget and tight.lower_bound_s <= tight.step_time_s
    there = states_of(tight, tight.hosted)
    assert tight.memory["optimizer states"] == states_of(tight, tight.parameters) - there
    assert not tight.offloaded and tight.host_bytes == there


def test_the_step_on_the_host_takes_what_the_cpus_and_the_link_take():
    """Of a parameter the host steps, alone in a step: the slower of CPUs and link, and two starts."""
    pinned = {"*": "S(0)@dp; R; kept; end; host"}
    for rate, stepped in ((1e6, 1e12), (1e12, 1e5)):
        cluster = with_host(eager_links(), rate, stepped, 1e-3)
        plan = planned("inf", cluster=cluster, parallel=None, constraints=pinned)
        assert plan.hosted == set(plan.parameters)
        for name in plan.hosted:
            held = plan.parameter_bytes[name] / 2
            expected = 2e-3 + max(held / 8 / stepped, 2 * held / rate)  # in double precision, gradient and values
            assert plan.decisions[name].seconds == pytest.approx(expected)


def test_no_more_is_on_the_host_than_the_budget_for_it():
    """The last parameters have room first; values that wait for backward have what is left."""
    whole = planned("inf", mesh=(1,), parallel=None, constraints={"*": "*; *; kept; end; device"})
    total = states_of(whole, whole.parameters)
    for share in (0.2, 0.6):
        room = int(share * total)
        with pytest.raises(Infeasible) as letter:
            planned(1, room, mesh=(1,), parallel=None)
        plan = planned(letter.value.smallest * 1.02, room, mesh=(1,), parallel=None)
        assert plan.hosted and states_of(plan, plan.hosted) <= plan.host_bytes <= room


def test_constraints_pin_where_states_lie_and_plans_say_so(tmp_path):
    head = planned("inf", constraints={"head.weight": "S(0)@dp; R; regathered; end; host"})
    assert head.hosted == {"head.weight"} and "(states on the host)" in head.table()
    assert planned("inf", parallel=None, constraints=head.constraints()).hosted == head.hosted
    head.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == head
    assert "states on the host" in head.diff(planned("inf"))
    assert "whose CPUs step it" in head.explain("head.weight")
    with pytest.raises(BadConstraint, match="device, host or wholly"):
        planned("inf", constraints={"head.weight": "R; R; kept; end; there"})
    with pytest.raises(BadConstraint, match=r"those of .* may not lie"):
        planned("inf", host=0, parallel=None, constraints=head.constraints())
    for wrong in ({"hosted": ["blocks.0/gelu"]}, {"optimizer": "adamw"}):
        with pytest.raises(BadPlan, match="on the host"):
            autopar.Plan.from_dict({**head.to_dict(), **wrong})


def test_parameters_go_where_states_alone_do_not_suffice(tmp_path):
    slow = with_host(eager_links(), rate=1e9)  # Nothing that is saved could travel in time.
    free = planned("inf", cluster=slow)
    with pytest.raises(Infeasible) as letter:
        planned(1, cluster=slow)
    budget = int(1.02 * letter.value.smallest)
    plan = planned(budget, cluster=slow)
    assert plan.wholly_hosted and plan.wholly_hosted <= plan.hosted
    assert plan.peak_bytes <= budget < free.peak_bytes - states_of(free, free.parameters)
    assert plan.lower_bound_s <= plan.step_time_s
    whole = states_of(plan, plan.wholly_hosted)  # As large as two states are it and its gradient.
    assert plan.host_bytes == states_of(plan, plan.hosted) + whole
    assert f"{len(plan.wholly_hosted)} of them whole" in str(plan)
    assert "(on the host)" in plan.table() and "its gradient goes down" in plan.explain(min(plan.wholly_hosted))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    assert "on the device" in plan.diff(free)
    again = planned("inf", parallel=None, constraints=plan.constraints(), cluster=slow)
    assert (again.hosted, again.wholly_hosted) == (plan.hosted, plan.wholly_hosted)


def test_a_parameter_on_the_host_takes_its_step_and_its_copies():
    """Up for forward and for backward, and its gradient down, as if nothing ran beside them; frozen, up alone."""
    pinned = {"*": "S(0)@dp; R; regathered; end; wholly"}
    for rate, stepped in ((1e6, 1e12), (1e12, 1e5)):
        cluster = with_host(eager_links(), rate, stepped, 1e-3)
        plan = planned("inf", cluster=cluster, parallel=None, constraints=pinned)
        assert plan.wholly_hosted == set(plan.parameters)
        for name in plan.wholly_hosted:
            held = plan.parameter_bytes[name] / 2
            copies = 3 * (1e-3 + held / rate)
            assert plan.decisions[name].seconds == pytest.approx(held / 8 / stepped + copies, rel=1e-3)
    model, batch = mlp_case()
    model.head.requires_grad_(False)
    how = {"mesh": DP, "optimizer": "autopar-adamw", "cluster": with_host(eager_links(), 1e6, 1e5, 1e-3)}
    frozen = autopar.plan(model, batch, memory_budget="inf", host_budget="1GiB", constraints=pinned, **how)
    held = frozen.parameter_bytes["head.weight"] / 2
    assert frozen.decisions["head.weight"].seconds == pytest.approx(2 * (1e-3 + held / 1e6))
    assert frozen.host_bytes == states_of(frozen, frozen.parameters) * 2 - 3 * sum(
        frozen.parameter_bytes[name] // 2 for name in ("head.weight", "head.bias")
    )


def test_parameters_do_not_lie_on_the_host_where_nothing_says_so(tmp_path):
    pinned = {"head.weight": "S(0)@dp; R; regathered; end; wholly"}
    with pytest.raises(BadConstraint, match="may not lie"):
        planned("inf", host=0, constraints=pinned)
    with pytest.raises(BadConstraint, match="may not lie"):
        planned("inf", constraints=pinned, optimizer="adamw")
    plan = planned("inf", constraints=pinned)
    assert plan.wholly_hosted == plan.hosted == {"head.weight"}
    with pytest.raises(BadPlan, match="its optimizer states are not there"):
        autopar.Plan.from_dict({**plan.to_dict(), "hosted": []})


@pytest.mark.parametrize("how", [{"optimizer": "adamw"}, {"cluster": with_host(eager_links(), params_per_s=0.0)}])
def test_a_plan_says_why_states_stay(how):
    plan = planned("inf", **how)
    assert not plan.hosted and any(name == "states on the host" for name, _ in plan.defaults)


def test_the_search_ends_where_nothing_fits_beside_a_host():
    """A smaller plan was looked for without end, where what waits on the host made no state hold less."""
    model, batch = case("unet")
    cluster = with_host(eager_links())
    free = autopar.plan(model, batch, mesh=DP, parallel="dp", cluster=cluster, optimizer=0, memory_budget="inf")
    how = dict(mesh=DP, parallel="dp", cluster=cluster, optimizer=0, host_budget="1GiB")
    with pytest.raises(Infeasible):
        autopar.plan(model, batch, memory_budget=free.peak_bytes // 4, **how)
    assert replace(free, hosted=frozenset()) == free


def test_no_more_states_go_than_the_budget_asks_for(monkeypatch):
    """Layers that are alike move together at one price; where CPUs are slow, two parameters are better than six."""
    model, batch = language.llama(), language.drawn(4, 16, 256)
    slow = with_host(eager_links(), rate=1e4, params_per_s=1e6)
    how = dict(cluster=slow, mesh=(1,), optimizer="autopar-adamw")
    with pytest.raises(Infeasible) as letter:
        autopar.plan(model, batch, memory_budget=1, **how)
    how |= dict(memory_budget=int(0.9 * letter.value.smallest), host_budget="1GiB")
    few = autopar.plan(model, batch, **how)
    limits = fewer_on_host.LIMITS
    none = replace(limits, recompute=replace(limits.recompute, moved_back=0))
    monkeypatch.setattr(fewer_on_host, "LIMITS", none)
    more = autopar.plan(model, batch, **how)
    assert few.hosted < more.hosted and few.step_time_s < 0.6 * more.step_time_s
    assert few.peak_bytes + min(states_of(few, [name]) for name in few.hosted) > few.budget


def block_of(name):
    """The window of an op or a parameter of the decoder of four blocks: each block is one, and what stands around."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1].partition("/")[0])
    return 5 if name.startswith(("norm", "head")) else 0


@pytest.mark.parametrize("optimizer", STEPS_ON_HOST)
@pytest.mark.parametrize("with_part", [False, True])
@pytest.mark.parametrize("rate", [1e8, 1e11])
def test_what_compute_hides_of_the_host_is_that_of_each_window(optimizer, with_part, rate):
    """Counted here by blocks: copies up beside the block before the one beside which a part is gathered, copies down
    beside the second block behind, and steps beside the third, or the second where gradients stay on the device."""
    model, batch = case("decoder")
    cluster = with_host(eager_links(), rate, 1e3 * rate)
    pins = {"*": f"S(0)@dp; R; regathered; end; {'wholly' if with_part else 'host'}"}
    how = dict(mesh=DP, memory_budget="inf", host_budget="1GiB", cluster=cluster, constraints=pins)
    plan = autopar.plan(model, batch, optimizer=optimizer, **how)
    assert plan.hosted == set(plan.parameters)
    space = plan.search.counted.space
    compute = [[0.0, 0.0] for _ in range(6)]
    last_of_inputs = [site.name for site in space.sites].index("/add:shared")
    for k, (site, i) in enumerate(zip(space.sites, plan.search.point.picked, strict=True)):
        w = block_of(site.name) or (0 if k <= last_of_inputs else 5)
        for way in range(2 if site.compute else 0):
            compute[w][way] += float(site.compute[way][i])
    work = {what: [0.0] * 9 for what in ("up", "again", "down", "cpus")}  # beside windows, and beside none from 6 on
    for name in plan.parameters:
        first, held = block_of(name), plan.parameter_bytes[name] / 2
        last = 5 if name.startswith("table") else first  # Logits are made of it.
        up, down = (with_part * copy(held) for copy in (cluster.host.up_s, cluster.host.down_s))
        work["up"][first - 2 if first > 1 else 8] += up
        work["again"][last + 2] += up
        work["down"][first - 2 if first > 1 else 8] += down
        step = plan.decisions[name].seconds - 2 * up - down
        beside = first - 2 - with_part
        work["cpus"][beside if beside >= 0 and optimizer == DURING_BACKWARD else 8] += step
    hidden = sum(min(s, compute[w][what != "up"]) for what, each in work.items() for w, s in enumerate(each[:6]))
    assert plan.hidden_on_host_s == pytest.approx(hidden)
    assert bool(hidden) == (with_part or optimizer == DURING_BACKWARD)
    events = plan.timeline().events
    assert max(e.begins_s + e.seconds for e in events) == pytest.approx(plan.step_time_s)
    of_host = (e for e in events if e.lane in ("host", "cpus") or e.part == "optimizer")
    serial = sum(plan.decisions[name].seconds for name in plan.parameters)
    assert sum(e.seconds - (e.hidden_s or 0.0) for e in of_host) == pytest.approx(serial - hidden)
    assert sum(plan.sources.values()) == pytest.approx(plan.step_time_s) and plan.lower_bound_s <= plan.step_time_s
    assert ("of it beside compute" in str(plan).replace("\n", " ")) == bool(hidden)
