"""Broken compilers: each breaks one thing that the contract needs, and the equality tests must notice each of them."""

from __future__ import annotations

from dataclasses import replace

from autopar.codegen import joint, local
from autopar.runtime import collectives
from autopar.sharding import rules
from autopar.sharding.convert import LocalStep
from autopar.sharding.notation import parse

_parse_all, _op, _converted = LocalStep.parse_all, local.Localiser._op, local.Localiser._converted


def _steps(change):
    """Change the steps of every conversion as it is written out."""
    return lambda patch: patch.setattr(joint.LocalStep, "parse_all", staticmethod(lambda text: tuple(s for step in _parse_all(text) for s in change(step))))


def _wrong_adjoint(patch):
    """The gradient of a reduction is reduced again, as torch's own collectives do it."""

    def converted(self, *args):
        node = _converted(self, *args)
        if node.target is collectives.convert and "all_reduce" in node.args[1]:
            node.args = (node.args[0], node.args[1], node.args[1], node.args[3])
        return node

    patch.setattr(local.Localiser, "_converted", converted)


def _local_mean(patch):
    """A mean is divided by the count that this rank holds."""

    def op(self, node):
        _op(self, node)
        made = self.env[node]
        if made.op == "call_function" and isinstance(made.kwargs.get("other"), int):
            made.kwargs = {**made.kwargs, "other": made.kwargs["other"] // self.mesh.size}

    patch.setattr(local.Localiser, "_op", op)


def _unpadded(patch):
    """Only the first part of a gather counts."""
    patch.setitem(joint.STEPS, "all_gather", lambda x, axis, dim, size, blocks: collectives.all_gather(x, axis, dim, size, blocks).roll(1, dim))


MUTANTS = {
    "a reduction is dropped": _steps(lambda s: () if s.kind == "all_reduce" else (s,)),
    "a reduce-scatter forgets to reduce": _steps(lambda s: (replace(s, kind="slice"),) if s.kind == "reduce_scatter" else (s,)),
    "an axis is swapped": _steps(lambda s: (replace(s, axis={"dp": "tp", "tp": "dp"}[s.axis]),)),
    "a mean is divided by the local count": _local_mean,
    "a bias is added once per device": lambda patch: patch.setitem(rules.RULES, "linear", parse("... k, n k, n -> ... n", "x, y")),
    "a reduction's gradient is reduced again": _wrong_adjoint,
    "a lodged value is kept by every rank": lambda patch: patch.setitem(joint.STEPS, "lodge", lambda x, axis: x.clone()),
    "gathered parts are out of order": _unpadded,
    "a gradient buffer is handed out twice": lambda patch: patch.setattr(joint, "PASSES", tuple(p for p in joint.PASSES if p is not joint.own_gradients)),
    "gelu is called linear": lambda patch: patch.setitem(rules.RULES, "gelu", parse("... -> ...", "x")),
}
