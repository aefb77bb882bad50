"""`autopar export --to torchtitan`: a registry of configurations, in Python; `torchtitan-toml` for 0.2.

torchtitan 0.3.0 (2026-09-03) reads no TOML: `--module` names a module of Python, and `--config` a function in it that
returns a Trainer.Config. Releases 0.2.0 to 0.2.2 read this TOML.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.commands.exports.exported import Exported, Unsaid, Written
from autopar.commands.exports.remaking import Remade, products
from autopar.solver.plan import Plan

_PARAMETER_DTYPES = ("bfloat16", "float32")
_REDUCED = "float32"
# The schedules of torch that have the names of plans' orders; the others run as 1F1B there.
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}

_HEAD = '''"""Written by `autopar export --to torchtitan`, for torchtitan 0.3: a plan for {devices} devices.

    torchrun --nproc-per-node=gpu -m torchtitan.train --module titan_plan --config planned

in the folder of this file, on each node as torchrun needs it; {devices} processes in all. The plan says how {model} is
parallel. The model of torchtitan itself, its data, optimizer and number of steps are those of `base`: import the one
that you train.
"""

{imports}
'''


def torchtitan(told: Exported) -> Written:
    """A Python module whose function `planned` returns a Trainer.Config."""
    settings = _settings(told)
    settings["parallelism"]["enable_sequence_parallel"] = told.is_sequence_cut
    settings["loss"] = {"num_chunks": told.plan.chunks}
    policy = _policy(told.plan)
    imports = [
        *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
        "from torchtitan.models.llama3.config_registry import llama3_8b as base",
        "from torchtitan.trainer import Trainer",
    ]
    head = _HEAD.format(
        devices=told.plan.devices,
        model=told.plan.workload.model or "a model",
        imports="\n".join(imports),
    )
    lines = [
        "",
        "",
        "def planned() -> Trainer.Config:",
        "    config = base()",
        *(
            f"    config.{section}.{name} = {_python(value)}"
            for section, fields in settings.items()
            for name, value in fields.items()
        ),
        f"    config.activation_checkpoint = {f'{policy}.Config()' if policy else None}",
        "    return config",
    ]
    unsaid = (*told.unsaid(is_sequence_told=told.is_sequence_cut), *_unsaid(told))
    return Written(head + "\n".join(lines) + "\n", unsaid)


def torchtitan_toml(told: Exported) -> Written:
    """TOML for torchtitan 0.2.0 to 0.2.2."""
    mode = {"": "none", "FullAC": "full", "SelectiveAC": "selective"}[_policy(told.plan)]
    lines = []
    for section, fields in (_settings(told) | {"activation_checkpoint": {"mode": mode}}).items():
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in fields.items())]
    lost = [*told.unsaid(), *told.chunks_unsaid(), *_unsaid(told)]
    if told.plan.precision and told.degree("shard") == 1 and told.degree("tensor") > 1:
        lost.append(Unsaid(f"compute in {told.plan.precision[0]}: it goes with sharded parameters there", 0.0))
    return Written("\n".join(lines[1:]) + "\n", tuple(lost))


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _settings(told: Exported) -> dict[str, dict[str, object]]:
    """Fields by section, under the names that they have in TOML and in the dataclasses."""
    plan = told.plan
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": told.degree("replicate"),
        "data_parallel_shard_degree": told.degree("shard"),
        "fsdp_reshard_after_forward": "always" if told.is_regathered else "never",
        "tensor_parallel_degree": told.degree("tensor"),
        "pipeline_parallel_degree": 1 if plan.pipeline is None else plan.pipeline.coordinates,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    training: dict[str, object] = {}
    turns = 1  # Only pipelines part torchtitan's local batch; other micro-batches make up a global one.
    if plan.pipeline is not None:
        turns = plan.microbatches
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES.get(plan.pipeline.schedule, "1F1B")
        parallelism["pipeline_parallel_microbatch_size"] = max(1, told.local_rows)
    if told.local_rows:
        batch = told.local_rows * told.degree("replicate") * told.degree("shard")
        training["local_batch_size"] = told.local_rows * turns
        training["global_batch_size"] = batch * plan.microbatches * plan.accumulation
    if plan.workload.tokens and plan.workload.rows:
        training["seq_len"] = plan.workload.tokens // plan.workload.rows
    if told.dtype in _PARAMETER_DTYPES:
        training["dtype"] = told.dtype
    compute = plan.precision[0] if plan.precision else told.dtype
    if compute in _PARAMETER_DTYPES:
        training["mixed_precision_param"] = compute
        training["mixed_precision_reduce"] = _REDUCED
    return {"parallelism": parallelism, "training": training, "compile": {"enable": plan.compiled}}


def _policy(plan: Plan) -> str:
    """The nearest policy of activation checkpoints: whole blocks, or torchtitan's choice of ops.

    Its SelectiveAC saves attention and every second product, so a plan that saves less than half is nearer to FullAC.
    """
    whole = Remade.in_blocks(plan)
    if not whole.modules:
        return ""
    names = [name for module in whole.modules for name, _ in products(plan, module)]
    saved = sum(len(results) for results in Remade.of(plan).modules.values())
    is_all = Remade.of(plan).modules.keys() == whole.modules.keys()
    return "FullAC" if is_all and 2 * saved < len(names) else "SelectiveAC"


def _unsaid(told: Exported) -> Iterator[Unsaid]:
    plan = told.plan
    named = plan.workload.model or "a model"
    yield Unsaid(f"the model: {named}, of {sum(plan.parameter_bytes.values()):,} bytes of parameters", 0.0)
    if plan.pipeline is not None:
        firsts = ", ".join(plan.pipeline.firsts)
        yield Unsaid(f"stages that begin at {firsts}: torchtitan finds the layers of its own model's stages", 0.0)
        if plan.pipeline.schedule not in _SCHEDULES:
            yield Unsaid(f"the order of stages, {plan.pipeline.schedule}: 1F1B there", 0.0)
    yield from told.reshard_unsaid()
    if _policy(plan) == "FullAC":
        yield from told.recompute_unsaid(Remade.in_blocks(plan))
    elif _policy(plan):
        what = f"recompute of {len(plan.recomputed)} values: torchtitan chooses ops itself, in every block"
        yield Unsaid(what, plan.recompute_s)
    param, reduce = plan.precision or (told.dtype, told.dtype)
    if param not in _PARAMETER_DTYPES:
        yield Unsaid(f"compute in {param or 'the dtype of the model'}: it knows bfloat16 and float32", 0.0)
    if reduce not in ("", _REDUCED):
        yield Unsaid(f"gradients reduced in {reduce}: it knows float32", 0.0)
    if told.degree("tensor") > 1 and told.styles:
        yield Unsaid("which layers the tensor axis cuts: torchtitan's model says it", 0.0)
    if not told.local_rows:
        yield Unsaid("rows of a device at once: the plan does not say them", 0.0)
    yield Unsaid("the optimizer: that of `base`", 0.0)
