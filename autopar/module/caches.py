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
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache

from autopar.graph.carried import Carried
from autopar.letters import NotServed
from autopar.module.cache_layers import CarriedLayer, LayerKind


class CarriedCache(Cache, Carried):
    """A cache of `most` tokens, with layers of these kinds."""

    told = frozenset({"length", "order", "real"})
    layers: list[CarriedLayer]

    def __init__(
        self, most: int, kinds: Sequence[LayerKind], length: Any = None, order: Any = None, is_of_encoder: bool = False
    ) -> None:
        self.most = most
        self.kinds = tuple(kinds)
        self.is_inside = length is not None  # whether it is that of a program, which does not know its values
        self.length: Any = length if self.is_inside else torch.tensor(0)  # tokens that it holds
        self.order: Any = order  # rows of the last call, in the order in which the next call takes them
        self.is_of_encoder = is_of_encoder  # whether it holds what the first call gives it, and no more
        self.added = 0  # tokens that a program has added
        self.real: Any = None  # tokens of the next call that count, where it is padded behind them
        super().__init__(layers=[kind.layer(self) for kind in kinds])

    @staticmethod
    def of(config: Any, most: int, windows: bool) -> CarriedCache | CarriedPair:
        """An empty cache for a model of this configuration; with `windows`, layers that see one hold no more."""
        layers = StaticCache(config=config, max_cache_len=most).layers
        kinds = []
        for layer in layers:
            kind = LayerKind.of(layer, None if windows else most)
            if kind is None:
                raise NotServed(
                    f"a cache of {type(layer).__name__}: such tensors are not carried from call to call yet",
                    advice="generate(..., use_cache=False), or autopar.gather(model)",
                )
            kinds.append(kind)
        own = CarriedCache(most, kinds)
        if not getattr(config, "is_encoder_decoder", False):
            return own
        of_encoder = [LayerKind(has_keys=True, length=most, is_sliding=False, states=0)] * len(kinds)
        return CarriedPair(own, CarriedCache(most, of_encoder, is_of_encoder=True))

    @property
    def has_keys(self) -> bool:
        """Whether it holds keys of tokens."""
        return any(kind.has_keys and layer.held for kind, layer in zip(self.kinds, self.layers, strict=True))

    @property
    def has_states(self) -> bool:
        """Whether it has states of linear attention, to which every token of a call is added."""
        return any(kind.states for kind in self.kinds)

    def take_over(self, left: CarriedCache) -> None:
        for mine, other in zip(self.layers, left.layers, strict=True):
            if self.order is not None and other.held and not other.is_ordered:
                raise NotServed(
                    "a cache whose rows are in another order, of which the model did not read all layers",
                    advice="generate(..., use_cache=False)",
                )
            mine.held = other.held
        self.order = None
        self.length = self.length + (left.added if self.real is None else self.real)
        self.real = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let the next call take the rows in this order."""
        self.order = beam_idx if self.order is None else self.order[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: the next call writes over them."""
        if self.has_states or any(layer.has_left for layer in self.layers):
            raise NotServed(
                "a cache is cropped, of whose states, or of tokens that have left a window, no copies are kept",
                advice="model.new_cache(length) for layers with a window; generation that does not take tokens back",
            )
        self.length = self.length - abs(tokens_to_remove)

    def reset(self) -> None:
        self.length = torch.tensor(0)
        for layer in self.layers:
            layer.held = {}

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Its tensors by name."""
        told = [("length", self.length), ("order", self.order), ("real", self.real)]
        held = [(f"{i}.{name}", x) for i, layer in enumerate(self.layers) for name, x in layer.held.items()]
        return [*((name, x) for name, x in told if x is not None), *held]

    @property
    def context(self) -> tuple[Any, ...]:
        """All of it but its tensors."""
        kinds = tuple([(k.has_keys, k.length, k.is_sliding, k.states) for k in self.kinds])
        has_told = self.order is not None, self.real is not None
        of_layers = tuple([(tuple(layer.held), layer.is_ordered) for layer in self.layers])
        return self.most, kinds, self.is_of_encoder, has_told, of_layers, self.added


def _built(leaves: Iterable[Any], context: tuple[Any, ...]) -> CarriedCache:
    """The cache of a program, of these tensors."""
    most, kinds, is_of_encoder, (has_order, has_real), of_layers, added = context
    given = iter(leaves)
    length = next(given)
    order = next(given) if has_order else None
    cache = CarriedCache(most, [LayerKind(*kind) for kind in kinds], length, order, is_of_encoder)
    cache.real = next(given) if has_real else None
    cache.added = added
    for layer, (names, is_ordered) in zip(cache.layers, of_layers, strict=True):
        layer.held = {name: next(given) for name in names}
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
    def has_keys(self) -> bool:
        return self.self_attention_cache.has_keys

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
