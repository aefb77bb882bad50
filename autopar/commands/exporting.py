"""`autopar export`: write a plan for other systems, and list what they cannot express, with predicted seconds.

Each axis of the mesh becomes one of three kinds: the batch cut with whole parameters ("replicate") or with sharded
storage ("shard"), or weights cut ("tensor"). Their tensor parallelism cuts linear layers by columns or by rows, and
tables by rows; everything else is whole there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.graph.layers import folded, innermost_block
from autopar.letters import BadPlan
from autopar.sharding.placement import Placement
from autopar.solver.figures import aligned, time
from autopar.solver.plan import Plan
from autopar.solver.summary import cut_of

_KINDS = ("replicate", "shard", "tensor")
_MOST_SHOWN = 12


class Unsaid(NamedTuple):
    """Something in a plan that a target cannot express."""

    what: str
    seconds: float  # predicted seconds of a step that the plan spends there or saves by it


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as other systems see it."""

    plan: Plan
    kinds: tuple[str, ...]  # kind of each axis of the mesh
    styles: dict[str, str]  # modules, layers as one, that are cut along the tensor axis: "colwise" or "rowwise"
    tables: frozenset[str]  # the tables of embeddings among these modules
    blocks: tuple[str, ...]  # patterns of the blocks whose parameters are stored in parts together
    unsaid: tuple[Unsaid, ...]

    @staticmethod
    def of(plan: Plan) -> Exported:
        """Translate a plan, as far as other systems can express it."""
        kinds = tuple(_kind(plan, axis) for axis in range(len(plan.mesh.shape)))
        if kinds.count("tensor") > 1:
            raise BadPlan(
                f"the plan cuts weights along {kinds.count('tensor')} axes of mesh {plan.mesh}, and others know one",
                advice="a plan with parallel={'data': ..., 'tensor': ...}",
            )
        styles, tables = _styles(plan, kinds)
        blocks = {folded(block) for name in plan.parameters if (block := innermost_block(name))}
        said = Exported(plan, kinds, styles, tables, tuple(sorted(blocks)), ())
        return replace(said, unsaid=tuple(said._unsaid()))

    def degree(self, kind: str) -> int:
        """Number of devices along the axes of a kind."""
        found = 1
        for n, of in zip(self.plan.mesh.shape, self.kinds, strict=True):
            found *= n if of == kind else 1
        return found

    @property
    def is_regathered(self) -> bool:
        return bool(self.plan.regathered)

    def _unsaid(self) -> Iterator[Unsaid]:
        plan = self.plan
        around = {module.rpartition(".")[0] for module in self.styles}
        for axis, kind in enumerate(self.kinds):
            n = plan.mesh.shape[axis]
            seconds = dict[str, float]()
            along = plan.mesh.axes[axis]
            for name, d in plan.decisions.items():
                module = folded(name.rpartition("/")[0])
                cut = cut_of(d, axis) if d.kind == "op" else "nothing"
                if kind == "tensor":
                    is_lost = cut != "nothing" and module not in self.styles and not _is_within(module, around)
                    where = "along the tensor axis, and whole on each device there"
                    more = d.seconds
                else:
                    is_lost = cut == "weights" and _has_weight(d.op)
                    where = f"along the data axis {along}, and gathered there, where rows are cut"
                    more = 0.0
                if is_lost and d.seconds:
                    what = f"{folded(name)}: {cut} over {n} {where}"
                    seconds[what] = seconds.get(what, 0.0) + more
            yield from (Unsaid(what, (n - 1) * s) for what, s in seconds.items())
        if plan.recomputed:
            what = f"recompute of {len(plan.recomputed)} values: whole blocks are made again there"
            yield Unsaid(what, plan.recompute_s)
        if plan.chunks > 1:
            yield Unsaid(f"the loss head in {plan.chunks} chunks of rows: logits are whole there", 0.0)
        if plan.microbatches > 1:
            yield Unsaid(f"{plan.microbatches} micro-batches of a call: a loop of one's own there", 0.0)
        if plan.precision and not {"replicate", "shard"} & set(self.kinds):
            yield Unsaid(f"compute in {plan.precision[0]}: it goes with an axis of data there", 0.0)
        if plan.kernels:
            yield Unsaid(f"kernels: {', '.join(plan.kernels)}", 0.0)


