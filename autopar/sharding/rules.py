"""How each op may be cut: one line an op.

Every line is a claim that `tests/sharding/test_rules.py` proves by running the op on shards. When the answer depends on an
argument, a function returns the same notation. The keys are the canonical ops of `autopar/tracer/vocabulary.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.letters import BadRule
from autopar.sharding.notation import Rule, parse

RuleOrFunction = Rule | Callable[[Mapping[str, Any]], Rule]
RULES: dict[str, RuleOrFunction] = {}


def rule(op: str, text: str, linear: str = "") -> None:
    """Say how `op` may be cut: `rule("mm", "m k, k n -> m n", linear="x, y")`. `docs/rules.md` has the grammar."""
    if not isinstance(op, str) or not op:
        raise BadRule(f"{op!r} is not the name of an op", advice='rule("mm", "m k, k n -> m n", linear="x, y")')
    RULES[op] = parse(text, linear)


def rule_for(*ops: str) -> Callable[[Callable[[Mapping[str, Any]], Rule]], Callable[[Mapping[str, Any]], Rule]]:
    """The same, where the line depends on the call: the function gets the arguments by name, tensors as `TensorType`."""

    def register(function: Callable[[Mapping[str, Any]], Rule]) -> Callable[[Mapping[str, Any]], Rule]:
        for op in ops:
            RULES[op] = function
        return function

    return register


def rule_of(op: str, arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of one call, or None where nobody wrote one."""
    found = RULES.get(op)
    return found(arguments) if callable(found) else found


# contractions; the bias is added once per sum, so where k is cut it must be P(sum) too
rule("linear",     "... k, n k, n -> ... n",  linear="x+z, y+z")
rule("mm",         "m k, k n -> m n",         linear="x, y")

# pointwise, linear
rule("identity",   "... -> ...",              linear="x")
rule("neg",        "... -> ...",              linear="x")
rule("add",        "..., ... -> ...",         linear="x+y")
rule("sub",        "..., ... -> ...",         linear="x+y")
rule("mul",        "..., ... -> ...",         linear="x, y")

# pointwise, not linear
for name in ("gelu", "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs"):
    rule(name,     "... -> ...")
rule("pow",        "..., ... -> ...")
rule("mse_loss",   "..., ... -> ...")          # reduction="none": the canonical form


@rule_for("div")
def div(arguments: Mapping[str, Any]) -> Rule:
    """A quotient that is rounded is not linear."""
    return parse("..., ... -> ...", linear="" if arguments.get("rounding_mode") else "x")


@rule_for("to")
def to(arguments: Mapping[str, Any]) -> Rule:
    """A cast from or to whole numbers is not linear."""
    floats = all("float" in str(dtype) for dtype in (arguments["input"].dtype, arguments["dtype"]))
    return parse("... -> ...", linear="x" if floats else "")


@rule_for("layer_norm")
def layer_norm(arguments: Mapping[str, Any]) -> Rule:
    """The normalised dims stay whole; every leading dim may be cut."""
    whole = " ".join(f"d{i}!" for i in range(len(arguments["normalized_shape"])))
    return parse(f"... {whole}, {whole}, {whole} -> ... {whole}", linear="y+z")


@rule_for("sum")
def sum_(arguments: Mapping[str, Any]) -> Rule:
    """A summed dim may be cut and leaves P(sum); kept, it is a dim of size one in the output."""
    rank = len(arguments["input"].shape)
    dims = arguments.get("dim")
    dims = range(rank) if dims is None else (dims,) if isinstance(dims, int) else dims
    summed = {d % rank for d in dims} if rank else set()
    letters = [f"a{i}" for i in range(rank)]
    kept = ["1" if i in summed else letters[i] for i in range(rank) if i not in summed or arguments.get("keepdim")]
    return parse(f"{' '.join(letters)} -> {' '.join(kept)}", linear="x")
