"""`distributed_config`: a plan as transformers' DistributedConfig, where that can say how parameters are stored."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from autopar.commands.exports.exported import Exported
from autopar.graph.layers import folded
from autopar.letters import BadPlan, NotServed
from autopar.sharding.placement import Sharding
from autopar.solver.plan import Plan

_ORDER = ("replicate", "shard", "tensor")  # transformers' order of axes


def distributed_config(plan: Plan) -> Any:
    """The DistributedConfig that stores each parameter along the axes that the plan cuts it along.

    An error names the parameters that it cannot say. Which dim a data axis cuts, recompute, micro-batches and dtypes
    are not part of it: `autopar export --to hf` lists what is lost.
    """
    try:
        made = importlib.import_module("transformers.distributed").DistributedConfig
    except ImportError as e:
        raise NotServed("distributed_config needs transformers", advice="pip install transformers") from e
    told = Exported.of(plan)
    told.refuse_stages("DistributedConfig")
    places = [_ORDER.index(kind) for kind in told.kinds]
    if places != sorted(places):
        raise BadPlan(
            f"DistributedConfig has its axes in the order {', '.join(_ORDER)}, and the plan's are otherwise",
            seen=", ".join(f"{axis}: {kind}" for axis, kind in zip(plan.mesh.axes, told.kinds, strict=True)),
            advice="a mesh with the axis of weights last",
        )
    styles = dict(_styles(told))
    if odd := [name for name, sharding in plan.parameters.items() if _is_odd(name, sharding, told)]:
        named = ", ".join(f"{name} {plan.parameters[name].text(plan.mesh.axes)}" for name in odd[:3])
        raise BadPlan(
            f"DistributedConfig cannot say how the plan stores {len(odd)} of {len(plan.parameters)} parameters",
            seen=f"{named}{', ...' if len(odd) > 3 else ''}; axes: {', '.join(told.kinds)}",
            advice="a plan with parallel=DistributedConfig(...), or autopar export --to fsdp2",
        )
    return made(
        tp_size=told.degree("tensor"),
        tp_plan=styles if told.degree("tensor") > 1 else None,
        fsdp_size=told.degree("shard"),
        dp_replicate_size=told.degree("replicate"),
    )


def _styles(told: Exported) -> Iterator[tuple[str, str]]:
    """The style of each layer with a weight; whole ones too, in place of rules of the model's own."""
    for name, decision in told.plan.decisions.items():
        module = folded(name.rpartition("/")[0])
        if decision.kind == "op" and decision.op in ("linear", "embedding"):
            style = told.styles.get(module, "replicate")
            is_head = "." not in module and style == "colwise"  # the loss reads whole logits
            is_table = module in told.tables
            yield module, f"embedding_{style}" if is_table else "colwise_gather_output" if is_head else style


def _is_odd(name: str, sharding: Sharding, told: Exported) -> bool:
    """Whether a parameter is stored otherwise than the kinds of axes and the styles say."""
    module, _, own = name.rpartition(".")
    style = told.styles.get(folded(module), "")
    by_style = bool(style) and not (style == "rowwise" and own == "bias")
    says = {"replicate": False, "shard": True, "tensor": by_style}
    return any(p.is_shard != says[kind] for p, kind in zip(sharding.placements, told.kinds, strict=True))
