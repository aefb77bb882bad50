"""Each rule of the certificate is a claim: on parts of real operands, what it says of the result is what is there."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.certificate.calls import RULES, TypedCall
from autopar.certificate.rules import typed
from autopar.certificate.types import Refused, Type, is_free, plain, whole
from tests.certificate.claims import AXIS, DevicesDiffer, combined
from tests.equality.functions import FUNCTIONS
from tests.language import drawn, gpt2, llama
from tests.models import FunctionModel
from tests.ops.audit import calls_of as calls_of_function
from tests.ops.audit import table

PARTS, TRIED = 2, 80
# they give nothing, or are told the shape of the whole
_LEFT_OUT = ("empty", "view", "reshape", "expand", "zeros", "ones", "full", "slice", "select", "narrow")


class Calls(TorchDispatchMode):
    """Every call of an ATen op with its operands as they were, one of each kind."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = function, str(spec), tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else str(x) for x in leaves)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        is_left_out = is_random or function._schema.is_mutable or any(word in str(function) for word in _LEFT_OUT)
        if key not in self.found and not is_left_out:
            self.found[key] = function, [copied(x) for x in leaves], spec
        return function(*args, **kwargs)


def copied(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def on_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else torch.device("meta") if isinstance(x, torch.device) else x


def ways(x):
    """How an operand may lie on one axis: whole, cut along a dim, a part of a sum."""
    if not isinstance(x, torch.Tensor):
        return [None]
    found = ["R", *(d for d, n in enumerate(x.shape) if n % PARTS == 0 and n)]
    return [*found, "P"] if x.is_floating_point() else found


def drawn_ways(leaves, dice):
    """A way for each operand: mostly whole, or cut where dims are as long as each other, or anything."""
    every, kind = list(map(ways, leaves)), dice.random()
    if kind > 0.7:
        return tuple(map(dice.choice, every))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    lengths = sorted({n for x in tensors for n in x.shape if n % PARTS == 0 and n})
    length = dice.choice(lengths) if lengths and kind > 0.3 else None
    found = []
    for x, known in zip(leaves, every, strict=True):
        cut = [d for d in known if isinstance(d, int) and x.shape[d] == length]
        is_other = dice.random() < 0.2
        found.append(dice.choice(known if is_other else cut or known[:1]))
    return tuple(found)


def parts(x, way):
    """The operand on each device."""
    if way is None or way == "R":
        return [copied(x) for _ in range(PARTS)]
    if way == "P":
        first = torch.randn_like(x)
        return [first, x - first]
    return [part.clone() for part in x.chunk(PARTS, way)]


def type_of(local, way):
    if not isinstance(local, torch.Tensor):
        return local
    if way == "P":
        return Type(plain(local.shape), sums=frozenset({AXIS}))
    dims = [((n, (AXIS,)),) if d == way else whole(n) for d, n in enumerate(local.shape)]
    return Type(tuple(dims))


def says(claim):
    return AXIS not in claim.open and not claim.is_zero and not any(map(is_free, claim.dims))


def wrong(function, leaves, spec, chosen):
    """What is wrong in the claim about a call whose operands lie as chosen; "" where nothing is, None without one."""
    local = list(zip(*(parts(x, way) for x, way in zip(leaves, chosen, strict=True)), strict=True))
    try:
        # shapes first: kernels of some ops read beyond operands that do not belong together
        args, kwargs = pytree.tree_unflatten([on_meta(x) for x in local[0]], spec)
        shapes = tuple(tuple(x.shape) for x in pytree.tree_leaves(function(*args, **kwargs)))
        args, kwargs = pytree.tree_unflatten([type_of(x, way) for x, way in zip(local[0], chosen, strict=True)], spec)
        made = typed(function, TypedCall(args, kwargs, shapes, frozenset({AXIS})))
        claims = [c.consistent() for c in pytree.tree_leaves(made, is_leaf=lambda x: isinstance(x, Type)) if c]
        if not any(map(says, claims)):
            return None
        calls = [pytree.tree_unflatten([copied(x) for x in one], spec) for one in local]
        outputs = [pytree.tree_leaves(function(*args, **kwargs)) for args, kwargs in calls]
    except (Refused, RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError):
        return None  # there are no such parts, or nothing is said of them
    args, kwargs = pytree.tree_unflatten([copied(x) for x in leaves], spec)
    truth = pytree.tree_leaves(function(*args, **kwargs))
    said = None
    for i, claim in enumerate(claims):
        if not says(claim) or i >= len(truth) or not isinstance(truth[i], torch.Tensor):
            continue
        if shapes[i] != outputs[0][i].shape:  # statistics that a device does not keep
            continue
        if claim.shape != outputs[0][i].shape:
            return f"output {i} as {claim}: {claim.shape}, and it is {tuple(outputs[0][i].shape)}"
        try:
            made = combined([of[i] for of in outputs], claim)
        except DevicesDiffer:
            return f"output {i} as {claim}: devices have other numbers"
        said = ""
        if made.shape != truth[i].shape:
            return f"output {i} as {claim}: {tuple(made.shape)}, and it is {tuple(truth[i].shape)}"
        seen = [x.dtype for x in (*leaves, made) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        near = max([1e-7, *(64 * torch.finfo(dtype).eps for dtype in seen)])
        near *= max([1.0, *(of[i].double().nan_to_num().abs().max().item() for of in outputs if of[i].numel())])
        if not torch.allclose(made.double(), truth[i].double(), rtol=near, atol=near, equal_nan=True):
            return f"output {i} as {claim}: off by {(made.double() - truth[i].double()).abs().max():.1e}"
    return said


def calls_of(model, batch):
    with Calls() as calls:
        out = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
    return list(calls.found.values())


def check(model, batch):
    """Every call of a step; returns the ops of which something was said."""
    torch.manual_seed(0)
    return held(calls_of(model, batch))


def held(calls):
    """Hold what is said of calls, with operands in many ways; returns the ops of which something was said."""
    said, errors, dice = set(), [], random.Random(0)
    for function, leaves, spec in calls:
        for chosen in dict.fromkeys(drawn_ways(leaves, dice) for _ in range(TRIED)):
            found = wrong(function, leaves, spec, chosen)
            if found:
                lies = ", ".join(str(way) for x, way in zip(leaves, chosen) if isinstance(x, torch.Tensor))
                errors.append(f"{function} of ({lies}): {found}")
            elif found is not None:
                said.add(str(function))
    assert not errors, "\n".join(dict.fromkeys(errors))
    return said


class Layers(nn.Module):
    """Norms in training and not, convolutions, pools, attention, an embedding, and losses."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(8, 4), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.GroupNorm(2, 4)])
        self.layer, self.mix, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, ids, y):
        x = self.conv(self.table(ids).permute(0, 3, 1, 2))
        for norm in self.norms:
            x = norm(x)
        x = nn.functional.max_pool2d(nn.functional.pad(x, (1, 1)), 2) + nn.functional.avg_pool2d(x, (2, 2))[:, :, :, :1]
        rows = self.layer(x.flatten(2).transpose(1, 2))
        rows = rows + nn.functional.scaled_dot_product_attention(*3 * (self.mix(rows).unsqueeze(1),)).squeeze(1)
        return nn.functional.cross_entropy(self.head(rows).flatten(0, 1), y)


def test_what_rules_say_of_layers_is_so():
    batch = {"ids": torch.randint(0, 8, (4, 4, 4)), "y": torch.randint(0, 6, (24,))}
    said = check(Layers().double(), batch)
    assert {"aten.native_batch_norm.default", "aten.convolution.default", "aten.embedding.default"} <= said


class Attention(nn.Module):
    """Attention of more keys than queries, with a mask or without; queries alone may be cut."""

    def __init__(self, **how):
        super().__init__()
        self.q, self.k, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.register_buffer("mask", torch.randn(4, 6))

    def forward(self, x, y):
        mask = {} if self.how else {"attn_mask": self.mask}
        k = self.k(y)
        return nn.functional.scaled_dot_product_attention(self.q(x), k, k.cos(), **mask, **self.how).square().sum()


@pytest.mark.parametrize("how", [{}, {"scale": 0.5}, {"is_causal": True}], ids=str)
def test_what_rules_say_of_attention_is_so(how):
    said = check(
        Attention(**how).double(), {"x": torch.randn(2, 2, 4, 4).double(), "y": torch.randn(2, 2, 6, 4).double()}
    )
    assert any("_scaled_dot_product" in op and "backward" in op for op in said)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_rules_say_of_a_language_model_is_so(name):
    model = gpt2(layers=1, vocabulary=32) if name == "gpt2" else llama(layers=1, vocabulary=32)
    assert len(check(model.double(), drawn(2, 8, 32))) > 15


def test_what_rules_say_of_functions_is_so():
    said = set()
    for function in FUNCTIONS.values():
        model = FunctionModel(function, 6, 6)
        said |= check(model, {"x": torch.randn(6, 6).double()})
    assert len(said & {*RULES}) > 40


@pytest.mark.parametrize("share", [pytest.param(k, marks=[pytest.mark.nightly] if k else []) for k in range(12)])
@pytest.mark.filterwarnings("ignore")
def test_what_rules_say_of_every_function_is_so(share):
    """Of torch's own table of operators."""
    said, errors = set(), []
    for entry in table()[share::12]:
        for args, kwargs in calls_of_function(entry, most=2):
            with Calls() as calls:
                try:
                    made = entry.op(*args, **kwargs)
                    values = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor) and x.requires_grad]
                    if values:
                        sum((x.abs() if x.is_complex() else x).sum() for x in values).backward()
                except (RuntimeError, TypeError):  # torch has no such call, or no gradient of it
                    continue
            try:
                said |= held(calls.found.values())
            except AssertionError as e:
                errors.append(str(e))
    assert not errors, "\n".join(dict.fromkeys(errors))
    assert len(said & {*RULES}) > 20
