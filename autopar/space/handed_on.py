"""`handed_on`: gathered copies of parameters that an op hands on, such as that of a table which is the head as well.

Whether a parameter is gathered again is a choice of its site. The edge behind the op that hands it on does not know it,
and its pieces count the copy until backward has read it. The program drops it, wherever it drops the parameter's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.graph.graph import info
from autopar.space.lifetimes import Lifetimes
from autopar.space.memory import HandedOn, Piece
from autopar.space.schedule import Schedule
from autopar.space.wiring import Wiring


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
