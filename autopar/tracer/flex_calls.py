"""flex_attention as the op of attention whose mask is a description.

The function of its block mask is read (`place_masks.py`), and the blocks are never made: they would be found by asking
about all pairs of places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from autopar.letters import NotServed
from autopar.runtime.sees import Sees
from autopar.tracer.described import Described, Given, check_shapes
from autopar.tracer.place import source
from autopar.tracer.place_masks import PlaceMask, ScoreChange
from autopar.tracer.place_terms import Reading, Term, on_places, symbols_of

_PLACES = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), torch.int64)


class DescribedMask(flex.BlockMask):
    """A block mask whose blocks nobody has asked for yet: they are made where they are, outside a capture."""

    def __init__(self, make: Callable[[], flex.BlockMask], given: Mapping[str, Any]) -> None:
        self.make = make
        self.seq_lengths = given["Q_LEN"], given["KV_LEN"]
        self.mask_mod = given["mask_mod"]
        size = given["BLOCK_SIZE"]
        self.BLOCK_SIZE = (size, size) if isinstance(size, int) else tuple(size)
        self.sizes = given["B"] or 1, given["H"] or 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.sizes, *self.seq_lengths)

    def to(self, device: Any) -> DescribedMask:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in self._TENSOR_ATTRS and name not in self._CONTEXT_ATTRS:
            raise AttributeError(name)
        made = self.make()
        for made_name, value in vars(made).items():
            setattr(self, made_name, value)
        return getattr(made, name)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Sizes of a batch, of its queries and of its keys."""

    batch: int
    queries: int
    keys: int

    def places(self) -> dict[str, Tensor]:
        """All places of each symbol: a batch down, queries or keys along."""
        return {
            "b": torch.arange(self.batch).unsqueeze(1),
            "q_idx": torch.arange(self.queries).unsqueeze(0),
            "kv_idx": torch.arange(self.keys).unsqueeze(0),
        }


class FlexCalls:
    """The calls of flex_attention in one capture."""

    def __init__(self, described: Described) -> None:
        self.described = described

    def answers(self) -> Iterator[tuple[Any, Callable[[Given], Any]]]:
        """The functions that are answered, and how."""
        yield flex.flex_attention, self.flex_attention
        yield flex.create_block_mask, self.create_block_mask

    def create_block_mask(self, given: Given) -> DescribedMask:
        """A block mask that remembers its function, and has no blocks yet."""
        is_in_model = self.described.recorder.place.is_in_model

        def make() -> flex.BlockMask:
            if is_in_model():
                raise NotServed(
                    "the model reads the blocks of a block mask, which are made where the plan runs",
                    at=source(),
                    advice="the block mask as an argument of flex_attention alone",
                )
            made: flex.BlockMask = given.original(**given.arguments)
            return made

        return DescribedMask(make, given.arguments)

    def flex_attention(self, given: Given) -> Tensor:
        """The op of a call of flex_attention, whose mask and change of scores are read."""
        served = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "kernel_options")
        given.refuse_others(served)
        query, key, value, score_mod, block_mask, scale = given.several(*served[:6])
        check_shapes(query, key, value, given.arguments["enable_gqa"])
        change = ScoreChange()
        mask = PlaceMask()
        reading = Reading(self.described.recorder, "the score_mod of flex_attention")
        if score_mod is not None:
            scores = {"score": torch.float32, **_PLACES}
            change.take(reading.read(score_mod, scores), reading)
            for term in change.where:
                mask.take(term, reading)
        if block_mask is not None:
            _check_blocks(block_mask, query, key)
            reading = Reading(self.described.recorder, "the mask of flex_attention")
            mask.take(reading.read(block_mask.mask_mod, _PLACES), reading)
        softcap, factor = change.scale(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        is_usual = scale is None and change.scale(1.0)[1] == 1.0
        sees = Sees(mask.left, mask.right, mask.chunk, softcap, None if is_usual else factor)
        if mask.documents is not None and query.shape[-2] != key.shape[-2]:
            raise NotServed(
                f"documents of {query.shape[-2]} queries and {key.shape[-2]} keys: {mask.documents.text}",
                at=mask.documents.at,
                advice="as many queries as keys",
            )
        at = _Lengths(query.shape[0], query.shape[-2], key.shape[-2])
        documents = None if mask.documents is None else self._numbers(mask.documents, at, reading)
        counts = self._joined(mask.counts, at, reading)
        out = self.described.attend(query, key, value, sees, documents, counts)
        rows = self._joined(mask.rows, at, reading)
        return out if rows is None else torch.where(rows[:, None, :, None], out, 0.0)

    def _numbers(self, number: Term, at: _Lengths, reading: Reading) -> Tensor:
        """The number of each place, [batch or 1, s]."""
        return self.described.once(("numbers", at, reading.key(number)), lambda: on_places(number, at.places()))

    def _joined(self, terms: list[Term], at: _Lengths, reading: Reading) -> Tensor | None:
        """Whether all of some terms hold, for each place; None where there are none."""
        if not terms:
            return None

        def join() -> Tensor:
            found: list[Tensor] = [on_places(term, at.places()) for term in terms]
            held = functools.reduce(torch.logical_and, found)
            length = at.queries if any("q_idx" in symbols_of(term) for term in terms) else at.keys
            return held.expand(held.shape[0] if held.dim() == 2 else 1, length)

        return self.described.once(("joined", at, tuple(map(reading.key, terms))), join)


def _check_blocks(block_mask: flex.BlockMask, query: Tensor, key: Tensor) -> None:
    """Refuse a block mask of other lengths, and one whose mask is in its blocks alone."""
    if tuple(block_mask.seq_lengths) != (query.shape[-2], key.shape[-2]):
        raise NotServed(
            f"a block mask of {block_mask.seq_lengths} places, for {query.shape[-2]} queries and {key.shape[-2]} keys",
            at=source(),
            advice="create_block_mask of the lengths of this call, inside forward",
        )
    if block_mask.mask_mod is flex.noop_mask and not isinstance(block_mask, DescribedMask):
        raise NotServed(
            "a block mask that says by its blocks alone which keys are seen",
            at=source(),
            advice="create_block_mask(mask_mod, ...), whose function says it",
        )
