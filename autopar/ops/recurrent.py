"""Recurrent layers, whose weights come as one list."""

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


for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    op(
        name,
        getattr(torch, name),
        "input:T, hx:T, params:T, has_biases, num_layers, dropout, train, bidirectional, batch_first",
        rule=recurrent,
    )
