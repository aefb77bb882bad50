"""A plan as transformers' DistributedConfig: planned by it again, parameters are stored as they were."""

from __future__ import annotations

import pytest
from transformers.distributed import DistributedConfig

import autopar
from autopar import Assume
from autopar.letters import BadPlan
from tests.language import drawn, llama
from tests.models import eager_links


def small():
    return llama(1, 32, 64, 64, 32)


def planned(mesh, **how):
    return autopar.plan(
        small().train(),
        drawn(4, 8, 64),
        mesh=mesh,
        assume=Assume(no_padding=True),
        memory_budget="inf",
        cluster=eager_links(),
        **how,
    )


@pytest.mark.parametrize(
    "mesh, parallel, sizes",
    [
        ((2, 2), {"data": {"size": 2, "zero": 3}, "tensor": 2}, (1, 2, 2)),
        ((2, 2), "hsdp", (2, 2, 1)),
        ((2,), "dp", (2, 1, 1)),
    ],
    ids=["sharded beside tensor", "hybrid", "copies"],
)
def test_planned_again_parameters_are_stored_alike(mesh, parallel, sizes):
    plan = planned(mesh, parallel=parallel)
    config = autopar.distributed_config(plan)
    assert (config.dp_replicate_size, config.fsdp_size, config.tp_size) == sizes
    again = planned(mesh, parallel=DistributedConfig.from_dict(config.to_dict()))
    assert again.parameters == plan.parameters and set(again.regathered) == set(plan.regathered)


def test_its_rules_are_rules_of_transformers():
    config = autopar.distributed_config(planned((2,), parallel="megatron"))
    model = small()
    styles, *_ = model._resolve_parallel_plans(config)
    assert (
        styles["model.layers.0.self_attn.q_proj"] == "colwise" and styles["model.layers.0.mlp.down_proj"] == "rowwise"
    )


def test_what_it_cannot_say_is_a_letter():
    one = {"model.norm.weight": "S(0); R", "*.weight": "R", "input_ids": "S(0)"}
    with pytest.raises(BadPlan, match=r"(?s)stores 1 of .*model\.norm\.weight S\(0\)"):
        autopar.distributed_config(planned((2,), constraints=one))
    cut = planned({"tp": 2}, parallel="megatron").parameters
    turned = {name: sharding.text(("tp",)) for name, sharding in cut.items()} | {"input_ids": "S(0)@dp"}
    turned = {name: text if text == "R" or "@" in text else f"{text}@tp" for name, text in turned.items()}
    with pytest.raises(BadPlan, match=r"in the order replicate, shard, tensor(?s:.*)tp: tensor, dp: replicate"):
        autopar.distributed_config(planned({"tp": 2, "dp": 2}, constraints=turned))
