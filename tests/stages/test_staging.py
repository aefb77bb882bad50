"""Plans in stages: what blocks take adds up to the plan, cuts pay, budgets hold, and memory is what ranks hold."""

from __future__ import annotations

import math

import pytest
import torch

import autopar
from autopar import cutting, search, staging
from autopar.request import Request
from autopar.testing import on_local_tensor, on_processes, on_threads
from tests.stages.holding import BY_DAY, PAIRS, peak, peaks, said
from tests.stages.models import Decoder, case

MESH = autopar.DeviceMesh((2, 2), ("pp", "dp"))


def decoder(layers=6):
    torch.manual_seed(0)
    ids = torch.randint(256, (32, 12))
    return Decoder(layers, width=128, vocabulary=256), {"ids": ids, "labels": ids.roll(1, 1)}


def planned(**how):
    return autopar.plan(*decoder(), **{"mesh": MESH, "microbatches": 8, "memory_budget": "inf", **how})


@pytest.mark.parametrize("preset", ["zero1", "zero3", "megatron"])
def test_blocks_take_what_the_plan_takes(preset, monkeypatch):
    """Seconds of the blocks make up the step before it was cut, and states are those of the plan."""
    seen = []
    by_block = cutting.by_block
    monkeypatch.setattr(cutting, "by_block", lambda *given: seen.append(by_block(*given)) or seen[-1])
    plan = planned(parallel=preset, pipeline={"schedule": "1f1b"})
    whole = autopar.plan(
        *decoder(), mesh=autopar.DeviceMesh((2,), ("dp",)), microbatches=8, memory_budget="inf", parallel=preset
    )
    (found,) = seen
    seconds = 8 * (found.forward + found.inward + found.weights) + found.once
    assert math.isclose(float(seconds.sum()), whole.step_time_s, rel_tol=1e-6)
    assert math.isclose(sum(found.standing["parameters"]), whole.memory["parameters"], rel_tol=0.1)
    assert plan.pipeline.coordinates * plan.step_time_s > whole.step_time_s > plan.step_time_s


