"""Normalisation over the last dims, over groups of channels, or over the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from autopar.ops.entry import op
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.products import grouped
from autopar.ops.rows import Row, rule_from, whole_dims
from autopar.runtime import forms, private
from autopar.sharding.notation import Rule


def over_last_dims(arguments: Mapping[str, Any]) -> Rule:
    """The normalised dims stay whole; every leading dim may be cut."""
    whole = whole_dims("d", len(arguments["normalized_shape"]))
    row = ["...", *whole]
    if arguments["op"] == "rms_norm":
        return rule_from([row, whole], [row], linear="y")
    return rule_from([row, whole, whole], [row], linear="y+z")


def group_norm(arguments: Mapping[str, Any]) -> Rule:
    """Rows and groups may be cut; the channels of a group and positions stay whole."""
    given = arguments["input"].shape
    channels = f"(g c:{given[1] // arguments['num_groups']}!)"
    row = ["n", channels, *whole_dims("s", len(given) - 2)]
    return rule_from([row, [channels], [channels]], [row], linear="y+z")


def batch_norm(arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of batch norm: batch, channels and positions may be cut.

    In training the local form sums statistics over the whole batch. With running statistics batch norm is a scale of
    each channel, and positions and batch are cut without a local form.
    """
    row = Row.of(arguments["input"])
    if len(row) < 2:
        return None
    if arguments.get("training", False):
        row = row.marked(None, "^")
    return _of_channels(arguments, row)


def instance_norm(arguments: Mapping[str, Any]) -> Rule:
    """Rows and channels may be cut; with running statistics, which are of all rows, only channels."""
    row = Row.of(arguments["input"]).whole()
    if len(arguments["outputs"]) == 1:
        row = row.replaced(0, "n")
    return _of_channels(arguments, row)


def _of_channels(arguments: Mapping[str, Any], row: Row) -> Rule:
    """The rule of a norm by channel with this row of dims; updated statistics are outputs too."""
    row = row.replaced(1, "c")
    updated = len(arguments["outputs"]) - 1
    return rule_from([row, *[["c"]] * 4], [row, *[["c"]] * updated], linear="" if updated else "u+v")


def weight_norm(arguments: Mapping[str, Any]) -> Rule:
    """The dim that keeps its own length may be cut.

    dim=-1, in torch, means one length of all: a single number, and all dims stay whole.
    """
    dim = arguments.get("dim", 0)
    rows = [Row(whole_dims(name, len(arguments[name].shape))) for name in ("v", "g")]
    if dim != -1:
        rows = [row.replaced(dim, "o") for row in rows]
    return rule_from(rows, rows[:1], linear="y")


def statistics_of_all(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of batch norm in training, where batch or positions are cut; else None."""
    lies = here.lies(0)
    axes = [here.mesh.axes[a] for d, order in lies.cuts.items() if d != 1 for a in order]
    if not axes or not call.arguments.get("training"):
        return None
    given = call.arguments["input"].shape
    how = {k: v for k, v in kwargs.items() if k != "training"}
    return forms.batch_norm_part, {
        **how,
        "axes": axes,
        "count": math.prod(given) // given[1],
        "updates": len(call.outputs) > 1,
    }


op(
    "layer_norm",
    F.layer_norm,
    "input:T, normalized_shape, weight:T=None, bias:T=None, eps=1e-05",
    rule=over_last_dims,
    second_size=(0, -1),
    keeps="input weight",
    makes=dict(cuda="8*rows", cpu="2*rows*itemsize"),
)
op(
    "rms_norm",
    F.rms_norm,
    "input:T, normalized_shape, weight:T=None, eps=None",
    rule=over_last_dims,
    second_size=(0, -1),
    keeps="input weight",
    makes=dict(cuda="4*rows", cpu="rows*itemsize + points*itemsize"),
)
op(
    "group_norm",
    F.group_norm,
    "input:T, num_groups, weight:T=None, bias:T=None, eps=1e-05",
    rule=group_norm,
    form=grouped,
    reads=2,
    keeps="input weight",
    makes=dict(cuda="8*groups", cpu="2*groups*itemsize"),
)
op(
    "batch_norm",
    F.batch_norm,
    "input:T, running_mean:T, running_var:T, weight:T=None, bias:T=None, training=False, momentum=0.1, eps=1e-05",
    writes="running_mean, running_var if training",
    rule=batch_norm,
    serves="^",
    form=statistics_of_all,
    reads=2,
    exchanges=(2, 1),
    second_size=(0, 1),
    keeps="input weight",
    makes=dict(cuda="8*channels", cpu="8*channels"),
)
op(
    "instance_norm",
    F.instance_norm,
    "input:T, running_mean:T=None, running_var:T=None, weight:T=None, bias:T=None, use_input_stats=True, "
    "momentum=0.1, eps=1e-05",
    writes="running_mean, running_var if use_input_stats",
    rule=instance_norm,
)
op("weight_norm", private.weight_norm, "v:T, g:T, dim=0", rule=weight_norm)
