"""Recurrent layers, whose weights come as one list, and their cells, which make one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ops.entry import op
from autopar.ops.spelling import parse, whole_dims
from autopar.sharding.notation import Rule


def recurrent(arguments: Mapping[str, Any]) -> Rule | None:
    """The batch may be cut; time and features stay whole. None for packed sequences."""
    given = arguments["input"]
    if not isinstance(arguments["params"], (tuple, list)) or isinstance(given, (tuple, list)) or len(given.shape) != 3:
        return None
    states = arguments["hx"] if isinstance(arguments["hx"], (tuple, list)) else (arguments["hx"],)
    row = "b t! {}!" if arguments["batch_first"] else "t! b {}!"
    weights = [" ".join(whole_dims(f"w{k}_", len(w.shape))) for k, w in enumerate(arguments["params"])]
    held = [f"l! b h{k}!" for k in range(len(states))]
    return parse(f"{', '.join([row.format('i'), *held, *weights])} -> {', '.join([row.format('o'), *held])}")


def one_step(arguments: Mapping[str, Any]) -> Rule | None:
    """The batch may be cut; features stay whole. None for a row without a batch."""
    hx = arguments["hx"]
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    if len(arguments["input"].shape) != 2:
        return None
    rows = ["b i!", *(f"b h{k}!" for k in range(len(states)))]
    weights = ["g! i!", "g! h0!", "g!", "g!"]
    return parse(f"{', '.join([*rows, *weights])} -> {', '.join(['b h0!', 'b h1!'][: len(states)])}")


for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    op(
        name,
        getattr(torch, name),
        "input:T, hx:T, params:T, has_biases, num_layers, dropout, train, bidirectional, batch_first",
        rule=recurrent,
    )
for name in ("lstm_cell", "gru_cell"):
    op(name, getattr(torch, name), "input:T, hx:T, w_ih:T, w_hh:T, b_ih:T=None, b_hh:T=None", rule=one_step)
