"""Masks of transformers as descriptions: what the functions that they are made of say about queries and keys.

Its masks are functions of places, `and_masks(sliding_window_overlay(4), causal_mask_function)`, which are closures over
what they were made with: their names and cells say what a mask is before a tensor of queries by keys is made of it. A
function that is not known here is a model's own, and its mask stays the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.sees import Sees

_HOME = "transformers.masking_utils"


class NotDescribed(Exception):
    """Raised for a mask that numbers and rows do not describe, with the reason in words."""


@dataclass(frozen=True, slots=True)
class DescribedMask:
    """What one mask says; of `sees`, only what lies in places."""

    sees: Sees
    documents: Tensor | None
    counts: Tensor | None
    sizes: tuple[int, int, int]  # batch, queries, keys

    def fits(self, query: Tensor, key: Tensor) -> bool:
        """Whether the mask is one of these queries and keys."""
        return (query.shape[0], query.shape[-2], key.shape[-2]) == self.sizes


class _Terms:
    """Terms of a conjunction, as they are read."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.right: int | None = None
        self.chunk: int | None = None
        self.left_padding: Tensor | None = None  # the place in each row at which chunks begin
        self.positions: Tensor | None = None  # places that terms go by, in the stead of indices
        self.packed: Tensor | None = None

    def see(self, left: int | None, right: int | None) -> None:
        """Add a window: the narrower of two is the conjunction of both."""
        self.left = _smaller(self.left, left)
        self.right = _smaller(self.right, right)

    def go_by_place(self) -> bool:
        """Whether it matters where queries and keys are."""
        return any(term is not None for term in (self.left, self.right, self.chunk, self.packed))

    def read(self, function: Callable[..., Any]) -> None:
        """Add the terms of one mask function of transformers."""
        maker = _maker(function)
        reading = _READ.get(maker) if getattr(function, "__module__", "") == _HOME else None
        if reading is None:
            where = getattr(function, "__module__", "").rpartition(".")[2]
            raise NotDescribed(f"{maker} of {where} adds a term that is not a window, a chunk, a document or padding")
        reading(self, _cells(function))


def _maker(function: Callable[..., Any]) -> str:
    """The name of a function, or of the function that made it."""
    return getattr(function, "__qualname__", type(function).__name__).split(".")[0]


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that a closure holds, by name."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def _all_of(terms: _Terms, held: Mapping[str, Any]) -> None:
    for function in held["mask_functions"]:
        terms.read(function)


def _any_of(terms: _Terms, held: Mapping[str, Any]) -> None:
    raise NotDescribed(f"a pair may see each other by any one of {', '.join(map(_maker, held['mask_functions']))}")


def _on_both_sides(terms: _Terms, held: Mapping[str, Any]) -> None:
    terms.see(held["sliding_window"], held["sliding_window"])


def _chunked(terms: _Terms, held: Mapping[str, Any]) -> None:
    terms.chunk = held["chunk_size"]
    terms.left_padding = held["left_padding"]


def _by_positions(terms: _Terms, held: Mapping[str, Any]) -> None:
    terms.positions = held["position_ids"]
    terms.read(held["mask_function"])


def _packed(terms: _Terms, held: Mapping[str, Any]) -> None:
    terms.packed = held["packed_sequence_mask"]


_READ: dict[str, Callable[[_Terms, Mapping[str, Any]], None]] = {
    "and_masks": _all_of,
    "or_masks": _any_of,
    "causal_mask_function": lambda terms, _: terms.see(None, 0),
    "bidirectional_mask_function": lambda terms, _: None,
    "sliding_window_overlay": lambda terms, held: terms.see(held["sliding_window"] - 1, None),
    "sliding_window_bidirectional_overlay": _on_both_sides,
    "chunked_overlay": _chunked,
    "remap_positions_for_packed_sequence": _by_positions,
    "packed_sequence_mask_function": _packed,
}


def described(asked: Mapping[str, Any]) -> DescribedMask:
    """The description of a mask, from the arguments with which transformers asks for its tensor."""
    terms = _Terms()
    terms.read(asked["mask_function"])
    queries = asked["q_length"]
    keys = asked["kv_length"]
    counts = asked.get("attention_mask")
    if counts is not None and tuple(counts.shape) != (asked["batch_size"], keys):
        raise NotDescribed(f"the attention mask has the shape {tuple(counts.shape)}")
    offsets = asked.get("q_offset", 0), asked.get("kv_offset", 0)
    is_behind = any(isinstance(offset, Tensor) or offset != 0 for offset in offsets)
    if terms.go_by_place() and (is_behind or queries != keys):
        raise NotDescribed("queries follow keys of a cache")
    chunk, documents = _chunks(terms, counts, keys)
    sees = Sees(left=_within(terms.left, keys), right=_within(terms.right, keys), chunk=chunk)
    return DescribedMask(sees, documents, counts, (asked["batch_size"], queries, keys))


def _chunks(terms: _Terms, counts: Tensor | None, keys: int) -> tuple[int | None, Tensor | None]:
    """The length of chunks that begin with a row, and the numbers of documents.

    Chunks that begin elsewhere are documents: those of documents, and those that begin behind a row's padding.
    """
    packed = terms.packed
    positions = terms.positions
    if (packed is None) != (positions is None):
        raise NotDescribed("documents and positions do not go together")
    if terms.chunk is None:
        return None, packed
    if packed is not None and positions is not None:
        return None, _chunks_of_documents(packed, positions, terms.chunk)
    if counts is not None and terms.left_padding is not None:
        places = torch.arange(keys, device=counts.device) - terms.left_padding[:, None]
        return None, torch.div(places, terms.chunk, rounding_mode="floor")
    return terms.chunk if terms.chunk < keys else None, None


def _chunks_of_documents(packed: Tensor, positions: Tensor, chunk: int) -> Tensor:
    """A number for each chunk of each document, by positions.

    As in transformers, chunks go by indices where the rows turn out to be one document each.
    """
    is_packed = (packed[:, -1] != 0).any()
    places = torch.where(is_packed, positions, torch.arange(packed.shape[1], device=packed.device))
    numbers = torch.div(places, chunk, rounding_mode="floor")
    is_new = (numbers.diff(dim=-1) != 0) | (packed.diff(dim=-1) != 0)
    return torch.nn.functional.pad(is_new.long().cumsum(-1), (1, 0))


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _within(reach: int | None, keys: int) -> int | None:
    """The reach of a query; None where that is every key."""
    return reach if reach is not None and reach < keys - 1 else None
