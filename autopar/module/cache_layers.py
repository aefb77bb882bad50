"""Layers of a cache whose tensors are carried from program to program: keys and values, and states.

    CarriedKeys     keys and values of one attention. Those of a window are a ring: the token at position p is in slot
                    p modulo the length of the window, so that a new token is written over the one that left it
    CarriedStates   states of linear attention, of Mamba, or of a convolution
    CarriedBoth     of a layer that has both

What the layers hold are tensors by name, which functions replace: nothing is allocated before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, StaticLayer

# Releases of transformers before these classes have no such layers either.
_LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
_DummyLayer: Any = getattr(cache_utils, "DummyLayer", object)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer of a cache holds, as transformers' static cache says it."""

    has_keys: bool
    length: int  # tokens whose keys and values it holds
    is_sliding: bool  # whether its attention sees a window, or a chunk
    states: int  # how many states of each kind it has

    @staticmethod
    def of(layer: Any, length: int | None) -> LayerKind | None:
        """The kind of one of transformers' layers, with its own length or another; None where it is not known."""
        if type(layer).__name__ not in _KNOWN:
            return None
        has_keys = isinstance(layer, CacheLayerMixin) and hasattr(layer, "max_cache_len")
        own = layer.max_cache_len if has_keys else 0
        is_sliding = bool(getattr(layer, "is_sliding", False))
        return LayerKind(has_keys, length or own if has_keys else 0, is_sliding, getattr(layer, "number_of_states", 0))

    def layer(self, cache: HoldingTokens) -> CarriedLayer:
        """An empty layer of this kind."""
        has = (self.has_keys, bool(self.states))
        return _CLASSES[has](cache, self)


_KNOWN = frozenset(
    (
        "StaticLayer",
        "StaticSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
        "DummyLayer",
    )
)


class HoldingTokens(Protocol):
    """A cache, as its layers see it."""

    most: int  # tokens that layers without a window can hold
    length: Any  # tokens that it holds
    order: Any  # rows of the last call, in the order in which the next call takes them
    real: Any  # tokens of this call that count, where it is padded behind them
    added: int  # tokens that this call adds
    is_inside: bool  # whether it is that of a program, which does not know its values
    is_of_encoder: bool


class CarriedLayer:
    """A layer that holds nothing, as one that reads the keys of another."""

    is_compileable = True
    supports_early_init = False

    def __init__(self, cache: HoldingTokens, kind: LayerKind) -> None:
        self.cache = cache
        self.kind = kind
        self.held: dict[str, Any] = {}
        self.is_ordered = False  # whether its rows have taken the order of the cache

    @property
    def is_sliding(self) -> bool:
        return self.kind.is_sliding

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be forgotten."""
        return not self.kind.states and not self.has_left

    @property
    def has_left(self) -> bool:
        """Outside of a program, whether tokens have left the window."""
        return self.kind.has_keys and self.kind.length < min(self.cache.most, int(self.cache.length))

    def in_order(self) -> dict[str, Any]:
        """The tensors that it holds; inside of a program, with rows in the order of the cache."""
        order = self.cache.order
        if self.held and self.cache.is_inside and order is not None and not self.is_ordered:
            self.held = {name: torch.index_select(x, 0, order) for name, x in self.held.items()}
            self.is_ordered = True
        return self.held

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Let these tensors take the places of those of their names."""
        self.held = {**self.held, **tensors}

    def get_max_length(self) -> int:
        return self.kind.length or -1


