"""How errors of long sequences are planted: in keys that go round, rows that are dealt, and what a mask says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.ops import attention as entry
from autopar.runtime import attention, sees
from autopar.runtime.dealing import Setup, deal_of
from autopar.runtime.rings import Keys
from autopar.runtime.wires import Wire
from tests.gauntlet.plants import Patch

_Call = attention.AttentionOnDevice

# -- keys that go round, and their gradients


def stale_keys(patch: Patch) -> None:
    """Each step of a ring's backward reads the device's own keys."""
    back = _Call._attend_backward

    def broken(self: Any, tile: Any, tensors: Any, log_sum: Tensor) -> Any:
        g, q, _, _, o = tensors
        return back(self, tile, (g, q, self.given.key, self.given.value, o), log_sum)

    patch.setattr(_Call, "_attend_backward", broken)


def gradients_stay(patch: Patch) -> None:
    """The sums of gradients do not go home after the last step."""
    move = Keys.move

    def broken(self: Any, x: Tensor, step: Any, to: Any) -> Callable[[], Tensor]:
        return (lambda: x) if to is self.steps[0] else move(self, x, step, to)

    patch.setattr(Keys, "move", broken)


def _in_backward(patch: Patch, change: Callable[[Any], None]) -> None:
    """Break something of a call while it goes backward."""
    back = _Call.backward

    def broken(self: Any, *given: Tensor) -> list[Tensor]:
        change(self)
        return back(self, *given)

    patch.setattr(_Call, "backward", broken)


def last_step_left_out(patch: Patch) -> None:
    """Backward does not compute the last step of a ring."""

    def change(call: Any) -> None:
        tiles = call.tiles
        call.tiles = lambda step: iter(()) if step is call.keys.steps[-1] else tiles(step)

    _in_backward(patch, change)


def the_wrong_way(patch: Patch) -> None:
    """In backward keys come from the other side than the one that is told."""

    def change(call: Any) -> None:
        for wire in call.keys.wires:
            wire.passed_on = lambda x, by, shape, on=wire: Wire.passed_on(on, x, -by, shape)

    _in_backward(patch, change)


def own_sums(patch: Patch) -> None:
    """Each call goes backward from its own output and sums instead of the rows'."""
    back = attention.fused_attention_backward

    def broken(call: Any, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Any:
        made = attention.fused_attention(call, query, key, value)
        return back(call, gradient, query, key, value, *made)

    patch.setattr(attention, "fused_attention_backward", broken)


# -- what a mask says


def divided_by_nothing(patch: Patch) -> None:
    """A row is divided by the sum of its weights, also where it sees nothing."""
    forward = _Call.forward

    def broken(self: Any) -> tuple[Tensor, Tensor]:
        out, log_sum = forward(self)
        return out * (log_sum - log_sum).exp().unsqueeze(-1), log_sum

    patch.setattr(_Call, "forward", broken)


def sinks_are_dropped(patch: Patch) -> None:
    """Sinks are given, and take no share of any row."""
    patch.setattr(attention.MergedRows, "add_sinks", lambda self, sinks: None)


def sinks_learn_nothing(patch: Patch) -> None:
    """Sinks take their share, and their gradient is zero."""
    back = _Call.backward

    def broken(self: Any, *given: Tensor) -> list[Tensor]:
        *made, of_sinks = back(self, *given)
        return [*made, torch.zeros_like(of_sinks)]

    patch.setattr(_Call, "backward", broken)


def windows_are_dropped(patch: Patch) -> None:
    """Where queries are cut, each sees all keys before it."""
    made = _Call.__init__

    def broken(self: Any, *given: Any) -> None:
        made(self, *given)
        self.sees = replace(self.sees, left=None)

    patch.setattr(_Call, "__init__", broken)


def documents_are_dropped(patch: Patch) -> None:
    """Where queries are cut, a row sees what is before it in any document."""
    of = sees.Places.of
    patch.setattr(sees.Places, "of", staticmethod(lambda sees, sizes, documents, counts: of(sees, sizes, None, counts)))


def places_of_plain_rows(patch: Patch) -> None:
    """Rows are dealt, and stand in the documents where they would have stood."""
    made = _Call.__init__

    def broken(self: Any, tensors: Any, axes: Any, setup: str) -> None:
        made(self, tensors, axes, setup)
        self.queries = attention.ranges_of(deal_of(setup, None, False).here)

    patch.setattr(_Call, "__init__", broken)


# -- what is emitted


def never_dealt_back(patch: Patch) -> None:
    """What attention makes of dealt rows is taken for that of the rows that were there before."""

    def broken(query: Tensor, key: Tensor, value: Tensor, *more: Tensor | None, setup: str, **named: Any) -> Tensor:
        how = Setup.of(setup)
        given = dict(zip(("documents", "counts", "sinks"), more)) | named
        told = [x for x in map(given.get, ("documents", "counts")) if x is not None]
        (query,) = attention.deal_op([query], told, setup, False, False)
        if how.rings:
            key, value = attention.deal_op([key, value], told, setup, True, False)
        rest = [*told, *(x for x in [given.get("sinks")] if x is not None)]
        made: Tensor = attention.attention_op([query, key, value, *rest], setup)[0]
        return made

    patch.setattr(entry, "attention_on_device", broken)


def queries_from_zero(patch: Patch) -> None:
    """Each part of the queries is taken for the first."""
    patch.setattr(entry, "is_by_parts", lambda here, call: False)
