"""`AttentionScores`: the scores that the kernel of an attention computes, beside those that its work counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.graph.graph import call_of
from autopar.ops.attention import keys_at_once, keys_seen, sees_of
from autopar.ops.entry import facts_of
from autopar.ops.local import OpOnDevice
from autopar.sharding.attention_ways import DESCRIBED
from autopar.sharding.cost_model import Heads
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.strategies import Choice
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

    def heads(self, chosen: Chosen, as_cut: tuple[str, np.ndarray] | None, length: np.ndarray) -> Heads:
        """The heads of an attention, and the share of scores that is computed."""
        call = call_of(chosen.node)
        is_causal = sees_of(call).right == 0
        cut = as_cut[1] if as_cut is not None else np.zeros(len(chosen.choices), bool)
        is_own = cut | (chosen.op == DESCRIBED)
        length = np.array(
            [self._keys_at_a_time(chosen, choice, is_causal) if own else plain
             for choice, own, plain in zip(chosen.choices, is_own, length, strict=True)], float
        )  # fmt: skip
        # Where queries are cut, the work already counts only the scores that are computed.
        share = np.where(cut | (not is_causal) | (chosen.op == DESCRIBED), 1.0, 0.5)
        return Heads(chosen.operands[0].shape[-1], length, share, is_causal)

    def _keys_at_a_time(self, chosen: Chosen, choice: Choice, is_causal: bool) -> float:
        """Keys of a plain mask under which a kernel has as much to do as on the fullest device."""
        call = call_of(chosen.node)
        here = OpOnDevice.fullest(self.mesh, choice)
        keys = keys_at_once(call, here)
        if self.kind == "cuda":
            keys = -(-keys // _TILE) * _TILE
        if chosen.op != DESCRIBED:
            return keys
        return min(keys, keys_seen(call, here) * (2 if is_causal else 1))

    def seen(self, chosen: Chosen, as_cut: tuple[str, np.ndarray] | None) -> np.ndarray | float:
        """The share of scores that the fullest device computes in a form of autopar's own, by choice."""
        share = facts_of(chosen.op).scores
        assert share is not None
        cut = as_cut[1] if as_cut is not None else np.zeros(len(chosen.choices), bool)
        is_own = cut | (chosen.op == DESCRIBED)
        call = call_of(chosen.node)
        return np.array(
            [share(call, OpOnDevice.fullest(self.mesh, choice)) if own else 1.0
             for choice, own in zip(chosen.choices, is_own, strict=True)]
        )  # fmt: skip
