"""Choose the function that computes an op on one device: the op itself with local shapes, or its local form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from autopar.graph.graph import TensorType, call_of, info, type_of
from autopar.letters import NotServed
from autopar.ops.entry import facts_of
from autopar.ops.local import OpCall, OpOnDevice, on_device
from autopar.runtime.collectives import TIME
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow
from autopar.sharding.strategies import Choice, Strategy

if TYPE_CHECKING:
    from autopar.codegen.local import Localiser


def form_of(at: Localiser, node: fx.Node, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that computes `node` on this device, and arguments with local shapes for whole ones."""
    op = node.target
    call = call_of(node)
    here = at.place(node)
    if info(node).in_time[0]:
        call, here = _among_all_turns(node, call, here)
    if call.random >= 0 and not facts_of(op.name).draws:
        raise NotServed(
            f"{op.name} draws random numbers, and has no form yet that draws the same under every plan",
            at=info(node).source,
            advice=_INSTEAD.get(op.name, _OTHERS),
        )
    return on_device(op, here, call, kwargs)


def _among_all_turns(node: fx.Node, call: OpCall, here: OpOnDevice) -> tuple[OpCall, OpOnDevice]:
    """A random op's call on the rows of all turns, and this device on a mesh whose first axis is time.

    By these the op draws, for the rows of one turn, the numbers that it would draw for them in the whole batch.
    """
    text, turns = info(node).in_time
    strategy = Strategy.parse(text)
    among = replace(
        here,
        mesh=DeviceMesh((turns, *here.mesh.shape), (TIME, *here.mesh.axes)),
        coordinate=(0, *here.coordinate),
        choice=Choice((strategy, *here.choice.strategies)),
    )
    lie = iter(strategy.operands)
    arguments = fx.map_arg(dict(node.kwargs), lambda n: _of_all_turns(type_of(n), next(lie), turns))
    outputs = tuple(_of_all_turns(t, f, turns) for t, f in zip(call.outputs, strategy.outputs, strict=True))
    return replace(call, arguments=arguments, outputs=outputs), among


def _of_all_turns(type_: TensorType, lies: Flow, turns: int) -> TensorType:
    if not lies.value.is_shard:
        return type_
    shape = (n * turns if d == lies.value.dim else n for d, n in enumerate(type_.shape))
    return replace(type_, shape=tuple(shape))


_INSTEAD = {
    "binomial": "torch.bernoulli of the probability, expanded by a dim of trials, and its sum",
    "feature_dropout": "torch.nn.functional.dropout2d or dropout3d",
    **dict.fromkeys(
        ("lstm'", "gru'", "rnn_tanh'", "rnn_relu'"), "dropout=0 where sequences are packed, or padded sequences"
    ),
}
_OTHERS = (
    "what draws from torch.rand, randn, normal, randint, randperm, bernoulli, multinomial, poisson or a method that "
    "fills a tensor (x.uniform_(), ...)"
)
