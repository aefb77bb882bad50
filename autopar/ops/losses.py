"""Losses: elementwise ones, and those over the classes of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ops.entry import op
from autopar.ops.local import Form, Here, OpCall, cuts
from autopar.ops.spelling import parse
from autopar.runtime import forms
from autopar.runtime.ctc import ctc_losses
from autopar.sharding.notation import Rule


def pointwise_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """Without its reduction, which is the canonical form, the loss is pointwise; else None."""
    if arguments.get("reduction", "mean") != "none":
        return None
    return parse(
        "..., ..., ..., ... -> ..."
        if "logits" in arguments["op"]
        else "..., ... -> ..."
        if arguments["op"] in ("smooth_l1_loss", "soft_margin_loss", "kl_div")
        else "..., ..., ... -> ..."
    )


def cross_entropy(arguments: Mapping[str, Any]) -> Rule | None:
    """A sum over tokens and over the vocabulary, both of which may be cut.

    On a cut vocabulary the log-sum-exp counts once, and the target's logit on the device that has it. Without its
    reduction each token is by itself, and its classes stay whole.
    """
    logits = arguments["input"]
    target = arguments["target"]
    reduction = arguments.get("reduction", "mean")
    if (
        reduction == "mean"
        or "int" not in target.dtype
        or len(logits.shape) < 2
        or any(arguments.get(k) is not None for k in ("size_average", "reduce"))
    ):
        return None
    rest = " ".join(f"a{i}" for i in range(len(logits.shape) - 2))
    if reduction == "none":
        return parse(f"n c! {rest}, n {rest}, c! -> n {rest}")
    return parse(f"n c~ {rest}, n {rest}, c~ -> ")


def classes_of_part(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a loss over this device's part of the classes; None where they are whole."""
    lies = here.lies(0)
    if 1 not in lies.cuts:
        return None
    shape = call.arguments["input"].shape
    how = {k: v for k, v in kwargs.items() if k in ("input", "target", "weight", "ignore_index", "label_smoothing")}
    return forms.cross_entropy_part, {**how, "cuts": cuts(here, shape, lies, 1), "classes": shape[1]}


def exchanged(call: OpCall) -> tuple[int, int]:
    """All-reduces of a loss over cut classes: the maximum, the sum, and what weights add to them."""
    weighted = call.arguments.get("weight") is not None
    smoothed = bool(call.arguments.get("label_smoothing"))
    return 2 + weighted + (weighted and smoothed), 0


def ctc_loss(arguments: Mapping[str, Any]) -> Rule:
    """Sequences may be cut where each has a row of targets; nothing is cut where targets are concatenated."""
    if len(arguments["targets"].shape) == 1:
        return parse("t! n! c!, s!, n!, n! -> n!", linear="")
    return parse("t! n c!, n s!, n, n -> n", linear="")


def nll_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of log-probabilities by class, summed over rows or kept by row; None for a mean.

    Rows may be cut; a sum over cut rows is a P(sum).
    """
    reduction = arguments.get("reduction", "mean")
    if (
        reduction == "mean"
        or len(arguments["input"].shape) < 2
        or any(arguments.get(k) is not None for k in ("size_average", "reduce"))
    ):
        return None
    rest = " ".join(f"a{i}" for i in range(len(arguments["input"].shape) - 2))
    return parse(f"n c! {rest}, n {rest}, c! -> {'' if reduction == 'sum' else f'n {rest}'}", linear="x")


def margin_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """Without its reduction rows may be cut; else None."""
    if arguments.get("reduction", "mean") != "none" or len(arguments["input"].shape) != 2:
        return None
    if arguments["op"] == "multilabel_margin_loss":
        return parse("n c!, n c! -> n")
    return parse("n c!, n, c! -> n")


OLD = "size_average=None, reduce=None, reduction='mean'"  # two names that torch still takes, and what they became
op(
    "mse_loss",
    F.mse_loss,
    f"input:T, target:T, {OLD}, weight:T=None",
    rule=pointwise_loss,
    loss=True,
    keeps="input target",
)
op("l1_loss", F.l1_loss, f"input:T, target:T, {OLD}, weight:T=None", rule=pointwise_loss, loss=True)
op("smooth_l1_loss", F.smooth_l1_loss, f"input:T, target:T, {OLD}, beta=1.0", rule=pointwise_loss, loss=True)
op(
    "huber_loss",
    F.huber_loss,
    "input:T, target:T, reduction='mean', delta=1.0, weight:T=None",
    rule=pointwise_loss,
    loss=True,
)
op("soft_margin_loss", F.soft_margin_loss, f"input:T, target:T, {OLD}", rule=pointwise_loss, loss=True)
op("kl_div", F.kl_div, f"input:T, target:T, {OLD}, log_target=False", rule=pointwise_loss, loss=True)
op(
    "binary_cross_entropy",
    F.binary_cross_entropy,
    f"input:T, target:T, weight:T=None, {OLD}",
    rule=pointwise_loss,
    loss=True,
)
op(
    "binary_cross_entropy_with_logits",
    F.binary_cross_entropy_with_logits,
    f"input:T, target:T, weight:T=None, {OLD}, pos_weight:T=None",
    rule=pointwise_loss,
    loss=True,
)
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
    "multi_margin_loss",
    F.multi_margin_loss,
    f"input:T, target:T, p=1, margin=1.0, weight:T=None, {OLD}",
    rule=margin_loss,
    loss=True,
)
op("multilabel_margin_loss", F.multilabel_margin_loss, f"input:T, target:T, {OLD}", rule=margin_loss, loss=True)
op(
    "ctc_loss",
    ctc_losses,
    "log_probs:T, targets:T, input_lengths:T, target_lengths:T, blank=0, zero_infinity=False",
    torch.ops.autopar.ctc_losses,
    torch.ops.autopar.ctc_losses.default,
    rule=ctc_loss,
)
