"""Attention of transformers as ops whose masks are descriptions, whatever implementation is set on a model.

    masks        made as ever, and described where they can be (`described_masks.py`); a model may do with them what it
                 likes, and a tensor that nobody reads is no part of the graph
    attention    a function that gets a described mask, and computes what an op computes (`tried_attention.py`), is that
                 op: torch's own where a mask is causal or nothing, else `attention`
    documents    positions that restart are found by the formula of transformers, in each call anew

What stays a tensor of queries by keys is said in the lines of what a graph assumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ops.attention import attend
from autopar.runtime.private import clean_room, is_transform_active, without_torch_functions
from autopar.runtime.sees import Sees
from autopar.tracer import branches
from autopar.tracer.call import name_of
from autopar.tracer.described_masks import DescribedMask, NotDescribed, described
from autopar.tracer.tried_attention import Example, Outcome, tried

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an attention function, with the description of its mask."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    given: DescribedMask
    args: tuple[Any, ...]
    how: dict[str, Any]

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    def run(self, function: _Function) -> Any:
        """The result of the function as it is."""
        return function(self.module, *self.operands(), self.mask, *self.args, **self.how)

    def named(self, function: _Function) -> dict[str, Any] | None:
        """All settings by name; None where a parameter of the function gets a tensor beside sinks."""
        signature = inspect.signature(function)
        bound = signature.bind(self.module, *self.operands(), self.mask, *self.args, **self.how)
        named = dict(list(bound.arguments.items())[5:])
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
            elif isinstance(named.get(parameter.name), Tensor) and parameter.name != "s_aux":
                return None
        return named

    def example(self, how: dict[str, Any]) -> Example:
        """A small call of the same kind."""
        return Example(
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            width=self.query.shape[-1],
            value_width=self.value.shape[-1],
            mask_dtype=None if self.mask is None else self.mask.dtype,
            is_padded=self.given.counts is not None,
            softcap=how.get("softcap"),
            scale=how.get("scaling"),
            has_sinks=how.get("s_aux") is not None,
        )


class DescribedAttention:
    """The masks of one capture, and the attention functions that were tried."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # id(mask) -> the node that it stood for when it was described: a write gives it another one
        self.masks: dict[int, tuple[fx.Node, DescribedMask]] = {}
        self._outcomes: dict[Any, Outcome] = {}

    def close(self) -> None:
        """Release all tensors."""
        self.masks.clear()
        self._outcomes.clear()

    # -- what transformers' mask code asks

    def is_tracing(self, original: _Function) -> _Function:
        """A replacement of `is_tracing`: what is known may be looked at."""

        def is_tracing(tensor: Any = None) -> bool:
            if isinstance(tensor, Tensor) and self.recorder.place.is_in_model():
                return not branches.is_known(self.recorder, tensor)
            return bool(original(tensor))

        return is_tracing

    def find_documents(self, original: _Function) -> _Function:
        """A replacement of `find_packed_sequence_indices`: without padding, a row is one document."""

        def find(position_ids: Tensor) -> Tensor | None:
            packed: Tensor | None = original(position_ids)
            assumptions = self.recorder.assumptions
            is_ours = packed is not None and self.recorder.place.is_in_model()
            if not is_ours or not assumptions.declared.no_padding or branches.is_known(self.recorder, packed):
                return packed
            assumptions.add("positions do not restart in a row: no padding (declared)")
            return None

        return find

    def mask_of(self, make: _Function) -> _Function:
        """A function that makes masks, of which it notes the descriptions."""

        def mask(**asked: Any) -> Any:
            made = make(**asked)
            if isinstance(made, Tensor) and made.dim() == 4 and self.recorder.place.is_in_model():
                try:
                    self.masks[id(made)] = self.recorder.node(made), described(asked)
                except NotDescribed as e:
                    self.recorder.assumptions.add(f"a mask is a tensor of queries by keys: {e}")
            return made

        return mask

    # -- attention

    def function(self, implemented: _Function, is_default: bool) -> _Function:
        """A replacement of an attention function; the default one is a model's own, written out."""

        def forward(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **how: Any
        ) -> Any:
            given = self._given(query, key, attention_mask, is_default) if self.recorder.place.is_in_model() else None
            if given is None:
                return implemented(module, query, key, value, attention_mask, *args, **how)
            return self._called(implemented, _Call(module, query, key, value, attention_mask, given, args, how))

        return forward

    def _given(self, query: Tensor, key: Tensor, mask: Any, is_default: bool) -> DescribedMask | None:
        """The description of a call's mask; None for a call that is left as it is."""
        if query.dim() != 4 or key.dim() != 4 or is_transform_active():
            return None
        if mask is None and is_default:
            return DescribedMask(Sees(), None, None, (query.shape[0], query.shape[-2], key.shape[-2]))
        node, found = self.masks.get(id(mask), (None, None))
        is_its = found is not None and found.fits(query, key) and self.recorder.node(mask) is node
        return found if is_its else None

    def _called(self, implemented: _Function, call: _Call) -> Any:
        """The result of one call, as an op where it is one."""
        how = call.named(implemented)
        outcome = self._outcome(implemented, call, how) if how is not None else Outcome(False)
        if how is None or not outcome.is_same:
            return call.run(implemented)
        # Weights of queries by keys are in the graph where a model reads them.
        weights = None
        if outcome.has_weights:
            weights = call.run(implemented)[1]
        sinks = how.get("s_aux")
        if outcome.sinks:
            sinks = getattr(call.module, outcome.sinks)
        sees = replace(call.given.sees, softcap=how.get("softcap"), scale=how.get("scaling"))
        return self._op(call, sees, sinks).transpose(1, 2).contiguous(), weights

    def _op(self, call: _Call, sees: Sees, sinks: Tensor | None) -> Tensor:
        query, key, value = call.operands()
        given = call.given
        is_plain = given.documents is None and given.counts is None and sinks is None and sees.softcap is None
        if is_plain and (sees.left, sees.chunk) == (None, None) and sees.right in (None, 0):
            groups = query.shape[1] // key.shape[1]
            has_kernel = key.shape[-1] == value.shape[-1] <= 256  # Fused kernels take fewer heads of keys only then.
            if groups > 1 and not has_kernel:
                key = key.repeat_interleave(groups, 1)
                value = value.repeat_interleave(groups, 1)
            is_grouped = groups > 1 and has_kernel
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=sees.right == 0, scale=sees.scale, enable_gqa=is_grouped
            )
        if given.documents is not None:
            length = self.recorder.assumptions.declared.documents
            sees = replace(sees, length=length)
            said = "one a row, an upper bound of their work" if length is None else f"{length} places each (declared)"
            self.recorder.assumptions.lines.append(f"documents are priced as {said}")
        if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
            # As torch's own attention under autocast.
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            return attend(query, key, value, given.documents, given.counts, sinks, sees.text())

    def _outcome(self, implemented: _Function, call: _Call, how: dict[str, Any]) -> Outcome:
        """Whether a function computes the op, tried once for calls that are alike."""
        example = call.example(how)
        settings = {k: v for k, v in how.items() if isinstance(v, (int, float, str, type(None)))}
        outcome = self._tried(implemented, call.module, example, settings)
        if outcome.is_same or (call.mask is None and how.get("dropout")):
            return outcome
        who = f"{type(call.module).__name__} keeps tensors of queries by keys"
        name = name_of(implemented)
        if how.get("dropout"):
            why = "it drops weights of attention"
        elif (
            example.is_padded
            and self._tried(implemented, call.module, replace(example, is_padded=False), settings).is_same
        ):
            why = (
                f"a query that sees only padding gets the mean of all values of {name}, and not zeros: "
                'attn_implementation="sdpa" where the model has it'
            )
        else:
            why = f"{name} is not softmax(query @ key) @ value"
        self.recorder.assumptions.lines.append(f"{who}: {why}")
        return outcome

    def _tried(self, implemented: _Function, module: nn.Module, example: Example, settings: dict[str, Any]) -> Outcome:
        if settings.get("dropout"):
            return Outcome(False)
        key = (implemented, id(module), example, tuple(sorted(settings.items())))
        if key not in self._outcomes:
            place = self.recorder.place
            place.is_running = False
            try:
                with (
                    clean_room(),
                    without_torch_functions(),
                    torch.no_grad(),
                    torch.autocast("cpu", enabled=False),
                ):
                    self._outcomes[key] = tried(implemented, module, example, settings)
            finally:
                place.is_running = True
        return self._outcomes[key]
