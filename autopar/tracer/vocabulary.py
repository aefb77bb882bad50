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


def view(input: Tensor, size: tuple[int, ...]) -> Tensor:
    """The same numbers in another shape: view, reshape, flatten, squeeze, unsqueeze."""
    return input.reshape(size)


def contiguous(input: Tensor) -> Tensor:
    """The same numbers in memory order."""
    return input.contiguous()


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A range of one dim."""
    return input.narrow(dim, start, length)


def split(input: Tensor, sections: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """Ranges of one dim, end to end."""
    return input.split(sections, dim)


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
        found = [arguments.get(n, p.default) for n, p in self.signature.parameters.items() if p.annotation is Tensor]
        return [leaf for value in found for leaf in (value if isinstance(value, (list, tuple)) else [value])]

    def local(self, annotation: Any) -> str | None:
        """The name of the argument that is a shape (`:SHAPE`) or a list of sizes (`:SIZES`) of the output, if there is one."""
        return next((n for n, p in self.signature.parameters.items() if p.annotation is annotation), None) if self.signature else None

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the op on arguments by name."""
        if self.signature is None:
            positional = [v for n, v in arguments.items() if n[0] == "_" and n[1:].isdigit()]
            return self.call(*positional, **{n: v for n, v in arguments.items() if not (n[0] == "_" and n[1:].isdigit())})
        return self.call(**arguments)


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and type(value) is type(default) and value == default)


class SHAPE:
    """Marks an argument that is the output's shape: on a device it is the local one."""


class SIZES:
    """Marks an argument that lists the outputs' sizes along `dim`."""


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
    exec(compile(f"def f({text}): ...", "<vocabulary>", "exec", dont_inherit=True), {"T": Tensor, "SHAPE": SHAPE, "SIZES": SIZES}, namespace)   # our own text, never a user's
    return inspect.signature(namespace["f"])


T = Tensor
op("linear",     F.linear,          "input:T, weight:T, bias:T=None")
op("mm",         torch.mm,          "input:T, mat2:T", T.mm)
op("matmul",     torch.matmul,      "input:T, other:T", T.matmul, T.__matmul__, torch.bmm, T.bmm)
op("addmm",      torch.addmm,       "input:T, mat1:T, mat2:T, *, beta=1, alpha=1", T.addmm)
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
op("cos",        torch.cos,         "input:T", T.cos)
op("sin",        torch.sin,         "input:T", T.sin)
op("eq",         torch.eq,          "input:T, other:T", T.eq, T.__eq__)
op("ne",         torch.ne,          "input:T, other:T", T.ne, T.__ne__)
op("gelu",       F.gelu,            "input:T, approximate='none'")
op("relu",       torch.relu,        "input:T", T.relu, (F.relu, "input, inplace=False"))
op("silu",       F.silu,            "input:T, inplace=False")
op("tanh",       torch.tanh,        "input:T", T.tanh, F.tanh)
op("sigmoid",    torch.sigmoid,     "input:T", T.sigmoid, F.sigmoid)
op("dropout",    F.dropout,         "input:T, p=0.5, training=True, inplace=False")
op("sum",        torch.sum,         "input:T, dim=None, keepdim=False, *, dtype=None", T.sum)
op("mean",       torch.mean,        "input:T, dim=None, keepdim=False, *, dtype=None", T.mean)
op("softmax",    torch.softmax,     "input:T, dim, dtype=None", T.softmax, (F.softmax, "input, dim=None, _stacklevel=3, dtype=None"))
op("layer_norm", F.layer_norm,      "input:T, normalized_shape, weight:T=None, bias:T=None, eps=1e-05")
op("rms_norm",   F.rms_norm,        "input:T, normalized_shape, weight:T=None, eps=None")
op("mse_loss",   F.mse_loss,        "input:T, target:T, size_average=None, reduce=None, reduction='mean', weight=None")
op("cross_entropy", F.cross_entropy, "input:T, target:T, weight:T=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0")
op("embedding",  F.embedding,       "input:T, weight:T, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False")
op("scaled_dot_product_attention", F.scaled_dot_product_attention,
                                    "query:T, key:T, value:T, attn_mask:T=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False")