def _is_within(module: str, around: Collection[str]) -> bool:
    """Whether a module is, or lies in, one of the modules `around`, whose layers are cut.

    What stands between these layers is cut with them.
    """
    return any(module == one or module.startswith(f"{one}.") for one in around if one)


def _has_weight(op: str) -> bool:
    return op in ("linear", "embedding") or op.startswith("conv")


def _kind(plan: Plan, axis: int) -> str:
    """The kind of parallelism of an axis, by the seconds of products that it cuts."""
    seconds = {"weights": 0.0}
    for d in plan.decisions.values():
        if d.kind == "op" and _has_weight(d.op):
            seconds[cut_of(d, axis)] = seconds.get(cut_of(d, axis), 0.0) + d.seconds
    if seconds["weights"] > 0 and seconds["weights"] == max(seconds.values()):
        return "tensor"
    sizes = plan.parameter_bytes
    stored = sum(sizes[name] for name, s in plan.parameters.items() if s.placements[axis].is_shard)
    return "shard" if 2 * stored > sum(sizes.values()) else "replicate"


def _styles(plan: Plan, kinds: tuple[str, ...]) -> tuple[dict[str, str], frozenset[str]]:
    """Styles, by other libraries' names, of modules whose weight the tensor axis cuts; and the tables."""
    styles = dict[str, str]()
    tables = set[str]()
    axis = kinds.index("tensor") if "tensor" in kinds else -1
    for name, d in plan.decisions.items() if axis >= 0 else ():
        module, _, op = name.rpartition("/")
        if d.kind == "op" and op in ("linear", "embedding"):
            weight: Placement = d.choice.strategies[axis].operands[1].value
            if weight.is_shard and not getattr(weight, "blocks", ()):
                is_first = weight.dim == 0
                if op == "embedding":
                    styles[folded(module)] = "rowwise" if is_first else "colwise"
                    tables.add(folded(module))
                else:
                    styles[folded(module)] = "colwise" if is_first else "rowwise"
    return styles, frozenset(tables)


# -- targets

_FLAGS = {"bfloat16": "bf16", "float16": "fp16"}  # dtypes as transformers' Trainer names them


