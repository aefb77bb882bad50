"""Experts: each row goes through some of several networks, chosen by a router. One op, whoever wrote them.

    input [t, h], ids [t, k], weights [t, k], up [e, 2 i, h], down [e, h, i]  ->  [t, h]

`t` cut is data parallel, `gate|up` cut is tensor parallel inside experts, `e` cut behind its mask is experts gathered
or left out, and `e&t` sends rows to their experts. What runs is in `runtime/experts.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from autopar.letters import NotServed
from autopar.ops.entry import Kernels, op
from autopar.ops.exchange import BACKWARD, FORWARD, Along, Exchange, LargestShapes
from autopar.ops.limits import LIMITS
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.rows import parse
from autopar.runtime.bodies import HALVES, ONE, PAIRS, WHOLE, Body, NotABody, OfRows, read_body
from autopar.runtime.experts import Setup, experts_op
from autopar.runtime.private import plays_all_ranks
from autopar.runtime.visits import Hop
from autopar.sharding.notation import Rule
from autopar.sharding.placement import largest_local_shape

CLOSED = ""  # layout for bodies that read several rows
_TENSORS = ("input", "ids", "weights", "up", "down", "up_bias", "down_bias")
_IMBALANCE: ContextVar[float] = ContextVar("imbalance", default=1.1)


@contextlib.contextmanager
def assumed_imbalance(factor: float) -> Iterator[None]:
    """Let experts that are captured in this block be priced for a router that loads the fullest device so."""
    token = _IMBALANCE.set(factor)
    try:
        yield
    finally:
        _IMBALANCE.reset(token)


def imbalance_here() -> float:
    """The imbalance for which experts are priced here."""
    return _IMBALANCE.get()


def experts(
    input: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    body: OfRows = torch.nn.functional.silu,
    gated: bool | str = True,
    behind: OfRows | None = None,
    transposed: bool = False,
) -> Tensor:
    """Send each row through the experts that `ids` names, and add up their results with `weights`.

        out[t] = sum over j of weights[t, j] * behind(down[e] @ body(up[e] @ input[t] + up_bias[e]) + down_bias[e])

    with e = ids[t, j]; an id that is negative or past the last expert counts nothing. `input` is [rows, h], `ids` and
    `weights` are [rows, k], `up` is [experts, width, h] and `down` [experts, h, i]; with `transposed` both have their
    last two dims the other way round. `body` maps rows to rows. With `gated` the width is twice i: by default `up` has
    the gate's rows and then the others, and body is applied to the gate, which multiplies the others;
    `gated="interleaved"` says that they alternate. A `body` of the whole width, such as one that clamps, is given with
    `gated="halves"` or `gated="pairs"`, which says how its rows lie. With `gated=False` there is no gate. `behind`,
    such as a norm, maps results to results. Both may be modules or their methods, and read their modules' parameters.
    """
    around, layout = _around(gated)
    _expect_shapes((input, ids, weights, up, down, up_bias, down_bias), layout, transposed)
    between = _read("body", body, layout, around)
    last = behind and _read("behind", behind, WHOLE, columns=down.shape[2 if transposed else 1])
    if not between.is_by_rows or (last and not last.is_by_rows):
        layout = CLOSED
    elif last or not between.is_by_columns:  # What is behind needs whole sums of hidden rows.
        layout = WHOLE
    more = (*between.given, *(last.given if last else ()))
    how: dict[str, Any] = dict(
        body=between.text, behind=last.text if last else "", layout=layout, transposed=transposed
    )
    rows, up, down = map(_as_in_products, (input, up, down))
    up_bias, down_bias = (bias if bias is None else _as_in_products(bias) for bias in (up_bias, down_bias))
    given = rows, ids, weights, up, down, up_bias, down_bias, more
    return experts_by_text(*given, **how, imbalance=_IMBALANCE.get()).to(input.dtype)


def _expect_shapes(given: Sequence[Tensor | None], layout: str, transposed: bool) -> None:
    """Raise where the tensors of a call do not go together, which no rule could tell."""
    input, ids, weights, up, down, *biases = given
    assert input is not None and ids is not None and weights is not None and up is not None and down is not None
    seen = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(_TENSORS, given, strict=True) if t is not None)

    def expect(holds: bool, what: str, advice: str) -> None:
        if not holds:
            raise NotServed(f"autopar.experts takes {what}", seen=seen, advice=advice)

    expect(input.dim() == 2, "rows of two dims", "x.flatten(0, -2), and view_as(x) of the result")
    expect(
        ids.dim() == 2 and ids.shape == weights.shape and ids.shape[0] == input.shape[0],
        "ids and weights as [rows, slots]",
        "weights, ids = scores.topk(k, -1)",
    )
    is_whole = not ids.is_floating_point() and ids.dtype != torch.bool
    expect(is_whole, f"ids that are whole numbers, and these are {ids.dtype}", "weights, ids = scores.topk(k, -1)")
    expect(up.dim() == down.dim() == 3, "matrices of three dims", "torch.stack of each expert's")
    shapes = [(*t.shape[:1], *t.shape[:0:-1]) if transposed else tuple(t.shape) for t in (up, down)]
    (experts, width, h), (others, out, inner) = shapes
    expect(experts == others and h == out == input.shape[1], "matrices [experts, width, h] and [experts, h, i]",
           "transposed=True, where their last two dims lie the other way round")  # fmt: skip
    twice = 1 if layout == ONE else 2
    expect(width == twice * inner, f"a width of {twice} x {inner} in up, and it is {width}",
           "gated=False without a gate, and else the gate's rows and the others in one matrix")  # fmt: skip
    for bias, length in zip(biases, (width, h), strict=True):
        expect(bias is None or tuple(bias.shape) == (experts, length), "biases [experts, width] and [experts, h]",
               "one row of numbers for each expert")  # fmt: skip


def _as_in_products(tensor: Tensor) -> Tensor:
    """The tensor as torch.autocast gives it to products."""
    device = tensor.device.type
    is_cast = torch.is_autocast_enabled(device) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if is_cast else tensor


def _read(name: str, function: OfRows, *how: Any, **more: Any) -> Body:
    try:
        return read_body(function, *how, **more)
    except NotABody as e:
        raise NotServed(
            f"the {name} of experts is not made of functions of torch on rows alone: {e}",
            advice="torch functions and methods of tensors, of rows and of parameters of a module of which it is a "
            "method, and no question about values",
        ) from e


def _around(gated: bool | str) -> tuple[Callable[[OfRows], OfRows], str]:
    """The function around a body that goes from the width of `up` to that of `down`, and its layout."""

    def of_halves(body: OfRows) -> OfRows:
        def run(rows: Tensor) -> Tensor:
            gate, other = rows.chunk(2, -1)
            return body(gate) * other

        return run

    def of_pairs(body: OfRows) -> OfRows:
        return lambda rows: body(rows[..., ::2]) * rows[..., 1::2]

    def as_it_is(body: OfRows) -> OfRows:
        return body

    ways = {
        True: (of_halves, HALVES),
        "interleaved": (of_pairs, PAIRS),
        "halves": (as_it_is, HALVES),
        "pairs": (as_it_is, PAIRS),
        False: (as_it_is, ONE),
    }
    if gated not in ways:
        raise NotServed(f"gated={gated!r}", advice=" or ".join(map(repr, ways)))
    return ways[gated]


def experts_by_text(
    input: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    more: Sequence[Tensor] = (),
    body: str = "",
    behind: str = "",
    layout: str = HALVES,
    transposed: bool = False,
    imbalance: float = 1.1,
) -> Tensor:
    """`experts` with bodies that have been read, and the tensors that they read besides rows.

    `imbalance` says how it is priced, and changes no value.
    """
    given = input, ids, weights, up, down, up_bias, down_bias
    how = dict(body=body, behind=behind, layout=layout, transposed=transposed, imbalance=imbalance)
    tensors = [x for x in (*given, *more) if x is not None]
    if has_torch_function(tensors):
        made: Tensor = handle_torch_function(experts_by_text, tensors, *given, more, **how)
        return made
    biases = up_bias is not None, down_bias is not None
    setup = Setup(body, max(1, ids.numel()), transposed, biases, behind=behind)
    return experts_on_device(**dict(zip(_TENSORS, given, strict=True)), more=more, setup=setup.text())


def experts_on_device(*, setup: str, more: Sequence[Tensor] = (), **given: Any) -> Tensor:
    """Run a device's rows through the experts that it holds, and through those to which they travel."""
    tensors = [given[name] for name in _TENSORS if given.get(name) is not None]
    tensors[1] = tensors[1].long()
    made: Tensor = experts_op([*tensors, *more], setup)[0]
    return made


