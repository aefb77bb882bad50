"""`handed_on`: gathered copies of parameters that an op hands on, such as that of a table which is the head as well.

Whether a parameter is gathered again is a choice of its site. The edge behind the op that hands it on does not know it,
and its pieces count the copy until backward has read it. The program drops it, wherever it drops the parameter's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx

from autopar.graph.graph import info
from autopar.space.edge_passage import EdgePassage
from autopar.space.gradient_buckets import is_always
from autopar.space.lifetimes import Lifetimes
from autopar.space.memory import HandedOn, Piece
from autopar.space.schedule import Schedule
from autopar.space.wiring import Wiring


def regathered(wiring: Wiring, passage: EdgePassage, parameter: fx.Node) -> tuple[bool, ...]:
    """Whether a gathered copy is dropped after its use and gathered again, by the edge source's choice.

    The copy of a parameter that an op has handed on is dropped where that of the parameter always is.
    """
    source, owner = wiring.sites[passage.edge.source], wiring.site(parameter)
    is_handed_on = passage.value is not parameter and not source.regathered
    if is_handed_on and is_always(owner, owner.regathered):
        return (True,) * len(source.choices)
    return source.regathered


def handed_on(wiring: Wiring, schedule: Schedule, lifetimes: Lifetimes, pieces: Iterable[Piece]) -> Iterator[HandedOn]:
    """The copies that pieces count through to backward, of parameters that may be gathered again."""
    leaving = {edge.source: k for k, edge in reversed(list(enumerate(wiring.edges)))}
    clock = lifetimes.clock
    for piece in pieces:
        if piece.kind != "gathered parameters" or not piece.first < clock.n <= piece.last:
            continue
        value, taker = wiring.values[piece.place], wiring.takers[piece.place]
        parameter = lifetimes.parameters.owners[value]
        site = wiring.index[parameter]
        policies = wiring.sites[site].regathered
        is_kept = parameter in schedule.stays or info(taker).chunks > 1
        is_own = value is parameter or wiring.sites[wiring.edges[piece.place].source].regathered
        if is_own or is_kept or not any(policies):
            continue
        now = clock.forward(taker)
        is_ahead = piece.first < now
        begins = max(now + 1, schedule.gather_again(now, parameter).begins) if is_ahead else piece.last
        dropped = wiring.edges[leaving[site]].marked(policies)
        yield HandedOn(piece.place, piece.bytes, leaving[site], dropped, now + 1, begins - 1)
