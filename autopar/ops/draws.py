"""Random ops: each device draws the numbers of its own positions, as a function of their places in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions.dirichlet import _Dirichlet

from autopar.ops.entry import FILLED, OPS, Apply, Op, T, each, op, translates
from autopar.ops.factories import filled, with_dtype
from autopar.ops.local import Form, Here, OpCall, local_output, places, places_of_output
from autopar.runtime import forms
from autopar.runtime.private import standard_gamma


def drawn(name: str, first: float | None = None) -> Callable[..., Tensor]:
    """x.uniform_(...) and the like as functions: a new tensor like x, filled with draws.

    `first` is torch's default of the first parameter.
    """

    def call(input: Tensor, a: float | None = None, b: float | None = None) -> Tensor:
        return getattr(torch.empty_like(input), name)(
            *(v for v in (first if a is None and b is not None else a, b) if v is not None)
        )

    call.__name__ = name
    return call


def bernoulli(input: Tensor, p: float | Tensor | None = None) -> Tensor:
    """Ones with probability `p`, or with the probabilities in `input`."""
    return torch.bernoulli(input) if p is None else torch.empty_like(input).bernoulli_(p)


def normal_filled(size: Sequence[int], mean: float, std: float, dtype: torch.dtype | None = None) -> Tensor:
    """torch.normal of two numbers: draws of one distribution in a new tensor."""
    # torch.normal moves the CPU's generator where it only gives a meta tensor, as planning asks of every op
    return torch.empty(tuple(size), dtype=dtype).normal_(mean, std)


def randint(size: Sequence[int], low: int, high: int, dtype: torch.dtype | None = None) -> Tensor:
    """Integers from low to high - 1 in a new tensor."""
    return torch.randint(low, high, tuple(size), dtype=dtype)


def randperm(n: int, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers below n in a random order."""
    return torch.randperm(n, dtype=dtype or torch.int64)


def dirichlet(input: Tensor) -> Tensor:
    """Draws of Dirichlet distributions along the last dim, as torch.distributions makes them."""
    return _Dirichlet.apply(input)


