"""How errors of experts are planted: in what rows, routes and gradients do on their way from device to device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopar.codegen import recomputed, schedule
from autopar.module import storage
from autopar.module.storage import Storage
from autopar.runtime import experts, visits
from autopar.space import passages
from tests.gauntlet.plants import Patch, _gradients_called, on_conversion

MATRICES = ("up", "down", "up_bias", "down_bias")


# -- sums


def _more_in_backward(source: str, step: str) -> Callable[[Patch], None]:
    """The gradient of a value takes one more step."""
    return on_conversion(lambda key, to, f, b: (f, [*b, step] if key == source else b))


experts_are_summed = _more_in_backward("up", "all_reduce@tp")
balance_is_scaled = _more_in_backward("/sum.2", "all_reduce@tp")


def bias_on_every_device(patch: Patch) -> None:
    """The bias of the last matrices is added on each device that has a part of the sum."""
    on_conversion(lambda key, to, f, b: ([s for s in f if not s.startswith("lodge")], b))(patch)


def _gradients_of_matrices(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Change the gradients of experts on the device that has them."""

    def plant(patch: Patch) -> None:
        old = experts._Matrices.all_gradients
        patch.setattr(experts._Matrices, "all_gradients", lambda self: list(map(change, old(self))))

    return plant


twice_the_gradients = _gradients_of_matrices(lambda gradient: gradient * 2)
no_gradients = _gradients_of_matrices(torch.zeros_like)


def last_chunk_alone(patch: Patch) -> None:
    """What a chunk adds to the gradients of experts takes the place of what was there."""

    def add(self: Any, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = gradient

    patch.setattr(experts._Matrices, "add", add)


def router_is_detached(patch: Patch) -> None:
    """The weights of rows that travelled have no gradient."""
    old = experts._Device.backward

    def backward(self: Any, *given: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        of_rows, of_weights = old(self, *given, **how)
        return of_rows, torch.zeros_like(of_weights)

    patch.setattr(experts._Device, "backward", backward)


def whole_bias_of_each(patch: Patch) -> None:
    """Each expert of a row adds its whole last bias, not its share."""
    old = experts._computed

    def computed(rows: Any, of: Any, *more: Any) -> torch.Tensor:
        is_here = (rows.ids >= 0) & (rows.ids < len(of.up))
        bias = of.down_bias[rows.ids.clamp(0, len(of.up) - 1)]
        missing = torch.where(is_here, 1 - rows.weights, 0).unsqueeze(-1) * bias
        return old(rows, of, *more) + missing.sum(1)

    patch.setattr(experts, "_computed", computed)


def experts_count_once_a_device(patch: Patch) -> None:
    """Gradients of experts are told to torch as whole: each device has a norm of its own experts' alone."""
    _gradients_called(patch, lambda of: len(of.shape) == 3, storage.Replicate())


def unused_are_left_as_they_lay(patch: Patch) -> None:
    """Nothing is written into the gradients of an expert without rows."""
    old = experts.gradient_by_groups

    def gradient(one: torch.Tensor, other: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        return torch.where((counts == 0)[:, None, None], 1.0, old(one, other, ends))

    patch.setattr(experts, "gradient_by_groups", gradient)


# -- rows and routes


def slots_in_another_order(patch: Patch) -> None:
    """Weights travel in another order of slots than ids."""
    old = visits.Round.routes
    patch.setattr(visits.Round, "routes", lambda self, weights: old(self, weights.flip(1)))


def none_is_the_first(patch: Patch) -> None:
    """A row that goes to no expert goes to the first one here."""
    old = experts._Sorted.__init__

    def begin(self: Any, ids: torch.Tensor, count: int, is_whole: bool) -> None:
        old(self, torch.where((ids >= 0) & (ids < count), ids, 0), count, is_whole)

    patch.setattr(experts._Sorted, "__init__", begin)


def returned_to_other_rows(patch: Patch) -> None:
    """What comes back is added to the rows of a device in another order."""
    old = visits.Round.back

    def back(self: Any, y: torch.Tensor, to: torch.Tensor) -> None:
        sent, self.rows = self.rows, [rows.flip(0) for rows in self.rows]
        old(self, y, to)
        self.rows = sent

    patch.setattr(visits.Round, "back", back)


def one_round(patch: Patch) -> None:
    """Rows that are too many for the first round stay at home."""
    begin = visits.Way.__init__

    def first(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.rounds = 1

    patch.setattr(visits.Way, "__init__", first)


def all_have_the_first(patch: Patch) -> None:
    """Each device takes the first device's experts from the whole model."""
    old = Storage.take

    def take(self: Any, whole: torch.Tensor, sync: Any) -> torch.Tensor:
        if len(self.shape) != 3:
            return old(self, whole, sync)
        local_part = self.spread(whole, sync)
        axes = list(storage.bind_axes(self.mesh).values())
        for dim, cut in self.sharding.cuts.items():
            for axis in cut:
                first = replace(axes[axis], index=0)
                local_part = storage.slice(local_part, first, dim, local_part.shape[dim], ())
        return self.wrap(local_part.contiguous())

    patch.setattr(Storage, "take", take)


def routes_made_again(patch: Patch) -> None:
    """Routes are recomputed, and come out otherwise, as where numbers are equal."""
    for module in (passages, recomputed):
        patch.setattr(module, "routes_of", lambda ops: set())
    made_again_otherwise(patch)


def made_again_otherwise(patch: Patch) -> None:
    """Of what is recomputed, the choice of the largest numbers comes out otherwise."""
    late = schedule.recompute_late

    def otherwise(half: Any) -> None:
        late(half)
        nodes = list(half.graph.nodes) if half.is_backward else []
        for node in nodes:
            if node.target is torch.ops.aten.topk.default:
                node.args = (*node.args[:2], -1, False)

    otherwise.__doc__ = late.__doc__
    patch.setattr(schedule, "PASSES", tuple(otherwise if p is late else p for p in schedule.PASSES))
