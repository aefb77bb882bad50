"""The table of canonical ops says of each function what is true: its argument names, its defaults, its spellings."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from torch import Tensor

from autopar.ops.entry import OPS, SPELLINGS
from autopar.ops.lookup import lookup

TABLE = sorted(name for name, op in OPS.items() if op.signature is not None and not name.endswith("_updating"))


@pytest.mark.parametrize("name", TABLE)
def test_an_op_takes_its_arguments_by_the_names_in_the_table(name):
    """Whatever it makes of these, it does not complain of a name."""
    op, x = OPS[name], torch.randn(2, 3, 4, 4)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # torch tells its two forms by the types of all arguments
        assert [*op.signature.parameters] == [a.name for a in getattr(torch.ops.aten, name).input._schema.arguments]
        return
    arguments = {
        n: x if p.annotation is Tensor else (2, 3) if n == "size" else p.default if p.default is not p.empty else 1
        for n, p in op.signature.parameters.items()
    }
    arguments |= {"tensors": [x]} if "tensors" in arguments else {}
    try:
        op.run(arguments)
    except Exception as e:
        assert not any(word in str(e) for word in ("keyword", "unexpected", "invalid combination", "missing")), e


@pytest.mark.parametrize("name", TABLE)
def test_an_op_has_the_defaults_of_the_table(name):
    """An argument that equals its default is not written down, so the two must agree."""
    op = OPS[name]
    said = {n: p.default for n, p in op.signature.parameters.items() if p.default is not p.empty}
    if isinstance(op.call, types.FunctionType):
        real = {n: p.default for n, p in inspect.signature(op.call).parameters.items()}
        if "max_pool" not in name:  # torch hides their signature behind *args
            assert {n: real[n] for n in said} == said
        return
    packet = getattr(torch.ops.aten, name, None)
    schemas = (
        [
            {
                "input" if a.name == "self" else a.name: a.default_value if a.has_default_value() else None
                for a in getattr(packet, o)._schema.arguments
            }
            for o in packet.overloads()
        ]
        if packet
        else []
    )

    def agree(real, default) -> bool:
        return (
            real == default
            or (real in (None, []) and default is None)
            or (isinstance(real, list) and (tuple(real) == default or all(v == default for v in real)))
        )

    assert (
        not schemas
        or not said
        or any(all(n in real and agree(real[n], d) for n, d in said.items()) for real in schemas)
    )


def test_spellings_share_an_op():
    x = torch.randn(2, 3)
    for function, args in ((torch.add, (x, 1)), (Tensor.add, (x, 1)), (Tensor.__radd__, (x, 1))):
        assert lookup(function, args, {}) == (OPS["add"], {"input": x, "other": 1})
    assert lookup(Tensor.view, (x, 3, 2), {}, x.view(3, 2)) == (OPS["view"], {"input": x, "size": (3, 2)})
    assert lookup(torch.flatten, (x,), {}, x.flatten()) == (OPS["view"], {"input": x, "size": (6,)})
    assert lookup(torch.ops.aten.mul.Tensor, (x, x), {})[0] is OPS["mul"]
    assert len({op.name for op, _ in SPELLINGS.values()}) == len(TABLE)