def dropped(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of dropout, with its mask by position."""
    return forms.dropout_by_position, {
        "input": kwargs["input"],
        **places_of_output(here, call),
        "p": kwargs.get("p", 0.5),
    }


def channels_dropped(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of dropout of channels: one draw per channel.

    Without a batch dim, where torch has rules of its own, channels come first.
    """
    shape = call.outputs[0].shape
    name = call.op
    leading = 1 if (name, len(shape)) in (("dropout1d", 2), ("dropout3d", 4)) else 2
    if name == "alpha_dropout":
        leading = len(shape)
    form = forms.alpha_dropout_by_position if "alpha" in name else forms.channel_dropout_by_position
    return form, {
        "input": kwargs["input"],
        **places(here, call, here.leaves(), shape[:leading]),
        "p": kwargs.get("p", 0.5),
    }


def filled_with_draws(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a new tensor of draws, from the distribution that the op's name says."""
    made = call.outputs[0]
    kind = call.op.removesuffix("_like")
    numbers = {_NUMBERS.get(k, k): v for k, v in kwargs.items() if k in ("a", "b") or k in _NUMBERS}
    return forms.drawn_by_position, {
        "kind": _KINDS.get(kind, kind),
        **places_of_output(here, call),
        "local": local_output(here, call),
        "dtype": made.torch_dtype,
        **numbers,
    }


def normal(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of normal draws with a mean and a standard deviation for each element."""
    return forms.normal_by_position, {
        **kwargs,
        **places_of_output(here, call),
        "local": local_output(here, call),
        "dtype": call.outputs[0].torch_dtype,
    }


def permutation(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a permutation: every device makes all of it."""
    return forms.permutation_by_position, {
        "n": kwargs["n"],
        "key": here.random_key,
        "op": call.random,
        "dtype": call.outputs[0].torch_dtype,
    }


def of_each(form: Callable[..., Any]) -> Callable[..., Form]:
    """A local form that draws for each element of its operand."""

    def made(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
        numbers = {k: v for k, v in kwargs.items() if k not in ("training", "inplace")}
        return form, {**numbers, **places_of_output(here, call)}

    return made


def picked(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of multinomial draws, by position of the row."""
    return forms.multinomial_by_position, {
        **kwargs,
        **places(here, call, here.lies(0), call.arguments["input"].shape),
    }


@translates(torch.randint)
def whole_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read calls randint(high, size) and randint(low, high, size)."""
    return OPS["randint"], {"size": tuple(result.shape), **_bounds(*args, **kwargs), "dtype": result.dtype}


@translates(torch.randint_like)
def whole_numbers_like(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read calls randint_like(x, high) and randint_like(x, low, high)."""
    said = {n: v for n, v in kwargs.items() if n != "input"}
    bounds = _bounds(*(args if "input" in kwargs else args[1:]), **said)
    return OPS["randint"], {"size": tuple(result.shape), **bounds, "dtype": result.dtype}


def _bounds(*bounds: Any, low: int = 0, high: int | None = None, **how: Any) -> dict[str, Any]:
    """The bounds of random integers, of which the first may be left out."""
    numbers = [int(b) for b in bounds if isinstance(b, Integral)]
    if len(numbers) == 2:
        low, high = numbers
    elif numbers and high is None:
        high = numbers[0]
    elif numbers:
        low = numbers[0]
    return {"low": low, "high": high}


@translates(torch.normal)
def normal_of_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read calls torch.normal(mean, std, size) of two numbers; None where one of them is a tensor.

    A call with a tensor has an entry of its own.
    """
    if any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
        return None
    mean, std = (args[i] if len(args) > i else kwargs[n] for i, n in enumerate(("mean", "std")))
    return OPS["normal_filled"], {"size": tuple(result.shape), "mean": mean, "std": std, "dtype": result.dtype}


def in_training_only(op: Op, arguments: dict[str, Any], result: Any) -> tuple[Op, dict[str, Any]]:
    """Replace rrelu outside training by leaky_relu, with the middle of its slopes."""
    if arguments.get("training"):
        return op, arguments
    slope = (arguments.get("lower", 1 / 8) + arguments.get("upper", 1 / 3)) / 2
    return OPS["leaky_relu"], {"input": arguments["input"], "negative_slope": slope}


FILLED |= {
    "uniform_": ("uniform_like", ("from", "to")),
    "normal_": ("normal_like", ("mean", "std")),
    "exponential_": ("exponential_like", ("lambd",)),
    "log_normal_": ("log_normal_like", ("mean", "std")),
    "cauchy_": ("cauchy_like", ("median", "sigma")),
    "geometric_": ("geometric_like", ("p",)),
    "random_": ("random_like", ("from", "to")),
}
_KINDS = {"rand": "uniform", "randn": "normal", "normal_filled": "normal", "randint": "random"}
_NUMBERS = {"low": "a", "high": "b", "mean": "a", "std": "b"}  # names of the two numbers of a draw
ONE = "... -> ..."
DRAWN: dict[str, Any] = dict(form=filled_with_draws, draws=True)
op(
    "dropout",
    F.dropout,
    "input:T, p=0.5, training=True, inplace=False",
    (torch.dropout, "input, p, training"),
    rule=ONE,
    linear="x",
    form=dropped,
    draws=True,
    keeps="",
    makes=dict(cuda="points", cpu="points*itemsize", emitted="points"),  # a mask of bytes; on a CPU the scaled noise
    # bits: three of 32 at a time, before the mask and the result are there
    work=("points*Max(0, 11 - itemsize)", "0"),
)
CHANNELS: dict[str, Any] = dict(homes=[F], rule=ONE, form=channels_dropped, draws=True)
each("dropout1d dropout2d dropout3d", "input:T, p=0.5, training=True, inplace=False", linear="x", **CHANNELS)
each("alpha_dropout feature_alpha_dropout", "input:T, p=0.5, training=False, inplace=False", **CHANNELS)
op(
    "bernoulli",
    bernoulli,
    "input:T, p:T=None",
    (torch.bernoulli, T.bernoulli, "input, p=None"),
    rule="..., ... -> ...",
    form=of_each(forms.bernoulli_by_position),
    draws=True,
    overwrites=True,
)
for name, first in dict(uniform=0.0, normal=0.0, exponential=None, log_normal=1.0, cauchy=0.0, random=0).items():
    op(f"{name}_like", drawn(f"{name}_", first), "input:T, a=None, b=None", rule=ONE, overwrites=True, **DRAWN)
op("geometric_like", drawn("geometric_"), "input:T, a", rule=ONE, overwrites=True, **DRAWN)
for name in ("rand", "randn"):
    op(
        name,
        getattr(torch, name),
        "size:SHAPE, *, dtype=None",
        (getattr(torch, name), "*size, dtype=None, **how"),
        rule=filled,
        serves="*",
        keeps="",
        settle=with_dtype,
        **DRAWN,
    )
    op(
        f"{name}_like",
        getattr(torch, f"{name}_like"),
        "input:T, *, dtype=None",
        (getattr(torch, f"{name}_like"), "input, *, dtype=None, **how"),
        rule=ONE,
        **DRAWN,
    )
op(
    "multinomial",
    torch.multinomial,
    "input:T, num_samples, replacement=False",
    (torch.multinomial, T.multinomial, "input, num_samples, replacement=False, generator=None"),
    rule="... c! -> ... n!",
    form=picked,
    draws=True,
)
op(
    "normal",
    torch.normal,
    "mean:T, std:T=1.0",
    (torch.normal, "mean, std=1.0, generator=None"),
    rule="..., ... -> ...",
    form=normal,
    draws=True,
)
op("normal_filled", normal_filled, "size:SHAPE, mean, std, *, dtype=None", rule=filled, serves="*", **DRAWN)
op("randint", randint, "size:SHAPE, low, high, *, dtype=None", rule=filled, serves="*", **DRAWN)
op(
    "randperm",
    randperm,
    "n, *, dtype=None",
    (torch.randperm, "n, *, dtype=None, **how"),
    rule="nothing -> n!",
    form=permutation,
    draws=True,
    settle=with_dtype,
)
op(
    "poisson",
    torch.poisson,
    "input:T",
    (torch.poisson, "input, generator=None"),
    rule=ONE,
    form=of_each(forms.poisson_by_position),
    draws=True,
)
op(
    "standard_gamma",
    standard_gamma,
    "input:T",
    (standard_gamma, "input, generator=None"),
    rule=ONE,
    form=of_each(forms.gamma_by_position),
    draws=True,
)
op(
    "dirichlet",
    dirichlet,
    "input:T",
    Apply(_Dirichlet),
    rule="... c! -> ... c!",
    form=of_each(forms.dirichlet_by_position),
    draws=True,
)
op(
    "rrelu",
    F.rrelu,
    "input:T, lower=0.125, upper=1/3, training=False, inplace=False",
    (torch.rrelu, "input, lower=0.125, upper=1/3, training=False, generator=None"),
    rule=ONE,
    form=of_each(forms.rrelu_by_position),
    draws=True,
    settle=in_training_only,
)
