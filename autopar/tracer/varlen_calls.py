"""Varlen attention of torch and of flash_attn, and transformers' own calls of it, as the op of attention.

Boundaries of sequences that lie end to end become a number of its sequence for each place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.letters import NotServed
from autopar.runtime.sees import Sees
from autopar.tracer.described import Described, Given, check_shapes
from autopar.tracer.place import source

_PACKAGES = ("flash_attn", "flash_attn_interface")  # versions 2 and 3
_OF_TRANSFORMERS = frozenset(
    "query_states key_states value_states attention_mask query_length is_causal position_ids softmax_scale "
    "sliding_window use_top_left_mask softcap deterministic cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "target_dtype attn_implementation kwargs".split()
)


class VarlenCalls:
    """The calls of varlen attention in one capture."""

    def __init__(self, described: Described) -> None:
        self.described = described

    def answers(self) -> Iterator[tuple[Any, Callable[[Given], Any]]]:
        """The functions that are answered, and how, of the modules that are imported."""
        if (module := sys.modules.get("torch.nn.attention.varlen")) is not None:
            yield module.varlen_attn, self.packed
        for package in filter(None, map(sys.modules.get, _PACKAGES)):
            yield getattr(package, "flash_attn_varlen_func", None), self.packed
            yield getattr(package, "flash_attn_func", None), self.padded
        if (module := sys.modules.get("transformers.modeling_flash_attention_utils")) is not None:
            yield module._flash_attention_forward, self.of_transformers

    def packed(self, given: Given) -> Tensor:
        """The op of a call on sequences end to end, [t, heads, width]."""
        sees = given.sees("cu_seq_q", "cu_seqlens_q", "cu_seq_k", "cu_seqlens_k", "enable_gqa", "num_splits")
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in given.first_three())
        check_shapes(query, key, value, given.arguments.get("enable_gqa", True))
        boundaries = given.first("cu_seq_q", "cu_seqlens_q")
        others = given.first("cu_seq_k", "cu_seqlens_k")
        documents = self._documents(given.name, boundaries, others, query.shape[-2])
        return self.described.attend(query, key, value, sees, documents).squeeze(0).transpose(0, 1)

    def padded(self, given: Given) -> Tensor:
        """The op of a call on a batch, [b, s, heads, width]."""
        sees = given.sees()
        query, key, value = (x.transpose(1, 2) for x in given.first_three())
        check_shapes(query, key, value, True)
        _refuse_unequal(given.name, query, key, sees)
        return self.described.attend(query, key, value, sees).transpose(1, 2)

    def of_transformers(self, given: Given) -> Tensor:
        """The op of a call on a batch by transformers, which would take it apart by its padding.

        A mask of padding, boundaries, or places that begin anew at each sequence say which of them see each other.
        """
        given.refuse_others(_OF_TRANSFORMERS)
        query, key, value = (x.transpose(1, 2) for x in self._in_target_dtype(given))
        sees = _sees_of_transformers(given, query.shape[-2], key.shape[-2])
        check_shapes(query, key, value, True)
        _refuse_unequal(given.name, query, key, sees)
        sinks = given.arguments["kwargs"].get("s_aux")
        mask = given.first("attention_mask")
        places = given.first("position_ids")
        boundaries = given.several("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        once = self.described.once
        node = self.described.recorder.node
        documents = counts = None
        if mask is not None:
            counts = once(("counts", node(mask)), mask.bool)
            # Queries of padding see padding alone, which does not count: they get zeros.
            documents = once(("padding", node(mask)), counts.long)
        elif all(one is not None for one in boundaries):
            return self._flattened(given.name, [query, key, value], sees, boundaries, sinks)
        elif places is not None and query.shape[0] == 1 and places.shape[-1] > 1:
            documents = once(("places", node(places)), lambda: (places.view(1, -1) == 0).cumsum(-1))
        return self.described.attend(query, key, value, sees, documents, counts, sinks).transpose(1, 2)

    def _flattened(
        self, name: str, operands: list[Tensor], sees: Sees, boundaries: list[Any], sinks: Tensor | None
    ) -> Tensor:
        """The op on a batch whose sequences lie end to end."""
        batch, heads, length, _ = operands[0].shape
        query, key, value = (
            x.transpose(1, 2).reshape(1, batch * length, *x.shape[1::2]).transpose(1, 2) for x in operands
        )
        documents = self._documents(name, boundaries[0], boundaries[1], batch * length)
        out = self.described.attend(query, key, value, sees, documents, None, sinks)
        return out.transpose(1, 2).reshape(batch, length, heads, -1)

    def _documents(self, name: str, boundaries: Tensor, others: Tensor | None, length: int) -> Tensor:
        """The number of each place's sequence; places behind the last boundary have one of their own."""
        recorder = self.described.recorder
        node = recorder.node(boundaries)
        if others is None or recorder.node(others) is not node:
            raise NotServed(
                f"{name} has other boundaries of keys than of queries",
                at=source(),
                advice="one tensor of boundaries for both, which is one input; of transformers position_ids alone",
            )

        def number() -> Tensor:
            places = torch.arange(length, dtype=boundaries.dtype)
            return torch.bucketize(places, boundaries[1:], right=True).unsqueeze(0)

        return self.described.once(("boundaries", length, node), number)

    @staticmethod
    def _in_target_dtype(given: Given) -> list[Tensor]:
        """Queries, keys and values, cast as transformers casts them back from float32."""
        dtype = given.first("target_dtype")
        found = given.first_three()
        return [x.to(dtype) for x in found] if dtype and found[0].dtype == torch.float32 else found


def _sees_of_transformers(given: Given, queries: int, keys: int) -> Sees:
    """The mask and the scores of a call by transformers, whose windows count a query's own place."""
    window = given.first("sliding_window")
    far = window - 1 if window is not None and keys > window else None
    is_causal = given.first("is_causal") and not (given.first("use_top_left_mask") and queries == 1)
    return Sees(far, 0 if is_causal else far, None, given.first("softcap") or None, given.first("softmax_scale"))


def _refuse_unequal(name: str, query: Tensor, key: Tensor, sees: Sees) -> None:
    """Refuse a mask by places of unlike lengths, which flash attention aligns at their ends."""
    if query.shape[-2] != key.shape[-2] and (sees.left, sees.right) != (None, None):
        raise NotServed(
            f"{name} of {query.shape[-2]} queries and {key.shape[-2]} keys puts the last query beside the last key",
            at=source(),
            advice="as many queries as keys, or neither causal nor a window",
        )