def rule(arguments: Mapping[str, Any]) -> Rule:
    """The rule of a call, by how its matrices lie and what its body reads."""
    layout = arguments.get("layout", HALVES)
    transposed = arguments.get("transposed", False)
    more = "".join(f", {_whole_row(f'm{i}', tensor)}" for i, tensor in enumerate(arguments.get("more", ())))
    if layout == CLOSED:
        return parse(f"t! h!, t! k!, t! k!, e! w! v!, e! x! y!, e! w!, e! z!{more} -> t! h!")
    width, inner = {HALVES: (HALVES, "gate"), PAIRS: (PAIRS, "i"), ONE: ("i", "i"), WHOLE: ("w!", "i!")}[layout]
    e = "e~&t"
    up = f"{e} h! {width}" if transposed else f"{e} {width} h!"
    down = f"{e} {inner} h!" if transposed else f"{e} h! {inner}"
    linear = "z" if arguments.get("behind") else "z, v+a"
    return parse(f"t h!, t k!, t k!, {up}, {down}, {e} {width}, {e} h!{more} -> t h!", linear=linear)


def _whole_row(name: str, tensor: Any) -> str:
    """The row of a tensor of which every device has all."""
    return " ".join(f"{name}_{d}!" for d in range(len(tensor.shape)))


