"""`generate` of a parallel model of transformers: its own loop, with caches that programs carry on.

rank 0's generator   draws for all ranks, whose logits are equal, so that all go on with the same tokens
caches               hold as many tokens as the longest call so far needed, rounded up as `pad_to` says
prompts              are padded behind their end as `pad_to` says: what is written there is masked out, and later
                     tokens write over it
encoders             run in the first call, with the decoder; their tokens are padded, too, and masked for all calls
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from autopar.letters import NotServed
from autopar.module.caches import CarriedCache, CarriedPair
from autopar.module.state import ModelState
from autopar.runtime.world import exchanged, from_rank_0, numbers_of

# The argument of models that is the cache, whose name changed in transformers 5.
_CACHE = "cache" if "cache" in GenerationMixin.prepare_inputs_for_generation.__annotations__ else "past_key_values"


class _ToEncode(dict[str, Any]):
    """Arguments of an encoder."""


class Generating(GenerationMixin):
    """Methods of a parallel model that transformers' `generate` calls, before the model's own."""

    config: Any
    main_input_name: str
    _own: ModelState

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        state = self._own
        is_alone = _is_alone(state.original, args, kwargs)
        with _drawing_as_rank_0(state.setup.device), state.caller.at_rest() if is_alone else contextlib.nullcontext():
            return super().generate(*args, **kwargs)

    def new_cache(self, length: int, windows: bool = False) -> CarriedCache | CarriedPair:
        """An empty cache for at least `length` tokens, to be passed to calls under `torch.no_grad()`.

        A cache that is no longer than those before needs no new programs. With `windows`, layers whose attention sees
        a window hold no more tokens: calls then pass no attention_mask, or one of four dims.
        """
        state = self._own
        if state.setup.stages is not None:
            raise NotServed(
                f"a cache for {state.original.__name__}, whose stages are on different devices",
                advice="generate(..., use_cache=False), or autopar.gather(model)",
            )
        if state.parts is not None:
            raise NotServed(
                f'a cache for {state.original.__name__}, of which each rank passes its own rows: inputs="local"',
                advice='inputs="global", or autopar.gather(model)',
            )
        to = state.setup.how.pad_to or 1
        state.caches.length = max(state.caches.length, -(-length // to) * to)
        return CarriedCache.of(self.config.get_text_config(decoder=True), state.caches.length, windows)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """Give the calls an empty cache, where they are to have one."""
        if generation_config.use_cache is False or model_kwargs.get(_CACHE) is not None:
            return
        if not self._supports_default_dynamic_cache():
            raise NotServed(
                f"the states that {self._own.original.__name__} keeps in a cache of its own: those are not carried",
                advice="generate(..., use_cache=False), or autopar.gather(model)",
            )
        model_kwargs[_CACHE] = self.new_cache(max_cache_length, windows=True)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: str | None, generation_config: Any
    ) -> dict[str, Any]:
        """Leave the encoder to the first call: a part of a parallel model does not run by itself."""
        name = model_input_name or self.main_input_name
        to = self._own.setup.how.pad_to
        if to is not None and inputs_tensor.dim() == 2 and not inputs_tensor.is_floating_point():
            given = model_kwargs.get("attention_mask")
            mask = torch.ones_like(inputs_tensor) if given is None else given
            more = -inputs_tensor.shape[1] % to
            model_kwargs = {**model_kwargs, "attention_mask": F.pad(mask, (0, more))}
            inputs_tensor = _longer(inputs_tensor, inputs_tensor.shape[1], more)
        return {**model_kwargs, "encoder_outputs": _ToEncode({name: inputs_tensor})}

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trial = self._own.caches.trial
        cache = kwargs.get(_CACHE)
        if trial.is_open:
            without = {**kwargs, _CACHE: None, "use_cache": False, "next_sequence_length": None}
            reads_tokens = cache is not None and cache.has_keys
            trial.expect(
                self(**super().prepare_inputs_for_generation(*args, **without), return_dict=True)
                if reads_tokens
                else None
            )
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if isinstance(inputs.get("encoder_outputs"), _ToEncode):
            inputs |= inputs.pop("encoder_outputs")
        to = self._own.setup.how.pad_to
        return inputs if to is None else _padded(inputs, to)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        self._own.caches.trial.compare(outputs)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if isinstance(updated.get("encoder_outputs"), _ToEncode):
            updated["encoder_outputs"] = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
        return updated

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Programs are compiled where autoparallelize is told to."""
        return False


# Arguments of `generate` that run between the calls of a model, and methods that a model's class may have for itself.
_BETWEEN = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "streamer",
    "custom_generate",
)
_METHODS = ("generate", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def _is_alone(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing but transformers' own loop runs between the calls of `generate`."""
    of_loop = all(getattr(cls, name, None) is getattr(GenerationMixin, name) for name in _METHODS)
    return of_loop and len(args) <= 2 and all(kwargs.get(name) is None for name in _BETWEEN)


@contextlib.contextmanager
def _drawing_as_rank_0(device: torch.device) -> Iterator[None]:
    """Inside the block torch's generators draw on every rank as on rank 0.

    Where all ranks have one state, it stays theirs; where they differ, the other ranks get their own back.
    """
    states = _generators(device)
    everyone = exchanged(numbers_of(states), device)
    if all(theirs == everyone[0] for theirs in everyone):
        yield
        return
    is_first = numbers_of(states) == everyone[0]
    _set_generators(device, from_rank_0(lambda: _generators(device)))
    try:
        yield
    finally:
        if not is_first:
            _set_generators(device, states)


def _generators(device: torch.device) -> list[Tensor]:
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device]


def _set_generators(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


_OF_TOKENS = ("input_ids", "position_ids", "attention_mask")  # arguments that have a value for each token


def _padded(inputs: dict[str, Any], to: int) -> dict[str, Any]:
    """The arguments of the first call of a decoder, padded behind the prompt to a multiple of `to`.

    Other calls stay as they are, and so do those with tensors that are not known here.
    """
    cache = inputs.get(_CACHE)
    ids = inputs.get("input_ids")
    others = {name: value for name, value in inputs.items() if name not in (*_OF_TOKENS, _CACHE)}
    if not isinstance(cache, CarriedCache) or cache.has_states or cache.length or not isinstance(ids, Tensor):
        return inputs
    if inputs.get("logits_to_keep") != 1 or any(isinstance(x, Tensor) for x in others.values()):
        return inputs
    count = ids.shape[1]
    more = -count % to
    if not more or count + more > cache.most:
        return inputs
    padded = dict(inputs)
    for name in _OF_TOKENS:
        padded[name] = pytree.tree_map_only(Tensor, lambda x: _longer(x, count, more), inputs.get(name))
    padded["logits_to_keep"] = torch.tensor([count - 1], device=ids.device)
    cache.real = torch.tensor(count)
    return padded


def _longer(x: Tensor, count: int, more: int) -> Tensor:
    """A tensor of ids, positions, or masks of queries by keys, with values for `more` tokens behind.

    Their keys are masked out for the others; they see what the last token sees, since to see nothing is no number.
    """
    if x.dim() < 4:
        return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], more)], -1)
    x = F.pad(x, (0, more))
    return torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], more, x.shape[-1])], -2)
