"""Recurrent layers, whose weights come as one list, and their cells, which make one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ops.entry import each
from autopar.ops.rows import rule_from, whole_dims
from autopar.sharding.notation import Rule


def recurrent(arguments: Mapping[str, Any]) -> Rule | None:
    """The batch may be cut; time and features stay whole. None for packed sequences."""
    given = arguments["input"]
    if not isinstance(arguments["params"], (tuple, list)) or isinstance(given, (tuple, list)) or len(given.shape) != 3:
        return None
    states = arguments["hx"] if isinstance(arguments["hx"], (tuple, list)) else (arguments["hx"],)
    leading = ["b", "t!"] if arguments["batch_first"] else ["t!", "b"]
    weights = [whole_dims(f"w{k}_", len(w.shape)) for k, w in enumerate(arguments["params"])]
    held = [["l!", "b", f"h{k}!"] for k in range(len(states))]
    return rule_from([[*leading, "i!"], *held, *weights], [[*leading, "o!"], *held])


def one_step(arguments: Mapping[str, Any]) -> Rule | None:
    """The batch may be cut; features stay whole. None for a row without a batch."""
    hx = arguments["hx"]
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    if len(arguments["input"].shape) != 2:
        return None
    held = [["b", f"h{k}!"] for k in range(len(states))]
    weights = [["g!", "i!"], ["g!", "h0!"], ["g!"], ["g!"]]
    return rule_from([["b", "i!"], *held, *weights], held)


each(
    "lstm gru rnn_tanh rnn_relu",
    "input:T, hx:T, params:T, has_biases, num_layers, dropout, train, bidirectional, batch_first",
    homes=[torch],
    rule=recurrent,
)
each("lstm_cell gru_cell", "input:T, hx:T, w_ih:T, w_hh:T, b_ih:T=None, b_hh:T=None", rule=one_step)
