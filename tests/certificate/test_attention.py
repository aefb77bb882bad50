"""Attention of cut queries in the certificate: programs are typed on every axis, and what is said of them is so."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import DeviceMesh
from autopar.certificate.calls import TypedCall
from autopar.certificate.rules import typed
from autopar.certificate.types import Refused, Type, whole
from autopar.codegen.lower import lower
from autopar.letters import NotCertified
from autopar.ops.attention import attend
from autopar.runtime.attention import attention_backward, attention_forward, deal
from autopar.runtime.dealing import HALVES, WORK, Cutting, Setup
from autopar.runtime.halos import halo, has_halo
from autopar.runtime.rehearsal import Rehearsal
from autopar.runtime.sees import Sees
from autopar.sharding.placement import R, S
from autopar.tracer import ColoTracer
from tests.attended import drawn, eager
from tests.certificate.claims import AXIS, combined
from tests.certificate.made import broken
from tests.gauntlet.suites import planned
from tests.shares import one_in

DEAL, HALO, FORWARD, BACKWARD = (
    getattr(torch.ops.autopar, name).default for name in ("deal", "halo", "attention", "attention_backward")
)
LINE, SQUARE = DeviceMesh((4,)), DeviceMesh((2, 2), ("dp", "tp"))
LENGTH, HEADS = 26, 4


def linears(count: int, width: int, rows: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, rows, bias=False) for _ in range(count))


class Llama(nn.Module):
    """Blocks of attention, with rotary positions made inside; of torch's, or of one that has a description."""

    def __init__(self, sees: str | None, groups: int = 2, has_sinks: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.sees, self.groups = sees, groups
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(blocks))
        self.qs, self.ks, self.vs = (linears(blocks, 16, 8 * n) for n in (HEADS, groups, groups))
        self.outs = linears(blocks, 8 * HEADS, 16)
        self.sinks = nn.ParameterList(nn.Parameter(torch.randn(HEADS)) for _ in range(blocks * has_sinks))

    def forward(self, x, y, documents=None):
        angles = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01, 0.001])
        for i, (norm, out) in enumerate(zip(self.norms, self.outs, strict=True)):
            h = norm(x)
            q, k, v = (of[i](h).unflatten(-1, (-1, 8)).transpose(1, 2) for of in (self.qs, self.ks, self.vs))
            q, k = (torch.cat([t[..., :4] * angles.cos(), t[..., 4:] * angles.sin()], -1) for t in (q, k))
            if self.sees is None:
                h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != HEADS)
            else:
                h = attend(q, k, v, documents, sinks=self.sinks[i] if len(self.sinks) else None, sees=self.sees)
            x = x + out(h.transpose(1, 2).flatten(2))
        return F.mse_loss(x, y)


CAUSAL, WINDOW = Sees(right=0).text(), Sees(5, 0).text()
Q, QK, BATCH, BY_HEADS = (S(2), R), (S(2), S(2)), (S(0), S(0)), (S(1), S(1))  # placements of queries and of keys
PROGRAMS = {  # a mesh, how attention lies on each axis, what it sees, whether there are documents, and sinks
    "queries cut": (LINE, [Q], None, False, False),
    "a ring": (LINE, [QK], None, False, False),
    "two axes": (SQUARE, [Q, Q], None, False, False),
    "a ring on the minor axis": (SQUARE, [Q, QK], None, False, False),
    "two rings": (SQUARE, [QK, QK], CAUSAL, False, True),
    "rows and queries": (SQUARE, [BATCH, Q], CAUSAL, True, True),
    "a ring, and heads": (SQUARE, [QK, BY_HEADS], CAUSAL, False, True),
    "queries and heads, documents": (SQUARE, [Q, BY_HEADS], CAUSAL, True, True),
    "documents of a ring": (LINE, [QK], CAUSAL, True, False),
    "a window": (LINE, [QK], WINDOW, False, True),
    "a window and documents": (SQUARE, [QK, Q], WINDOW, True, True),
}


