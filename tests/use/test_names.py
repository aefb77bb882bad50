"""Names that people type, and the letters where they cannot be read."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import pickle
import re
from importlib import resources

import pytest
import torch
import transformers

import autopar
from autopar import Assume, Precision
from autopar.arguments import optimizer_of, precision_of
from autopar.letters import AutoparError, BadBudget, BadCluster, BadPreset, BadSharding, Infeasible, NotServed
from tests.language import drawn, gpt2

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "use_cache": False,
}


def planned(**how):
    model = gpt2(how.pop("layers", 1))
    return autopar.plan(model, drawn(8, 64, 512), memory_budget=how.pop("memory_budget", "inf"), **how)


def test_a_mesh_is_a_text_or_a_count():
    assert planned(mesh="2x4").mesh == autopar.DeviceMesh((2, 4)) == autopar.DeviceMesh.of("2,4")
    assert planned(mesh="4").mesh.size == 4
    named = planned(mesh={"dp": 2, "tp": 4}).mesh
    assert (named.shape, named.axes) == ((2, 4), ("dp", "tp"))
    with pytest.raises(BadSharding, match="is not a mesh shape"):
        planned(mesh={"dp": "two"})
    for wrong in ("2by4", "x4", "2x", "", "-2"):
        with pytest.raises(BadSharding, match="is not a mesh"):
            planned(mesh=wrong)


def test_presets_have_the_names_of_other_tools():
    alike = (("ddp", "dp"), ("fsdp", "zero3"), ("tp", "megatron"), ("no_shard", "dp"), ("shard_grad_op", "zero2"))
    for name, other in alike:
        one, two = (planned(mesh=(4,), parallel=preset) for preset in (name, other))
        assert one.decisions == two.decisions and one.regathered == two.regathered
    with pytest.raises(BadPreset, match="did you mean 'zero3'"):
        planned(mesh=(4,), parallel="zero33")


@pytest.mark.parametrize("name, stage", [("hsdp", 3), ("hybrid_shard_zero2", 2), ("hsdp-zero1", 1)])
def test_hybrid_sharding_cuts_parameters_on_the_last_axis(name, stage):
    """And states with them: a quarter on (2, 4), where the stage over all devices has an eighth."""
    plan = planned(mesh=(2, 4), parallel=name)
    stored = {name: sharding.text(plan.mesh.axes) for name, sharding in plan.parameters.items()}
    assert all(text.endswith("@model") and "@data" not in text for text in stored.values()), stored
    assert bool(plan.regathered) == (stage == 3)
    over_all = planned(mesh=(2, 4), parallel=f"zero{stage}")
    states, least = (p.memory["optimizer states"] for p in (plan, over_all))
    assert states == pytest.approx(2 * least, rel=0.01)


def hybrid(rank, models, batch, name):
    parallel = autopar.autoparallelize(models[rank], batch, mesh=(2, 2), memory_budget="inf", parallel=name)
    loss = parallel(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}


def test_dtensor_gathers_the_same_rows_for_each_layer():
    """Five gathers of a LLaMA's layer where Megatron has two, and as many scattered sums: of 26.3 us each by hand."""
    config = transformers.LlamaConfig(**LLAMA)
    ids = torch.zeros(4, 32, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    asked = {"mesh": (4,), "cluster": "h100-8x1", "memory_budget": "inf", "recompute": "none"}
    once, apart = (
        autopar.plan(transformers.LlamaForCausalLM(config).train(), batch, parallel=how, **asked)
        for how in ({"tensor": {"size": 4, "sequence": True}}, "dtensor")
    )
    (link, *_), nbytes = autopar.Cluster.of("h100-8x1").links, 4 * 32 * 64 * 4
    collective = link.latency_s + 3 * link.hop_s + 3 / 4 * nbytes / link.wire("all_gather")
    turned = 3e-6 + 2 * nbytes * (1 + 1 / 4) / 2.903e12  # they pack by the first dim
    more = 2 * 3 * 2 * (collective + turned)
    assert apart.step_time_s - once.step_time_s == pytest.approx(more, rel=0.05)
    assert "gathers them once" in str(apart.warnings) and not once.warnings
    with pytest.raises(BadPreset, match="parallel="):
        planned(mesh=(4,), parallel={"tensor": {"size": 4, "apart": True}})


@pytest.mark.parametrize("name", ["hsdp", "hsdp-zero2", "dtensor"])
def test_sharding_by_name_computes_what_one_device_does(name, threads):
    first, batch = gpt2(1, dropout=0.0).double(), drawn(8, 64, 512)
    loss, found = threads(4, hybrid, [copy.deepcopy(first) for _ in range(4)], batch, name)[0]
    plain = first(**batch).loss
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-6, atol=0)  # HF computes losses in float32
    for name, parameter in first.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bf16", Precision("bfloat16", "float32")),
        (torch.float16, Precision("float16", "float32")),
        ("fp32", Precision("float32", "float32")),
        ("no", None),
        (Precision("bfloat16", "bfloat16"), Precision("bfloat16", "bfloat16")),
    ],
)
def test_precisions_have_short_names(given, meant):
    assert precision_of(given) == meant


