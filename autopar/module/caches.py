"""Caches of transformers whose keys and values are carried from program to program.

A cache holds no tensors before its first call: that one runs as without a cache, and its program leaves keys and values
of the cache's length, sharded over the mesh. Later programs take them where they are, and write to them in place.
Positions beyond what was written are masked by transformers' own masks, as in its `StaticCache`.

The number of tokens that a cache holds is an input of a program, so that one program serves all numbers. So is the
order into which a beam search has brought the rows: keys and values take it in the next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from autopar.graph.carried import Carried
from autopar.letters import NotServed

_NAMES = ("keys", "values")


class CarriedLayer(StaticLayer):
    """Keys and values of one attention, each [rows, heads, length, width]."""

    def __init__(self, cache: CarriedCache, is_sliding: bool) -> None:
        self.held: dict[str, Any] = {}
        super().__init__(cache.most)
        self.cache = cache
        self.is_sliding = is_sliding
        self.is_ordered = False  # whether its rows have taken the order of the cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those that their queries see."""
        cache = self.cache
        count = key_states.shape[-2]
        cache.added = count
        new = {"keys": key_states, "values": value_states}
        if not self.held:
            room = 0 if cache.is_of_encoder else cache.most - count
            self.held = {name: F.pad(x, (0, 0, 0, room)) for name, x in new.items()}
            return key_states, value_states
        at = torch.arange(count, device=key_states.device) + cache.length
        self._take_order()
        self.held = {name: torch.index_copy(self.held[name], 2, at, x) for name, x in new.items()}
        return self.held["keys"], self.held["values"]

    @property
    def keys(self) -> Any:
        self._take_order()
        return self.held.get("keys")

    @keys.setter
    def keys(self, keys: Any) -> None:
        """Ignore what transformers sets: `update` alone does."""

    @property
    def values(self) -> Any:
        self._take_order()
        return self.held.get("values")

    @values.setter
    def values(self, values: Any) -> None:
        """Ignore what transformers sets: `update` alone does."""

    def _take_order(self) -> None:
        """Inside of a program, bring the rows into the order of the cache."""
        order = self.cache.order
        if self.held and self.cache.is_inside and order is not None and not self.is_ordered:
            self.held = {name: torch.index_select(x, 0, order) for name, x in self.held.items()}
            self.is_ordered = True

    @property
    def is_initialized(self) -> bool:
        return bool(self.held)

    @is_initialized.setter
    def is_initialized(self, is_so: bool) -> None:
        """Ignore what transformers sets: it is so where tensors are held."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.cache.most if self.held else query_length), 0

    def get_seq_length(self) -> Any:
        held = self.cache.length if self.held else 0
        return held if self.cache.is_inside else int(held)


class CarriedCache(Cache, Carried):
    """A cache of `most` tokens; `sliding` says of each layer whether its attention sees a window."""

    told = frozenset({"length", "order"})

    def __init__(
        self, most: int, sliding: Sequence[bool], length: Any = None, order: Any = None, is_of_encoder: bool = False
    ) -> None:
        self.most = most
        self.sliding = tuple(sliding)
        self.is_inside = length is not None  # whether it is that of a program, which does not know its values
        self.length: Any = length if self.is_inside else torch.tensor(0)  # tokens that it holds
        self.order: Any = order  # rows of the last call, in the order in which the next call takes them
        self.is_of_encoder = is_of_encoder  # whether it holds what the first call gives it, and no more
        self.added = 0  # tokens that a program has added
        self.real = 0  # tokens of the next call that count, where it is padded behind them
        super().__init__(layers=[CarriedLayer(self, is_sliding) for is_sliding in sliding])

    @staticmethod
    def of(config: Any, most: int) -> CarriedCache | CarriedPair:
        """An empty cache for a model of this configuration."""
        layers = StaticCache(config=config, max_cache_len=most).layers
        if other := [layer for layer in layers if type(layer) not in (StaticLayer, StaticSlidingWindowLayer)]:
            raise NotServed(
                f"a cache of {type(other[0]).__name__}: such states are not carried from call to call yet",
                advice="generate(..., use_cache=False), or autopar.gather(model)",
            )
        sliding = [layer.is_sliding for layer in layers]
        own = CarriedCache(most, sliding)
        if not getattr(config, "is_encoder_decoder", False):
            return own
        return CarriedPair(own, CarriedCache(most, [False] * len(sliding), is_of_encoder=True))

    def take_over(self, left: CarriedCache) -> None:
        for mine, other in zip(self.layers, left.layers, strict=True):
            if self.order is not None and other.held and not other.is_ordered:
                raise NotServed(
                    "a cache whose rows are in another order, of which the model did not read all layers",
                    advice="generate(..., use_cache=False)",
                )
            mine.held = other.held
        self.order = None
        self.length = self.length + (self.real or left.added)
        self.real = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let the next call take the rows in this order."""
        self.order = beam_idx if self.order is None else self.order[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: the next call writes over them."""
        self.length = self.length - abs(tokens_to_remove)

    def reset(self) -> None:
        self.length = torch.tensor(0)

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Its tensors by name."""
        told = [("length", self.length)] if self.order is None else [("length", self.length), ("order", self.order)]
        held = [(i, layer.held) for i, layer in enumerate(self.layers) if layer.held]
        return [*told, *((f"{i}.{name}", tensors[name]) for i, tensors in held for name in _NAMES)]

    @property
    def context(self) -> tuple[Any, ...]:
        """All of it but its tensors."""
        of_layers = tuple((bool(layer.held), layer.is_ordered) for layer in self.layers)
        return self.most, self.sliding, self.is_of_encoder, self.order is not None, of_layers, self.added


def _built(leaves: Iterable[Any], context: tuple[Any, ...]) -> CarriedCache:
    """The cache of a program, of these tensors."""
    most, sliding, is_of_encoder, has_order, of_layers, added = context
    given = iter(leaves)
    length = next(given)
    cache = CarriedCache(most, sliding, length, next(given) if has_order else None, is_of_encoder)
    cache.added = added
    for layer, (is_held, is_ordered) in zip(cache.layers, of_layers, strict=True):
        if is_held:
            layer.held = {name: next(given) for name in _NAMES}
        layer.is_ordered = is_ordered
    return cache


class CarriedPair(EncoderDecoderCache, Carried):
    """The caches of a decoder: of its own keys, and of those that it makes of the encoder's output."""

    told = CarriedCache.told

    def __init__(self, own: CarriedCache, of_encoder: CarriedCache) -> None:
        self.self_attention_cache = own
        self.cross_attention_cache = of_encoder
        self.is_updated = {i: bool(layer.held) for i, layer in enumerate(of_encoder.layers)}

    def take_over(self, left: CarriedPair) -> None:
        self.self_attention_cache.take_over(left.self_attention_cache)
        self.cross_attention_cache.take_over(left.cross_attention_cache)
        self.is_updated = dict(left.is_updated)

    @property
    def named(self) -> list[tuple[str, CarriedCache]]:
        return [("own", self.self_attention_cache), ("encoder", self.cross_attention_cache)]

    @property
    def context(self) -> tuple[Any, ...]:
        return ()


def _as_tuples(context: Any) -> Any:
    """A context as it was before JSON made lists of its tuples."""
    return tuple(map(_as_tuples, context)) if isinstance(context, list) else context


def _register(cls: Any, built: Any) -> None:
    """Make a class of caches a structure of torch's pytree."""
    pytree.register_pytree_node(
        cls,
        lambda cache: ([held for _, held in cache.named], cache.context),
        built,
        serialized_type_name=f"{__name__}.{cls.__name__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_as_tuples,
        flatten_with_keys_fn=lambda cache: ([(pytree.MappingKey(n), t) for n, t in cache.named], cache.context),
    )


_register(CarriedCache, _built)
_register(CarriedPair, lambda leaves, context: CarriedPair(*leaves))
