"""The canonical ops: one line each, with the arguments by name and the spellings that mean the same.

An op is the torch function that computes it; `:T` marks its tensor operands, in the order in which rules name them. A spelling may pass its arguments in another order; `bind` gives them by name.
A function that is in no line becomes an op of its own name: it can be replayed, and has no rule until somebody writes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree


def identity(input: Tensor) -> Tensor:
    """A value with several consumers passes through here: one conversion serves them all."""
    return input


def to(input: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast."""
    return input.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A canonical op: `call(**arguments)` computes it."""

    name: str
    call: Callable[..., Any]
    signature: inspect.Signature | None = field(repr=False, default=None)   # None: an op by its own name, arguments by position

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; those that equal their default are left out."""
        if self.signature is None:
            return {**{f"_{i}": a for i, a in enumerate(args)}, **kwargs}
        bound = self.signature.bind(*args, **kwargs).arguments
        defaults = {n: p.default for n, p in self.signature.parameters.items() if p.default is not p.empty}
        return {n: v for n, v in bound.items() if not (n in defaults and _same(v, defaults[n]))}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    def operands(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The arguments that rules speak of, in order: tensors, numbers in a tensor's place, None where one is absent."""
        if self.signature is None:
            return [leaf for leaf in pytree.tree_leaves(list(arguments.values())) if isinstance(leaf, (fx.Node, Tensor))]
        return [arguments.get(n, p.default) for n, p in self.signature.parameters.items() if p.annotation is Tensor]

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the op on arguments by name."""
        if self.signature is None:
            positional = [v for n, v in arguments.items() if n[0] == "_" and n[1:].isdigit()]
            return self.call(*positional, **{n: v for n, v in arguments.items() if not (n[0] == "_" and n[1:].isdigit())})
        return self.call(**arguments)


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and type(value) is type(default) and value == default)


OPS: dict[str, Op] = {}
SPELLINGS: dict[Callable[..., Any], tuple[Op, inspect.Signature]] = {}


def op(name: str, call: Callable[..., Any], signature: str, *spellings: Callable[..., Any] | tuple[Callable[..., Any], str]) -> None:
    """Add an op. A spelling with a signature of its own is a pair; the names in it are the op's."""
    made = OPS[name] = Op(name, call, _signature(signature))
    SPELLINGS[call] = made, _signature(signature)
    for spelling in spellings:
        function, own = spelling if isinstance(spelling, tuple) else (spelling, signature)
        SPELLINGS[function] = made, _signature(own)


def _signature(text: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(compile(f"def f({text}): ...", "<vocabulary>", "exec", dont_inherit=True), {"T": Tensor}, namespace)   # our own text, never a user's
    return inspect.signature(namespace["f"])


T = Tensor
op("linear",     F.linear,          "input:T, weight:T, bias:T=None")
op("mm",         torch.mm,          "input:T, mat2:T", T.mm)
op("add",        torch.add,         "input:T, other:T, *, alpha=1", T.add, T.__add__, T.__radd__)
op("sub",        torch.sub,         "input:T, other:T, *, alpha=1", T.sub, T.__sub__, torch.subtract)
op("mul",        torch.mul,         "input:T, other:T", T.mul, T.__mul__, T.__rmul__, torch.multiply)
op("div",        torch.div,         "input:T, other:T, *, rounding_mode=None", T.div, T.__truediv__, torch.divide)
op("pow",        torch.pow,         "input:T, exponent:T", T.pow, T.__pow__)
op("neg",        torch.neg,         "input:T", T.neg, T.__neg__)
op("abs",        torch.abs,         "input:T", T.abs, T.__abs__)
op("exp",        torch.exp,         "input:T", T.exp)
op("log",        torch.log,         "input:T", T.log)
op("sqrt",       torch.sqrt,        "input:T", T.sqrt)
op("rsqrt",      torch.rsqrt,       "input:T", T.rsqrt)
op("gelu",       F.gelu,            "input:T, approximate='none'")
op("relu",       torch.relu,        "input:T", T.relu, (F.relu, "input, inplace=False"))
op("silu",       F.silu,            "input:T, inplace=False")
op("tanh",       torch.tanh,        "input:T", T.tanh, F.tanh)
op("sigmoid",    torch.sigmoid,     "input:T", T.sigmoid, F.sigmoid)
op("sum",        torch.sum,         "input:T, dim=None, keepdim=False, *, dtype=None", T.sum)
op("mean",       torch.mean,        "input:T, dim=None, keepdim=False, *, dtype=None", T.mean)
op("layer_norm", F.layer_norm,      "input:T, normalized_shape, weight:T=None, bias:T=None, eps=1e-05")
op("mse_loss",   F.mse_loss,        "input:T, target:T, size_average=None, reduce=None, reduction='mean', weight=None")
op("to",         to,                "input:T, dtype")
op("identity",   identity,          "input:T")

_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")


def lookup(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, dict[str, Any]]:
    """The canonical op of one call, and its arguments by name."""
    found = SPELLINGS.get(function)
    if found is not None:
        canonical, spelled = found
        try:
            named = spelled.bind(*args, **kwargs).arguments
        except TypeError:                                      # an overload that the line does not cover
            return _by_own_name(function, args, kwargs)
        assert canonical.signature is not None
        names = canonical.signature.parameters
        if all(n in names or _same(v, spelled.parameters[n].default) for n, v in named.items()):
            return canonical, canonical.bind((), {n: v for n, v in named.items() if n in names})
    return _by_own_name(function, args, kwargs)


def _by_own_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, dict[str, Any]]:
    name = (resolve_name(function) or getattr(function, "__qualname__", repr(function))).removeprefix("torch.")
    while OPS.setdefault(name, Op(name, function)).call is not function:     # another function of the same name
        name += "'"
    made = OPS[name]
    return made, made.bind(args, kwargs)


def is_in_place(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Does this spelling write to its operand?"""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True or kwargs.get("out") is not None
