"""Losses: elementwise ones, and those over the classes of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ops.entry import RuleFunction, each, op
from autopar.ops.exchange import Along
from autopar.ops.local import Form, Here, OpCall, cuts
from autopar.ops.rows import Row, parse, rule_from
from autopar.runtime import forms
from autopar.runtime.ctc import ctc_losses
from autopar.sharding.notation import Rule


def unreduced(line: str, rank: int | None = None) -> RuleFunction:
    """Make the rule function of a loss without its reduction, which is the canonical form; None with it.

    A `rank` is that of a batch: None without one, where torch has rules of its own.
    """

    def rule(arguments: Mapping[str, Any]) -> Rule | None:
        is_batch = rank in (None, len(arguments["input"].shape))
        return parse(line) if is_batch and arguments.get("reduction", "mean") == "none" else None

    return rule


def cross_entropy(arguments: Mapping[str, Any]) -> Rule | None:
    """A sum over tokens and over the vocabulary, both of which may be cut.

    On a cut vocabulary the log-sum-exp counts once, and the target's logit on the device that has it. Without its
    reduction each token is by itself, and its classes stay whole.
    """
    if "int" not in arguments["target"].dtype:
        return None
    is_sum = arguments.get("reduction", "mean") == "sum"
    return _over_classes(arguments, "c~" if is_sum else "c!")


def nll_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of log-probabilities by class, summed over rows or kept by row; None for a mean.

    Rows may be cut; a sum over cut rows is a P(sum).
    """
    return _over_classes(arguments, "c!", linear="x")


def _over_classes(arguments: Mapping[str, Any], classes: str, linear: str = "") -> Rule | None:
    """The rule of a loss by classes, the second dim of its input; None for a mean and for one row."""
    reduction = arguments.get("reduction", "mean")
    row = Row.of(arguments["input"])
    is_old = any(arguments.get(k) is not None for k in ("size_average", "reduce"))
    if reduction == "mean" or len(row) < 2 or is_old:
        return None
    target = row.without(1)
    return rule_from([row.replaced(1, classes), target, [classes]], [() if reduction == "sum" else target], linear)


def classes_of_part(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a loss over this device's part of the classes; None where they are whole."""
    lies = here.lies(0)
    if 1 not in lies.cuts:
        return None
    shape = call.arguments["input"].shape
    how = {k: v for k, v in kwargs.items() if k in ("input", "target", "weight", "ignore_index", "label_smoothing")}
    return forms.cross_entropy_part, {**how, "cuts": cuts(here, shape, lies, 1), "classes": shape[1]}


def exchanged(call: OpCall, along: Along | None) -> tuple[int, int]:
    """All-reduces of a loss over cut classes: the maximum, the sum, and what weights add to them."""
    weighted = call.arguments.get("weight") is not None
    smoothed = bool(call.arguments.get("label_smoothing"))
    return 2 + weighted + (weighted and smoothed), 0


def ctc_loss(arguments: Mapping[str, Any]) -> Rule:
    """Sequences may be cut where each has a row of targets; nothing is cut where targets are concatenated."""
    if len(arguments["targets"].shape) == 1:
        return parse("t! n! c!, s!, n!, n! -> n!", linear="")
    return parse("t! n c!, n s!, n, n -> n", linear="")


OLD = "size_average=None, reduce=None, reduction='mean'"  # two names that torch still takes, and what they became
LOSS: dict[str, Any] = dict(homes=[F], loss=True)
OF_TWO = unreduced("..., ... -> ...")
OF_THREE = unreduced("..., ..., ... -> ...")
each("mse_loss", f"input:T, target:T, {OLD}, weight:T=None", rule=OF_THREE, keeps="input target", **LOSS)
each("l1_loss", f"input:T, target:T, {OLD}, weight:T=None", rule=OF_THREE, **LOSS)
each("smooth_l1_loss", f"input:T, target:T, {OLD}, beta=1.0", rule=OF_TWO, **LOSS)
each("huber_loss", "input:T, target:T, reduction='mean', delta=1.0, weight:T=None", rule=OF_THREE, **LOSS)
each("soft_margin_loss", f"input:T, target:T, {OLD}", rule=OF_TWO, **LOSS)
each("kl_div", f"input:T, target:T, {OLD}, log_target=False", rule=OF_TWO, **LOSS)
each("binary_cross_entropy", f"input:T, target:T, weight:T=None, {OLD}", rule=OF_THREE, **LOSS)
each(
    "binary_cross_entropy_with_logits",
    f"input:T, target:T, weight:T=None, {OLD}, pos_weight:T=None",
    rule=unreduced("..., ..., ..., ... -> ..."),
    **LOSS,
)
each(
    "multi_margin_loss",
    f"input:T, target:T, p=1, margin=1.0, weight:T=None, {OLD}",
    rule=unreduced("n c!, n, c! -> n", rank=2),
    **LOSS,
)
each("multilabel_margin_loss", f"input:T, target:T, {OLD}", rule=unreduced("n c!, n c! -> n", rank=2), **LOSS)
op(
    "cross_entropy",
    F.cross_entropy,
    "input:T, target:T, weight:T=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
    "label_smoothing=0.0",
    rule=cross_entropy,
    serves="~",
    form=classes_of_part,
    exchanges=exchanged,
    counts="c",
    second_size=(0, -1),
    keeps="target",
    makes=dict(cuda="points*itemsize", cpu="points*itemsize"),  # the log-probabilities
    # the gradient of the log-probabilities; where classes are cut, a scattered one beside another
    work=("0", "points*itemsize"),
    reach="classes",
)
op(
    "nll_loss",
    F.nll_loss,
    "input:T, target:T, weight:T=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'",
    rule=nll_loss,
    reach="classes",
)
op(
    "ctc_loss",
    ctc_losses,
    "log_probs:T, targets:T, input_lengths:T, target_lengths:T, blank=0, zero_infinity=False",
    torch.ops.autopar.ctc_losses,
    torch.ops.autopar.ctc_losses.default,
    rule=ctc_loss,
)