def test_optimizers_are_classes_and_instances_too():
    weight = [torch.nn.Parameter(torch.ones(2))]
    optim = torch.optim
    for given, meant in (
        (optim.AdamW, "adamw"),
        (optim.Adam(weight), "adamw"),
        (optim.AdamW(weight, amsgrad=True), 12),
        (optim.SGD, "sgd"),
        (optim.SGD(weight, lr=0.1, momentum=0.9), "sgd-momentum"),
        (optim.RMSprop(weight, centered=True), 8),
        (optim.Adagrad, 4),
        ("AdamW", "adamw"),
        (6, 6),
    ):
        assert optimizer_of(given) == meant, given
    for wrong in ("adam8", optim.LBFGS, optim.Adafactor(weight), torch.nn.Linear, None):
        with pytest.raises(NotServed, match="is not known"):
            optimizer_of(wrong)


@pytest.mark.parametrize(
    "optimizer", ["Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "RMSprop", "SGD"]
)
def test_bytes_of_states_are_those_that_torch_keeps(optimizer):
    """Of a parameter of many elements, after a step; what is one number for all is not counted."""
    weight = torch.nn.Parameter(torch.ones(1000))
    made = getattr(torch.optim, optimizer)([weight])
    weight.grad = torch.ones(1000)
    made.step()
    states = made.state[weight].values()
    kept = sum(4 for s in states if isinstance(s, torch.Tensor) and s.numel() == 1000)
    named = {"adamw": 8, "sgd": 0, "sgd-momentum": 4}
    found = optimizer_of(made)
    assert named.get(found, found) == kept


@pytest.mark.parametrize(
    ("how", "letter", "says"),
    [
        ({"memory_budget": 40.0}, BadBudget, '"40GiB"'),
        ({"memory_budget": "40 gigs"}, BadBudget, "not a number of bytes"),
        ({"cluster": "h100-8x1", "mesh": 16}, BadCluster, 'cluster="h100-8x2"'),
        ({"cluster": "h100-8x1", "mesh": (4, 4)}, BadCluster, "has 8"),
        ({"cluster": "h10-8x1"}, BadCluster, "did you mean 'h100'"),
        ({"precision": "bf17"}, NotServed, "did you mean 'bf16'"),
        ({"recompute": "selectve"}, NotServed, "did you mean 'selective'"),
        ({"recompute": []}, NotServed, "is not a policy"),
        ({"cluster": "h100-0x2"}, BadCluster, "no cluster is called"),
        ({"cluster": "h100-8x00"}, BadCluster, "no cluster is called"),
        ({"memory_budget": 1e20}, BadBudget, "not a number of bytes"),
        ({"kernels": "rmsnorm"}, NotServed, "did you mean 'rms_norm'"),
        ({"optimizer": "admw"}, NotServed, "did you mean 'adamw'"),
    ],
)
def test_letters_say_what_may_have_been_meant(how, letter, says):
    with pytest.raises(letter) as caught:
        planned(**{"mesh": 4, **how})
    assert says in str(caught.value) and isinstance(caught.value, AutoparError)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"links": []}, "devices have to be connected"),
        ({"hidden": 2.0}, "2.0 is not a number from 0 to 1, at hidden"),
        ({"step_s": -1.0}, "-1.0 is not a number from 0, at step_s"),
        *(
            ({"links": [{"name": "", "latency_s": 0, "bytes_per_s": 1, "falls": {"all_gather": shares}}]}, says)
            for shares, says in (
                ([], "falls of all_gather: []"),
                ([[8, 0.5], [4, 1]], "amounts ascend"),
                ([[0, 1]], "from above 0"),
                ([[2, 0]], "above 0 to 1, at links.0"),
                ([[2, 90]], "above 0 to 1"),
            )
        ),
        *(
            (
                {"links": [{"name": "", "latency_s": 0, "bytes_per_s": 1, key: {"all_gathre": rate}}]},
                "'all_gathre' is not",
            )
            for key, rate in (("falls", [[4, 0.9]]), ("reached", 1e9))
        ),
        *(
            ({"links": [{"name": "", "latency_s": 0, "bytes_per_s": 1, "doubling": points}]}, "doubling: ")
            for points in ([[0, 1e-5]], [[9, 1e-5], [8, 1e-5]], [[9, -1e-5]])
        ),
    ],
)
def test_a_cluster_file_that_cannot_be_is_a_letter(wrong, says, tmp_path):
    path = tmp_path / "mine.json"
    data = json.loads(resources.files("autopar.sharding.clusters").joinpath("generic.json").read_text())
    path.write_text(json.dumps({**data, **wrong}))
    with pytest.raises(BadCluster) as letter:
        autopar.Cluster.of(path)
    assert says in letter.value.seen