def lowered(name, blocks=2):
    """The program of the last device."""
    mesh, lies, sees, has_documents, has_sinks = PROGRAMS[name]
    model = Llama(sees, has_sinks=has_sinks, blocks=blocks)
    batch = {key: torch.randn(2, LENGTH, 16) for key in "xy"}
    if has_documents:
        batch["documents"] = (torch.arange(LENGTH) // 9).expand(2, -1).contiguous()

    def is_there(choice):
        return all((choice.operand(0)[i].value, choice.operand(1)[i].value) == way for i, way in enumerate(lies))

    cuts = {S(2): "S(1)", S(0): "S(0)", S(1): "R"}
    rows = ", ".join(f"{cuts[q]}@{axis}" for axis, (q, _) in zip(mesh.axes, lies, strict=True) if cuts[q] != "R")
    pins = {"x": rows, "y": rows, "norms*weight": "R"}
    op = "scaled_dot_product_attention" if sees is None else "attention"
    plan = planned(model, batch, mesh, pins, op, is_there)
    return lower(ColoTracer().trace(model, batch), plan, tuple(n - 1 for n in mesh.shape))


@pytest.mark.parametrize("name", one_in(3, PROGRAMS, 1))
def test_programs_of_long_sequences_are_typed_on_every_axis(name):
    found = lowered(name).certified()
    assert found.values > 150 and not found.open and not found.open_ends and not found.unforeseen, found.left_open


# -- one thing wrong in a program


def not_moved(graph, node):
    """Rows stay as they lie, or as they were dealt."""
    for part in list(node.users):
        part.replace_all_uses_with(node.args[0][part.args[1]])


def with_setup(change):
    def changed(graph, node):
        how = Setup.of(next(a for a in node.args if isinstance(a, str)))
        node.args = tuple(change(how).text() if isinstance(a, str) else a for a in node.args)

    return changed


WAYS = {  # what is wrong with each call of an op
    deal: {
        "rows are not moved": not_moved,
        "dealt by other numbers": with_setup(lambda how: replace(how, dealt={HALVES: WORK, WORK: HALVES}[how.dealt])),
        "dealt for another mask": with_setup(lambda how: replace(how, sees=Sees(3, 0).text())),
    },
    attention_forward: {
        "keys do not go round": with_setup(lambda how: replace(how, rings=())),
        "places as if none were cut": with_setup(lambda how: replace(how, cuts=(), rings=())),
        "counts local rows": with_setup(lambda how: replace(how, queries=how.queries // how.parts)),
        "rows as they lie": with_setup(lambda how: replace(how, dealt="" if how.dealt else HALVES)),
    },
}
WAYS[attention_backward] = WAYS[attention_forward]
WAYS[halo] = {
    "keys are not moved": not_moved,
    "for another window": with_setup(lambda how: replace(how, sees=Sees(3, 0).text())),
}
for _function, _op in ((deal, DEAL), (halo, HALO), (attention_forward, FORWARD), (attention_backward, BACKWARD)):
    WAYS[_op] = WAYS[_function]  # a call that sends nothing is the op itself


def named(of_op):
    found = []
    for name, change in of_op.items():
        one = functools.partial(change)
        one.__name__ = name
        found.append(one)
    return found


BROKEN = ["a ring on the minor axis", "documents of a ring", "a ring, and heads", "two rings", "a window",
          "queries cut", "queries and heads, documents"]  # fmt: skip


@pytest.mark.parametrize("name", one_in(6, BROKEN))
def test_one_wrong_step_is_refused(name):
    """A reduction, a deal, or what a call takes its rows for."""
    program = lowered(name, blocks=1)
    wrong = list(broken(program))
    wrong = wrong[:: 1 + len(wrong) // 6]
    of_ops = list(broken(program, {op: named(of_op) for op, of_op in WAYS.items()}))
    if QK not in PROGRAMS[name][1]:
        of_ops = [(what, other) for what, other in of_ops if "do not go round" not in what]  # Nothing is wrong.
    for what, other in wrong + of_ops:
        with pytest.raises(NotCertified):
            other.certified()
            pytest.fail(what)
    assert len(wrong) >= 4 and len(of_ops) > 12


# -- each operand in each way, on two devices


ROWS = 12
WHOLE, PART = "R", "P"
NAMES = ("query", "key", "value", "documents", "sinks")
LIES = {"query": (WHOLE, PART, 0, 1, 2, 3), "key": (WHOLE, PART, 0, 1, 2, 3), "value": (WHOLE, PART, 0, 1, 2, 3),
        "documents": (WHOLE, 0, 1), "sinks": (WHOLE, PART, 0)}  # fmt: skip
SETUPS = {  # what queries see, whether axes cut queries, and keys; how rows are dealt
    "whole": ("right=0", False, False, ""),
    "queries": ("left=3 right=0", True, False, ""),
    "a ring": ("", True, True, ""),
    "a halo": ("left=3 right=0", True, True, ""),
    "queries dealt": ("right=0", True, False, WORK),
    "a ring dealt": ("right=0", True, True, WORK),
}


def setup(name: str, place: int = 0) -> str:
    sees, is_cut, is_ring, dealt = SETUPS[name]
    cut = (Cutting(AXIS, 2, place),)
    return Setup(sees, ROWS, ROWS, cut * is_cut, cut * is_ring, dealt, (True, False, True)).text()


def operands():
    query, key, value, documents, _, sinks, gradient = drawn(ROWS, (True, False, True))
    return (query, key, value, documents, sinks), gradient


def parts(x, way):
    if way == WHOLE:
        return [x, x]
    if way == PART:
        first = torch.randn_like(x)
        return [first, x - first]
    return [p.contiguous() for p in x.chunk(2, way)]


def lies(x, way):
    """The type of an operand of which one device holds a part."""
    x = parts(x, way)[0]
    dims = tuple(((n, (AXIS,)),) if d == way else whole(n) for d, n in enumerate(x.shape))
    return Type(dims, sums=frozenset({AXIS} if way == PART else ()))


def types_by_way(of, x):
    return {way: lies(x, way) for way in LIES[of]}


class Typed:
    """A device's part of an attention on types, from rows as they lie to rows as they lie."""

    def __init__(self, name: str) -> None:
        self.text, self.how = setup(name), Setup.of(setup(name))

    def call(self, op, *args, shapes=()):
        return typed(op, TypedCall((*args, self.text), {}, tuple(shapes), frozenset({AXIS})))

    def moved(self, types, told, of_keys, is_back):
        if not self.how.dealt or (of_keys and not self.how.rings):
            return types
        return typed(DEAL, TypedCall((types, told, self.text, of_keys, is_back), {}, (), frozenset({AXIS})))

    def moved_keys(self, types, told, is_back):
        if not has_halo(self.how):
            return self.moved(types, told, True, is_back)
        return typed(HALO, TypedCall((types, self.text, is_back), {}, (), frozenset({AXIS})))

    def forward(self, types):
        query, key, value, documents, *_ = types
        told = [documents]
        self.given = [
            *self.moved([query], told, False, False),
            *self.moved_keys([key, value], told, False),
            *types[3:],
        ]
        self.made = self.call(FORWARD, self.given)
        return self.moved(self.made[:1], told, False, True)[0]

    def backward(self, gradient):
        told = self.given[3:4]
        (comes,) = self.moved([gradient], told, False, False)
        q, k, v, sinks = self.call(BACKWARD, self.given, self.made, comes)
        return [*self.moved([q], told, False, True), *self.moved_keys([k, v], told, True), sinks]


class Ran(Typed):
    """The same on tensors of a thread that stands for the device."""

    def __init__(self, name: str, place: int) -> None:
        self.text, self.how = setup(name, place), Setup.of(setup(name, place))

    def call(self, op, *args):
        run = {FORWARD: attention_forward, BACKWARD: attention_backward}[op]
        return run(args[0], (), *args[1:], self.text)

    def moved(self, tensors, told, of_keys, is_back):
        if not self.how.dealt or (of_keys and not self.how.rings):
            return tensors
        return deal(tensors, (), told, self.text, of_keys, is_back)

    def moved_keys(self, tensors, told, is_back):
        if not has_halo(self.how):
            return self.moved(tensors, told, True, is_back)
        return halo(tensors, (), self.text, is_back)


def near(outputs, claim, truth, what):
    torch.testing.assert_close(
        combined(outputs, claim), truth, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("name, count", [("whole", 9), ("queries", 2), ("a ring", 2), ("a halo", 2),
                                         ("queries dealt", 2), ("a ring dealt", 2)])  # fmt: skip
def test_what_is_not_refused_is_so(name, count):
    """Of every way of all operands and of the gradient: results and gradients, put together as the types say.

    Not refused are, with how the gradient may come: all whole (whole, a part), rows of the batch cut (cut), heads cut
    (cut), and values a part of a sum (whole); one way each where queries are cut, in which the gradient is cut.
    """
    given, gradient = operands()
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    sees = Sees.of(SETUPS[name][0])
    truth = eager(*leaves[:4], None, leaves[4], sees)
    of_each = torch.autograd.grad(truth, [x for x in leaves if x.requires_grad], gradient)
    types = [types_by_way(of, x) for of, x in zip(NAMES, given, strict=True)]
    on_types = Typed(name)
    found = 0
    for ways in itertools.product(*types):
        try:
            claim = on_types.forward([of[way] for of, way in zip(types, ways, strict=True)])
        except (Refused, ValueError):  # rows of other numbers meet
            continue
        local = list(zip(*(parts(x, way) for x, way in zip(given, ways, strict=True)), strict=True))
        devices = [Ran(name, i) for i in range(2)]
        outputs = Rehearsal(2).run(lambda i, devices=devices, local=local: devices[i].forward(local[i]))
        near(outputs, claim, truth.detach(), ways)
        found += 1
        for way in LIES["query"]:
            try:
                claims = on_types.backward(lies(gradient, way))
            except (Refused, ValueError):
                continue
            comes = parts(gradient, way)
            back = Rehearsal(2).run(lambda i, devices=devices, comes=comes: devices[i].backward(comes[i]))
            for k, one in enumerate(claims):
                near([of[k] for of in back], one, of_each[k], (*ways, way, k))
            found += 1
    assert found == count


SEQUENCE = {"query": 2}
RING = {"query": 2, "key": 2, "value": 2}
BY_ROW = {"query": 0, "key": 0, "value": 0, "documents": 0}
REFUSED = [  # a setup, how operands lie that are not whole, what is said
    ("whole", SEQUENCE, "queries lie as"),
    ("queries", {}, "queries lie as"),
    ("queries", RING, "keys lie as"),
    ("a ring", SEQUENCE, "keys lie as"),
    ("a ring", RING | {"value": WHOLE}, "values lie as"),
    ("whole", {"key": 2, "value": 2}, "keys lie as"),
    ("queries", SEQUENCE | {"documents": 1}, "where all of them end"),
    ("queries dealt", SEQUENCE | {"documents": 1}, "where all of them end"),
    ("queries dealt", SEQUENCE | {"documents": 0}, "these devices have the same"),
    ("queries dealt", {}, "what is dealt lie"),
    ("a ring dealt", SEQUENCE, "what is dealt lie"),
    ("a halo", SEQUENCE, "what is dealt lie"),
    ("whole", BY_ROW | {"documents": WHOLE}, "cut as those of queries"),
    ("whole", {"documents": 0}, "cut as those of queries"),
    ("whole", {"query": 1, "sinks": 0}, "cut alike"),
    ("whole", {"query": 1, "key": 1, "value": 1}, "cut as those of queries"),  # sinks of all heads
    ("queries", SEQUENCE | {"sinks": 0}, "cut as those of queries"),
    ("queries", SEQUENCE | {"value": PART}, "no device has a row's result"),
    *(("whole", {name: PART}, "is summed before") for name in ("query", "key", "sinks")),
    *(("whole", {name: 3}, "each row is whole") for name in ("query", "key", "value")),
]
REFUSED_BACK = [  # and how the gradient comes
    ("whole", {}, 2, "results lie as"),
    ("queries", SEQUENCE, WHOLE, "results lie as"),
    ("a ring dealt", RING, WHOLE, "what is dealt lie"),
    ("whole", {"value": PART}, PART, "summed over it once more"),
    ("whole", BY_ROW, WHOLE, "both have to lie alike"),
    ("whole", {}, 3, "each row is whole"),
]


def types_of(how):
    given, gradient = operands()
    names = (*NAMES, "gradient")
    return [lies(x, how.get(of, WHOLE)) for of, x in zip(names, (*given, gradient), strict=True)]


@pytest.mark.parametrize("name, how, said", REFUSED, ids=str)
def test_each_refusal_has_a_program(name, how, said):
    with pytest.raises(Refused, match=said):
        Typed(name).forward(types_of(how)[:-1])


@pytest.mark.parametrize("name, how, gradient, said", REFUSED_BACK, ids=str)
def test_each_refusal_of_a_backward_has_a_program(name, how, gradient, said):
    *types, comes = types_of(how | {"gradient": gradient})
    on_types = Typed(name)
    on_types.forward(types)
    with pytest.raises(Refused, match=said):
        on_types.backward(comes)


def test_rows_that_are_dealt_meet_none_that_lie_plainly():
    """Nor those of another deal; no collective makes them whole."""
    made = Typed("a ring dealt")
    made.forward(types_of(RING)[:-1])
    (query, *_), (out, _) = made.given, made.made
    add, total = torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList

    def called(op, *args, shape=out.shape):
        return typed(op, TypedCall(args, {}, (shape,), frozenset({AXIS})))

    n = out.shape[2]
    plainly = replace(out, dims=(*out.dims[:2], ((n, (AXIS,)),), out.dims[3]))
    assert called(add, out, out).dims == out.dims
    for other in (plainly, replace(out, dims=(*out.dims[:2], whole(n), out.dims[3]))):
        with pytest.raises(Refused, match="both have to lie alike"):
            called(add, out, other)
    assert called(total, out, [2], shape=(*out.shape[:2], out.shape[3])).sums > {AXIS}
    text = replace(Setup.of(made.text), sees="right=0 left=4").text()
    with pytest.raises(
        Refused, match=r"lie as .*they are .* cut by deal of 12 rows over a by work, keys along a .right"
    ):
        typed(FORWARD, TypedCall(([query, *made.given[1:]], text), {}, (), frozenset({AXIS})))


def test_what_is_unknown_along_an_axis_is_refused_along_no_other():
    *types, _ = types_of(SEQUENCE)
    types[1] = types[1].opened([AXIS])
    found = Typed("queries dealt").forward(types)
    assert found.open == {AXIS} and not found.sums


def test_a_causal_mask_of_local_places_is_refused():
    """Torch's own kernel counts queries from the first that it has; without a mask by places it may."""
    given = types_of(SEQUENCE)[:3]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    shape = (*given[0].shape[:3], given[2].shape[3])

    def called(is_causal):
        return typed(kernel, TypedCall((*given, 0.0, is_causal), {}, (shape, shape[:3]), frozenset({AXIS})))

    assert [str(t) for t in called(False)] == ["S(2)@a"] * 2
    with pytest.raises(Refused, match="counts those of the whole"):
        called(True)
