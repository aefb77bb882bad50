"""Experts: each row goes through some of several networks, and the results are added up with weights.

    out[t] = sum over slots j of weights[t, j] * behind(down(body(up(x[t]))))    with the matrices of expert ids[t, j]

Rows are sorted by expert, and each expert multiplies its group. Where devices hold experts of their own, rows travel:

    x, ids, weights --visits--> devices of the experts --weighted sum of a visit--> out

A visit is a row on its way to a device: it goes there once, however many of its experts stand there. Counts travel
first, so that all devices know all of them and the number of rounds; a round brings at most `rows` visits from a device
to another, so that no routing takes more memory than another, but more rounds. Nothing is dropped. Of the first round
the rows that arrived, and what the first matrices make of them, are kept for backward; of later ones they are sent and
made again. Several axes nest, the major one first.

Backward is written by hand, as these functions are kernels of custom ops.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.bodies import gradients_of_body, reads_of, run_body
from autopar.runtime.collectives import Axis
from autopar.runtime.grouped import gradient_by_groups, product_by_groups
from autopar.runtime.slots import slot_sums, wide_of
from autopar.runtime.visits import Hop, Way
from autopar.runtime.wires import EXCHANGING, Exchanging, Wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a device does, beside its tensors; as text it is an argument of the ops."""

    body: str
    chunk: int  # pairs of a row and an expert whose hidden rows are in memory at once
    transposed: bool = False  # matrices lie as [experts, in, out]
    biases: tuple[bool, bool] = (False, False)  # whether the first and the last matrices have biases
    hops: tuple[Hop, ...] = ()
    behind: str = ""  # a body that each result goes through before it is weighted, or ""

    def text(self) -> str:
        return json.dumps([self.body, self.chunk, self.transposed, self.biases, self.hops, self.behind])

    @staticmethod
    @functools.cache
    def of(text: str) -> Setup:
        """The setup that `text` says."""
        body, chunk, transposed, biases, hops, behind = json.loads(text)
        return Setup(body, chunk, transposed, tuple(biases), tuple(Hop(*hop) for hop in hops), behind)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which rows travel, major first."""
        return tuple(hop.axis for hop in self.hops if hop.travels)

    @property
    def arrivals(self) -> int:
        """Rows of the buffer that holds what arrived in the first round of the outermost exchange."""
        return next((hop.parts * hop.rows for hop in self.hops if hop.travels), 0)

    def width(self, up: Tensor) -> int:
        """The columns of what the body takes."""
        return up.shape[2 if self.transposed else 1]

    def named(self, tensors: Sequence[T]) -> list[T | None]:
        """The tensors of a call, None for a bias that it has not."""
        more = iter(tensors[5:])
        return [*tensors[:5], *(next(more) if has else None for has in self.biases)]

    def more(self, tensors: Sequence[T]) -> Sequence[T]:
        """The tensors of a call that bodies read besides rows."""
        return tensors[5 + sum(self.biases) :]


@dataclass(slots=True, eq=False)
class _Matrices:
    """The matrices of a device's experts, and what is between them; in backward, their gradients."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    more: Sequence[Tensor]  # tensors that bodies read besides rows: first those of the body, then those of behind
    setup: Setup
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def hidden(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """The product that the body takes."""
        made = product_by_groups(rows, self.up, ends, not self.setup.transposed)
        return made if self.up_bias is None else made + self.up_bias[experts]

    def results(self, hidden: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """The products of hidden rows and the last matrices."""
        made = product_by_groups(hidden, self.down, ends, not self.setup.transposed)
        return made if self.down_bias is None else made + self.down_bias[experts]

    def places(self, body: str) -> range:
        """The places of what a body reads besides rows."""
        first = reads_of(self.setup.body)
        return range(first) if body == self.setup.body else range(first, len(self.more))

    def run(self, body: str, rows: Tensor) -> Tensor:
        return run_body(body)(rows, *(self.more[i] for i in self.places(body)))

    def back(self, body: str, rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
        """The gradient of a body's rows; those of what it reads besides are added to the others."""
        places = self.places(body)
        if places:  # Rows of no expert are arbitrary, and must not be summed with the others.
            is_there = _are_there(rows, ends)
            other = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
            rows = torch.where(is_there, rows, other)
            gradient = torch.where(is_there, gradient, 0)
        of_rows, *of_more = gradients_of_body(body, rows, [self.more[i] for i in places], gradient)
        for i, found in zip(places, of_more, strict=True):
            self.add(f"more {i}", found.to(wide_of(found)))
        return of_rows

    def add(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def add_bias(self, name: str, gradient: Tensor, experts: Tensor, ends: Tensor) -> None:
        """Add the sums of each expert's rows to the gradient of a bias, if there is one."""
        bias: Tensor | None = getattr(self, name)
        if bias is not None:
            own = torch.where(_are_there(gradient, ends), gradient, 0)
            summed = torch.zeros(bias.shape, dtype=wide_of(bias), device=bias.device)
            self.add(name, summed.index_add_(0, experts, own.to(summed.dtype)))

    def all_gradients(self) -> list[Tensor]:
        """Gradients of the matrices, of the biases that there are, and of what bodies read besides rows."""
        of = {name: getattr(self, name) for name in ("up", "down", "up_bias", "down_bias")}
        of.update((f"more {i}", x) for i, x in enumerate(self.more))
        found = {name: self.gradients.get(name, torch.zeros_like(x)) for name, x in of.items() if x is not None}
        return [gradient.to(of[name].dtype) for name, gradient in found.items()]


def _are_there(rows: Tensor, ends: Tensor) -> Tensor:
    """Whether each of some pairs, in the order of experts, has an expert here."""
    return (torch.arange(rows.shape[0], device=rows.device) < ends[-1])[:, None]


@dataclass(slots=True)
class _Kept:
    """What backward gets of the first round: rows that arrived, and what the body takes of the first chunk."""

    arrived: Tensor
    before: Tensor | None = None


class _Sorted:
    """The pairs of a row and an expert of its, in the order of experts; pairs of no expert here stand last."""

    def __init__(self, ids: Tensor, experts: int, is_whole: bool) -> None:
        here = (ids >= 0) & (ids < experts)
        self.experts, order = torch.where(here, ids, experts).flatten().sort(stable=True)
        each = torch.arange(experts, device=ids.device)
        self.ends = torch.searchsorted(self.experts, each, right=True)
        self.order = order
        self.slots = ids.shape[1]
        self.place = torch.empty_like(order)
        self.place[order] = torch.arange(order.numel(), device=ids.device)
        self.here = here
        # A host that need not know how many pairs there are does not wait for a device that counts them.
        self.total = order.numel() if is_whole else int(self.ends[-1])

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.total, max(1, size)):
            yield first, min(self.total, first + max(1, size))

    def of(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of some pairs, their experts, and the ends of each expert's group among them."""
        experts = self.experts[first:last].clamp(max=self.ends.numel() - 1)
        return self.order[first:last] // self.slots, experts, (self.ends - first).clamp(0, last - first)

    def places(self, first: int, last: int) -> Tensor:
        """The places of the pairs of all rows among some pairs, by slot; -1 for those that do not stand there."""
        place = self.place.view(-1, self.slots) - first
        return torch.where((place >= 0) & (place < last - first) & self.here, place, -1)


class _Rows(NamedTuple):
    """Rows, and where they go with what weights."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def _computed(rows: _Rows, of: _Matrices, is_whole: bool, keep: _Kept | None) -> Tensor:
    """The weighted sums of what this device's experts make of its rows."""
    pairs = _Sorted(rows.ids, of.up.shape[0], is_whole)
    wide = wide_of(rows.x, rows.weights)
    out: Tensor | None = None
    for first, last in pairs.chunks(of.setup.chunk):
        places, experts, ends = pairs.of(first, last)
        before = of.hidden(rows.x[places], experts, ends)
        if keep is not None and first == 0:
            keep.before = before
        hidden = of.run(of.setup.body, before)
        del before
        made = of.results(hidden, experts, ends)
        del hidden
        if of.setup.behind:
            made = of.run(of.setup.behind, made)
        dtype = rows.x.dtype if last == pairs.total else wide
        out = slot_sums(made, pairs.places(first, last), rows.weights, out, dtype)
    return torch.zeros_like(rows.x) if out is None else out


def _computed_back(
    rows: _Rows, gradient: Tensor, of: _Matrices, is_whole: bool, kept: _Kept | None
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights; those of matrices are added to `of`.

    What is no longer read is freed at once: hidden rows are the largest tensors of a step.
    """
    x, ids, weights = rows
    transposed = of.setup.transposed
    pairs = _Sorted(ids, of.up.shape[0], is_whole)
    of_x: Tensor | None = None
    of_weights = torch.zeros(weights.shape, dtype=wide_of(x, weights), device=x.device)
    for first, last in pairs.chunks(of.setup.chunk):
        places, experts, ends = pairs.of(first, last)
        given = x[places]
        before = (
            kept.before[: last - first]
            if kept and kept.before is not None and first == 0
            else of.hidden(given, experts, ends)
        )
        hidden = of.run(of.setup.body, before)
        comes = gradient[places]
        share = weights.flatten()[pairs.order[first:last], None]
        if of.setup.behind:
            made = of.results(hidden, experts, ends)
            of_share = _dots(comes, of.run(of.setup.behind, made))
            comes = of.back(of.setup.behind, made, torch.mul(comes, share, out=comes), ends)
            del made
            of_hidden = product_by_groups(comes, of.down, ends, transposed)
        else:  # The product without weights gives their gradients, too.
            of_hidden = product_by_groups(comes, of.down, ends, transposed)
            of_share = _dots(of_hidden, hidden)
            if of.down_bias is not None:
                of_share = of_share + _dots(comes, of.down_bias[experts])
            torch.mul(of_hidden, share, out=of_hidden)
            torch.mul(comes, share, out=comes)
        of.add("down", _laid_out(comes, hidden, ends, transposed))
        of.add_bias("down_bias", comes, experts, ends)
        del hidden, comes
        of_before = of.back(of.setup.body, before, of_hidden, ends)
        del before, of_hidden
        of.add("up", _laid_out(of_before, given, ends, transposed))
        of.add_bias("up_bias", of_before, experts, ends)
        del given
        back = product_by_groups(of_before, of.up, ends, transposed)
        del of_before
        at = pairs.places(first, last)
        of_x = slot_sums(back, at, None, of_x, x.dtype if last == pairs.total else wide_of(x))
        of_weights += torch.where(at >= 0, of_share[at.clamp(min=0)], 0)
    return torch.zeros_like(x) if of_x is None else of_x, of_weights.to(weights.dtype)


def _dots(one: Tensor, other: Tensor) -> Tensor:
    """The scalar product of each pair of rows."""
    return torch.bmm(one[:, None], other[..., None])[:, 0, 0]


def _laid_out(of_result: Tensor, rows: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """The gradient of each expert's matrix."""
    return gradient_by_groups(*((rows, of_result) if transposed else (of_result, rows)), ends)


def _staying(rows: _Rows, hop: Hop) -> _Rows:
    """Ids among this device's own experts; what others have is of no expert here."""
    local = rows.ids - hop.place * hop.step
    is_here = (rows.ids >= 0) & (rows.ids < hop.experts) & (local >= 0) & (local < hop.step)
    return rows._replace(ids=torch.where(is_here, local, -1))


@dataclass(frozen=True, slots=True, eq=False)
class _Device:
    """What a device computes and sends, axis by axis.

    Only the outermost exchange keeps rows that arrive: inner ones are near, and send them again.
    """

    of: _Matrices
    axes: Mapping[str, Axis]

    @property
    def is_whole(self) -> bool:
        """Whether the device has all experts, so that each pair is its own."""
        return not self.of.setup.hops

    def _way(self, rows: _Rows, hop: Hop, inner: Sequence[Hop]) -> Way:
        wires = [Wire(self.axes.get(h.axis)) for h in (hop, *inner) if h.travels]
        return Way(rows.ids, hop, wires[0], wires[1:])

    def forward(self, rows: _Rows, hops: Sequence[Hop], keep: _Kept | None, is_outer: bool = True) -> Tensor:
        """The results of rows."""
        if not hops:
            return _computed(rows, self.of, self.is_whole, keep)
        hop, *inner = hops
        if not hop.travels:
            return self.forward(_staying(rows, hop), inner, keep, is_outer)
        out = torch.zeros(rows.x.shape, dtype=wide_of(rows.x), device=rows.x.device)
        way = self._way(rows, hop, inner)
        for i in range(way.rounds):
            here = way.round(i)
            arrived = here.there(rows.x)
            keeps = keep if i == 0 else None
            if keeps is not None and is_outer:
                keeps.arrived[: arrived.shape[0]] = arrived
            here.back(self.forward(_Rows(arrived, *here.routes(rows.weights)), inner, keeps, False), out)
        return out.to(rows.x.dtype)

    def backward(
        self, rows: _Rows, gradient: Tensor, hops: Sequence[Hop], kept: _Kept | None, is_outer: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The gradients of rows and weights."""
        if not hops:
            return _computed_back(rows, gradient, self.of, self.is_whole, kept)
        hop, *inner = hops
        if not hop.travels:
            return self.backward(_staying(rows, hop), gradient, inner, kept, is_outer)
        x, _, weights = rows
        of_x = torch.zeros(x.shape, dtype=wide_of(x), device=x.device)
        of_weights = torch.zeros(weights.shape, dtype=wide_of(weights), device=x.device)
        way = self._way(rows, hop, inner)
        for i in range(way.rounds):
            here = way.round(i)
            keeps = kept if i == 0 else None
            arrived = keeps.arrived[: sum(here.comes)] if keeps is not None and is_outer else here.there(x)
            given = _Rows(arrived, *here.routes(weights))
            of_arrived, of_given = self.backward(given, here.there(gradient), inner, keeps, False)
            here.back(of_arrived, of_x)
            here.back(torch.where(given.ids >= 0, of_given, 0), of_weights)
        return of_x.to(x.dtype), of_weights.to(weights.dtype)


# -- as ops: in a program the names of axes become axes, and the functions are called instead


def experts_forward(tensors: Sequence[Tensor], axes: Sequence[Axis], setup: str) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a device's rows, and what backward gets of the first round.

    `tensors` are rows, ids, weights, both matrices, the biases that there are, and what bodies read besides rows.
    """
    how = Setup.of(setup)
    x, ids, weights, up, *_ = tensors
    keep = _Kept(x.new_zeros(how.arrivals, x.shape[1]))
    out = _device(tensors, axes, how).forward(_Rows(x, ids, weights), how.hops, keep)
    before = x.new_zeros(0, how.width(up)) if keep.before is None else keep.before
    return out, keep.arrived, F.pad(before, (0, 0, 0, how.chunk - len(before))) if len(before) < how.chunk else before


def experts_backward(
    tensors: Sequence[Tensor], axes: Sequence[Axis], kept: Sequence[Tensor], gradient: Tensor, setup: str
) -> list[Tensor]:
    """Gradients of all tensors but ids."""
    how = Setup.of(setup)
    device = _device(tensors, axes, how)
    x, ids, weights, *_ = tensors
    found = device.backward(_Rows(x, ids, weights), gradient, how.hops, _Kept(*kept))
    return [*found, *device.of.all_gradients()]


def _device(tensors: Sequence[Tensor], axes: Sequence[Axis], how: Setup) -> _Device:
    up, down, up_bias, down_bias = how.named(tensors)[3:]
    assert up is not None and down is not None
    of = _Matrices(up, down, up_bias, down_bias, how.more(tensors), how)
    return _Device(of, {axis.name: axis for axis in axes})


@torch.library.custom_op("autopar::experts", mutates_args=())
def experts_op(tensors: Sequence[Tensor], setup: str) -> tuple[Tensor, Tensor, Tensor]:
    return experts_forward(tensors, (), setup)


@experts_op.register_fake
def _(tensors: Sequence[Tensor], setup: str) -> tuple[Tensor, Tensor, Tensor]:
    x = tensors[0]
    how = Setup.of(setup)
    arrived = x.new_empty(how.arrivals, x.shape[1])
    return x.new_empty(x.shape), arrived, x.new_empty(how.chunk, how.width(tensors[3]))


@torch.library.custom_op("autopar::experts_backward", mutates_args=())
def experts_backward_op(
    tensors: Sequence[Tensor], kept: Sequence[Tensor], gradient: Tensor, setup: str
) -> list[Tensor]:
    return experts_backward(tensors, (), kept, gradient, setup)


@experts_backward_op.register_fake
def _(tensors: Sequence[Tensor], kept: Sequence[Tensor], gradient: Tensor, setup: str) -> list[Tensor]:
    return [t.new_empty(t.shape) for i, t in enumerate(tensors) if i != 1]  # ids have no gradient


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.setup = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[list[Tensor | None] | None, None]:
    *tensors, arrived, before = ctx.saved_tensors
    if gradient is None:
        return [None] * len(tensors), None
    of_x, *rest = experts_backward_op(tensors, [arrived, before], gradient.contiguous(), ctx.setup)
    return [of_x, None, *rest], None


experts_op.register_autograd(_gradients, setup_context=_remember)


def _axes(*arguments: Any) -> tuple[str, ...]:
    return Setup.of(arguments[-1]).axes


def _sent(to_all: int, *arguments: Any) -> Iterator[tuple[str, str, int]]:
    """The messages of a call for a balanced router; inner exchanges send their rows again in backward."""
    for place, axis in enumerate(_axes(*arguments)):
        yield axis, "all_gather", 1
        yield axis, "all_reduce", place
        yield axis, "all_to_all", to_all + (to_all > 3 and place > 0)


EXCHANGING[torch.ops.autopar.experts.default] = Exchanging(experts_forward, _axes, functools.partial(_sent, 3))
EXCHANGING[torch.ops.autopar.experts_backward.default] = Exchanging(
    experts_backward, _axes, functools.partial(_sent, 4)
)