def hops_at(here: Here, call: OpCall) -> tuple[Hop, ...]:
    """The axes that cut experts, major first, with what travels along each for a balanced router."""
    k = call.arguments["ids"].shape[1]
    left = experts = call.arguments["up"].shape[0]
    rows_lie = here.lies(0)
    room = largest_local_shape(call.arguments["input"].shape, rows_lie, here.mesh)[0]
    balanced = float(room)
    found = []
    for axis in here.lies(3).cuts.get(0, []):
        n = here.mesh.shape[axis]
        if rows_lie.placements[axis].is_shard:
            balanced *= n  # rows of a group of devices, among which this one is
            visits = balanced * _share(experts, -(-left // n), k)
            rows = max(1, min(room, math.ceil(LIMITS.spare * visits / n)))
            found.append(Hop(here.mesh.axes[axis], n, left, rows))
            room = rows * n
        else:
            found.append(Hop(here.mesh.axes[axis], n, left, 0, here.coordinate[axis]))
        left = -(-left // n)
    return tuple(found)


def _share(experts: int, here: int, k: int) -> float:
    """The share of rows that choose at least one of some experts, if all are equally likely."""
    return 1.0 - math.comb(experts - here, k) / math.comb(experts, k) if here <= experts - k else 1.0


def _pairs(here: Here, call: OpCall, hops: Sequence[Hop]) -> int:
    """Pairs of a row and an expert that a device computes for a balanced router."""
    (_, k), (experts, *_) = (call.arguments[name].shape for name in ("ids", "up"))
    rows = largest_local_shape(call.arguments["input"].shape, here.lies(0), here.mesh)[0]
    local = largest_local_shape(call.arguments["up"].shape, here.lies(3), here.mesh)[0]
    gathered = math.prod(hop.parts for hop in hops if hop.travels)
    return math.ceil(rows * gathered * k * local / experts)


def part_of_experts(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """Experts on a device, with the axes along which rows travel or experts of others are left out."""
    hops = hops_at(here, call)
    if not hops:
        return None
    if plays_all_ranks():
        raise NotServed(
            "experts of other devices are others on every rank, and LocalTensors run one program for all",
            at=call.source,
            advice="autopar.testing.on_threads or on_processes",
        )
    given = {name: kwargs[name] for name in (*_TENSORS, "more") if kwargs.get(name) is not None}
    biases = "up_bias" in given, "down_bias" in given
    behind = kwargs.get("behind", "")
    setup = Setup(kwargs["body"], _chunk(here, call, hops), kwargs.get("transposed", False), biases, hops, behind)
    return experts_on_device, {**given, "setup": setup.text()}


def _sizes(call: OpCall) -> tuple[int, int, int]:
    """Bytes of a visit's row, of its slots and weights, and of its weights."""
    input, weights = (call.arguments[name] for name in ("input", "weights"))
    k = weights.shape[1]
    return input.shape[1] * input.itemsize, k * (8 + weights.itemsize), k * weights.itemsize


def _widths(here: Here, call: OpCall) -> tuple[int, int, int]:
    """The experts of a device, the width of its first matrices, and that of its hidden rows."""
    up = largest_local_shape(call.arguments["up"].shape, here.lies(3), here.mesh)
    down = largest_local_shape(call.arguments["down"].shape, here.lies(4), here.mesh)
    return (up[0], up[2], down[1]) if call.arguments.get("transposed") else (up[0], up[1], down[2])


def exchanged(call: OpCall, along: Along | None = None) -> tuple[Exchange, ...]:
    """Counts, visits with their routes, and results; in backward gradients go the same way and come back."""
    row, route, share = _sizes(call)
    hops = hops_at(along.here, call) if along else ()
    travelling = [hop for hop in hops if hop.travels]
    if along and along.axis not in {hop.axis for hop in travelling}:
        return ()
    place = next((i for i, hop in enumerate(travelling) if along and hop.axis == along.axis), 0)
    hop = travelling[place] if travelling else Hop("", 2, 2, 1)
    visits = min(hop.rows, hop.rows / LIMITS.spare * call.arguments.get("imbalance", 1.1)) * hop.parts
    found = []
    for way, sizes in ((FORWARD, (row, route, row)), (BACKWARD, (route, row, row, share))):
        again = (row,) if way == BACKWARD and place else ()  # Inner exchanges send their rows again.
        found.append(Exchange("all_gather", way, nbytes=lambda parts, n: 8.0 * n * n))
        if place:
            found.append(Exchange("all_reduce", way, place, nbytes=lambda parts, n: 8.0))
        found += [Exchange("all_to_all", way, nbytes=_of_visits(visits * size)) for size in (*sizes, *again)]
    return tuple(found)


def _of_visits(nbytes: float) -> Callable[[LargestShapes, int], float]:
    """The bytes of an all-to-all in which a device sends so many."""
    return lambda parts, n: nbytes * n


def kernels(call: OpCall, here: Here, kind: str) -> Kernels:
    """The matrix products of a device, in forward and in backward, and what else it reads and writes.

    Backward makes results again where something stands behind them. The fullest device has more rows than the mean
    where experts are divided.
    """
    hops = hops_at(here, call)
    e, width, inner = _widths(here, call)
    h = call.arguments["input"].shape[1]
    rows = _pairs(here, call, hops) * (call.arguments.get("imbalance", 1.1) if hops else 1.0) / e
    back = [(e, rows, inner, h), (e, inner, h, rows), (e, rows, h, width), (e, width, h, rows)]
    if call.arguments.get("behind"):
        back.append((e, rows, h, inner))
    inside = 2 * width + (inner if width > inner else 0)  # elements of a pair that the body reads and writes
    item = call.arguments["input"].itemsize
    pairs = e * rows
    if kind == "cpu":
        passed = pairs * ((2 * h + inside + 4 * h) * item + 2 * h * max(4, item))
        return Kernels([(e, rows, width, h), (e, rows, h, inner)], back, passed, 2 * passed)
    # Rows are gathered, go through the body, and are added up by one kernel (`kernels/slot_sums.py`). Backward gathers
    # rows and gradients, runs the body again and back, and weighs the gradients of results and of hidden rows.
    sums = pairs * h + _summed(here, call, hops) * h
    passed = (pairs * (2 * h + inside) + sums) * item
    passed_back = (pairs * (4 * h + 2 * inside + 2 * h + 4 * inner) + sums) * item
    return Kernels([(e, rows, width, h), (e, rows, h, inner)], back, passed, passed_back)


def _summed(here: Here, call: OpCall, hops: Sequence[Hop]) -> float:
    """The rows for which a device adds up results: its own, or those that arrive from a balanced router."""
    arrived = [hop.parts * hop.rows / LIMITS.spare for hop in hops if hop.travels]
    return (arrived or [float(largest_local_shape(call.arguments["input"].shape, here.lies(0), here.mesh)[0])])[-1]


def kept_beside(call: OpCall, held: Sequence[tuple[int, ...]], here: Here) -> int:
    """Bytes of the rows that arrived from other devices, and of what the first matrices made of a chunk."""
    hops = hops_at(here, call)
    _, width, _ = _widths(here, call)
    hidden = _chunk(here, call, hops) * width * call.arguments["input"].itemsize
    return Setup("", 0, hops=hops).arrivals * _sizes(call)[0] + hidden


def _chunk(here: Here, call: OpCall, hops: Sequence[Hop]) -> int:
    """Pairs that are computed at once: a device's own, or those of a balanced router and some more."""
    return math.ceil((LIMITS.spare if hops else 1.0) * _pairs(here, call, hops))


def work_of_part(call: OpCall, held: Sequence[tuple[int, ...]], kind: str, here: Here) -> tuple[int, int]:
    """Temporary bytes in forward and in backward, beyond results and gradients, at the fullest moment.

    A chunk has the pairs of a balanced router and some more, so that no routing takes more.
    """
    hops = hops_at(here, call)
    row, route, _ = _sizes(call)
    e, two, one = _widths(here, call)
    input, weights = call.arguments["input"], call.arguments["weights"]
    travelling = [hop.parts * hop.rows for hop in hops if hop.travels]
    h = input.shape[1]
    wide = max(4, input.itemsize, weights.itemsize) * h  # bytes of a row of a sum
    pairs = _chunk(here, call, hops)
    places = pairs * LIMITS.integers * 8
    rows = (travelling or [held[0][0]])[-1]
    sums = rows * wide + rows * (2 * row + wide)  # a sum, and what is added to it
    pair = input.itemsize * pairs
    copied = pair * two if hops else 0  # What is kept of the first matrices is copied into its buffer.
    stays = rows * wide if hops else 0  # Sums of a first chunk stay while a second runs; alone a device has one chunk.
    forward = places + stays + max(pair * h + copied, pair * 2 * one + copied, pair * (one + h), pair * h + sums)
    of_up, of_down = (e * width * h * input.itemsize for width in (two, one))
    made = held[0][0] * row + of_up + of_down
    behind = 6 * h if call.arguments.get("behind") else 0  # Results, their gradients, and as many inside a norm.
    moments = (
        pair * (two + one + behind),  # the backward of what stands behind
        pair * (h + two + 3 * one) + of_down,  # the body's backward
        pair * (h + two) + of_down + of_up,
        pair * h + of_down + of_up + sums,
    )
    backward = places + stays + max(moments) - made
    on_the_way = sum(travelling) * (row + route) + (held[0][0] * wide if travelling else 0)
    return max(0, int(forward + on_the_way - held[0][0] * row)), max(
        0, int(backward + on_the_way + sum(travelling) * row)
    )


op(
    "experts",
    experts_by_text,
    "input:T, ids:T, weights:T, up:T, down:T, up_bias:T=None, down_bias:T=None, more:T=(), body='', behind='', "
    "layout='gate|up', transposed=False, imbalance=1.1",
    rule=rule,
    serves="~&",
    form=part_of_experts,
    counts="e",
    exchanges=exchanged,
    keeps="input ids weights up down up_bias down_bias more",
    part_keeps=kept_beside,
    part_work=work_of_part,
    flops=(6, "e|up|two"),  # Those of a gated body; `products` says what a call has.
    products=kernels,
    joint=True,
)