def test_passes_without_a_rate_are_a_letter(tmp_path):
    path = tmp_path / "mine.json"
    data = json.loads(resources.files("autopar.sharding.clusters").joinpath("generic.json").read_text())
    for points in ([], [[1, 0]], [[2, 1e12], [1, 1e12]]):
        data["device"]["passes"] = [{"op": "to", "dtype": "float32", "forward": [[1, 1e12]], "backward": points}]
        path.write_text(json.dumps(data))
        with pytest.raises(BadCluster, match=r"at device\.passes\.0"):
            autopar.Cluster.of(path)


def test_a_letter_comes_whole_to_another_process():
    """With the bytes by which a script decides how many devices it asks for."""
    letter = Infeasible("nothing fits", at="model.py:3", seen="4 GiB", advice="more", needs=4.0, smallest=5.0)
    for same in (pickle.loads(pickle.dumps(letter)), letter.but()):
        assert type(same) is Infeasible and vars(same) == vars(letter) and str(same) == str(letter)
    other = letter.but(seen="8 GiB", smallest=8.0)
    assert (other.needs, other.smallest, other.at) == (4.0, 8.0, "model.py:3") and "8 GiB" in str(other)


def test_a_batch_of_no_rows_has_a_plan():
    plan = autopar.plan(torch.nn.Linear(4, 4), torch.zeros(0, 4), mesh=2, loss=lambda y, _: y.sum())
    assert plan.microbatches == 1


def test_a_budget_that_nothing_fits_names_what_helps():
    """Devices, precision and what was ruled out; a mesh of as many devices as it says does fit."""
    model, batch = gpt2(layers=2, vocabulary=128), drawn(64, 64, 128)
    asked = dict(memory_budget="24MiB", assume=Assume(no_padding=True), microbatches=1)
    with pytest.raises(Infeasible) as found:
        autopar.plan(model, batch, mesh=(2,), recompute="none", chunks=1, **asked)
    said = str(found.value)
    assert 'recompute="auto", which was ruled out' in said and 'chunks="auto"' in said and 'microbatches="auto"' in said
    alone, narrow = (int(n) for n in re.search(r"(\d+) devices \(.*, or (\d+) devices with precision", said).groups())
    assert 2 < narrow <= alone
    plan = autopar.plan(model, batch, mesh=(alone,), recompute="none", chunks=1, **asked)
    assert plan.peak_bytes <= 24 * 2**20
    with pytest.raises(Infeasible) as found:
        autopar.plan(model, batch, mesh=(2,), precision="bf16", memory_budget="1MiB")
    assert "ruled out" not in str(found.value) and "with precision" not in str(found.value)


def test_type_checkers_see_the_names_that_programs_get():
    """The names for type checkers, which no program reads, are those that a program may ask for, from their homes."""
    tree = ast.parse(inspect.getsource(autopar))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    shown = {alias.asname: (line.module, alias.name) for line in block.body for alias in line.names}
    assert shown.keys() == {*autopar.__all__, *autopar._FOLDERS}
    for name, (module, original) in shown.items():
        assert getattr(autopar, name) is getattr(importlib.import_module(module), original), name
