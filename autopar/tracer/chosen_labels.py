"""Labels that a mask chooses, put end to end for a CTC loss.

targets = labels.masked_select(mask)                    as the model says it: as many labels as there are
ctc_loss(log_probs, targets, lengths, mask.sum(-1))

order = argsort(~mask, 1)                               as it is captured: each row's labels come first in it
ctc_loss(log_probs, gather(labels, 1, order), lengths, mask.sum(-1))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import info, op_name, type_of
from autopar.ops.entry import facts_of
from autopar.tracer.chosen import Mask, are_alike
from autopar.tracer.chosen_calls import first_of, misfit
from autopar.tracer.recorder import Recorder


def ctc_losses(
    recorder: Recorder,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *how: Any,
) -> Any:
    """Handle a CTC loss whose targets are the labels that a mask chooses in each row of a batch."""
    chosen = recorder.values.chosen
    rows = first_of(recorder, (targets, log_probs, input_lengths, target_lengths))
    is_alone = not any(map(chosen.of, (log_probs, input_lengths, target_lengths)))
    if not is_alone or rows.rank != 2 or targets.dim() != 1 or rows.lead != rows.mask.shape:
        raise misfit(recorder, "a CTC loss", rows.mask)
    with chosen.recorded():
        counted = rows.mask.tensor.sum(-1)
    if not _counts(recorder.node(target_lengths), recorder.node(counted), rows.mask):
        raise chosen.letter(
            rows.mask, "ctc_loss gets them with other lengths than their numbers in each row", "mask.sum(-1)"
        )
    with chosen.recorded():
        order = torch.argsort((~rows.mask.tensor).to(torch.uint8), dim=1, stable=True)
        labels = rows.whole.gather(1, order)
        return torch.ops.autopar.ctc_losses(log_probs, labels, input_lengths, target_lengths, *how)


def _counts(lengths: fx.Node, counted: fx.Node, mask: Mask) -> bool:
    """Whether lengths are the numbers of true elements in each row of a mask, as `counted` has them."""
    lengths = _before_casts(lengths)
    if lengths.target is not counted.target or type_of(lengths).shape != type_of(counted).shape:
        return False
    operand = _before_casts(lengths.kwargs["input"])
    return type_of(operand).shape == mask.shape and are_alike(operand, mask.node)


def _before_casts(node: fx.Node) -> fx.Node:
    """The value behind casts and views of it."""
    while info(node).kind == "op" and (facts_of(op_name(node)).same or facts_of(op_name(node)).free):
        node = node.all_input_nodes[0]
    return node
