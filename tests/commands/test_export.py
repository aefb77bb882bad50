"""Plans written for other systems: what is written runs there and computes the same, and what is lost is listed."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import weakref
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar import Assume
from autopar.cli import main
from autopar.commands.exports.exported import Exported
from autopar.letters import BadPlan
from tests.commands import titan
from tests.language import drawn, llama

HYBRID = {"data": {"size": 2, "zero": 3}, "tensor": 2}


def saved(tmp_path, **how):
    plan = autopar.plan(llama().train(), drawn(16, 16, 128), assume=Assume(no_padding=True), memory_budget="inf", **how)
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def said(arguments, capsys):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["unsaid"]


def wrote(path):
    spec = importlib.util.spec_from_file_location("written", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    return written


def step(rank, path, model, batch):
    """Loss and gradients on a rank that has its own rows, and the tensors that stand after forward."""
    written = wrote(path)
    model = written.parallelize(copy.deepcopy(model), "cpu")
    ways = written.SHAPE[0] * written.SHAPE[1]
    mine = {name: x.chunk(ways)[rank // written.SHAPE[2]] for name, x in batch.items()}
    with Living() as living:
        loss = model(**mine).loss
    held = living.bytes(), isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    whole = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }
    return total / dist.get_world_size(), {n: g for n, g in whole.items() if rank == 0}, held


def steps(rank, paths, model, batch):
    return [step(rank, path, model, batch) for path in paths]


class Living(TorchDispatchMode):
    """Storages that ops made and that live still."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return results

    def bytes(self):
        return sum(size for storage, size in self.made.values() if storage() is not None)


def assert_as_eager(loss, gradients, model, batch):
    model = copy.deepcopy(model)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@pytest.mark.machines
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"mesh": (2, 2), "parallel": HYBRID, "recompute": "full"}, marks=pytest.mark.nightly),
        {"mesh": (2, 2), "parallel": "hsdp"},
    ],
    ids=["hybrid", "hsdp"],
)
def test_what_is_written_for_fsdp2_trains_as_one_device(how, tmp_path, processes, capsys):
    path = str(tmp_path / "written.py")
    lost = said(["export", saved(tmp_path, **how), "--to", "fsdp2", "-o", path], capsys)
    kept = "2 values that the plan saves in modules that run again: made again there"  # sums after attention
    assert all(
        "cross_entropy" in one["what"] or one["what"] == kept for one in lost
    )  # of positions along the tensor axis
    torch.manual_seed(0)
    model, batch = llama().train(), drawn(16, 16, 128)
    loss, gradients, _ = processes(4, step, path, model, batch, timeout_s=120)[0]
    assert_as_eager(loss, gradients, model, batch)


@pytest.mark.machines
def test_what_is_written_for_fsdp2_recomputes_and_gathers_as_the_plan_does(tmp_path, processes, capsys):
    paths = []
    plans = []
    for name, how in {
        "zero2": {"parallel": "zero2"},
        "zero3": {"parallel": "zero3"},
        "selective": {"parallel": "zero3", "recompute": "selective"},
        "full": {"parallel": "zero3", "recompute": "full"},
    }.items():
        path = saved(tmp_path, mesh=(2,), **how)
        plans.append(autopar.Plan.load(path))
        paths.append(str(tmp_path / f"{name}.py"))
        lost = said(["export", path, "--to", "fsdp2", "-o", paths[-1]], capsys)
        again = [
            "4 values that the plan saves in modules that run again: made again there"
        ]  # queries and keys, rotated
        assert [one["what"] for one in lost] == (again if name == "selective" else [])
    torch.manual_seed(0)
    model, batch = llama().train(), drawn(16, 16, 128)
    ran = processes(2, steps, paths, model, batch, timeout_s=120)[0]
    for loss, gradients, _ in ran:
        assert_as_eager(loss, gradients, model, batch)
    _, none, selective, full = (held for _, _, (held, _) in ran)
    dropped = sum(plans[2].needed[name][0] for name in plans[2].recomputed)
    assert none - selective == pytest.approx(dropped, rel=0.1)  # Attention also saves the logarithms of its sums.
    assert full < 0.5 * none
    assert [is_stored_in_parts for _, _, (_, is_stored_in_parts) in ran] == [False, True, True, True]


