"""Plans written for other systems: what is written runs there and computes the same, and what is lost is listed."""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar import Assume
from autopar.cli import main
from autopar.commands.exporting import Exported
from autopar.letters import BadPlan
from tests.language import drawn, llama

HYBRID = {"data": {"size": 2, "zero": 3}, "tensor": 2}


def saved(tmp_path, **how):
    plan = autopar.plan(llama().train(), drawn(16, 16, 128), assume=Assume(no_padding=True), memory_budget="inf", **how)
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def said(arguments, capsys):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["unsaid"]


def step(rank, path, model, batch):
    """Loss and gradients on a rank that has its own rows."""
    spec = importlib.util.spec_from_file_location("written", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    model = written.parallelize(copy.deepcopy(model), "cpu")
    ways = written.SHAPE[0] * written.SHAPE[1]
    mine = {name: x.chunk(ways)[rank // written.SHAPE[2]] for name, x in batch.items()}
    loss = model(**mine).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return total / dist.get_world_size(), {n: g for n, g in whole.items() if rank == 0}


@pytest.mark.machines
@pytest.mark.parametrize("how", [{"mesh": (2, 2), "parallel": HYBRID}, {"mesh": (2, 2), "parallel": "hsdp"}], ids=str)
def test_what_is_written_for_fsdp2_trains_as_one_device(how, tmp_path, processes, capsys):
    path = str(tmp_path / "written.py")
    lost = said(["export", saved(tmp_path, **how), "--to", "fsdp2", "-o", path], capsys)
    assert all("cross_entropy" in one["what"] for one in lost)  # of positions along the tensor axis
    torch.manual_seed(0)
    model, batch = llama().train(), drawn(16, 16, 128)
    loss, gradients = processes(4, step, path, model, batch, timeout_s=120)[0]
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_what_is_written_for_others_says_the_same(tmp_path, capsys):
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    path = saved(tmp_path, mesh=(2, 2), parallel=HYBRID, precision="bf16")
    said(["export", path, "--to", "torchtitan", "-o", str(tmp_path / "plan.toml")], capsys)
    titan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert titan["parallelism"]["data_parallel_shard_degree"] == titan["parallelism"]["tensor_parallel_degree"] == 2
    assert titan["training"]["mixed_precision_param"] == "bfloat16"
    said(["export", path, "--to", "hf", "-o", str(tmp_path / "hf.json")], capsys)
    told = json.loads((tmp_path / "hf.json").read_text())
    own = {f"model.{name}": style for name, style in llama().config.base_model_tp_plan.items()}
    shared = {name: style for name, style in told["tp_plan"].items() if name in own}
    assert len(shared) == 7 and {n: own[n] for n in shared} == shared  # as the authors of the model cut it
    assert told["training_arguments"]["bf16"] and told["tp_size"] == 2


@pytest.mark.parametrize("asked, flag", [("bf16", "bf16"), ("fp16", "fp16")])
def test_the_dtype_of_compute_is_said_to_all(asked, flag, tmp_path, capsys):
    path, dtype = saved(tmp_path, mesh=(2,), parallel="zero3", precision=asked), {"bf16": "bfloat16", "fp16": "float16"}
    said(["export", path, "--to", "hf", "-o", str(tmp_path / "hf.json")], capsys)
    told = json.loads((tmp_path / "hf.json").read_text())["training_arguments"]
    assert {name for name in ("bf16", "fp16") if told.get(name)} == {flag}
    said(["export", path, "--to", "fsdp2", "-o", str(tmp_path / "fsdp2.py")], capsys)
    text = (tmp_path / "fsdp2.py").read_text()
    assert f"mp_policy=MixedPrecisionPolicy(torch.{dtype[asked]}, torch.float32)" in text
    compile(text, "fsdp2.py", "exec")


def test_a_dtype_of_compute_without_an_axis_of_data_cannot_be_told(tmp_path, capsys):
    path = saved(tmp_path, mesh=(2,), parallel="megatron", precision="bf16")
    lost = said(["export", path, "--to", "fsdp2", "-o", str(tmp_path / "fsdp2.py")], capsys)
    assert any(one["what"].startswith("compute in bfloat16") for one in lost)


def test_what_cannot_be_told_is_listed_with_its_seconds(tmp_path, capsys):
    path = saved(tmp_path, mesh=(4,), recompute="full", constraints={"model.norm.weight": "S(0)"})
    out = str(tmp_path / "plan.py")
    lost = said(["export", path, "--to", "fsdp2", "-o", out], capsys)
    assert any(one["what"].startswith("recompute of") and one["seconds"] > 0 for one in lost)
    assert main(["export", path, "--to", "fsdp2", "-o", out]) == 0
    assert "what fsdp2 cannot be told" in capsys.readouterr().out


def test_two_tensor_axes_are_a_letter(tmp_path):
    plan = autopar.Plan.load(saved(tmp_path, mesh=(2, 2), parallel=HYBRID))
    both = {
        name: replace(d, choice=replace(d.choice, strategies=(d.choice.strategies[1],) * 2))
        for name, d in plan.decisions.items()
    }
    with pytest.raises(BadPlan, match="cuts weights along 2 axes"):
        Exported.of(replace(plan, decisions=both))