def test_the_best_cut_of_llama_is_a_tenth_faster_than_equal_stages():
    import transformers

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(num_hidden_layers=16, vocab_size=128256, use_cache=False, **shape)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(64, 8192, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    mesh = autopar.DeviceMesh((4, 8), ("pp", "dp"))
    how = dict(mesh=mesh, microbatches=16, memory_budget="inf", cluster="h100-8x4")
    best = autopar.plan(model, batch, pipeline={"schedule": "1f1b"}, **how)
    cuts = [f"model.layers.{k}" for k in range(4, 16, 4)]
    equal = autopar.plan(model, batch, pipeline={"schedule": "1f1b", "cuts": cuts}, **how)
    sizes = [len(stage.blocks) for stage in best.pipeline.stages]
    assert sum(sizes) == 16
    assert sizes[-1] < 4 < sizes[0]
    assert best.step_time_s <= 0.9 * equal.step_time_s
    assert best.gap <= 0.06


def test_a_number_of_stages_is_weighed_against_none():
    plan = autopar.plan(*decoder(), mesh=4, pipeline="auto", memory_budget="inf", microbatches=8)
    alone = autopar.plan(*decoder(), mesh=4, memory_budget="inf", microbatches=8)
    in_two = autopar.plan(*decoder(), mesh=4, pipeline=2, memory_budget="inf", microbatches=8)
    told = {row[0].split()[0]: row[1] for row in plan.meshes}
    assert told.keys() == {"1", "2", "4"}
    assert told["1"] == alone.step_time_s
    assert told["2"] == in_two.step_time_s
    assert plan.step_time_s == min(told.values())


def test_numbers_of_stages_that_a_bound_rules_out_are_slower():
    """Their floors lie between the best step and that of the same number of stages, planned alone."""
    plan = autopar.plan(*decoder(), mesh=8, pipeline="auto", memory_budget="inf")
    assert plan.pipeline is None
    assert plan.meshes[-1][-1] == "the model has 6 blocks, and pipeline=8 asks for more stages"
    for count, (name, seconds, floor, _, why) in zip((2, 4), plan.meshes[1:], strict=False):
        alone = autopar.plan(*decoder(), mesh=8, pipeline=count, memory_budget="inf")
        assert (name, seconds, why) == (f"{count} stages", 0.0, "slower, even if no stage waited")
        assert plan.step_time_s < floor <= alone.step_time_s


def test_no_budget_is_searched_for_stages_that_are_slower_without_one():
    """A plan of another number of stages takes what these take without a budget, and nothing fits in that budget."""
    free = autopar.plan(*decoder(), mesh=4, pipeline=2, microbatches=8, memory_budget="inf")
    request = Request(mesh=4, pipeline=2, microbatches=8, memory_budget="100KB")
    graph = request.trace(*decoder())

    def inside(request, known=math.inf):
        return search._in_few_turns(graph, request, is_trial=True, known=known)

    with pytest.raises(cutting.Slower):
        staging._in_stages(graph, request, request.pipeline, inside, free.step_time_s)


def test_floors_lead_to_the_plan_that_all_meshes_lead_to():
    """Where seconds are known, meshes are bounded first and the space of the best is kept; else all are planned."""
    request = Request(mesh=8, microbatches=4, memory_budget="inf")
    graph = request.trace(*decoder())
    whole, bounded = (search._in_few_turns(graph, request, known=known) for known in (math.inf, 1e9))
    assert bounded.decisions == whole.decisions and bounded.mesh == whole.mesh
    floors = [bound for *_, bound, _, why in bounded.meshes if why.startswith("no plan on it")]
    assert len(floors) == 2 and min(floors) >= (1 - 1e-9) * bounded.step_time_s


def test_a_mesh_with_one_stage_is_a_mesh_without():
    one = planned(mesh=autopar.DeviceMesh((1, 2), ("pp", "dp")))
    assert one.to_dict() == planned(mesh=autopar.DeviceMesh((2,), ("dp",))).to_dict()


@pytest.mark.parametrize(
    "axes, shape, of_stages, of_data", [(("pp", "dp"), (2, 4), 1, 0), (("dp", "pp"), (2, 4), 0, 1)]
)
def test_links_are_those_between_the_ranks(axes, shape, of_stages, of_data):
    """On two nodes of four: what stages send, and the mean of gradients, each on its own link, by hand."""
    cluster = autopar.Cluster.of("h100-4x2")
    plan = planned(mesh=autopar.DeviceMesh(shape, axes), cluster=cluster, parallel="dp", pipeline={"schedule": "1f1b"})
    link = cluster.links[of_stages]
    stage = plan.pipeline.stages[0]
    rows = 32 // 8 // plan.mesh.size
    assert stage.sent_bytes == rows * 12 * 128 * 4
    assert stage.transfer_s == pytest.approx(link.latency_s + stage.sent_bytes / link.wire("send", 2))
    assert plan.search.counted.space.setting.cluster.levels(plan.mesh, 0)[0][1] == cluster.links[of_data]
    assert plan.cluster == str(cluster)


def test_stages_under_a_budget_hold_no_more():
    free = planned(pipeline={"schedule": "1f1b"})
    budget = int(0.8 * free.peak_bytes)
    tight = planned(pipeline={"schedule": "1f1b"}, memory_budget=budget)
    assert tight.peak_bytes <= budget < free.peak_bytes
    assert tight.step_time_s > 0.99 * free.step_time_s


def test_each_stage_recomputes_what_its_own_bytes_ask_for():
    """The first of four stages of 1F1B holds four micro-batches, the last one: it recomputes less, and all fit."""
    model, _ = decoder(8)
    ids = torch.randint(256, (32, 128))

    def asked(**how):
        how = {"microbatches": 8, "pipeline": {"size": 4, "schedule": "1f1b"}, "memory_budget": "inf", **how}
        return autopar.plan(model, {"ids": ids, "labels": ids}, mesh=4, **how)

    free = asked()
    budget = int(0.75 * free.peak_bytes)
    tight = asked(memory_budget=budget)
    stages = tight.pipeline.stages
    repeated = [sum(name.startswith(f"{block}.") for name in tight.recomputed for block in s.blocks) for s in stages]
    assert repeated[0] > repeated[-1]
    assert tight.peak_bytes <= budget
    assert free.step_time_s < tight.step_time_s < asked(recompute="full").step_time_s


def test_a_budget_that_no_stages_meet_is_a_letter():
    with pytest.raises(autopar.Infeasible, match=r"fits in 97\.66 KiB"):
        autopar.plan(*decoder(2), mesh=4, pipeline=2, microbatches=8, parallel="dp", memory_budget="100KB")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (dict(mesh=autopar.DeviceMesh((16, 1), ("pp", "dp"))), "6 blocks"),
        (dict(pipeline={"size": 4, "schedule": "zb-v"}, mesh=(4, 1)), "6 blocks.*2 on each of 4"),
        (dict(pipeline={"cuts": ["blocks.9"]}), "no such block"),
        (dict(pipeline={"cuts": ["blocks.4", "blocks.2"]}), "order of the blocks"),
        (dict(pipeline=3), "has 2 devices"),
        (dict(mesh=4, pipeline=3), "does not divide"),
        (dict(mesh=autopar.DeviceMesh((2, 2), ("dp", "tp")), pipeline=2), "is called pp"),
        (dict(mesh=(2, 2), pipeline="auto"), "is called pp"),
        (dict(mesh=4, pipeline="four"), "not a number of stages"),
        (dict(mesh=4, pipeline={"size": 2, "cuts": None}), "another kind"),
        (dict(pipeline={"schedule": "two"}), "is not known"),
        (dict(pipeline={"schedule": "1f1b", "stages_each": 2}), '(?s)does not have 2 stages.*"gpipe" or "interleaved"'),
        (dict(pipeline={"schedule": "zb-v", "cuts": [f"blocks.{k}" for k in (1, 2, 3, 4, 5)]}), "not have 3 stages"),
        (dict(mesh=autopar.DeviceMesh((2, 8), ("pp", "dp")), cluster="h100-8x1"), "16 devices are asked for"),
        (dict(pipeline={"chunk": 2}), "has 'chunk'"),
        (dict(pipeline=2, parallel={"pipeline": 2}), "too"),
    ],
)
def test_what_cannot_be_staged_is_a_letter(how, said):
    with pytest.raises(autopar.Letter, match=said):
        planned(**how)