def configured(text, monkeypatch):
    """The configuration that a registry for torchtitan returns."""
    for name, module in titan.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    space = {}
    exec(compile(text, "titan_plan.py", "exec"), space)
    return space["planned"]()


@pytest.mark.parametrize(
    "how, policy",
    [
        ({"mesh": (2, 2), "parallel": HYBRID, "precision": "bf16"}, "NoneType"),
        ({"mesh": (2,), "parallel": "zero3", "recompute": "full"}, "FullAC"),
        ({"mesh": (2,), "parallel": "zero2", "recompute": "selective"}, "SelectiveAC"),
    ],
    ids=["hybrid", "full", "selective"],
)
def test_torchtitan_reads_what_is_written_for_it(how, policy, tmp_path, capsys, monkeypatch):
    path = saved(tmp_path, **how)
    lost = [one["what"] for one in said(["export", path, "--to", "torchtitan", "-o", str(tmp_path / "t.py")], capsys)]
    config = configured((tmp_path / "t.py").read_text(), monkeypatch)
    tensor = 2 if "precision" in how else 1
    assert titan.wrong(config) == []
    assert config.parallelism.data_parallel_shard_degree == 2
    assert config.parallelism.tensor_parallel_degree == tensor
    assert config.parallelism.fsdp_reshard_after_forward == ("never" if how["parallel"] == "zero2" else "always")
    assert config.training.local_batch_size * 2 == config.training.global_batch_size == config.training.seq_len == 16
    assert config.training.mixed_precision_param == ("bfloat16" if tensor == 2 else "float32")
    assert config.compile.enable is False and config.loss.num_chunks == 1
    assert type(config.activation_checkpoint).__name__ == policy
    assert any("the model: LlamaForCausalLM" in what for what in lost)
    assert any("torchtitan chooses ops itself" in what for what in lost) == (policy == "SelectiveAC")


def test_the_toml_of_older_torchtitan_says_the_same(tmp_path, capsys):
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    path = saved(tmp_path, mesh=(2,), parallel="zero3", precision="fp16", recompute="full")
    out = str(tmp_path / "plan.toml")
    lost = [one["what"] for one in said(["export", path, "--to", "torchtitan-toml", "-o", out], capsys)]
    read = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert read["parallelism"]["data_parallel_shard_degree"] == 2
    assert read["activation_checkpoint"]["mode"] == "full"
    assert "mixed_precision_param" not in read["training"]  # It takes no float16.
    assert any(what.startswith("compute in float16") for what in lost)


def test_what_is_written_for_transformers_is_what_it_reads(tmp_path, capsys):
    tensor_parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    path = saved(tmp_path, mesh=(2, 2), parallel=HYBRID, precision="bf16", recompute="full")
    lost = [one["what"] for one in said(["export", path, "--to", "hf", "-o", str(tmp_path / "hf.json")], capsys)]
    told = json.loads((tmp_path / "hf.json").read_text())
    assert set(told["tp_plan"].values()) <= set(tensor_parallel.ALL_PARALLEL_STYLES)
    assert all(fits(rule, [name for name, _ in llama().named_modules()]) for rule in told["tp_plan"])
    own = {f"model.{name}": style for name, style in llama().config.base_model_tp_plan.items()}
    shared = {name: style for name, style in told["tp_plan"].items() if name in own}
    assert len(shared) == 7 and {n: own[n] for n in shared} == shared  # as the authors of the model cut it
    assert told["tp_size"] == 2
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **told["training_arguments"])
    assert arguments.fsdp is True and arguments.fsdp_config["activation_checkpointing"] is True
    assert arguments.bf16 and arguments.per_device_train_batch_size == 8
    assert "gradients reduced in float32: Trainer reduces them in bfloat16" in lost


def fits(rule, modules):
    return any(fnmatchcase(name, rule) for name in modules)


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
    lost = said(["export", path, "--to", "hf", "-o", out], capsys)
    assert any("made again there" in one["what"] and one["seconds"] > 0 for one in lost)
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
