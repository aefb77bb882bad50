"""Experts: each row goes through some of several networks, and the results are added up with weights.

    out[t] = sum over slots j of weights[t, j] * behind(down(body(up(x[t]))))    with the matrices of expert ids[t, j]

Rows are sorted by expert, and each expert multiplies its group. Where devices hold experts of their own, rows travel:

    x, ids, weights --visits--> devices of the experts --weighted sum of a visit--> out

A visit is a row on its way to a device: it goes there once, however many of its experts stand there. Counts travel
first, so that all devices know all of them and the number of rounds; a round brings at most `rows` visits from a device
to another, so that no routing takes more memory than another, but more rounds. Nothing is dropped. Of the first round
the rows that arrived are kept for backward; of later ones they are sent again. Several axes nest, the major one first.

Backward makes hidden rows again, and is written by hand, as these functions are kernels of custom ops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.agreement import wait_for
from autopar.runtime.bodies import gradients_of_body, reads_of, run_body
from autopar.runtime.collectives import Axis, gather_into
from autopar.runtime.grouped import gradient_by_groups, product_by_groups


class Hop(NamedTuple):
    """An axis that cuts experts: rows travel to the device of their experts, or those of others are left out."""

    axis: str
    parts: int
    experts: int  # experts before the axis cuts them
    rows: int  # visits from a device to another in a round; 0: rows stay, and a device has its own experts alone
    index: int = -1  # this device's place on the axis, where rows stay

    @property
    def step(self) -> int:
        return -(-self.experts // self.parts)

    @property
    def travels(self) -> bool:
        return self.rows > 0


def hops_as_text(hops: Sequence[Hop]) -> str:
    """Hops as an argument of a custom op."""
    return json.dumps([list(hop) for hop in hops]) if hops else ""


def hops_of(text: str) -> tuple[Hop, ...]:
    return tuple(Hop(*given) for given in json.loads(text)) if text else ()


@dataclass(slots=True, eq=False)
class _Matrices:
    """The matrices of a device's experts, and what is between them; in backward, their gradients."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    given: Sequence[Tensor]  # what body and behind read besides rows
    body: str
    behind: str  # a body that each result goes through before it is weighted, or ""
    transposed: bool  # matrices lie as [experts, in, out]
    chunk: int  # pairs of a row and an expert whose hidden rows are in memory at once
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def hidden(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """What the body takes."""
        made = product_by_groups(rows, self.up, ends, not self.transposed)
        return made if self.up_bias is None else made + self.up_bias[experts]

    def results(self, hidden: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """What the last matrices make of hidden rows."""
        made = product_by_groups(hidden, self.down, ends, not self.transposed)
        return made if self.down_bias is None else made + self.down_bias[experts]

    @property
    def first_behind(self) -> int:
        """The first tensor that is read behind the last matrices, and not between the two."""
        return reads_of(self.body)

    def run_between(self, rows: Tensor) -> Tensor:
        return run_body(self.body)(rows, *self.given[: self.first_behind])

    def run_behind(self, rows: Tensor) -> Tensor:
        return run_body(self.behind)(rows, *self.given[self.first_behind :])

    def back_between(self, rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
        return self._back(self.body, (0, self.first_behind), rows, gradient, ends)

    def back_behind(self, rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
        return self._back(self.behind, (self.first_behind, len(self.given)), rows, gradient, ends)

    def _back(self, body: str, reads: tuple[int, int], rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
        """The gradient of a body's rows; those of what it reads besides are added to the others."""
        places = range(*reads)
        if places:  # Rows of no expert are arbitrary, and must not be summed with the others.
            is_there = _are_there(rows, ends)
            other = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
            rows, gradient = torch.where(is_there, rows, other), torch.where(is_there, gradient, 0)
        of_rows, *of_given = gradients_of_body(body, rows, [self.given[i] for i in places], gradient)
        for i, found in zip(places, of_given, strict=True):
            self.add(f"given {i}", found.to(_wide(found)))
        return of_rows

    def add(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def add_bias(self, name: str, gradient: Tensor, experts: Tensor, ends: Tensor) -> None:
        """Add the sums of each expert's rows to the gradient of a bias, if there is one."""
        bias: Tensor | None = getattr(self, name)
        if bias is not None:
            own = torch.where(_are_there(gradient, ends), gradient, 0)
            summed = torch.zeros(bias.shape, dtype=_wide(bias), device=bias.device)
            self.add(name, summed.index_add_(0, experts, own.to(summed.dtype)))

    def all_gradients(self) -> list[Tensor]:
        """Gradients of the matrices, of the biases that there are, and of what else is read."""
        of = {name: getattr(self, name) for name in ("up", "down", "up_bias", "down_bias")}
        of.update((f"given {i}", x) for i, x in enumerate(self.given))
        found = {name: self.gradients.get(name, torch.zeros_like(x)) for name, x in of.items() if x is not None}
        return [gradient.to(of[name].dtype) for name, gradient in found.items()]


def _are_there(rows: Tensor, ends: Tensor) -> Tensor:
    """Which of some pairs, in the order of experts, have an expert here."""
    return (torch.arange(rows.shape[0], device=rows.device) < ends[-1])[:, None]


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

    def slot(self, j: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Where the pairs of slot `j` of all rows stand among some pairs, and which of them do."""
        place = self.place.view(-1, self.slots)[:, j] - first
        is_there = (place >= 0) & (place < last - first) & self.here[:, j]
        return place.clamp(0, max(0, last - first - 1)), is_there

    def add_to(self, out: Tensor, made: Tensor, first: int, last: int, weights: Tensor | None = None) -> None:
        """Add what was made of some pairs to their rows, slot by slot: a fixed order, as atomic sums have none."""
        for j in range(self.slots):
            place, is_there = self.slot(j, first, last)
            share = torch.where(is_there[:, None], made[place], 0)  # rows of no expert are arbitrary
            if weights is None:
                out.add_(share)
            else:
                out.addcmul_(share.to(out.dtype), weights[:, j, None].to(out.dtype))


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype in which results of several experts are added up."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _computed(x: Tensor, ids: Tensor, weights: Tensor, of: _Matrices, is_whole: bool) -> Tensor:
    """The weighted sums of what this device's experts make of its rows."""
    pairs = _Sorted(ids, of.up.shape[0], is_whole)
    out = torch.zeros(x.shape, dtype=_wide(x, weights), device=x.device)
    for first, last in pairs.chunks(of.chunk):
        rows, experts, ends = pairs.of(first, last)
        hidden = of.run_between(of.hidden(x[rows], experts, ends))
        made = of.results(hidden, experts, ends)
        del hidden
        if of.behind:
            made = of.run_behind(made)
        pairs.add_to(out, made, first, last, weights)
    return out.to(x.dtype)


def _computed_back(
    x: Tensor, ids: Tensor, weights: Tensor, gradient: Tensor, of: _Matrices, is_whole: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights; those of matrices are added to `of`.

    What is no longer read is freed at once: hidden rows are the largest tensors of a step.
    """
    pairs = _Sorted(ids, of.up.shape[0], is_whole)
    of_x = torch.zeros(x.shape, dtype=_wide(x), device=x.device)
    of_weights = torch.zeros(weights.shape, dtype=_wide(x, weights), device=x.device)
    for first, last in pairs.chunks(of.chunk):
        rows, experts, ends = pairs.of(first, last)
        given = x[rows]
        before = of.hidden(given, experts, ends)
        hidden = of.run_between(before)
        comes = gradient[rows]
        share = weights.flatten()[pairs.order[first:last], None]
        if of.behind:
            made = of.results(hidden, experts, ends)
            of_share = _dots(comes, of.run_behind(made))
            comes = of.back_behind(made, torch.mul(comes, share, out=comes), ends)
            del made
            of_hidden = product_by_groups(comes, of.down, ends, of.transposed)
        else:  # The product without weights gives their gradients, too.
            of_hidden = product_by_groups(comes, of.down, ends, of.transposed)
            of_share = _dots(of_hidden, hidden)
            if of.down_bias is not None:
                of_share = of_share + _dots(comes, of.down_bias[experts])
            torch.mul(of_hidden, share, out=of_hidden)
            torch.mul(comes, share, out=comes)
        of.add("down", _laid_out(comes, hidden, ends, of.transposed))
        of.add_bias("down_bias", comes, experts, ends)
        del hidden, comes
        of_before = of.back_between(before, of_hidden, ends)
        del before, of_hidden
        of.add("up", _laid_out(of_before, given, ends, of.transposed))
        of.add_bias("up_bias", of_before, experts, ends)
        del given
        back = product_by_groups(of_before, of.up, ends, of.transposed)
        del of_before
        pairs.add_to(of_x, back, first, last)
        for j in range(pairs.slots):
            place, is_there = pairs.slot(j, first, last)
            of_weights[:, j] += torch.where(is_there, of_share[place], 0)
    return of_x.to(x.dtype), of_weights.to(weights.dtype)


def _dots(one: Tensor, other: Tensor) -> Tensor:
    """The scalar product of each pair of rows."""
    return torch.bmm(one[:, None], other[..., None])[:, 0, 0]


def _laid_out(of_result: Tensor, rows: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """The gradient of each expert's matrix."""
    return gradient_by_groups(*((rows, of_result) if transposed else (of_result, rows)), ends)


# -- on the way


def _exchanged(x: Tensor, axis: Axis, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
    """Rows that come from each device of an axis, for rows sent to each."""
    made = x.new_empty((sum(comes), *x.shape[1:]))
    work = dist.all_to_all_single(made, x.contiguous(), list(comes), list(sends), group=axis.group, async_op=True)
    wait_for(work)
    return made


class _Way:
    """Which rows visit which device of an axis, round by round."""

    def __init__(self, ids: Tensor, hop: Hop, axis: Axis, inner: Sequence[Axis]) -> None:
        self.hop, self.axis, self.ids = hop, axis, ids
        tokens = ids.shape[0]
        owner = torch.where((ids >= 0) & (ids < hop.experts), ids // hop.step, -1)
        places = torch.arange(hop.parts, device=ids.device)
        visits = (owner[None] == places[:, None, None]).any(-1)
        mine = visits.sum(1)
        counts = mine.new_empty(hop.parts * hop.parts)
        wait_for(gather_into(counts, mine, group=axis.group, async_op=True))
        self.counts: list[list[int]] = counts.view(hop.parts, hop.parts).tolist()  # by device, to each device
        rounds = max(1, -(-max(map(max, self.counts)) // hop.rows))
        for other in inner:  # Devices that meet inside take part in as many rounds.
            most = torch.tensor([rounds], device=ids.device)
            wait_for(dist.all_reduce(most, dist.ReduceOp.MAX, group=other.group, async_op=True))
            rounds = int(most)
        self.rounds = rounds
        order = visits.flatten().logical_not().to(torch.uint8).argsort(stable=True)
        own = self.counts[axis.index]
        self.rows = (order[: sum(own)] % max(1, tokens)).split(own)

    def round(self, i: int) -> _Round:
        return _Round(self, i)


class _Round:
    """The visits of one round."""

    def __init__(self, way: _Way, i: int) -> None:
        hop, me = way.hop, way.axis.index
        first = i * hop.rows
        self.axis = way.axis
        self.sends = [max(0, min(hop.rows, n - first)) for n in way.counts[me]]
        self.comes = [max(0, min(hop.rows, counts[me] - first)) for counts in way.counts]
        self.rows = [rows[first : first + hop.rows] for rows in way.rows]
        sent = torch.cat(self.rows)
        to = torch.arange(hop.parts, device=sent.device).repeat_interleave(
            torch.tensor(self.sends, device=sent.device), output_size=sum(self.sends)
        )
        local = way.ids[sent] - to[:, None] * hop.step
        self.is_there = (local >= 0) & (local < hop.step)
        self.ids = torch.where(self.is_there, local, -1)
        self.sent = sent

    def there(self, x: Tensor) -> Tensor:
        """Send something of each visit's row to where it goes."""
        return _exchanged(x[self.sent], self.axis, self.sends, self.comes)

    def routes(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send where each visit goes there, and with what weights, in one message."""
        given = torch.where(self.is_there, weights[self.sent], 0)
        packed = torch.cat([self.ids.contiguous().view(torch.uint8), given.contiguous().view(torch.uint8)], 1)
        comes = _exchanged(packed, self.axis, self.sends, self.comes)
        ids, arrived = comes.split([self.ids.shape[1] * 8, given.shape[1] * given.element_size()], 1)
        return ids.contiguous().view(self.ids.dtype), arrived.contiguous().view(given.dtype)

    def back(self, y: Tensor, to: Tensor) -> None:
        """Return something of each visit, and add it to its row; one device after the other, in a fixed order."""
        for rows, made in zip(self.rows, self.returned(y), strict=True):
            to.index_add_(0, rows, made.to(to.dtype))

    def returned(self, y: Tensor) -> Sequence[Tensor]:
        return _exchanged(y, self.axis, self.comes, self.sends).split(self.sends)


Axes = Mapping[str, Axis]
Kept = Callable[[Tensor], None]


def _staying(ids: Tensor, hop: Hop) -> Tensor:
    """Ids among this device's own experts; what others have is of no expert here."""
    local = ids - hop.index * hop.step
    is_here = (ids >= 0) & (ids < hop.experts) & (local >= 0) & (local < hop.step)
    return torch.where(is_here, local, -1)


def _forward(
    x: Tensor, ids: Tensor, weights: Tensor, of: _Matrices, hops: Sequence[Hop], axes: Axes, keep: Kept | None
) -> Tensor:
    if not hops:
        return _computed(x, ids, weights, of, is_whole=keep is None)
    hop, *inner = hops
    if not hop.travels:
        return _forward(x, _staying(ids, hop), weights, of, inner, axes, keep)
    out = torch.zeros(x.shape, dtype=_wide(x), device=x.device)
    way = _Way(ids, hop, axes[hop.axis], [axes[h.axis] for h in inner if h.travels])
    for i in range(way.rounds):
        here = way.round(i)
        arrived = here.there(x)
        if keep is not None and i == 0:
            keep(arrived)
        here.back(_forward(arrived, *here.routes(weights), of, inner, axes, _nowhere), out)
    return out.to(x.dtype)


def _nowhere(arrived: Tensor) -> None:
    """Inner exchanges keep nothing: they are near, and send rows again."""


def _backward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gradient: Tensor,
    of: _Matrices,
    hops: Sequence[Hop],
    axes: Axes,
    kept: Tensor | None,
    is_whole: bool,
) -> tuple[Tensor, Tensor]:
    if not hops:
        return _computed_back(x, ids, weights, gradient, of, is_whole)
    hop, *inner = hops
    if not hop.travels:
        return _backward(x, _staying(ids, hop), weights, gradient, of, inner, axes, kept, is_whole)
    of_x = torch.zeros(x.shape, dtype=_wide(x), device=x.device)
    of_weights = torch.zeros(weights.shape, dtype=_wide(weights), device=x.device)
    way = _Way(ids, hop, axes[hop.axis], [axes[h.axis] for h in inner if h.travels])
    for i in range(way.rounds):
        here = way.round(i)
        arrived = kept[: sum(here.comes)] if kept is not None and i == 0 else here.there(x)
        given = here.routes(weights)
        found = _backward(arrived, *given, here.there(gradient), of, inner, axes, None, False)
        here.back(found[0], of_x)
        returned = here.returned(torch.where(given[0] >= 0, found[1], 0))
        for rows, made in zip(here.rows, returned, strict=True):
            of_weights.index_add_(0, rows, made.to(of_weights.dtype))
    return of_x.to(x.dtype), of_weights.to(weights.dtype)


# -- as ops: in a program the names of axes become axes, and the functions are called instead


def arrivals(hops: Sequence[Hop]) -> int:
    """Rows of the buffer that holds what arrived in the first round of the outermost exchange."""
    return next((hop.parts * hop.rows for hop in hops if hop.travels), 0)


def experts_forward(
    x: Tensor,
    axes: Sequence[Axis],
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The result of a device's rows, and the rows that arrived here in the first round."""
    of = _Matrices(up, down, up_bias, down_bias, given, body, behind, transposed, chunk)
    way = hops_of(hops)
    kept = x.new_zeros(arrivals(way), x.shape[1])

    def keep(arrived: Tensor) -> None:
        kept[: arrived.shape[0]] = arrived

    return _forward(x, ids, weights, of, way, {a.name: a for a in axes}, keep if way else None), kept


def experts_backward(
    x: Tensor,
    axes: Sequence[Axis],
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    arrived: Tensor,
    gradient: Tensor,
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> list[Tensor]:
    """Gradients of rows, weights, matrices, of the biases that there are, and of what bodies read besides."""
    of = _Matrices(up, down, up_bias, down_bias, given, body, behind, transposed, chunk)
    way = hops_of(hops)
    kept = arrived if arrivals(way) else None
    by_name = {a.name: a for a in axes}
    of_x, of_weights = _backward(x, ids, weights, gradient, of, way, by_name, kept, not way)
    return [of_x, of_weights, *of.all_gradients()]


@torch.library.custom_op("autopar::experts", mutates_args=())
def experts_op(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    how = body, behind, transposed, hops, chunk
    return experts_forward(x, (), ids, weights, up, down, up_bias, down_bias, given, *how)


@experts_op.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(arrivals(hops_of(hops)), x.shape[1])


@torch.library.custom_op("autopar::experts_backward", mutates_args=())
def experts_backward_op(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    arrived: Tensor,
    gradient: Tensor,
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> list[Tensor]:
    how = body, behind, transposed, hops, chunk
    return experts_backward(x, (), ids, weights, up, down, up_bias, down_bias, given, arrived, gradient, *how)


@experts_backward_op.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    given: list[Tensor],
    arrived: Tensor,
    gradient: Tensor,
    body: str,
    behind: str,
    transposed: bool,
    hops: str,
    chunk: int,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, weights, up, down, up_bias, down_bias, *given) if t is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, given, ctx.body, ctx.behind, ctx.transposed, ctx.hops, ctx.chunk = inputs
    ctx.save_for_backward(*tensors, *given, output[1])
    ctx.given = len(given)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (*(None,) * 7, [None] * ctx.given, *(None,) * 5)
    saved = ctx.saved_tensors
    tensors, given, arrived = saved[:7], list(saved[7:-1]), saved[-1]
    how = ctx.body, ctx.behind, ctx.transposed, ctx.hops, ctx.chunk
    of_x, of_weights, up, down, *rest = experts_backward_op(*tensors, given, arrived, gradient.contiguous(), *how)
    of_biases = iter(rest)
    biases = [next(of_biases) if bias is not None else None for bias in tensors[5:7]]
    return of_x, None, of_weights, up, down, *biases, list(of_biases), *(None,) * 5


experts_op.register_autograd(_gradients, setup_context=_remember)


EXCHANGING: dict[Any, Callable[..., Any]] = {  # an op, and the function that runs it where its rows travel
    torch.ops.autopar.experts.default: experts_forward,
    torch.ops.autopar.experts_backward.default: experts_backward,
}
_HOPS = -2  # place of the hops among the arguments


def sent_by(op: Any, arguments: Sequence[Any]) -> Iterator[tuple[str, str, int]]:
    """The messages of a call of an exchanging op for a balanced router: axis, kind and number."""
    travelling = [hop.axis for hop in hops_of(arguments[_HOPS]) if hop.travels]
    is_back = op is torch.ops.autopar.experts_backward.default
    for place, axis in enumerate(travelling):
        yield axis, "all_gather", 1
        yield axis, "all_reduce", place
        yield axis, "all_to_all", 4 + (place > 0) if is_back else 3


def on_axes(op: Any, arguments: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The function that runs an op whose rows travel, and its arguments, the names of its axes second."""
    axes = tuple(hop.axis for hop in hops_of(arguments[_HOPS]) if hop.travels)
    return (EXCHANGING[op], (arguments[0], axes, *arguments[1:])) if axes else None