class CarriedKeys(CarriedLayer, StaticLayer):
    """Keys and values of one attention, each [rows, heads, length, width]."""

    @property
    def is_ring(self) -> bool:
        return self.kind.length < self.cache.most

    @property
    def is_initialized(self) -> bool:
        return "keys" in self.held

    @property
    def keys(self) -> Any:
        return self.in_order().get("keys")

    @property
    def values(self) -> Any:
        return self.in_order().get("values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those that their queries see."""
        self.cache.added = key_states.shape[-2]
        new = {"keys": key_states, "values": value_states}
        if not self.is_initialized:
            self.hold(self._each(new, self._begun))
            return key_states, value_states
        old = {name: self.in_order()[name] for name in new}
        seen, held = self._added_to(old, new)
        self.hold(held)
        return seen["keys"], seen["values"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """The number of keys that the queries see, and the position of the first."""
        if not self.is_initialized:
            return query_length, 0
        if not self.is_ring:
            return self.cache.most, 0
        if query_length == 1:
            return self.kind.length, self._first_with(1)
        return self.kind.length + query_length, self._first_with(0)

    def get_seq_length(self) -> Any:
        held = self.cache.length if self.is_initialized else 0
        return held if self.cache.is_inside else int(held)

    @staticmethod
    def _each(tensors: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: function(x) for name, x in tensors.items()}

    def _begun(self, x: Tensor) -> Tensor:
        """The keys or values that the first call leaves, of its tokens."""
        count = x.shape[-2]
        length = count if self.cache.is_of_encoder else self.kind.length
        if count <= length:
            return F.pad(x, (0, 0, 0, length - count))
        return self._as_ring(x, count if self.cache.real is None else self.cache.real)

    def _added_to(
        self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors that queries of new tokens see, by rising position, and those that are then held."""
        length = self.kind.length
        count = new["keys"].shape[-2]
        slots = torch.arange(length, device=new["keys"].device)
        at = torch.arange(count, device=slots.device) + self.cache.length
        if not self.is_ring:
            held = {name: torch.index_copy(x, 2, at, new[name]) for name, x in old.items()}
            return held, held
        if count == 1:
            held = {name: torch.index_copy(x, 2, at % length, new[name]) for name, x in old.items()}
            order = (slots + self._first_with(1)) % length
            return self._each(held, lambda x: torch.index_select(x, 2, order)), held
        first = self._first_with(0)
        order = (slots + first) % length
        room = self._each(old, lambda x: F.pad(torch.index_select(x, 2, order), (0, 0, 0, count)))
        seen = {name: torch.index_copy(x, 2, at - first, new[name]) for name, x in room.items()}
        return seen, self._each(seen, lambda x: self._as_ring(x, self.cache.length + count, first))

    def _first_with(self, more: int) -> Any:
        """Position of the first token in the window once `more` are added."""
        first = self.cache.length + more - self.kind.length
        return torch.clamp(first, min=0) if self.cache.is_inside else max(int(first), 0)

    def _as_ring(self, x: Tensor, end: Any, first: Any = 0) -> Tensor:
        """The last tokens before position `end`, each in its slot; `x` begins at position `first`."""
        slots = torch.arange(self.kind.length, device=x.device)
        positions = end - 1 - (end - 1 - slots) % self.kind.length
        # A slot of which no token is yet there is masked: any value will do.
        return torch.index_select(x, 2, torch.clamp(positions - first, min=0))


class CarriedStates(CarriedLayer, _LinearAttentionLayer):
    """States of linear attention or of a convolution: [rows, heads or channels, ...]."""

    record_past = False

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {i: f"conv.{i}" in self.held or f"recurrent.{i}" in self.held for i in range(self.kind.states)}

    @property
    def conv_states(self) -> dict[int, Any]:
        return {i: self.in_order().get(f"conv.{i}") for i in range(self.kind.states)}

    @property
    def recurrent_states(self) -> dict[int, Any]:
        return {i: self.in_order().get(f"recurrent.{i}") for i in range(self.kind.states)}

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution; returns all that it sees."""
        self.cache.added = conv_states.shape[-1]
        before = self.conv_states[state_idx]
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            seen = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size = before.shape[-1]
            seen = torch.cat([before, conv_states], -1)
        self.hold({f"conv.{state_idx}": seen[..., seen.shape[-1] - size :]})
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.hold({f"recurrent.{state_idx}": recurrent_states})
        return recurrent_states


class CarriedBoth(CarriedStates, CarriedKeys):
    """Keys and values, and states."""


class CarriedNothing(CarriedLayer, _DummyLayer):
    """A layer without attention, or one that reads the keys of another layer."""


_CLASSES: Mapping[tuple[bool, bool], type[CarriedLayer]] = {
    (True, False): CarriedKeys,
    (False, True): CarriedStates,
    (True, True): CarriedBoth,
    (False, False): CarriedNothing,
}