def test_cuts_are_kept_in_every_order():
    for schedule in ("gpipe", "interleaved", "greedy"):
        cuts = ("blocks.1", "blocks.3", "blocks.5")
        found = planned(pipeline={"schedule": schedule, "cuts": cuts}).pipeline
        assert found.firsts == cuts and len(found.place) == 4, schedule


def made_parallel(rank, model, batch):
    autopar.autoparallelize(model, batch, mesh=MESH, microbatches=2, memory_budget="inf")


@pytest.mark.parametrize("run", [on_threads, on_local_tensor])
def test_ranks_of_one_process_are_refused(run):
    with pytest.raises(autopar.NotServed, match="a process for each rank"):
        run(4, made_parallel, *case("twice"))


def test_a_batch_norm_is_refused_with_its_line():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    with pytest.raises(autopar.Letter, match="batch"):
        autopar.plan(
            model, (torch.randn(8, 8),), mesh=MESH, microbatches=2, loss=lambda out, given: out.square().mean()
        )


# Mesh, order, what else to ask for. Collectives of gloo make copies of their own, so that no gradient is reduced here.
HELD = [
    ((4, 1), "1f1b", {}),
    ((4, 1), "gpipe", {}),
    ((2, 2), "interleaved", {"parallel": "megatron"}),
    ((4, 1), "zero-bubble", {}),
    ((2, 2), "1f1b", {"parallel": "megatron"}),
    ((2, 2), "dualpipe-v", {"parallel": "megatron"}),
]


def held(rank, cases):
    """For each case, what the plan says that this rank holds at most, and what it holds in forward and backward."""
    found = []
    for shape, schedule, how in cases:
        model, batch = decoder(8)
        mesh = autopar.DeviceMesh(shape, ("pp", "tp"))
        asked = dict(
            mesh=mesh, microbatches=8, memory_budget="inf", pipeline={"schedule": schedule}, optimizer="sgd-momentum"
        )
        mine = autopar.autoparallelize(model, batch, **asked, **how)
        place, _ = mine.plan.pipeline.split(rank)
        found.append((said(mine.plan, place), peak(mine, batch)))
    return found


@pytest.mark.machines
@pytest.mark.nightly
def test_ranks_hold_what_the_plan_says():
    for found in zip(*on_processes(4, held, HELD), strict=True):
        assert all(0.99 <= said / peak <= 1.05 for said, peak in found), found


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if pair in BY_DAY else pytest.mark.nightly, id=str(pair)) for pair in PAIRS]
)
def test_a_rank_holds_what_the_plan_says(pair):
    found = peaks(pair)
    assert all(0.99 <= said / peak <= 1.05 for said, peak in found), found


def test_a_case_has_its_blocks():
    """Blocks of a model with an encoder are those of both its lists, in the order in which they run."""
    model, batch = case("encoder and decoder")
    plan = autopar.plan(model, batch, mesh=autopar.DeviceMesh((4, 1), ("pp", "dp")), microbatches=4)
    blocks = [name for stage in plan.pipeline.stages for name in stage.blocks]
    assert blocks == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_micro_batches_are_as_many_as_devices_can_share():
    model, batch = decoder(4)
    few = {name: value[:8] for name, value in batch.items()}  # eight micro-batches would fill the stages better
    plan = autopar.plan(model, few, mesh=MESH, pipeline={"schedule": "1f1b"}, parallel="zero2")
    assert plan.microbatches == 4
    with pytest.raises(autopar.AutoparError, match="share the 3 rows"):
        autopar.plan(model, {name: value[:3] for name, value in batch.items()}, mesh=MESH, pipeline=2, parallel="zero2")
