"""`AttentionScores`: the scores that the kernel of an attention computes, beside those that its work counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.sharding.cost_model import Heads
from autopar.sharding.mesh import DeviceMesh
from autopar.space.chosen import Chosen

_TILE = 64  # queries and keys of the squares of which a GPU computes whole ones in an attention


@dataclass(frozen=True, slots=True)
class AttentionScores:
    """The scores of attentions on a mesh of devices of one kind."""

    mesh: DeviceMesh
    kind: str  # the kind of device, by its kernels

    def lengths(self, chosen: Chosen, operand: int, dim: int) -> np.ndarray:
        """The local size of a dim as an attention computes it, which on a GPU is in whole tiles, by choice."""
        length = chosen.lengths(operand, dim, self.mesh)
        return np.ceil(length / _TILE) * _TILE if self.kind == "cuda" else length

    def computed(self, chosen: Chosen) -> np.ndarray:
        """The ratio of computed to useful scores of an attention, by choice."""
        more: np.ndarray = np.ones(len(chosen.choices))
        for operand in (0, 1):
            more *= self.lengths(chosen, operand, -2) / np.maximum(chosen.lengths(operand, -2, self.mesh), 1.0)
        return more

    def heads(self, chosen: Chosen, name: str, as_cut: tuple[str, np.ndarray] | None, length: np.ndarray) -> Heads:
        """The heads of an attention, and the share of scores that is computed."""
        is_causal = name.endswith(" causal")
        cut = as_cut[1] if as_cut is not None else np.zeros(len(chosen.choices), bool)
        # Where queries are cut, the work already counts only the scores that are computed.
        share = np.where(cut | (not is_causal), 1.0, 0.5)
        return Heads(chosen.operands[0].shape[-1], length, share, is_causal)

    def seen(self, chosen: Chosen, name: str, as_cut: tuple[str, np.ndarray] | None) -> np.ndarray | float:
        """The share of keys that the last part of a causal attention's cut queries sees, by choice."""
        if as_cut is None or not name.endswith(" causal"):
            return 1.0
        queries, keys = (chosen.operands[k].shape[-2] for k in (0, 1))
        held = chosen.lengths(0, -2, self.mesh)

        def pairs(rows: np.ndarray | int) -> np.ndarray:
            """Pairs of queries and keys in the first rows, each of which sees the keys up to its own place."""
            inside: np.ndarray = np.minimum(rows, keys)
            return inside**2 / 2 + (rows - inside) * keys

        return np.where(as_cut[1], (pairs(queries) - pairs(queries - held)) / (held * keys), 1.0)
