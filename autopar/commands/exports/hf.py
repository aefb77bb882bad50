"""`autopar export --to hf`: JSON for transformers, the `tp_plan` of DistributedConfig and arguments of its Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.commands.exports.exported import Exported, Unsaid, Written
from autopar.commands.exports.remaking import Remade

_FLAGS = {"bfloat16": "bf16", "float16": "fp16"}  # dtypes as transformers' Trainer names them


def hf(told: Exported) -> Written:
    """JSON with `tp_size`, `tp_plan` and `training_arguments`."""
    told.refuse_stages("DistributedConfig")
    plan = {name: _style(name, style, told) for name, style in sorted(told.styles.items())}
    said = {"tp_size": told.degree("tensor"), "tp_plan": plan, "training_arguments": _arguments(told)}
    return Written(json.dumps(said, indent=2) + "\n", tuple(_unsaid(told)))


def _arguments(told: Exported) -> dict[str, Any]:
    plan = told.plan
    is_sharded = told.degree("shard") > 1
    found: dict[str, Any] = {}
    if is_sharded:
        found["fsdp"] = True
        found["fsdp_config"] = {"version": 2, "reshard_after_forward": told.is_regathered}
    if plan.precision is not None and (flag := _FLAGS.get(plan.precision[0])):
        found[flag] = True
    if Remade.in_blocks(plan).modules and is_sharded:
        found["fsdp_config"]["activation_checkpointing"] = True
    elif Remade.in_blocks(plan).modules:
        found["gradient_checkpointing"] = True
    if told.local_rows:
        found["per_device_train_batch_size"] = told.local_rows
    if plan.microbatches * plan.accumulation > 1:
        found["gradient_accumulation_steps"] = plan.microbatches * plan.accumulation
    if plan.compiled:
        found["torch_compile"] = True
    return found


def _unsaid(told: Exported) -> Iterator[Unsaid]:
    plan = told.plan
    yield from told.unsaid()
    yield from told.chunks_unsaid()
    yield from told.reshard_unsaid()
    yield from told.recompute_unsaid(Remade.in_blocks(plan))
    if told.degree("shard") > 1 and told.degree("replicate") > 1:
        what = f"whole parameters over {told.degree('replicate')}: Trainer's FSDP stores them in parts there, too"
        yield Unsaid(what, 0.0)
    if plan.precision and plan.precision[0] not in _FLAGS:
        yield Unsaid(f"compute in {plan.precision[0]}", 0.0)
    # Accelerate gives FSDP one dtype for both; without FSDP, autocast leaves gradients in the dtype of parameters.
    there = plan.precision[0] if plan.precision and told.degree("shard") > 1 else "float32"
    if plan.precision and plan.precision[1] != there:
        yield Unsaid(f"gradients reduced in {plan.precision[1]}: Trainer reduces them in {there}", 0.0)
    if not told.local_rows:
        yield Unsaid("rows of a device at once: the plan does not say them", 0.0)


def _style(name: str, style: str, told: Exported) -> str:
    if name in told.tables:
        return f"embedding_{style}"
    return "colwise_gather_output" if "." not in name and style == "colwise" else style
