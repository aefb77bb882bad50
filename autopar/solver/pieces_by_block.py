"""Which blocks of a model a piece of memory belongs to, and whether it is there all the time."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.space.memory import Piece
from autopar.space.space import Space
from autopar.stages.blocks import Units

STANDING = ("parameters", "gradients", "optimizer states", "inputs and buffers")


def standing_kind(piece: Piece, ops: int) -> str:
    """The kind of a piece that is there from forward to backward whatever runs between; "" of any other."""
    is_long = piece.kind in STANDING and piece.last - piece.first >= ops
    is_kept = piece.kind == "gathered parameters" and piece.first < ops <= piece.last
    return piece.kind if is_long or is_kept else ""


def is_sum(piece: Piece, ops: int) -> bool:
    """Whether a piece is a sum of gradients over micro-batches, which the first backward begins."""
    return piece.kind == "gradients" and piece.is_edge and bool(standing_kind(piece, ops))


def blocks_of_piece(piece: Piece, space: Space, units: Units) -> tuple[int, ...]:
    """The blocks whose stages hold a piece; a gradient is held where it is made."""
    edge = space.edges[piece.place] if piece.is_edge else None
    if edge is not None and piece.kind == "gradients":
        target = space.sites[edge.target].name
        if target not in units.anywhere:
            return (units.of.get(target, 0),)
    site = space.sites[edge.source if edge else piece.place].name
    return units.shared.get(site, (units.of.get(site, 0),))


def amount_of(piece: Piece, space: Space, picked: Sequence[int]) -> float:
    """Bytes of a piece under the picked choices."""
    place = space.edges[piece.place].place(picked) if piece.is_edge else picked[piece.place]
    return float(piece.bytes[place])
