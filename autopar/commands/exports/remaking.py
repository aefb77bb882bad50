"""`Remade`: the recompute of a plan as torch.utils.checkpoint runs it.

A plan names the values that backward makes again; torch runs the forward of a module again, and may be told which of
its ops have their results saved. So a module of each block is run again: the one that all recomputed values of the
block stand in. Its products and fused attentions that the plan does not recompute are saved, except the last, which
nothing behind it in the module reads. All else that stands there is cheap, and is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autopar.graph.layers import folded, innermost_block
from autopar.sharding.attention_ways import ATTENTIONS
from autopar.solver.plan import Plan

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")

# Results of a module that are saved: what computes them ("product", "convolution", "attention"), and its number among
# these in the order in which they run.
SavedResults = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Remade:
    """Modules that backward runs again, and what of the plan's recompute is not told by them."""

    modules: dict[str, SavedResults]  # The name of each module, with the results that are saved in it.
    outside: tuple[str, ...]  # values that the plan recomputes outside of these modules
    more: tuple[str, ...]  # values that the plan saves, and that are made again when a module runs again

    @staticmethod
    def of(plan: Plan) -> Remade:
        """The modules to run again for a plan."""
        together: dict[str, str] = {}
        for name in sorted(plan.recomputed):
            module = module_of(name)
            if block := innermost_block(module):
                together[block] = _common(together.get(block, module), module)
        callers = {module_of(name) for name in plan.decisions}
        chosen = _outermost({_called(module, block, callers) for block, module in together.items()})
        return Remade._of(plan, {module: _saved(plan, module) for module in chosen})

    @staticmethod
    def in_blocks(plan: Plan) -> Remade:
        """All of every block, if the plan recomputes in any: what others call full activation checkpointing."""
        blocks = _outermost({block for name in plan.parameters if (block := innermost_block(name))})
        is_any = any(_is_in_one(name, blocks) for name in plan.recomputed)
        return Remade._of(plan, dict.fromkeys(blocks, frozenset()) if is_any else {})

    @staticmethod
    def _of(plan: Plan, modules: dict[str, SavedResults]) -> Remade:
        outside = [name for name in sorted(plan.recomputed) if not _is_in_one(name, modules)]
        more = [name for module, saved in modules.items() for name in _made_too(plan, module, saved)]
        return Remade(modules, tuple(outside), tuple(more))

    def patterns(self, plan: Plan) -> dict[str, SavedResults]:
        """The modules by patterns, where all layers of a pattern have the same saved results, else by names."""
        paths = {module for name in plan.decisions for module in _around(module_of(name))}
        found: dict[str, SavedResults] = {}
        for module, saved in self.modules.items():
            pattern = folded(module)
            alike = [path for path in paths if folded(path) == pattern]
            is_same = all(self.modules.get(path) == saved for path in alike)
            found[pattern if is_same else module] = saved
        return found


def module_of(name: str) -> str:
    """The module of an op or of a conversion of its operand."""
    return name.rpartition("/")[0]


def is_within(name: str, module: str) -> bool:
    """Whether an op, or a module, stands in a module."""
    return name.startswith((f"{module}/", f"{module}."))


def products(plan: Plan, module: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Names of the products and fused attentions of a module as they run, with their kinds and numbers."""
    counted: dict[str, int] = {}
    for name, d in plan.decisions.items():
        kind = _kind(d.op) if d.kind == "op" and is_within(name, module) else ""
        if kind:
            yield name, (kind, counted.setdefault(kind, 0))
            counted[kind] += 1


def _kind(op: str) -> str:
    if op in _PRODUCTS:
        return "product"
    if op in ATTENTIONS:
        return "attention"
    return "convolution" if op.startswith("conv") else ""


def _saved(plan: Plan, module: str) -> SavedResults:
    *before, _ = [*products(plan, module)] or [("", ("", 0))]
    return frozenset(result for name, result in before if name not in plan.recomputed)


def _made_too(plan: Plan, module: str, saved: SavedResults) -> list[str]:
    """Values of a module that the plan saves, and that are made again when the module runs again.

    What the last op of the module makes is held by what reads it behind the module.
    """
    ops = [name for name, d in plan.decisions.items() if d.kind == "op" and is_within(name, module) and ":" not in name]
    held = {name for name, result in products(plan, module) if result in saved} | set(ops[-1:])
    return [n for n in plan.needed if is_within(n, module) and n not in plan.recomputed and n not in held]


def _common(one: str, other: str) -> str:
    """The innermost module around two."""
    parts = []
    for here, there in zip(one.split("."), other.split("."), strict=False):
        if here != there:
            break
        parts.append(here)
    return ".".join(parts)


def _called(module: str, block: str, callers: set[str]) -> str:
    """The innermost module around one, within its block, that runs ops itself.

    A ModuleList is never called, so that wrapping one would do nothing.
    """
    while module != block and module not in callers:
        module = module.rpartition(".")[0]
    return module


def _is_in_one(name: str, modules: Collection[str]) -> bool:
    return any(is_within(name, module) for module in modules)


def _outermost(modules: set[str]) -> list[str]:
    return sorted(module for module in modules if not _is_in_one(module, modules))


def _around(module: str) -> Iterator[str]:
    """A module and the modules around it."""
    while module:
        yield module
        module = module.rpartition(".")[0]