def _fsdp2(told: Exported) -> str:
    """A Python file with `parallelize(model)`, on torch's own fully_shard and parallelize_module."""
    shape = tuple(told.degree(kind) for kind in _KINDS)
    policy = ""
    if told.plan.precision is not None:
        param, reduce = told.plan.precision
        policy = f", mp_policy=MixedPrecisionPolicy(torch.{param}, torch.{reduce})"
    lines = [
        '"""Written by `autopar export --to fsdp2`: the nearest to a plan that torch\'s own modules can be told."""',
        "",
        "from fnmatch import fnmatchcase",
        "",
        *(["import torch"] if policy else []),
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' if policy else ''}fully_shard",
        "from torch.distributed.tensor import Replicate",
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        "",
        f"SHAPE = {shape}  # replicate, shard, tensor",
        f"BLOCKS = {told.blocks!r}",
        "STYLES = {",
        *(f'    "{name}": {_style(name, style, told)},' for name, style in sorted(told.styles.items())),
        "}",
        "",
        "",
        "def parallelize(model, device_type):",
        '    """Cut the model in place; every rank passes its own rows, and losses are means of rows."""',
        f"    mesh = init_device_mesh(device_type, SHAPE, mesh_dim_names={_KINDS!r})",
        "    if SHAPE[2] > 1:",
        '        parallelize_module(model, mesh["tensor"], STYLES)',
        "    if SHAPE[0] * SHAPE[1] > 1:",
        '        data = mesh["replicate", "shard"] if SHAPE[0] > 1 else mesh["shard"]',
        "        for name, module in reversed(list(model.named_modules())):",
        "            if not name or any(fnmatchcase(name, b) and name.count('.') == b.count('.') for b in BLOCKS):",
        f"                fully_shard(module, mesh=data, reshard_after_forward={told.is_regathered}{policy})",
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def _style(name: str, style: str, told: Exported) -> str:
    """A module's style for `parallelize_module`."""
    if name in told.tables:
        lies = "input_layouts=Replicate()" if style == "rowwise" else "output_layouts=Replicate()"
    else:
        is_head = "." not in name and style == "colwise"  # the loss reads whole logits
        lies = "output_layouts=Replicate()" if is_head else ""
    return f"{style.title()}Parallel({lies})"


def _hf(told: Exported) -> str:
    """JSON for transformers: `tp_plan` of from_pretrained, and arguments of its Trainer."""
    trainer: dict[str, Any] = {
        "fsdp": "full_shard" if told.degree("shard") > 1 else "",
    }
    if told.plan.precision is not None and (flag := _FLAGS.get(told.plan.precision[0])):
        trainer[flag] = True
    if told.degree("shard") > 1:
        trainer["fsdp_config"] = {"reshard_after_forward": told.is_regathered}
    if told.plan.recomputed:
        trainer["gradient_checkpointing"] = True
    plan = {name: _hf_style(name, style, told) for name, style in sorted(told.styles.items())}
    return (
        json.dumps({"tp_size": told.degree("tensor"), "tp_plan": plan, "training_arguments": trainer}, indent=2) + "\n"
    )


def _hf_style(name: str, style: str, told: Exported) -> str:
    if name in told.tables:
        return f"embedding_{style}"
    return "colwise_gather_output" if "." not in name and style == "colwise" else style


def _torchtitan(told: Exported) -> str:
    """TOML for torchtitan's training configuration."""
    again = '"always"' if told.is_regathered else '"never"'
    mode = '"selective"' if told.plan.recomputed else '"none"'
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {told.degree('replicate')}",
        f"data_parallel_shard_degree = {told.degree('shard')}",
        f"tensor_parallel_degree = {told.degree('tensor')}",
        f"fsdp_reshard_after_forward = {again}",
        "",
        "[activation_checkpoint]",
        f"mode = {mode}",
    ]
    if told.plan.precision is not None:
        param, reduce = told.plan.precision
        lines += ["", "[training]", f'mixed_precision_param = "{param}"', f'mixed_precision_reduce = "{reduce}"']
    return "\n".join(lines) + "\n"


TARGETS: dict[str, Callable[[Exported], str]] = {"fsdp2": _fsdp2, "hf": _hf, "torchtitan": _torchtitan}
_FILES = {"fsdp2": "fsdp2.py", "hf": "tp_plan.json", "torchtitan": "titan.toml"}  # plan.json is a plan's


def export(asked: argparse.Namespace) -> int:
    """Write a plan for another system, and print what is lost."""
    told = Exported.of(Plan.load(asked.plan))
    path = Path(asked.out or _FILES[asked.to])
    path.write_text(TARGETS[asked.to](told), encoding="utf-8")
    unsaid = sorted(told.unsaid, key=lambda one: -one.seconds)
    if asked.json:
        print(json.dumps({"written": str(path), "unsaid": [one._asdict() for one in unsaid]}, indent=2))
        return 0
    print(f"{path}: {', '.join(f'{kind} {told.degree(kind)}' for kind in _KINDS)}")
    if not unsaid:
        print("all that the plan decides is said")
        return 0
    rows = [(one.what, time(one.seconds) if one.seconds else "") for one in unsaid]
    more = [(f"{len(rows) - _MOST_SHOWN} more, in --json", "")] if len(rows) > _MOST_SHOWN else []
    print("\n" + "\n".join(aligned((f"what {asked.to} cannot be told", "of the step"), rows[:_MOST_SHOWN] + more)))
    return 0
