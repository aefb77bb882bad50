"""Rules of experts in the certificate: what is not refused is so on two devices, and each refusal has its program."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from autopar.certificate.calls import TypedCall
from autopar.certificate.rules import typed
from autopar.certificate.types import Refused, Type, joined, whole
from autopar.codegen.lower import lower
from autopar.letters import NotCertified
from autopar.runtime.bodies import HALVES, read_body
from autopar.runtime.experts import Setup, experts_backward, experts_forward
from autopar.runtime.rehearsal import Rehearsal
from autopar.runtime.visits import Hop
from autopar.tracer import ColoTracer
from tests.certificate.claims import AXIS, combined
from tests.certificate.made import broken
from tests.gauntlet import models
from tests.gauntlet.suites import FOUR, drawn, routed_plan
from tests.gauntlet.suites import made as made_in_float64
from tests.routed import E, I, M, T

ROWS, SLOTS, WIDTH, EXPERTS, INNER = 8, 2, 6, 4, 4
FORWARD, BACKWARD = torch.ops.autopar.experts.default, torch.ops.autopar.experts_backward.default
NAMES = ("input", "ids", "weights", "up", "down", "up_bias", "down_bias")
WHOLE, PART, BLOCKS = "R", "P", "blocks"
WAYS = {  # how each operand may lie on the axis: whole, a part of a sum, cut along a dim, along halves
    "input": (WHOLE, PART, 0, 1),
    "ids": (WHOLE, 0, 1),
    "weights": (WHOLE, PART, 0, 1),
    "up": (WHOLE, PART, 0, 1, 2, BLOCKS),
    "down": (WHOLE, PART, 0, 1, 2),
    "up_bias": (WHOLE, PART, 0, 1, BLOCKS),
    "down_bias": (WHOLE, PART, 0, 1),
}
NOWHERE, STAYING, TRAVELLING = "all experts are here", "those of others are left out", "rows travel"


def halves(rows):
    gate, other = rows.chunk(2, -1)
    return F.silu(gate) * other


BODY = read_body(halves, HALVES).text


@functools.cache
def setup(hops: str, place: int = 0, body: str = BODY) -> str:
    found = {NOWHERE: (), STAYING: (Hop(AXIS, 2, EXPERTS, 0, place),), TRAVELLING: (Hop(AXIS, 2, EXPERTS, 2),)}[hops]
    return Setup(body, 5, False, (True, True), found).text()


def operands():
    made = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    ids = torch.rand(ROWS, EXPERTS, generator=made).topk(SLOTS, -1).indices
    up, down = drawn(EXPERTS, 2 * INNER, WIDTH), drawn(EXPERTS, WIDTH, INNER)
    rest = up, down, drawn(EXPERTS, 2 * INNER), drawn(EXPERTS, WIDTH)
    return (drawn(ROWS, WIDTH), ids, drawn(ROWS, SLOTS), *rest), drawn(ROWS, WIDTH)


def loop(x, ids, weights, up, down, up_bias, down_bias):
    """The same by a loop over experts."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        row, slot = torch.where(ids == e)
        made = halves(x[row] @ up[e].T + up_bias[e]) @ down[e].T + down_bias[e]
        out = out.index_add(0, row, made * weights[row, slot, None])
    return out


def parts(x, way):
    """An operand on each of the devices."""
    if way == WHOLE:
        return [x, x]
    if way == PART:
        first = torch.randn_like(x)
        return [first, x - first]
    if way == BLOCKS:
        return [p.flatten(1, 2).contiguous() for p in x.unflatten(1, (2, INNER)).chunk(2, 2)]
    return [p.contiguous() for p in x.chunk(2, way)]


