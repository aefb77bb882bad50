"""Read transformers' DistributedConfig as a preset: sizes of axes, and the styles of a model's own tensor plan.

    DistributedConfig(tp_size=4, fsdp_size=2)   {"data": {"size": 2, "zero": 3}, "tensor": {"size": 4, "styles": ...}}

It is known by its name, so that transformers is not imported. Sizes and `tp_plan` are read; every other field that is
set is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.letters import NotServed

_INSTEAD = {  # fields that are not read, and what says the same
    "enable_sequence_parallel": 'parallel=dict(tensor=dict(size=..., mode="megatron", sequence=True))',
    "fsdp_plan": 'constraints={"layers.0.*": "S(0)@dp; R; kept"}, which pins what is kept for backward',
    "fsdp_mixed_precision": 'precision="bf16"',
    "fsdp_cpu_offload": "a plan without it, under a memory_budget",
}


def as_preset(parallel: Any, model: Any) -> Any:
    """The preset that a DistributedConfig says for a model; all else is returned as it is."""
    if not _is_distributed_config(parallel):
        return parallel
    fields: Mapping[str, Any] = {f.name: getattr(parallel, f.name) for f in dataclasses.fields(parallel)}
    _refuse_others(parallel, fields)
    replicas, shards, tensor = fields["dp_replicate_size"], fields["fsdp_size"], fields["tp_size"]
    data = {"size": replicas * shards, "zero": 3 if shards > 1 else 0}
    if shards > 1:
        data["replicas"] = replicas
    if tensor == 1:
        return {"data": data}
    return {"data": data, "tensor": {"size": tensor, "styles": _styles(fields["tp_plan"], tensor, model)}}


def _is_distributed_config(value: Any) -> bool:
    return any(
        c.__name__ == "DistributedConfig" and c.__module__.startswith("transformers.") for c in type(value).__mro__
    )


def _refuse_others(config: Any, fields: Mapping[str, Any]) -> None:
    """Raise a letter for the first field that is set and says what no preset does."""
    read = ("dp_replicate_size", "fsdp_size", "tp_size", "tp_plan")
    for field in reversed(dataclasses.fields(config)):  # ep_size first, of which enable_expert_parallel follows
        value = fields[field.name]
        # A size that is left out becomes 1.
        is_default = value == field.default or (field.name.endswith("_size") and value == 1)
        if field.name not in read and not is_default:
            raise NotServed(
                f"DistributedConfig({field.name}={value!r}) is not served",
                seen=f"fields that are: {', '.join(read)}",
                advice=_INSTEAD.get(field.name, ""),
            )


def _styles(asked: Any, size: int, model: Any) -> dict[str, str]:
    """The styles of a model's own tensor plan, and those that are asked for in their place."""
    own = dict(getattr(model, "tp_plan", None) or {})
    styles = own | (dict(asked) if isinstance(asked, Mapping) else {})
    if not styles or asked == {}:
        raise NotServed(
            f"DistributedConfig(tp_size={size}), and no tensor plan: {type(model).__name__} has none, and none is given"
            if not styles
            else f"DistributedConfig(tp_size={size}, tp_plan={{}}) cuts nothing along {size} devices",
            advice=f'tp_plan={{"layers.*.up": "colwise", ...}}, or parallel=dict(tensor={size}), which finds one',
        )
    return styles
