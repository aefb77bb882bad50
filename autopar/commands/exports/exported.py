"""`Exported`: a plan as other systems see it, and what none of them can be told.

Each axis of the mesh becomes one of three kinds: the batch cut with whole parameters ("replicate") or with sharded
storage ("shard"), or weights cut ("tensor"). Their tensor parallelism cuts linear layers by columns or by rows, and
tables by rows; everything else is whole there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autopar.commands.exports.remaking import Remade, is_within, module_of
from autopar.graph.layers import folded, innermost_block
from autopar.letters import BadPlan
from autopar.sharding.placement import Placement
from autopar.solver.axis_use import cut_of
from autopar.solver.plan import Plan

KINDS = ("replicate", "shard", "tensor")


class Unsaid(NamedTuple):
    """Something in a plan that a target cannot express."""

    what: str
    seconds: float  # predicted seconds of a step that the plan spends there or saves by it


class Written(NamedTuple):
    """The text for a target, and what it leaves out of a plan."""

    text: str
    unsaid: tuple[Unsaid, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as other systems see it."""

    plan: Plan
    kinds: tuple[str, ...]  # kind of each axis of the mesh
    styles: dict[str, str]  # modules, layers as one, that are cut along the tensor axis: "colwise" or "rowwise"
    tables: frozenset[str]  # the tables of embeddings among these modules
    # Patterns of the blocks whose parameters are stored in parts together ("" for parameters outside of blocks), and
    # whether most bytes of each are gathered again in backward.
    blocks: dict[str, bool]

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
        return Exported(plan, kinds, styles, tables, _blocks(plan))

    def refuse_stages(self, target: str) -> None:
        """Raise a letter about a plan in stages, for a target that has none."""
        if self.plan.pipeline is not None:
            raise BadPlan(
                f"{target} has no pipelines, and the plan has {len(self.plan.pipeline.place)} stages",
                advice="a plan without a pipeline, or autopar export --to torchtitan",
            )

    def degree(self, kind: str) -> int:
        """Number of devices along the axes of a kind."""
        found = 1
        for n, of in zip(self.plan.mesh.shape, self.kinds, strict=True):
            found *= n if of == kind else 1
        return found

    @property
    def is_regathered(self) -> bool:
        """Whether most blocks gather their parameters again in backward."""
        again = Counter(self.blocks.values())
        return again[True] > 0 and again[True] >= again[False]

    @property
    def is_sequence_cut(self) -> bool:
        """Whether the tensor axis cuts positions between the modules whose weights it cuts."""
        cuts = Counter[str]()
        for name, d in self.plan.decisions.items() if "tensor" in self.kinds else ():
            if d.kind == "op" and not self._is_told(module_of(name)) and innermost_block(module_of(name)):
                cuts[cut_of(d, self.kinds.index("tensor"))] += 1
        return cuts["positions"] > cuts.total() - cuts["positions"]

    @property
    def dtype(self) -> str:
        """The dtype of parameters where products compute in it, without a precision; else empty."""
        return "" if self.plan.precision else self.plan.workload.dtype

    @property
    def local_rows(self) -> int:
        """Rows that one device of the data axes takes at once; 0 where the plan does not say."""
        shapes = list(self.plan.workload.inputs.values())
        parts = self.degree("replicate") * self.degree("shard") * self.plan.microbatches
        return shapes[0][0] // parts if shapes and shapes[0] and shapes[0][0] % parts == 0 else 0

    def unsaid(self, is_sequence_told: bool = False) -> Iterator[Unsaid]:
        """Decisions that no target takes; with `is_sequence_told`, one that cuts positions in blocks."""
        for axis in range(len(self.kinds)):
            yield from self._cuts_lost(axis, is_sequence_told)
        plan = self.plan
        if plan.kernels:
            yield Unsaid(f"kernels: {', '.join(plan.kernels)}", 0.0)
        if plan.offloaded:
            yield Unsaid(f"{len(plan.offloaded)} values that wait on the host: they stay on the device there", 0.0)
        odd = [name for name in plan.parameters if self._is_stored_in_parts(name) and self._is_odd(name)]
        if odd:
            yield Unsaid(f"{len(odd)} parameters gathered otherwise than most of their block: as these there", 0.0)

    def reshard_unsaid(self) -> Iterator[Unsaid]:
        """Blocks that differ in when they are gathered, for targets with one setting for all."""
        for block, is_again in self.blocks.items():
            if is_again != self.is_regathered and self.degree("shard") > 1:
                how = "again in backward" if is_again else "once"
                yield Unsaid(f"{block or 'parameters outside of blocks'}: gathered {how}", 0.0)

    def chunks_unsaid(self) -> Iterator[Unsaid]:
        """The chunks of the loss head, for targets that have none."""
        if self.plan.chunks > 1:
            yield Unsaid(f"the loss head in {self.plan.chunks} chunks of rows: logits are whole there", 0.0)

    def recompute_unsaid(self, remade: Remade) -> Iterator[Unsaid]:
        """Parts of the plan's recompute that modules that run again do not say."""
        needed = self.plan.needed
        for names, what in (
            (remade.outside, "recompute of {} values outside of blocks: saved there"),
            (remade.more, "{} values that the plan saves in modules that run again: made again there"),
        ):
            if names:
                yield Unsaid(what.format(len(names)), sum(needed[name][1] for name in names if name in needed))

    def _cuts_lost(self, axis: int, is_sequence_told: bool) -> Iterator[Unsaid]:
        """Ops that an axis cuts, and that are whole or cut in another way in other systems."""
        told = {"nothing", "positions"} if is_sequence_told else {"nothing"}
        n = self.plan.mesh.shape[axis]
        along = self.plan.mesh.axes[axis]
        seconds = dict[str, float]()
        for name, d in self.plan.decisions.items():
            cut = cut_of(d, axis) if d.kind == "op" else "nothing"
            if self.kinds[axis] == "tensor":
                is_told = cut in told if innermost_block(module_of(name)) else cut == "nothing"
                is_lost = not is_told and not self._is_told(module_of(name))
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

    def _is_stored_in_parts(self, parameter: str) -> bool:
        placements = self.plan.parameters[parameter].placements
        return any(p.is_shard and kind == "shard" for p, kind in zip(placements, self.kinds, strict=True))

    def _is_odd(self, parameter: str) -> bool:
        return self.blocks[folded(innermost_block(parameter))] != (parameter in self.plan.regathered)

    def _is_told(self, module: str) -> bool:
        """Whether a module is cut by a style, or stands between layers that are: it is cut with them."""
        around = {styled.rpartition(".")[0] for styled in self.styles}
        return folded(module) in self.styles or _stands_in(folded(module), around)


def _stands_in(module: str, around: Collection[str]) -> bool:
    return any(module == one or is_within(module, one) for one in around if one)


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


def _blocks(plan: Plan) -> dict[str, bool]:
    again: Counter[str] = Counter()
    for name in plan.parameters:
        size = plan.parameter_bytes[name]
        again[folded(innermost_block(name))] += size if name in plan.regathered else -size
    return {block: again[block] > 0 for block in sorted(again)}
