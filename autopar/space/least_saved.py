"""`least_saved`: the bytes that every plan saves for backward, unless it recomputes some or leaves them on the host."""

from __future__ import annotations

import torch.fx as fx

from autopar.graph.graph import info, type_of
from autopar.space.lifetimes import Lifetimes


def least_saved(lifetimes: Lifetimes) -> int:
    """Bytes over all devices together, when backward begins, however values are sharded and converted.

    A device has at least its share of each memory whose values backward reads: as it was made, or of the part that is
    read, as it was converted. Parameters do not count, nor what their gathers bring, and neither do regions in chunks.
    """
    memories = lifetimes.memories
    found: dict[int, int] = {}
    for op in lifetimes.clock.ops:
        about = info(op)
        if about.checkpoint or about.chunks > 1:
            continue
        for value in lifetimes.kept[op].values:
            memory = memories.memory[value]
            if _is_activation(memories.owners[memory], lifetimes):
                part = min(type_of(value).nbytes, memories.bytes_of(memory))
                found[memory] = max(found.get(memory, 0), part)
    return sum(found.values())


def _is_activation(value: fx.Node, lifetimes: Lifetimes) -> bool:
    """Whether every micro-batch makes a value anew, in memory of its own."""
    parameters = lifetimes.parameters
    op = value.args[0] if info(value).kind == "part" else value
    is_of_parameters = op in parameters.owners or op in parameters.computed
    return info(op).kind == "op" and not is_of_parameters and op not in lifetimes.inner and bool(info(value).outputs)