def lies(x, way):
    """The type of an operand of which one device holds `x`."""
    if way == BLOCKS:
        dims = [whole(n) for n in x.shape]
        dims[1] = joined([(2, ()), (INNER // 2, (AXIS,))])
        return Type(tuple(dims))
    dims = tuple(((n, (AXIS,)),) if d == way else whole(n) for d, n in enumerate(x.shape))
    return Type(dims, sums=frozenset({AXIS} if way == PART else ()))


def claimed(op, types, hops, shapes, *more, body=BODY):
    call = TypedCall((list(types), *more, setup(hops, body=body)), {}, tuple(shapes), frozenset({AXIS}))
    return typed(op, call)


def accepted(given, hops, is_all):
    """Ways for all operands that are not refused, what is said of them, and of the result."""
    left_out = () if is_all else [(name, 1) for name in (*NAMES[:3], "down", "down_bias")]
    every = [
        [(way, lies(parts(x, way)[0], way)) for way in WAYS[name] if (name, way) not in left_out]
        for name, x in zip(NAMES, given, strict=True)
    ]
    for chosen in itertools.product(*every):
        ways, types = zip(*chosen, strict=True)
        shapes = types[0].shape, (0, WIDTH), (0, types[3].shape[1])
        try:
            yield ways, types, claimed(FORWARD, types, hops, shapes)[0]
        except Refused:
            continue


def near(outputs, claim, truth, what):
    torch.testing.assert_close(
        combined(outputs, claim), truth, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(("hops", "count"), [(NOWHERE, 11), (STAYING, 2), (TRAVELLING, 2)])
@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["most", "all"])
def test_what_is_not_refused_is_so(hops, count, is_all):
    """Of every way of all operands on one axis: results and gradients, put together as the types say.

    Not refused are, with how the gradient may come: all whole (whole, a part), rows cut (cut), weights a part (whole),
    the last matrices and bias a part (whole), and hidden rows cut (whole); one way each where others have experts.
    """
    given, gradient = operands()
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    truth = loop(*leaves)
    of_each = torch.autograd.grad(truth, [x for x in leaves if x.requires_grad], gradient)
    found = 0
    for ways, types, claim in accepted(given, hops, is_all):
        local = list(zip(*(parts(x, way) for x, way in zip(given, ways, strict=True)), strict=True))
        outputs = Rehearsal(2).run(lambda i: experts_forward(local[i], (), setup(hops, i)))
        near([of[0] for of in outputs], claim, truth.detach(), ways)
        found += 1
        for way in (WHOLE, PART, 0):
            comes = parts(gradient, way)
            shapes = [x.shape for k, x in enumerate(local[0]) if k != 1]
            try:
                claims = claimed(BACKWARD, types, hops, shapes, [None, None], lies(comes[0], way))
            except Refused:
                continue
            back = Rehearsal(2).run(lambda i: experts_backward(local[i], (), outputs[i][1:], comes[i], setup(hops, i)))
            for k, one in enumerate(claims):
                near([of[k] for of in back], one, of_each[k], (*ways, way, k))
            found += 1
    assert found == count


ROWS_CUT = dict.fromkeys(NAMES[:3], 0)
OWN_EXPERTS = dict.fromkeys(NAMES[3:], 0)
INSIDE = {"up": BLOCKS, "down": 2, "up_bias": BLOCKS, "down_bias": PART}
LAST_PART = {"down": PART, "down_bias": PART}
CANDIDATE = "P(max)"
RIGHT = [(NOWHERE, {}), (NOWHERE, ROWS_CUT), (NOWHERE, INSIDE), (NOWHERE, LAST_PART), (STAYING, OWN_EXPERTS)]
RIGHT += [(TRAVELLING, ROWS_CUT | OWN_EXPERTS)]
REFUSED = [  # where experts are, how operands lie, what is said
    (TRAVELLING, OWN_EXPERTS, "these axes cut them"),
    *((hops, ROWS_CUT | how, "no device has all of a row") for hops, how in (RIGHT[2], RIGHT[3], RIGHT[4])),
    *((hops, how | {"weights": PART}, "summed over it once more") for hops, how in (RIGHT[2], RIGHT[3], RIGHT[4])),
    (NOWHERE, INSIDE | {"down_bias": WHOLE}, "counts more than once"),
    (NOWHERE, {"down": PART}, "counts more than once"),
    (NOWHERE, {"down_bias": PART}, "both are parts of one sum"),
    (NOWHERE, {"down_bias": 1}, "what is added to them"),
    *((STAYING, OWN_EXPERTS | {name: WHOLE}, "they are cut by these axes") for name in OWN_EXPERTS),
    *((TRAVELLING, ROWS_CUT | OWN_EXPERTS | {name: WHOLE}, "they are cut by these axes") for name in OWN_EXPERTS),
    *((NOWHERE, {name: 0}, "they are cut by these axes") for name in OWN_EXPERTS),
    *((NOWHERE, {name: way}, "summed before") for name in ("input", "up", "up_bias") for way in (PART, CANDIDATE)),
    *((NOWHERE, {name: 1}, "each of them is whole") for name in NAMES[:3]),
    *((NOWHERE, {name: 0}, "both have to lie alike") for name in NAMES[:3]),
    *((NOWHERE, INSIDE | {name: WHOLE}, "hidden rows are cut alike") for name in ("up", "down", "up_bias")),
    (NOWHERE, INSIDE | {"up": 1, "up_bias": 1}, "hidden rows are cut alike"),  # gates alone
    (NOWHERE, {"up": 2}, "hidden rows are cut alike"),
    (NOWHERE, {"down": 1}, "hidden rows are cut alike"),
]
REFUSED_BACK = [  # and how the gradient comes
    (NOWHERE, {}, 0, "both have to lie alike"),
    (NOWHERE, ROWS_CUT, WHOLE, "both have to lie alike"),
    (TRAVELLING, ROWS_CUT | OWN_EXPERTS, WHOLE, "both have to lie alike"),
    (NOWHERE, {"weights": PART}, PART, "summed over it once more"),
    *((hops, how, PART, "summed over it once more") for hops, how in (RIGHT[2], RIGHT[3], RIGHT[4])),
    (NOWHERE, {}, 1, "each of them is whole"),
]


def types_of(how):
    given, gradient = operands()
    found = []
    for name, x in zip((*NAMES, "gradient"), (*given, gradient), strict=True):
        way = how.get(name, WHOLE)
        if way == CANDIDATE:
            found.append(replace(lies(x, WHOLE), most=frozenset({AXIS})))
        else:
            found.append(lies(parts(x, way)[0], way))
    return found


def typed_forward(hops, how):
    *types, _ = types_of(how)
    return claimed(FORWARD, types, hops, (types[0].shape, (0, WIDTH), (0, types[3].shape[1])))


def typed_back(hops, how, gradient):
    *types, comes = types_of(how | {"gradient": gradient})
    return claimed(BACKWARD, types, hops, [t.shape for k, t in enumerate(types) if k != 1], [None, None], comes)


@pytest.mark.parametrize(("hops", "how", "said"), REFUSED, ids=str)
def test_each_refusal_has_a_program(hops, how, said):
    with pytest.raises(Refused, match=said):
        typed_forward(hops, how)


@pytest.mark.parametrize(("hops", "how", "gradient", "said"), REFUSED_BACK, ids=str)
def test_each_refusal_of_a_backward_has_a_program(hops, how, gradient, said):
    typed_forward(hops, how)
    with pytest.raises(Refused, match=said):
        typed_back(hops, how, gradient)


def test_what_is_unknown_along_an_axis_is_refused_along_no_other():
    """One operand of which nothing is known there: neither are results, and nothing is refused."""
    *types, _ = types_of(INSIDE)
    types[0] = types[0].opened([AXIS])
    made = claimed(FORWARD, types, NOWHERE, (types[0].shape, (0, WIDTH), (0, types[3].shape[1])))
    assert all(t.open == {AXIS} and not t.sums for t in made)


CUTS = [(T, M), (T, E), (M, I), (E, M), (M, M)]


@pytest.mark.parametrize(
    "cuts", [pytest.param(c, marks=[pytest.mark.nightly] * (c not in CUTS[:3])) for c in CUTS], ids=str
)
def test_one_wrong_reduction_around_experts_is_refused(cuts):
    """Each in turn, of programs of which everything is known."""
    model, batch = made_in_float64(models.Routed), drawn(24, 4)
    program = lower(ColoTracer().trace(model, batch), routed_plan(model, batch, FOUR, cuts), (1, 1))
    found = program.certified()
    assert not found.open and found.ends >= 17
    wrong = list(broken(program))
    for what, one in wrong:
        with pytest.raises(NotCertified):
            one.certified()
            pytest.fail(what)
    assert len(wrong) >= 15
