"""transformers' DistributedConfig as a preset: what it says is planned, and what no preset says is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.distributed import DistributedConfig

import autopar
from autopar.letters import BadPreset, NotServed
from autopar.space.distributed_config import as_preset
from autopar.testing import on_threads
from tests.models import eager_links

SIZES = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)


def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, max_position_embeddings=32)).train()


def batch():
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def planned(config, model=None, **how):
    how = {"mesh": (2, 2), "cluster": eager_links(), "assume": autopar.Assume(no_padding=True), **how}
    return autopar.plan(model or llama(), batch(), parallel=config, memory_budget="inf", **how)


def stored(plan):
    return {name: sharding.text(plan.mesh.axes) for name, sharding in plan.parameters.items()}


def test_a_models_own_tensor_plan_is_kept_to():
    plan = planned(DistributedConfig(tp_size=2, fsdp_size=2), mesh={"dp": 2, "tp": 2})
    lies = stored(plan)
    for layer in range(1):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):  # colwise in transformers' Llama
            assert lies[f"model.layers.{layer}.{name}.weight"] == "S(1)@dp, S(0)@tp"
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # rowwise
            assert lies[f"model.layers.{layer}.{name}.weight"] == "S(0)@dp, S(1)@tp"
        assert lies[f"model.layers.{layer}.input_layernorm.weight"] == "S(0)@dp"
    assert lies["model.embed_tokens.weight"] == lies["lm_head.weight"] == "S(1)@dp, S(0)@tp"
    assert plan.regathered >= set(lies)


def test_rules_of_the_user_take_the_place_of_the_models():
    lies = stored(planned(DistributedConfig(tp_size=2, tp_plan={"model.layers.*.mlp.gate_proj": "replicate"}), mesh=2))
    assert lies["model.layers.0.mlp.gate_proj.weight"] == "R" and lies["model.layers.0.mlp.up_proj.weight"] != "R"


def test_replicas_hold_the_same_parts():
    plan = planned(DistributedConfig(fsdp_size=2, dp_replicate_size=2), mesh={"copies": 2, "dp": 2})
    assert set(stored(plan).values()) == {"S(0)@dp"}
    whole = planned(DistributedConfig(dp_replicate_size=4), mesh=4)
    assert set(stored(whole).values()) == {"R"} and not whole.regathered


class Biased(nn.Module):
    """Layers with biases, turned weights and a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = hf.pytorch_utils.Conv1D(24, 8), hf.pytorch_utils.Conv1D(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.tp_plan = {"fused": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise"}

    def forward(self, x):
        q, k, v = self.fused(x).split(8, -1)
        x = x + self.out(torch.tanh(q) * k + v)
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def gradients(model, x):
    loss = model(x)
    loss.backward()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return loss.detach(), full


def test_what_is_cut_by_styles_computes_what_one_device_does():
    torch.manual_seed(1)
    model, x = Biased().double(), torch.randn(4, 8, dtype=torch.float64)
    loss, expected = gradients(copy.deepcopy(model), x)

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), (x,), mesh=2, parallel=DistributedConfig(tp_size=2), cluster=eager_links()
        )
        lies = {name: sharding.text(("",)) for name, sharding in mine.plan.parameters.items()}
        return *gradients(mine, x), lies

    for mine, found, lies in on_threads(2, body):
        torch.testing.assert_close(mine, loss)
        torch.testing.assert_close(found, expected)
        assert lies["up.weight"].startswith("S(0)") and lies["down.weight"].startswith("S(1)")
        assert lies["fused.weight"].startswith("S(1, blocks=(8, 8, 8))") and lies["out.weight"].startswith("S(0)")
        assert lies["fused.bias"].startswith("S(0, blocks=(8, 8, 8))") and lies["down.bias"] == lies["out.bias"] == "R"


@pytest.mark.parametrize(
    "field, value",
    [
        ("enable_sequence_parallel", True),
        ("fsdp_plan", {"model.norm": "keep_full_weight"}),
        ("fsdp_cpu_offload", True),
        ("fsdp_mixed_precision", True),
        ("pp_size", 2),
        ("ep_size", 2),
        ("ep_plan", {"model.layers.*.mlp": "grouped_gemm"}),
        ("ep_implementation", "all_to_all"),
    ],
)
def test_what_no_preset_says_is_refused_by_name(field, value):
    sizes = {"tp_size": 2} if field == "ep_size" else {}
    with pytest.raises(NotServed, match=f"{field}="):
        as_preset(DistributedConfig(**{**sizes, field: value}), llama())


def test_every_field_is_read_or_refused():
    """A field that a release of transformers adds is refused until it is read."""
    read = {"tp_size", "tp_plan", "fsdp_size", "dp_replicate_size"}
    unset = as_preset(DistributedConfig(), None)
    assert unset == {"data": {"size": 1, "zero": 0}} and read < set(DistributedConfig.__dataclass_fields__)
    for field in set(DistributedConfig.__dataclass_fields__) - read:
        config = DistributedConfig()
        setattr(config, field, "set")
        with pytest.raises(NotServed, match=f"{field}='set'"):
            as_preset(config, None)


def test_a_tensor_plan_that_cuts_nothing_is_a_letter():
    with pytest.raises(NotServed, match="no tensor plan: Linear has none"):
        as_preset(DistributedConfig(tp_size=2), nn.Linear(2, 2))
    with pytest.raises(NotServed, match="cuts nothing along 2 devices"):
        as_preset(DistributedConfig(tp_size=2, tp_plan={}), llama())
    with pytest.raises(BadPreset, match=r"'model\.layers\.\*\.mlp\.nobody' cuts nothing"):
        planned(DistributedConfig(tp_size=2, tp_plan={"model.layers.*.mlp.nobody": "colwise"}), mesh=2)
    with pytest.raises(BadPreset, match="'packed_colwise' of 'lm_head' is not served"):
        planned(DistributedConfig(tp_size=2, tp_plan={"lm_head": "packed_colwise"}), mesh=2)
    with pytest.raises(BadPreset, match="into 3 equal parts"):
        planned(DistributedConfig(tp_size=3), mesh=3)
    with pytest.raises(BadPreset, match="2 replicas"):
        planned({"data": {"size": 4, "zero": 3, "replicas": 2}}, mesh=(4,))
