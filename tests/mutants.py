"""Broken compilers: each breaks one thing that the contract needs, and the equality tests must notice each of them."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace

import torch
import torch.nn.functional as F

from autopar.codegen import joint_passes, local
from autopar.graph.graph import op_name
from autopar.ops.entry import FACTS
from autopar.runtime import collectives, forms, random
from autopar.sharding.convert import LocalStep
from autopar.sharding.notation import parse
from autopar.tracer import passes

_parse_all, _op, _converted = LocalStep.parse_all, local.Localiser._op, local.Localiser._converted


def _steps(change):
    """Change the steps of every conversion as it is written out."""
    return lambda patch: patch.setattr(
        joint_passes.LocalStep,
        "parse_all",
        staticmethod(lambda text: tuple(s for step in _parse_all(text) for s in change(step))),
    )


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
    patch.setitem(
        joint_passes.STEPS,
        "all_gather",
        lambda x, axis, dim, size, blocks: collectives.all_gather(x, axis, dim, size, blocks).roll(1, dim),
    )


MUTANTS = {
    "a reduction is dropped": _steps(lambda s: () if s.kind == "all_reduce" else (s,)),
    "a reduce-scatter forgets to reduce": _steps(
        lambda s: (replace(s, kind="slice"),) if s.kind == "reduce_scatter" else (s,)
    ),
    "an axis is swapped": _steps(lambda s: (replace(s, axis={"dp": "tp", "tp": "dp"}.get(s.axis, s.axis)),)),
    "a mean is divided by the local count": _local_mean,
    "a bias is added once per device": lambda patch: patch.setattr(
        FACTS["linear"], "rule", parse("... k, n k, n -> ... n", "x, y")
    ),
    "a reduction's gradient is reduced again": _wrong_adjoint,
    "a lodged value is kept by every rank": lambda patch: patch.setitem(
        joint_passes.STEPS, "lodge", lambda x, axis: x.clone()
    ),
    "gathered parts are out of order": _unpadded,
    "a gradient buffer is handed out twice": lambda patch: patch.setattr(
        joint_passes, "PASSES", tuple(p for p in joint_passes.PASSES if p is not joint_passes.own_gradients)
    ),
    "gelu is called linear": lambda patch: patch.setattr(FACTS["gelu"], "rule", parse("... -> ...", "x")),
}


def _unmasked_vocabulary(patch):
    """Tokens of another device's vocabulary look up row 0 of this one's."""
    patch.setattr(
        forms,
        "embedding_part",
        lambda input, weight, cuts, padding_idx=None: F.embedding(
            torch.where(((place := input - forms.start_of(weight, cuts)) >= 0) & (place < weight.shape[0]), place, 0),
            weight,
        ),
    )


_reduced, _cross_entropy_part = forms.reduced, forms.cross_entropy_part

GPT2_MUTANTS = {
    "the vocabulary is not masked": _unmasked_vocabulary,
    "every device counts the log-sum": lambda patch: patch.setattr(
        forms, "reduced", lambda x, step, axes: x if step == "lodge" else _reduced(x, step, axes)
    ),
    "the sum of exponentials is not reduced": lambda patch: patch.setattr(
        forms, "reduced", lambda x, step, axes: x if step == "all_reduce" else _reduced(x, step, axes)
    ),
    "ignored targets count": lambda patch: patch.setattr(
        forms, "cross_entropy_part", lambda **how: _cross_entropy_part(**{**how, "ignore_index": -1})
    ),
    "draws go by the place in the part": lambda patch: patch.setattr(random, "start_of", lambda like, cuts: 0),
    "every random op draws the same": lambda patch: patch.setattr(
        forms, "kept", lambda key, op, *rest: random.kept(key, 0, *rest)
    ),
    "a fused weight is cut straight through": lambda patch: patch.setattr(
        collectives, "_by_parts", lambda x, dim, parts, blocks: x
    ),
}


def _without_exchange(form, left_out):
    """A local form whose n-th message is not sent: each device goes on with what it holds."""

    def patched(patch):
        whole, sent = getattr(forms, form), threading.local()

        @functools.wraps(whole)
        def counted(*args, **how):
            sent.count = 0
            return whole(*args, **how)

        def unless_left_out(send):
            def sends(x, *how):
                if how[0] == "lodge":
                    return send(x, *how)
                sent.count += 1
                return x if sent.count == left_out + 1 else send(x, *how)

            return sends

        patch.setattr(forms, form, counted)
        patch.setattr(forms, "reduced", unless_left_out(forms.reduced))
        patch.setattr(forms, "exchanged", unless_left_out(forms.exchanged))

    return patched


# messages of each form, in forward and then in backward: one taken out at a time
EXCHANGE_MUTANTS = {
    f"message {k} of {form} is not sent": (form, _without_exchange(form, k))
    for form, count in {
        "amax_part": 2,
        "logsumexp_part": 2,
        "cross_entropy_part": 4,
        "batch_norm_part": 3,
        "cumsum_part": 1,
    }.items()
    for k in range(count)
}


EXCHANGE_MUTANTS["message 1 of cumsum_part is not sent"] = (
    "cumsum_part",
    lambda patch: patch.setattr(forms, "exchanged", lambda x, axes: forms.reduced(x, "all_reduce", axes)),
)


def instead(stage, sound, broken):
    """Let a broken pass run where the sound one does, in the PASSES of the module `stage`."""
    return lambda patch: patch.setattr(stage, "PASSES", tuple(broken if p is sound else p for p in stage.PASSES))


def _forgets_factors(graph):
    """The factors of an addmm are left out where it becomes a linear."""
    for node in graph.nodes:
        if op_name(node) == "addmm":
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("alpha", "beta")}
    passes.addmm_is_linear(graph)


# Mutants that need a model of their own, because neither the MLP nor GPT-2 has what they break. Beside each a function
# of that model (`FunctionModel`, with a weight of 6 by 12) and its input of 6 by 6.
OWN_MUTANTS = {
    "the factors of an addmm are lost": (
        instead(passes, passes.addmm_is_linear, _forgets_factors),
        lambda m, x: torch.addmm(m.weight[0], x, m.weight, beta=0.5, alpha=2.0).pow(3).sum(),
    ),
}