op("view",       view,              "input:T, size:SHAPE", (T.view, "input, *size"), (T.reshape, "input, *size"), (torch.reshape, "input, size"), (T.flatten, "input, *size, **by"),
                                    (torch.flatten, "input, *size, **by"), (T.unsqueeze, "input, size"), (torch.unsqueeze, "input, size"), (T.squeeze, "input, *size"),
                                    (torch.squeeze, "input, *size"), (T.unflatten, "input, *size, **by"))
op("transpose",  torch.transpose,   "input:T, dim0, dim1", T.transpose)
op("permute",    torch.permute,     "input:T, dims", (T.permute, "input, *dims"))
op("t",          torch.t,           "input:T", T.t)
op("detach",     torch.detach,      "input:T", T.detach)
op("contiguous", contiguous,        "input:T", T.contiguous)
op("split",      split,             "input:T, sections:SIZES, dim=0", (T.split, "input, sections, dim=0"), (torch.split, "input, sections, dim=0"), (T.chunk, "input, sections, dim=0"),
                                    (torch.chunk, "input, sections, dim=0"))
op("cat",        torch.cat,         "tensors:T, dim=0", torch.concat)
op("narrow",     narrow,            "input:T, dim, start, length")
op("select",     torch.select,      "input:T, dim, index")
op("pad",        F.pad,             "input:T, pad, mode='constant', value=None")
op("to",         to,                "input:T, dtype")
op("identity",   identity,          "input:T")

CASTS = frozenset({T.to, T.float, T.double, T.half, T.bfloat16, T.type_as, T.type, T.long, T.int, T.bool})
RANDOM = frozenset({"dropout", "scaled_dot_product_attention"})    # their draws are recorded with their probability, and made by position

_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")


def lookup(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any = None) -> tuple[Op, dict[str, Any]]:
    """The canonical op of one call, and its arguments by name; shapes and dtypes are those of the result."""
    if function in CASTS and isinstance(result, Tensor):
        return OPS["to"], {"input": args[0], "dtype": result.dtype}
    if getattr(function, "__name__", "") == "__get__":
        return _attribute(function.__self__.__name__, args[0])                                    # type: ignore[attr-defined]
    if function in (T.view, T.reshape) and any(isinstance(a, torch.dtype) for a in args):
        return _by_own_name(function, args, kwargs)
    canonical, arguments = _lookup(function, args, kwargs)
    if arguments.get("dim", 0) in ((), []):                    # sum over no dims is torch's word for all
        del arguments["dim"]
    if canonical.name == "softmax" and arguments.get("dim") is None:
        arguments["dim"] = 0 if args[0].dim() in (0, 1, 3) else 1                                 # as torch guesses
    if (shape := canonical.local(SHAPE)) is not None:
        arguments[shape] = tuple(result.shape)
    if (sizes := canonical.local(SIZES)) is not None:
        arguments[sizes] = tuple(part.shape[arguments.get("dim", 0)] for part in result)
    if "dims" in arguments and len(arguments["dims"]) == 1 and isinstance(arguments["dims"][0], (tuple, list)):
        arguments["dims"] = tuple(arguments["dims"][0])        # permute((0, 2, 1)) and permute(0, 2, 1)
    return canonical, arguments


def _attribute(name: str, tensor: Tensor) -> tuple[Op, dict[str, Any]]:
    """A tensor that is read off another: x.T, x.mT, x.data."""
    if name in ("T", "mT"):
        dims = tuple(range(tensor.dim()))
        return OPS["permute"], {"input": tensor, "dims": dims[::-1] if name == "T" else (*dims[:-2], *dims[:-3:-1])}
    if name == "data":
        return OPS["detach"], {"input": tensor}
    raise KeyError(name)


def _lookup(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, dict[str, Any]]:
    found = SPELLINGS.get(function)
    if found is not None:
        canonical, spelled = found
        try:
            named = spelled.bind(*args, **kwargs).arguments
        except TypeError:                                      # an overload that the line does not cover
            return _by_own_name(function, args, kwargs)
        assert canonical.signature is not None
        names = canonical.signature.parameters
        if (shape := canonical.local(SHAPE)) is not None:      # whatever was said, the shape of the result says it all
            return canonical, {"input": named["input"], shape: None}
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
