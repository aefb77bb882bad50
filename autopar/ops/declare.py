"""Rules that users declare with `autopar.rule`, and the ops that the tracer leaves whole because of them."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from autopar.letters import BadRule
from autopar.ops.entry import FACTS, PROVEN, SPELLINGS, Apply, Facts, check_marks
from autopar.ops.lookup import own_name
from autopar.sharding.notation import parse, public_name

# ops with a rule of a user's, by the names that graphs print: the call of `rule` and its line
WHOLE: dict[str, str] = {}


def rule(op: Any, text: str, linear: str = "") -> None:
    """Say how `op` may be cut, as in `rule("mm", "m k, k n -> m n", linear="x, y")`.

    `docs/rules.md` has the grammar. The op is a name of the vocabulary or one that a graph prints, a custom op's name
    (`"mylib::scan"`), the class of an autograd.Function, or torch's function itself. A mark is an obligation: what is
    cut behind a mask (`~`), reduced inside (`^`) or made here (`*`) needs a local form of the op, which computes
    something else on a part than on the whole.
    """
    name = _name(op)
    said = parse(_text("the rule ", text), _text("linear=", linear))
    check_marks(name, said)
    FACTS.setdefault(name, Facts()).rule = said
    frame: Any = sys._getframe(1)
    linearity = f", linear={linear!r}" if linear else ""
    at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    WHOLE[name] = f"autopar.rule({public_name(name)!r}, {text!r}{linearity})    {at}"


def users_rule(name: str) -> str:
    """The line of a user's rule, which no test proves; "" for a rule of autopar's."""
    if name in WHOLE:
        return WHOLE[name]
    return f"the entry of {name}" if name in FACTS and name not in PROVEN else ""


def rules_of_users() -> tuple[tuple[str, str], ...]:
    """The rules that no test of autopar proves, each with the name of its op."""
    return tuple(sorted((name, repr(facts.rule)) for name, facts in FACTS.items() if users_rule(name)))


def _text(what: str, given: Any) -> str:
    if not isinstance(given, str):
        raise BadRule(
            f"{what}{given!r} is not a text",
            advice='rule("mylib::scan", "b s! -> b s!"), with linear="x" where the op is linear in its first operand',
        )
    return given


def _name(op: Any) -> str:
    if isinstance(op, str) and op:
        space, colons, name = op.partition("::")
        return f"ops.{space}.{name}" + ("" if "." in name else ".default") if colons else op
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return Apply(op).__name__
    if callable(op) and not isinstance(op, type) and type(op).__name__ != "CustomOpDef":
        name = SPELLINGS[op][0].name if op in SPELLINGS else own_name(op)
        return name + ".default" if type(op).__name__ == "OpOverloadPacket" else name
    raise BadRule(
        f"{op!r} is not the name of an op",
        advice='rule("mm", "m k, k n -> m n", linear="x, y"), or rule("mylib::scan", "b s! -> b s!")',
    )
