"""What a buyer of devices asks: how many, for how long, for how much, on which network, with which batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import autopar
from autopar.cli import main
from autopar.commands.batches import Tried, _BatchSearch
from autopar.commands.fitting import Fitting, counts_of
from autopar.commands.goals import Goal, tokens_of
from autopar.commands.models import Named
from autopar.letters import BadBudget
from autopar.request import Request
from autopar.sharding.cluster import Cluster
from autopar.solver.workload import StepRates, StepWork
from tests.language import gpt2, zeros

COUNT = 86_976  # parameters of that GPT-2: AdamW's step takes 20 bytes of each
DAY_S = 86_400


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The path of a configuration of one layer."""
    folder = tmp_path_factory.mktemp("config")
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    data = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (folder / "config.json").write_text(json.dumps(data))
    return str(folder / "config.json")


def fitting_of(budget, rows=16):
    request = Request(mesh=1, memory_budget=budget)
    model, batch = gpt2(1), zeros(rows, 64)
    return model, batch, Fitting(request, request.trace(model, batch))


def test_devices_share_rows_evenly_and_nodes_whole():
    assert list(counts_of(64, 8)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert list(counts_of(96, 8)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 768]
    assert list(counts_of(1, 4)) == [1, 2, 4]


def test_what_fits_is_what_plan_fits_and_fewer_cannot_hold():
    budget = int(0.9 * 20 * COUNT)  # less than one device needs for parameters, gradients, states and the step
    model, batch, fitting = fitting_of(budget)
    held = fitting.fewest(Cluster.of("h100"))
    assert held.plan.mesh.size == 2 and held.refused == () and held.plan.peak_bytes <= budget
    turns = held.plan.microbatches
    assert turns == 8 and held.plan.recomputed  # A row for each of two devices: no more can be asked for.
    asked = {"mesh": 2, "cluster": "h100-8x1", "memory_budget": budget, "microbatches": turns, "gap": 0.05}
    assert autopar.plan(model, batch, **asked).peak_bytes <= budget


def test_activations_may_wait_on_the_host_of_a_kind():
    """Where one device has to recompute; a kind whose host nobody describes is refused."""
    _, _, fitting = fitting_of(int(1.1 * 20 * COUNT), rows=1)
    without = fitting.on(Cluster.of("h100"), 1)
    fitting.host_budget = "1GiB"
    plan = fitting.on(Cluster.of("h100"), 1)
    assert plan.host_budget == 2**30 and plan.offloaded and without.recomputed and not without.offloaded
    assert plan.step_time_s < without.step_time_s
    with pytest.raises(BadBudget, match="nobody says how devices of h100"):
        fitting.fewest(replace(Cluster.of("h100"), host=None))


def test_micro_batches_come_before_recompute():
    model, batch, fitting = fitting_of(3 * 20 * COUNT)
    plan = fitting.fewest(Cluster.of("h100")).plan
    assert plan.mesh.size == 1 and plan.microbatches > 1 and not plan.recomputed
    with pytest.raises(autopar.AutoparError):  # the batch at once needs recompute
        autopar.plan(
            model, batch, mesh=1, cluster="h100-8x1", memory_budget=plan.budget, microbatches=1, recompute="none"
        )


@pytest.mark.parametrize(
    ("text", "count"), [("1T", 1e12), ("300B", 3e11), ("1e12", 1e12), ("1.5t", 1.5e12), ("2_000_000", 2e6), ("7", 7)]
)
def test_tokens_are_written_in_several_ways(text, count):
    assert tokens_of(text) == count


def test_days_and_cost_are_those_of_whole_steps_of_all_devices():
    rates = StepRates(StepWork(tokens=1000), devices=16, step_s=2.0)
    goal = Goal(tokens=1_000_500, price=2.5)  # 1001 steps of 2 s
    assert goal.days_of(rates) == pytest.approx(2002 / DAY_S)
    assert goal.cost_of(rates) == pytest.approx(16 * 2.5 * 2002 / 3600)


def test_a_goal_takes_the_fewest_devices_that_are_in_time():
    *_, fitting = fitting_of("inf")
    held = fitting.fewest(Cluster.of("h100"))
    alone = held.plan.rates
    assert (alone.amount, alone.unit) == (16 * 64, "tokens")
    days = 1e9 / alone.per_s / DAY_S
    met = Goal(1e9, days=0.9 * days).met(fitting, held)
    if not met.is_late:  # Where exchange costs more than a second device saves, none is in time.
        assert met.plan.mesh.size > 1 and Goal(1e9).days_of(met.plan.rates) <= 0.9 * days
    late = Goal(1e9, days=1e-6 * days).met(fitting, held)
    assert late.is_late and Goal(1e9).days_of(late.plan.rates) > 1e-6 * days


def test_fit_prints_rows_that_plan_can_make_again(config, capsys):
    asked = ["fit", config, "--clusters", "h100,l4", "--inputs", "batch=16,seq=64", "--quiet"]
    goal = ["--tokens", "1B", "--price", "2"]
    assert main([*asked, *goal, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["h100", "l4"] and all(row["devices"] == 1 for row in rows)
    for row in rows:
        steps = math.ceil(1e9 / (16 * 64))
        assert row["days"] == pytest.approx(steps * row["expected_s"] / DAY_S)
        assert row["cost"] == pytest.approx(48 * row["days"])
        assert sum(row["memory"].values()) <= row["room"]
    assert main([*asked, *goal]) == 0
    said = capsys.readouterr().out
    assert "1,024 tokens a step" in said and "h100w500" in said
    again = next(line for line in said.splitlines() if line.startswith("autopar plan "))
    assert main([*again.split()[1:], "--quiet"]) == 0 and "cluster h100-8x1" in capsys.readouterr().out


def test_the_command_of_a_row_names_a_profile_by_its_path(config, tmp_path, capsys):
    profile = str(tmp_path / "mine.json")
    Cluster.of("l4").save(profile)
    asked = ["fit", config, "--clusters", profile, "--fabric", "10G", "--inputs", "batch=16,seq=64", "--quiet"]
    assert main([*asked, "--tokens", "1M", "--days", "1000"]) == 0
    said = capsys.readouterr().out
    assert "or they take longer" in " ".join(said.split())  # Fewer devices may hold a step.
    again = next(line for line in said.splitlines() if line.startswith("autopar plan "))
    assert main([*again.split()[1:], "--quiet"]) == 0 and "(cluster mine@10G)" in capsys.readouterr().out
    assert main([*asked, "--budget", "1KiB"]) == 0
    said = capsys.readouterr().out
    assert "no number of devices" in said and "GiB a device" not in said and "take longer" not in said


def test_a_fabric_replaces_the_link_between_nodes():
    named = Cluster.of("h100@100G-8x2")
    assert named == Cluster.of("h100-8x2").with_fabric(100) and named.name == "h100@100G-8x2"
    before, after = Cluster.of("h100-8x2").links, named.links
    assert after[0] == before[0] and after[1].bytes_per_s == 100e9 / 8 and after[1].latency_s == before[1].latency_s
    assert after[1].wire("all_gather") / 12.5e9 == pytest.approx(before[1].wire("all_gather") / 50e9)
    same = Cluster.of("h100@400G-8x2").links[1]  # NDR has as much
    assert same.bytes_per_s == before[1].bytes_per_s
    assert [kind for kind, _ in same.reached] == [kind for kind, _ in before[1].reached]
    assert [rate for _, rate in same.reached] == pytest.approx([rate for _, rate in before[1].reached])
    assert Cluster.of("l4@400G").links[1].wire("all_gather") == 50e9  # Its file has no figures of what is reached.
    assert not Cluster.of("h100-8x2").fabric and "94 %" in named.fabric and "one node" in Cluster.of("h100@1G").fabric


def test_a_slower_fabric_takes_longer_and_is_named(tmp_path, capsys):
    asked = ["plan", "tests/use/made.py:with_inputs", "--mesh", "4", "--cluster", "h100-2x2", "--parallel", "ddp"]
    found = {}
    for rate in ("400G", "0.1G"):
        out = str(tmp_path / f"{rate}.json")
        assert main([*asked, "--fabric", rate, "--quiet", "--out", out]) == 0
        said = capsys.readouterr().out
        assert f"{rate[:-1]} Gbit/s a device in place of InfiniBand NDR" in said and "torchtitan" in said
        found[rate] = autopar.Plan.load(out)
        assert Request.of(found[rate]).hardware.links[1].bytes_per_s == float(rate[:-1]) * 1e9 / 8
    assert found["0.1G"].step_time_s > found["400G"].step_time_s
    assert main([*asked[:-4], "--cluster", "a100-2x2", "--quiet"]) == 0
    assert "torchtitan" not in capsys.readouterr().out  # Its name says which part it is.


@pytest.mark.parametrize(("best", "largest"), [(64, 4096), (96, 4096), (8, 4096), (2048, 4096), (256, 256)])
def test_few_batches_are_planned_to_find_the_best(config, monkeypatch, best, largest):
    """Rates rise up to a batch and fall from there; beyond another nothing fits."""

    def plan(search, rows):
        return search.tried.setdefault(rows, tried_of(rows) if rows <= largest else Tried(rows))

    def tried_of(rows):
        return Tried(
            rows, object(), StepRates(StepWork(tokens=round(1e6 * math.exp(-abs(math.log(rows / best))))), 2, 1.0)
        )

    monkeypatch.setattr(_BatchSearch, "_plan", plan)
    given = {"mesh": 2, "cluster": "h100-8x1", "memory_budget": "8MiB"}
    search = _BatchSearch(Named(config, "batch=auto,seq=64"), given)
    search.double()
    search.refine()
    assert search.best.rows == best and len(search.tried) <= 12


@pytest.mark.nightly
def test_the_batch_with_most_tokens_a_second_is_taken(config, tmp_path, capsys):
    """A small model waits for kernels to start: the largest batch that fits is best."""
    out = str(tmp_path / "plan.json")
    asked = ["plan", config, "--mesh", "2", "--cluster", "h100-8x1", "--budget", "4MiB", "--quiet", "--out", out]
    assert main([*asked, "--inputs", "batch=auto,seq=64", "--microbatches", "1", "--parallel", "ddp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("batch "))
    table = [line.split() for line in lines[head + 1 :] if line[:1].isdigit()]
    rates = {int(row[0]): float(row[-2].replace(",", "")) for row in table if row[-1] == "taken"}
    (taken,) = rates
    low, high = autopar.Plan.load(out).step_interval_s
    assert rates[taken] == pytest.approx(taken * 64 / ((low + high) / 2), rel=1e-3)
    beyond = [int(row[0]) for row in table if row[-1] == "fits"]
    assert beyond and taken < min(beyond) <= 2 * taken and max(set(map(int, next(zip(*table)))) - {*beyond}) == taken


def test_a_mesh_is_checked_without_a_search(config, capsys):
    asked = ["check", config, "2", "--inputs", "batch=8,seq=64", "--cluster", "h100-8x1", "--quiet"]
    assert main([*asked, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    model, _ = Named(config, "batch=8,seq=64").made()
    stored = 4 * sum(p.numel() for p in model.parameters()) / 2
    for way in ways.values():
        assert way["fits"] and way["bytes"]["parameters"] == pytest.approx(stored, rel=0.01)
        assert way["bytes"]["optimizer states"] == pytest.approx(2 * stored, rel=0.01)
    saved, full = (way["bytes"]["saved activations"] for way in ways.values())
    assert full < saved
    assert main([*asked, "--budget", "500KiB"]) == 1 and "does not fit in 500.00 KiB" in capsys.readouterr().out
    assert main([*asked, "--parallel", "ddp"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert "ddp on mesh" in said and said.count("fullest at the ") == len(ways)
    head = next(k for k, line in enumerate(lines) if line.startswith("at the fullest time"))
    last = next(k for k, line in enumerate(lines) if line.startswith("together, GiB"))
    end = lines[head].index("is saved") + len("is saved")
    assert all(line[end - 1].isdigit() and line[end] == " " for line in lines[head + 1 : last + 1])
